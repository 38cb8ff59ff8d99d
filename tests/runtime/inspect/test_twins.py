"""A product goes by two names: what was built for one runs the other, from the same code."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
from emulated_kernels import bundle_of, variant_and_code
from host_gpu import PERSISTENT, Device
from host_gpu import specs as kernels_of
from hypothesis import given
from hypothesis import strategies as st
from small_bundles import NARROW, ON_H200, PROBLEM, SPECS, WIDE, measured, modelled, snapshot, write

from pretuned.aot.models.load import load_models
from pretuned.aot.plan.families import Family, Pool, by_code, serves, specs
from pretuned.aot.plan.plan import plan
from pretuned.artifacts.bundle_file import open_bundle
from pretuned.artifacts.codec import encode
from pretuned.artifacts.errors import InputError, ProblemNotInBundle
from pretuned.artifacts.records import PLAIN_LAYOUTS, Choice, DType, Fusion, Layout, Model, Op, Problem, Source
from pretuned.kernels.spec import Spec, gemm_of
from pretuned.runtime import explain, preload, reload
from pretuned.runtime.dispatch import snapshot as dispatch_snapshot
from pretuned.runtime.dispatch.decide import Decision, Match, Miss, Origin, decide
from pretuned.runtime.inspect.explain import examine, made_up_gpu
from pretuned.runtime.inspect.preload import cells_of, turned

FORMS = (Fusion.NONE, Fusion.SCATTER, Fusion.GATHER)
BUNDLES = sorted((Path(__file__).parents[3] / "artifacts" / "bundles").glob("catalogue*.msgpack"))
KN_MODELS = {  # E, then N and K of both products: gpt-oss-20b, Llama-4-Scout
    "gpt-oss": (32, (5760, 2880), (2880, 2880)),
    "llama-4": (16, (16384, 5120), (5120, 8192)),
}


def twin_of(problem: Problem) -> Problem:
    twin = problem.transposed
    assert twin is not None
    return twin


def decision(bundle_set: object, problem: Problem, M: int = 64, **how: bool) -> Decision:
    got = decide(bundle_set, problem, M, ON_H200, **how)  # type: ignore[arg-type]
    assert isinstance(got, Decision), got
    return got


@given(
    op=st.sampled_from([Op.FORWARD, Op.DX]),
    layout=st.sampled_from(PLAIN_LAYOUTS),
    fusion=st.sampled_from(FORMS),
    E=st.integers(1, 600),
    N=st.integers(1, 9000),
    K=st.integers(1, 9000),
    top_k=st.integers(0, 8),
)
def test_a_twin_is_the_same_product(op: Op, layout: Layout, fusion: Fusion, E: int, N: int, K: int, top_k: int) -> None:
    problem = Problem(op, DType.BF16, E, N, K, layout, fusion, top_k)
    twin = twin_of(problem)
    assert gemm_of(twin) == gemm_of(problem)
    assert (twin.op, twin.layout) != (problem.op, problem.layout)
    assert twin.transposed == problem


def test_what_has_none() -> None:
    assert Problem(Op.DW, DType.BF16, 8, 64, 32).transposed is None
    assert Problem(Op.FORWARD, DType.BF16, 8, 64, 32, fusion=Fusion.SILU | Fusion.GATHER).transposed is None


@pytest.mark.parametrize("sm", [80, 90, 120])
@pytest.mark.parametrize("fusion", FORMS)
@pytest.mark.parametrize("dtype", [DType.BF16, DType.TF32])
def test_every_variant_is_one_cubin_with_its_twin(sm: int, fusion: Fusion, dtype: DType) -> None:
    """The builder compiles one of two equal specs and relabels it."""
    problem = Problem(Op.DX, dtype, 8, 256, 512, fusion=fusion)
    ours = specs([problem], sm, Pool())
    assert ours
    for spec in ours:
        twin = spec._replace(op=Op.FORWARD, layout=Layout.KN)
        assert by_code([spec, twin], sm) == ((spec, twin),)


def test_a_choice_for_the_twin_is_a_choice(tmp_path: Path) -> None:
    write(tmp_path / "a.msgpack", {PROBLEM: [measured(64, NARROW, 7)]}, gpus=[ON_H200.gpu])
    problem = twin_of(PROBLEM)
    got = decision(snapshot(tmp_path), problem, strict=True)
    assert got.problem is problem
    assert (got.chosen.index, got.chosen.origin, got.chosen.match) == (NARROW, Origin.THIS_GPU, Match.EXACT)
    assert got.reason == (
        f"measured on this GPU, for this problem and M near 64 (as {PROBLEM}, which is the same GEMM)"
    )
    assert "the same product" not in decision(snapshot(tmp_path), PROBLEM).reason
    assert decision(snapshot(tmp_path), problem, 4096).chosen.match is Match.NEAREST_BUCKET
    explanation = examine(snapshot(tmp_path), problem, 64, ON_H200, aligned=True)
    assert explanation.reason == got.reason
    assert explanation.chosen is not None
    assert explanation.chosen.index == NARROW


def test_the_cost_model_chooses_among_the_twin_s_variants(tmp_path: Path) -> None:
    write(tmp_path / "a.msgpack", {PROBLEM: [modelled(64, WIDE)]})
    problem = twin_of(PROBLEM)._replace(N=4096, K=512)
    got = decision(snapshot(tmp_path), problem)
    assert got.chosen.match is Match.COST_MODEL
    assert "E=8 N=512 K=4096, which is the same GEMM" in got.reason
    assert decision(snapshot(tmp_path), problem, aligned=False).chosen.variant.alignment == 1
    with pytest.raises(ProblemNotInBundle, match=r"E=8 N=768 K=1024 \(M near 64\)"):
        decide(snapshot(tmp_path), problem, 64, ON_H200, strict=True)


def test_each_form_has_its_own_code(tmp_path: Path) -> None:
    """A gathering product runs no plain product's code, by either name."""
    write(tmp_path / "a.msgpack", {PROBLEM: [modelled(64, 0)]}, specs=[SPECS[0]])
    gathers = twin_of(PROBLEM)._replace(fusion=Fusion.GATHER)
    assert isinstance(decide(snapshot(tmp_path), gathers, 64, ON_H200), Miss)


