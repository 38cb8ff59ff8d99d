"""Variants that ship for the whole catalogue, chosen by the sizes of cubins that were not compiled."""

from __future__ import annotations

import collections
from pathlib import Path

import pytest
from steps import steps

from pretuned.aot.choose.choices import Chosen, choose, choose_among_all
from pretuned.aot.compile.triton import Compiled
from pretuned.aot.models.catalogue import catalogue as known_models
from pretuned.aot.models.load import load_models
from pretuned.aot.plan.families import CONFIG_LIMIT, GATED_CONFIGS, Family, Pool, families, optional, specs
from pretuned.aot.plan.plan import BuildPlan, plan, planned_on
from pretuned.artifacts.records import Fusion, Gpu, Layout, LocalGpu, Op, Problem, Source, Variant
from pretuned.kernels import registry, search
from pretuned.kernels.entry import LAUNCH_ABI, has_aligned_rows
from pretuned.kernels.registry import entry_of
from pretuned.kernels.spec import Cache, Spec
from pretuned.runtime.dispatch.decide import Decision, settle
from pretuned.runtime.dispatch.neighbours import Neighbourhood
from pretuned.runtime.dispatch.places import Kind, Place
from pretuned.runtime.dispatch.snapshot import Snapshot

H100 = LocalGpu(90, Gpu("NVIDIA H100 80GB HBM3", 132, 81079, 13000))
CUBINS = 160  # of the whole catalogue in bf16, all ops
CUBINS_OF_A_FORMAT = 60  # forward and dX
CUBIN_BYTES = 40_000  # the mean of the real ones


def _compiled(spec: Spec, sm: int) -> Compiled:
    """Half the registers of a full thread, and the least shared memory that the config can take."""
    variant = Variant(
        kernel=entry_of(spec).name,
        revision=1,
        abi=LAUNCH_ABI,
        op=spec.op,
        dtype=spec.dtype,
        layout=spec.layout,
        fusion=spec.fusion,
        alignment=spec.alignment,
        max_experts=spec.max_experts,
        config=spec.config.pairs(),
        entry=entry_of(spec).name,
        arguments=registry.arguments(spec),
        tensor_maps=(),
        threads=registry.threads(spec),
        shared_bytes=search.shared_bytes_at_least(spec.op, spec.dtype, spec.config, sm),
        registers=128,
        spill_bytes=0,
        scratch_bytes=0,
        cubin_bytes=0,
        cubin_sha256=bytes(32),
    )
    return Compiled(variant, b"")


def _choose(planned: BuildPlan, sm: int) -> Chosen:
    return choose(planned, [_compiled(spec, sm) for spec in specs(planned.problems, sm, Pool())], sm)


@pytest.fixture(scope="module")
def catalogue() -> BuildPlan:
    return plan(load_models(["catalogue"]).shapes)


@pytest.fixture(scope="module")
def some() -> BuildPlan:
    """Every fourth model of the catalogue, for what need not be tried on all."""
    ids = [id_ for id_, entry in known_models().items() if entry.source != "default"]
    return plan(load_models(ids[::4]).shapes)


@pytest.fixture(scope="module")
def some_on_90(some: BuildPlan) -> BuildPlan:
    return planned_on(some, (90,))


@pytest.fixture(scope="module")
def counted(some_on_90: BuildPlan) -> tuple[Chosen, int]:
    """For 9.0, with as many configs an op as ship, and the calls that it took."""
    kept: list[Chosen] = []
    calls = steps(lambda: kept.append(_choose(some_on_90, 90)))
    return kept[0], calls


@pytest.fixture(scope="module")
def chosen_of_some(counted: tuple[Chosen, int]) -> Chosen:
    return counted[0]


@pytest.mark.slow
def test_the_calls_it_takes(counted: tuple[Chosen, int]) -> None:
    assert counted[1] < 6_000_000  # 4.9 million when this was written


@pytest.mark.nightly
@pytest.mark.parametrize("sm", [80, 90])
def test_the_calls_that_the_whole_catalogue_takes(catalogue: BuildPlan, sm: int) -> None:
    """12.8 and 16.3 million for the models there were when this was written."""
    assert steps(lambda: _choose(planned_on(catalogue, (sm,)), sm)) < 20_000_000


