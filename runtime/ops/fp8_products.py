"""dW of a backward in fp8: rows are quantised in groups of 128 of M, and gathered by the same row kernel."""

from __future__ import annotations

import torch

from ...artifacts.records import Layout
from ...artifacts.tuples import NamedTuple
from .fp8_codes import column_codes, dW_of_codes


class Picked(NamedTuple):
    """Sorted rows [M, C]; with ``index`` [M] rows[index // top_k]."""

    rows: torch.Tensor
    index: torch.Tensor | None = None  # type: ignore[assignment]  # (no search in a tuple)
    top_k: int = 1


def grad_weight(
    dy: Picked, x: Picked, m_sizes: torch.Tensor, layout: Layout, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """dw[e] = q(dy).T @ q(x) of expert e's rows: [E, N, K], or [E, K, N] with ``Layout.KN``; zeros without rows.

    q(t) are t's e4m3 codes times their scales: of 128 rows and a column of the first of dy and x that dw has, of 128
    rows and 128 columns of the other. Sums are fp32.
    """
    if layout is Layout.KN:  # dw[e].T: the operands change places
        dy, x = x, dy
    left = column_codes(dy.rows.contiguous(), m_sizes, dy.index, dy.top_k)
    right = column_codes(x.rows.contiguous(), m_sizes, x.index, x.top_k, blocks=True)
    return dW_of_codes(left, right, m_sizes, dtype=dtype)
