"""aot measure."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import click

from ...artifacts.errors import InputError
from ...runtime import settings
from ..build.pick import with_installed
from ..choose.candidates import read_candidates
from ..compile.shipped import shipped_file
from ..models.load import load_models
from ..plan.plan import plan, planned_on
from ..process.gpus import native_sm
from ..tune.space import part_of
from .options import as_json, file_path, models, ops, print_json, quiet, wanted_ops
from .table import echo, next_steps, quoted
from .tuning import HowMuch, TuneProgress, budget_and_gpus, check_executor, how_much, ordinals, outcome_text, tune


@click.command()
@click.argument("candidates", type=file_path, metavar="[CANDIDATES]", required=False)
@models
@ops
@click.option(
    "--journal",
    "-J",
    required=True,
    metavar="FILE",
    type=file_path,
    help="File of the results, which are written at once. An existing one is continued.",
)
@budget_and_gpus
@how_much
@quiet
@as_json
def measure(
    candidates: Path | None,
    models: tuple[str, ...],
    ops: str | None,
    journal: Path,
    budget: float | None,
    gpus: str | None,
    executor: str | None,
    how: HowMuch,
    quiet: bool,
    as_json: bool,
) -> None:
    """Measure candidate kernels on this machine's GPUs, or on a cluster's, into a journal. Needs no Triton.

    CANDIDATES is a file of aot compile; without it, the candidates that ship for this GPU are measured. If the command
    is stopped, killed or out of time, repeat it to continue.

    \b
    Examples:
      aot measure --models models.txt --journal h200.journal    # the shipped candidates
      aot measure candidates.msgpack --models models.txt --journal h200.journal
      aot measure candidates.msgpack --models models.txt --journal h200.journal --budget 1h --gpus 0,1
      aot measure candidates.msgpack --models models.txt --journal h200.journal --executor dask://scheduler:8786
      aot measure candidates.msgpack --models models.txt --journal h100.journal --like h200-sm90.msgpack
      aot build --models models.txt --sm 90 --candidates candidates.msgpack --journal h200.journal
    """
    if settings.read(os.environ).disable_autotune:
        raise InputError("PRETUNED_DISABLE_AUTOTUNE forbids measuring: unset it, or build with aot build")
    if not models:
        raise InputError("nothing to measure for: give --models FILE or --models SPEC, as aot compile had them")
    wanted = ordinals(gpus)
    check_executor(executor, gpus)
    listed = load_models(models, only=wanted_ops(ops)).shapes
    of = read_candidates(candidates or shipped_file(native_sm()))
    planned = planned_on(plan(listed), (of.target.sm,))
    cells = planned.buckets if how.part is None else part_of(planned.buckets, *how.part)
    there_is = with_installed(planned, of)
    with TuneProgress(as_json or quiet, budget) as progress, there_is as there:
        file, ships, entrants = there
        outcome = tune(
            executor,
            wanted,
            cells,
            file,
            journal,
            observers=progress.observers(),
            budget_s=budget,
            with_torch=not how.no_torch,
            entrants=replace(entrants, share=how.share, like=how.like, quick=how.quick),
            ships=None if how.once else ships,
        )
    if as_json:
        print_json({**outcome.to_dict(), "journal": str(journal)})
        return
    echo(outcome_text(outcome))
    if quiet:
        return
    named = "" if candidates is None else f"--candidates {quoted(candidates)} "
    echo(next_steps(("build", f"aot build --models ... --sm {outcome.sm} {named}--journal {quoted(journal)}")))