@pytest.mark.slow
@pytest.mark.parametrize("sm", [pytest.param(80, marks=pytest.mark.nightly), 90])
def test_the_whole_catalogue(catalogue: BuildPlan, sm: int) -> None:
    catalogue = planned_on(catalogue, (sm,))
    chosen = _choose(catalogue, sm)
    variants = [variant.variant for variant in chosen.variants]
    plain = [variant for variant in variants if not variant.dtype.quantised]
    for op in Op:
        assert len({variant.config for variant in plain if variant.op is op}) <= CONFIG_LIMIT
    assert len(plain) <= CUBINS
    assert len(plain) * CUBIN_BYTES < 6e6
    assert sum(value.op is Op.FORWARD for value in plain) * CUBIN_BYTES < 2e6
    formats = collections.Counter(variant.dtype for variant in variants if variant.dtype.quantised)
    assert formats
    assert max(formats.values()) <= CUBINS_OF_A_FORMAT
    assert max(loss.max_loss for loss in chosen.losses) < 0.05
    assert {loss.family for loss in chosen.losses} == {
        (family.op, family.dtype, family.layout, family.fusion) for family in families(catalogue.problems)
    }
    assert [*chosen.choices] == [*catalogue.problems]
    for problem, choices in chosen.choices.items():
        assert tuple(choice.bucket for choice in choices) == catalogue.buckets[problem]
        for choice in choices:
            assert Family.of(variants[choice.variant]) == Family.of(problem)
            assert has_aligned_rows(problem) == (variants[choice.variant].alignment == 16)
    used = {i for choices in chosen.choices.values() for choice in choices for i in (choice.variant, choice.runner_up)}
    assert all(i in used for i, variant in enumerate(variants) if variant.alignment == 16)


@pytest.mark.slow
def test_silu_in_the_epilogue_changes_no_other_choice(some_on_90: BuildPlan, chosen_of_some: Chosen) -> None:
    planned, chosen = some_on_90, chosen_of_some
    gated = {problem for problem in planned.problems if optional(problem)}
    assert len(gated) > 20
    before = _choose(planned.without(gated), 90)
    assert len(chosen.variants) <= len(before.variants) + 2 * GATED_CONFIGS

    def rows_of(chosen: Chosen, problem: Problem) -> list[tuple[object, ...]]:
        return [
            (choice.bucket, chosen.variants[choice.variant].variant.config, choice.time_ns)
            for choice in chosen.choices[problem]
        ]

    for problem in planned.problems:
        if problem not in gated:
            assert rows_of(chosen, problem) == rows_of(before, problem)


@pytest.mark.slow
def test_forms_that_move_rows_share_the_plain_ones_configs(chosen_of_some: Chosen) -> None:
    """Else three families of an op would need three times the configs."""
    variants = [variant.variant for variant in chosen_of_some.variants if variant.variant.op is Op.FORWARD]
    plain, *moving = (
        {variant.config for variant in variants if variant.fusion is fusion}
        for fusion in (Fusion.NONE, Fusion.GATHER, Fusion.SCATTER)
    )
    assert all(len(configs & plain) > len(configs) / 2 for configs in moving)


@pytest.mark.parametrize(
    "models",
    [
        ["openai/gpt-oss-20b layout=nk,kn weights=bf16"],
        ["openai/gpt-oss-20b layout=kn weights=bf16"],
        # Prefill of one and decode of another, whose w is [E, K, N]: neither runs on what serves the other.
        ["Qwen/Qwen3-30B-A3B tokens=8192..65536", "openai/gpt-oss-20b layout=kn weights=bf16"],
    ],
)
def test_both_layouts_have_good_choices_among_the_same_variants(models: list[str]) -> None:
    """A problem [E, K, N] adds choices but no code: its code is that of [E, N, K]."""
    planned = plan(load_models(models).shapes)
    compiled = [_compiled(spec, 90) for spec in specs(planned.problems, 90, Pool())]
    chosen, among_all = choose(planned, compiled, 90), choose_among_all(planned, compiled, 90)
    assert {variant.variant.layout for variant in chosen.variants} == {Layout.NK}
    assert [*chosen.choices] == [*planned.problems]
    for problem, choices in chosen.choices.items():
        for choice, best in zip(choices, among_all.choices[problem], strict=True):
            assert choice.time_ns <= 1.03 * best.time_ns


