"""The low-rank part of a product, as products: y[i] += s * (x[i] @ A[e].T) @ B[e].T, and its gradients.

With u[i] = s * x[i] @ A[e].T and v[i] = s * dy[i] @ B[e], which have r columns:

    y[i] += u[i] @ B[e].T        dB[e] = sum of outer(dy[i], u[i])
    dx[i] += v[i] @ A[e]         dA[e] = sum of outer(v[i], x[i])
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch

from ...artifacts.records.problem import Layout, Op
from ..check.operands import Rows
from ..launch.program import NOW, Now
from .products import rows, with_low_part


class LowRank(NamedTuple):
    """A [E, r, K], B [E, N, r] in the product's dtype, and s."""

    A: torch.Tensor
    B: torch.Tensor
    scale: float


class Adapters(NamedTuple):
    """Those of a layer's two products."""

    first: LowRank | None
    second: LowRank | None


class LowRankGradients(NamedTuple):
    """dA [E, r, K] and dB [E, N, r]."""

    A: torch.Tensor
    B: torch.Tensor


def narrowed(
    one: LowRank, x: torch.Tensor, m_sizes: torch.Tensor, index: torch.Tensor | None = None, top_k: int = 0,
    bounds: torch.Tensor | None = None, do: Now = NOW,
) -> torch.Tensor:  # fmt: skip
    """u [M, r] of sorted rows x [M, K]; with ``index`` [M], of rows x[index // top_k]."""
    M = x.shape[0] if index is None else index.shape[0]
    call = Rows(Op.FORWARD, x, one.A, m_sizes, Layout.NK, M, index, top_k, bounds=bounds)
    return _scaled(rows(call, do.new(x, (M, one.A.shape[1])), do), one, do)


def product(call: Rows, one: LowRank | None, narrow: torch.Tensor | None, do: Now = NOW) -> torch.Tensor:
    """The product, and of the forward u @ B.T beside it, of dX v @ A; ``narrow`` [M, r] is u or v.

    By one kernel, which has these columns in its reduction; where there is no such code they are a product of their
    own, which is added.
    """
    _, N, K = call.sizes
    y_shape = call.M, N if call.op is Op.FORWARD else K
    if one is None or narrow is None:
        return rows(call, do.new(call.x, y_shape), do)
    second = one.B if call.op is Op.FORWARD else one.A
    y = with_low_part(call, narrow, second, do)
    if y is None:
        y = rows(call, do.new(call.x, y_shape), do)
        beside = Rows(call.op, narrow, second, call.m_sizes, Layout.NK, call.M)
        do.call(_add, y, rows(beside, do.new(y, y_shape), do))
    return y


def narrowed_gradient(one: LowRank, dy: torch.Tensor, m_sizes: torch.Tensor, do: Now = NOW) -> torch.Tensor:
    """v [M, r] of dy [M, N]."""
    M = dy.shape[0]
    call = Rows(Op.DX, dy, one.B, m_sizes, Layout.NK, M)
    return _scaled(rows(call, do.new(dy, (M, one.B.shape[2])), do), one, do)


def _scaled(found: torch.Tensor, one: LowRank, do: Now) -> torch.Tensor:
    return found if one.scale == 1 else do.call(partial(_times, scale=one.scale), found)


# What torch does of it, in place. No tensor is in here but those that are given: ``Now.call``.


def _add(y: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
    return y.add_(more)


def _times(found: torch.Tensor, scale: float) -> torch.Tensor:
    return found.mul_(scale)
