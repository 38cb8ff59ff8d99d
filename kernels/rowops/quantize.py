"""Quantise rows of x to e4m3, with a scale for each row and 128 columns, for GEMMs with an e4m3 w."""

from __future__ import annotations

import triton
import triton.language as tl

# The values of kernels/rowops/__init__.py.
_USED: tl.constexpr = tl.constexpr(32)
_PICKED: tl.constexpr = tl.constexpr(32768)
_GROUP: tl.constexpr = tl.constexpr(128)  # columns that share a scale
_MOST: tl.constexpr = tl.constexpr(448.0)  # the largest e4m3 number
_LEAST: tl.constexpr = tl.constexpr(2.0**-126)  # least scale: a smaller one's inverse is infinite, times 0 NaN


@triton.jit
def quantize(x, index, used, codes, scale, M, columns, top_k, index_step, flags, BLOCK: tl.constexpr):
    """scale[g, i] = max |x[i, 128 g : 128 (g + 1)]| / 448, 2^-126 at least, or 1 of zeros.

    codes[i, k] = x[i, k] / scale[k // 128, i] as e4m3.

    x [M, columns], rows dense; PICKED, row i of x is ``index[i] // top_k`` (int32 words, a step of 2 means int64). With
    USED rows from ``used`` on are not read or written. codes are bytes [M, columns], each 64 columns in ``K_ORDER``
    (prepared_layout.py); scale is fp32 [columns / 128, M], its rows of whole fours. A program does a row at a
    time, until there are no more.
    """
    GROUPS: tl.constexpr = BLOCK // _GROUP
    end = M
    if (flags & _USED) != 0:
        end = tl.minimum(tl.load(used), M)
    width = tl.cdiv(M, 4) * 4
    # Of 64 columns k = 16 s + 8 h + 2 c + p is byte 16 c + 4 s + 2 p + (1 - h): h is reversed as x is read.
    a = tl.arange(0, BLOCK // 16)[:, None, None]
    h = tl.arange(0, 2)[None, :, None]
    e = tl.arange(0, 8)[None, None, :]
    read = 16 * a + 8 * (1 - h) + e
    group, column = tl.arange(0, GROUPS), tl.arange(0, BLOCK)
    number = tl.program_id(0)
    while number < end:
        row = number.to(tl.int64)
        source = row
        if (flags & _PICKED) != 0:
            source = (tl.load(index + row * index_step) // top_k).to(tl.int64)
        for first in tl.range(0, columns, BLOCK):
            value = tl.load(x + source * columns + first + read, mask=first + read < columns, other=0.0).to(tl.float32)
            value = value.reshape(GROUPS, _GROUP)
            factor = tl.max(tl.abs(value), 1) * (1.0 / _MOST)
            factor = tl.where(factor > 0, tl.maximum(factor, _LEAST), 1.0)
            at = first // _GROUP + group
            tl.store(scale + at.to(tl.int64) * width + row, factor, mask=at * _GROUP < columns)
            rounded = (value * (1.0 / factor)[:, None]).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
            ordered = rounded.reshape(2 * GROUPS, 4, 2, 4, 2).permute(0, 3, 1, 4, 2).reshape(BLOCK)
            tl.store(codes + row * columns + first + column, ordered, mask=first + column < columns)
        number += tl.num_programs(0)
