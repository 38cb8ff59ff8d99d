"""The tuner with real candidates, worker processes and journals; the times alone are made up (faketimer.py)."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import faketimer
import pytest

from pretuned.aot.build import Options, build, build_measured, compile_candidates
from pretuned.aot.candidates import read_candidates
from pretuned.aot.compilecache import CompileCache
from pretuned.aot.contenders import Knobs
from pretuned.aot.doubts import doubts, untried
from pretuned.aot.evidence import Evidence
from pretuned.aot.gpuworkers import LocalGpu
from pretuned.aot.ground import Ground, fits
from pretuned.aot.jobs import Hello, Job, Result, Setup, WorkerLost
from pretuned.aot.journal import open_journal, read_journal
from pretuned.aot.measured import measured_bundle
from pretuned.aot.plan import Plan
from pretuned.aot.records import DIED, FAULT, HUNG, WRONG, Failure, Measured, Timing
from pretuned.aot.scratch import scratch_folder
from pretuned.aot.tune import NoGpu, TuneObservers, tune_problems
from pretuned.aot.variants import Space, is_aligned, serves
from pretuned.artifacts import codec
from pretuned.artifacts.errors import HostError, InputError
from pretuned.artifacts.store import BundleFile, open_bundle
from pretuned.artifacts.types import DType, Op, Problem, Source

SHIPPED = Path(__file__).parents[2] / "artifacts" / "bundles"
Gpus = Callable[..., contextlib.AbstractContextManager[list[LocalGpu]]]


@pytest.fixture(scope="module")
def candidates(
    tmp_path_factory: pytest.TempPathFactory, compiled_dir: Path, small_space: Space, small_plan: Plan
) -> Path:
    """Real cubins for 90: two aligned configs and a fallback in each form."""
    path = tmp_path_factory.mktemp("candidates") / "candidates.msgpack"
    options = Options(path.parent, cache=CompileCache(compiled_dir), space=small_space)
    compile_candidates(small_plan, 90, path, options)
    return path


@pytest.fixture
def mine(candidates: Path, tmp_path: Path) -> Path:
    """A copy: some of the workers leave marks beside it."""
    path = tmp_path / "candidates.msgpack"
    path.write_bytes(candidates.read_bytes())
    path.chmod(0o644)
    return path


@contextlib.contextmanager
def gpus(
    candidates: Path,
    run: Callable[[Setup, Job], Result] = faketimer.run,
    greet: Callable[[Setup], Hello] = faketimer.greet,
    count: int = 1,
    timeout_s: float = 60.0,
) -> Iterator[list[LocalGpu]]:
    """Worker processes without a GPU."""
    with open_bundle(candidates) as bundle:
        digest = bundle.digest
    with scratch_folder() as scratch:
        found = [
            LocalGpu(Setup(str(candidates), digest, i), scratch, greet=greet, run=run, timeout_s=timeout_s)
            for i in range(count)
        ]
        try:
            yield found
        finally:
            for one in found:
                one.shutdown()


def cells(plan: Plan) -> int:
    return plan.choices


def test_candidates_are_every_variant_and_modelled(candidates: Path, small_plan: Plan) -> None:
    found = read_candidates(candidates, small_plan)
    assert len(found.compiled) == 3 * 3 + 6 + 2  # plain, gather and scatter; and passes
    with open_bundle(candidates) as bundle:
        for problem in small_plan.problems:
            choices = bundle.find(problem)
            assert [one.bucket for one in choices] == list(small_plan.buckets[problem])
            assert {one.source for one in choices} == {Source.MODELLED}


def test_what_another_bundle_has_for_a_cell_is_asked(candidates: Path, small_plan: Plan) -> None:
    with open_bundle(candidates) as bundle:
        ground = Ground.of(small_plan.buckets, bundle, faketimer.H200, 90, 0.1, bundle)
        alone = Ground.of(small_plan.buckets, bundle, faketimer.H200, 90, 0.1)
        for problem, buckets in small_plan.buckets.items():
            for choice in bundle.find(problem):
                named = [i for i in (choice.variant, choice.runner_up) if i is not None]
                assert ground.elsewhere(problem, choice.bucket) == [bundle.variant(i).config for i in named]
                assert alone.elsewhere(problem, choice.bucket) == []
            assert ground.elsewhere(problem, 2 * buckets[-1]) == []
        assert ground.elsewhere(dataclasses.replace(problem, E=problem.E + 1), 1) == []


def test_it_is_measured_beside_the_models_first(
    candidates: Path, small_plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each cell the variant that the model puts last: without it two others are measured."""
    monkeypatch.setattr(Ground, "elsewhere", lambda self, problem, bucket: [last(self, problem, bucket)])
    with gpus(candidates) as here, open_bundle(candidates) as bundle:
        tune_problems(small_plan.buckets, candidates, tmp_path / "journal", executors=here, like=candidates)
        ground = Ground.of(small_plan.buckets, bundle, faketimer.H200, 90, 0.1)
        for one in read_journal(tmp_path / "journal").records:
            assert isinstance(one, Measured)
            names = {bundle.variant(i).config for _, i in ground.ranked(one.problem, one.bucket)}
            tried = {sha: ground.index[one.problem, sha] for sha in (timing.variant for timing in one.timings)}
            assert last(ground, one.problem, one.bucket) in {bundle.variant(i).config for i in tried.values()}
            assert len(tried) == min(4, len(names))


