"""The tuner with real candidates, worker processes and journals; the times alone are made up (faketimer.py)."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import faketimer
import pytest
from tuning import cells, gpus

from pretuned.aot.build.build import build, build_measured, compile_candidates
from pretuned.aot.build.options import BuildOptions
from pretuned.aot.choose.bundle import measured_bundle
from pretuned.aot.choose.candidates import read_candidates
from pretuned.aot.compile.cache import CompileCache
from pretuned.aot.journal.file import read_journal
from pretuned.aot.journal.records import Measured
from pretuned.aot.measure.job import MeasureJob
from pretuned.aot.plan.families import Pool, serves
from pretuned.aot.plan.plan import BuildPlan
from pretuned.aot.tune.tuner import Entrants, NoGpu, TuneObservers, tune_problems
from pretuned.artifacts import codec
from pretuned.artifacts.bundle_file import open_bundle
from pretuned.artifacts.errors import InputError
from pretuned.artifacts.records import DType, Op, Problem, Source
from pretuned.kernels.entry import has_aligned_rows

pytestmark = pytest.mark.slow

SHIPPED = Path(__file__).parents[3] / "artifacts" / "bundles"


def test_candidates_are_every_variant_and_modelled(candidates: Path, small_plan: BuildPlan) -> None:
    pool = read_candidates(candidates, small_plan)
    assert len(pool.compiled) == 3 * 3 + 6 + 3  # plain, gather and scatter; and passes
    with open_bundle(candidates) as bundle:
        for problem in small_plan.problems:
            choices = bundle.find(problem)
            assert [choice.bucket for choice in choices] == list(small_plan.buckets[problem])
            assert {choice.source for choice in choices} == {Source.MODELLED}


def test_a_bundle_of_another_capability_is_refused(candidates: Path, small_plan: BuildPlan, tmp_path: Path) -> None:
    other = SHIPPED / "catalogue-sm80.msgpack"
    with gpus(candidates) as here, pytest.raises(InputError, match=r"it is for sm_80, the candidates are for sm_90a"):
        tune_problems(
            small_plan.buckets, candidates, tmp_path / "journal", executors=here, entrants=Entrants(like=other)
        )
    assert not (tmp_path / "journal").exists()


@pytest.mark.parametrize("count", [1, 3])
def test_every_cell_is_measured_once_and_the_fastest_ships(
    candidates: Path, small_plan: BuildPlan, tmp_path: Path, count: int
) -> None:
    journal = tmp_path / "h200.journal"
    heard: list[int] = []
    watch = TuneObservers(on_cell=lambda progress: heard.append(progress.done))
    with gpus(candidates, count=count) as here:
        outcome = tune_problems(small_plan.buckets, candidates, journal, executors=here, observers=watch)
    assert (outcome.measured, outcome.left, outcome.in_journal, outcome.failures) == (cells(small_plan), 0, 0, ())
    assert heard == list(range(1, cells(small_plan) + 1))
    contents = read_journal(journal)
    keys = [(record.problem, record.bucket) for record in contents.records]
    assert len(set(keys)) == len(keys) == cells(small_plan)

    pool = read_candidates(candidates, small_plan)
    bundle = measured_bundle(small_plan, pool, contents)
    assert bundle.gpus == (faketimer.H200,)
    assert set(bundle.cubins) <= {candidate.cubin for candidate in pool.compiled}
    timed = {
        (record.problem, record.bucket): {timing.variant for timing in record.timings}
        for record in contents.records
        if isinstance(record, Measured)
    }
    assert all(timed.values())
    for problem, row in bundle.choices.items():
        for choice in row:
            assert (choice.source, choice.gpu) == (Source.MEASURED, 0)
            job = MeasureJob(problem, choice.bucket, ())
            shipped = {variant.cubin_sha256 for variant in bundle.variants if serves(variant, problem)}
            best = min(faketimer.time_ns(job, sha) for sha in shipped & timed[problem, choice.bucket])
            chosen = bundle.variants[choice.variant]
            assert choice.time_ns == faketimer.time_ns(job, chosen.cubin_sha256)
            assert choice.time_ns <= best * 1.006  # or the modelled one, within the noise band
            if choice.runner_up is not None:
                runner_up = bundle.variants[choice.runner_up].cubin_sha256
                assert choice.runner_up_ns == faketimer.time_ns(job, runner_up)


def test_the_same_journal_gives_the_same_bytes_in_any_order(
    candidates: Path, small_plan: BuildPlan, tmp_path: Path
) -> None:
    journal = tmp_path / "h200.journal"
    with gpus(candidates) as here:
        tune_problems(small_plan.buckets, candidates, journal, executors=here)
    pool, contents = read_candidates(candidates, small_plan), read_journal(journal)
    wanted = codec.encode(measured_bundle(small_plan, pool, contents))
    records = list(contents.records)
    for seed in range(3):
        random.Random(seed).shuffle(records)
        shuffled = dataclasses.replace(contents, records=tuple(records))
        assert codec.encode(measured_bundle(small_plan, pool, shuffled)) == wanted
    twice = dataclasses.replace(contents, records=(*records, *records))
    assert codec.encode(measured_bundle(small_plan, pool, twice)) == wanted


def test_a_build_from_a_journal_ships_the_cubins_that_were_measured(
    candidates: Path, small_plan: BuildPlan, small_space: Pool, compiled_dir: Path, tmp_path: Path
) -> None:
    journal = tmp_path / "h200.journal"
    with gpus(candidates) as here:
        tune_problems(small_plan.buckets, candidates, journal, executors=here)
    options = BuildOptions(tmp_path / "given", cache=CompileCache(compiled_dir), space=small_space, journal=journal)
    (built,) = build_measured(small_plan, candidates, options).bundles
    (other,) = build(small_plan, (90,), dataclasses.replace(options, out=tmp_path / "compiled")).bundles
    assert built.path.read_bytes() == other.path.read_bytes()
    assert (built.measured, built.source, built.gpus) == (cells(small_plan), "measured", (faketimer.H200,))
    assert built.to_dict()["source"] == "measured"
    with open_bundle(candidates) as bundle:
        shipped = {variant.cubin_sha256 for variant in bundle.variants()}
    with open_bundle(built.path) as bundle:
        assert {variant.cubin_sha256 for variant in bundle.variants()} <= shipped
    modelled = dataclasses.replace(options, out=tmp_path / "modelled", journal=None, modelled=True)
    (third,) = build(small_plan, (90,), modelled).bundles
    assert (third.measured, third.source) == (0, "modelled")


def test_a_build_measures_and_goes_on_with_its_own_journal(
    small_plan: BuildPlan, small_space: Pool, compiled_dir: Path, tmp_path: Path
) -> None:
    calls: list[int] = []

    def tune(problems, candidates, journal, ships, entrants, observers):
        with gpus(candidates) as here:
            outcome = tune_problems(
                problems,
                candidates,
                journal,
                executors=here,
                ships=ships,
                entrants=entrants,
                observers=observers,
            )
        calls.append(outcome.measured)
        return outcome

    options = BuildOptions(tmp_path, cache=CompileCache(compiled_dir), space=small_space, measure=(90,), tune=tune)
    (first,) = build(small_plan, (90,), options).bundles
    assert first.measured == cells(small_plan)
    assert (tmp_path / "pretuned-sm90.journal").exists()
    (second,) = build(small_plan, (90,), options).bundles
    assert second.unchanged
    # Without a GPU what was measured beside the bundle still counts.
    (third,) = build(small_plan, (90,), dataclasses.replace(options, measure=())).bundles
    assert third.unchanged
    assert calls == [cells(small_plan), 0]


def test_out_of_time_it_stops_and_goes_on_later(candidates: Path, small_plan: BuildPlan, tmp_path: Path) -> None:
    journal = tmp_path / "h200.journal"
    with gpus(candidates, run=faketimer.slow) as here:
        first = tune_problems(small_plan.buckets, candidates, journal, executors=here, budget_s=0.2)
    assert 0 < first.measured < cells(small_plan)
    assert first.left == cells(small_plan) - first.measured
    assert not first.finished
    pool = read_candidates(candidates, small_plan)
    part = measured_bundle(small_plan, pool, read_journal(journal))
    sources = [choice.source for row in part.choices.values() for choice in row]
    assert sources.count(Source.MEASURED) == first.measured  # the best so far
    with gpus(candidates) as here:
        second = tune_problems(small_plan.buckets, candidates, journal, executors=here)
    assert (second.in_journal, second.measured, second.left) == (first.measured, first.left, 0)
    with gpus(candidates, run=faketimer.lost) as here:  # nobody is asked again
        third = tune_problems(small_plan.buckets, candidates, journal, executors=here)
    assert (third.in_journal, third.measured) == (cells(small_plan), 0)


_TUNE = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[3:]
import faketimer
from conftest import ODD, SMALL
from tuning import gpus
from pretuned.aot.process.interrupts import tidy_interrupts
from pretuned.aot.models.load import load_models
from pretuned.aot.plan.plan import plan
from pretuned.aot.tune.tuner import TuneObservers, tune_problems
from pretuned.artifacts.records import Op
if __name__ == "__main__":
    candidates, journal = map(Path, sys.argv[1:3])
    problems = plan(load_models([SMALL, ODD], (Op.FORWARD,)).shapes).buckets
    watch = TuneObservers(on_cell=lambda p: print("cell", p.done, flush=True), on_note=lambda n: print(n, flush=True))
    try:
        with tidy_interrupts(), gpus(candidates, run=faketimer.slow) as here:
            tune_problems(problems, candidates, journal, executors=here, observers=watch)
    except KeyboardInterrupt as error:
        sys.exit(f"{error}")
"""


