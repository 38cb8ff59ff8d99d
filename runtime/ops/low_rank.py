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
from .products import rows, weight


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


def add(one: LowRank, y: torch.Tensor, u: torch.Tensor, m_sizes: torch.Tensor, do: Now = NOW) -> None:
    """y [M, N] += u @ B.T, in place."""
    call = Rows(Op.FORWARD, u, one.B, m_sizes, Layout.NK, u.shape[0])
    do.call(_add, y, rows(call, do.new(y, tuple(y.shape)), do))


def narrowed_gradient(one: LowRank, dy: torch.Tensor, m_sizes: torch.Tensor, do: Now = NOW) -> torch.Tensor:
    """v [M, r] of dy [M, N]."""
    M = dy.shape[0]
    call = Rows(Op.DX, dy, one.B, m_sizes, Layout.NK, M)
    return _scaled(rows(call, do.new(dy, (M, one.B.shape[2])), do), one, do)


def add_gradient(one: LowRank, dx: torch.Tensor, v: torch.Tensor, m_sizes: torch.Tensor, do: Now = NOW) -> None:
    """dx [M, K] += v @ A, in place."""
    call = Rows(Op.DX, v, one.A, m_sizes, Layout.NK, v.shape[0])
    do.call(_add, dx, rows(call, do.new(dx, tuple(dx.shape)), do))


def gradients(
    dy: torch.Tensor, v: torch.Tensor, x: torch.Tensor, u: torch.Tensor, m_sizes: torch.Tensor, do: Now = NOW
) -> LowRankGradients:
    """dA and dB of sorted rows."""
    return LowRankGradients(weight(v, x, m_sizes, do=do), weight(dy, u, m_sizes, do=do))


def _scaled(found: torch.Tensor, one: LowRank, do: Now) -> torch.Tensor:
    return found if one.scale == 1 else do.call(partial(_times, scale=one.scale), found)


# What torch does of it, in place. No tensor is in here but those that are given: ``Now.call``.


def _add(y: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
    return y.add_(more)


def _times(found: torch.Tensor, scale: float) -> torch.Tensor:
    return found.mul_(scale)
