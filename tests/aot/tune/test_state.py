"""Cells that are measured again at the end: choices that lost, and shipped variants without a time."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import faketimer
import pytest
from tuning import cells, everything, gpus, records_of, wanted_looks

from pretuned.aot.choose.bundle import shipping
from pretuned.aot.choose.candidates import read_candidates
from pretuned.aot.choose.choices import Chosen
from pretuned.aot.cli.tuning import outcome_text
from pretuned.aot.journal.file import Contents, open_journal, read_journal
from pretuned.aot.journal.records import WRONG, Failure, Timing
from pretuned.aot.journal.timings import Cell, Timings
from pretuned.aot.plan.plan import BuildPlan
from pretuned.aot.tune.scheduler import CellsDone, Remeasure, cells_to_remeasure
from pretuned.aot.tune.space import TuningSpace
from pretuned.aot.tune.tuner import TuneObservers, tune_problems
from pretuned.artifacts.bundle_file import open_bundle
from pretuned.artifacts.errors import CompileError
from pretuned.artifacts.records import Choice, Problem, Source

pytestmark = pytest.mark.slow


@pytest.fixture
def doubted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that was not timed may be the fastest: what is looked at is what lost."""
    monkeypatch.setattr("pretuned.aot.tune.scheduler.LIKELY", 0.0)


@pytest.fixture
def untried(monkeypatch: pytest.MonkeyPatch) -> None:
    """No choice has lost: what is looked at is what was not timed."""
    monkeypatch.setattr("pretuned.aot.tune.scheduler.MAX_LOSS", 100.0)
    monkeypatch.setattr("pretuned.aot.tune.scheduler.LIKELY", MORE)  # estimates of tiny models are far apart


MORE = 1.5


@pytest.mark.usefixtures("doubted")
def test_a_choice_that_took_more_than_the_fastest_is_measured_once_more(
    candidates: Path, small_plan: BuildPlan, tmp_path: Path
) -> None:
    """More rounds find other times."""
    journal, ships = tmp_path / "h200.journal", everything(candidates, small_plan)
    with gpus(candidates) as here:
        tune_problems(small_plan.buckets, candidates, journal, executors=here)
    first = {(value.problem, value.bucket): value for value in records_of(journal)}
    wanted = wanted_looks(candidates, small_plan, read_journal(journal), ships)
    for cell, record in first.items():
        times = {timing.variant: timing.time_ns for timing in record.timings}
        lost = times[record.modelled] / min(times.values())
        assert (cell in wanted) is (lost > 1.02)  # the choice is the model's first, which is always measured
        if lost > 1.02:
            near = {sha for sha, time in times.items() if time <= 1.1 * min(times.values())}
            assert wanted[cell] == Remeasure(frozenset(near | {record.modelled}), more=True)
    assert 3 < len(wanted) < len(first)

    heard: list[CellsDone] = []
    watch = TuneObservers(on_start=heard.append, on_cell=heard.append)
    with gpus(candidates, faketimer.steady) as here:
        outcome = tune_problems(small_plan.buckets, candidates, journal, executors=here, ships=ships, observers=watch)
    assert (outcome.in_journal, outcome.measured, outcome.left) == (len(first), 0, 0)
    assert (outcome.remeasured, outcome.to_remeasure, outcome.finished) == (len(wanted), 0, True)
    assert [(progress.second_pass, progress.done, progress.total) for progress in heard] == [
        (False, len(first), len(first)),
        (True, 0, len(wanted)),
        *((False, i + 1, len(wanted)) for i in range(len(wanted))),
    ]
    later = records_of(journal)[len(first) :]
    assert sorted((str(record.problem), record.bucket) for record in later) == sorted((str(p), M) for p, M in wanted)
    times = Timings.of(read_journal(journal)).cells
    for record in later:
        assert {timing.variant for timing in record.timings} == wanted[record.problem, record.bucket].variants
        assert record.timings[0].variant == record.modelled == first[record.problem, record.bucket].modelled
        assert {timing.rounds for timing in record.timings} == {60}
        for timing in record.timings:  # they count for more than those of 20 rounds
            assert times[record.problem, record.bucket].times_ns[timing.variant] == timing.time_ns == 12_000
    assert wanted_looks(candidates, small_plan, read_journal(journal), ships) == {}
    with gpus(candidates, faketimer.steady) as here:
        outcome = tune_problems(small_plan.buckets, candidates, journal, executors=here, ships=ships)
    assert (outcome.in_journal, outcome.measured, outcome.remeasured) == (len(first), 0, 0)


