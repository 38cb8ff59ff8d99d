from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretuned.aot.models.layer import LayerGemm, LayerShard
from pretuned.aot.models.load import load_models
from pretuned.aot.plan.families import Pool, low_rank_specs, row_kernel_specs, specs, to_compile
from pretuned.aot.plan.plan import buckets_between, built_of_codes, padded, plan, planned_on, unaligned, without_code
from pretuned.artifacts.records import DType, Fusion, Layout, Op, Problem, RowOp, bucket_of, dtypes_of
from pretuned.kernels.arch import Feature, arch_of, supported
from pretuned.kernels.rowops import CODE_OPS, MAKES_CODES, RowOpSpec, weight_specs
from pretuned.kernels.search import candidates
from pretuned.kernels.spec import code_of

QWEN3 = LayerShard(
    name="Qwen/Qwen3-30B-A3B",
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


def test_gemms_of_shards() -> None:
    assert QWEN3.gemms() == (LayerGemm("gate_up", 128, 1536, 2048), LayerGemm("down", 128, 2048, 768))
    assert replace(QWEN3, tp=4, ep=8).gemms() == (LayerGemm("gate_up", 16, 384, 2048), LayerGemm("down", 16, 2048, 192))
    assert replace(QWEN3, gated=False).gemms()[0] == LayerGemm("up", 128, 768, 2048)


def test_shared_experts_are_on_every_rank() -> None:
    deepseek = replace(QWEN3, E=256, H=7168, I=2048, shared_experts=1, ep=8, tokens=(8, 8))
    assert deepseek.gemms()[1] == LayerGemm("down", 33, 7168, 2048)
    assert deepseek.rows == (9, 9)  # 8 tokens, each to 8 routed and 1 shared expert, over 8 ranks


def test_a_low_rank_part_has_a_few_variants_of_each_product_and_no_problem() -> None:
    of_all = replace(QWEN3, ops=(Op.FORWARD, Op.DX, Op.DW))
    problems = plan([of_all]).problems
    assert not any(Fusion.LOW_RANK in problem.fusion for problem in problems)
    for sm in supported():
        low = low_rank_specs(problems, sm, Pool())
        forms = {(spec.op, spec.fusion & ~Fusion.LOW_RANK) for spec in low}
        assert forms == {(op, fusion) for op in (Op.FORWARD, Op.DX) for fusion in (Fusion.NONE, Fusion.GATHER)}
        assert len(low) <= 12 * len(forms)
        assert {spec.dtype for spec in low} == {DType.BF16}
        heights = {spec.config.block_m for spec in low if spec.op is Op.DX}
        assert min(heights) <= 32 <= 128 <= max(heights)
        assert to_compile(problems, sm, Pool()) == tuple(
            spec for spec in to_compile(problems, sm, Pool(), low_rank=True) if spec not in low
        )
        assert not set(low) & set(specs(problems, sm, Pool()))
    halves = replace(of_all, dtypes=(DType.FP16,))
    assert low_rank_specs(plan([halves]).problems, 90, Pool()) == ()


def test_training_in_fp8_is_a_forward_of_either_direction_of_w() -> None:
    (shard,) = load_models(["Qwen/Qwen3-30B-A3B training=fp8 tokens=8192"]).shapes
    of_codes = {problem for problem in plan([shard]).problems if problem.dtype.quantised}
    sizes = ((1536, 2048), (2048, 1536), (2048, 768), (768, 2048))
    assert of_codes == {Problem(Op.FORWARD, DType.FP8_BLOCK, 128, N, K) for N, K in sizes}
    assert {problem.op for problem in plan([shard]).problems if not problem.dtype.quantised} == set(Op)
    assert of_codes <= set(planned_on(plan([shard]), [90]).problems)
    assert not of_codes & set(planned_on(plan([shard]), [80]).problems)


def test_training_in_fp8_of_a_quantised_checkpoint_also_has_its_own_problems() -> None:
    (serving,) = load_models(["deepseek-ai/DeepSeek-V3 ep=8 weights=fp8_block tokens=8192"]).shapes
    both = plan([replace(serving, trains_in_fp8=True)]).problems
    assert set(both) > set(plan([serving]).problems)
    assert Problem(Op.FORWARD, DType.FP8_BLOCK, 32, 2048, 7168) in both


def test_rows() -> None:
    assert QWEN3.rows == (8, 524288)
    assert replace(QWEN3, ep=16, tokens=(1, 3)).rows == (1, 2)


def test_forward_problems_and_buckets() -> None:
    planned = plan([replace(QWEN3, tokens=(1, 100))])
    first = Problem(Op.FORWARD, DType.BF16, 128, 1536, 2048)
    second = Problem(Op.FORWARD, DType.BF16, 128, 2048, 768)
    gathers, scatters = first._replace(fusion=Fusion.GATHER), second._replace(fusion=Fusion.SCATTER)
    assert planned.problems == (first, gathers, second, scatters)
    assert set(planned.buckets.values()) == {(8, 16, 32, 64, 128, 256, 512, 1024)}
    assert planned.choices == 32
    (model,) = planned.models
    assert (model.name, model.tp, model.ep, model.top_k) == ("Qwen/Qwen3-30B-A3B", 1, 1, 8)
    assert model.dtype is DType.BF16
    assert model.problems == (first, gathers, second, scatters)


def test_every_op_and_dtype() -> None:
    planned = plan([replace(QWEN3, ops=tuple(Op), dtypes=(DType.BF16, DType.FP32, DType.TF32))])
    gated = {problem for problem in planned.problems if Fusion.SILU in problem.fusion}
    assert {problem.dtype for problem in gated} == {DType.BF16}  # see build/test_gated.py
    planned = planned.without(gated)
    assert len(planned.problems) == (4 + 4 + 2) * 3
    assert {(problem.op, problem.dtype) for problem in planned.problems} == {
        (op, dtype) for op in Op for dtype in (DType.BF16, DType.FP32, DType.TF32)
    }
    assert {(problem.E, problem.N, problem.K) for problem in planned.problems} == {(128, 1536, 2048), (128, 2048, 768)}
    assert [model.dtype for model in planned.models] == [DType.BF16, DType.FP32, DType.TF32]
    assert all(len(model.problems) == 10 for model in planned.models)
    assert set(planned.buckets.values()) == {tuple(1 << power for power in range(3, 20))}  # the same for every op


def test_rows_are_moved_where_a_layer_moves_them() -> None:
    first, second = QWEN3.gemms()
    problems = plan([replace(QWEN3, ops=tuple(Op))]).problems
    moved = {
        (problem.op, problem.N, problem.K): problem.fusion
        for problem in problems
        if problem.fusion and Fusion.SILU not in problem.fusion
    }
    assert moved == {
        (Op.FORWARD, first.N, first.K): Fusion.GATHER,  # x, by token
        (Op.FORWARD, second.N, second.K): Fusion.SCATTER,  # y, to its token
        (Op.DX, second.N, second.K): Fusion.GATHER,  # dy, by token
        (Op.DX, first.N, first.K): Fusion.SCATTER,  # dx, to its token
    }
    assert all(
        problem.top_k == 0 and problem.fusion is code_of(problem.op, problem.fusion)
        for problem in plan([QWEN3]).problems
    )


def test_layouts() -> None:
    few = replace(QWEN3, tokens=(1, 64))  # too few for another form, see build/test_gated.py
    kn = plan([replace(few, ops=tuple(Op), layouts=(Layout.KN,))])
    nk = plan([replace(few, ops=tuple(Op))])
    both = plan([replace(few, ops=tuple(Op), layouts=(Layout.NK, Layout.KN))])
    assert {problem.layout for problem in kn.problems if problem.op is not Op.DW} == {Layout.KN}
    assert {problem._replace(layout=Layout.NK) for problem in kn.problems if problem.op is not Op.DW} == {
        problem for problem in nk.problems if problem.op is not Op.DW
    }
    # dw [E, K, N] is dW with x and dy exchanged
    assert {(problem.N, problem.K, problem.layout) for problem in kn.problems if problem.op is Op.DW} == {
        (problem.K, problem.N, Layout.NK) for problem in nk.problems if problem.op is Op.DW
    }
    assert set(both.problems) == {*kn.problems, *nk.problems}
    assert len(both.models) == 1


def test_shared_problems_are_there_once() -> None:
    twin = replace(QWEN3, name="twin", tokens=(1, 1))
    planned = plan([replace(QWEN3, tokens=(64, 64)), twin])
    assert len(planned.problems) == 4
    assert set(planned.buckets.values()) == {(8, 512)}
    assert [model.name for model in planned.models] == ["Qwen/Qwen3-30B-A3B", "twin"]


def test_one_model_in_two_specs_is_one_model() -> None:
    planned = plan([replace(QWEN3, ops=(Op.FORWARD,)), replace(QWEN3, ops=(Op.DX,))])
    (model,) = planned.models
    assert {problem.op for problem in model.problems} == {Op.FORWARD, Op.DX}


def test_order_of_input_does_not_matter() -> None:
    shapes = [replace(QWEN3, tp=tp, dtypes=dtypes) for tp in (2, 1) for dtypes in ((DType.FP16,), (DType.BF16,))]
    first, other = plan(shapes), plan(shapes[::-1])
    assert list(first.buckets.items()) == list(other.buckets.items())
    assert first.models == other.models
    assert list(first.problems) == sorted(first.problems, key=lambda problem: problem.sort_key)


def test_nothing() -> None:
    assert plan([]).problems == ()
    assert plan([]).choices == 0


@given(least=st.integers(1, 1 << 30), extra=st.integers(0, 1 << 30), at=st.floats(0, 1))
def test_every_m_between_has_its_bucket(least: int, extra: int, at: float) -> None:
    buckets = buckets_between(least, least + extra)
    assert bucket_of(least + int(extra * at)) in buckets
    assert buckets[0] == bucket_of(least)
    assert buckets[-1] == bucket_of(least + extra)
    assert all(bucket.bit_count() == 1 for bucket in buckets)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tp": 5}, "tp=5 does not divide I=768; tp can be 1, 2, 3, 4"),
        ({"ep": 3}, "ep=3 does not divide E=128; ep can be 1, 2, 4"),
        ({"E": 65536, "shared_experts": 1, "tokens": (1, 1)}, "65537 experts on a rank, shared ones included"),
        ({"E": 1024, "k": 1024, "tokens": (1, 1 << 24)}, "makes 17179869184 rows, wanted at most 1073741824"),
    ],
)
def test_contradictions(change: dict[str, object], message: str) -> None:
    (problem,) = replace(QWEN3, **change).contradictions()  # type: ignore[arg-type]
    assert message in problem


