"""Silu in the first GEMM's epilogue, from the plan to the bundle: real code, made-up times (faketimer.py)."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import faketimer
import pytest
from building import take_shipped

from pretuned.aot.build.build import build, build_measured, compile_candidates
from pretuned.aot.build.options import BuildOptions
from pretuned.aot.bundle.diff import diff
from pretuned.aot.bundle.merge import merge
from pretuned.aot.bundle.verify import sound
from pretuned.aot.choose.bundle import measured_bundle
from pretuned.aot.choose.candidates import read_candidates
from pretuned.aot.cli.plan import estimate
from pretuned.aot.cli.prune import prune_bundle as prune
from pretuned.aot.compile.cache import CompileCache
from pretuned.aot.compile.triton import compile_variant
from pretuned.aot.demand.api import key_for
from pretuned.aot.demand.tuner import planned_for, shape_of
from pretuned.aot.executors import local
from pretuned.aot.journal.file import read_journal
from pretuned.aot.journal.records import Measured
from pretuned.aot.journal.timings import plain_of
from pretuned.aot.measure.job import MeasureJob, MeasureResult, Setup
from pretuned.aot.models.layer import LayerShard
from pretuned.aot.models.load import load_models
from pretuned.aot.plan.families import GATED_COLUMNS, GATED_CONFIGS, Family, Pool, optional, specs
from pretuned.aot.plan.plan import BuildPlan, gated_buckets, plan, planned_on
from pretuned.aot.process.child import scratch_folder
from pretuned.aot.report.cells import roofline
from pretuned.aot.report.sheets import sheet
from pretuned.aot.tune.space import TuningSpace
from pretuned.aot.tune.tuner import tune_problems
from pretuned.artifacts import codec
from pretuned.artifacts.bundle_file import open_bundle
from pretuned.artifacts.records import (
    PLAIN_LAYOUTS,
    Bundle,
    DType,
    Fusion,
    Layout,
    LocalGpu,
    Op,
    Problem,
    Source,
    Variant,
)
from pretuned.kernels import search
from pretuned.kernels.chips import chip_for
from pretuned.kernels.spec import Config, Loads, Schedule, Spec

pytestmark = pytest.mark.slow

BOTH = Fusion.SILU | Fusion.GATHER
QWEN3 = LayerShard(
    "Qwen/Qwen3-30B-A3B",
    E=128,
    k=8,
    H=2048,
    I=768,
    shared_experts=0,
    gated=True,
    dtypes=(DType.BF16,),
    tp=1,
    ep=1,
    tokens=(1, 65536),
    ops=(Op.FORWARD,),
)
MODEL = "shape:E=8,H=256,I=128,k=2 tokens=256..1024 name=gated"
WIDE = Config(128, 256, 64, 8, 4, loads=Loads.TMA, schedule=Schedule.COOPERATIVE)
HALF = Config(128, 128, 64, 8, 6, loads=Loads.TMA, schedule=Schedule.COOPERATIVE)
SMALL = Config(64, 64, 32, 4, 2, loads=Loads.TMA)  # conftest.py's


def _aligned(op: Op, dtype: DType, sm: int) -> tuple[Config, ...]:
    return (WIDE, HALF, SMALL) if sm == 90 else (SMALL._replace(loads=Loads(sm >= 90)),)


def _fallbacks(op: Op, dtype: DType, sm: int) -> tuple[Config, ...]:
    return (Config(16, 32, 32, 4, 2),)


class Space(Pool):
    def candidates(self, family: Family, sm: int, ops: Iterable[Op] = ()) -> tuple[Config, ...]:
        candidates = Pool.candidates(self, family, sm, ops)
        return (
            candidates[-1:] if family.fusion and not optional(family) else candidates
        )  # moving rows is compiled for long


SPACE = Space(_aligned, _fallbacks)


@pytest.fixture(scope="module")
def planned() -> BuildPlan:
    return plan(load_models([MODEL], (Op.FORWARD,)).shapes)


@pytest.fixture(scope="module")
def candidates(tmp_path_factory: pytest.TempPathFactory, compiled_dir: Path, planned: BuildPlan) -> Path:
    path = tmp_path_factory.mktemp("gated") / "candidates.msgpack"
    take_shipped(compiled_dir, specs(planned.problems, 90, SPACE), 90)  # test_it_compiles compiles such
    compile_candidates(planned, (90,), path, BuildOptions(path.parent, cache=CompileCache(compiled_dir), space=SPACE))
    return path


@contextlib.contextmanager
def gpus(
    candidates: Path, run: Callable[[Setup, MeasureJob], MeasureResult] = faketimer.run
) -> Iterator[list[local.LocalExecutor]]:
    """A worker process without a GPU."""
    with open_bundle(candidates) as bundle, scratch_folder() as scratch:
        executor = local.LocalExecutor(
            Setup(str(candidates), bundle.digest, 0), scratch, greet=faketimer.greet, run=run, timeout_s=60.0
        )
        try:
            yield [executor]
        finally:
            executor.shutdown()


def problems_of(planned: BuildPlan) -> tuple[Problem, ...]:
    """The form for rows gathered beforehand, and the one that gathers them."""
    kept = tuple(problem for problem in planned.problems if optional(problem))
    assert [problem.fusion for problem in kept] == [Fusion.SILU, BOTH]
    return kept


def gated_code(bundle: Bundle) -> list[Variant]:
    return [variant for variant in bundle.variants if optional(variant)]


def test_what_is_planned(planned: BuildPlan) -> None:
    for problem, fusion in zip(problems_of(planned), (Fusion.SILU, BOTH), strict=True):
        assert problem == Problem(Op.FORWARD, DType.BF16, 8, 256, 256, fusion=fusion)
        assert planned.buckets[problem] == (1024, 2048)  # of 512 to 2048 rows
        assert problem in planned.models[0].problems


@pytest.mark.parametrize(
    "changes",
    [
        {"gated": False},
        {"ops": (Op.DX, Op.DW)},
        {"dtypes": (DType.FP32, DType.TF32)},
        {"layouts": (Layout.KN,)},
        {"tokens": (1, 128)},  # 8 rows an expert
        {"E": 1024},
        {"I": 764},  # 1528 columns are whole 16 bytes, half of them aren't
        {"H": 2044},
    ],
)
def test_where_it_is_not_planned(changes: dict[str, object]) -> None:
    assert sum(map(optional, plan([QWEN3]).problems)) == 2
    planned = plan([replace(QWEN3, **changes)])  # type: ignore[arg-type]
    assert planned.problems
    assert not any(map(optional, planned.problems))
    assert not any(optional(problem) for model in planned.models for problem in model.problems)


@pytest.mark.parametrize(("E", "least"), [(8, 1024), (64, 1024), (128, 2048), (512, 8192)])
def test_its_buckets_have_rows_for_every_expert(E: int, least: int) -> None:
    problem = Problem(Op.FORWARD, DType.BF16, E, 1536, 2048, fusion=BOTH)
    assert min(gated_buckets(problem, [1 << power for power in range(20)])) == least


def test_a_capability_without_its_code_has_no_such_problem(planned: BuildPlan) -> None:
    for sms, has in (((80,), False), ((100, 120), False), ((90,), True), ((80, 90), True)):
        here = planned_on(planned, sms)
        assert any(map(optional, here.problems)) is has
        assert any(optional(problem) for model in here.models for problem in model.problems) is has
        assert len(here.problems) == 4 + 2 * has
    (old, new) = estimate(planned, (80, 90), None)
    assert (old.problems, new.problems) == (4, 6)
    assert old.choices == new.choices - 4


def test_its_code_is_that_of_few_specialised_configs(planned: BuildPlan) -> None:
    gated = [spec for spec in specs(planned.problems, 90, Pool()) if optional(spec)]
    assert all(spec.config.schedule.warp_specialized and spec.config.block_n in GATED_COLUMNS for spec in gated)
    assert {spec.alignment for spec in gated} == {16}
    first, gathers = ([spec.config for spec in gated if spec.fusion is fusion] for fusion in (Fusion.SILU, BOTH))
    assert first == gathers  # both codes of each
    assert 0 < len(first) <= GATED_CONFIGS
    assert first[0] == search.candidates(Op.FORWARD, DType.BF16, 90)[0]


COMPILED = itertools.product([DType.BF16, DType.FP16], [WIDE, HALF], [Fusion.SILU, BOTH], PLAIN_LAYOUTS)
FEW = [(DType.BF16, WIDE, Fusion.SILU, Layout.NK), (DType.FP16, HALF, BOTH, Layout.KN)]  # each value once


@pytest.mark.parametrize(
    ("dtype", "config", "fusion", "layout"),
    [pytest.param(*case, marks=() if case in FEW else pytest.mark.nightly) for case in COMPILED],
    ids=str,
)
def test_it_compiles(dtype: DType, config: Config, fusion: Fusion, layout: Layout) -> None:
    compiled = compile_variant(Spec(Op.FORWARD, dtype, config, layout, fusion), 90)
    variant = compiled.variant
    assert (variant.kernel, variant.fusion, variant.spill_bytes) == ("rows_specialized", fusion, 0)
    maps = {tensor_map.argument: tensor_map.box for tensor_map in variant.tensor_maps}
    assert set(maps) == {"w", "y_map"} | ({"x"} if fusion is Fusion.SILU else set())
    assert maps["y_map"] == (1, 1, 64, 64)
    assert variant.threads * variant.registers <= 65536


@pytest.mark.nightly
def test_a_build_for_several_capabilities(planned: BuildPlan, compiled_dir: Path, tmp_path: Path) -> None:
    options = BuildOptions(tmp_path, cache=CompileCache(compiled_dir), space=SPACE)
    older, newer = (sound(str(bundle.path)) for bundle in build(planned, (80, 90), options).bundles)
    assert not gated_code(older)
    assert not any(map(optional, older.choices))
    assert [len(model.problems) for model in (*older.models, *newer.models)] == [4, 6]
    assert {variant.fusion for variant in gated_code(newer)} == {Fusion.SILU, BOTH}
    assert len(gated_code(newer)) <= 4
    for problem in problems_of(planned):
        assert [choice.bucket for choice in newer.choices[problem]] == [1024, 2048]
        for gated in newer.choices[problem]:  # no estimate is above that of the product in the same config
            assert gated.source is Source.MODELLED
            assert newer.variants[gated.variant].fusion is problem.fusion
            assert newer.variants[gated.variant].config in (WIDE.pairs(), HALF.pairs())
    assert codec.encode(codec.decode(codec.encode(newer), "again")) == codec.encode(newer)
    again = build(planned, (80, 90), options)
    assert all(bundle.unchanged for bundle in again.bundles)


def test_the_tuner_measures_it_like_the_others(candidates: Path, planned: BuildPlan, tmp_path: Path) -> None:
    journal = tmp_path / "h200.journal"
    with gpus(candidates) as here:
        outcome = tune_problems(planned.buckets, candidates, journal, executors=here)
    assert (outcome.measured, outcome.left) == (planned.choices, 0)
    read = read_candidates(candidates, planned)
    records = {
        (record.problem, record.bucket): record
        for record in read_journal(journal).records
        if isinstance(record, Measured)
    }
    for (problem, bucket), record in records.items():  # what the runtime holds against the plain product
        product = plain_of(problem)
        assert (product is None) == (problem.fusion in (Fusion.NONE, Fusion.SCATTER))
        if product is None:
            assert record.plain is None
        else:
            best = min(records[product, bucket].timings, key=lambda timing: (timing.time_ns, timing.variant))
            assert record.plain == (best.variant, best.ns)
    bundle = measured_bundle(planned, read, read_journal(journal))
    page = sheet("t", {}, bundle, [read_journal(journal)], None)
    for problem in problems_of(planned):
        for choice in bundle.choices[problem]:
            chosen = bundle.variants[choice.variant]
            assert (choice.source, chosen.fusion) == (Source.MEASURED, problem.fusion)
            assert choice.time_ns == faketimer.time_ns(MeasureJob(problem, choice.bucket, ()), chosen.cubin_sha256)
        cells = [cell for gemm in page.gemms for cell in gemm.cells if cell.problem == problem]
        assert [(cell.bucket, cell.state.value) for cell in cells] == [(1024, "measured"), (2048, "measured")]
    assert not any(cell.state.value == "missing" for gemm in page.gemms for cell in gemm.cells)


def test_code_of_it_that_is_wrong_does_not_ship_and_hinders_nothing(
    candidates: Path, planned: BuildPlan, compiled_dir: Path, tmp_path: Path
) -> None:
    journal = tmp_path / "h200.journal"
    with gpus(candidates, run=faketimer.wrong_gated) as here:
        outcome = tune_problems(planned.buckets, candidates, journal, executors=here)
    assert len(outcome.failures) == 4
    options = BuildOptions(tmp_path, cache=CompileCache(compiled_dir), space=SPACE, journal=journal)
    (built,) = build_measured(planned, candidates, options).bundles
    (other,) = build(planned, (90,), dataclasses.replace(options, name="other")).bundles
    assert built.path.read_bytes() == other.path.read_bytes()
    bundle = sound(str(built.path))
    assert (built.problems, built.choices, built.measured) == (4, 12, 12)
    assert not gated_code(bundle)
    assert not any(map(optional, bundle.choices))
    assert len(bundle.models[0].problems) == 4


def test_candidates_of_an_earlier_version_are_measured_and_built_without_it(
    planned: BuildPlan, compiled_dir: Path, tmp_path: Path
) -> None:
    path = tmp_path / "old.msgpack"
    earlier = planned.without(set(problems_of(planned)))
    compile_candidates(earlier, (90,), path, BuildOptions(tmp_path, cache=CompileCache(compiled_dir), space=SPACE))
    journal = tmp_path / "h200.journal"
    with gpus(path) as here:
        outcome = tune_problems(planned.buckets, path, journal, executors=here)
    assert outcome.total == outcome.measured == earlier.choices
    (built,) = build_measured(planned, path, BuildOptions(tmp_path / "out", journal=journal)).bundles
    assert built.problems == len(earlier.problems)


def test_merge_diff_and_prune(
    planned: BuildPlan, compiled_dir: Path, tmp_path: Path, options: Callable[..., BuildOptions]
) -> None:
    settings = BuildOptions(tmp_path, cache=CompileCache(compiled_dir), space=SPACE)
    problems = problems_of(planned)
    (built,) = build(planned, (90,), settings).bundles
    earlier = planned.without(set(problems))
    (plain,) = build(earlier, (90,), dataclasses.replace(settings, name="plain")).bundles
    new, old = sound(str(built.path)), sound(str(plain.path))
    both = merge({"new": new, "old": old}).bundle
    for problem in problems:
        assert both.choices[problem] == tuple(
            choice._replace(
                variant=both.variants.index(new.variants[choice.variant]),
                runner_up=None if choice.runner_up is None else both.variants.index(new.variants[choice.runner_up]),
            )
            for choice in new.choices[problem]
        )
    changes = diff(old, both)
    assert changes.problems_added == problems
    assert {value.fusion for value in changes.variants_added} == {Fusion.SILU, BOTH}
    kept = prune(both, planned, "both")
    assert not kept.missing
    assert set(kept.bundle.choices) == set(planned.problems)
    lacking = prune(old, planned, "old")
    assert dict(lacking.missing) == dict.fromkeys(problems, (1024, 2048))
    (older,) = build(planned, (80,), dataclasses.replace(settings, name="older")).bundles
    assert not prune(sound(str(older.path)), planned, "older").missing  # there is no such code for sm_80


def test_tuning_on_demand_leaves_it_out() -> None:
    key = key_for(LocalGpu(90, faketimer.H200), 8, 256, 128, 2, "bf16", 1024)
    assert not any(map(optional, planned_for(key, shape_of(key)).problems))


def test_its_roofline_writes_half_of_the_columns() -> None:
    plain, M, chip = Problem(Op.FORWARD, DType.BF16, 8, 1024, 512), 4096, chip_for(90)
    saved = M * 512 * 2 / chip.bandwidth_gbs * 1e-3
    gated = roofline(plain._replace(fusion=BOTH), M, chip)
    assert roofline(plain, M, chip).memory_us - gated.memory_us == pytest.approx(saved)
    assert roofline(plain, M, chip).compute_us == gated.compute_us


def test_a_form_is_measured_alone_where_the_plain_product_beside_it_kills_its_process(
    candidates: Path, planned: BuildPlan, tmp_path: Path
) -> None:
    journal = tmp_path / "h200.journal"
    forms = [problem for problem in planned.problems if plain_of(problem) is not None]
    cells = {problem: buckets[:1] for problem, buckets in planned.buckets.items()}
    with gpus(candidates, run=faketimer.dies_beside) as here:
        outcome = tune_problems(cells, candidates, journal, executors=here)
    assert (outcome.measured, outcome.left, outcome.failures) == (len(planned.problems), 0, ())
    records = [
        record for record in read_journal(journal).records if isinstance(record, Measured) and record.problem in forms
    ]
    assert len(records) == len(forms) >= 2
    assert not any(record.plain for record in records)


def test_the_plain_product_is_not_timed_by_code_that_failed(candidates: Path, planned: BuildPlan) -> None:
    product = next(problem for problem in planned.problems if problem.fusion is Fusion.NONE)
    with open_bundle(candidates) as bundle:
        ground = TuningSpace.of(planned.buckets, bundle, faketimer.H200, 90, 0.1)
        for i in ground.able[product]:
            variant = bundle.variant(i)
            assert ground.variant(product, variant.config) == i
            assert ground.variant(product, variant.config, {variant.cubin_sha256}) is None
        assert ground.variant(product, ()) is None
