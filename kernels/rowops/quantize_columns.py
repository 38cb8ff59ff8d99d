"""Sorted rows as e4m3 codes along M, transposed: the operands of dW in fp8.

A program takes 128 rows of one expert by 128 columns at a time. A thread has eight columns of four neighbouring rows:
the four codes of a column are a word of the transposed codes.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..portable_plain.tiles import expert_rows, expert_tiles, locate

# Flags; kernels/rowops/__init__.py has equal values.
_PICKED: tl.constexpr = tl.constexpr(32768)
_BLOCKS: tl.constexpr = tl.constexpr(65536)
_EXPERTS: tl.constexpr = tl.constexpr(512)  # the most
_GROUP: tl.constexpr = tl.constexpr(128)  # rows that share a scale
_MOST: tl.constexpr = tl.constexpr(448.0)  # the largest e4m3 number
_LEAST: tl.constexpr = tl.constexpr(2.0**-126)  # scale: the inverse of a smaller one is infinite, 0 times that NaN


@triton.jit
def packed(a, b, c, d):
    """The e4m3 codes of four numbers as the bytes of a word, those of ``a`` lowest.

    Triton 3.7.1 compiles codes that are shifted and joined as integers to code that reads undefined registers.
    """
    return tl.inline_asm_elementwise(
        "{.reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; "
        "mov.b32 $0, {low, high};}",
        "=r,f,f,f,f",
        [a, b, c, d],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _factor(most):
    """The scale of elements of which ``most`` is the largest magnitude."""
    factor = most * (1.0 / _MOST)
    return tl.where(factor > 0, tl.maximum(factor, _LEAST), 1.0)


@triton.jit
def _rows(x, row, row_end, column, index, top_k, columns, index_step, flags):
    """These columns of these rows, in x's dtype; zeros for rows from ``row_end`` on."""
    inside = row < row_end
    source = row.to(tl.int64)
    if (flags & _PICKED) != 0:
        source = (tl.load(index + source * index_step, mask=inside, other=0) // top_k).to(tl.int64)
    return tl.load(x + source[:, None] * columns + column[None, :], mask=inside[:, None], other=0.0)


@triton.jit
def _larger(a, b):
    return tl.maximum(tl.abs(a), tl.abs(b))


@triton.jit
def quantize_columns(
    x,
    index,
    m_sizes,
    column_codes,
    column_scale,
    M,
    columns,
    places,
    E,
    top_k,
    index_step,
    m_sizes_step,
    flags,
    BLOCK: tl.constexpr,
):
    """Codes of sorted rows with a scale for each 128 rows of an expert and column, transposed.

    column_scale[g, c] = max |x[m, c]| / 448 of the m of group g, 2^-126 at least, or 1 of zeros. column_codes[c, p] =
    x[m(p), c] / column_scale[p // 128, c] as e4m3. With BLOCKS, 128 columns share a scale: column_scale is
    [places / 128, columns / 128]. Each expert's rows begin at a multiple of 128 of p; behind its last row codes are
    zeros up to the next multiple.

    x [M, columns], rows dense, columns whole 128s; PICKED, row i of x is ``index[i] // top_k`` (int32 words, a step of
    2 means int64). m_sizes [E], E at most 512. column_codes are bytes [columns, places], column_scale is fp32
    [places / 128, columns]. A program does 128 rows and BLOCK = 128 columns at a time, until there are no more.
    """
    start, end = expert_rows(m_sizes, m_sizes_step, M, E, 0, 0, _EXPERTS)
    across = columns // BLOCK
    tile_ends = expert_tiles(start, end, across, _GROUP)
    total = tl.max(tile_ends, 0)
    quarter, column = tl.arange(0, _GROUP // 4), tl.arange(0, BLOCK)
    place = column[None, :] * (places // 4) + quarter[:, None]
    words = column_codes.to(tl.pointer_type(tl.int32), bitcast=True)
    tile = tl.program_id(0)
    while tile < total:
        _expert, inner, row_start, row_end = locate(tile, tile_ends, end, M)
        row = row_start + inner // across * _GROUP + 4 * quarter
        group, block = tile // across, tile % across
        of = block * BLOCK + column
        a = _rows(x, row, row_end, of, index, top_k, columns, index_step, flags)
        b = _rows(x, row + 1, row_end, of, index, top_k, columns, index_step, flags)
        c = _rows(x, row + 2, row_end, of, index, top_k, columns, index_step, flags)
        d = _rows(x, row + 3, row_end, of, index, top_k, columns, index_step, flags)
        most = tl.max(tl.maximum(_larger(a, b), _larger(c, d)).to(tl.float32), 0)
        if (flags & _BLOCKS) != 0:
            factor = _factor(tl.max(most, 0))
            tl.store(column_scale + group.to(tl.int64) * across + block, factor)
            inverse = tl.zeros_like(most) + tl.div_rn(1.0, factor)
        else:
            of_column = _factor(most)
            tl.store(column_scale + group.to(tl.int64) * columns + of, of_column)
            inverse = tl.div_rn(1.0, of_column)
        by = inverse[None, :]
        word = packed(a.to(tl.float32) * by, b.to(tl.float32) * by, c.to(tl.float32) * by, d.to(tl.float32) * by)
        to = words + (block * BLOCK).to(tl.int64) * (places // 4) + group * (_GROUP // 4)
        tl.store(to + place, word)
        tile += tl.num_programs(0)