def test_unaligned_shards_are_reported() -> None:
    def names_of(*specs: str) -> list[str]:
        return [*unaligned(load_models(specs).shapes)]

    assert names_of("shape:E=8,H=1024,I=1000,k=2 tp=1,8 dtype=bf16,fp16 name=mine") == [
        "mine tp=8 ep=1 dtype=bf16,fp16: rows of gate_up (N=250, K=1024) and down (N=1024, K=125) are no multiples of "
        "8 elements (16 bytes): only fallback kernels, which are slower, run them; tp=1,5 would have none"
    ]
    assert names_of("shape:E=8,H=1024,I=1000,k=2 tp=2,125 dtype=fp32", "shape:E=8,H=100,I=64,k=2 gated=0") == [
        "E8-H100-I64-k2 tp=1 ep=1 dtype=bf16: rows of up (N=64, K=100) and down (N=100, K=64) are no multiples of 8 "
        "elements (16 bytes): only fallback kernels, which are slower, run them; padded weights would have none"
    ]
    (note,) = names_of("shape:E=8,H=1024,I=1440,k=2 tp=8")  # N = 360 of gate and up together, K = 180 of down
    assert note.startswith("E8-H1024-I1440-k2 tp=8 ep=1 dtype=bf16: rows of down (N=1024, K=180) are no multiples")


