"""The rows of a result that no row of a product goes to, set to zero: they alone, in place of all.

``clear`` does it in launches of its own, for large results; ``clear_unnamed`` in a product's, for small ones.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import expert_rows

# The values of kernels.passes.
_NAMES: tl.constexpr = tl.constexpr(1)
_CLEARED_ROWS: tl.constexpr = tl.constexpr(64)
_ENTRIES: tl.constexpr = tl.constexpr(256)  # of the index, looked at at a time


@triton.jit
def clear(
    y, index, m_sizes, named, M, rows, columns, E, index_end, m_sizes_step, index_step, flags, BLOCK: tl.constexpr
):  # fmt: skip
    """y[r] = 0 for each row r that is no index[i] with i < sum(m_sizes) and index[i] in [0, index_end).

    y [rows, columns] of 32-bit words, dense; ``named`` [rows] bytes, all zero at first. ``index`` [M] and ``m_sizes``
    point at int32 words, a step of 2 means int64. Two launches: NAMES, a program for BLOCK entries of the index, sets
    the bytes of the rows that they name; the other, a program for 64 rows, clears those without.
    """
    if (flags & _NAMES) != 0:
        used = 0
        for first in tl.range(0, E, BLOCK):
            _start, end = expert_rows(m_sizes, m_sizes_step, M, E, first, used, BLOCK)
            used = tl.max(end, 0)
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        row = tl.load(index + i * index_step, mask=i < used, other=-1)
        high = tl.load(index + i * index_step + (index_step - 1), mask=(i < used) & (index_step == 2), other=0)
        tl.store(named + row, tl.full((BLOCK,), 1, tl.int8), mask=(high == 0) & (row >= 0) & (row < index_end))
    else:
        start = tl.program_id(0) * _CLEARED_ROWS
        r = start + tl.arange(0, _CLEARED_ROWS)
        if tl.min(tl.load(named + r, mask=r < rows, other=1).to(tl.int32), 0) == 0:
            for more in tl.range(0, tl.minimum(_CLEARED_ROWS, rows - start)):
                if tl.load(named + start + more) == 0:
                    at = y + (start + more).to(tl.int64) * columns
                    for first in tl.range(0, columns, BLOCK):
                        col = first + tl.arange(0, BLOCK)
                        tl.store(at + col, tl.zeros((BLOCK,), y.dtype.element_ty), mask=col < columns)


@triton.jit
def clear_unnamed(
    y, index, m_sizes, first_row, M, N, E, stride_y_m, m_sizes_step, index_step, index_end,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """y[r] = 0 for each r in [first_row, first_row + ROWS) and below index_end that is no index[i], i < sum(m_sizes).

    An index is its low word, as ``tiles.flat_index`` has it: what is cleared here is nowhere stored to.
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
