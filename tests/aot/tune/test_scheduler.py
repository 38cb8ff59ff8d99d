"""The cells that each worker measures, variants that misbehave, and lost workers."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import faketimer
import pytest
from tuning import cells, gpus

from pretuned.aot.choose.bundle import measured_bundle
from pretuned.aot.choose.candidates import read_candidates
from pretuned.aot.journal.file import read_journal
from pretuned.aot.journal.records import DIED, FAULT, HUNG, WRONG, Failure, Measured
from pretuned.aot.measure.job import MeasureJob, MeasureResult, Setup, WorkerInfo, WorkerLost
from pretuned.aot.plan.plan import BuildPlan
from pretuned.aot.tune.tuner import TuneObservers, tune_problems
from pretuned.artifacts.bundle_file import open_bundle
from pretuned.artifacts.errors import HostError, InputError
from pretuned.artifacts.records import DType, Op, Problem

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("run", "kind"),
    [(faketimer.wrong, WRONG), (faketimer.faults, FAULT), (faketimer.dies, DIED), (faketimer.hangs, HUNG)],
)
def test_a_variant_that_misbehaves_is_reported_skipped_and_never_ships(
    mine: Path, small_plan: BuildPlan, tmp_path: Path, run: Callable[[Setup, MeasureJob], MeasureResult], kind: str
) -> None:
    journal = tmp_path / "h200.journal"
    with open_bundle(mine) as bundle:
        bad = bundle.variant(0)
    notes: list[str] = []
    timeout_s = 2.0 if kind == HUNG else 60.0
    watch = TuneObservers(on_note=notes.append)
    with gpus(mine, run=run, timeout_s=timeout_s) as here:
        outcome = tune_problems(small_plan.buckets, mine, journal, executors=here, observers=watch)
    assert (outcome.measured, outcome.left, outcome.unable) == (cells(small_plan), 0, 0)
    assert [(failure.kind, failure.variant) for failure in outcome.failures] == [(kind, bad.cubin_sha256)]
    assert any(f"a variant is out ({kind})" in note for note in notes)
    contents = read_journal(journal)
    assert sum(isinstance(record, Failure) for record in contents.records) == 1
    for record in contents.records:
        if isinstance(record, Measured):
            assert bad.cubin_sha256 not in {timing.variant for timing in record.timings}
    shipped = measured_bundle(small_plan, read_candidates(mine, small_plan), contents)
    assert bad.cubin_sha256 not in {variant.cubin_sha256 for variant in shipped.variants}
    assert shipped.variants
    with gpus(mine, run=faketimer.lost) as here:  # it is not tried again
        again = tune_problems(small_plan.buckets, mine, journal, executors=here)
    assert (again.in_journal, again.measured) == (cells(small_plan), 0)


def test_a_worker_that_was_killed_by_others_costs_nothing(mine: Path, small_plan: BuildPlan, tmp_path: Path) -> None:
    with gpus(mine, run=faketimer.dies_once) as here:
        outcome = tune_problems(small_plan.buckets, mine, tmp_path / "h200.journal", executors=here)
    assert (outcome.measured, outcome.left, outcome.failures) == (cells(small_plan), 0, ())


@pytest.mark.parametrize(
    ("greet", "why"),
    [(faketimer.lost, "the process on GPU 0 died"), (faketimer.lost_with_an_error, "CUDA error: device unavailable")],
)
def test_a_lost_gpu_ends_it_and_blames_no_variant(
    mine: Path, small_plan: BuildPlan, tmp_path: Path, greet: Callable[[Setup], WorkerInfo], why: str
) -> None:
    journal = tmp_path / "h200.journal"
    with (
        gpus(mine, run=faketimer.dies_once, greet=greet) as here,
        pytest.raises(HostError, match=f"GPU 0 does not answer any more: {why}"),
    ):
        tune_problems(small_plan.buckets, mine, journal, executors=here)
    assert read_journal(journal).records == ()


def test_a_gpu_that_never_starts_is_the_machines_fault(mine: Path, small_plan: BuildPlan, tmp_path: Path) -> None:
    Path(f"{mine}.died").touch()
    with (
        gpus(mine, greet=faketimer.lost) as here,
        pytest.raises(HostError, match="GPU 0: its worker does not start: the process on GPU 0 died"),
    ):
        tune_problems(small_plan.buckets, mine, tmp_path / "h200.journal", executors=here)


def test_a_worker_that_dies_before_it_takes_its_job_is_reported_as_one_that_died(
    mine: Path, small_plan: BuildPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = "import os, sys\nif any('spawn_main' in one for one in sys.orig_argv):\n    os.kill(os.getpid(), 9)\n"
    (tmp_path / "sitecustomize.py").write_text(killed)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with (
        gpus(mine) as here,
        pytest.raises(HostError, match="GPU 0: its worker does not start: the process on GPU 0 is lost: All workers"),
    ):
        tune_problems(small_plan.buckets, mine, tmp_path / "h200.journal", executors=here)


def test_a_worker_that_dies_between_two_jobs_is_reported_as_one_that_died(mine: Path, small_plan: BuildPlan) -> None:
    problem, buckets = next(iter(small_plan.buckets.items()))
    job = MeasureJob(problem, buckets[0], (1,))
    with gpus(mine, run=faketimer.dies_afterwards) as (gpu,):
        gpu.start().result()
        gpu.submit(job).result()
        time.sleep(2)
        with pytest.raises(WorkerLost, match="the process on GPU 0 died") as lost:
            gpu.submit(job).result()
        assert lost.value.kind == DIED
        gpu.start().result()
        assert gpu.submit(job).result().measured


def test_a_lost_gpu_leaves_its_cells_to_the_others(mine: Path, small_plan: BuildPlan, tmp_path: Path) -> None:
    notes: list[str] = []
    watch = TuneObservers(on_note=notes.append)
    with gpus(mine, run=faketimer.dies_on_1, greet=faketimer.lost_1, count=2) as here:
        outcome = tune_problems(small_plan.buckets, mine, tmp_path / "journal", executors=here, observers=watch)
    assert (outcome.measured, outcome.left, outcome.failures) == (cells(small_plan), 0, ())
    assert [note for note in notes if note.startswith("GPU 1 is out: the process on GPU 1 died")]


def test_the_cells_of_one_weight_are_shared_out_in_the_end(mine: Path, small_plan: BuildPlan, tmp_path: Path) -> None:
    problem = Problem(Op.FORWARD, DType.BF16, 8, 4096, 4096)
    buckets = tuple(1 << i for i in range(4, 20))
    with gpus(mine, run=faketimer.slow_and_told, count=3) as here:
        outcome = tune_problems({problem: buckets}, mine, tmp_path / "journal", executors=here)
    assert (outcome.measured, outcome.left) == (len(buckets), 0)
    assert [Path(f"{mine}.on-{i}").exists() for i in range(3)] == [True, True, True]


@pytest.mark.parametrize(("E", "N", "used"), [(8, 4096, [True, True, False]), (256, 7168, [True, False, False])])
def test_single_cells_are_taken_where_their_weights_are_soon_made(
    mine: Path, tmp_path: Path, E: int, N: int, used: list[bool]
) -> None:
    problem = Problem(Op.FORWARD, DType.BF16, E, N, 4096)
    with gpus(mine, run=faketimer.slow_and_told, count=3) as here:
        outcome = tune_problems({problem: (16, 32, 64)}, mine, tmp_path / "journal", executors=here)
    assert (outcome.measured, outcome.left) == (3, 0)
    assert [Path(f"{mine}.on-{i}").exists() for i in range(3)] == used


def test_two_workers_on_one_gpu_are_refused(candidates: Path, small_plan: BuildPlan, tmp_path: Path) -> None:
    with (
        gpus(candidates, greet=faketimer.same_uuid, count=2) as here,
        pytest.raises(InputError, match="GPU 0 and GPU 1 use the same GPU: give each worker its own"),
    ):
        tune_problems(small_plan.buckets, candidates, tmp_path / "journal", executors=here)


def test_gpus_that_differ_are_refused(candidates: Path, small_plan: BuildPlan, tmp_path: Path) -> None:
    with (
        gpus(candidates, greet=faketimer.other_gpu, count=2) as here,
        pytest.raises(InputError, match=r"the GPUs differ: NVIDIA H200 .* and NVIDIA H100"),
    ):
        tune_problems(small_plan.buckets, candidates, tmp_path / "journal", executors=here)
