"""Quantise weights for fp8 training: read w once, and write prepared fp8 128x128 block codes of w and of its transpose.

Both have the same codes and scales in different places. A program has a block. A thread has eight columns of four rows
n = 16 s + 8 h + 2 c + p, of which each h and p are a word of the transposed codes; see kernels/rowops/weights.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .packed import packed
from .weights import _load, _place_of_8

# The values of kernels/rowops/__init__.py.
_FP32: tl.constexpr = tl.constexpr(2)
_ROWS: tl.constexpr = tl.constexpr(131072)  # ALONG_K
_COLUMNS: tl.constexpr = tl.constexpr(262144)  # ALONG_N
_GROUP: tl.constexpr = tl.constexpr(128)  # rows, and columns, that share a scale
_MOST: tl.constexpr = tl.constexpr(448.0)  # the largest e4m3 number
_LEAST: tl.constexpr = tl.constexpr(2.0**-126)  # least scale: a smaller one's inverse is infinite
_INFINITE: tl.constexpr = tl.constexpr(0x7F800000)  # magnitudes of at least these bits are infinite or NaN


@triton.jit
def _bits(left, right):
    """The larger magnitudes of both, as bits; NaN's bits are the largest."""
    return tl.maximum(left.to(tl.int32, bitcast=True) & 0x7FFFFFFF, right.to(tl.int32, bitcast=True) & 0x7FFFFFFF)


@triton.jit
def _two(w, first, at, KIND: tl.constexpr):
    """Eight columns [rows, s, 8] of some rows, and the next eight columns."""
    there = at >= 0
    return _load(w, first, at, there, KIND), _load(w, first, at + 8, there, KIND)


@triton.jit
def _block_both_ways(w, words, scales, across_words, across_scales, sizes, flags, KIND: tl.constexpr):
    rows, columns, step_expert, step_row = sizes
    down, across = rows // _GROUP, columns // _GROUP
    tile = tl.program_id(0)
    expert = (tile // (down * across)).to(tl.int64)
    top, left_edge = tile % (down * across) // across * _GROUP, tile % across * _GROUP
    s, c = tl.arange(0, 32) // 4, tl.arange(0, 32) % 4
    row = top + 16 * s + 2 * c
    column = 16 * tl.arange(0, 8)[None, :, None] + tl.arange(0, 8)[None, None, :]
    at = row[:, None, None] * step_row + left_edge + column
    begin = expert * step_expert
    a = _two(w, begin, at, KIND)  # h = 0, p = 0
    b = _two(w, begin, at + step_row, KIND)  # h = 0, p = 1
    c_ = _two(w, begin, at + 8 * step_row, KIND)  # h = 1, p = 0
    d = _two(w, begin, at + 9 * step_row, KIND)  # h = 1, p = 1
    sizes_of = tl.maximum(
        tl.maximum(_bits(a[0], a[1]), _bits(b[0], b[1])), tl.maximum(_bits(c_[0], c_[1]), _bits(d[0], d[1]))
    )
    most_bits = tl.max(tl.reshape(sizes_of, (32 * 64,)), 0)
    finite = most_bits < _INFINITE
    factor = tl.div_rn(most_bits.to(tl.float32, bitcast=True), _MOST)
    factor = tl.where(factor > 0, tl.maximum(factor, _LEAST), 1.0)
    inverse = tl.where(finite, tl.div_rn(1.0, factor), 1.0)
    factor = tl.where(finite, factor, float("nan"))
    size = expert * (rows * (columns // 4))
    if (flags & _ROWS) != 0:
        tl.store(scales.to(tl.pointer_type(tl.float32), bitcast=True) + tile, factor)
        _put(words + size, row, left_edge, rows, columns, a, inverse, finite)
        _put(words + size, row + 1, left_edge, rows, columns, b, inverse, finite)
        _put(words + size, row + 8, left_edge, rows, columns, c_, inverse, finite)
        _put(words + size, row + 9, left_edge, rows, columns, d, inverse, finite)
    if (flags & _COLUMNS) != 0:
        tl.store(across_scales + expert * (down * across) + (left_edge // _GROUP) * down + top // _GROUP, factor)
        for h in tl.static_range(2):
            word = packed(
                _scaled(c_[h], inverse, finite),
                _scaled(a[h], inverse, finite),
                _scaled(d[h], inverse, finite),
                _scaled(b[h], inverse, finite),
            )
            # [blocks, s, c, s of columns, 8] becomes [columns, blocks, c, s].
            word = tl.reshape(word, (2, 4, 4, 8, 8)).permute(3, 4, 0, 2, 1)
            i = tl.arange(0, 64)
            place, there = _place_of_8(left_edge + 8 * h + 16 * (i // 8) + i % 8, top, columns, rows, _GROUP)
            tl.store(across_words + size + place, tl.reshape(word, (64, 2, 4, 4)), mask=there)


@triton.jit
def _words(left, right):
    """Words [rows, blocks, c, s] of the numbers [rows, 8, 8] of both halves of each 16 columns, in ``K_ORDER``.

    Of 64 columns k = 16 s + 8 h + 2 c + p is byte 16 c + 4 s + 2 p + (1 - h): the four of an s and c are a word.
    """
    ROWS: tl.constexpr = left.shape[0]
    left_even, left_odd = tl.split(tl.reshape(left, (ROWS, 8, 4, 2)))
    right_even, right_odd = tl.split(tl.reshape(right, (ROWS, 8, 4, 2)))
    word = packed(right_even, left_even, right_odd, left_odd)
    return tl.reshape(word, (ROWS, 2, 4, 4)).permute(0, 1, 3, 2)


@triton.jit
def _scaled(value, inverse, finite):
    return tl.where(finite, value, 0.0) * inverse


@triton.jit
def _put(words, row, first, rows, columns, pair, inverse, finite):
    """Prepared codes of these 32 rows and the 128 columns from ``first`` on."""
    left, right = _scaled(pair[0], inverse, finite), _scaled(pair[1], inverse, finite)
    at, there = _place_of_8(row, first, rows, columns, _GROUP)
    tl.store(words + at, _words(left, right), mask=there)


@triton.jit
def quantize_blocks(
    w,
    words,
    scales,
    across_words,
    across_scales,
    M,
    columns,
    step_expert,
    step_row,
    flags,
    BLOCK: tl.constexpr,
):
    """Prepared codes and scales of w [E, M, columns] with ROWS, and of its transpose with COLUMNS; whole 128s.

    Codes and scales are those of ``quantize_weights`` for fp8 128x128 block. A block with NaN or infinity has the scale
    NaN, and zeros as codes. w is of bf16 or, by the flags, of fp32; its experts and rows are ``step_expert`` and
    ``step_row`` numbers apart. A program does a block of BLOCK = 128 x 128.
    """
    sizes = M, columns, step_expert, step_row
    if (flags & _FP32) != 0:
        _block_both_ways(w, words, scales, across_words, across_scales, sizes, flags, _FP32)
    else:
        _block_both_ways(w, words, scales, across_words, across_scales, sizes, flags, 0)
