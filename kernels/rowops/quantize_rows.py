"""Rows of x as codes: e4m3 with a scale for each row, for products whose w also has a scale for each row."""

from __future__ import annotations

import triton
import triton.language as tl

# The values of kernels/rowops/__init__.py.
_USED: tl.constexpr = tl.constexpr(32)
_PICKED: tl.constexpr = tl.constexpr(32768)
_MOST: tl.constexpr = tl.constexpr(448.0)  # the largest e4m3 number
_LEAST: tl.constexpr = tl.constexpr(2.0**-126)  # least scale: a smaller one's inverse is infinite, times 0 NaN


@triton.jit
def _scale(most):
    """The scale of elements whose largest magnitude is ``most``."""
    factor = most * (1.0 / _MOST)
    return tl.where(factor > 0, tl.maximum(factor, _LEAST), 1.0)


@triton.jit
def _values(at, first, columns, BLOCK: tl.constexpr):
    """A row's columns [first, first + BLOCK), float32 [BLOCK / 16, 2, 8], in the column order that ``_store`` wants."""
    a = tl.arange(0, BLOCK // 16)[:, None, None]
    h = tl.arange(0, 2)[None, :, None]
    e = tl.arange(0, 8)[None, None, :]
    column = first + 16 * a + 8 * (1 - h) + e
    return tl.load(at + column, mask=column < columns, other=0.0).to(tl.float32)


@triton.jit
def _store(codes, value, inverse, first, columns, BLOCK: tl.constexpr):
    """Writes these columns' codes. Of 64 columns k = 16 s + 8 h + 2 c + p is byte 16 c + 4 s + 2 p + (1 - h)."""
    rounded = (value * inverse).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    ordered = rounded.reshape(BLOCK // 64, 4, 2, 4, 2).permute(0, 3, 1, 4, 2).reshape(BLOCK)
    column = first + tl.arange(0, BLOCK)
    tl.store(codes + column, ordered, mask=column < columns)


@triton.jit
def quantize_rows(x, index, used, codes, scale, M, columns, top_k, index_step, flags, BLOCK: tl.constexpr):
    """scale[i] = max |x[i]| / 448, 2^-126 at least, or 1 of zeros; codes[i, k] = x[i, k] / scale[i] as e4m3.

    x [M, columns], rows dense; PICKED, row i of x is ``index[i] // top_k`` (int32 words, a step of 2 means int64). With
    USED rows from ``used`` on are not read or written. codes are bytes [M, columns], each 64 columns in ``K_ORDER``
    (prepared_layout.py); scale is fp32 [M]. A program does a row at a time, until there are no more. The row is
    read once where BLOCK holds it.
    """
    end = M
    if (flags & _USED) != 0:
        end = tl.minimum(tl.load(used), M)
    number = tl.program_id(0)
    while number < end:
        row = number.to(tl.int64)
        source = row
        if (flags & _PICKED) != 0:
            source = (tl.load(index + row * index_step) // top_k).to(tl.int64)
        at = x + source * columns
        value = _values(at, 0, columns, BLOCK)
        most = tl.max(tl.abs(value.reshape(BLOCK)), 0)
        for first in tl.range(BLOCK, columns, BLOCK):
            most = tl.maximum(most, tl.max(tl.abs(_values(at, first, columns, BLOCK).reshape(BLOCK)), 0))
        factor = _scale(most)
        tl.store(scale + row, factor)
        to = codes + row * columns
        _store(to, value, 1.0 / factor, 0, columns, BLOCK)
        for first in tl.range(BLOCK, columns, BLOCK):
            _store(to, _values(at, first, columns, BLOCK), 1.0 / factor, first, columns, BLOCK)
        number += tl.num_programs(0)
