"""Never slower: whatever a journal says, what runs after a bundle is added is no slower than what ran before.

The bundles, the choices and the runtime's decisions are real; the code is made up, and so are its times.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import small_bundles
from hypothesis import HealthCheck, given, settings
from small_bundles import H100, SPECS, Spec, measured, modelled

from pretuned.aot.choose.bundle import assembled, choose_from
from pretuned.aot.choose.candidates import Candidates
from pretuned.aot.choose.incumbents import BaselineComparison, Incumbents, Running
from pretuned.aot.compile.triton import Compiled
from pretuned.aot.journal.file import Contents, Header
from pretuned.aot.journal.records import Incumbent, Measured, Rematch, Timing
from pretuned.aot.journal.timings import Timings, cell_of
from pretuned.aot.plan.plan import BuildPlan
from pretuned.artifacts import codec
from pretuned.artifacts.publishing import publish
from pretuned.artifacts.records import Bundle, Choice, DType, LocalGpu, Op, Problem, Source
from pretuned.kernels.spec import Config
from pretuned.runtime.dispatch.places import Kind, Place
from pretuned.runtime.dispatch.snapshot import Snapshot

ONE = Problem(Op.FORWARD, DType.BF16, 8, 1024, 768)
TWO = Problem(Op.FORWARD, DType.BF16, 16, 2048, 768)
UNKNOWN = Problem(Op.FORWARD, DType.BF16, 32, 512, 512)
BUCKETS = (16, 32, 64, 128)
EVERY_BUCKET = tuple(1 << i for i in range(12))
PLAN = BuildPlan({ONE: BUCKETS, TWO: BUCKETS[1:3]}, ())
OWN = (*SPECS, Spec(Config(64, 128, 64, 4, 3)), Spec(Config(64, 64, 64, 4, 4)))

H200 = small_bundles.H200._replace(driver=13000)
ON_H200 = LocalGpu(90, H200)
ARGUMENTS = (("x", "ptr"), ("w", "ptr"), ("y", "ptr"), ("m_sizes", "ptr"))

Cell = tuple[Problem, int]
Truth = Mapping[tuple[Cell, bytes], int]  # nanoseconds


def bundle(choices: Mapping[Problem, Sequence[Choice]], **how: Any) -> Bundle:
    """With arguments that a launcher fills."""
    built = small_bundles.bundle(choices, **how)
    return built._replace(variants=tuple(variant._replace(arguments=ARGUMENTS) for variant in built.variants))


def candidates_of(tag: str) -> Candidates:
    """Return the candidates that were compiled here."""
    own = bundle({}, specs=OWN, tag=tag)
    compiled = tuple(map(Compiled, own.variants, own.cubins))
    return Candidates(own.target, own.min_driver, own.producer, own.kernels, compiled)


def there_of(folder: Path, kind: Kind = Kind.INSTALLED) -> Incumbents:
    """The bundles of a folder, found by nobody else."""
    return Incumbents(Snapshot((), lambda: [Place(kind, folder)]))


def running_in(incumbents: Incumbents) -> Running:
    cells = dict.fromkeys((ONE, TWO, UNKNOWN), EVERY_BUCKET)
    return incumbents.running(cells, ON_H200)


@st.composite
def shipped_bundles(draw: st.DrawFn) -> list[Bundle]:
    """One to three that are there: measured here or on another GPU or modelled, in any cells."""
    seen = []
    for number in range(draw(st.integers(1, 3))):
        choices = {}
        for problem in (ONE, TWO):
            buckets = sorted(draw(st.sets(st.sampled_from(EVERY_BUCKET), max_size=4)))
            rows = []
            for bucket in buckets:
                gpu, index = draw(st.integers(-1, 1)), draw(st.integers(0, 1))
                rows.append(modelled(bucket, index) if gpu < 0 else measured(bucket, index, 9, gpu=gpu))
            if rows:
                choices[problem] = rows
        seen.append(bundle(choices, gpus=[H200, H100], tag=f"shipped {number}"))
    return seen


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(shipped=shipped_bundles(), draw=st.data())
def test_no_cell_is_slower_after_a_bundle_is_added(
    tmp_path_factory: pytest.TempPathFactory, shipped: list[Bundle], draw: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("there")
    for number, bundle in enumerate(shipped):
        publish(folder / f"{number}.msgpack", codec.encode(bundle))
    incumbents = there_of(folder)
    before = running_in(incumbents)
    candidates = candidates_of("own").with_others(incumbents.codes(PLAN.problems, 90))
    shas = [candidate.variant.cubin_sha256 for candidate in candidates.all_variants]
    seed = draw.draw(st.integers(0, 1 << 30))

    def truth(cell: Cell, sha: bytes) -> int:
        digest = hashlib.sha256(f"{seed} {cell}".encode() + sha).digest()
        return 10_000 + int.from_bytes(digest[:2], "big") % 3_000

    plan_cells = [(problem, bucket) for problem, row in PLAN.buckets.items() for bucket in row]
    records = []
    for cell in draw.draw(st.lists(st.sampled_from(plan_cells), max_size=8)):
        timed = set(draw.draw(st.lists(st.sampled_from(shas), min_size=1, max_size=4)))
        ran = before.get(cell)
        with_incumbent = ran is not None and draw.draw(st.booleans())
        if with_incumbent:
            timed.add(ran.variant)
        records.append(
            record(
                cell,
                sorted(timed),
                truth,
                draw.draw(st.sampled_from([0.0005, 0.01, 0.05])),
                ran if with_incumbent else None,
            )
        )
    evidence = Timings.of(Contents(Header(90, H200, ()), tuple(records), 0, 0))
    limit = draw.draw(st.sampled_from([1, 4, 16]))
    chosen = choose_from(PLAN, candidates, evidence, limit, before)
    fresh = assembled(PLAN, candidates, chosen, evidence, before)
    assert (
        fresh.producer.held_against
        == tuple(sorted({incumbent.bundle.hex()[:16] for incumbent in before.values()}))[:10]
    )
    new = tmp_path_factory.mktemp("new")
    publish(new / "new.msgpack", codec.encode(fresh))
    after = Snapshot([Place(Kind.NAMED, new)], lambda: [Place(Kind.INSTALLED, folder)])
    now = running_in(Incumbents(after))
    assert before.keys() == now.keys()
    measured_cells = evidence.cells
    for cell, ran in before.items():
        runs = now[cell].variant
        if runs != ran.variant:
            times = measured_cells[cell_of(*cell)].times_ns  # else it has no right to change
            assert times[runs] < times[ran.variant]
            assert truth(cell, runs) < truth(cell, ran.variant)
    comparison = BaselineComparison.of(fresh, evidence, before)
    assert comparison is not None
    assert comparison.slower == 0
    faster = sum(now[cell].variant != before[cell].variant for cell in plan_cells)
    assert faster <= comparison.faster  # those of bundles in places before it stay, too, where they were measured here
    assert comparison.faster + comparison.as_before + comparison.not_compared == len(plan_cells)


def record(cell: Cell, timed: list[bytes], truth: object, noise: float, ran: Incumbent | None) -> Measured:
    """One cell, as a GPU that is never wrong measures it."""
    assert callable(truth)
    timings = tuple(Timing(sha, (truth(cell, sha),) * 2, noise, 20, 0.001) for sha in timed)
    fastest = min(timings, key=lambda timing: timing.time_ns)
    held = ran.variant if ran is not None else timed[0]
    duel = None
    if fastest.variant != held:
        ns = (truth(cell, held),) * 2
        duel = Rematch(fastest.variant, held, fastest.ns, ns, round(fastest.ns[0] / ns[0], 5), noise)
    return Measured(*cell, timed[0], timings, duel, None, 1.0, 13000, None, () if ran is None else (ran,))


def cell_record(ns: Mapping[bytes, int], ran: Incumbent | None, cell: Cell = (ONE, 64)) -> Measured:
    return record(cell, list(ns), lambda _, sha: ns[sha], 0.001, ran)


@pytest.fixture
def there(tmp_path: Path) -> Iterator[Incumbents]:
    """One bundle, of a later driver and of an earlier Triton."""
    built = bundle({ONE: [measured(64, 1, 9)]}, gpus=[H200], tag="there")
    built = built._replace(min_driver=12090, producer=built.producer._replace(triton="3.6.0", options=("a=1",)))
    publish(tmp_path / "there.msgpack", codec.encode(built))
    return there_of(tmp_path)


def test_what_ran_stays_where_nothing_beats_it_and_its_code_is_carried(there: Incumbents) -> None:
    plan = BuildPlan({ONE: (64,)}, ())
    ran = there.running(plan.buckets, ON_H200)[ONE, 64]
    candidates = candidates_of("own").with_others(there.codes(plan.problems, 90))
    assert len(candidates.carried) == len(SPECS)
    mine = candidates.compiled[0].variant.cubin_sha256

    def beside(own_ns: int) -> Bundle:
        record = cell_record({mine: own_ns, ran.variant: 10_000}, ran)
        evidence = Timings.of(Contents(Header(90, H200, ()), (record,), 0, 0))
        return assembled(plan, candidates, choose_from(plan, candidates, evidence), evidence)

    slower = beside(10_500)
    (choice,) = slower.choices[ONE]
    assert slower.variants[choice.variant].cubin_sha256 == ran.variant
    assert (choice.source, choice.time_ns) == (Source.MEASURED, 10_000)
    assert hashlib.sha256(slower.cubins[choice.variant]).digest() == ran.variant
    assert slower.min_driver == 12090
    assert slower.producer.triton == "3.7.1, 3.6.0"
    assert slower.producer.held_against == (ran.bundle.hex()[:16],)
    assert slower.producer.compile_options == ()
    faster = beside(9_000)
    (choice,) = faster.choices[ONE]
    assert faster.variants[choice.variant].cubin_sha256 == mine
    assert (faster.min_driver, faster.producer.triton) == (candidates.min_driver, "3.7.1")
    (choice,) = beside(9_990).choices[ONE]  # within noise
    assert choice.time_ns == 10_000


def test_what_was_not_measured_stays_and_says_that_it_is_modelled(there: Incumbents) -> None:
    plan = BuildPlan({ONE: (32, 64), UNKNOWN: (64,)}, ())
    running = there.running(plan.buckets, ON_H200)
    candidates = candidates_of("own").with_others(there.codes(plan.problems, 90))
    chosen = choose_from(plan, candidates, None, running=running)
    for problem, row in chosen.choices.items():
        for choice in row:
            assert chosen.variants[choice.variant].variant.cubin_sha256 == running[problem, choice.bucket].variant
            assert choice.source is Source.MODELLED


def test_what_is_the_same_code_or_of_other_sources_is_not_carried(there: Incumbents) -> None:
    codes = there.codes((ONE,), 90)
    own = candidates_of("there")  # the same bytes
    assert [incumbent.code.variant.config for incumbent in own.with_others(codes).carried] == []
    other = replace(own, kernels=(own.kernels[0]._replace(source_sha256=bytes(32)),), compiled=own.compiled[:1])
    assert other.with_others(codes).carried == ()


def test_a_bundle_that_is_replaced_is_not_held_against(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRETUNED_BUNDLES", str(tmp_path))
    mine = bundle({ONE: [measured(64, 0, 9)]}, gpus=[H200], tag="mine")
    publish(tmp_path / "mine.msgpack", codec.encode(mine))
    sha = mine.variants[0].cubin_sha256
    assert Incumbents.on_search_path().running({ONE: (64,)}, ON_H200)[ONE, 64].variant == sha
    link = tmp_path.parent / "link"
    link.symlink_to(tmp_path)
    for path in (tmp_path / "mine.msgpack", link / "mine.msgpack"):
        assert Incumbents.on_search_path(path).running({ONE: (64,)}, ON_H200)[ONE, 64].variant != sha
    link.unlink()


def test_a_fallback_that_runs_an_aligned_problem_takes_part(tmp_path: Path) -> None:
    """If no aligned variant takes so many experts, the fallback runs an aligned problem."""
    many = ONE._replace(E=600)
    publish(tmp_path / "one.msgpack", codec.encode(bundle({ONE: [modelled(64, 0)]}, tag="there")))
    incumbents = there_of(tmp_path)
    plan = BuildPlan({many: (64,)}, ())
    running = incumbents.running(plan.buckets, ON_H200)
    own = candidates_of("own")
    aligned = tuple(
        replace(candidate, variant=candidate.variant._replace(max_experts=4096)) for candidate in own.compiled
    )
    candidates = replace(own, compiled=aligned).with_others(incumbents.codes(plan.problems, 90))
    chosen = choose_from(plan, candidates, None, running=running)
    ran = chosen.variants[chosen.choices[many][0].variant].variant
    assert (ran.alignment, ran.cubin_sha256) == (1, running[many, 64].variant)


def test_the_line_tells_what_is_faster() -> None:
    assert str(BaselineComparison(3, 0.0834, 4, 0, 0)) == (
        "3 cells faster than before by 8.3 % in the mean, 4 as before, 0 slower"
    )
    assert (
        str(BaselineComparison(0, 0.0, 4, 1, 2)) == "0 cells faster than before, 4 as before, 1 slower, 2 not compared"
    )


def test_it_is_reported_by_the_times_of_the_journal(there: Incumbents) -> None:
    plan = BuildPlan({ONE: (32, 64, 128)}, ())
    running = there.running(plan.buckets, ON_H200)
    candidates = candidates_of("own").with_others(there.codes(plan.problems, 90))
    mine = candidates.compiled[0].variant.cubin_sha256
    records = [
        cell_record({mine: ns, running[ONE, bucket].variant: 10_000}, running[ONE, bucket], (ONE, bucket))
        for bucket, ns in ((32, 8_000), (64, 5_000), (128, 20_000))
    ]
    evidence = Timings.of(Contents(Header(90, H200, ()), tuple(records), 0, 0))
    fresh = assembled(plan, candidates, choose_from(plan, candidates, evidence), evidence)
    comparison = BaselineComparison.of(fresh, evidence, None)
    assert comparison is not None
    assert (comparison.faster, comparison.as_before, comparison.slower) == (2, 1, 0)
    assert comparison.gain == pytest.approx((1.25 * 2.0) ** 0.5 - 1)
    alone = replace(candidates, compiled=candidates.compiled[:1], carried=())  # on a machine without that bundle
    left = assembled(plan, alone, choose_from(plan, alone, evidence), evidence)
    comparison = BaselineComparison.of(left, evidence, None)
    assert comparison is not None
    assert (comparison.faster, comparison.as_before, comparison.slower) == (2, 0, 1)
