"""The tuner with real candidates, worker processes and journals; the times alone are made up (faketimer.py)."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
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

from pretuned.aot.build.build import build, build_measured, compile_candidates
from pretuned.aot.build.options import BuildOptions
from pretuned.aot.choose.bundle import Ships, measured_bundle, shipping
from pretuned.aot.choose.candidates import read_candidates
from pretuned.aot.choose.choices import Chosen, choose_among_all
from pretuned.aot.cli.tuning import told
from pretuned.aot.compile.cache import CompileCache
from pretuned.aot.executors.local import LocalExecutor
from pretuned.aot.journal.file import Contents, open_journal, read_journal
from pretuned.aot.journal.records import DIED, FAULT, HUNG, WRONG, Failure, Measured, Timing
from pretuned.aot.journal.timings import Cell, Timings
from pretuned.aot.measure.job import MeasureJob, MeasureResult, Setup, WorkerInfo, WorkerLost
from pretuned.aot.plan.families import Pool, serves
from pretuned.aot.plan.plan import BuildPlan
from pretuned.aot.process.scratch import scratch_folder
from pretuned.aot.tune.outcome import CellsDone
from pretuned.aot.tune.remeasure import Remeasure, looks
from pretuned.aot.tune.shortlist import ConfigPairs
from pretuned.aot.tune.space import TuningSpace, fits
from pretuned.aot.tune.tuner import Entrants, NoGpu, TuneObservers, tune_problems
from pretuned.artifacts.errors import CompileError, HostError, InputError
from pretuned.artifacts.files.bundle_file import open_bundle
from pretuned.artifacts.format import codec
from pretuned.artifacts.records.bundle import Choice, Source
from pretuned.artifacts.records.precision import DType
from pretuned.artifacts.records.problem import Op, Problem
from pretuned.kernels.contract.alignment import has_aligned_rows

SHIPPED = Path(__file__).parents[3] / "artifacts" / "bundles"
Gpus = Callable[..., contextlib.AbstractContextManager[list[LocalExecutor]]]


@pytest.fixture(scope="module")
def candidates(
    tmp_path_factory: pytest.TempPathFactory, compiled_dir: Path, small_space: Pool, small_plan: BuildPlan
) -> Path:
    """Real cubins for 90: two aligned configs and a fallback in each form."""
    path = tmp_path_factory.mktemp("candidates") / "candidates.msgpack"
    options = BuildOptions(path.parent, cache=CompileCache(compiled_dir), space=small_space)
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
    run: Callable[[Setup, MeasureJob], MeasureResult] = faketimer.run,
    greet: Callable[[Setup], WorkerInfo] = faketimer.greet,
    count: int = 1,
    timeout_s: float = 60.0,
) -> Iterator[list[LocalExecutor]]:
    """Worker processes without a GPU."""
    with open_bundle(candidates) as bundle:
        digest = bundle.digest
    with scratch_folder() as scratch:
        found = [
            LocalExecutor(Setup(str(candidates), digest, i), scratch, greet=greet, run=run, timeout_s=timeout_s)
            for i in range(count)
        ]
        try:
            yield found
        finally:
            for one in found:
                one.shutdown()


def cells(plan: BuildPlan) -> int:
    return plan.choices


def test_candidates_are_every_variant_and_modelled(candidates: Path, small_plan: BuildPlan) -> None:
    found = read_candidates(candidates, small_plan)
    assert len(found.compiled) == 3 * 3 + 6 + 2  # plain, gather and scatter; and passes
    with open_bundle(candidates) as bundle:
        for problem in small_plan.problems:
            choices = bundle.find(problem)
            assert [one.bucket for one in choices] == list(small_plan.buckets[problem])
            assert {one.source for one in choices} == {Source.MODELLED}


def test_what_another_bundle_has_for_a_cell_is_asked(candidates: Path, small_plan: BuildPlan) -> None:
    with open_bundle(candidates) as bundle:
        ground = TuningSpace.of(small_plan.buckets, bundle, faketimer.H200, 90, 0.1, bundle)
        alone = TuningSpace.of(small_plan.buckets, bundle, faketimer.H200, 90, 0.1)
        for problem, buckets in small_plan.buckets.items():
            for choice in bundle.find(problem):
                named = [i for i in (choice.variant, choice.runner_up) if i is not None]
                assert ground.elsewhere(problem, choice.bucket) == [bundle.variant(i).config for i in named]
                assert alone.elsewhere(problem, choice.bucket) == []
            assert ground.elsewhere(problem, 2 * buckets[-1]) == []
        assert ground.elsewhere(dataclasses.replace(problem, E=problem.E + 1), 1) == []


def test_it_is_measured_beside_the_models_first(
    candidates: Path, small_plan: BuildPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of each cell the variant that the model puts last: without it two others are measured."""
    monkeypatch.setattr(TuningSpace, "elsewhere", lambda self, problem, bucket: [last(self, problem, bucket)])
    with gpus(candidates) as here, open_bundle(candidates) as bundle:
        tune_problems(
            small_plan.buckets, candidates, tmp_path / "journal", executors=here, entrants=Entrants(like=candidates)
        )
        ground = TuningSpace.of(small_plan.buckets, bundle, faketimer.H200, 90, 0.1)
        for one in read_journal(tmp_path / "journal").records:
            assert isinstance(one, Measured)
            names = {bundle.variant(i).config for _, i in ground.ranked(one.problem, one.bucket)}
            tried = {sha: ground.index[one.problem, sha] for sha in (timing.variant for timing in one.timings)}
            assert last(ground, one.problem, one.bucket) in {bundle.variant(i).config for i in tried.values()}
            assert len(tried) == min(4, len(names))