def test_zero_experts_have_a_first_gemm_of_their_own_on_one_rank() -> None:
    (whole, split) = load_models(["meituan-longcat/LongCat-Flash-Chat ep=1,8 ops=forward"]).shapes
    plain = {(problem.E, problem.N) for problem in plan([whole]).problems if problem.fusion is Fusion.NONE}
    assert plain == {(512, 4096), (512, 6144), (768, 4096)}
    assert {problem.E for problem in plan([split]).problems} == {64}


QUANTISED = [dtype for dtype in DType if dtype.quantised and not dtype.quantises_x]


def quantised_problems(dtype: DType, sm: int, *ops: Op, **changes: object) -> tuple[Problem, ...]:
    shape = replace(QWEN3, dtypes=(dtype,), ops=ops or (Op.FORWARD, Op.DX, Op.DW), **changes)  # type: ignore[arg-type]
    return planned_on(plan([shape]), [sm]).problems


@pytest.mark.parametrize("dtype", QUANTISED)
def test_of_quantised_weights_the_forward_and_dx_are_built_as_a_capability_reads_them(dtype: DType) -> None:
    shape = replace(QWEN3, dtypes=(dtype,), ops=tuple(Op), tokens=(1, 64))
    planned = planned_on(plan([shape]), [80])
    moves = {Op.FORWARD: (Fusion.GATHER, Fusion.SCATTER), Op.DX: (Fusion.SCATTER, Fusion.GATHER)}
    assert set(planned.problems) == {
        Problem(op, dtype, 128, N, K, Layout.STORED, fusion)
        for op in moves
        for (N, K), moved in zip(((1536, 2048), (2048, 768)), moves[op], strict=True)
        for fusion in (Fusion.NONE, moved)
    }
    assert set(planned.buckets.values()) == {(8, 16, 32, 64, 128, 256, 512)}
    (model,) = planned.models
    assert (model.dtype, model.problems) == (dtype, planned.problems)
    assert plan([replace(shape, ops=(Op.DW,))]).problems == ()
    both = plan([replace(shape, layouts=(Layout.NK, Layout.KN))])
    assert Layout.KN not in {problem.layout for problem in both.problems}
    assert {problem.layout for problem in planned_on(plan([shape]), [90]).problems} == {Layout.NK}
    assert len(planned_on(plan([shape]), [80, 90]).problems) == 16