def test_a_choice_that_took_more_than_the_fastest_is_measured_once_more(
    candidates: Path, small_plan: Plan, tmp_path: Path
) -> None:
    """The candidates' own choices are the model's, which made-up times don't follow. More rounds find other times."""
    journal = tmp_path / "h200.journal"
    with gpus(candidates) as here:
        tune_problems(small_plan.buckets, candidates, journal, executors=here)
    first = {(one.problem, one.bucket): one for one in read_journal(journal).records if isinstance(one, Measured)}
    with open_bundle(candidates) as bundle:
        wanted = doubts(bundle, read_journal(journal))
        for cell, one in first.items():
            times = {timing.variant: timing.time_ns for timing in one.timings}
            lost = times[one.modelled] / min(times.values())
            assert (cell in wanted) is (lost > 1.02)  # the choice is the model's first, which is always measured
            if lost > 1.02:
                near = {sha for sha, time in times.items() if time <= 1.1 * min(times.values())}
                assert set(wanted[cell]) == near | {one.modelled}
    assert 3 < len(wanted) < len(first)

    with gpus(candidates, faketimer.steady) as here:
        outcome = tune_problems(small_plan.buckets, candidates, journal, executors=here, again=candidates)
    assert (outcome.known, outcome.measured, outcome.left) == (len(first) - len(wanted), len(wanted), 0)
    contents = read_journal(journal)
    later = [one for one in contents.records if isinstance(one, Measured)][len(first) :]
    assert sorted((str(one.problem), one.bucket) for one in later) == sorted((str(p), M) for p, M in wanted)
    cells = Evidence.of(contents).cells
    for one in later:
        assert {timing.variant for timing in one.timings} == set(wanted[one.problem, one.bucket])
        assert one.timings[0].variant == one.modelled == first[one.problem, one.bucket].modelled
        assert {timing.rounds for timing in one.timings} == {60}
        for timing in one.timings:  # they count for more than those of 20 rounds
            assert cells[one.problem, one.bucket].times_ns[timing.variant] == timing.time_ns == 12_000
    with open_bundle(candidates) as bundle:
        assert doubts(bundle, contents) == {}
    with gpus(candidates, faketimer.steady) as here:
        outcome = tune_problems(small_plan.buckets, candidates, journal, executors=here, again=candidates)
    assert (outcome.known, outcome.measured) == (len(first), 0)


def last(ground: Ground, problem: Problem, bucket: int) -> Knobs:
    return ground.bundle.variant(ground.ranked(problem, bucket)[-1][1]).config


def test_a_third_look_is_never_taken(candidates: Path, small_plan: Plan, tmp_path: Path) -> None:
    """Though the second one found the same times: the choice is what is slow."""
    journal, heard = tmp_path / "h200.journal", list[str]()
    with gpus(candidates) as here:
        tune_problems(small_plan.buckets, candidates, journal, executors=here)
        first = tune_problems(small_plan.buckets, candidates, journal, executors=here, again=candidates)
        watch = TuneObservers(on_note=heard.append)
        second = tune_problems(
            small_plan.buckets, candidates, journal, executors=here, again=candidates, observers=watch
        )
    assert first.measured > 3
    assert (second.measured, second.known) == (0, cells(small_plan))
    assert f"a second look at 0 of the {cells(small_plan)} cells that are known" in heard


