"""The judge of numbers, against the whole reference; on the CPU, and on a GPU where there is one."""

from __future__ import annotations

import pytest
import torch

from pretuned.aot.measure.bench import NumericsCheck
from pretuned.aot.measure.inputs import Tensors, activations, quantised_weights, routed_rows, weights
from pretuned.artifacts.records import PLAIN_LAYOUTS, DType, Fusion, Layout, Op, Problem
from pretuned.kernels import reference
from pretuned.runtime.weights.codes import quantise_rows
from pretuned.runtime.weights.row_codes import codes_of_rows, values_of_rows

E = 16
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


@pytest.mark.slow
@pytest.mark.parametrize("device_type", DEVICES)
@pytest.mark.parametrize("op", list(Op))
@pytest.mark.parametrize("layout", PLAIN_LAYOUTS)
@pytest.mark.parametrize("fusion", [Fusion.NONE, Fusion.GATHER, Fusion.SCATTER])
@pytest.mark.parametrize("M", [1, 100, 1000])
def test_the_judge_estimates_the_error_and_sees_one_wrong_element(
    device_type: str, op: Op, layout: Layout, fusion: Fusion, M: int
) -> None:
    if op is Op.DW and (fusion or layout is Layout.KN):
        pytest.skip("dW has one form")
    device = torch.device(device_type)
    problem = Problem(op, DType.BF16, E, 384, 512, layout, fusion)
    w = weights(E, 384, 512, torch.bfloat16, device)
    w = w if layout is Layout.NK else w.view(E, 512, 384)
    m_sizes = routed_rows(E, 1, M)
    top_k = 2 if M % 2 == 0 else 1
    columns, reduction = (384, 512) if op is Op.FORWARD else (512, 384)
    index = torch.randperm(M, device=device).to(torch.int32) if fusion else None
    rows = activations(M // top_k if Fusion.GATHER in fusion else M, reduction, torch.bfloat16, device)
    if op is Op.DW:
        x = activations(M, 512, torch.bfloat16, device)
        result = reference.grad_weight(rows, x, m_sizes.to(device))
        on = Tensors(problem, M, rows, x, result)
    else:
        result = torch.full((M, columns), float("nan"), dtype=torch.bfloat16, device=device)
        other = Layout.KN if layout is Layout.NK else Layout.NK
        weighs = op is Op.FORWARD and Fusion.SCATTER in fusion  # as aot/measure/bench.py has it
        row_weights = torch.exp2(torch.arange(M, device=device) % 3 - 1) if weighs else None
        reference.rows(
            rows,
            w,
            m_sizes.to(device),
            result,
            M=M,
            layout=layout if op is Op.FORWARD else other,
            index=index,
            index_end=M,
            gather_divisor=top_k if Fusion.GATHER in fusion else 0,
            scatter=Fusion.SCATTER in fusion,
            row_weights=row_weights,
        )
        on = Tensors(problem, M, rows, w, result, index, top_k, row_weights)
    judge = NumericsCheck(problem, None if op is Op.DW else w, device)
    wanted = judge.reference(on, m_sizes.tolist())
    assert 2e-4 < judge.error(on, wanted) < 6e-3  # what rounding to bf16 costs
    busiest = int(m_sizes.argmax()) if op is Op.DW else M // 2
    spot = (busiest, 3, 5) if op is Op.DW else (busiest, 5)
    right = result[spot].clone()
    result[spot] += 100 * result.float().abs().mean()
    assert judge.error(on, wanted) == float("inf") or judge.error(on, wanted) > 1e-2
    result[spot] = float("nan")
    assert not judge.error(on, wanted) < 1e-2
    result[spot] = right
    assert judge.error(on, wanted) < 6e-3


def test_rounding_of_an_experts_only_row_is_no_mistake() -> None:
    """dW of one row is an outer product: one vector can be nearly orthogonal to all of it."""
    E = 512
    problem = Problem(Op.DW, DType.BF16, E, 64, 128)
    m_sizes = torch.ones(E, dtype=torch.int32)
    for seed in range(4):
        torch.manual_seed(seed)
        dy, x = torch.randn(E, 64).bfloat16(), torch.randn(E, 128).bfloat16()
        on = Tensors(problem, E, dy, x, reference.grad_weight(dy, x, m_sizes))
        judge = NumericsCheck(problem, None, torch.device("cpu"))
        assert judge.error(on, judge.reference(on, m_sizes.tolist())) < 6e-3


def test_an_expert_without_rows_must_get_zeros() -> None:
    problem = Problem(Op.DW, DType.BF16, 2, 64, 128)
    m_sizes = torch.tensor([8, 0], dtype=torch.int32)
    dy, x = torch.randn(8, 64).bfloat16(), torch.randn(8, 128).bfloat16()
    on = Tensors(problem, 8, dy, x, reference.grad_weight(dy, x, m_sizes))
    judge = NumericsCheck(problem, None, torch.device("cpu"))
    wanted = judge.reference(on, [8, 0])
    assert judge.error(on, wanted) < 6e-3
    on.result[1, 5, 7] = 1e-6
    assert judge.error(on, wanted) == float("inf")


@pytest.mark.parametrize("dtype", [dtype for dtype in DType if dtype.quantised and not dtype.quantises_x])
@pytest.mark.parametrize("fusion", [Fusion.NONE, Fusion.SCATTER])
def test_the_judge_takes_quantised_weights(dtype: DType, fusion: Fusion) -> None:
    count, N, K, M = 3, 256, 384, 50
    problem = Problem(Op.FORWARD, dtype, count, N, K, Layout.NK, fusion)
    w = quantised_weights(count, N, K, dtype, "cpu")
    m_sizes = torch.tensor([20, 0, 30], dtype=torch.int32)
    index = torch.randperm(M).to(torch.int32) if fusion else None
    row_weights = torch.exp2(torch.arange(M) % 3 - 1) if fusion else None
    rows = activations(M, K, torch.bfloat16, "cpu")
    dense, result = w.dequantize(torch.bfloat16), torch.full((M, N), float("nan"), dtype=torch.bfloat16)
    reference.rows(
        rows,
        dense,
        m_sizes,
        result,
        M=M,
        layout=Layout.NK,
        index=index,
        index_end=M,
        scatter=bool(fusion),
        row_weights=row_weights,
    )
    on = Tensors(problem, M, rows, w, result, index, 1, row_weights)
    judge = NumericsCheck(problem, w, torch.device("cpu"))
    wanted = judge.reference(on, m_sizes.tolist())
    assert 2e-4 < judge.error(on, wanted) < 6e-3
    result[7, 3] += 100 * result.float().abs().mean()
    assert not judge.error(on, wanted) < 1e-2
    with pytest.raises(AssertionError, match="has quantised weights"):
        _ = on.dense


@pytest.mark.parametrize("fusion", [Fusion.NONE, Fusion.SCATTER])
def test_the_judge_reads_the_codes_of_a_product_that_quantises_x(fusion: Fusion) -> None:
    """A result of x's codes is right; one of x itself is off by what quantising loses, which is more than is let be.

    That holds for codes that a pass makes, and for those that a kernel for w as it is stored makes itself.
    """
    count, N, K, M = 3, 256, 384, 50
    problem = Problem(Op.FORWARD, DType.FP8_BLOCK, count, N, K, Layout.NK, fusion)
    w = quantised_weights(count, N, K, DType.FP8_BLOCK, "cpu")
    dense, m_sizes = w.dequantize(torch.float32), torch.tensor([20, 0, 30], dtype=torch.int32)
    index = torch.randperm(M, generator=torch.Generator().manual_seed(1)).to(torch.int32) if fusion else None
    row_weights = torch.exp2(torch.arange(M) % 3 - 1) if fusion else None
    rows = activations(M, K, torch.bfloat16, "cpu")
    codes = codes_of_rows(rows, problem.dtype.precision.x.scale)

    def judged(x: torch.Tensor, read: tuple[torch.Tensor, torch.Tensor] | None) -> float:
        y = torch.cat((x[:20] @ dense[0].T, x[20:] @ dense[2].T))
        if index is not None and row_weights is not None:
            at = index.long()
            y = torch.empty_like(y).index_copy_(0, at, y * row_weights[at][:, None])
        on = Tensors(problem, M, rows, w, y.bfloat16(), index, 1, row_weights, read)
        judge = NumericsCheck(problem, w, torch.device("cpu"))
        return judge.error(on, judge.reference(on, m_sizes.tolist()))

    quantised = values_of_rows(*codes, slice(0, M))
    assert 2e-4 < judged(quantised, codes) < 6e-3
    assert judged(rows.float(), codes) > 1e-2
    problem = problem._replace(layout=Layout.STORED)
    assert 2e-4 < judged(quantised, None) < 6e-3
    assert judged(rows.float(), None) > 1e-2


@pytest.mark.parametrize("dtype", [DType.FP8_BLOCK, DType.FP8_CHANNEL])
def test_the_judge_quantises_rows_that_are_gathered(dtype: DType) -> None:
    count, N, K, M, top_k = 2, 64, 200, 24, 2
    problem = Problem(Op.FORWARD, dtype, count, N, K, Layout.STORED, Fusion.GATHER)
    w = quantised_weights(count, N, K, dtype, "cpu", prepared=False)
    rows, index = activations(M // top_k, K, torch.bfloat16, "cpu"), torch.randperm(M).to(torch.int32)
    scale = dtype.precision.x.scale
    assert scale is not None
    x, dense = quantise_rows(rows, scale)[index.long() // top_k], w.dequantize(torch.float32)
    y = torch.cat((x[:20] @ dense[0].T, x[20:] @ dense[1].T)).bfloat16()
    on = Tensors(problem, M, rows, w, y, index, top_k)
    judge = NumericsCheck(problem, w, torch.device("cpu"))
    assert 2e-4 < judge.error(on, judge.reference(on, [20, 4])) < 6e-3
