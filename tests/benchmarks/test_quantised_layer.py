"""The launches of row kernels that ``quantised_layer`` times by themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from emulated_driver import emulated
from host_gpu import PERSISTENT, Device

from benchmarks.speed import quantised_layer
from pretuned.artifacts.records import DType, RowOp


@pytest.mark.skipif(torch.cuda.is_available(), reason="the emulated GPU is for machines without one")
def test_each_row_kernel_gets_its_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRETUNED_BUNDLES", str(tmp_path))
    monkeypatch.setenv("PRETUNED_DISABLE_SELF_TEST", "1")
    fused, two = RowOp.ACTIVATION_CODES, [RowOp.ACTIVATION, RowOp.QUANTIZE]
    with emulated(Device(tmp_path)) as gpu:
        gpu.computes = False
        gpu.there = {fused, *two}
        gpu.has(PERSISTENT, DType.BF16)
        for call in quantised_layer.passes(9, 256, "cpu")[0]:
            call()
        assert gpu.passed == [fused, *two, *two]
        assert all(each.words[name] for each in gpu.passes for name, kind in each.code.arguments if kind == "ptr")
