"""A build that measures beside what the runtime finds: real code and processes, made-up times (faketimer.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import faketimer
import misbehaving
import pytest

from pretuned.aot.build.build import build
from pretuned.aot.build.options import BuildOptions, BuildReport
from pretuned.aot.build.pick import _shared
from pretuned.aot.bundle.verify import sound
from pretuned.aot.choose.bundle import Ships
from pretuned.aot.choose.incumbents import Incumbents
from pretuned.aot.compile.cache import CompileCache
from pretuned.aot.executors.local import LocalExecutor
from pretuned.aot.journal.file import read_journal
from pretuned.aot.journal.records import Measured
from pretuned.aot.measure.job import Setup
from pretuned.aot.plan.families import Pool
from pretuned.aot.plan.plan import BuildPlan
from pretuned.aot.process.child import scratch_folder
from pretuned.aot.tune.scheduler import Outcome, TuneObservers
from pretuned.aot.tune.tuner import Entrants, tune_problems
from pretuned.artifacts.bundle_file import open_bundle
from pretuned.artifacts.errors import CompileError
from pretuned.artifacts.records import DType, LocalGpu, Op, Problem
from pretuned.kernels.entry import has_aligned_rows
from pretuned.kernels.spec import Config, Loads
from pretuned.runtime.dispatch.places import Kind, Place
from pretuned.runtime.dispatch.snapshot import Snapshot

Make = Callable[..., BuildOptions]
ON_H200 = LocalGpu(90, faketimer.H200)
SHIPPED = Path(__file__).parents[3] / "artifacts" / "bundles"


def tune(
    problems: dict[Problem, tuple[int, ...]],
    candidates: Path,
    journal: Path,
    ships: Ships,
    entrants: Entrants,
    observers: TuneObservers,
) -> Outcome:
    """On a GPU that is not there."""
    with open_bundle(candidates) as bundle, scratch_folder() as scratch:
        executor = LocalExecutor(
            Setup(str(candidates), bundle.digest, 0), scratch, greet=faketimer.greet, run=faketimer.run
        )
        try:
            return tune_problems(
                problems, candidates, journal, executors=[executor], entrants=entrants, ships=ships, observers=observers
            )
        finally:
            executor.shutdown()


@pytest.fixture(scope="session")
def there(
    tmp_path_factory: pytest.TempPathFactory, compiled_dir: Path, small_space: Pool, small_plan: BuildPlan
) -> Path:
    """A folder with a bundle of other configs, modelled, as if it had shipped."""

    def aligned(op: Op, dtype: DType, sm: int) -> tuple[Config, ...]:
        return (Config(32, 64, 64, 4, 2, loads=Loads.TMA), Config(64, 32, 64, 4, 2, loads=Loads.TMA))

    out = tmp_path_factory.mktemp("there")
    space = Pool(aligned, small_space.fallbacks)
    build(small_plan, (90,), BuildOptions(out, "ships", cache=CompileCache(compiled_dir), space=space))
    return out


@pytest.fixture
def measuring(options: Make, there: Path, tmp_path: Path) -> Make:
    """Options for a build that measures, and finds that bundle and what lies in its own folder."""

    def make(**changes: object) -> BuildOptions:
        places = [Place(Kind.NAMED, tmp_path / "out"), Place(Kind.SYSTEM, there)]
        measure_options = {
            "measure": (90,),
            "tune": tune,
            "incumbents": lambda path: Incumbents(Snapshot(places, tuple, path)),
        }
        return options(**{**measure_options, **changes})

    return make


def records_of(report: BuildReport) -> list[Measured]:
    journal = report.bundles[0].path.with_suffix(".journal")
    return [record for record in read_journal(journal).records if isinstance(record, Measured)]


def runs(places: list[Path], plan: BuildPlan) -> dict[object, bytes]:
    incumbents = Incumbents(Snapshot([Place(Kind.NAMED, place) for place in places]))
    return {cell: incumbent.variant for cell, incumbent in incumbents.running(plan.buckets, ON_H200).items()}


@pytest.mark.slow
def test_what_runs_today_is_measured_in_each_cell_and_nothing_gets_slower(
    measuring: Make, there: Path, small_plan: BuildPlan, tmp_path: Path
) -> None:
    report = build(small_plan, (90,), measuring())
    (built,) = report.bundles
    before, after = runs([there], small_plan), runs([tmp_path / "out", there], small_plan)
    times: dict[tuple[Problem, int], dict[bytes, int]] = {}
    for record in records_of(report):
        cell = record.problem, record.bucket
        times.setdefault(cell, {}).update((timing.variant, timing.time_ns) for timing in record.timings)
        assert [ran.variant for ran in record.incumbents] == [before[cell]]
        assert before[cell] in times[cell]
    assert times.keys() == before.keys() == after.keys()
    faster = [cell for cell in times if after[cell] != before[cell]]
    assert all(times[cell][after[cell]] < times[cell][before[cell]] for cell in faster)
    assert 0 < len(faster) < len(times)
    comparison = built.comparison
    assert comparison is not None
    assert (comparison.faster, comparison.as_before, comparison.slower, comparison.not_compared) == (
        len(faster),
        len(times) - len(faster),
        0,
        0,
    )
    assert comparison.gain > 0
    assert built.to_dict()["compared_with_before"] == comparison.to_dict()
    bundle = sound(str(built.path))
    (ships,) = there.glob("*.msgpack")
    with open_bundle(ships) as shipped:
        assert bundle.producer.held_against == (shipped.digest.hex()[:16],)
        carried = {variant.cubin_sha256 for variant in shipped.variants()} & {v.cubin_sha256 for v in bundle.variants}
    assert {before[cell] for cell in times if cell not in faster} <= carried


@pytest.mark.slow
def test_the_shortlist_begins_with_what_was_fast_in_cells_like_it(measuring: Make, small_plan: BuildPlan) -> None:
    """So does the runtime's choice, and both are made by the same bundles."""
    incumbents = Incumbents(Snapshot([Place(Kind.INSTALLED, SHIPPED)]))
    report = build(small_plan, (90,), measuring(incumbents=lambda path: incumbents))
    with open_bundle(report.bundles[0].path) as built, open_bundle(SHIPPED / "catalogue-sm90.msgpack") as shipped:
        configs = {variant.cubin_sha256: variant.config for bundle in (shipped, built) for variant in bundle.variants()}
    records = [record for record in records_of(report) if has_aligned_rows(record.problem)]
    assert len(records) > 4
    assert all(configs[record.modelled] == configs[record.incumbents[0].variant] for record in records)
    around = incumbents.around(ON_H200)
    assert around is not None
    assert all(around.near(record.problem, record.bucket) is not None for record in records)


