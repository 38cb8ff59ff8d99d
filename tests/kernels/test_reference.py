"""The reference: the equations, ragged rows, and what the counts may be."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pretuned.artifacts.records import PLAIN_LAYOUTS, Layout
from pretuned.kernels import reference

COUNTS = st.lists(st.integers(-3, 9), min_size=1, max_size=6)


def tensors(counts: list[int], M: int, N: int, K: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(M * 31 + N * 7 + K)
    x = torch.randn(M, K, generator=generator, dtype=torch.float64).to(dtype)
    w = torch.randn(len(counts), N, K, generator=generator, dtype=torch.float64).to(dtype)
    return x, w, torch.tensor(counts, dtype=torch.int32)


def expert_of_rows(counts: list[int], M: int) -> list[int | None]:
    """Row by row, the plain way: whose row it is, None past the sum."""
    owners = [g for g, count in enumerate(counts) for _ in range(max(0, count))][:M]
    return owners + [None] * (M - len(owners))


@settings(max_examples=60, deadline=None)
@given(counts=COUNTS, M=st.integers(0, 30), N=st.integers(1, 5), K=st.integers(1, 5), kn=st.booleans())
def test_each_row_meets_its_experts_weight(counts: list[int], M: int, N: int, K: int, kn: bool) -> None:
    x, w, m_sizes = tensors(counts, M, N, K)
    layout = Layout.KN if kn else Layout.NK
    stored = w.transpose(1, 2).contiguous() if kn else w
    y = reference.forward(x, stored, m_sizes, layout=layout, zero_tail=True)
    dx = reference.grad_input(y, stored, m_sizes, layout=layout)
    dw = reference.grad_weight(y, x, m_sizes, layout=layout)
    assert y.shape == (M, N)
    assert dx.shape == (M, K)
    assert dw.shape == stored.shape
    wanted_dw = torch.zeros_like(w)
    for row, g in enumerate(expert_of_rows(counts, M)):
        if g is None:
            assert not y[row].any()
            assert not dx[row].any()
            continue
        torch.testing.assert_close(y[row], w[g] @ x[row])
        torch.testing.assert_close(dx[row], w[g].T @ y[row])
        wanted_dw[g] += torch.outer(y[row], x[row])
    torch.testing.assert_close(dw.transpose(1, 2) if kn else dw, wanted_dw)


@given(counts=COUNTS, M=st.integers(0, 30))
def test_bounds_never_pass_M_and_touch(counts: list[int], M: int) -> None:
    bounds = reference.expert_bounds(torch.tensor(counts), M)
    assert len(bounds) == len(counts)
    last = 0
    for (start, end), count in zip(bounds, counts, strict=True):
        assert start == last
        assert end - start <= max(0, count)
        assert 0 <= end <= M
        last = end
    assert last == min(M, sum(max(0, count) for count in counts))


def test_huge_counts_do_not_overflow() -> None:
    counts = torch.full((8,), 2**62, dtype=torch.int64)
    assert reference.expert_bounds(counts, 5) == [(0, 5)] + [(5, 5)] * 7


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_types_are_summed_in_fp32_and_rounded_once(dtype: torch.dtype) -> None:
    x, w, m_sizes = tensors([3, 0, 4], 7, 6, 4000, dtype)
    y = reference.forward(x, w, m_sizes)
    assert y.dtype is dtype
    exact = torch.cat([x[:3].double() @ w[0].double().T, x[3:].double() @ w[2].double().T])
    assert ((y.double() - exact).abs() <= exact.abs() * torch.finfo(dtype).eps + 1e-3).all()


def test_nan_and_inf_stay_in_their_expert() -> None:
    x, w, m_sizes = tensors([4, 5, 3], 12, 6, 8)
    clean = reference.forward(x, w, m_sizes)
    x[4:9] = float("nan")
    dirty = reference.forward(x, w, m_sizes)
    assert torch.equal(dirty[:4], clean[:4])
    assert torch.equal(dirty[9:], clean[9:])
    assert dirty[4:9].isnan().all()


@pytest.mark.parametrize("layout", PLAIN_LAYOUTS)
def test_its_gradients_are_the_other_two_equations(layout: Layout) -> None:
    x, w, m_sizes = tensors([2, 0, 3], 6, 4, 5)
    w = w if layout is Layout.NK else w.transpose(1, 2).contiguous()
    x.requires_grad_()
    w.requires_grad_()
    y = reference.forward(x, w, m_sizes, layout=layout, zero_tail=True)
    dy = torch.randn_like(y)
    dx, dw = torch.autograd.grad(y, (x, w), dy)
    torch.testing.assert_close(dx, reference.grad_input(dy, w, m_sizes, layout=layout))
    torch.testing.assert_close(dw, reference.grad_weight(dy, x, m_sizes, layout=layout))
    assert torch.autograd.gradcheck(
        lambda a, b: reference.forward(a, b, m_sizes, layout=layout, zero_tail=True), (x, w)
    )


def test_no_experts_and_no_rows() -> None:
    none = torch.zeros(0, dtype=torch.int32)
    assert reference.forward(torch.ones(3, 4), torch.ones(0, 5, 4), none, zero_tail=True).equal(torch.zeros(3, 5))
    assert reference.grad_weight(torch.ones(3, 5), torch.ones(3, 4), none).shape == (0, 5, 4)
    assert reference.forward(torch.ones(0, 4), torch.ones(2, 5, 4), torch.zeros(2, dtype=torch.int32)).shape == (0, 5)