def everything(candidates: Path, small_plan: BuildPlan) -> Ships:
    """Whatever the journal says: all candidates ship, and the model's choices, which made-up times don't follow."""
    chosen = choose_among_all(small_plan, read_candidates(candidates).compiled, 90)
    return lambda contents: chosen


def wanted_looks(candidates: Path, small_plan: BuildPlan, contents: Contents, ships: Ships) -> dict[Cell, Remeasure]:
    with open_bundle(candidates) as bundle:
        ground = TuningSpace.of(small_plan.buckets, bundle, faketimer.H200, 90, 0.1)
        return looks(ships(contents), contents, ground.estimates)


def records_of(journal: Path) -> list[Measured]:
    return [one for one in read_journal(journal).records if isinstance(one, Measured)]


@pytest.fixture
def doubted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that was not timed may be the fastest: what is looked at is what lost."""
    monkeypatch.setattr("pretuned.aot.tune.remeasure.LIKELY", 0.0)


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """No choice has lost: what is looked at is what was not timed."""
    monkeypatch.setattr("pretuned.aot.tune.remeasure.MAX_LOSS", 100.0)
    monkeypatch.setattr(
        "pretuned.aot.tune.remeasure.LIKELY", MORE
    )  # the models are tiny, and their estimates far apart


MORE = 1.5


@pytest.mark.usefixtures("doubted")
def test_a_choice_that_took_more_than_the_fastest_is_measured_once_more(
    candidates: Path, small_plan: BuildPlan, tmp_path: Path
) -> None:
    """More rounds find other times."""
    journal, ships = tmp_path / "h200.journal", everything(candidates, small_plan)
    with gpus(candidates) as here:
        tune_problems(small_plan.buckets, candidates, journal, executors=here)
    first = {(one.problem, one.bucket): one for one in records_of(journal)}
    wanted = wanted_looks(candidates, small_plan, read_journal(journal), ships)
    for cell, one in first.items():
        times = {timing.variant: timing.time_ns for timing in one.timings}
        lost = times[one.modelled] / min(times.values())
        assert (cell in wanted) is (lost > 1.02)  # the choice is the model's first, which is always measured
        if lost > 1.02:
            near = {sha for sha, time in times.items() if time <= 1.1 * min(times.values())}
            assert wanted[cell] == Remeasure(frozenset(near | {one.modelled}), more=True)
    assert 3 < len(wanted) < len(first)

    heard: list[CellsDone] = []
    watch = TuneObservers(on_start=heard.append, on_cell=heard.append)
    with gpus(candidates, faketimer.steady) as here:
        outcome = tune_problems(small_plan.buckets, candidates, journal, executors=here, ships=ships, observers=watch)
    assert (outcome.known, outcome.measured, outcome.left) == (len(first), 0, 0)
    assert (outcome.looked, outcome.to_look, outcome.finished) == (len(wanted), 0, True)
    assert [(one.looking, one.done, one.total) for one in heard] == [
        (False, len(first), len(first)), (True, 0, len(wanted)),
        *((False, i + 1, len(wanted)) for i in range(len(wanted))),
    ]  # fmt: skip
    later = records_of(journal)[len(first) :]
    assert sorted((str(one.problem), one.bucket) for one in later) == sorted((str(p), M) for p, M in wanted)
    times = Timings.of(read_journal(journal)).cells
    for one in later:
        assert {timing.variant for timing in one.timings} == wanted[one.problem, one.bucket].variants
        assert one.timings[0].variant == one.modelled == first[one.problem, one.bucket].modelled
        assert {timing.rounds for timing in one.timings} == {60}
        for timing in one.timings:  # they count for more than those of 20 rounds
            assert times[one.problem, one.bucket].times_ns[timing.variant] == timing.time_ns == 12_000
    assert wanted_looks(candidates, small_plan, read_journal(journal), ships) == {}
    with gpus(candidates, faketimer.steady) as here:
        outcome = tune_problems(small_plan.buckets, candidates, journal, executors=here, ships=ships)
    assert (outcome.known, outcome.measured, outcome.looked) == (len(first), 0, 0)


def last(ground: TuningSpace, problem: Problem, bucket: int) -> ConfigPairs:
    return ground.bundle.variant(ground.ranked(problem, bucket)[-1][1]).config


@pytest.mark.usefixtures("doubted")
def test_a_third_look_is_never_taken(candidates: Path, small_plan: BuildPlan, tmp_path: Path) -> None:
    """Though the second one found the same times: the choice is what is slow."""
    journal, ships = tmp_path / "h200.journal", everything(candidates, small_plan)
    with gpus(candidates) as here:
        first = tune_problems(small_plan.buckets, candidates, journal, executors=here, ships=ships)
        second = tune_problems(small_plan.buckets, candidates, journal, executors=here, ships=ships)
    assert first.measured == cells(small_plan)
    assert first.looked > 3
    assert (second.measured, second.looked, second.known) == (0, 0, cells(small_plan))


@pytest.mark.usefixtures("doubted")
def test_what_failed_is_no_reason_for_a_second_look(candidates: Path, small_plan: BuildPlan, tmp_path: Path) -> None:
    journal, ships = tmp_path / "h200.journal", everything(candidates, small_plan)
    with gpus(candidates) as here:
        tune_problems(small_plan.buckets, candidates, journal, executors=here)
    contents = read_journal(journal)
    records = {(one.problem, one.bucket): one for one in records_of(journal)}
    for cell in wanted_looks(candidates, small_plan, contents, ships):
        faster = [one.variant for one in records[cell].timings if one.variant != records[cell].modelled]
        failed = tuple(Failure(*cell, sha, WRONG, "relative error 0.5") for sha in faster)
        less = dataclasses.replace(contents, records=(*contents.records, *failed))
        assert cell not in wanted_looks(candidates, small_plan, less, ships)


@pytest.mark.usefixtures("doubted")
def test_a_second_look_that_is_interrupted_goes_on(candidates: Path, small_plan: BuildPlan, tmp_path: Path) -> None:
    journal, ships = tmp_path / "h200.journal", everything(candidates, small_plan)
    with gpus(candidates) as here:
        tune_problems(small_plan.buckets, candidates, journal, executors=here)
    wanted = wanted_looks(candidates, small_plan, read_journal(journal), ships)

    def stop(progress: object) -> None:
        raise KeyboardInterrupt

    words = f"interrupted: {cells(small_plan)} of {cells(small_plan)} cells are measured and kept"
    watch = TuneObservers(on_cell=stop)
    with gpus(candidates) as here, pytest.raises(KeyboardInterrupt, match=words):
        tune_problems(small_plan.buckets, candidates, journal, executors=here, ships=ships, observers=watch)
    with gpus(candidates) as here:
        outcome = tune_problems(small_plan.buckets, candidates, journal, executors=here, ships=ships)
    assert (outcome.looked, outcome.to_look) == (len(wanted) - 1, 0)


@pytest.mark.usefixtures("doubted")
def test_out_of_time_the_looks_are_left_for_later(candidates: Path, small_plan: BuildPlan, tmp_path: Path) -> None:
    journal, ships = tmp_path / "h200.journal", everything(candidates, small_plan)
    with gpus(candidates) as here:
        tune_problems(small_plan.buckets, candidates, journal, executors=here)
    wanted = wanted_looks(candidates, small_plan, read_journal(journal), ships)
    with gpus(candidates, faketimer.slow) as here:
        outcome = tune_problems(small_plan.buckets, candidates, journal, executors=here, ships=ships, budget_s=0.2)
    assert 0 < outcome.looked < len(wanted)
    assert outcome.to_look == len(wanted) - outcome.looked
    assert (outcome.left, outcome.finished) == (0, False)
    assert f"{outcome.to_look} cells are to be looked at once more" in told(outcome)
    with gpus(candidates) as here:
        rest = tune_problems(small_plan.buckets, candidates, journal, executors=here, ships=ships)
    assert (rest.looked, rest.to_look, rest.finished) == (outcome.to_look, 0, True)


@pytest.mark.usefixtures("doubted")
def test_a_look_that_can_not_be_taken_is_not_tried_for_ever(
    candidates: Path, small_plan: BuildPlan, tmp_path: Path
) -> None:
    journal, ships, heard = tmp_path / "h200.journal", everything(candidates, small_plan), list[str]()
    with gpus(candidates) as here:
        tune_problems(small_plan.buckets, candidates, journal, executors=here)
    wanted = wanted_looks(candidates, small_plan, read_journal(journal), ships)
    with gpus(candidates, faketimer.unable) as here:
        watch = TuneObservers(on_note=heard.append)
        outcome = tune_problems(small_plan.buckets, candidates, journal, executors=here, ships=ships, observers=watch)
    assert (outcome.looked, outcome.to_look, outcome.unable) == (0, 0, 0)
    assert sum("left as it was: it can't be measured here" in one for one in heard) == len(wanted)


@pytest.mark.usefixtures("untried")
def test_what_ships_is_timed_wherever_it_may_be_the_fastest(
    candidates: Path, small_plan: BuildPlan, tmp_path: Path
) -> None:
    """Here all candidates ship, and of each cell the modelled choice alone was timed."""
    journal, whole, ships = tmp_path / "h200.journal", tmp_path / "whole.journal", everything(candidates, small_plan)
    with gpus(candidates) as here:
        tune_problems(small_plan.buckets, candidates, whole, executors=here)
    with open_journal(journal, read_journal(whole).header) as held:
        for one in records_of(whole):
            held.append([dataclasses.replace(one, timings=one.timings[:1], duel=None)])
    contents = read_journal(journal)
    before = Timings.of(contents).cells
    wanted = wanted_looks(candidates, small_plan, contents, ships)
    with open_bundle(candidates) as bundle:
        ground = TuningSpace.of(small_plan.buckets, bundle, contents.header.gpu, 90, 0.1)
        likely = {cell: near_the_best(ground, *cell) for cell in before}
    assert all(
        look == Remeasure(frozenset(likely[cell] | {*before[cell].times_ns}), False) for cell, look in wanted.items()
    )
    assert set(wanted) == {cell for cell in before if len(likely[cell]) > 1}
    assert 3 < len(wanted) < len(before)
    cell, look = next(iter(wanted.items()))
    failed = Failure(*cell, next(iter(look.variants - before[cell].times_ns.keys())), WRONG, "relative error 0.5")
    less = dataclasses.replace(contents, records=(*contents.records, failed))
    assert all(failed.variant not in one.variants
               for one in wanted_looks(candidates, small_plan, less, ships).values())  # fmt: skip

    with gpus(candidates) as here:
        outcome = tune_problems(small_plan.buckets, candidates, journal, executors=here, ships=ships)
        assert (outcome.known, outcome.measured, outcome.looked) == (len(before), 0, len(wanted))
        for one in records_of(journal)[len(before) :]:
            assert {timing.variant for timing in one.timings} == wanted[one.problem, one.bucket].variants
            assert {timing.rounds for timing in one.timings} == {20}, "no more rounds"
        outcome = tune_problems(small_plan.buckets, candidates, journal, executors=here, ships=ships)
    assert (outcome.known, outcome.measured, outcome.looked) == (len(before), 0, 0)


@pytest.mark.usefixtures("untried")
def test_only_what_ships_is_timed_beside_those_that_are_ahead(
    candidates: Path, small_plan: BuildPlan, tmp_path: Path
) -> None:
    journal = tmp_path / "h200.journal"
    with gpus(candidates) as here:
        tune_problems(small_plan.buckets, candidates, journal, executors=here)
    contents = read_journal(journal)
    one = next(one for one in records_of(journal) if len(one.timings) > 1)
    timed, other = one.timings[:2]
    ns = 100_000

    def like(name: bytes, factor: float) -> Timing:
        return dataclasses.replace(timed, variant=name * 32, ns=(round(ns * factor),) * 2)

    first = dataclasses.replace(timed, ns=(ns, ns))
    timings = (first, like(b"a", 1.029), like(b"b", 1.031), like(b"c", 2.0))
    record = dataclasses.replace(one, timings=timings, modelled=timed.variant, duel=None)
    contents = dataclasses.replace(contents, records=(record,))
    cell = (one.problem, one.bucket)
    known = {timing.variant: 3.0 for timing in timings}

    def found(*ships: bytes, **estimates: float) -> dict[Cell, Remeasure]:
        variants = tuple(SimpleNamespace(variant=SimpleNamespace(cubin_sha256=sha)) for sha in ships)
        choices = {one.problem: (Choice(one.bucket, 0, Source.MODELLED, ns),)}
        able = known | {timed.variant: 1.0, other.variant: estimates.get("other", 1.0)}
        return looks(Chosen(variants, choices, ()), contents, lambda problem, bucket: able)  # type: ignore[arg-type]

    more = Remeasure(frozenset({timed.variant, b"a" * 32, other.variant}), False)
    assert found(timed.variant, other.variant) == {cell: more}
    assert found(timed.variant) == {}
    assert found(other.variant) == {cell: more}
    assert found(timed.variant, other.variant, other=MORE + 0.1) == {}
    with open_bundle(candidates) as bundle:
        ground = TuningSpace.of(small_plan.buckets, bundle, contents.header.gpu, 90, 0.1)
        assert ground.estimates(*cell)
        assert ground.estimates(one.problem, one.bucket + 1) == {}


def test_one_run_measures_and_looks_and_the_next_does_nothing(
    candidates: Path, small_plan: BuildPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what would ship in earnest, which the looks change; at first every other cell has one contender alone."""
    cell = itertools.count()
    monkeypatch.setattr("pretuned.aot.tune.remeasure.LIKELY", 2.0)
    monkeypatch.setattr("pretuned.aot.tune.scheduler.contenders", lambda ranked, *rest: ranked[: 1 + next(cell) % 2])
    journal, found = tmp_path / "h200.journal", read_candidates(candidates, small_plan)
    ships = shipping(small_plan, found)
    with gpus(candidates) as here:
        first = tune_problems(small_plan.buckets, candidates, journal, executors=here, ships=ships)
        second = tune_problems(small_plan.buckets, candidates, journal, executors=here, ships=ships)
    assert (first.measured, first.left, first.to_look, first.finished) == (cells(small_plan), 0, 0, True)
    assert first.looked > 3
    assert len(records_of(journal)) == first.measured + first.looked
    assert (second.measured, second.looked) == (0, 0)
    assert wanted_looks(candidates, small_plan, read_journal(journal), ships) == {}
    times = Timings.of(read_journal(journal)).cells
    chosen = ships(read_journal(journal))
    for problem, choices in chosen.choices.items():
        for choice in choices:
            known = times[problem, choice.bucket].times_ns
            assert known[chosen.variants[choice.variant].variant.cubin_sha256] == min(known.values())


