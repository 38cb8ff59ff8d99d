"""Quantised weights as a sequence of plain matrices."""

from __future__ import annotations

import pytest
import torch

from pretuned.runtime import ExpertWeights
from pretuned.runtime.weights.dequantised import Dequantised


def test_each_matrix_is_an_expert_in_the_dtype_that_was_asked_for() -> None:
    weights = ExpertWeights.quantize(torch.randn(3, 4, 64), "mxfp4")
    plain, turned = (Dequantised(weights, torch.float16, transposed=transposed) for transposed in (False, True))
    assert len(plain) == 3
    assert [tuple(tensor.shape) for tensor in plain] == [(4, 64)] * 3
    for e, (tensor, other) in enumerate(zip(plain, turned, strict=True)):
        assert torch.equal(tensor, weights.dequantize(torch.float16, e))
        assert torch.equal(other, tensor.T)
    assert torch.equal(torch.stack(list(plain[1:])), weights.dequantize(torch.float16)[1:])
    assert torch.equal(plain[-1], plain[2])
    with pytest.raises(IndexError):
        plain[3]
