"""Helpers of the tuner's tests: worker processes without a GPU, and the cells that a journal would measure again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import faketimer

from pretuned.aot.choose.bundle import Ships
from pretuned.aot.choose.candidates import read_candidates
from pretuned.aot.choose.choices import choose_among_all
from pretuned.aot.executors.local import LocalExecutor
from pretuned.aot.journal.file import Contents, read_journal
from pretuned.aot.journal.records import Measured
from pretuned.aot.journal.timings import Cell
from pretuned.aot.measure.job import MeasureJob, MeasureResult, Setup, WorkerInfo
from pretuned.aot.plan.plan import BuildPlan
from pretuned.aot.process.child import scratch_folder
from pretuned.aot.tune.scheduler import Remeasure, cells_to_remeasure
from pretuned.aot.tune.shortlist import ConfigPairs
from pretuned.aot.tune.space import TuningSpace
from pretuned.artifacts.bundle_file import open_bundle
from pretuned.artifacts.records import Problem


@contextlib.contextmanager
def gpus(
    candidates: Path,
    run: Callable[[Setup, MeasureJob], MeasureResult] = faketimer.run,
    greet: Callable[[Setup], WorkerInfo] = faketimer.greet,
    count: int = 1,
    timeout_s: float = 60.0,
) -> Iterator[list[LocalExecutor]]:
    """Worker processes without a GPU."""
    with open_bundle(candidates) as bundle:
        digest = bundle.digest
    with scratch_folder() as scratch:
        choices = [
            LocalExecutor(Setup(str(candidates), digest, i), scratch, greet=greet, run=run, timeout_s=timeout_s)
            for i in range(count)
        ]
        try:
            yield choices
        finally:
            for choice in choices:
                choice.shutdown()


def cells(plan: BuildPlan) -> int:
    return plan.choices


def everything(candidates: Path, small_plan: BuildPlan) -> Ships:
    """Whatever the journal says: all candidates ship, and the model's choices, which made-up times don't follow."""
    chosen = choose_among_all(small_plan, read_candidates(candidates).compiled, 90)
    return lambda contents: chosen


def wanted_looks(candidates: Path, small_plan: BuildPlan, contents: Contents, ships: Ships) -> dict[Cell, Remeasure]:
    with open_bundle(candidates) as bundle:
        ground = TuningSpace.of(small_plan.buckets, bundle, faketimer.H200, 90, 0.1)
        return cells_to_remeasure(ships(contents), contents, ground.estimates)


def records_of(journal: Path) -> list[Measured]:
    return [record for record in read_journal(journal).records if isinstance(record, Measured)]


def last(ground: TuningSpace, problem: Problem, bucket: int) -> ConfigPairs:
    return ground.bundle.variant(ground.ranked(problem, bucket)[-1][1]).config
