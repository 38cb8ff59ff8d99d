"""``refit`` times what it says, and compares bits."""

from __future__ import annotations

import pytest
import torch

from benchmarks.speed import refit
from pretuned.artifacts.records import PRECISIONS
from pretuned.runtime import ExpertWeights


@pytest.mark.parametrize("format", refit.FORMATS)
def test_calls_write_the_weights_that_they_are_timed_with(format: str) -> None:
    w = [torch.randn(3, 128, 256).bfloat16(), torch.randn(3, 256, 128).bfloat16()]
    stored = [ExpertWeights.quantize(matrix, format) for matrix in w]
    ready = [ExpertWeights.quantize(torch.zeros_like(matrix), format).prepare() for matrix in w]
    what, floors = refit.calls(list(zip(w, stored, ready, strict=True))), refit.floors_ms(format, w)
    assert what.keys() == floors.keys()
    narrow = sum(tensor.nbytes for each in stored for tensor in each.tensors().values())
    assert narrow == sum(3 * PRECISIONS[format].w_bytes(*matrix.shape[1:]) for matrix in w)
    assert floors["prepare"] == pytest.approx(2e3 * narrow / refit.BYTES_PER_S)
    for name in what:
        if name in ("quantise", "checked", "prepare"):
            for packed in ready:
                packed.codes.zero_()
        what[name]()
        assert refit._differences(format, w, stored, ready, slice(None)) == []
    wrong = stored[0].codes.view(torch.uint8)
    wrong[0, 0, 0] ^= 1
    assert refit._differences(format, w, stored, ready, slice(None))
    assert refit._differences(format, w, stored, ready, slice(-2, None)) == [
        f"{format}: restored codes are not those of the checkpoint's layout"
    ]