def test_what_failed_is_no_reason_for_a_second_look(candidates: Path, small_plan: Plan, tmp_path: Path) -> None:
    journal = tmp_path / "h200.journal"
    with gpus(candidates) as here:
        tune_problems(small_plan.buckets, candidates, journal, executors=here)
    contents = read_journal(journal)
    with open_bundle(candidates) as bundle:
        wanted = doubts(bundle, contents)
        records = {(one.problem, one.bucket): one for one in contents.records if isinstance(one, Measured)}
        choices = {(p, one.bucket): bundle.variant(one.variant).cubin_sha256 for p in wanted_problems(wanted)
                   for one in bundle.find(p)}  # fmt: skip
        for cell in wanted:
            faster = [one.variant for one in records[cell].timings if one.variant != choices[cell]]
            failed = tuple(Failure(*cell, sha, WRONG, "relative error 0.5") for sha in faster)
            assert cell not in doubts(bundle, dataclasses.replace(contents, records=(*contents.records, *failed)))


def wanted_problems(cells: dict[tuple[Problem, int], tuple[bytes, ...]]) -> set[Problem]:
    return {problem for problem, _ in cells}


def test_a_second_look_is_for_what_was_built_of_this_gpus_journal(
    candidates: Path, small_plan: Plan, tmp_path: Path
) -> None:
    of_an_h100 = SHIPPED / "catalogue-h100-sm90.msgpack"
    with gpus(candidates) as here, pytest.raises(InputError, match=r"--again .*measured on NVIDIA H100.*H200"):
        tune_problems(small_plan.buckets, candidates, tmp_path / "journal", executors=here, again=of_an_h100)
    assert not (tmp_path / "journal").exists()


def test_a_second_look_that_is_interrupted_goes_on(candidates: Path, small_plan: Plan, tmp_path: Path) -> None:
    journal = tmp_path / "h200.journal"
    with gpus(candidates) as here:
        tune_problems(small_plan.buckets, candidates, journal, executors=here)
    with open_bundle(candidates) as bundle:
        wanted = doubts(bundle, read_journal(journal))

    def stop(progress: object) -> None:
        raise KeyboardInterrupt

    words = f"interrupted: {cells(small_plan)} of {cells(small_plan)} cells are measured and kept"
    watch = TuneObservers(on_cell=stop)
    with gpus(candidates) as here, pytest.raises(KeyboardInterrupt, match=words):
        tune_problems(small_plan.buckets, candidates, journal, executors=here, again=candidates, observers=watch)
    with gpus(candidates) as here:
        outcome = tune_problems(small_plan.buckets, candidates, journal, executors=here, again=candidates)
    assert (outcome.measured, outcome.left) == (len(wanted) - 1, 0)


