"""Set the rows of y that no index names to zero, by extra programs of the GEMM's launch or by a launch of its own."""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import expert_rows

_ENTRIES: tl.constexpr = tl.constexpr(256)  # entries of the index that are read at a time


@triton.jit
def clear_unnamed(
    y,
    index,
    m_sizes,
    first_row,
    M,
    N,
    E,
    stride_y_m,
    m_sizes_step,
    index_step,
    index_end,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """y[r] = 0 for each r in [first_row, first_row + ROWS) and below index_end that is no index[i], i < sum(m_sizes).

    Only an index's low word counts, as in ``tiles.flat_index``: no row is both cleared and stored to.
    """
    used = 0
    for first in tl.range(0, E, EXPERTS):
        _start, end = expert_rows(m_sizes, m_sizes_step, M, E, first, used, EXPERTS)
        used = tl.max(end, 0)
    row = first_row + tl.arange(0, ROWS)
    named = tl.zeros((ROWS,), tl.int32)
    for first in tl.range(0, used, _ENTRIES):
        i = first + tl.arange(0, _ENTRIES)
        there = tl.load(index + i.to(tl.int64) * index_step, mask=i < used, other=-1)
        named = tl.maximum(named, tl.max((there[None, :] == row[:, None]).to(tl.int32), 1))
    clears = (row < index_end) & (named == 0)
    if tl.max(clears.to(tl.int32), 0) != 0:
        for column in tl.range(0, N, COLUMNS):
            col = column + tl.arange(0, COLUMNS)
            at = y + row.to(tl.int64)[:, None] * stride_y_m + col[None, :]
            tl.store(at, tl.zeros((ROWS, COLUMNS), y.dtype.element_ty), mask=clears[:, None] & (col[None, :] < N))