def test_what_the_process_itself_has_compiled_runs_what_it_was_compiled_for(tmp_path: Path) -> None:
    """Else a choice would hang on which of the two was called first."""
    path = write(tmp_path / "made.msgpack", {PROBLEM: [modelled(64, WIDE)]})
    (tmp_path / "nothing").mkdir()
    bundle_set = snapshot(tmp_path / "nothing")
    with open_bundle(path) as bundle:
        bundle_set.add(bundle)
        assert decision(bundle_set, PROBLEM).chosen.index == WIDE
        assert isinstance(decide(bundle_set, twin_of(PROBLEM), 64, ON_H200), Miss)
        other = twin_of(PROBLEM)._replace(N=4096)
        assert isinstance(decide(bundle_set, other, 64, ON_H200), Miss)


@pytest.mark.parametrize("op", [Op.DW, Op.FORWARD])
def test_no_twin_is_looked_for_where_there_is_none(op: Op, tmp_path: Path) -> None:
    write(tmp_path / "a.msgpack", {PROBLEM: [modelled(64, WIDE)]})
    fusion = Fusion.NONE if op is Op.DW else Fusion.SILU
    problem = Problem(op, DType.BF16, PROBLEM.E, PROBLEM.N, PROBLEM.K, fusion=fusion)
    assert isinstance(decide(snapshot(tmp_path), problem, 64, ON_H200), Miss)


