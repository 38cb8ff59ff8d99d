"""What is told to the runtime's launcher of a problem that is measured."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pretuned.aot.measure import calls
from pretuned.artifacts.records.precision import DType
from pretuned.artifacts.records.problem import Fusion, Op, Problem
from pretuned.runtime.launch import gemm


@pytest.mark.parametrize("op", [Op.FORWARD, Op.DX])
@pytest.mark.parametrize("fusion", [Fusion.NONE, Fusion.GATHER, Fusion.SCATTER])
@pytest.mark.parametrize("weighted", [False, True])
def test_moved_rows_and_their_weights(op: Op, fusion: Fusion, weighted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []

    def launcher(_kernel: object, **given: Any) -> Any:
        told.append(given["fused"])
        return lambda *given, **words: told.append((given, words))

    monkeypatch.setattr(gemm, "product_launcher", launcher)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    M, N, K = 6, 16, 32
    index = torch.arange(M, dtype=torch.int32) if fusion else None
    weights = torch.ones(M) if weighted and fusion else None
    rows, w = torch.zeros(M, K if op is Op.FORWARD else N), torch.zeros(2, N, K)
    y, m_sizes = torch.zeros(M, N if op is Op.FORWARD else K), torch.tensor([2, 4], dtype=torch.int32)
    on = calls.Tensors(Problem(op, DType.BF16, 2, N, K, fusion=fusion), M, rows, w, y, index, 2, weights)
    calls.caller(SimpleNamespace(), on, m_sizes)()
    fused, given = told
    assert fused.fusion == (fusion | Fusion.WEIGHT if weights is not None else fusion)
    assert fused.x_divisor == (2 if fusion is Fusion.GATHER else 1)
    assert not fused.zero_tail
    positional, words = given
    assert positional == (y.data_ptr(), m_sizes.data_ptr(), 7)
    moved = (
        {}
        if index is None
        else {
            "index": index.data_ptr(),
            "row_weights": 0 if weights is None else weights.data_ptr(),
            "index_end": M,
        }
    )
    assert words == {
        "x": rows.data_ptr(),
        "w": w.data_ptr(),
        "stride_x_m": rows.shape[1],
        "stride_y_m": y.shape[1],
        "M": M,
        **moved,
    }