def tuner(candidates: Path, journal: Path, text: str = _TUNE) -> subprocess.Popen[str]:
    """A tuner in a process of its own."""
    script = journal.parent / "tune.py"
    script.write_text(text)
    here = Path(__file__).parents[1]
    paths = [str(here), str(here.parent / "support")]
    return subprocess.Popen(
        [sys.executable, str(script), str(candidates), str(journal), *paths],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(journal.parent), "PYTHONPATH": os.pathsep.join(paths)},
    )


def wait_for(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == text:
            return
    raise AssertionError(f"it ended before it said {text!r}: {process.stderr and process.stderr.read()}")


_DROPPED = """
    class Dropped:
        def __del__(self):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.01)

    def told(progress):
        if progress.done == 3:
            Dropped()  # gone at once

    watch = TuneObservers(on_cell=told)
"""


def test_an_interrupt_that_comes_while_an_object_is_dropped_is_not_lost(
    candidates: Path, small_plan: BuildPlan, tmp_path: Path
) -> None:
    """Python says "Exception ignored in" and goes on: the signal is not sent again."""
    journal = tmp_path / "h200.journal"
    script = _TUNE.replace("import sys\n", "import os, signal, sys, time\n", 1).replace(
        "    try:\n", f"{_DROPPED}    try:\n"
    )
    process = tuner(candidates, journal, script)
    _, errors = process.communicate(timeout=60)
    kept = len(read_journal(journal).records)
    assert 3 <= kept < cells(small_plan)
    assert "Exception ignored in: <function Dropped.__del__" in errors
    assert f"\ninterrupted: {kept} of {cells(small_plan)} cells are measured and kept in '{journal}'; run" in errors
    assert process.returncode == 1


def test_killed_it_loses_the_job_in_flight_at_most(candidates: Path, small_plan: BuildPlan, tmp_path: Path) -> None:
    journal = tmp_path / "h200.journal"
    process = tuner(candidates, journal)
    try:
        wait_for(process, "cell 5")
    finally:
        process.kill()
        process.communicate()
    kept = len(read_journal(journal).records)
    assert 5 <= kept <= 6 < cells(small_plan)
    with gpus(candidates) as here:
        outcome = tune_problems(small_plan.buckets, candidates, journal, executors=here)
    assert (outcome.in_journal, outcome.measured, outcome.left) == (kept, cells(small_plan) - kept, 0)
    whole = tmp_path / "whole.journal"
    with gpus(candidates) as here:
        tune_problems(small_plan.buckets, candidates, whole, executors=here)
    pool = read_candidates(candidates, small_plan)
    bundles = [codec.encode(measured_bundle(small_plan, pool, read_journal(path))) for path in (journal, whole)]
    assert bundles[0] == bundles[1]


def test_interrupted_it_says_what_is_kept_and_ends_its_workers(candidates: Path, tmp_path: Path) -> None:
    journal = tmp_path / "h200.journal"
    process = tuner(candidates, journal)
    wait_for(process, "cell 3")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    kept = len(read_journal(journal).records)
    assert kept >= 3
    assert f"interrupted: {kept} of" in errors
    assert "run the same command to go on" in errors
    assert not list(tmp_path.glob("pretuned-build-*"))


def test_two_at_once_take_turns(candidates: Path, small_plan: BuildPlan, tmp_path: Path) -> None:
    journal = tmp_path / "h200.journal"
    process = tuner(candidates, journal)
    wait_for(process, "cell 2")
    notes: list[str] = []
    with gpus(candidates) as here:
        outcome = tune_problems(
            small_plan.buckets, candidates, journal, executors=here, observers=TuneObservers(on_note=notes.append)
        )
    assert process.wait(timeout=60) == 0
    process.communicate()
    assert (outcome.in_journal, outcome.measured) == (cells(small_plan), 0)  # the other one had done all of it
    assert len(notes) == 1
    assert f"another tuner (process {process.pid}) writes" in notes[0]


def test_a_build_goes_on_modelled_where_the_gpu_can_not_be_used(
    small_plan: BuildPlan, small_space: Pool, compiled_dir: Path, tmp_path: Path, candidates: Path
) -> None:
    with (
        gpus(candidates, greet=faketimer.without_cuda) as here,
        pytest.raises(NoGpu, match=r"GPU 0: its worker does not start: torch 2.* it is built without CUDA"),
    ):
        tune_problems(small_plan.buckets, candidates, tmp_path / "h200.journal", executors=here)
    assert not (tmp_path / "h200.journal").exists()

    def tune(problems, candidates, journal, ships, entrants, observers):
        return None

    options = BuildOptions(tmp_path, cache=CompileCache(compiled_dir), space=small_space, measure=(90,), tune=tune)
    (bundle,) = build(small_plan, (90,), options).bundles
    assert (bundle.source, bundle.tuned) == ("modelled", None)


def test_candidates_for_another_problem_are_refused(candidates: Path, tmp_path: Path) -> None:
    problem = Problem(Op.DW, DType.BF16, 8, 256, 256)
    with (
        gpus(candidates) as here,
        pytest.raises(InputError, match="no variant serves dW bf16 E=8 N=256 K=256: run aot compile"),
    ):
        tune_problems({problem: (16,)}, candidates, tmp_path / "journal", executors=here)


def test_a_journal_of_other_code_is_refused(
    candidates: Path, small_plan: BuildPlan, small_space: Pool, compiled_dir: Path, tmp_path: Path
) -> None:
    journal = tmp_path / "h200.journal"
    with gpus(candidates) as here:
        tune_problems(small_plan.buckets, candidates, journal, executors=here)
    other = Pool(lambda op, dtype, sm: small_space.aligned(op, dtype, 80)[:1], lambda op, dtype, sm: ())
    aligned = next(problem for problem in small_plan.problems if has_aligned_rows(problem))
    forward = BuildPlan({aligned: small_plan.buckets[aligned]}, ())
    path = tmp_path / "other.msgpack"
    compile_candidates(forward, (90,), path, BuildOptions(tmp_path, cache=CompileCache(compiled_dir), space=other))
    with pytest.raises(InputError, match=r"not one of its \d+ variants is among the candidates"):
        measured_bundle(forward, read_candidates(path), read_journal(journal))