def test_a_choice_may_name_the_twin_s_code(tmp_path: Path) -> None:
    """The builder gives a product one code, whatever it is called."""
    twin = twin_of(PROBLEM)
    write(tmp_path / "a.msgpack", {PROBLEM: [modelled(64, WIDE)], twin: [modelled(64, NARROW)]})
    for problem, index in ((PROBLEM, WIDE), (twin, NARROW)):
        got = decision(snapshot(tmp_path), problem, strict=True)
        assert (got.chosen.index, got.chosen.match) == (index, Match.EXACT)
        assert "the same product" not in got.reason  # it was chosen for this one
    unknown = decision(snapshot(tmp_path), twin._replace(N=4096))
    assert "which is the same GEMM" in unknown.reason


def test_a_bundle_s_own_choice_comes_before_its_twin_s(tmp_path: Path) -> None:
    twin = twin_of(PROBLEM)
    specs = [SPECS[WIDE], replace(SPECS[NARROW], op=twin.op, layout=twin.layout)]
    write(tmp_path / "a.msgpack", {PROBLEM: [modelled(64, 0)], twin: [modelled(64, 1)]}, specs=specs)
    bundle_set = snapshot(tmp_path)
    for problem, index in ((PROBLEM, 0), (twin, 1)):
        got = decision(bundle_set, problem)
        assert (got.chosen.index, "the same product" in got.reason) == (index, False)
        both = examine(bundle_set, problem._replace(N=4096), 64, ON_H200, aligned=True).candidates
        assert {candidate.index for candidate in both} == {0, 1}  # the cost model looks at all that is the same code


def test_a_kernel_is_named_by_the_caller_for_either(tmp_path: Path) -> None:
    from pretuned.runtime.dispatch import pin

    write(tmp_path / "a.msgpack", {PROBLEM: [modelled(64, WIDE)]})
    bundle_set = snapshot(tmp_path)
    usable, index = pin.find(bundle_set, SPECS[NARROW].config, twin_of(PROBLEM), ON_H200, aligned=True)
    assert (usable.path.name, index) == ("a.msgpack", NARROW)


def test_what_is_prepared_for_weights_that_lie_the_other_way(tmp_path: Path) -> None:
    write(tmp_path / "a.msgpack", {PROBLEM: [modelled(64, WIDE)]})
    weight, kn = PROBLEM._replace(op=Op.DW), PROBLEM._replace(layout=Layout.KN)
    of_kn = weight._replace(N=PROBLEM.K, K=PROBLEM.N)
    assert list(turned([PROBLEM, weight], Layout.KN)) == [kn, of_kn]
    assert list(turned([kn, of_kn], Layout.NK)) == [PROBLEM, weight]
    assert list(turned([kn, of_kn], Layout.KN)) == [kn, of_kn]
    assert list(turned([kn, of_kn], None)) == [kn, of_kn]
    assert list(turned([weight], Layout.KN)) == [weight, of_kn]
    assert list(turned([PROBLEM, kn, weight], Layout.KN)) == [kn, of_kn]
    assert list(turned([PROBLEM, kn, weight], Layout.NK)) == [PROBLEM, weight]
    assert cells_of({kn._replace(op=Op.DX): [64]}, snapshot(tmp_path), ON_H200) == [(kn._replace(op=Op.DX), 64)]


@pytest.mark.parametrize("layout", PLAIN_LAYOUTS)
@pytest.mark.parametrize("planned", PLAIN_LAYOUTS)
def test_a_turned_model_has_the_problems_that_it_is_planned_with(planned: Layout, layout: Layout) -> None:
    def problems(lying: Layout) -> set[Problem]:
        loaded = load_models([f"shape:E=8,H=256,I=96,k=2 gated=0 layout={lying.value}"])
        return set(plan(loaded.shapes).problems)

    assert set(turned(tuple(problems(planned)), layout)) == problems(layout)