def test_where_nothing_would_ship_nothing_is_looked_at(candidates: Path, small_plan: BuildPlan, tmp_path: Path) -> None:
    """The build says so."""

    def ships(contents: Contents) -> Chosen:
        raise CompileError("not one variant works on the GPU")

    with gpus(candidates) as here:
        outcome = tune_problems(small_plan.buckets, candidates, tmp_path / "journal", executors=here, ships=ships)
    assert (outcome.measured, outcome.looked, outcome.finished) == (cells(small_plan), 0, True)


def near_the_best(ground: TuningSpace, problem: Problem, bucket: int) -> set[bytes]:
    ranked = ground.ranked(problem, bucket)
    return {ground.bundle.variant(i).cubin_sha256 for us, i in ranked if us <= MORE * ranked[0][0]}


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
            job = MeasureJob(problem, choice.bucket, ())
            shipped = {one.cubin_sha256 for one in bundle.variants if serves(one, problem)}
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
    candidates: Path, small_plan: BuildPlan, small_space: Pool, compiled_dir: Path, tmp_path: Path
) -> None:
    journal = tmp_path / "h200.journal"
    with gpus(candidates) as here:
        tune_problems(small_plan.buckets, candidates, journal, executors=here)
    given = BuildOptions(tmp_path / "given", cache=CompileCache(compiled_dir), space=small_space, journal=journal)
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
    small_plan: BuildPlan, small_space: Pool, compiled_dir: Path, tmp_path: Path
) -> None:
    calls: list[int] = []

    def tune(problems, candidates, journal, ships, observers):
        with gpus(candidates) as here:
            outcome = tune_problems(problems, candidates, journal, executors=here, ships=ships, observers=observers)
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
from test_tuner import gpus
from pretuned.aot.process.interrupts import tidy_interrupts
from pretuned.aot.models.load import load_models
from pretuned.aot.plan.plan import plan
from pretuned.aot.tune.tuner import TuneObservers, tune_problems
from pretuned.artifacts.records.problem import Op
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
    paths = [str(here), str(here.parent), str(here.parents[1] / "support")]
    return subprocess.Popen(
        [sys.executable, str(script), str(candidates), str(journal), *paths],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "TMPDIR": str(journal.parent),
             "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip


def wait_for(process: subprocess.Popen[str], text: str) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == text:
            return
    raise AssertionError(f"it ended before it said {text!r}: {process.stderr and process.stderr.read()}")


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
    assert (outcome.known, outcome.measured) == (cells(small_plan), 0)  # the other one had done all of it
    assert len(notes) == 1
    assert f"another tuner (process {process.pid}) writes" in notes[0]


@pytest.mark.parametrize(
    ("run", "kind"), [(faketimer.wrong, WRONG), (faketimer.faults, FAULT), (faketimer.dies, DIED),
                      (faketimer.hangs, HUNG)]
)  # fmt: skip
def test_a_variant_that_misbehaves_is_told_skipped_and_never_ships(
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


def test_a_worker_that_dies_before_it_takes_its_job_is_told_as_one_that_died(
    mine: Path, small_plan: BuildPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pretuned.aot.executors.local.start_worker", faketimer.never_begins)
    with (
        gpus(mine) as here,
        pytest.raises(HostError, match="GPU 0: its worker does not start: the process on GPU 0 is lost: All workers"),
    ):
        tune_problems(small_plan.buckets, mine, tmp_path / "h200.journal", executors=here)


def test_a_worker_that_dies_between_two_jobs_is_told_as_one_that_died(mine: Path, small_plan: BuildPlan) -> None:
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


def test_a_build_goes_on_modelled_where_the_gpu_can_not_be_used(
    small_plan: BuildPlan, small_space: Pool, compiled_dir: Path, tmp_path: Path, candidates: Path
) -> None:
    with (
        gpus(candidates, greet=faketimer.without_cuda) as here,
        pytest.raises(NoGpu, match=r"GPU 0: its worker does not start: torch 2.* it is built without CUDA"),
    ):
        tune_problems(small_plan.buckets, candidates, tmp_path / "h200.journal", executors=here)
    assert not (tmp_path / "h200.journal").exists()

    def tune(problems, candidates, journal, ships, observers):
        return None

    options = BuildOptions(tmp_path, cache=CompileCache(compiled_dir), space=small_space, measure=(90,), tune=tune)
    (one,) = build(small_plan, (90,), options).bundles
    assert (one.source, one.tuned) == ("modelled", None)


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
    aligned = next(one for one in small_plan.problems if has_aligned_rows(one))
    forward = BuildPlan({aligned: small_plan.buckets[aligned]}, ())
    path = tmp_path / "other.msgpack"
    compile_candidates(forward, 90, path, BuildOptions(tmp_path, cache=CompileCache(compiled_dir), space=other))
    with pytest.raises(InputError, match=r"not one of its \d+ variants is among the candidates"):
        measured_bundle(forward, read_candidates(path), read_journal(journal))


def test_what_does_not_fit_the_memory_is_left_modelled(candidates: Path, small_plan: BuildPlan, tmp_path: Path) -> None:
    problem = small_plan.problems[0]
    assert fits(problem, 1 << 20, 143771)
    assert not fits(problem, 1 << 31, 143771)
    assert not fits(Problem(Op.FORWARD, DType.BF16, 256, 4096, 7168), 16, 16_000)  # 15 GB of weights
    with gpus(candidates) as here:
        outcome = tune_problems({problem: (16, 1 << 31)}, candidates, tmp_path / "journal", executors=here)
    assert (outcome.total, outcome.measured, outcome.too_large, outcome.left) == (2, 1, 1, 0)
