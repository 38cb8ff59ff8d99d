"""aot build."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from ...artifacts.bundle_file import open_bundle
from ...artifacts.errors import HostError, InputError
from ...artifacts.limits import printable
from ...artifacts.records import Problem
from ...kernels.chips import chip_named
from ...runtime import settings
from ..build.build import build as build_bundles
from ..build.build import build_measured
from ..build.options import BuildOptions, BuildReport, Built, ModelCells
from ..choose.bundle import Ships
from ..compile.shipped import Shipped
from ..journal.file import OtherJournal
from ..plan.families import CONFIG_LIMIT, Pool
from ..plan.targets import parse_sm
from ..process.gpus import native_sm
from ..process.output import DEFAULT_NAME
from ..tune.tuner import Entrants, NoGpu, Outcome, TuneObservers
from .options import as_json, cache_of, directory, file_path, load, print_json, quiet, what_to_build, workers
from .progress import Progress
from .table import duration, echo, next_steps, quoted, size, table, tell
from .tuning import TuneProgress, budget_and_gpus, check_executor, ordinals, outcome_text, tune


class Sectioned(click.Command):
    """A command whose help has sections: heading -> names of its options; other options come last."""

    def __init__(self, *args: Any, sections: Mapping[str, Sequence[str]], **named: Any) -> None:
        super().__init__(*args, **named)
        self._sections = sections

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Like click's, with a list for each section."""
        rows = {option.name: row for option in self.get_params(ctx) if (row := option.get_help_record(ctx)) is not None}
        for title, names in self._sections.items():
            with formatter.section(title):
                formatter.write_dl([rows.pop(name) for name in names if name in rows])
        if rows:
            with formatter.section("Other options"):
                formatter.write_dl(list(rows.values()))


