"""aot measure."""

from __future__ import annotations

import math
import os
from pathlib import Path

import click

from ...artifacts.errors import InputError
from ...runtime import settings
from ..build.pick import with_what_is_there
from ..choose.candidates import read_candidates
from ..compile.shipped import shipped_file
from ..models.load import load_models
from ..plan.plan import plan, planned_on
from ..process.gpus import native_sm
from ..tune.shortlist import SHARE
from ..tune.tuner import Entrants
from .echo import echo, quoted
from .options import as_json, file_path, models, ops, print_json, quiet, wanted_ops
from .tuning import TuneProgress, budget_and_gpus, check_executor, ordinals, told, tune


@click.command()
@click.argument("candidates", type=file_path, metavar="[CANDIDATES]", required=False)
@models
@ops
@click.option("--journal", "-J", required=True, metavar="FILE", type=file_path,
              help="Where every result is kept at once. Made, or gone on with.")  # fmt: skip
@budget_and_gpus
@click.option("--share", type=click.FloatRange(0, 1, min_open=True), default=SHARE, show_default=True,
              help="Measure this share of a cell's candidates; 1 is all, for a journal of its own.")  # fmt: skip
@click.option("--like", metavar="BUNDLE", type=file_path,
              help="Try what this bundle, measured on another GPU of the capability, has for each cell.")  # fmt: skip
@click.option("--no-torch", is_flag=True, help="Don't time torch's grouped_mm for the report.")
@quiet
@as_json
def measure(
    candidates: Path | None, models: tuple[str, ...], ops: str | None, journal: Path, budget: float | None,
    gpus: str | None, executor: str | None, share: float, like: Path | None, no_torch: bool, quiet: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Measure candidates on this machine's GPUs, or a cluster's, into a journal. Needs no Triton and no compiler.

    CANDIDATES is a file of aot compile's; those that ship for this machine's GPU where none is named.

    Stopped, killed or out of time, the same command goes on where it was.

    \b
    Examples:
      aot measure --models models.txt --journal h200.journal    # of the candidates that ship
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
    if math.isnan(share):  # no range of click's keeps it out
        raise click.BadParameter("nan is no share, wanted more than 0 and at most 1", param_hint="--share")
    wanted = ordinals(gpus)
    check_executor(executor, gpus)
    listed = load_models(models, only=wanted_ops(ops)).shapes
    of = read_candidates(candidates or shipped_file(native_sm()))
    planned = planned_on(plan(listed), (of.target.sm,))
    there_is = with_what_is_there(planned, of)
    with TuneProgress(as_json or quiet, budget) as progress, there_is as there:
        file, ships, runs = there
        outcome = tune(
            executor, wanted, planned.buckets, file, journal, observers=progress.observers(), budget_s=budget,
            with_torch=not no_torch, entrants=Entrants(share, like, runs), ships=ships,
        )  # fmt: skip
    if as_json:
        print_json({**outcome.to_dict(), "journal": str(journal)})
        return
    echo(told(outcome))
    if quiet:
        return
    named = "" if candidates is None else f"--candidates {quoted(candidates)} "
    echo(f"Next:\n  aot build --models ... --sm {outcome.sm} {named}--journal {quoted(journal)}")
