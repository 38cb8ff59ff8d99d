"""Zeros for the rows of y that no index names: a row operation of its own."""

from __future__ import annotations

import triton
import triton.language as tl

from ..portable_plain.tiles import expert_rows

# Values of kernels/rowops/__init__.py.
_NAMES: tl.constexpr = tl.constexpr(1)
_CLEARED_ROWS: tl.constexpr = tl.constexpr(64)


@triton.jit
def clear(
    y, index, m_sizes, named, M, rows, columns, E, index_end, m_sizes_step, index_step, flags, BLOCK: tl.constexpr
):
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
