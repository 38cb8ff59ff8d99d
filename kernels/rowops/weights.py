"""Weights of experts as codes and scales: quantised, moved between the checkpoint's layout and the prepared one, read.

The prepared layout is that of prepared_layout.py: blocks of 64 rows and 64 columns, in which a row's column
k = 16 s + 8 h + 2 c + p is a byte, or a nibble, of the word of (c, s). A program takes a tile in halves, h = 0 and
h = 1, of eight columns each, which a thread reads at once. Its codes are those of runtime/weights/codes.py, bit for
bit: numbers are rounded by integer arithmetic, as not every GPU converts to e4m3, and none to e2m1 before sm_100.
"""

from __future__ import annotations

import triton
import triton.language as tl

# The values of kernels/rowops/__init__.py.
_FP16: tl.constexpr = tl.constexpr(1)
_FP32: tl.constexpr = tl.constexpr(2)
_PREPARED: tl.constexpr = tl.constexpr(4)
_BACK: tl.constexpr = tl.constexpr(8)
_LOOKS: tl.constexpr = tl.constexpr(16)
_E4M3: tl.constexpr = tl.constexpr(0)
_E2M1: tl.constexpr = tl.constexpr(1)
_INT4: tl.constexpr = tl.constexpr(2)
_PART: tl.constexpr = tl.constexpr(32)  # rows of a tile with a scale that are read at once
_OF_BLOCK: tl.constexpr = tl.constexpr(0)  # SCALE: an fp32 scale for each tile
_OF_ROW: tl.constexpr = tl.constexpr(1)  # an fp32 scale for each row
_E8M0: tl.constexpr = tl.constexpr(2)  # this and all below: a scale for each GROUP columns of a row
_BY_OUTER: tl.constexpr = tl.constexpr(3)  # e4m3, times a scale of the expert
_BF16: tl.constexpr = tl.constexpr(4)
_BF16_ZERO: tl.constexpr = tl.constexpr(5)  # with a zero point
_LEAST: tl.constexpr = tl.constexpr(2.0**-126)  # scale: the inverse of a smaller one is infinite


