from __future__ import annotations

from dataclasses import replace

import pytest
from claims import H100, H200

from pretuned.aot.build.build import build
from pretuned.aot.build.options import BuildOptions
from pretuned.aot.bundle.diff import diff
from pretuned.aot.bundle.merge import merge
from pretuned.aot.cli.prune import prune_bundle as prune
from pretuned.aot.compile.cache import CompileCache
from pretuned.aot.models.load import load_models
from pretuned.aot.plan.families import Family, Pool
from pretuned.aot.plan.plan import plan
from pretuned.artifacts import codec
from pretuned.artifacts.errors import InputError
from pretuned.artifacts.records import Bundle, DType, Gpu, Op, RowOp, Source
from pretuned.kernels.rowops import WITHOUT_DTYPE

pytestmark = pytest.mark.slow

SMALL = "shape:E=8,H=256,I=128,k=2 tokens=1..64 name=small"
BIG = "shape:E=16,H=512,I=256,k=2 tokens=1..256 name=big dtype=fp16"
OPS = (Op.FORWARD, Op.DX)


def planned(*models: str, ops: tuple[Op, ...] = OPS):
    return plan(load_models(models, ops).shapes)


@pytest.fixture(scope="module")
def built(tmp_path_factory, compiled_dir, small_space):
    """Real bundles for sm_80 by the models they are for: SMALL has two candidates, BIG one."""
    space = Pool(lambda *of: small_space.aligned(*of)[: 1 + (of[1] is DType.BF16)], small_space.fallbacks)

    def make(*models: str) -> Bundle:
        options = BuildOptions(tmp_path_factory.mktemp("made"), cache=CompileCache(compiled_dir), space=space)
        path = build(planned(*models), (80,), options).bundles[0].path
        return codec.decode(path.read_bytes(), str(path))

    return make


@pytest.fixture(scope="module")
def both(built) -> Bundle:
    return built(SMALL, BIG)


def test_what_is_left_is_what_the_model_alone_would_have(built, both: Bundle) -> None:
    done = prune(both, planned(SMALL), "both")
    assert codec.decode(codec.encode(done.bundle), "pruned") == done.bundle
    assert not diff(built(SMALL), done.bundle).differ, "every choice of this space is the same with and without BIG"
    assert not done.missing
    assert sum(map(len, done.bundle.cubins)) < sum(map(len, both.cubins))


def test_the_fallbacks_of_its_ops_stay(both: Bundle) -> None:
    done = prune(both, planned(SMALL, ops=(Op.FORWARD,)), "both")
    dtypes = {problem.dtype for problem in done.bundle.choices}
    ops = (RowOp.ACTIVATION, RowOp.COMBINE, RowOp.GATHER)
    passes = {variant for variant in both.variants if variant.op in ops and variant.dtype in dtypes}
    passes |= {variant for variant in both.variants if variant.op in WITHOUT_DTYPE}
    assert len(passes) == 6 + 3
    assert {variant for variant in done.bundle.variants if isinstance(variant.op, RowOp)} == passes
    done = replace(
        done,
        bundle=done.bundle._replace(
            variants=tuple(variant for variant in done.bundle.variants if variant not in passes)
        ),
    )
    fallbacks = {variant for variant in both.variants if variant.alignment == 1 and variant.op is Op.FORWARD}
    needed = {Family.of(problem) for problem in done.bundle.choices}
    assert {variant for variant in done.bundle.variants if variant.alignment == 1} == {
        fallback for fallback in fallbacks if Family.of(fallback) in needed
    }
    assert {variant.op for variant in done.bundle.variants} == {Op.FORWARD}
    assert {Family.of(variant) for variant in done.bundle.variants if variant.alignment == 1} == needed


def test_fewer_tokens_keep_fewer_buckets(both: Bundle) -> None:
    some = planned(SMALL.replace("1..64", "4..16"))
    done = prune(both, some, "both")
    assert {p: tuple(choice.bucket for choice in row) for p, row in done.bundle.choices.items()} == dict(some.buckets)
    (model,) = done.bundle.models
    assert set(model.problems) == set(some.problems)


def test_the_choices_of_every_gpu_are_kept(both: Bundle) -> None:
    def on(gpu: Gpu) -> Bundle:
        rows = {
            problem: tuple(choice._replace(source=Source.MEASURED, gpu=0) for choice in row)
            for problem, row in both.choices.items()
        }
        return both._replace(choices=rows, gpus=(gpu,))

    done = prune(merge({"h100": on(H100), "h200": on(H200)}).bundle, planned(SMALL), "both").bundle
    assert done.gpus == (H100, H200)
    assert done.choices
    for problem, row in done.choices.items():
        assert [(choice.bucket, choice.gpu) for choice in row] == [
            (choice.bucket, i) for choice in both.choices[problem] for i in (0, 1)
        ]


def test_what_the_bundle_lacks_is_reported(both: Bundle) -> None:
    done = prune(both, planned(SMALL.replace("1..64", "1..128")), "both")
    assert set(done.missing.values()) == {(256,)}
    assert set(done.missing) == set(planned(SMALL).problems)
    with pytest.raises(InputError, match=r"'both' has a choice for none of the 8 problems .* built for big, small"):
        prune(both, planned("shape:E=4,H=64,I=64,k=2 name=else"), "both")
    empty = both._replace(models=())
    with pytest.raises(InputError, match="built for no model"):
        prune(empty, planned("shape:E=4,H=64,I=64,k=2 name=else"), "both")


@pytest.mark.parametrize(
    ("model", "ops"),
    [
        (SMALL + " tp=2", OPS),
        (SMALL + " dtype=fp32", OPS),
        (SMALL, (Op.DW,)),
        (SMALL.replace("1..64", "1024..2048"), OPS),
    ],
)
def test_a_model_that_it_has_otherwise_is_reported_as_it_has_it(both: Bundle, model: str, ops: tuple[Op, ...]) -> None:
    wanted = r"was built for small tp=1 ep=1 bf16 \(forward, dX, M near 2\.\.128\)\. aot build"
    with pytest.raises(InputError, match=wanted):
        prune(both, planned(model, ops=ops), "both")


def test_pruned_parts_merge_back(both: Bundle) -> None:
    parts = {name: prune(both, planned(name), "both").bundle for name in (SMALL, BIG)}
    assert not diff(both, merge(parts).bundle).differ


def test_a_choice_for_the_same_product_by_its_other_name_is_kept(built) -> None:
    """SMALL's first GEMM is square: dX of [E, N, K] is its forward of [E, K, N]."""
    wanted = planned(SMALL + " layout=kn")
    done = prune(built(SMALL), wanted, "small")
    square = {problem for problem in wanted.problems if problem.N == problem.K and not problem.fusion}
    assert set(done.bundle.choices) == square != set(wanted.problems)
    assert set(done.missing) == set(wanted.problems) - square
    assert codec.decode(codec.encode(done.bundle), "pruned") == done.bundle