def test_a_forward_has_a_forward_s_candidates_whatever_it_is_called() -> None:
    """Those for few rows among them: dX's own are for many."""

    def configs(of: str, op: Op) -> set[object]:
        problems = plan(load_models([f"openai/gpt-oss-20b weights=bf16 {of}"]).shapes).problems
        return {spec.config for spec in specs(problems, 90, Pool()) if spec.op is op and not spec.fusion & Fusion.SILU}

    def configs_of(of: str) -> set[Spec]:
        return {*specs(plan(load_models([f"openai/gpt-oss-20b weights=bf16 {of}"]).shapes).problems, 90, Pool())}

    assert configs_of("layout=nk") < configs_of(
        ""
    )  # [E, K, N] beside it takes none away, of forms that move rows neither
    own = configs("ops=forward layout=nk", Op.FORWARD)
    assert any(config.cache is Cache.EVICT_FIRST for config in own)
    assert configs("ops=forward layout=kn", Op.DX) == own
    assert configs("ops=forward,dX", Op.DX) == own | configs("ops=dX layout=nk", Op.DX)


@pytest.mark.slow
def test_all_forms_of_an_op_keep_to_the_limit(some_on_90: BuildPlan, chosen_of_some: Chosen) -> None:
    """Silu in the epilogue too: with what the other forms hold, where there is room, else within it."""
    assert any(optional(problem) for problem in some_on_90.problems)
    compiled = [_compiled(spec, 90) for spec in specs(some_on_90.problems, 90, Pool())]
    eight = choose(some_on_90, compiled, 90, configs=8)
    for limit, chosen in ((8, eight), (CONFIG_LIMIT, chosen_of_some)):
        held: dict[object, set[object]] = {}
        for variant in chosen.variants:
            if isinstance(variant.variant.op, Op):
                held.setdefault((variant.variant.op, variant.variant.dtype, variant.variant.layout), set()).add(
                    variant.variant.config
                )
        assert limit - 3 <= max(map(len, held.values())) <= limit


def test_an_optional_form_that_no_held_config_serves_still_ships() -> None:
    """Of gather and silu only a config is left that the others don't hold (the others spilled, say)."""
    planned = planned_on(plan(load_models(["Qwen/Qwen3-30B-A3B tokens=4096..65536"]).shapes), (90,))
    compiled = [_compiled(spec, 90) for spec in specs(planned.problems, 90, Pool())]
    both = Fusion.SILU | Fusion.GATHER
    of_both = [candidate for candidate in compiled if candidate.variant.fusion == both]
    assert len({candidate.variant.config for candidate in of_both}) > 1
    for kept in {candidate.variant.config for candidate in of_both}:
        left = [
            candidate for candidate in compiled if candidate.variant.fusion != both or candidate.variant.config == kept
        ]
        for limit in (1, 3, 16):
            chosen = choose(planned, left, 90, configs=limit)
            assert all(chosen.choices[problem] for problem in planned.problems)


@pytest.fixture(scope="module")
def around_an_h100() -> Neighbourhood:
    """The cells that the shipped bundle measured, for an H100."""
    bundle_set = Snapshot([Place(Kind.INSTALLED, Path(__file__).parents[3] / "artifacts" / "bundles")])
    return Neighbourhood(bundle_set, H100, bundle_set.view(H100, installed=False))


def test_without_a_gpu_choices_are_the_runtimes_by_what_is_measured_around(around_an_h100: Neighbourhood) -> None:
    """Of a model that no bundle has, over the same variants: built or not, the same code runs."""
    planned = plan(load_models(["shape:E=60,H=2432,I=1408,k=4 tokens=1..4096"]).shapes)
    planned = planned.without({problem for problem in planned.problems if problem.fusion})
    usable = next(usable for usable in around_an_h100.view.usable if usable.path.stem == "catalogue-sm90")
    compiled = [Compiled(variant, b"") for variant in usable.bundle.variants()]
    chosen = choose(planned, compiled, 90, configs=len(compiled), around=around_an_h100)
    alone = choose(planned, compiled, 90, configs=len(compiled))
    bundle_set = Snapshot([Place(Kind.INSTALLED, usable.path.parent)])
    changed = cells = 0
    for problem, choices in chosen.choices.items():
        for choice, by_model in zip(choices, alone.choices[problem], strict=True):
            assert choice.source is Source.MODELLED
            ran = settle(bundle_set, problem, choice.bucket, H100, True, False)
            assert isinstance(ran, Decision)
            cells += 1
            assert choice.time_ns == pytest.approx(1e3 * ran.chosen.time_us, rel=0.02)  # what gains little ships not
            changed += chosen.variants[choice.variant].variant != alone.variants[by_model.variant].variant
    assert changed > 0.1 * cells