@pytest.mark.parametrize(
    ("dtype", "H", "I", "sizes"),
    [
        (DType.MXFP4, 2880, 2880, {(5760, 2880), (2880, 2880)}),  # gpt-oss
        (DType.MXFP4, 2880, 720, set()),  # a fourth of it: 1440 and 720 are no multiples of 64
        (DType.NVFP4, 512, 96, {(192, 512)}),  # 96 columns are no whole blocks of K
        (DType.INT4_G64, 512, 192, {(384, 512), (512, 192)}),
        (DType.INT4_G128, 512, 192, {(384, 512)}),  # 192 are no whole groups of 128
        (DType.INT4_G128_ZP, 512, 192, {(384, 512)}),
        (DType.FP8_BLOCK_A16, 512, 192, {(384, 512)}),
        (DType.FP8_BLOCK_A16, 512, 96, set()),
        (DType.FP8_CHANNEL_A16, 512, 96, {(192, 512)}),
    ],
)
def test_sizes_that_are_no_whole_blocks_are_read_as_they_are_stored(
    dtype: DType,
    H: int,
    I: int,  # noqa: E741
    sizes: set[tuple[int, int]],
) -> None:
    problems = quantised_problems(dtype, 90, Op.FORWARD, H=H, I=I, pads=False)
    ordered = {(problem.N, problem.K) for problem in problems if problem.layout is Layout.NK}
    stored = {(problem.N, problem.K) for problem in problems if problem.layout is Layout.STORED}
    assert ordered == sizes
    assert stored == {(2 * I, H), (H, I)} - sizes
    assert {problem.fusion for problem in problems if problem.layout is Layout.NK} == (
        {Fusion.NONE, Fusion.SCATTER} if sizes else set()
    )


