"""The batch-invariant mode's choices among what ships: one order of sums for each problem, at every number of rows."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_bundles import NARROW, ON_H200, PROBLEM, WIDE, measured, write

from pretuned.aot.bundle.verify import sound
from pretuned.aot.cli.prune import prune_bundle
from pretuned.aot.models.load import load_models
from pretuned.aot.plan.plan import plan
from pretuned.artifacts.codec import encode
from pretuned.artifacts.errors import InputError
from pretuned.artifacts.records import DType, Fusion, Gpu, Layout, LocalGpu, Op, Problem
from pretuned.kernels.arch import supported
from pretuned.kernels.spec import gemm_of
from pretuned.runtime.dispatch import pin, plans
from pretuned.runtime.dispatch.decide import (
    Candidate,
    Decision,
    decide,
    order_of,
    settle,
    summed,
    with_low_part,
    with_wide_rows,
)
from pretuned.runtime.dispatch.places import Kind, Place
from pretuned.runtime.dispatch.snapshot import Snapshot
from pretuned.runtime.inspect.explain import examine, made_up_gpu
from pretuned.runtime.settings import Invariance

BUNDLES = Path(__file__).parents[3] / "artifacts" / "bundles"
BUCKETS = [1 << power for power in range(17)]
FORMS = (Fusion.NONE, Fusion.SCATTER, Fusion.GATHER)
NEVER, ALWAYS = Invariance(), Invariance(quantize_x=True)
FEW, SOME, MANY = 1, 6, 12  # problems of an op and dtype that are looked at


@functools.lru_cache(maxsize=3)
def shipped(invariance: Invariance | None = NEVER) -> Snapshot:
    return Snapshot([], lambda: [Place(Kind.INSTALLED, BUNDLES)], invariance=invariance)


def gpus(sm: int) -> list[LocalGpu]:
    """Those that the bundles of a capability have measured, or none in particular."""
    view = shipped().view(made_up_gpu(sm), installed=True)
    gpus = dict.fromkeys(gpu for usable in view.usable for gpu in usable.bundle.gpus)
    return [LocalGpu(sm, gpu) for gpu in gpus] or [made_up_gpu(sm)]


def problems(sm: int, count: int) -> Iterator[Problem]:
    """Products of rows that are shipped for a capability, in every form: ``count`` of each op and dtype."""
    view = shipped().view(made_up_gpu(sm), installed=True)
    problems = {problem for usable in view.usable for problem in usable.bundle.problems() if problem.op is not Op.DW}
    plain = {problem._replace(fusion=Fusion.NONE, top_k=0) for problem in problems}
    for kind in sorted({(problem.op, problem.dtype) for problem in plain}, key=str):
        some = sorted(
            (problem for problem in plain if (problem.op, problem.dtype) == kind), key=lambda problem: problem.sort_key
        )
        for problem in some[:: -(-len(some) // count)]:
            yield from (problem._replace(fusion=form) for form in FORMS)


def orders(snapshot: Snapshot, problem: Problem, local: LocalGpu, *, aligned: bool = True) -> set[object]:
    """Of all buckets; None where nothing runs it."""
    seen: set[object] = set()
    for bucket in BUCKETS:
        decided = settle(snapshot, problem, bucket, local, aligned, False)
        seen.add(order_by(decided.chosen, problem) if isinstance(decided, Decision) else None)
        assert not isinstance(decided, Decision) or decided.chosen.torch_us is None
    return seen


def order_by(candidate: Candidate, problem: Problem) -> object:
    return summed(candidate.usable, candidate.variant, problem)


def check(sm: int, count: int) -> None:
    for local in gpus(sm):
        by_product: dict[Problem, set[object]] = {}
        for problem in problems(sm, count):
            if not shipped().serves(problem, local):
                continue
            seen = orders(shipped(), problem, local)
            assert len(seen) == 1, (problem, seen)
            assert seen == {order_of(shipped(), problem, local)}, problem
            by_product.setdefault(problem._replace(fusion=Fusion.NONE), set()).update(seen)
        for problem, row in by_product.items():
            # A portable kernel alone moves the rows of dX of quantised w.
            assert len(row) == 1 or (problem.op is Op.DX and problem.dtype.quantised), (problem, row)
            assert None not in row


def test_a_problem_is_summed_in_one_order() -> None:
    check(90, FEW)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sm", "count"),
    [(90, SOME), (100, SOME), *(pytest.param(sm, MANY, marks=pytest.mark.nightly) for sm in supported())],
)
def test_each_problem_is_summed_in_one_order(sm: int, count: int) -> None:
    check(sm, count)


def test_gpus_of_a_capability_and_shards_agree() -> None:
    h100, h200 = gpus(90)[:2]
    assert h100.gpu.name != h200.gpu.name
    for dtype in (DType.BF16, DType.MXFP4, DType.FP8_BLOCK, DType.FP8_CHANNEL_A16):
        problems = [Problem(Op.FORWARD, dtype, E, N, K) for E in (8, 128) for N in (512, 4096) for K in (2048,)]
        assert len({order_of(shipped(), problem, gpu) for problem in problems for gpu in (h100, h200)}) == 1


def test_unaligned_tensors_of_bf16_are_summed_alike() -> None:
    problem, local = Problem(Op.FORWARD, DType.BF16, 128, 1536, 2048), gpus(90)[0]
    odd = problem._replace(N=1535)
    seen = [
        orders(shipped(), product, local, aligned=False) for product in (problem, odd, odd._replace(layout=Layout.KN))
    ]
    assert set.union(*seen) == {order_of(shipped(), problem, local)}
    wide = [with_wide_rows(shipped(), odd, M, local) for M in (1, 300, 1 << 16)]
    assert {order_by(choice, odd) for choice in wide if choice is not None} == {order_of(shipped(), problem, local)}


@pytest.mark.parametrize("dtype", [DType.BF16, DType.MXFP4, DType.INT4_G32_ZP, DType.FP8_BLOCK_A16])
@pytest.mark.parametrize("op", [Op.FORWARD, Op.DX])
def test_a_low_rank_part_is_summed_in_one_order(op: Op, dtype: DType) -> None:
    local = gpus(90)[0]
    for fusion in (Fusion.LOW_RANK, Fusion.LOW_RANK | Fusion.GATHER):
        problem = Problem(op, dtype, 32, 2048, 2048, fusion=fusion)
        choices = [with_low_part(shipped(), problem, M, local) for M in BUCKETS]
        assert len({None if choice is None else order_by(choice, problem) for choice in choices}) == 1


def test_few_and_many_rows_differ_without_the_mode() -> None:
    """The mode is needed: tiles for few rows share out K."""
    problem, local = Problem(Op.FORWARD, DType.MXFP4, 32, 5760, 2880), gpus(90)[0]
    assert len(orders(shipped(None), problem, local)) == 2
    assert len(orders(shipped(), problem, local)) == 1


@pytest.mark.parametrize(("dtype", "other"), [("fp8_block", "fp8_block_a16"), ("fp8_channel", "fp8_channel_a16")])
@pytest.mark.parametrize("fusion", [Fusion.NONE, Fusion.SCATTER])
def test_x_is_always_or_never_quantised(dtype: str, other: str, fusion: Fusion) -> None:
    local = gpus(90)[0]
    problem = Problem(Op.FORWARD, DType(dtype), 128, 1536, 2048, fusion=fusion)

    def quantises(mode: Invariance | None) -> set[object]:
        results = [
            (M, plans.quantised_x(shipped(mode), problem, DType(other), M, local, top_k=top_k))
            for M in BUCKETS
            for top_k in (0, 8)
        ]
        return {
            None
            if choice is None
            else summed(choice.usable, shipped(mode).variant(choice.usable.bundle, choice.variant), problem)
            for _, choice in results
        }

    assert None in quantises(None)
    assert len(quantises(None)) > 1
    assert quantises(NEVER) == {None}
    assert quantises(ALWAYS) == {order_of(shipped(ALWAYS), problem, local)}
    assert len(orders(shipped(ALWAYS), problem, local)) == 1


def test_x_is_quantised_where_no_kernel_leaves_it(tmp_path: Path) -> None:
    """Of a bundle that has products of codes alone."""
    local, problem = gpus(90)[0], Problem(Op.FORWARD, DType.FP8_BLOCK, 128, 1536, 2048)
    plain = problem._replace(dtype=DType.FP8_BLOCK_A16)
    assert not plans.always_quantises(shipped(), plain, local)
    asked = plan(load_models(["Qwen/Qwen3-30B-A3B weights=fp8_block ops=forward"], (Op.FORWARD,)).shapes)
    of_codes = {problem: buckets for problem, buckets in asked.buckets.items() if problem.dtype is DType.FP8_BLOCK}
    whole = BUNDLES / "quantised-sm90.msgpack"
    pruned = prune_bundle(sound(str(whole)), dataclasses.replace(asked, buckets=of_codes), whole.name)
    (tmp_path / "codes-sm90.msgpack").write_bytes(encode(pruned.bundle))
    alone = Snapshot([Place(Kind.NAMED, tmp_path)], invariance=NEVER)
    assert plans.always_quantises(alone, plain, local)
    assert plans.quantised_x(alone, problem, plain.dtype, 1, local, top_k=0) is not None


def test_silu_is_never_in_the_epilogue() -> None:
    local = gpus(90)[0]
    problem = Problem(Op.FORWARD, DType.BF16, 128, 1536, 2048, fusion=Fusion.SILU | Fusion.GATHER)
    results = {
        mode: plans.fused_silu(shipped(mode), problem, 65536, local, aligned=True, top_k=8) for mode in (None, NEVER)
    }
    assert results[None] is not None
    assert results[NEVER] is None
    explanation = examine(shipped(), problem, 65536, local, aligned=True, top_k=8)
    assert "in the batch-invariant mode h is rounded, as it is in a call with a gradient" in explanation.reason


def test_rows_that_are_gathered_first_are_summed_alike() -> None:
    local, taken = gpus(90)[0], 0
    for problem in problems(90, MANY):
        if problem.fusion is not Fusion.GATHER or problem.dtype.quantised:
            continue
        for M in BUCKETS:
            for fusion in (Fusion.GATHER, Fusion.GATHER | Fusion.SCATTER | Fusion.WEIGHT):
                decision = plans.rows_first(shipped(), problem, M, local, top_k=8, fusion=fusion)
                if decision is not None:
                    taken += 1
                    variant = shipped().variant(decision.usable.bundle, decision.variant)
                    assert summed(decision.usable, variant, problem) == order_of(shipped(), problem, local)
    assert taken


def test_dw_is_chosen_freely() -> None:
    local, problem = gpus(90)[0], Problem(Op.DW, DType.BF16, 128, 1536, 2048)
    for M in BUCKETS:
        free, mode = (settle(shipped(mode), problem, M, local, True, False) for mode in (None, NEVER))
        assert isinstance(free, Decision)
        assert isinstance(mode, Decision)
        assert free.chosen.variant == mode.chosen.variant


def test_a_kernel_that_the_caller_names_has_to_have_the_order() -> None:
    local, problem = gpus(90)[0], Problem(Op.FORWARD, DType.MXFP4, 32, 5760, 2880)
    few = settle(shipped(None), problem, 1, local, True, False)
    assert isinstance(few, Decision)
    assert few.chosen.config.block_n == 64
    assert pin.find(shipped(None), few.chosen.config, problem, local, aligned=True)
    with pytest.raises(InputError, match="no usable bundle has a variant 16x64x1024"):
        pin.find(shipped(), few.chosen.config, problem, local, aligned=True)


def test_torch_runs_nothing(tmp_path: Path) -> None:
    """Not even where its grouped_mm was measured faster."""
    timed = measured(64, WIDE, 5)._replace(torch_ns=4000)
    write(tmp_path / "own.msgpack", {PROBLEM: [timed]}, gpus=[ON_H200.gpu])
    for mode in (None, NEVER):
        decided = decide(Snapshot([Place(Kind.NAMED, tmp_path)], invariance=mode), PROBLEM, 64, ON_H200)
        assert isinstance(decided, Decision)
        assert (decided.chosen.torch_us is None) is (mode is NEVER)


def test_a_bundle_of_the_user_keeps_to_the_order(tmp_path: Path) -> None:
    """Its choices rank first, as without the mode, where they have the order."""
    write(tmp_path / "own.msgpack", {PROBLEM: [measured(64, WIDE, 5), measured(128, NARROW, 5)]}, gpus=[ON_H200.gpu])
    place = Place(Kind.NAMED, tmp_path)
    bundle_set = Snapshot([place], invariance=NEVER)
    for M, index in ((64, WIDE), (128, NARROW)):
        decided = decide(bundle_set, PROBLEM, M, ON_H200)
        assert isinstance(decided, Decision)
        assert decided.chosen.index == index
    assert len(orders(bundle_set, PROBLEM, ON_H200)) == 1
    assert gemm_of(PROBLEM).reduction


def test_the_fingerprint_knows_the_mode() -> None:
    local = LocalGpu(90, Gpu("NVIDIA H100 80GB HBM3", 132, 81079, 13000))
    assert len({shipped(mode).fingerprint(local) for mode in (None, NEVER, ALWAYS)}) == 3
