"""The low-rank part of a product, beside its equations in float64."""

from __future__ import annotations

import torch

from pretuned.artifacts.records import Layout, Op
from pretuned.runtime.check.call import Rows
from pretuned.runtime.ops.low_rank import LowRank, narrowed, narrowed_gradient, product

E, N, K, R, S = 3, 8, 6, 2, 0.5
SIZES = torch.tensor([2, 0, 3], dtype=torch.int32)
M = 5


def test_each_step_is_its_equation() -> None:
    g = torch.Generator().manual_seed(0)
    x, dy, A, B = (torch.randn(shape, generator=g) for shape in ((M, K), (M, N), (E, R, K), (E, N, R)))
    low = LowRank(A, B, S)
    expert = torch.repeat_interleave(torch.arange(E), SIZES)
    wide_x, wide_dy, a, b = (t.double() for t in (x, dy, A[expert], B[expert]))
    u = S * torch.einsum("mk,mrk->mr", wide_x, a)
    v = S * torch.einsum("mn,mnr->mr", wide_dy, b)

    def same(got: torch.Tensor, wanted: torch.Tensor) -> None:
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)

    same(narrowed(low, x, SIZES), u)
    index = torch.tensor([4, 1, 0, 3, 2])
    same(narrowed(low, x, SIZES, index, 1), S * torch.einsum("mk,mrk->mr", wide_x[index], a))
    same(narrowed_gradient(low, dy, SIZES), v)
    w = torch.randn(E, N, K, generator=g)
    forward, back = (Rows(op, of, w, SIZES, Layout.NK, M) for op, of in ((Op.FORWARD, x), (Op.DX, dy)))
    wide = w[expert].double()
    y = torch.einsum("mk,mnk->mn", wide_x, wide)
    same(product(forward, None, None), y)
    same(product(forward, low, u.float()), y + torch.einsum("mr,mnr->mn", u, b))
    dx = torch.einsum("mn,mnk->mk", wide_dy, wide)
    same(product(back, low, v.float()), dx + torch.einsum("mr,mrk->mk", v, a))