@pytest.mark.parametrize("sm", [80, 90])
def test_more_experts_than_code_of_codes_counts_have_a_replacement(sm: int) -> None:
    """A layer of Kimi-K3 that is not split by experts has 896."""
    (whole, split) = load_models(["moonshotai/Kimi-K3 ep=1,8"]).shapes
    assert {problem.dtype for problem in planned_on(plan([whole]), [sm]).problems} == {DType.BF16}
    assert {problem.dtype for problem in planned_on(plan([split]), [sm]).problems} == {DType.MXFP4}
    assert not quantised_problems(DType.MXFP4, sm, *Op, E=513)
    assert quantised_problems(DType.MXFP4, sm, *Op, E=512)
    (note,) = built_of_codes([whole], [sm])
    assert note == (
        f"no kernels of mxfp4 weights, 896 experts a GPU, for {arch_of(sm)}: bf16 is built there instead of "
        "moonshotai/Kimi-K3"
    )
    asked = load_models(["moonshotai/Kimi-K3 ep=1,2 weights=mxfp4"]).shapes
    (wrong,) = without_code([*asked, whole, split])
    assert wrong == (
        "moonshotai/Kimi-K3 tp=1 ep=1 dtype=mxfp4: 896 experts a GPU, wanted at most 512 of quantised weights; ep=2 "
        "splits them over 2 GPUs, weights=bf16 has kernels for any number"
    )
    (wrong,) = without_code([replace(QWEN3, E=2048, ep=2, dtypes=(DType.MXFP4,))])
    assert "; ep=4 splits them over 4 GPUs, " in wrong


def test_dw_alone_of_codes_is_refused() -> None:
    shape = replace(QWEN3, dtypes=(DType.MXFP4,), ops=(Op.DW,))
    (wrong,) = without_code([shape, replace(shape, dtypes=(DType.MXFP4, DType.BF16)), replace(shape, ops=tuple(Op))])
    assert wrong == (
        "Qwen/Qwen3-30B-A3B tp=1 ep=1 dtype=mxfp4: of quantised weights there is no dW: codes are frozen; wanted "
        "forward or dX among the ops"
    )


def test_where_there_is_no_such_code_nothing_is_planned_for_it() -> None:
    planned = plan([replace(QWEN3, dtypes=(DType.FP8_BLOCK, DType.BF16), tokens=(1, 8))])
    assert {problem.dtype for problem in planned_on(planned, [90]).problems} == {DType.FP8_BLOCK, DType.BF16}
    assert {problem.dtype for problem in planned_on(planned, [80, 86]).problems} == {DType.BF16}
    assert DType.FP8_BLOCK in {problem.dtype for problem in planned_on(planned, [80, 90]).problems}


@pytest.mark.parametrize("format", ["fp8_block", "fp8_channel"])
def test_codes_by_codes_are_planned_where_a_gpu_multiplies_them(format: str) -> None:
    """Of w as it is stored, in every form of a forward, on GPUs that multiply e4m3; 9.0 has those of w in order."""
    planned = plan([replace(QWEN3, dtypes=dtypes_of(format), weights=(format,), tokens=(1, 8))])
    for sm in (80, 86, 89, 100, 103, 120, 121):
        able = arch_of(sm).has(Feature.FP8)
        of_both = [problem for problem in planned_on(planned, [sm]).problems if problem.dtype.quantises_x]
        assert {(problem.op, problem.layout) for problem in of_both} == (
            {(Op.FORWARD, Layout.STORED)} if able else set()
        )
        assert len(of_both) == (4 if able else 0)  # two products, plain and with rows moved
        beside = {spec.op for spec in row_kernel_specs(planned_on(planned, [sm]).problems, sm, Pool())}
        assert not beside & set(MAKES_CODES)
        assert {model.dtype for model in planned_on(planned, [sm]).models} == set(dtypes_of(format)[0 if able else 1 :])
    on_hopper = {problem.layout for problem in planned_on(planned, [90]).problems if problem.dtype.quantises_x}
    assert on_hopper == {Layout.NK}


