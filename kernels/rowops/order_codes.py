"""Rows of x that arrive as codes, as ``quantize`` and ``quantize_rows`` would have made them of x."""

from __future__ import annotations

import triton
import triton.language as tl

# The values of kernels/rowops/__init__.py.
_USED: tl.constexpr = tl.constexpr(32)
_PICKED: tl.constexpr = tl.constexpr(32768)
_SCALES: tl.constexpr = tl.constexpr(64)  # scales of a row that are moved at once


@triton.jit
def order_codes(
    x_codes,
    x_scale,
    index,
    used,
    codes,
    scale,
    M,
    columns,
    groups,
    stride_scale_m,
    stride_scale_k,
    stride_scale_e,
    room,
    top_k,
    index_step,
    flags,
    BLOCK: tl.constexpr,
):
    """codes[i] = x_codes[i], each 64 columns in ``K_ORDER``; scale[g, i] = x_scale[i, g].

    x_codes are bytes [M, columns], rows dense, x_scale fp32 [M / room, room, groups] with these strides; PICKED, row i
    of both is ``index[i] // top_k`` (int32 words, a step of 2 means int64). With USED rows from ``used`` on are not
    read or written. codes are bytes [M, columns] (prepared_layout.py); scale is fp32 [groups, M], its rows of
    whole fours. A program does a row at a time, until there are no more.
    """
    end = M
    if (flags & _USED) != 0:
        end = tl.minimum(tl.load(used), M)
    width = tl.cdiv(M, 4) * 4
    # Of 64 columns k = 16 s + 8 h + 2 c + p is byte 16 c + 4 s + 2 p + (1 - h): h is reversed as x is read.
    a = tl.arange(0, BLOCK // 16)[:, None, None]
    h = tl.arange(0, 2)[None, :, None]
    e = tl.arange(0, 8)[None, None, :]
    read = 16 * a + 8 * (1 - h) + e
    column = tl.arange(0, BLOCK)
    number = tl.program_id(0)
    while number < end:
        row = number.to(tl.int64)
        token = number
        if (flags & _PICKED) != 0:
            token = tl.load(index + row * index_step) // top_k
        source = token.to(tl.int64)
        of_row = (token // room).to(tl.int64) * stride_scale_e + (token % room).to(tl.int64) * stride_scale_m
        for first in tl.range(0, columns, BLOCK):
            code = tl.load(x_codes + source * columns + first + read, mask=first + read < columns, other=0)
            ordered = code.reshape(BLOCK // 64, 4, 2, 4, 2).permute(0, 3, 1, 4, 2).reshape(BLOCK)
            tl.store(codes + row * columns + first + column, ordered, mask=first + column < columns)
        for first in tl.range(0, groups, _SCALES):
            group = first + tl.arange(0, _SCALES).to(tl.int64)
            factor = tl.load(x_scale + of_row + group * stride_scale_k, mask=group < groups, other=0.0)
            tl.store(scale + group * width + row, factor, mask=group < groups)
        number += tl.num_programs(0)
