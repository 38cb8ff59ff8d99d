"""Arguments that the runtime's launcher gets for a problem that is measured."""

from __future__ import annotations

import pytest
import torch
from emulated_driver import EmulatedGpu, emulated
from host_gpu import PERSISTENT

from pretuned.aot.measure import inputs
from pretuned.artifacts.records import DType, Fusion, Layout, Op, Problem
from pretuned.kernels import reference
from pretuned.kernels.spec import Spec


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here: the emulated one is for machines without")
@pytest.mark.parametrize("op", [Op.FORWARD, Op.DX])
@pytest.mark.parametrize("fusion", [Fusion.NONE, Fusion.GATHER, Fusion.SCATTER])
@pytest.mark.parametrize("weighted", [False, True])
def test_moved_rows_and_their_weights(op: Op, fusion: Fusion, weighted: bool) -> None:
    M, N, K, E, top_k = 6, 16, 32, 2, 2
    columns, reduction = (N, K) if op is Op.FORWARD else (K, N)
    index = torch.tensor([4, 1, 5, 0, 3, 2], dtype=torch.int32) if fusion else None
    weights = torch.rand(M) if weighted and fusion else None
    rows, w = torch.randn(M // top_k if fusion is Fusion.GATHER else M, reduction), torch.randn(E, N, K)
    y, m_sizes = torch.full((M, columns), 7.0), torch.tensor([2, 3], dtype=torch.int32)  # the last row is nobody's
    wanted = y.clone()
    reference.rows(
        rows,
        w if op is Op.FORWARD else w.transpose(1, 2),
        m_sizes,
        wanted,
        M=M,
        layout=Layout.NK,
        index=index,
        index_end=M,
        gather_divisor=top_k if fusion is Fusion.GATHER else 0,
        scatter=fusion is Fusion.SCATTER,
        row_weights=weights,
    )
    problem = Problem(op, DType.FP32, E, N, K, fusion=fusion)
    with emulated(EmulatedGpu()) as gpu:
        kernel = gpu.load(Spec(op, DType.FP32, PERSISTENT, fusion=fusion))
        call = inputs.caller(kernel, inputs.Tensors(problem, M, rows, w, y, index, top_k, weights), m_sizes)
        assert gpu.launches == []
        gpu.stream = 7
        call()
    (launch,) = gpu.launches
    assert launch.stream == 7
    torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)