def test_a_spec_s_weights_are_what_is_planned() -> None:
    loaded = load_models(["shape:E=8,H=512,I=256,k=2 weights=mxfp4,fp8_block,bf16 ops=forward"])
    planned = plan(loaded.shapes)
    assert {problem.dtype for problem in planned.problems} == {
        DType.MXFP4,
        DType.FP8_BLOCK,
        DType.FP8_BLOCK_A16,
        DType.BF16,
    }
    assert loaded.notes == ()


def test_the_passes_of_quantised_weights_are_those_of_bf16() -> None:
    quantised, plain = (plan([replace(QWEN3, dtypes=(dtype,))]).problems for dtype in (DType.MXFP4, DType.BF16))
    of_both = row_kernel_specs((*quantised, *plain), 90, Pool())
    assert row_kernel_specs(quantised, 90, Pool()) == row_kernel_specs(plain, 90, Pool()) == of_both


def test_row_kernels_of_new_weights_are_added_if_asked_for() -> None:
    problems = plan([replace(QWEN3, dtypes=(DType.MXFP4, DType.BF16))]).problems
    pool = Pool(new_weights=True)
    added = {
        spec for sm in (80, 90) for spec in {*to_compile(problems, sm, pool)} - {*to_compile(problems, sm, Pool())}
    }
    assert added == set(weight_specs((DType.MXFP4,)))
    assert all(isinstance(spec, RowOpSpec) for spec in added)


def test_x_is_quantised_where_there_is_code_that_reads_it_so() -> None:
    for dtype, code_ops in CODE_OPS.items():
        other = DType(f"{dtype.value}_a16")
        problems = tuple(plan([replace(QWEN3, dtypes=(dtype, other))]).problems)
        beside = set(row_kernel_specs(problems, 90, Pool())) - set(row_kernel_specs(problems, 80, Pool()))
        wanted = (code_ops.quantize, RowOp.ORDER_CODES, code_ops.activation)
        assert beside == {RowOpSpec(op, DType.BF16) for op in wanted}
        only = tuple(problem for problem in problems if problem.dtype is other)
        assert row_kernel_specs(only, 90, Pool()) == row_kernel_specs(problems, 80, Pool())


def coded(*ops: Op) -> LayerShard:
    """A small model that is published in mxfp4."""
    return replace(
        QWEN3, name="mine", weights=("mxfp4",), dtypes=(DType.MXFP4,), instead=(DType.BF16,), ops=ops, tokens=(1, 8)
    )


def test_a_capability_without_code_for_the_published_format_has_a_replacement() -> None:
    codes = DType.FP8_BLOCK  # of x, too: not every GPU multiplies them
    planned = plan([replace(coded(Op.FORWARD), dtypes=(codes,))])
    assert {problem.dtype for problem in planned_on(planned, [90]).problems} == {codes}
    assert [model.dtype for model in planned_on(planned, [90]).models] == [codes]
    both = planned_on(planned, [80, 90])
    assert {problem.dtype for problem in both.problems} == {codes, DType.BF16}
    for sm in (80, 90):
        assert planned_on(both, [sm]) == planned_on(planned, [sm])
    lacking = [sm for sm in supported() if not candidates(Op.FORWARD, codes, sm)]
    assert 80 in lacking
    for sm in lacking:
        (model,) = planned_on(planned, [sm]).models
        assert model.dtype is DType.BF16
        assert set(model.problems) == set(
            planned_on(plan([replace(QWEN3, name="mine", ops=(Op.FORWARD,))]), [sm]).problems
        )


def test_what_replaces_one_spec_may_be_another_s_own() -> None:
    other = replace(QWEN3, ops=(Op.FORWARD,), dtypes=(DType.BF16,), tokens=(64, 64))
    planned = planned_on(plan([coded(Op.FORWARD), other]), [90])
    plain = {problem: buckets for problem, buckets in planned.buckets.items() if problem.dtype is DType.BF16}
    assert set(plain.values()) == {(512,)}, "none of the rows that mxfp4 has there"