@pytest.mark.usefixtures("doubted")
def test_a_third_look_is_never_taken(candidates: Path, small_plan: BuildPlan, tmp_path: Path) -> None:
    """Though the second one found the same times: the choice is what is slow."""
    journal, ships = tmp_path / "h200.journal", everything(candidates, small_plan)
    with gpus(candidates) as here:
        first = tune_problems(small_plan.buckets, candidates, journal, executors=here, ships=ships)
        second = tune_problems(small_plan.buckets, candidates, journal, executors=here, ships=ships)
    assert first.measured == cells(small_plan)
    assert first.remeasured > 3
    assert (second.measured, second.remeasured, second.in_journal) == (0, 0, cells(small_plan))


@pytest.mark.usefixtures("doubted")
def test_what_failed_is_no_reason_for_a_second_pass(candidates: Path, small_plan: BuildPlan, tmp_path: Path) -> None:
    journal, ships = tmp_path / "h200.journal", everything(candidates, small_plan)
    with gpus(candidates) as here:
        tune_problems(small_plan.buckets, candidates, journal, executors=here)
    contents = read_journal(journal)
    records = {(record.problem, record.bucket): record for record in records_of(journal)}
    for cell in wanted_looks(candidates, small_plan, contents, ships):
        faster = [timing.variant for timing in records[cell].timings if timing.variant != records[cell].modelled]
        failed = tuple(Failure(*cell, sha, WRONG, "relative error 0.5") for sha in faster)
        less = dataclasses.replace(contents, records=(*contents.records, *failed))
        assert cell not in wanted_looks(candidates, small_plan, less, ships)


@pytest.mark.usefixtures("doubted")
def test_a_second_pass_that_is_interrupted_goes_on(candidates: Path, small_plan: BuildPlan, tmp_path: Path) -> None:
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
    assert (outcome.remeasured, outcome.to_remeasure) == (len(wanted) - 1, 0)


@pytest.mark.usefixtures("doubted")
def test_out_of_time_the_looks_are_left_for_later(candidates: Path, small_plan: BuildPlan, tmp_path: Path) -> None:
    journal, ships = tmp_path / "h200.journal", everything(candidates, small_plan)
    with gpus(candidates) as here:
        tune_problems(small_plan.buckets, candidates, journal, executors=here)
    wanted = wanted_looks(candidates, small_plan, read_journal(journal), ships)
    with gpus(candidates, faketimer.slow) as here:
        outcome = tune_problems(small_plan.buckets, candidates, journal, executors=here, ships=ships, budget_s=0.2)
    assert 0 < outcome.remeasured < len(wanted)
    assert outcome.to_remeasure == len(wanted) - outcome.remeasured
    assert (outcome.left, outcome.finished) == (0, False)
    assert f"{outcome.to_remeasure} cells are left for the second pass" in outcome_text(outcome)
    with gpus(candidates) as here:
        rest = tune_problems(small_plan.buckets, candidates, journal, executors=here, ships=ships)
    assert (rest.remeasured, rest.to_remeasure, rest.finished) == (outcome.to_remeasure, 0, True)


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
    assert (outcome.remeasured, outcome.to_remeasure, outcome.unable) == (0, 0, 0)
    assert sum("left as it was: it can't be measured here" in message for message in heard) == len(wanted)


@pytest.mark.usefixtures("untried")
def test_what_ships_is_timed_wherever_it_may_be_the_fastest(
    candidates: Path, small_plan: BuildPlan, tmp_path: Path
) -> None:
    """Here all candidates ship, and of each cell the modelled choice alone was timed."""
    journal, whole, ships = tmp_path / "h200.journal", tmp_path / "whole.journal", everything(candidates, small_plan)
    with gpus(candidates) as here:
        tune_problems(small_plan.buckets, candidates, whole, executors=here)
    with open_journal(journal, read_journal(whole).header) as held:
        for record in records_of(whole):
            held.append([dataclasses.replace(record, timings=record.timings[:1], duel=None)])
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
    assert all(
        failed.variant not in look.variants for look in wanted_looks(candidates, small_plan, less, ships).values()
    )

    with gpus(candidates) as here:
        outcome = tune_problems(small_plan.buckets, candidates, journal, executors=here, ships=ships)
        assert (outcome.in_journal, outcome.measured, outcome.remeasured) == (len(before), 0, len(wanted))
        for record in records_of(journal)[len(before) :]:
            assert {timing.variant for timing in record.timings} == wanted[record.problem, record.bucket].variants
            assert {timing.rounds for timing in record.timings} == {20}, "no more rounds"
        outcome = tune_problems(small_plan.buckets, candidates, journal, executors=here, ships=ships)
    assert (outcome.in_journal, outcome.measured, outcome.remeasured) == (len(before), 0, 0)