@pytest.mark.parametrize("layout", ["k", 1, ["nk"]])
def test_a_layout_that_is_none(layout: object) -> None:
    with pytest.raises(InputError, match=r"preload: w_layout is .*, wanted 'nk' .* 'kn'"):
        preload(w_layout=layout)  # type: ignore[arg-type]


@pytest.mark.parametrize("path", BUNDLES, ids=lambda path: path.stem)
@pytest.mark.parametrize("model", KN_MODELS)
def test_models_whose_weights_lie_the_other_way_run_from_the_bundles_that_ship(
    path: Path, model: str, clean_places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRETUNED_BUNDLES", str(path))
    from pretuned.runtime import reload

    reload()
    sm = int(path.stem.rpartition("sm")[2])
    E, *products = KN_MODELS[model]
    for N, K in products:
        for op in (Op.FORWARD, Op.DX):
            for fusion in FORMS:
                problem = Problem(op, DType.BF16, E, N, K, Layout.KN, fusion)
                for M in (1, 64, 4096, 65536):
                    assert explain(problem, M=M, sm=sm).runs == "bundle"
                    assert explain(problem, M=M, sm=sm, aligned=False).runs == "bundle"


@pytest.mark.parametrize("path", BUNDLES, ids=lambda path: path.stem)
@pytest.mark.parametrize("model", KN_MODELS)
def test_what_ships_was_built_for_the_layout_of_their_checkpoints(model: str, path: Path) -> None:
    """So PRETUNED_STRICT=1 runs them as transformers holds them; where a GPU was at hand they were measured."""
    E, *products = KN_MODELS[model]
    sm = int(path.stem.rpartition("sm")[2])
    with open_bundle(path) as bundle:
        for (N, K), op, M in itertools.product(products, (Op.FORWARD, Op.DX), (64, 4096)):
            problem = Problem(op, DType.BF16, E, N, K, Layout.KN)
            got = decide(snapshot(path), problem, M, made_up_gpu(sm), strict=True)
            assert isinstance(got, Decision)
            assert got.chosen.match is Match.EXACT
            assert got.chosen.source is (Source.MEASURED if sm == 90 else Source.MODELLED)
            own = next(choice for choice in bundle.find(problem) if choice.bucket == M)
            assert own.variant == got.chosen.index
            assert serves(bundle.variant(own.variant), problem)
            assert Family.of(bundle.variant(own.variant)) == Family.of(twin_of(problem)) == Family.of(problem)


def test_a_model_s_problems_are_turned(device: Device) -> None:
    forward = Problem(Op.FORWARD, DType.FP32, 4, 8, 12)
    problems = forward, forward._replace(op=Op.DX)
    kernels = kernels_of(device.there, DType.FP32, PERSISTENT)
    index = {spec.op: i for i, (spec, _) in enumerate(kernels) if isinstance(spec, Spec) and not spec.fusion}
    choices = {problem: [Choice(64, index[problem.op], Source.MODELLED, 10_000)] for problem in problems}
    bundle = bundle_of([variant_and_code(spec, block=block) for spec, block in kernels], choices)
    device.publish(encode(bundle._replace(models=(Model("some/moe", 1, 1, 2, DType.FP32, problems),))))

    def decided() -> set[Problem]:
        return {problem for problem, *_ in dispatch_snapshot.snapshot().decisions if not problem.fusion}

    preload("some/moe", w_layout="kn")
    assert decided() == {problem._replace(layout=Layout.KN) for problem in problems}
    reload()
    preload("some/moe")
    assert decided() == set(problems)


@pytest.mark.parametrize("layout", PLAIN_LAYOUTS)
def test_of_a_model_with_both_layouts_those_of_one_are_loaded(layout: Layout) -> None:
    alone = plan(load_models([f"openai/gpt-oss-20b layout={layout.value}"]).shapes).models[0].problems
    both = plan(load_models(["openai/gpt-oss-20b"]).shapes).models[0].problems
    assert {*turned(both, layout)} == {*alone}
    assert {*turned(both, None)} == {*both} > {*alone}