def test_what_is_built_of_a_quantised_checkpoint_is_reported_in_a_line_each() -> None:
    wanted = [coded(Op.FORWARD), replace(coded(*Op), name="other"), replace(QWEN3, name="plain")]
    ops = [op for op in Op if candidates(op, DType.MXFP4, 90)]
    rest = " or ".join(op.value for op in Op if op not in ops)
    notes = [*built_of_codes(wanted, [90])]
    assert notes == [
        f"other: built as published, with mxfp4 weights, {' and '.join(op.value for op in ops)} only (no {rest} kernel "
        "reads them); weights=bf16 builds all in bf16, weights=mxfp4,bf16 builds both"
    ]
    assert "dW" in rest, "codes are frozen"
    lacking = [sm for sm in supported() if not candidates(Op.FORWARD, DType.MXFP4, sm)]
    names = ", ".join(str(arch_of(sm)) for sm in lacking)
    more = [*built_of_codes(wanted[:1], supported())]
    line = f"no kernels of mxfp4 weights for {names}: bf16 is built there instead of mine"
    assert more == ([line] if lacking else [])


@pytest.mark.parametrize(
    ("spec", "width", "wide"),
    [
        ("openai/gpt-oss-120b tp=2 weights=mxfp4", 1440, 1472),
        ("openai/gpt-oss-120b tp=4 weights=mxfp4", 720, 768),
        ("openai/gpt-oss-120b tp=8 weights=mxfp4", 360, 384),
        ("zai-org/GLM-4.5-Air tp=4 weights=int4_g32_zp", 352, 384),
        ("zai-org/GLM-4.5-Air tp=4 weights=fp8_channel", 352, 384),
        ("Qwen/Qwen3-30B-A3B tp=8 weights=nvfp4", 96, 128),
        ("shape:E=8,H=1024,I=96,k=2 weights=int4_g32 gated=0", 96, 128),
    ],
)
def test_widths_that_can_not_be_prepared_are_planned_padded(spec: str, width: int, wide: int) -> None:
    (shape,) = shapes = load_models([f"{spec} ops=forward"]).shapes
    assert shape.width == width
    halves = 2 if shape.gated else 1
    sizes = {(halves * wide, shape.H), (shape.H, wide)}
    on_hopper = planned_on(plan(shapes), (90,)).problems
    assert {(problem.N, problem.K) for problem in on_hopper} == sizes
    assert {problem.layout for problem in on_hopper} == {Layout.NK}
    elsewhere = planned_on(plan(shapes), (80,)).problems  # no kernel reads prepared weights there
    assert {(problem.N, problem.K) for problem in elsewhere} == {(halves * width, shape.H), (shape.H, width)}
    assert {problem.layout for problem in elsewhere} == {Layout.STORED}
    (note,) = padded(shapes, (80, 90))
    assert f": planned with I/tp={width} padded to {wide} ({wide / width - 1:.1%} more memory), so that " in note
    assert not [*padded(shapes, (80,))]
    own = replace(shape, pads=False)
    assert {(problem.N, problem.K) for problem in planned_on(plan([own]), (90,)).problems} == {
        (halves * width, shape.H),
        (shape.H, width),
    }


@pytest.mark.parametrize(
    "spec",
    [
        "zai-org/GLM-4.5-Air tp=4 weights=int4_g128",  # ranks would split a group
        "openai/gpt-oss-120b weights=mxfp4",
        "openai/gpt-oss-120b tp=2 weights=bf16",
        "shape:E=8,H=1000,I=96,k=2 weights=int4_g32",  # nor is H a multiple of 64
    ],
)
def test_other_widths_are_planned_as_they_are(spec: str) -> None:
    (shape,) = shapes = load_models([f"{spec} ops=forward"]).shapes
    assert not [*padded(shapes, (90,))]
    sizes = {(2 * shape.width, shape.H), (shape.H, shape.width)}
    assert {(problem.N, problem.K) for problem in planned_on(plan(shapes), (90,)).problems} == sizes
