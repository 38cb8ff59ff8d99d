"""torch in place of a kernel: the same code that runs on CUDA, here on the host."""

from __future__ import annotations

import pytest
import torch

from pretuned.artifacts.types import Layout
from pretuned.kernels import reference
from pretuned.runtime import apart, fallback

E, N, K = 4, 16, 24
COUNTS = [[5, 0, 3, 8], [0, 0, 0, 0], [20, -4, 7, 1], [4, 3, 2, 1]]


@pytest.fixture(autouse=True)
def no_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def operands(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, dy, w = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((16, K), (16, N), (E, N, K)))
    return x, dy, w


def near(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.double(), want.double(), rtol=2e-2, atol=5e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])  # grouped_mm and the loop
@pytest.mark.parametrize("counts", COUNTS)
def test_dw(counts: list[int], dtype: torch.dtype) -> None:
    x, dy, _ = operands(dtype)
    m_sizes = torch.tensor(counts)
    want = reference.grad_weight(dy, x, m_sizes)
    x[reference.expert_bounds(m_sizes, 16)[-1][1] :] = float("nan")
    near(apart.weight(dy, x, m_sizes, sm=90), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("layout", list(Layout))
def test_rows(counts: list[int], layout: Layout, dtype: torch.dtype) -> None:
    x, _, w = operands(dtype)
    w = w if layout is Layout.NK else w.mT.contiguous()
    m_sizes, y = torch.tensor(counts), torch.full((16, N), 3.0, dtype=dtype)
    fallback.on_cuda(x, w, m_sizes, y, layout, sm=90, aligned=True)
    end = reference.expert_bounds(m_sizes, 16)[-1][1]
    near(y[:end], reference.forward(x, w, m_sizes, layout=layout)[:end])
    assert (y[end:] == 3).all()