def test_what_ships_is_timed_wherever_it_may_be_the_fastest(
    candidates: Path, small_plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here all candidates ship, and of each cell the modelled choice alone was timed."""
    monkeypatch.setattr("pretuned.aot.doubts.LIKELY", MORE)  # the models are tiny, and their estimates far apart
    journal, whole = tmp_path / "h200.journal", tmp_path / "whole.journal"
    with gpus(candidates) as here:
        tune_problems(small_plan.buckets, candidates, whole, executors=here)
    contents = read_journal(whole)
    with open_journal(journal, contents.header) as held:
        for one in contents.records:
            assert isinstance(one, Measured)
            held.append([dataclasses.replace(one, timings=one.timings[:1], duel=None)])
    contents = read_journal(journal)
    before = Evidence.of(contents).cells
    with open_bundle(candidates) as bundle:
        ground = Ground.of(small_plan.buckets, bundle, contents.header.gpu, 90, 0.1)
        wanted = untried(bundle, contents, ground.estimates)
        likely = {cell: near_the_best(ground, *cell) for cell in before}
        failed = Failure(*next(iter(wanted)), next(iter(wanted.values()))[-1], WRONG, "relative error 0.5")
        less = untried(bundle, dataclasses.replace(contents, records=(*contents.records, failed)), ground.estimates)
    assert all(set(shas) == likely[cell] | {*before[cell].times_ns} for cell, shas in wanted.items())
    assert set(wanted) == {cell for cell in before if len(likely[cell]) > 1}
    assert 3 < len(wanted) < len(before)
    assert all(failed.variant not in shas for shas in less.values())

    heard: list[str] = []
    watch = TuneObservers(on_note=heard.append)
    with gpus(candidates) as here:
        outcome = tune_problems(
            small_plan.buckets, candidates, journal, executors=here, untried=candidates, observers=watch
        )
        assert (outcome.known, outcome.measured) == (len(before) - len(wanted), len(wanted))
        assert f"what ships and was not timed, in {len(wanted)} cells" in heard
        later = [one for one in read_journal(journal).records if isinstance(one, Measured)][len(before) :]
        for one in later:
            assert {timing.variant for timing in one.timings} == set(wanted[one.problem, one.bucket])
            assert {timing.rounds for timing in one.timings} == {20}, "no second look"
        outcome = tune_problems(small_plan.buckets, candidates, journal, executors=here, untried=candidates)
    assert (outcome.known, outcome.measured) == (len(before), 0)


MORE = 1.5


def test_only_what_ships_is_timed_beside_those_that_are_ahead(
    candidates: Path, small_plan: Plan, tmp_path: Path
) -> None:
    journal = tmp_path / "h200.journal"
    with gpus(candidates) as here:
        tune_problems(small_plan.buckets, candidates, journal, executors=here)
    contents = read_journal(journal)
    with open_bundle(candidates) as bundle:
        ground = Ground.of(small_plan.buckets, bundle, contents.header.gpu, 90, 0.1)
        one = next(one for one in contents.records if isinstance(one, Measured) and len(one.timings) > 1)
        timed, other = one.timings[:2]
        ns = 100_000

        def like(name: bytes, factor: float) -> Timing:
            return dataclasses.replace(timed, variant=name * 32, ns=(round(ns * factor),) * 2)

        first = dataclasses.replace(timed, ns=(ns, ns))
        timings = (first, like(b"a", 1.029), like(b"b", 1.031), like(b"c", 2.0))
        record = dataclasses.replace(one, timings=timings, modelled=timed.variant, duel=None)
        contents = dataclasses.replace(contents, records=(record,))
        variants = bundle.variants()

        def ships(*shas: bytes) -> BundleFile:
            return SimpleNamespace(variants=lambda: [v for v in variants if v.cubin_sha256 in shas])  # type: ignore[return-value]

        def even(_problem: Problem, _bucket: int) -> dict[bytes, float]:
            return {timed.variant: 1.0, other.variant: 1.0}

        cell = (one.problem, one.bucket)
        assert untried(ships(timed.variant, other.variant), contents, even) == {
            cell: (timed.variant, b"a" * 32, other.variant)
        }
        assert untried(ships(timed.variant), contents, even) == {}
        assert untried(ships(other.variant), contents, even)[cell][-1] == other.variant
        assert (
            untried(ships(timed.variant, other.variant), contents, lambda *_: {timed.variant: 1.0, other.variant: 1.07})
            == {}
        )
        assert ground.estimates(*cell)
        assert ground.estimates(one.problem, one.bucket + 1) == {}


def near_the_best(ground: Ground, problem: Problem, bucket: int) -> set[bytes]:
    ranked = ground.ranked(problem, bucket)
    return {ground.bundle.variant(i).cubin_sha256 for us, i in ranked if us <= MORE * ranked[0][0]}


@pytest.mark.parametrize("named", ["like", "again", "untried"])
def test_a_bundle_of_another_capability_is_refused(
    candidates: Path, small_plan: Plan, tmp_path: Path, named: str
) -> None:
    other = SHIPPED / "catalogue-sm80.msgpack"
    with gpus(candidates) as here, pytest.raises(InputError, match=r"it is for sm_80, the candidates are for sm_90a"):
        tune_problems(small_plan.buckets, candidates, tmp_path / "journal", executors=here, **{named: other})
    assert not (tmp_path / "journal").exists()


@pytest.mark.parametrize("count", [1, 3])
def test_every_cell_is_measured_once_and_the_fastest_ships(
    candidates: Path, small_plan: Plan, tmp_path: Path, count: int
) -> None:
    journal = tmp_path / "h200.journal"
    heard: list[int] = []
    watch = TuneObservers(on_cell=lambda progress: heard.append(progress.done))
    with gpus(candidates, count=count) as here:
        outcome = tune_problems(small_plan.buckets, candidates, journal, executors=here, observers=watch)
    assert (outcome.measured, outcome.left, outcome.known, outcome.failures) == (cells(small_plan), 0, 0, ())
    assert heard == list(range(1, cells(small_plan) + 1))
    contents = read_journal(journal)
    keys = [(one.problem, one.bucket) for one in contents.records]
    assert len(set(keys)) == len(keys) == cells(small_plan)

    found = read_candidates(candidates, small_plan)
    bundle = measured_bundle(small_plan, found, contents)
    assert bundle.gpus == (faketimer.H200,)
    assert set(bundle.cubins) <= {one.cubin for one in found.compiled}
    timed = {
        (one.problem, one.bucket): {timing.variant for timing in one.timings}
        for one in contents.records
        if isinstance(one, Measured)
    }
    assert all(timed.values())
    for problem, row in bundle.choices.items():
        for choice in row:
            assert (choice.source, choice.gpu) == (Source.MEASURED, 0)
            job = Job(problem, choice.bucket, ())
            shipped = {one.cubin_sha256 for one in bundle.variants if serves(one, problem)}
            best = min(faketimer.time_ns(job, sha) for sha in shipped & timed[problem, choice.bucket])
            chosen = bundle.variants[choice.variant]
            assert choice.time_ns == faketimer.time_ns(job, chosen.cubin_sha256)
            assert choice.time_ns <= best * 1.006  # or the modelled one, within the noise band
            if choice.runner_up is not None:
                runner_up = bundle.variants[choice.runner_up].cubin_sha256
                assert choice.runner_up_ns == faketimer.time_ns(job, runner_up)


def test_the_same_journal_gives_the_same_bytes_in_any_order(candidates: Path, small_plan: Plan, tmp_path: Path) -> None:
    journal = tmp_path / "h200.journal"
    with gpus(candidates) as here:
        tune_problems(small_plan.buckets, candidates, journal, executors=here)
    found, contents = read_candidates(candidates, small_plan), read_journal(journal)
    wanted = codec.encode(measured_bundle(small_plan, found, contents))
    records = list(contents.records)
    for seed in range(3):
        random.Random(seed).shuffle(records)
        shuffled = dataclasses.replace(contents, records=tuple(records))
        assert codec.encode(measured_bundle(small_plan, found, shuffled)) == wanted
    twice = dataclasses.replace(contents, records=(*records, *records))
    assert codec.encode(measured_bundle(small_plan, found, twice)) == wanted


def test_a_build_from_a_journal_ships_the_cubins_that_were_measured(
    candidates: Path, small_plan: Plan, small_space: Space, compiled_dir: Path, tmp_path: Path
) -> None:
    journal = tmp_path / "h200.journal"
    with gpus(candidates) as here:
        tune_problems(small_plan.buckets, candidates, journal, executors=here)
    given = Options(tmp_path / "given", cache=CompileCache(compiled_dir), space=small_space, journal=journal)
    (one,) = build_measured(small_plan, candidates, given).bundles
    (other,) = build(small_plan, (90,), dataclasses.replace(given, out=tmp_path / "compiled")).bundles
    assert one.path.read_bytes() == other.path.read_bytes()
    assert (one.measured, one.source, one.gpus) == (cells(small_plan), "measured", (faketimer.H200,))
    assert one.to_dict()["source"] == "measured"
    with open_bundle(candidates) as bundle:
        known = {variant.cubin_sha256 for variant in bundle.variants()}
    with open_bundle(one.path) as bundle:
        assert {variant.cubin_sha256 for variant in bundle.variants()} <= known
    modelled = dataclasses.replace(given, out=tmp_path / "modelled", journal=None, modelled=True)
    (third,) = build(small_plan, (90,), modelled).bundles
    assert (third.measured, third.source) == (0, "modelled")


def test_a_build_measures_and_goes_on_with_its_own_journal(
    small_plan: Plan, small_space: Space, compiled_dir: Path, tmp_path: Path
) -> None:
    calls: list[int] = []

    def tune(problems, candidates, journal, observers):
        with gpus(candidates) as here:
            outcome = tune_problems(problems, candidates, journal, executors=here, observers=observers)
        calls.append(outcome.measured)
        return outcome

    options = Options(tmp_path, cache=CompileCache(compiled_dir), space=small_space, measure=(90,), tune=tune)
    (first,) = build(small_plan, (90,), options).bundles
    assert first.measured == cells(small_plan)
    assert (tmp_path / "pretuned-sm90.journal").exists()
    (second,) = build(small_plan, (90,), options).bundles
    assert second.unchanged
    # Without a GPU what was measured beside the bundle still counts.
    (third,) = build(small_plan, (90,), dataclasses.replace(options, measure=())).bundles
    assert third.unchanged
    assert calls == [cells(small_plan), 0]


def test_out_of_time_it_stops_and_goes_on_later(candidates: Path, small_plan: Plan, tmp_path: Path) -> None:
    journal = tmp_path / "h200.journal"
    with gpus(candidates, run=faketimer.slow) as here:
        first = tune_problems(small_plan.buckets, candidates, journal, executors=here, budget_s=0.2)
    assert 0 < first.measured < cells(small_plan)
    assert first.left == cells(small_plan) - first.measured
    assert not first.finished
    found = read_candidates(candidates, small_plan)
    part = measured_bundle(small_plan, found, read_journal(journal))
    sources = [one.source for row in part.choices.values() for one in row]
    assert sources.count(Source.MEASURED) == first.measured  # the best so far
    with gpus(candidates) as here:
        second = tune_problems(small_plan.buckets, candidates, journal, executors=here)
    assert (second.known, second.measured, second.left) == (first.measured, first.left, 0)
    with gpus(candidates, run=faketimer.lost) as here:  # nobody is asked again
        third = tune_problems(small_plan.buckets, candidates, journal, executors=here)
    assert (third.known, third.measured) == (cells(small_plan), 0)


_TUNE = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[3:]
import faketimer
from conftest import ODD, SMALL
from test_tune import gpus
from pretuned.aot.interrupts import tidy_interrupts
from pretuned.aot.models import load_models
from pretuned.aot.plan import plan
from pretuned.aot.tune import TuneObservers, tune_problems
from pretuned.artifacts.types import Op
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


def tuner(candidates: Path, journal: Path) -> subprocess.Popen[str]:
    """A tuner in a process of its own."""
    script = journal.parent / "tune.py"
    script.write_text(_TUNE)
    here = Path(__file__).parent
    return subprocess.Popen(
        [sys.executable, str(script), str(candidates), str(journal), str(here), str(here / "workerjobs")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(journal.parent),
             "PYTHONPATH": os.pathsep.join([str(here), str(here / "workerjobs")])},
    )  # fmt: skip


def wait_for(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == text:
            return
    raise AssertionError(f"it ended before it said {text!r}: {process.stderr and process.stderr.read()}")


def test_killed_it_loses_the_job_in_flight_at_most(candidates: Path, small_plan: Plan, tmp_path: Path) -> None:
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
    assert (outcome.known, outcome.measured, outcome.left) == (kept, cells(small_plan) - kept, 0)
    whole = tmp_path / "whole.journal"
    with gpus(candidates) as here:
        tune_problems(small_plan.buckets, candidates, whole, executors=here)
    found = read_candidates(candidates, small_plan)
    bundles = [codec.encode(measured_bundle(small_plan, found, read_journal(one))) for one in (journal, whole)]
    assert bundles[0] == bundles[1]


def test_interrupted_it_says_what_is_kept_and_ends_its_workers(candidates: Path, tmp_path: Path) -> None:
    journal = tmp_path / "h200.journal"
    process = tuner(candidates, journal)
    wait_for(process, "cell 3")
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=30)
    kept = len(read_journal(journal).records)
    assert kept >= 3
    assert f"interrupted: {kept} of" in told
    assert "run the same command to go on" in told
    assert not list(tmp_path.glob("pretuned-build-*"))


def test_two_at_once_take_turns(candidates: Path, small_plan: Plan, tmp_path: Path) -> None:
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
    assert (outcome.known, outcome.measured) == (cells(small_plan), 0)  # the other one had done all of it
    assert len(notes) == 1
    assert f"another tuner (process {process.pid}) writes" in notes[0]


@pytest.mark.parametrize(
    ("run", "kind"), [(faketimer.wrong, WRONG), (faketimer.faults, FAULT), (faketimer.dies, DIED),
                      (faketimer.hangs, HUNG)]
)  # fmt: skip
def test_a_variant_that_misbehaves_is_told_skipped_and_never_ships(
    mine: Path, small_plan: Plan, tmp_path: Path, run: Callable[[Setup, Job], Result], kind: str
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
    assert [(one.kind, one.variant) for one in outcome.failures] == [(kind, bad.cubin_sha256)]
    assert any(f"a variant is out ({kind})" in note for note in notes)
    contents = read_journal(journal)
    assert sum(isinstance(one, Failure) for one in contents.records) == 1
    for record in contents.records:
        if isinstance(record, Measured):
            assert bad.cubin_sha256 not in {one.variant for one in record.timings}
    shipped = measured_bundle(small_plan, read_candidates(mine, small_plan), contents)
    assert bad.cubin_sha256 not in {one.cubin_sha256 for one in shipped.variants}
    assert shipped.variants
    with gpus(mine, run=faketimer.lost) as here:  # it is not tried again
        again = tune_problems(small_plan.buckets, mine, journal, executors=here)
    assert (again.known, again.measured) == (cells(small_plan), 0)


def test_a_worker_that_was_killed_by_others_costs_nothing(mine: Path, small_plan: Plan, tmp_path: Path) -> None:
    with gpus(mine, run=faketimer.dies_once) as here:
        outcome = tune_problems(small_plan.buckets, mine, tmp_path / "h200.journal", executors=here)
    assert (outcome.measured, outcome.left, outcome.failures) == (cells(small_plan), 0, ())


@pytest.mark.parametrize(
    ("greet", "why"),
    [(faketimer.lost, "the process on GPU 0 died"), (faketimer.lost_with_an_error, "CUDA error: device unavailable")],
)
def test_a_lost_gpu_ends_it_and_blames_no_variant(
    mine: Path, small_plan: Plan, tmp_path: Path, greet: Callable[[Setup], Hello], why: str
) -> None:
    journal = tmp_path / "h200.journal"
    with (
        gpus(mine, run=faketimer.dies_once, greet=greet) as here,
        pytest.raises(HostError, match=f"GPU 0 does not answer any more: {why}"),
    ):
        tune_problems(small_plan.buckets, mine, journal, executors=here)
    assert read_journal(journal).records == ()


def test_a_gpu_that_never_starts_is_the_machines_fault(mine: Path, small_plan: Plan, tmp_path: Path) -> None:
    Path(f"{mine}.died").touch()
    with (
        gpus(mine, greet=faketimer.lost) as here,
        pytest.raises(HostError, match="GPU 0: its worker does not start: the process on GPU 0 died"),
    ):
        tune_problems(small_plan.buckets, mine, tmp_path / "h200.journal", executors=here)


def test_a_worker_that_dies_before_it_takes_its_job_is_told_as_one_that_died(
    mine: Path, small_plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pretuned.aot.gpuworkers.start_worker", faketimer.never_begins)
    with (
        gpus(mine) as here,
        pytest.raises(HostError, match="GPU 0: its worker does not start: the process on GPU 0 is lost: All workers"),
    ):
        tune_problems(small_plan.buckets, mine, tmp_path / "h200.journal", executors=here)


def test_a_worker_that_dies_between_two_jobs_is_told_as_one_that_died(mine: Path, small_plan: Plan) -> None:
    problem, buckets = next(iter(small_plan.buckets.items()))
    job = Job(problem, buckets[0], (1,))
    with gpus(mine, run=faketimer.dies_afterwards) as (gpu,):
        gpu.start().result()
        gpu.submit(job).result()
        time.sleep(2)
        with pytest.raises(WorkerLost, match="the process on GPU 0 died") as lost:
            gpu.submit(job).result()
        assert lost.value.kind == DIED
        gpu.start().result()
        assert gpu.submit(job).result().measured


def test_a_build_goes_on_modelled_where_the_gpu_can_not_be_used(
    small_plan: Plan, small_space: Space, compiled_dir: Path, tmp_path: Path, candidates: Path
) -> None:
    with (
        gpus(candidates, greet=faketimer.without_cuda) as here,
        pytest.raises(NoGpu, match=r"GPU 0: its worker does not start: torch 2.* it is built without CUDA"),
    ):
        tune_problems(small_plan.buckets, candidates, tmp_path / "h200.journal", executors=here)
    assert not (tmp_path / "h200.journal").exists()

    def tune(problems, candidates, journal, observers):
        return None

    options = Options(tmp_path, cache=CompileCache(compiled_dir), space=small_space, measure=(90,), tune=tune)
    (one,) = build(small_plan, (90,), options).bundles
    assert (one.source, one.tuned) == ("modelled", None)


def test_a_lost_gpu_leaves_its_cells_to_the_others(mine: Path, small_plan: Plan, tmp_path: Path) -> None:
    notes: list[str] = []
    watch = TuneObservers(on_note=notes.append)
    with gpus(mine, run=faketimer.dies_on_1, greet=faketimer.lost_1, count=2) as here:
        outcome = tune_problems(small_plan.buckets, mine, tmp_path / "journal", executors=here, observers=watch)
    assert (outcome.measured, outcome.left, outcome.failures) == (cells(small_plan), 0, ())
    assert [note for note in notes if note.startswith("GPU 1 is out: the process on GPU 1 died")]


def test_the_cells_of_one_weight_are_shared_out_in_the_end(mine: Path, small_plan: Plan, tmp_path: Path) -> None:
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


def test_two_workers_on_one_gpu_are_refused(candidates: Path, small_plan: Plan, tmp_path: Path) -> None:
    with (
        gpus(candidates, greet=faketimer.same_uuid, count=2) as here,
        pytest.raises(InputError, match="GPU 0 and GPU 1 use the same GPU: give each worker its own"),
    ):
        tune_problems(small_plan.buckets, candidates, tmp_path / "journal", executors=here)


def test_gpus_that_differ_are_refused(candidates: Path, small_plan: Plan, tmp_path: Path) -> None:
    with (
        gpus(candidates, greet=faketimer.other_gpu, count=2) as here,
        pytest.raises(InputError, match=r"the GPUs differ: NVIDIA H200 .* and NVIDIA H100"),
    ):
        tune_problems(small_plan.buckets, candidates, tmp_path / "journal", executors=here)


def test_candidates_for_another_problem_are_refused(candidates: Path, tmp_path: Path) -> None:
    problem = Problem(Op.DW, DType.BF16, 8, 256, 256)
    with (
        gpus(candidates) as here,
        pytest.raises(InputError, match="no variant serves dW bf16 E=8 N=256 K=256: run aot compile"),
    ):
        tune_problems({problem: (16,)}, candidates, tmp_path / "journal", executors=here)


def test_a_journal_of_other_code_is_refused(
    candidates: Path, small_plan: Plan, small_space: Space, compiled_dir: Path, tmp_path: Path
) -> None:
    journal = tmp_path / "h200.journal"
    with gpus(candidates) as here:
        tune_problems(small_plan.buckets, candidates, journal, executors=here)
    other = Space(lambda op, dtype, sm: small_space.aligned(op, dtype, 80)[:1], lambda op, dtype, sm: ())
    aligned = next(one for one in small_plan.problems if is_aligned(one))
    forward = Plan({aligned: small_plan.buckets[aligned]}, ())
    path = tmp_path / "other.msgpack"
    compile_candidates(forward, 90, path, Options(tmp_path, cache=CompileCache(compiled_dir), space=other))
    with pytest.raises(InputError, match=r"not one of its \d+ variants is among the candidates"):
        measured_bundle(forward, read_candidates(path), read_journal(journal))


def test_what_does_not_fit_the_memory_is_left_modelled(candidates: Path, small_plan: Plan, tmp_path: Path) -> None:
    problem = small_plan.problems[0]
    assert fits(problem, 1 << 20, 143771)
    assert not fits(problem, 1 << 31, 143771)
    assert not fits(Problem(Op.FORWARD, DType.BF16, 256, 4096, 7168), 16, 16_000)  # 15 GB of weights
    with gpus(candidates) as here:
        outcome = tune_problems({problem: (16, 1 << 31)}, candidates, tmp_path / "journal", executors=here)
    assert (outcome.total, outcome.measured, outcome.too_large, outcome.left) == (2, 1, 1, 0)