@triton.jit
def _tile_of(rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr):
    """The expert of this program's tile, int64, PART of its rows, its first column. Places in an expert are int32."""
    across = tl.cdiv(columns, BLOCK)
    down = tl.cdiv(rows, ROWS)
    tile = tl.program_id(0)
    row = tile % (down * across) // across * ROWS + tl.arange(0, PART)
    return (tile // (down * across)).to(tl.int64), row, tile % across * BLOCK


@triton.jit
def _load(w, first, at, there, KIND: tl.constexpr):
    """Load w[first + at] as float32, from bf16 or KIND. ``w`` points at int16; ``first`` is int64, ``at`` int32."""
    if KIND == _FP32:
        of_fp32 = w.to(tl.pointer_type(tl.float32), bitcast=True) + first
        value = tl.load(of_fp32 + at, mask=there, other=0.0)
    elif KIND == _FP16:
        of_fp16 = w.to(tl.pointer_type(tl.float16), bitcast=True) + first
        value = tl.load(of_fp16 + at, mask=there, other=0.0).to(tl.float32)
    else:
        value = (tl.load(w + first + at, mask=there, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return value


@triton.jit
def _nearest(value, inverse, MOST: tl.constexpr, LEAST: tl.constexpr, BITS: tl.constexpr, SHRINK: tl.constexpr):
    """|value * inverse| as a code of BITS bits of mantissa, in the low bits of int32: the nearest, of two the even one.

    MOST is the largest number of the codes, LEAST their smallest normal one, and times SHRINK that is float32's.
    """
    size = tl.minimum(tl.abs(value) * inverse, MOST)
    binade = tl.maximum(size, LEAST).to(tl.int32, bitcast=True) & 0x7F800000
    unit = (binade + ((23 - BITS) << 23)).to(tl.float32, bitcast=True)  # a sum with it is rounded to a code's unit
    return (((size + unit) - unit) * SHRINK).to(tl.int32, bitcast=True) >> (23 - BITS)


@triton.jit
def _e4m3(value, inverse):
    """The codes of value * inverse, in the low byte of int32."""
    return _nearest(value, inverse, 448.0, 2.0**-6, 3, 2.0**-120) | ((value.to(tl.int32, bitcast=True) >> 24) & 0x80)


@triton.jit
def _e2m1(value, inverse):
    """So of e2m1, in the low four bits."""
    return _nearest(value, inverse, 6.0, 1.0, 1, 2.0**-126) | ((value.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def _int4(value, inverse, zero):
    """So of int4, with a zero point (int32). (What is clamped is no product that an addition is fused with.)"""
    size = tl.minimum(tl.maximum(value * inverse, -32.0), 32.0)
    code = (size + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000 + zero
    return tl.minimum(tl.maximum(code, 0), 15)


@triton.jit
def _invertible(factor):
    return tl.where(factor > 0, tl.maximum(factor, _LEAST), 1.0)


@triton.jit
def _in_bf16(factor):
    """Positive numbers as bf16 has them: bits, in int32."""
    bits = factor.to(tl.int32, bitcast=True)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


@triton.jit
def _of_e4m3(code):
    """The number of a code in int32, which has to be below 2^8: float32."""
    size = ((code & 0x7F) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    size = tl.where((code & 0x7F) == 0x7F, float("nan"), size)
    return (size.to(tl.int32, bitcast=True) | ((code & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def _of_e8m0(code):
    """2^(code - 127), of codes in int32; 255 is NaN."""
    value = tl.where(code > 0, code << 23, 1 << 22).to(tl.float32, bitcast=True)
    return tl.where(code == 255, float("nan"), value)


@triton.jit
def _words_of_8(left, right):
    """Words [rows, s of all blocks, c] of the codes [rows, s of all blocks, 8] of both halves, h = 0 and h = 1."""
    ROWS: tl.constexpr = left.shape[0]
    WIDE: tl.constexpr = left.shape[1]
    left_even, left_odd = tl.split(tl.reshape(left, (ROWS, WIDE, 4, 2)))
    right_even, right_odd = tl.split(tl.reshape(right, (ROWS, WIDE, 4, 2)))
    return right_even | (left_even << 8) | (right_odd << 16) | (left_odd << 24)


@triton.jit
def _pairs(half):
    """Codes [rows, s, 8] of 4 bits as pairs [rows, s, c]: of p = 0 in the low half of a word, of p = 1 in the high."""
    even, odd = tl.split(tl.reshape(half, (half.shape[0], half.shape[1], 4, 2)))
    return even | (odd << 16)


@triton.jit
def _words_of_4(left, right, ELEMENTS: tl.constexpr):
    """Words [rows, two of each block, c] of pairs [rows, s, c]: a word has those of two s."""
    ROWS: tl.constexpr = left.shape[0]
    WIDE: tl.constexpr = left.shape[1]
    odd = (tl.arange(0, WIDE) % 2 == 1)[None, :, None]
    if ELEMENTS == _INT4:
        both = left | (right << 4)
        placed = tl.where(odd, both << 8, both)
    else:
        low = ((left & 0x80008) << 12) | ((left & 0x70007) << 6) | ((right & 0x80008) << 9) | ((right & 0x70007) << 3)
        high = ((left & 0x80008) << 6) | (left & 0x70007) | ((right & 0xC000C) << 11) | ((right & 0x30003) << 10)
        placed = tl.where(odd, high, low)
    return tl.sum(tl.reshape(placed, (ROWS, WIDE // 2, 2, 4)), 2)  # no two have a bit in common


@triton.jit
def _block(row, column, columns):
    """The number of the 64-column row, counted over an expert's blocks, that has this row and column."""
    return (row // 64 * (columns // 64) + column // 64) * 64 + row % 64


@triton.jit
def _place_of_8(row, first, rows, columns, BLOCK: tl.constexpr):
    """(offsets of the words [rows, blocks, c, s] of an expert's prepared 8-bit codes, a mask of those that exist)."""
    block = first + 64 * tl.arange(0, BLOCK // 64)[None, :, None, None]
    of_row = row[:, None, None, None]
    c = tl.arange(0, 4)[None, None, :, None] ^ (of_row // 2 % 4)
    s = tl.arange(0, 4)[None, None, None, :]
    at = _block(of_row, block, columns) * 16 + 4 * c + s
    return at, (of_row < rows) & (block < columns) & (s >= 0) & (c >= 0)


@triton.jit
def _place_of_4(row, first, rows, columns, BLOCK: tl.constexpr):
    """(offsets of the words [rows, blocks, c, word] of an expert's prepared 4-bit codes, mask of those that exist)."""
    block = first + 64 * tl.arange(0, BLOCK // 64)[None, :, None, None]
    of_row = row[:, None, None, None]
    c = tl.arange(0, 4)[None, None, :, None]
    word = tl.arange(0, 2)[None, None, None, :]
    at = _block(of_row, block, columns) * 8 + 2 * c + word
    return at, (of_row < rows) & (block < columns) & (word >= 0) & (c >= 0)


@triton.jit
def _put_prepared(
    words,
    expert,
    row,
    first,
    rows,
    columns,
    left,
    right,
    ELEMENTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store both halves of a tile as prepared codes: codes [rows, s, 8], or of 4 bits pairs [rows, s, c]."""
    blocks: tl.constexpr = BLOCK // 64
    if ELEMENTS == _E4M3:
        of_8 = tl.reshape(_words_of_8(left, right), (ROWS, blocks, 4, 4)).permute(0, 1, 3, 2)
        at, there = _place_of_8(row, first, rows, columns, BLOCK)
        tl.store(words + expert * (rows * (columns // 4)) + at, of_8, mask=there)
    else:
        of_4 = tl.reshape(_words_of_4(left, right, ELEMENTS), (ROWS, blocks, 2, 4)).permute(0, 1, 3, 2)
        at, there = _place_of_4(row, first, rows, columns, BLOCK)
        tl.store(words + expert * (rows * (columns // 8)) + at, of_4, mask=there)


@triton.jit
def _place_stored(row, first, rows, columns, ELEMENTS: tl.constexpr, BLOCK: tl.constexpr):
    """(offsets of a left half's bytes in an expert's checkpoint codes, mask of those that exist); the right follows."""
    BYTES: tl.constexpr = 8 if ELEMENTS == _E4M3 else 4
    width = columns // 8 * BYTES
    byte = (first + 16 * tl.arange(0, BLOCK // 16)[None, :, None]) // 8 * BYTES + tl.arange(0, BYTES)[None, None, :]
    return row[:, None, None] * width + byte, (row[:, None, None] < rows) & (byte < width)


@triton.jit
def _put_stored(stored, expert, row, first, rows, columns, left, right, ELEMENTS: tl.constexpr, BLOCK: tl.constexpr):
    """So as a checkpoint's codes."""
    at, there = _place_stored(row, first, rows, columns, ELEMENTS, BLOCK)
    stored += expert * (rows * (columns // 8 * (8 if ELEMENTS == _E4M3 else 4)))
    if ELEMENTS == _E4M3:
        tl.store(stored + at, left.to(tl.uint8), mask=there)
        tl.store(stored + at + 8, right.to(tl.uint8), mask=there)
    else:
        tl.store(stored + at, (left | (left >> 12)).to(tl.uint8), mask=there)
        tl.store(stored + at + 4, (right | (right >> 12)).to(tl.uint8), mask=there)


@triton.jit
def _put(words, expert, row, first, rows, columns, left, right, flags, ELEMENTS: tl.constexpr, BLOCK: tl.constexpr):
    """Store the codes of both halves of a tile, [rows, s, 8] in int32."""
    ROWS: tl.constexpr = left.shape[0]
    if ELEMENTS != _E4M3:
        left, right = _pairs(left), _pairs(right)
    if (flags & _PREPARED) != 0:
        _put_prepared(words, expert, row, first, rows, columns, left, right, ELEMENTS, ROWS, BLOCK)
    else:
        stored = words.to(tl.pointer_type(tl.uint8), bitcast=True)
        _put_stored(stored, expert, row, first, rows, columns, left, right, ELEMENTS, BLOCK)


@triton.jit
def _each(of_group, ROWS: tl.constexpr, GROUPS: tl.constexpr, WIDE: tl.constexpr):
    """Numbers [rows, groups] for each of a tile's halves: [rows, s, 1]."""
    spread = tl.broadcast_to(of_group[:, :, None], (ROWS, GROUPS, WIDE // GROUPS))
    return tl.reshape(spread, (ROWS, WIDE, 1))


@triton.jit
def _place_of_scale(row, first, rows, columns, flags, GROUP: tl.constexpr, GROUPS: tl.constexpr):
    """(offsets of a tile's scales [rows, groups] among the expert's, a mask of those that exist)."""
    of_row, group = row[:, None], first // GROUP + tl.arange(0, GROUPS)[None, :]
    across = tl.cdiv(columns, GROUP)
    at = of_row * across + group
    if (flags & _PREPARED) != 0:
        PER_BLOCK: tl.constexpr = max(1, 64 // GROUP)
        block = of_row // 64 * (across // PER_BLOCK) + group // PER_BLOCK
        at = (block * 64 + of_row % 64) * PER_BLOCK + group % PER_BLOCK
    return at, (of_row < rows) & (group < across)


@triton.jit
def _most(left, right, ROWS: tl.constexpr, GROUPS: tl.constexpr, WIDE: tl.constexpr):
    """The largest number of each group of a tile: [rows, groups]."""
    of_half = tl.max(tl.maximum(left, right), 2)
    return tl.max(tl.reshape(of_half, (ROWS, GROUPS, WIDE // GROUPS)), 2)


@triton.jit
def _groups(tensors, sizes, flags, KIND: tl.constexpr, FORMAT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Quantise a tile whose groups of columns have a scale each."""
    w, words, scales, zeros, outer = tensors
    rows, columns, step_expert, step_row = sizes
    ELEMENTS: tl.constexpr = FORMAT[0]
    SCALE: tl.constexpr = FORMAT[1]
    GROUP: tl.constexpr = FORMAT[2]
    WIDE: tl.constexpr = BLOCK // 16
    expert, row, first = _tile_of(rows, columns, ROWS, BLOCK, ROWS)
    column = first + 16 * tl.arange(0, WIDE)[None, :, None] + tl.arange(0, 8)[None, None, :]
    there = (row[:, None, None] < rows) & (column < columns)
    at = row[:, None, None] * step_row + column
    left, right = _load(w, expert * step_expert, at, there, KIND), _load(w, expert * step_expert, at + 8, there, KIND)
    GROUPS: tl.constexpr = BLOCK // GROUP
    place, known = _place_of_scale(row, first, rows, columns, flags, GROUP, GROUPS)
    place += expert * (rows * tl.cdiv(columns, GROUP))
    if SCALE >= _BF16:
        low = tl.minimum(-_most(-left, -right, ROWS, GROUPS, WIDE), 0.0)
        high = tl.maximum(_most(left, right, ROWS, GROUPS, WIDE), 0.0)
        factor = tl.div_rn(high - low, 15.0)
        if SCALE == _BF16:
            factor = tl.maximum(tl.div_rn(high, 7.0), low * -0.125)
        bits = _in_bf16(factor)
        factor = _invertible((bits << 16).to(tl.float32, bitcast=True))
        bits = factor.to(tl.int32, bitcast=True) >> 16
        tl.store(scales.to(tl.pointer_type(tl.int16), bitcast=True) + place, bits.to(tl.int16), mask=known)
        inverse = tl.div_rn(1.0, factor)
        zero = tl.full((ROWS, GROUPS), 8, tl.int32)
        if SCALE == _BF16_ZERO:
            zero = _int4(-low, inverse, 0)
            stored = zero
            if (flags & _PREPARED) != 0:
                stored = zero - 8
            tl.store(zeros + place, stored.to(tl.int8), mask=known)
        of_half, shift = _each(inverse, ROWS, GROUPS, WIDE), _each(zero, ROWS, GROUPS, WIDE)
        left, right = _int4(left, of_half, shift), _int4(right, of_half, shift)
    else:
        most = _most(tl.abs(left), tl.abs(right), ROWS, GROUPS, WIDE)
        if SCALE == _E8M0:
            LOG2: tl.constexpr = 8 if ELEMENTS == _E4M3 else 2  # of the largest code
            code = tl.minimum(tl.maximum((most.to(tl.int32, bitcast=True) >> 23) - LOG2, 0), 254)
            code = tl.where(most > 0, code, 127)
            inverse = _of_e8m0(254 - code)
        else:
            of_expert = tl.load(outer + expert)
            inner = tl.minimum(tl.div_rn(tl.div_rn(most, 6.0), of_expert), 448.0)
            code = _e4m3(inner, 1.0)
            factor = _of_e4m3(code) * of_expert
            inverse = tl.where(factor > 0, tl.div_rn(1.0, tl.maximum(factor, _LEAST)), 0.0)
        tl.store(scales + place, code.to(tl.uint8), mask=known)
        of_half = _each(inverse, ROWS, GROUPS, WIDE)
        if ELEMENTS == _E4M3:
            left, right = _e4m3(left, of_half), _e4m3(right, of_half)
        else:
            left, right = _e2m1(left, of_half), _e2m1(right, of_half)
    _put(words, expert, row, first, rows, columns, left, right, flags, ELEMENTS, BLOCK)


@triton.jit
def _wholes(tensors, sizes, flags, KIND: tl.constexpr, SCALE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Quantise a tile, or whole rows, that have a scale each, a part at a time: read twice, from DRAM once."""
    w, words, scales, _, _ = tensors
    rows, columns, step_expert, step_row = sizes
    WIDE: tl.constexpr = BLOCK // 16
    if SCALE == _OF_BLOCK:
        PART: tl.constexpr = _PART
        expert, row, start = _tile_of(rows, columns, ROWS, BLOCK, PART)
        parts, down, across = ROWS // PART, PART, 0
    else:
        PART: tl.constexpr = ROWS  # type: ignore[no-redef]
        programs = tl.cdiv(rows, ROWS)  # of an expert
        expert, row = (
            (tl.program_id(0) // programs).to(tl.int64),
            tl.program_id(0) % programs * ROWS + tl.arange(0, ROWS),
        )
        start, parts, down, across = 0, tl.cdiv(columns, BLOCK), 0, BLOCK
    half = start + 16 * tl.arange(0, WIDE)[None, :, None] + tl.arange(0, 8)[None, None, :]
    most = tl.zeros((PART, WIDE), tl.float32)
    for part in tl.range(0, parts):
        of_row, column = (row + part * down)[:, None, None], half + part * across
        there = (of_row < rows) & (column < columns)
        left = _load(w, expert * step_expert, of_row * step_row + column, there, KIND)
        right = _load(w, expert * step_expert, of_row * step_row + column + 8, there, KIND)
        most = tl.maximum(most, tl.max(tl.maximum(tl.abs(left), tl.abs(right)), 2))
    of_part = tl.max(most, 1)
    if SCALE == _OF_BLOCK:
        factor = _invertible(tl.div_rn(tl.max(of_part, 0), 448.0))
        tl.store(scales.to(tl.pointer_type(tl.float32), bitcast=True) + tl.program_id(0), factor)
        inverse = tl.div_rn(1.0, factor)
    else:
        factor = _invertible(tl.div_rn(of_part, 448.0))
        tl.store(scales.to(tl.pointer_type(tl.float32), bitcast=True) + expert * rows + row, factor, mask=row < rows)
        inverse = tl.div_rn(1.0, factor)[:, None, None]
    for part in tl.range(0, parts):
        of_row, column = (row + part * down)[:, None, None], half + part * across
        there = (of_row < rows) & (column < columns)
        left = _load(w, expert * step_expert, of_row * step_row + column, there, KIND)
        right = _load(w, expert * step_expert, of_row * step_row + column + 8, there, KIND)
        left, right = _e4m3(left, inverse), _e4m3(right, inverse)
        _put(words, expert, row + part * down, start + part * across, rows, columns, left, right, flags, _E4M3, BLOCK)


@triton.jit
def _quantise(tensors, sizes, flags, KIND: tl.constexpr, FORMAT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    if FORMAT[1] == _OF_BLOCK or FORMAT[1] == _OF_ROW:
        _wholes(tensors, sizes, flags, KIND, FORMAT[1], ROWS, BLOCK)
    else:
        _groups(tensors, sizes, flags, KIND, FORMAT, ROWS, BLOCK)


@triton.jit
def quantize_weights(
    w,
    words,
    scales,
    zeros,
    outer,
    M,
    columns,
    step_expert,
    step_row,
    flags,
    ELEMENTS: tl.constexpr,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Codes and scales of w [E, M, columns], whose experts and rows are ``step_expert`` and ``step_row`` numbers apart.

    w is of bf16 or, by the flags, of fp16 or fp32; ``columns`` are whole 64s. Codes, scales and zero points are written
    as a checkpoint has them or, PREPARED (M of whole 64s), as prepared weights do. ``outer`` is read: fp32 [E]. A
    program does a tile of ROWS and BLOCK, or with a scale a row ROWS whole rows.
    """
    tensors, sizes = (w, words, scales, zeros, outer), (M, columns, step_expert, step_row)
    FORMAT: tl.constexpr = (ELEMENTS, SCALE, GROUP)
    if (flags & _FP32) != 0:
        _quantise(tensors, sizes, flags, _FP32, FORMAT, ROWS, BLOCK)
    elif (flags & _FP16) != 0:
        _quantise(tensors, sizes, flags, _FP16, FORMAT, ROWS, BLOCK)
    else:
        _quantise(tensors, sizes, flags, 0, FORMAT, ROWS, BLOCK)


@triton.jit
def _largest(w, most, M, columns, step_expert, step_row, KIND: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    down = tl.cdiv(M, ROWS)
    expert = (tl.program_id(0) // down).to(tl.int64)
    row = (tl.program_id(0) % down * ROWS + tl.arange(0, ROWS))[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    at = row * step_row + column
    found = tl.zeros((ROWS, BLOCK), tl.int32)
    for first in tl.range(0, columns, BLOCK):
        value = _load(w, expert * step_expert, at + first, (row < M) & (first + column < columns), KIND)
        found = tl.maximum(found, value.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    most_of_all = tl.max(tl.max(found, 1), 0)
    tl.store(most + tl.program_id(0), tl.minimum(most_of_all, 0x7F800001))  # which bits NaN has is the hardware's


@triton.jit
def largest_weight(w, most, M, columns, step_expert, step_row, flags, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """most[program] = the bits of the largest |w| of ROWS whole rows, as int32: 0x7F800001, the largest, if one is NaN.

    w is as ``quantize_weights`` has it, with any number of columns. A program does rows of one expert.
    """
    if (flags & _FP32) != 0:
        _largest(w, most, M, columns, step_expert, step_row, _FP32, ROWS, BLOCK)
    elif (flags & _FP16) != 0:
        _largest(w, most, M, columns, step_expert, step_row, _FP16, ROWS, BLOCK)
    else:
        _largest(w, most, M, columns, step_expert, step_row, 0, ROWS, BLOCK)


@triton.jit
def _stored_halves(stored, expert, row, first, rows, columns, ELEMENTS: tl.constexpr, BLOCK: tl.constexpr):
    """A checkpoint's codes of both halves of a tile, as ``_put_prepared`` has them."""
    at, there = _place_stored(row, first, rows, columns, ELEMENTS, BLOCK)
    stored += expert * (rows * (columns // 8 * (8 if ELEMENTS == _E4M3 else 4)))
    more: tl.constexpr = 8 if ELEMENTS == _E4M3 else 4
    left = tl.load(stored + at, mask=there, other=0).to(tl.int32)
    right = tl.load(stored + at + more, mask=there, other=0).to(tl.int32)
    if ELEMENTS != _E4M3:
        left, right = (left & 15) | ((left & 0xF0) << 12), (right & 15) | ((right & 0xF0) << 12)
    return left, right


@triton.jit
def _prepared_halves(
    words, expert, row, first, rows, columns, ELEMENTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """So of prepared codes."""
    WIDE: tl.constexpr = BLOCK // 16
    if ELEMENTS == _E4M3:
        at, there = _place_of_8(row, first, rows, columns, BLOCK)
        word = tl.load(words + expert * (rows * (columns // 4)) + at, mask=there, other=0).permute(0, 1, 3, 2)
        word = tl.reshape(word, (ROWS, WIDE, 4))
        left = tl.reshape(tl.join((word >> 8) & 0xFF, (word >> 24) & 0xFF), (ROWS, WIDE, 8))
        right = tl.reshape(tl.join(word & 0xFF, (word >> 16) & 0xFF), (ROWS, WIDE, 8))
    else:
        at, there = _place_of_4(row, first, rows, columns, BLOCK)
        word = tl.load(words + expert * (rows * (columns // 8)) + at, mask=there, other=0).permute(
            0, 1, 3, 2
        )  # [rows, blocks, word, c]
        word = tl.broadcast_to(tl.reshape(word, (ROWS, WIDE // 2, 1, 4)), (ROWS, WIDE // 2, 2, 4))
        word = tl.reshape(word, (ROWS, WIDE, 4))
        odd = (tl.arange(0, WIDE) % 2 == 1)[None, :, None]
        if ELEMENTS == _INT4:
            word = tl.where(odd, word >> 8, word)
            left, right = word & 0xF000F, (word >> 4) & 0xF000F
        else:
            left = tl.where(
                odd,
                ((word >> 6) & 0x80008) | (word & 0x70007),
                ((word >> 12) & 0x80008) | ((word >> 6) & 0x70007),
            )
            right = tl.where(
                odd,
                ((word >> 11) & 0xC000C) | ((word >> 10) & 0x30003),
                ((word >> 9) & 0x80008) | ((word >> 3) & 0x70007),
            )
    return left, right


@triton.jit
def move_codes(stored, words, most, M, columns, flags, ELEMENTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """words = the codes of ``stored`` [E, M, columns] in the prepared layout; BACK, stored = those of words.

    ``stored`` are bytes as a checkpoint has them, of 4 bits two codes in each; M and columns are whole 64s. A program
    does a tile of ROWS and BLOCK. LOOKS, most[program] = whether one of its e4m3 codes is NaN.
    """
    expert, row, first = _tile_of(M, columns, ROWS, BLOCK, ROWS)
    if (flags & _BACK) != 0:
        left, right = _prepared_halves(words, expert, row, first, M, columns, ELEMENTS, ROWS, BLOCK)
        _put_stored(stored, expert, row, first, M, columns, left, right, ELEMENTS, BLOCK)
    else:
        left, right = _stored_halves(stored, expert, row, first, M, columns, ELEMENTS, BLOCK)
        if ELEMENTS == _E4M3:  # noqa: SIM102 - which is known when it is compiled
            if (flags & _LOOKS) != 0:
                carry = ((_words_of_8(left, right) & 0x7F7F7F7F) + 0x01010101) >> 7 & 0x01010101
                any_nan = tl.minimum(tl.max(tl.max(tl.max(carry, 2), 1), 0), 1)
                tl.store(most + tl.program_id(0), any_nan)
        _put_prepared(words, expert, row, first, M, columns, left, right, ELEMENTS, ROWS, BLOCK)


@triton.jit
def _of_e2m1(code):
    """The number of a code in int32, below 16: float32."""
    size = ((code & 7) << 22).to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126
    return (size.to(tl.int32, bitcast=True) | ((code & 8) << 28)).to(tl.float32, bitcast=True)


@triton.jit
def _numbers(half, zero, ELEMENTS: tl.constexpr):
    """The numbers of half a tile's codes without a scale, float32 [rows, s, 8]; ``half`` is as ``_put_prepared``'s."""
    if ELEMENTS == _E4M3:
        numbers = _of_e4m3(half)
    else:
        code = tl.reshape(tl.join(half & 15, half >> 16), (half.shape[0], half.shape[1], 8))
        numbers = _of_e2m1(code) if ELEMENTS == _E2M1 else (code - zero).to(tl.float32)
    return numbers


@triton.jit
def _write(w, first, at, value, there, flags):
    """Store numbers in w's type, rounded once; places are as in ``_load``."""
    if (flags & _FP32) != 0:
        tl.store(w.to(tl.pointer_type(tl.float32), bitcast=True) + first + at, value, mask=there)
    elif (flags & _FP16) != 0:
        tl.store(w.to(tl.pointer_type(tl.float16), bitcast=True) + first + at, value.to(tl.float16), mask=there)
    else:
        bits = value.to(tl.int32, bitcast=True)
        near = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        near = tl.where(value == value, near, 0x7FC0)
        tl.store(w + first + at, near.to(tl.int16), mask=there)


@triton.jit
def dequantize_weights(
    w,
    words,
    scales,
    zeros,
    outer,
    M,
    columns,
    flags,
    ELEMENTS: tl.constexpr,
    SCALE: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """w [E, M, columns] = (codes - zeros) * (scales * outer), in float32 and rounded once, in bf16, fp16 or fp32.

    ``words``, ``scales``, ``zeros`` and ``outer`` are as ``quantize_weights`` writes them. A program does ROWS x BLOCK.
    """
    WIDE: tl.constexpr = BLOCK // 16
    expert, row, first = _tile_of(M, columns, ROWS, BLOCK, ROWS)
    if (flags & _PREPARED) != 0:
        left, right = _prepared_halves(words, expert, row, first, M, columns, ELEMENTS, ROWS, BLOCK)
    else:
        stored = words.to(tl.pointer_type(tl.uint8), bitcast=True)
        left, right = _stored_halves(stored, expert, row, first, M, columns, ELEMENTS, BLOCK)
    zero = 8
    if SCALE == _OF_BLOCK:
        place = (expert * tl.cdiv(M, 128) + row // 128) * tl.cdiv(columns, 128) + first // 128  # int64, of few
        factor = tl.load(scales.to(tl.pointer_type(tl.float32), bitcast=True) + place, mask=row < M, other=0.0)
        factor = factor[:, None, None]
    elif SCALE == _OF_ROW:
        place = expert * M + row
        factor = tl.load(scales.to(tl.pointer_type(tl.float32), bitcast=True) + place, mask=row < M, other=0.0)
        factor = factor[:, None, None]
    else:
        GROUPS: tl.constexpr = BLOCK // GROUP
        at, known = _place_of_scale(row, first, M, columns, flags, GROUP, GROUPS)
        scales_of = expert * (M * tl.cdiv(columns, GROUP))
        if SCALE >= _BF16:
            bits = tl.load(scales.to(tl.pointer_type(tl.int16), bitcast=True) + scales_of + at, mask=known, other=0)
            of_group = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
            if SCALE == _BF16_ZERO:
                point = tl.load(zeros + scales_of + at, mask=known, other=0).to(tl.int32)
                if (flags & _PREPARED) != 0:
                    point += 8
                else:
                    point = point & 0xFF
                zero = _each(point, ROWS, GROUPS, WIDE)
        elif SCALE == _E8M0:
            of_group = _of_e8m0(tl.load(scales + scales_of + at, mask=known, other=0).to(tl.int32))
        else:
            of_group = _of_e4m3(tl.load(scales + scales_of + at, mask=known, other=0).to(tl.int32)) * tl.load(
                outer + expert
            )
        factor = _each(of_group, ROWS, GROUPS, WIDE)
    column = first + 16 * tl.arange(0, WIDE)[None, :, None] + tl.arange(0, 8)[None, None, :]
    at_w = row[:, None, None] * columns + column
    there = (row[:, None, None] < M) & (column < columns)
    _write(w, expert * M * columns, at_w, _numbers(left, zero, ELEMENTS) * factor, there, flags)
    _write(w, expert * M * columns, at_w + 8, _numbers(right, zero, ELEMENTS) * factor, there, flags)
