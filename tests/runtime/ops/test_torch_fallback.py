"""torch in place of a kernel: the same code that runs on CUDA, here on the host."""

from __future__ import annotations

import pytest
import torch
from host_gpu import PASSES, Device

from pretuned.artifacts.records import PLAIN_LAYOUTS, Fusion, Layout, Op
from pretuned.kernels import reference
from pretuned.runtime.check.call import Rows
from pretuned.runtime.ops import torch_fallback
from pretuned.runtime.ops.products import rows

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
    near(torch_fallback.weight(dy, x, m_sizes, sm=90), want)


def test_dw_of_tensors_that_grouped_mm_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA it wants 16-byte aligned pointers; a view that begins anywhere has none."""

    def aligned_alone(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        assert (a.data_ptr() | b.data_ptr()) % 16 == 0, "expected data_ptr to be aligned to 16 bytes"
        asked.append(1)
        return real(a, b, offs=offs)

    asked: list[int] = []
    real = torch.nn.functional.grouped_mm
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", aligned_alone)
    (x, dy, _), m_sizes = operands(torch.bfloat16), torch.tensor(COUNTS[0])
    want = reference.grad_weight(dy, x, m_sizes)
    near(torch_fallback.weight(dy, x, m_sizes, sm=90), want)
    assert asked == [1]
    off = torch.zeros(x.numel() + 8, dtype=x.dtype)[1 : 1 + x.numel()].view_as(x).copy_(x)
    near(torch_fallback.weight(dy, off, m_sizes, sm=90), want)
    assert asked == [1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("layout", PLAIN_LAYOUTS)
def test_rows(counts: list[int], layout: Layout, dtype: torch.dtype) -> None:
    x, _, w = operands(dtype)
    w = w if layout is Layout.NK else w.mT.contiguous()
    m_sizes, y = torch.tensor(counts), torch.full((16, N), 3.0, dtype=dtype)
    torch_fallback.on_cuda(x, w, m_sizes, y, layout, sm=90, aligned=True)
    end = reference.expert_bounds(m_sizes, 16)[-1][1]
    near(y[:end], reference.forward(x, w, m_sizes, layout=layout)[:end])
    assert (y[end:] == 3).all()


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("zero_tail", [False, True])
def test_rows_whose_index_is_out_of_range_are_not_stored_to(device: Device, zero_tail: bool, biased: bool) -> None:
    """Where no kernel gathers, the gathered rows multiply alone: the index still says which of them there are."""
    x, _, w = operands(torch.float32)
    index = torch.tensor([3, -1, 5, 16, 2, 0, 1, 4])
    m_sizes, bias = torch.tensor([2, 1, 0, 4]), torch.randn(E, N) if biased else None
    call = Rows(
        Op.FORWARD,
        x,
        w,
        m_sizes,
        Layout.NK,
        len(index),
        index,
        1,
        bias=bias,
        zero_tail=zero_tail,
    )
    device.visible = False
    want = rows(call, torch.full((len(index), N), 3.0))
    assert (want[[1, 3, 7]] == (0 if zero_tail else 3)).all()
    device.visible = True
    device.there = PASSES
    y = torch.full((len(index), N), 3.0)
    assert rows(call, y) is y
    near(y, want)
    assert not device.launched
    loose = call._replace(loose=True)  # whoever calls doesn't care: the plain product's kernel may run
    device.there = {*PASSES, (Op.FORWARD, Fusion.NONE), (Op.FORWARD, Fusion.SCATTER)}
    rows(loose, y)
    assert device.launched == [(Op.FORWARD, Fusion.SCATTER if biased else Fusion.NONE)]
