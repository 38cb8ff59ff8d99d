"""Where no bundle can run a call."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch
from emulated_driver import EmulatedGpu, emulated

from pretuned.artifacts.records import Gpu
from pretuned.runtime import explain, grouped_gemm
from pretuned.runtime.driver import device
from pretuned.runtime.ops import torch_fallback


def test_the_reference_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, torch_fallback.__name__)
    torch_fallback.tell_reference.cache_clear()
    x, w, m_sizes = torch.randn(6, 8), torch.randn(2, 4, 8, requires_grad=True), torch.tensor([2, 4])
    for _ in range(2):
        grouped_gemm(x, w, m_sizes).sum().backward()
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (logging.DEBUG, "pretuned: tensors on cpu: the torch reference runs")
    ]


@pytest.fixture
def amd(clean_places: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedGpu]:
    """torch for ROCm: its GPUs are called cuda, and there is no CUDA driver."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    device.tell_unsupported.cache_clear()
    with emulated(EmulatedGpu(Gpu("AMD Instinct MI300X", 304, 192 << 10, 0), 94)) as gpu:
        gpu.fails["cuInit"] = 100
        yield gpu
    device.tell_unsupported.cache_clear()


def test_an_amd_gpu_is_torchs(amd: EmulatedGpu, caplog: pytest.LogCaptureFixture) -> None:
    x, w, m_sizes = torch.randn(6, 8), torch.randn(2, 4, 8), torch.tensor([2, 4])
    want = torch.cat([x[:2] @ w[0].T, x[2:] @ w[1].T])
    for _ in range(2):
        leaves = x.clone().requires_grad_(), w.clone().requires_grad_()
        y = grouped_gemm(*leaves, m_sizes)
        torch.testing.assert_close(y, want)
        dx, dw = torch.autograd.grad(y.sum(), leaves)
        torch.testing.assert_close(dx, torch.cat([w[:1].sum(1).expand(2, 8), w[1:].sum(1).expand(4, 8)]))
        torch.testing.assert_close(dw, torch.stack([x[:2].sum(0), x[2:].sum(0)])[:, None].expand(2, 4, 8))
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "with ROCm" in record.getMessage()
    assert torch_fallback.grouped_mm(torch.bfloat16, device.local_gpu(0).sm, 2) is None  # its 9.4 is no capability


def test_no_bundle_is_to_be_built_for_an_amd_gpu(amd: EmulatedGpu) -> None:
    explanation = explain(E=2, N=64, K=64, M=8)
    assert explanation.runs == "torch"
    assert "AMD Instinct MI300X" in explanation.reason
    assert "aot build" not in explanation.reason