@click.command(
    cls=Sectioned,
    sections={
        "What to build": ("models", "sm", "ops", "configs", "candidates", "ignore_installed", "new_weights"),
        "Where it goes": ("out", "name"),
        "Measuring": ("measuring", "journal", "budget", "gpus", "executor"),
        "Compiling": ("compile_all", "workers", "cache_dir", "no_cache"),
        "Output": ("verbose", "quiet", "as_json"),
    },
)
@what_to_build
@click.option(
    "--out",
    default=Path("bundles"),
    show_default=True,
    metavar="DIR",
    type=directory(file_okay=True),
    help="Directory of the bundles.",
)
@click.option("--name", default=DEFAULT_NAME, show_default=True, help="The files are NAME-smNN.msgpack.")
@workers
@click.option(
    "--measure",
    "measuring",
    type=click.Choice(("auto", "no", "only")),
    default="auto",
    show_default=True,
    help="auto: measure if this machine has the GPU. no: measure nothing; a cost model chooses where --journal FILE "
    "has no times. only: fail if the GPU is not here.",
)
@click.option(
    "--journal",
    "-J",
    metavar="FILE",
    type=file_path,
    help="Measured times, of aot measure or of this build, which adds to them.  [default: NAME-smNN.journal next to "
    "the bundle]",
)
@click.option(
    "--candidates",
    metavar="FILE",
    type=file_path,
    help="Choose among the variants of this file of aot compile; compile nothing.",
)
@click.option(
    "--configs",
    type=click.IntRange(4, CONFIG_LIMIT),
    default=CONFIG_LIMIT,
    show_default=True,
    help="Keep at most this many configs of each op and dtype. Fewer: a smaller, slower bundle.",
)
@budget_and_gpus
@click.option("--compile-all", is_flag=True, help="Compile every kernel, also those that ship compiled.")
@click.option(
    "--ignore-installed", is_flag=True, help="Take over no measured choices from installed bundles; model them."
)
@click.option(
    "--new-weights",
    is_flag=True,
    help="Add the row kernels that quantise, prepare and restore quantised weights. Those for sm_90 ship.",
)
@click.option("--verbose", "-v", is_flag=True, help="List every variant that fails or is pruned, with the reason.")
@quiet
@as_json
def build(
    models: tuple[str, ...],
    sm: str,
    ops: str | None,
    cache_dir: Path | None,
    no_cache: bool,
    out: Path,
    name: str,
    workers: int | None,
    measuring: str,
    journal: Path | None,
    candidates: Path | None,
    configs: int,
    budget: float | None,
    gpus: str | None,
    executor: str | None,
    compile_all: bool,
    ignore_installed: bool,
    new_weights: bool,
    verbose: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Build bundles of the kernels that models need, one for each GPU capability, and measure them if the GPU is here.

    Kernels that ship compiled are used. Others are compiled, if a supported Triton is installed (pip install
    'pretuned[compile]'). No GPU is needed: without one, measured choices are taken over from installed bundles, and a
    cost model makes the others. Results are kept: repeat an interrupted build and it continues.

    \b
    Examples:
      aot build --models models.txt --sm 80,90
      aot build --models models.txt                      # for this machine's GPU
      aot build --models "mistralai/Mixtral-8x7B-v0.1 tp=1,2,4" --sm 9.0 --out /srv/bundles
      aot build --models "shape:E=64,H=2048,I=1024,k=8" --sm 120 --name mine
      aot build --models /models/my-checkpoint --sm 90   # a directory with a config.json
      aot build --models models.txt --budget 1h          # on a GPU machine: measure for an hour at most
      aot build --models models.txt --sm 90 --executor dask://scheduler:8786   # measure on a cluster
      aot build --models models.txt --sm 90 --candidates candidates.msgpack --journal h200.journal
    """
    plan, sms, notes = load(models, sm if candidates is None else _sm_of(candidates, sm), ops)
    cache = cache_of(cache_dir, no_cache)
    measured_sms, remarks = _measured_sms(measuring, sms, journal, executor)
    if measured_sms:
        check_executor(executor, gpus)
    notes = (*notes, *remarks)
    silent = as_json or quiet
    if cache is None and not no_cache and not silent:
        echo("note: no home directory, so nothing that is compiled is kept; name a place with --cache-dir", err=True)
    if not silent:
        tell(notes)
    must = measuring == "only" or executor is not None
    tuner = functools.partial(_tune, budget, executor, ordinals(gpus), must)
    options = BuildOptions(
        out,
        name,
        workers,
        cache,
        journal=journal,
        measure=measured_sms,
        modelled=measuring == "no" and journal is None,
        configs=configs,
        tune=tuner,
        take_over=not ignore_installed,
        space=Pool(new_weights=new_weights),
        shipped=(lambda sm: Shipped()) if compile_all else Shipped.in_packages,
    )
    with Progress(silent, verbose, notes=not quiet) as progress, TuneProgress(silent, budget, progress.pause) as second:
        observers = progress.observers(second.observers())
        if candidates is not None:
            report = build_measured(plan, candidates, options, observers)
        else:
            report = build_bundles(plan, sms, options, observers)
    if as_json:
        print_json({**report.to_dict(), "notes": [*notes, *report.notes]})
        return
    if quiet:
        echo("\n".join(str(bundle.path) for bundle in report.bundles))
        return
    tell(report.notes)
    _show(report, out, verbose, _spelled(models, ops))


def _sm_of(candidates: Path, sm: str) -> str:
    """The capability of the candidates, which --sm may repeat."""
    with open_bundle(candidates) as bundle:
        has = bundle.target.sm
    if sm != "native" and parse_sm(sm, lambda: None) != (has,):
        raise InputError(f"--sm {sm}: the candidates '{candidates}' are for sm_{has}")
    return str(has)


def _measured_sms(
    measuring: str, sms: Sequence[int], journal: Path | None, executor: str | None
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The capabilities to measure, and notes for the user."""
    if executor is not None and measuring == "no":
        raise InputError("--executor is to measure on, and --measure no forbids it: choose")
    if journal is not None and len(sms) > 1:
        raise InputError("--journal: a journal is of one capability; name one with --sm")
    if measuring == "no":
        return (), ()
    if settings.read(os.environ).disable_autotune:
        if measuring == "only":
            raise InputError("PRETUNED_DISABLE_AUTOTUNE forbids measuring, --measure only demands it: choose")
        return (), ("PRETUNED_DISABLE_AUTOTUNE is set: nothing is measured",)
    if executor is not None:
        return tuple(sms), ()
    here = native_sm()
    if measuring == "only":
        missing = [sm for sm in sms if sm != here]
        if missing:
            has = "there is no GPU here" if here is None else f"this machine's GPU is sm_{here}"
            raise HostError(f"--measure only: sm_{missing[0]} can't be measured, {has}")
    return tuple(sm for sm in sms if sm == here), ()


def _tune(
    budget_s: float | None,
    executor: str | None,
    gpus: Sequence[int] | None,
    must: bool,
    problems: Mapping[Problem, Sequence[int]],
    candidates: Path,
    journal: Path,
    ships: Ships,
    entrants: Entrants,
    observers: TuneObservers,
) -> Outcome | None:
    how = {"budget_s": budget_s, "ships": ships, "entrants": entrants}
    try:
        return tune(executor, gpus, problems, candidates, journal, observers=observers, **how)
    except (NoGpu, OtherJournal) as error:
        if must:
            raise
        observers.on_note(f"note: nothing is measured: {error}")
        return None


def _spelled(models: Sequence[str], ops: str | None) -> str:
    """The options that name what to build, as the user gave them."""
    words = [word for model in models for word in ("--models", model)] + (["--ops", ops] if ops else [])
    return " ".join(printable(shlex.quote(word)) for word in words)


def _show(report: BuildReport, out: Path, verbose: bool, wanted: str) -> None:
    head = (
        "bundle",
        "for",
        "models",
        "problems",
        "measured",
        "modelled",
        "variants",
        "shipped",
        "compiled",
        "cached",
        "pruned",
        "failed",
        "size",
        "time",
    )
    rows = [
        (
            str(bundle.path) + (" (unchanged)" if bundle.unchanged else ""),
            bundle.target,
            bundle.models,
            bundle.problems,
            _measured(bundle),
            bundle.modelled,
            bundle.variants,
            bundle.shipped,
            bundle.compiled,
            bundle.cached,
            bundle.pruned,
            bundle.failed,
            size(bundle.size_bytes),
            duration(bundle.seconds),
        )
        for bundle in report.bundles
    ]
    echo(table(head, rows, "<<" + ">" * 12))
    for bundle in report.bundles:
        if verbose:
            for dropped in bundle.dropped:
                echo(f"{bundle.target}: {dropped.kind}: {dropped.spec}: {dropped.reason}")
        elif bundle.failed:
            echo(f"{bundle.target}: {bundle.lost}; -v lists them")
    bundles = report.bundles
    if any(bundle.shipped for bundle in bundles) and not any(bundle.compiled or bundle.cached for bundle in bundles):
        echo("all kernels of these bundles ship compiled (--compile-all compiles them here)")
    first, folder = quoted(report.bundles[0].path), quoted(out.resolve())
    echo("")
    for bundle in report.bundles:
        if bundle.tuned is not None:
            echo(outcome_text(bundle.tuned))
        echo(f"{bundle.target}: {_origin(bundle)}")
        for model in bundle.by_model if bundle.taken_over else ():
            echo(f"  {model.name}: {_ships(model)}")
    unmeasured = [bundle.target.sm for bundle in report.bundles if bundle.modelled and bundle.tuned is None]
    echo(
        next_steps(
            ("look inside", f"aot inspect {first}"),
            ("in a Dockerfile", f"COPY {_in_context(out)}"),
            ("or right here", f"export PRETUNED_BUNDLES={folder}"),
            ("then", "pretuned.grouped_gemm(x, w, m_sizes)"),
            *(("measure", f"aot build {wanted} --sm {sm} # on a machine with an sm_{sm} GPU") for sm in unmeasured),
        )
    )
    for bundle in report.bundles:
        if bundle.comparison is not None:
            echo(f"{bundle.target}: {bundle.comparison}")


def _measured(bundle: Built) -> str:
    """How many choices were measured, and the GPUs that they were measured on."""
    return f"{bundle.measured} ({', '.join(_gpus(bundle))})" if bundle.measured else "0"


def _gpus(bundle: Built) -> list[str]:
    """The GPUs' short names."""
    chips = ((gpu, chip_named(gpu.name)) for gpu in bundle.gpus)
    return list(dict.fromkeys(chip.name if chip else gpu.name.removeprefix("NVIDIA ") for gpu, chip in chips))


def _ships(model: ModelCells) -> str:
    """How many of a model's choices ship measured in an installed bundle."""
    if model.ships_measured:
        return "ships measured: no build needed"
    rest = f"{model.cells - model.measured} are modelled" if model.measured < model.cells else "all are measured"
    return f"{model.shipped} of {model.cells} choices ship measured, {rest}"


def _origin(bundle: Built) -> str:
    """The origin of a bundle's choices."""
    if not bundle.measured:
        return f"all {bundle.choices} choices are modelled: none was measured"
    names = ", ".join(dict.fromkeys(gpu.name for gpu in bundle.gpus))
    rest = f"; the other {bundle.modelled} are modelled" if bundle.modelled else ""
    which = "all" if bundle.taken_over == bundle.measured else str(bundle.taken_over)
    taken = f" ({which} taken over from installed bundles)" if bundle.taken_over else ""
    return f"{bundle.measured} of {bundle.choices} choices were measured on {names}{taken}{rest}"


def _in_context(out: Path) -> str:
    """The arguments of a Dockerfile's COPY: a folder in the build context, and its place in the image."""
    outside = out.is_absolute() or ".." in out.parts
    names = [str(Path(out.resolve().name or "bundles") if outside else out), "/opt/pretuned/bundles"]
    return json.dumps(names) if re.search(r"\s", names[0]) else " ".join(names)