@pytest.mark.slow
def test_the_same_build_again_measures_nothing_and_changes_nothing(measuring: Make, small_plan: BuildPlan) -> None:
    """Though its own bundle lies where the runtime looks by then; and so does one from the journal alone."""
    first = build(small_plan, (90,), measuring())
    data = first.bundles[0].path.read_bytes()
    second = build(small_plan, (90,), measuring(compile_one=misbehaving.must_not_run))
    (bundle,) = second.bundles
    assert bundle.unchanged
    assert bundle.tuned is not None
    assert (bundle.tuned.measured, bundle.tuned.remeasured) == (0, 0)
    assert bundle.comparison == first.bundles[0].comparison
    third = build(small_plan, (90,), measuring(measure=()))
    assert third.bundles[0].unchanged
    assert third.bundles[0].comparison == first.bundles[0].comparison
    assert third.bundles[0].path.read_bytes() == data


@pytest.mark.slow
def test_a_cell_measured_without_what_runs_today_is_measured_again(
    measuring: Make, there: Path, small_plan: BuildPlan, tmp_path: Path
) -> None:
    alone = build(small_plan, (90,), measuring(incumbents=lambda path: Incumbents(Snapshot(()))))
    assert alone.bundles[0].comparison is None
    before, records = runs([there], small_plan), records_of(alone)
    assert not any(record.incumbents for record in records)
    cells = {
        (record.problem, record.bucket)
        for record in records
        for timing in record.timings
        if timing.variant == before[record.problem, record.bucket]
    }  # the fallbacks are the same code
    beside = build(small_plan, (90,), measuring())
    assert beside.bundles[0].tuned is not None
    assert beside.bundles[0].tuned.measured == small_plan.choices - len(cells) > 0
    assert beside.bundles[0].comparison is not None
    assert beside.bundles[0].comparison.slower == 0


@pytest.mark.slow
def test_where_nothing_compiles_what_is_there_takes_part(
    measuring: Make, there: Path, small_plan: BuildPlan, tmp_path: Path
) -> None:
    report = build(small_plan, (90,), measuring(cache=None, compile_one=misbehaving.refuses_all))
    (bundle,) = report.bundles
    assert bundle.comparison is not None
    assert (bundle.comparison.faster + bundle.comparison.as_before, bundle.comparison.slower) == (small_plan.choices, 0)
    assert bundle.lost.startswith(
        f"{bundle.failed} of {bundle.failed} variants could not be compiled here, of the kernels "
    )
    assert "(no such instruction); what bundles here have of them took part instead" in bundle.lost
    assert bundle.to_dict()["lost"] == bundle.lost
    sound(str(bundle.path))
    with pytest.raises(CompileError, match="not one variant of forward bf16 can be used"):
        build(small_plan, (90,), measuring(cache=None, compile_one=misbehaving.refuses_all, measure=(), modelled=True))


@pytest.mark.slow
def test_out_of_time_the_cells_that_are_left_run_as_before(
    measuring: Make, there: Path, small_plan: BuildPlan, tmp_path: Path
) -> None:
    def in_no_time(*args: object) -> Outcome:
        problems, candidates, journal, ships, entrants, observers = args
        few = dict(list(problems.items())[:1])  # type: ignore[attr-defined]
        return tune(few, candidates, journal, ships, entrants, observers)  # type: ignore[arg-type]

    report = build(small_plan, (90,), measuring(tune=in_no_time))
    before, after = runs([there], small_plan), runs([tmp_path / "out", there], small_plan)
    cells = {(record.problem, record.bucket) for record in records_of(report)}
    assert 0 < len(cells) < len(before)
    assert all(before[cell] == after[cell] for cell in before if cell not in cells)


def test_a_reason_that_variants_share_is_reported_once() -> None:
    messages = ("a for sm_90: no Triton: install it", "b for sm_90: no Triton: install it", "c: spilled", "it fails")
    assert _shared(messages) == ["a for sm_90 and 1 more: no Triton: install it", "c: spilled", "it fails"]