@pytest.mark.usefixtures("untried")
def test_only_what_ships_is_timed_beside_those_that_are_ahead(
    candidates: Path, small_plan: BuildPlan, tmp_path: Path
) -> None:
    journal = tmp_path / "h200.journal"
    with gpus(candidates) as here:
        tune_problems(small_plan.buckets, candidates, journal, executors=here)
    contents = read_journal(journal)
    entry = next(record for record in records_of(journal) if len(record.timings) > 1)
    timed, other = entry.timings[:2]
    ns = 100_000

    def like(name: bytes, factor: float) -> Timing:
        return timed._replace(variant=name * 32, ns=(round(ns * factor),) * 2)

    first = timed._replace(ns=(ns, ns))
    timings = (first, like(b"a", 1.029), like(b"b", 1.031), like(b"c", 2.0))
    record = dataclasses.replace(entry, timings=timings, modelled=timed.variant, duel=None)
    contents = dataclasses.replace(contents, records=(record,))
    cell = (entry.problem, entry.bucket)
    modelled = {timing.variant: 3.0 for timing in timings}

    def remeasures(*ships: bytes, **estimates: float) -> dict[Cell, Remeasure]:
        variants = tuple(SimpleNamespace(variant=SimpleNamespace(cubin_sha256=sha)) for sha in ships)
        choices = {entry.problem: (Choice(entry.bucket, 0, Source.MODELLED, ns),)}
        able = modelled | {timed.variant: 1.0, other.variant: estimates.get("other", 1.0)}
        return cells_to_remeasure(Chosen(variants, choices, ()), contents, lambda problem, bucket: able)  # type: ignore[arg-type]

    more = Remeasure(frozenset({timed.variant, b"a" * 32, other.variant}), False)
    assert remeasures(timed.variant, other.variant) == {cell: more}
    assert remeasures(timed.variant) == {}
    assert remeasures(other.variant) == {cell: more}
    assert remeasures(timed.variant, other.variant, other=MORE + 0.1) == {}
    with open_bundle(candidates) as bundle:
        ground = TuningSpace.of(small_plan.buckets, bundle, contents.header.gpu, 90, 0.1)
        assert ground.estimates(*cell)
        assert ground.estimates(entry.problem, entry.bucket + 1) == {}


def test_one_run_measures_and_looks_and_the_next_does_nothing(
    candidates: Path, small_plan: BuildPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what would ship in earnest, which the looks change; at first every other cell has one contender alone."""
    monkeypatch.setattr("pretuned.aot.tune.scheduler.LIKELY", 2.0)
    journal, pool = tmp_path / "h200.journal", read_candidates(candidates, small_plan)
    ships = shipping(small_plan, pool)
    with gpus(candidates, run=faketimer.one_alone_at_first) as here:
        first = tune_problems(small_plan.buckets, candidates, journal, executors=here, ships=ships)
        second = tune_problems(small_plan.buckets, candidates, journal, executors=here, ships=ships)
    assert (first.measured, first.left, first.to_remeasure, first.finished) == (cells(small_plan), 0, 0, True)
    assert first.remeasured > 3
    assert len(records_of(journal)) == first.measured + first.remeasured
    assert (second.measured, second.remeasured) == (0, 0)
    assert wanted_looks(candidates, small_plan, read_journal(journal), ships) == {}
    times = Timings.of(read_journal(journal)).cells
    chosen = ships(read_journal(journal))
    for problem, choices in chosen.choices.items():
        for choice in choices:
            times_ns = times[problem, choice.bucket].times_ns
            assert times_ns[chosen.variants[choice.variant].variant.cubin_sha256] == min(times_ns.values())


def test_where_nothing_would_ship_nothing_is_looked_at(candidates: Path, small_plan: BuildPlan, tmp_path: Path) -> None:
    """The build says so."""

    def ships(contents: Contents) -> Chosen:
        raise CompileError("not one variant works on the GPU")

    with gpus(candidates) as here:
        outcome = tune_problems(small_plan.buckets, candidates, tmp_path / "journal", executors=here, ships=ships)
    assert (outcome.measured, outcome.remeasured, outcome.finished) == (cells(small_plan), 0, True)


def near_the_best(ground: TuningSpace, problem: Problem, bucket: int) -> set[bytes]:
    ranked = ground.ranked(problem, bucket)
    return {ground.bundle.variant(i).cubin_sha256 for us, i in ranked if us <= MORE * ranked[0][0]}
