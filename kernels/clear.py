"""The rows of a result that no row of a product goes to, set to zero: they alone, in place of all.

``clear`` does it in launches of its own, for large results; ``clear_unnamed`` in a product's, for small ones.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import expert_rows

# The values of kernels.passes.
_NAMES: tl.constexpr = tl.constexpr(1)
_ALONE: tl.constexpr = tl.constexpr(2)
_CLEARED_ROWS: tl.constexpr = tl.constexpr(64)
_ENTRIES: tl.constexpr = tl.constexpr(256)  # of the index, looked at at a time


@triton.jit
def _or(a, b):
    return a | b


@triton.jit
def _used_rows(m_sizes, m_sizes_step, M, E, EXPERTS: tl.constexpr):
    """The rows that belong to an expert: those before the end of the last one's."""
    used = 0
    for first in tl.range(0, E, EXPERTS):
        _start, end = expert_rows(m_sizes, m_sizes_step, M, E, first, used, EXPERTS)
        used = tl.max(end, 0)
    return used


@triton.jit
def _row_named(index, index_step, i, used):
    """index[i] where i < ``used`` and it has 32 bits, else -1."""
    row = tl.load(index + i * index_step, mask=i < used, other=-1)
    high = tl.load(index + i * index_step + (index_step - 1), mask=(i < used) & (index_step == 2), other=0)
    return tl.where(high == 0, row, -1)


@triton.jit
def clear(
    y, index, m_sizes, named, M, rows, columns, E, index_end, m_sizes_step, index_step, flags, BLOCK: tl.constexpr
):  # fmt: skip
    """y[r] = 0 for each row r that is no index[i] with i < sum(m_sizes) and index[i] in [0, index_end).

    y [rows, columns] of 32-bit words, dense; ``named`` [rows] bytes, all zero at first. ``index`` [M] and ``m_sizes``
    point at int32 words, a step of 2 means int64. Two launches: NAMES, a program for BLOCK entries of the index, sets
    the bytes of the rows that they name; the other, a program for 64 rows, clears those without. Or one, ALONE, a
    program for 64 rows: each looks at the whole index, and there is no ``named``.
    """
    if (flags & _NAMES) != 0:
        used = _used_rows(m_sizes, m_sizes_step, M, E, BLOCK)
        i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        row = _row_named(index, index_step, i, used)
        tl.store(named + row, tl.full((BLOCK,), 1, tl.int8), mask=(row >= 0) & (row < index_end))
    elif (flags & _ALONE) != 0:
        used = _used_rows(m_sizes, m_sizes_step, M, E, BLOCK)
        start = tl.program_id(0) * _CLEARED_ROWS
        bits = tl.zeros((BLOCK,), tl.int64)
        for first in tl.range(0, used, BLOCK):
            row = _row_named(index, index_step, (first + tl.arange(0, BLOCK)).to(tl.int64), used)
            here = (row >= start) & (row < index_end) & (row < start + _CLEARED_ROWS)
            bits |= tl.where(here, tl.full((BLOCK,), 1, tl.int64) << (row & (_CLEARED_ROWS - 1)).to(tl.int64), 0)
        marks = tl.reduce(bits, 0, _or)
        for more in tl.range(0, tl.minimum(_CLEARED_ROWS, rows - start)):
            if ((marks >> more) & 1) == 0:
                at = y + (start + more).to(tl.int64) * columns
                for first in tl.range(0, columns, BLOCK):
                    col = first + tl.arange(0, BLOCK)
                    tl.store(at + col, tl.zeros((BLOCK,), y.dtype.element_ty), mask=col < columns)
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
    used = _used_rows(m_sizes, m_sizes_step, M, E, EXPERTS)
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
