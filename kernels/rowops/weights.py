"""Weights of experts as codes and scales: quantised, moved between the checkpoint's layout and the prepared one, read.

The prepared layout is that of prepared_layout.py: blocks of 64 rows and 64 columns, in which a row's column
k = 16 s + 8 h + 2 c + p is a byte, or a nibble, of the word of (c, s). A program takes a tile in halves, h = 0 and
h = 1, of eight columns each, which a thread reads at once. A half's codes are pairs [rows, s, c], int32: the code of
p = 0 in the low 16 bits, that of p = 1 in the high ones; e2m1's signs are the highest of these bits. While 4-bit codes
are made they are [rows, s / 2, c, s % 2], as a word has those of two s.

Codes are those of runtime/weights/codes.py, bit for bit. Numbers are rounded by a sum whose last bit is worth a code's
step: no GPU before sm_100 converts to e2m1. From sm_89 on CONVERTS says that an instruction converts to e4m3.
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
_PART: tl.constexpr = tl.constexpr(32)  # rows of a tile with one scale that are read at a time, except in bf16
_OF_BLOCK: tl.constexpr = tl.constexpr(0)  # SCALE: an fp32 scale for each tile
_OF_ROW: tl.constexpr = tl.constexpr(1)  # an fp32 scale for each row
_E8M0: tl.constexpr = tl.constexpr(2)  # this and all below: a scale for each GROUP columns of a row
_BY_OUTER: tl.constexpr = tl.constexpr(3)  # e4m3, times a scale of the expert
_BF16: tl.constexpr = tl.constexpr(4)
_BF16_ZERO: tl.constexpr = tl.constexpr(5)  # with a zero point
_LEAST: tl.constexpr = tl.constexpr(2.0**-126)  # least scale: a smaller one's inverse is infinite
# What ``_near`` adds: 2^BITS * (150 - BITS + log2(LEAST)).
_OFFSET_E4M3: tl.constexpr = tl.constexpr(8 * 141)
_OFFSET_E2M1: tl.constexpr = tl.constexpr(2 * 149)


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
def _half(w, first, row_at, column, there, KIND: tl.constexpr):
    """Read half a tile: (numbers of p = 0, numbers of p = 1), each [rows, s, c]; both are the int32 pairs for bf16.

    Offsets: ``first``, int64, of the expert, row_at [rows, 1, 1] of each row in it, column [1, s, 1] of each s.
    """
    if KIND == 0:
        pairs = w.to(tl.pointer_type(tl.int32), bitcast=True) + (first >> 1)
        at = ((row_at + column) >> 1) + tl.arange(0, 4)[None, None, :]
        even = tl.load(pairs + at, mask=there, other=0)
        odd = even
    else:
        at = row_at + column + tl.arange(0, 8)[None, None, :]
        eight = _load(w, first, at, there, KIND)
        even, odd = tl.split(tl.reshape(eight, (eight.shape[0], eight.shape[1], 4, 2)))
    return even, odd


@triton.jit
def _halves(w, expert, row, first, sizes, KIND: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """Read both halves of a tile by ``_half``, of each s, or with a STEP of 32 of each second s from ``first`` on."""
    rows, columns, step_expert, step_row = sizes
    column = first + STEP * tl.arange(0, BLOCK // STEP)[None, :, None]
    row_at, there = row[:, None, None] * step_row, (row[:, None, None] < rows) & (column < columns)
    left = _half(w, expert * step_expert, row_at, column, there, KIND)
    return left, _half(w, expert * step_expert, row_at, column + 8, there, KIND)


@triton.jit
def _numbers_of(half, KIND: tl.constexpr):
    """Return what ``_half`` has read as float32: (numbers of p = 0, numbers of p = 1)."""
    even, odd = half
    if KIND == 0:
        even, odd = (even << 16).to(tl.float32, bitcast=True), (odd & -65536).to(tl.float32, bitcast=True)
    return even, odd


@triton.jit
def _near(value, inverse, MOST: tl.constexpr, LEAST: tl.constexpr, BITS: tl.constexpr):
    """Round |value * inverse| to a code with BITS bits of mantissa: the low 16 bits are the code plus ``_OFFSET_...``.

    MOST is the largest number of the codes, LEAST their smallest normal one. Of two codes as near, the even one counts.
    """
    size = tl.minimum(tl.abs(value) * inverse, MOST)
    binade = (tl.maximum(size, LEAST).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    STEPS: tl.constexpr = 2.0 ** (23 - BITS)
    bits = (binade * STEPS + size).to(tl.int32, bitcast=True)
    return bits + (bits >> (23 - BITS))  # the last bits count steps, the exponent powers of two


@triton.jit
def _pair_of(even, odd):
    """Join the low 16 bits of two words to a pair."""
    return (even & 0xFFFF) | (odd << 16)


@triton.jit
def _signs(even, odd):
    """Return the signs of two float32 as bits 15 and 31."""
    return ((even.to(tl.int32, bitcast=True) >> 16) & 0x8000) | (odd.to(tl.int32, bitcast=True) & -0x80000000)


@triton.jit
def _e4m3(even, odd, inverse, CONVERTS: tl.constexpr):
    """The pair of the e4m3 codes of even * inverse and odd * inverse."""
    if CONVERTS:
        pair = tl.inline_asm_elementwise(
            """{
            .reg .b16 both;
            .reg .b32 wide;
            cvt.rn.satfinite.e4m3x2.f32 both, $2, $1;
            cvt.u32.u16 wide, both;
            prmt.b32 $0, wide, 0, 0x4140;
            }""",
            "=r,f,f",
            [even * inverse, odd * inverse],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        both = _pair_of(_near(even, inverse, 448.0, 2.0**-6, 3), _near(odd, inverse, 448.0, 2.0**-6, 3))
        pair = (both - _OFFSET_E4M3 * 0x10001) | ((_signs(even, odd) >> 8) & 0x800080)
    return pair


@triton.jit
def _e2m1(even, odd, inverse):
    """The pair of the e2m1 codes of even * inverse and odd * inverse."""
    both = _pair_of(_near(even, inverse, 6.0, 1.0, 1), _near(odd, inverse, 6.0, 1.0, 1))
    return (both - _OFFSET_E2M1 * 0x10001) | _signs(even, odd)


@triton.jit
def _int4(value, inverse, zero):
    """Return a number's int4 code, with a zero point (int32). The clamp keeps product and sum from being fused."""
    size = tl.minimum(tl.maximum(value * inverse, -32.0), 32.0)
    code = (size + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000 + zero
    return tl.minimum(tl.maximum(code, 0), 15)


@triton.jit
def _invertible(factor):
    return tl.where(factor > 0, tl.maximum(factor, _LEAST), 1.0)


@triton.jit
def _in_bf16(factor):
    """Positive numbers rounded to bf16: their bits, in int32."""
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
def _words_of_4(left, right, ELEMENTS: tl.constexpr):
    """Words [rows, two of each block, c] of both halves of 4-bit codes, [rows, s / 2, c, s % 2]."""
    l, m = tl.split(left)  # noqa: E741 - of s % 2 = 0 and 1
    r, q = tl.split(right)
    if ELEMENTS == _INT4:
        words = l | (r << 4) | (m << 8) | (q << 12)
    else:
        words = (l & -0x7FFF8000) | ((l & 0x70007) << 6) | ((r >> 3) & 0x10001000) | ((r & 0x70007) << 3)
        words |= ((m >> 6) & 0x2000200) | (m & 0x70007)
        words |= ((q >> 1) & 0x40004000) | ((q & 0x40004) << 11) | ((q & 0x30003) << 10)
    return words


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
    """Store both halves of a tile as prepared codes."""
    blocks: tl.constexpr = BLOCK // 64
    if ELEMENTS == _E4M3:
        of_8 = tl.reshape(right | (left << 8), (ROWS, blocks, 4, 4)).permute(0, 1, 3, 2)
        at, there = _place_of_8(row, first, rows, columns, BLOCK)
        tl.store(words + expert * (rows * (columns // 4)) + at, of_8, mask=there)
    else:
        of_4 = tl.reshape(_words_of_4(left, right, ELEMENTS), (ROWS, blocks, 2, 4)).permute(0, 1, 3, 2)
        at, there = _place_of_4(row, first, rows, columns, BLOCK)
        tl.store(words + expert * (rows * (columns // 8)) + at, of_4, mask=there)


@triton.jit
def _eight(half):
    """Pairs [rows, s, c] as codes [rows, s, 8]."""
    return tl.reshape(tl.join(half & 0xFFFF, half >> 16), (half.shape[0], half.shape[1], 8))


@triton.jit
def _place_stored(row, first, rows, columns, ELEMENTS: tl.constexpr, BLOCK: tl.constexpr):
    """(offsets of a left half's bytes in an expert's checkpoint codes, mask of those that exist); the right follows."""
    BYTES: tl.constexpr = 8 if ELEMENTS == _E4M3 else 4
    width = columns // 8 * BYTES
    byte = (first + 16 * tl.arange(0, BLOCK // 16)[None, :, None]) // 8 * BYTES + tl.arange(0, BYTES)[None, None, :]
    return row[:, None, None] * width + byte, (row[:, None, None] < rows) & (byte < width)


@triton.jit
def _bytes_of(half, ELEMENTS: tl.constexpr):
    """A checkpoint's bytes of half a tile, as the codes are: [rows, s, bytes]."""
    if ELEMENTS == _E4M3:
        stored = _eight(half)
    elif ELEMENTS == _E2M1:
        stored = (half & 7) | ((half >> 12) & 0x78) | ((half >> 24) & 0x80)
    else:
        stored = half | (half >> 12)
    if len(half.shape) == 4:
        stored = tl.reshape(stored.permute(0, 1, 3, 2), (half.shape[0], half.shape[1] * 2, 4))
    return stored.to(tl.uint8)


@triton.jit
def _put_stored(stored, expert, row, first, rows, columns, left, right, ELEMENTS: tl.constexpr, BLOCK: tl.constexpr):
    """Store both halves of a tile as a checkpoint's codes."""
    BYTES: tl.constexpr = 8 if ELEMENTS == _E4M3 else 4
    at, there = _place_stored(row, first, rows, columns, ELEMENTS, BLOCK)
    stored += expert * (rows * (columns // 8 * BYTES))
    tl.store(stored + at, _bytes_of(left, ELEMENTS), mask=there)
    tl.store(stored + at + BYTES, _bytes_of(right, ELEMENTS), mask=there)


@triton.jit
def _put(words, expert, row, first, rows, columns, left, right, flags, ELEMENTS: tl.constexpr, BLOCK: tl.constexpr):
    """Store both halves of a tile in the layout that ``flags`` say."""
    ROWS: tl.constexpr = left.shape[0]
    if (flags & _PREPARED) != 0:
        _put_prepared(words, expert, row, first, rows, columns, left, right, ELEMENTS, ROWS, BLOCK)
    else:
        stored = words.to(tl.pointer_type(tl.uint8), bitcast=True)
        _put_stored(stored, expert, row, first, rows, columns, left, right, ELEMENTS, BLOCK)


@triton.jit
def _each(of_group, ROWS: tl.constexpr, GROUPS: tl.constexpr, WIDE: tl.constexpr):
    """Numbers [rows, groups] for each s of a tile: [rows, s, 1]."""
    spread = tl.broadcast_to(of_group[:, :, None], (ROWS, GROUPS, WIDE // GROUPS))
    return tl.reshape(spread, (ROWS, WIDE, 1))


@triton.jit
def _each_of(of_group, like):
    """Numbers [rows, groups] for each s of a part that ``_tile`` has read."""
    if len(like.shape) == 3:
        spread = _each(of_group, like.shape[0], of_group.shape[1], like.shape[1])
    else:
        each = _each(of_group, like.shape[0], of_group.shape[1], like.shape[1] * 2)
        spread = tl.reshape(each, (like.shape[0], like.shape[1], 1, 2))
    return spread


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
def _most(parts, GROUPS: tl.constexpr, WIDE: tl.constexpr):
    """The largest number of each group of a tile: [rows, groups]. ``parts`` are the results of ``_tile``."""
    every = tl.maximum(tl.maximum(parts[0], parts[1]), tl.maximum(parts[2], parts[3]))
    return tl.max(tl.reshape(tl.max(every, 2), (every.shape[0], GROUPS, WIDE // GROUPS)), 2)


@triton.jit
def _tile(w, expert, row, first, sizes, KIND: tl.constexpr, ELEMENTS: tl.constexpr, BLOCK: tl.constexpr):
    """Return a tile's numbers in four parts, by h and p: [rows, s, c], or of 4-bit codes [rows, s / 2, c, s % 2]."""
    if ELEMENTS == _E4M3:
        left, right = _halves(w, expert, row, first, sizes, KIND, BLOCK, 16)
        parts = _numbers_of(left, KIND) + _numbers_of(right, KIND)
    else:
        left, right = _halves(w, expert, row, first, sizes, KIND, BLOCK, 32)
        a = _numbers_of(left, KIND) + _numbers_of(right, KIND)
        left, right = _halves(w, expert, row, first + 16, sizes, KIND, BLOCK, 32)
        b = _numbers_of(left, KIND) + _numbers_of(right, KIND)
        parts = tl.join(a[0], b[0]), tl.join(a[1], b[1]), tl.join(a[2], b[2]), tl.join(a[3], b[3])
    return parts


@triton.jit
def _groups(tensors, sizes, flags, KIND: tl.constexpr, FORMAT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Quantise a tile whose groups of columns have a scale each."""
    w, words, scales, zeros, outer = tensors
    rows, columns, _, _ = sizes
    ELEMENTS: tl.constexpr = FORMAT[0]
    SCALE: tl.constexpr = FORMAT[1]
    GROUP: tl.constexpr = FORMAT[2]
    expert, row, first = _tile_of(rows, columns, ROWS, BLOCK, ROWS)
    a, b, c, d = _tile(w, expert, row, first, sizes, KIND, ELEMENTS, BLOCK)
    GROUPS: tl.constexpr = BLOCK // GROUP
    place, known = _place_of_scale(row, first, rows, columns, flags, GROUP, GROUPS)
    place += expert * (rows * tl.cdiv(columns, GROUP))
    if SCALE >= _BF16:
        low = tl.minimum(-_most((-a, -b, -c, -d), GROUPS, BLOCK // 16), 0.0)
        high = tl.maximum(_most((a, b, c, d), GROUPS, BLOCK // 16), 0.0)
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
        of_half, shift = _each_of(inverse, a), _each_of(zero, a)
        left = _int4(a, of_half, shift) | (_int4(b, of_half, shift) << 16)
        right = _int4(c, of_half, shift) | (_int4(d, of_half, shift) << 16)
    else:
        most = _most((tl.abs(a), tl.abs(b), tl.abs(c), tl.abs(d)), GROUPS, BLOCK // 16)
        if SCALE == _E8M0:
            LOG2: tl.constexpr = 8 if ELEMENTS == _E4M3 else 2  # of the largest code
            code = tl.minimum(tl.maximum((most.to(tl.int32, bitcast=True) >> 23) - LOG2, 0), 254)
            code = tl.where(most > 0, code, 127)
            inverse = _of_e8m0(254 - code)
        else:
            of_expert = tl.load(outer + expert)
            inner = tl.minimum(tl.div_rn(tl.div_rn(most, 6.0), of_expert), 448.0)
            code = (_near(inner, 1.0, 448.0, 2.0**-6, 3) & 0xFFFF) - _OFFSET_E4M3
            factor = _of_e4m3(code) * of_expert
            inverse = tl.where(factor > 0, tl.div_rn(1.0, tl.maximum(factor, _LEAST)), 0.0)
        tl.store(scales + place, code.to(tl.uint8), mask=known)
        of_half = _each_of(inverse, a)
        if ELEMENTS == _E4M3:
            left, right = _e4m3(a, b, of_half, FORMAT[3]), _e4m3(c, d, of_half, FORMAT[3])
        else:
            left, right = _e2m1(a, b, of_half), _e2m1(c, d, of_half)
    _put(words, expert, row, first, rows, columns, left, right, flags, ELEMENTS, BLOCK)


@triton.jit
def _tiles(tensors, sizes, flags, CONVERTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Quantise a tile of bf16 that has one scale: w is read once, and kept in registers as bf16."""
    w, words, scales, _, _ = tensors
    rows, columns, _, _ = sizes
    expert, row, first = _tile_of(rows, columns, ROWS, BLOCK, ROWS)
    left, right = _halves(w, expert, row, first, sizes, 0, BLOCK, 16)
    # The bits of |w| ascend with |w|, also if p = 1's have others below. So words are unpacked only for the second use.
    even = tl.max(tl.maximum(left[0] & 0x7FFF, right[0] & 0x7FFF), 2)
    odd = tl.max(tl.maximum(left[0] & 0x7FFFFFFF, right[0] & 0x7FFFFFFF), 2)
    most = tl.max(tl.max(tl.maximum(even << 16, odd & 0x7FFF0000), 1), 0).to(tl.float32, bitcast=True)
    factor = _invertible(tl.div_rn(most, 448.0))
    tl.store(scales.to(tl.pointer_type(tl.float32), bitcast=True) + tl.program_id(0), factor)
    inverse = tl.div_rn(1.0, factor)
    a, b = _numbers_of(left, 0)
    c, d = _numbers_of(right, 0)
    a, b = _e4m3(a, b, inverse, CONVERTS), _e4m3(c, d, inverse, CONVERTS)
    _put(words, expert, row, first, rows, columns, a, b, flags, _E4M3, BLOCK)


@triton.jit
def _wholes(tensors, sizes, flags, KIND: tl.constexpr, FORMAT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Quantise a tile with one scale, or whole rows with a scale each, in parts: w is read twice, from DRAM once."""
    w, words, scales, _, _ = tensors
    rows, columns, _, _ = sizes
    WIDE: tl.constexpr = BLOCK // 16
    OF_BLOCK: tl.constexpr = FORMAT[1] == _OF_BLOCK
    if OF_BLOCK:
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
    most = tl.zeros((PART, WIDE), tl.float32)
    for part in tl.range(0, parts):
        a, b, c, d = _tile(w, expert, row + part * down, start + part * across, sizes, KIND, _E4M3, BLOCK)
        most = tl.maximum(most, _most((tl.abs(a), tl.abs(b), tl.abs(c), tl.abs(d)), WIDE, WIDE))
    largest = tl.max(most, 1)
    if OF_BLOCK:
        factor = _invertible(tl.div_rn(tl.max(largest, 0), 448.0))
        tl.store(scales.to(tl.pointer_type(tl.float32), bitcast=True) + tl.program_id(0), factor)
        inverse = tl.div_rn(1.0, factor)
    else:
        factor = _invertible(tl.div_rn(largest, 448.0))
        tl.store(scales.to(tl.pointer_type(tl.float32), bitcast=True) + expert * rows + row, factor, mask=row < rows)
        inverse = tl.div_rn(1.0, factor)[:, None, None]
    for part in tl.range(0, parts):
        a, b, c, d = _tile(w, expert, row + part * down, start + part * across, sizes, KIND, _E4M3, BLOCK)
        left, right = _e4m3(a, b, inverse, FORMAT[3]), _e4m3(c, d, inverse, FORMAT[3])
        _put(words, expert, row + part * down, start + part * across, rows, columns, left, right, flags, _E4M3, BLOCK)


@triton.jit
def _quantise(tensors, sizes, flags, KIND: tl.constexpr, FORMAT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    if FORMAT[1] == _OF_BLOCK and KIND == 0:
        _tiles(tensors, sizes, flags, FORMAT[3], ROWS, BLOCK)
    elif FORMAT[1] == _OF_BLOCK or FORMAT[1] == _OF_ROW:
        _wholes(tensors, sizes, flags, KIND, FORMAT, ROWS, BLOCK)
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
    CONVERTS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Codes and scales of w [E, M, columns], whose experts and rows are ``step_expert`` and ``step_row`` numbers apart.

    w is of bf16 or, by the flags, of fp16 or fp32; ``columns`` are whole 64s. Codes, scales and zero points are written
    as a checkpoint has them or, PREPARED (M of whole 64s), as prepared weights do. ``outer`` is read: fp32 [E]. A
    program does a tile of ROWS and BLOCK, or with a scale a row ROWS whole rows.
    """
    tensors, sizes = (w, words, scales, zeros, outer), (M, columns, step_expert, step_row)
    FORMAT: tl.constexpr = (ELEMENTS, SCALE, GROUP, CONVERTS)
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
    tl.store(most + tl.program_id(0), tl.minimum(most_of_all, 0x7F800001))  # limited, as hardware chooses NaN's bits


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
    if ELEMENTS == _E4M3:
        left, right = _pairs(left), _pairs(right)
    else:
        left, right = _pairs_of_4(left, ELEMENTS), _pairs_of_4(right, ELEMENTS)
    return left, right


@triton.jit
def _pairs_of_4(stored, ELEMENTS: tl.constexpr):
    """Return a checkpoint's bytes of 4-bit codes, in int32, as pairs."""
    if ELEMENTS == _E2M1:
        pairs = (stored & 7) | ((stored & 0x78) << 12) | ((stored & 0x80) << 24)
    else:
        pairs = (stored & 15) | ((stored & 0xF0) << 12)
    return pairs


@triton.jit
def _stored_by_two(stored, expert, row, first, rows, columns, ELEMENTS: tl.constexpr, BLOCK: tl.constexpr):
    """A checkpoint's 4-bit codes of both halves of a tile: [rows, s / 2, c, s % 2]."""
    byte = first // 2 + 16 * tl.arange(0, BLOCK // 32)[None, :, None] + tl.arange(0, 4)[None, None, :]
    there = (row[:, None, None] < rows) & (byte < columns // 2)
    stored += expert * (rows * (columns // 2))
    at = row[:, None, None] * (columns // 2) + byte
    left = tl.join(tl.load(stored + at, mask=there, other=0), tl.load(stored + at + 8, mask=there, other=0))
    right = tl.join(tl.load(stored + at + 4, mask=there, other=0), tl.load(stored + at + 12, mask=there, other=0))
    return _pairs_of_4(left.to(tl.int32), ELEMENTS), _pairs_of_4(right.to(tl.int32), ELEMENTS)


@triton.jit
def _pairs(half):
    """Codes [rows, s, 8] as pairs [rows, s, c]."""
    even, odd = tl.split(tl.reshape(half, (half.shape[0], half.shape[1], 4, 2)))
    return even | (odd << 16)


@triton.jit
def _prepared_halves(
    words, expert, row, first, rows, columns, ELEMENTS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Prepared codes of both halves of a tile, as ``_put_prepared`` has them."""
    WIDE: tl.constexpr = BLOCK // 16
    if ELEMENTS == _E4M3:
        at, there = _place_of_8(row, first, rows, columns, BLOCK)
        word = tl.load(words + expert * (rows * (columns // 4)) + at, mask=there, other=0).permute(0, 1, 3, 2)
        word = tl.reshape(word, (ROWS, WIDE, 4))
        left, right = (word >> 8) & 0xFF00FF, word & 0xFF00FF
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
            signs = tl.where(odd, word << 6, word) & -0x7FFF8000
            left = signs | (tl.where(odd, word, word >> 6) & 0x70007)
            signs = tl.where(odd, word << 1, word << 3) & -0x7FFF8000
            size = tl.where(odd, ((word >> 11) & 0x40004) | ((word >> 10) & 0x30003), (word >> 3) & 0x70007)
            right = signs | size
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
    elif ELEMENTS == _E4M3:
        left, right = _stored_halves(stored, expert, row, first, M, columns, ELEMENTS, BLOCK)
        if (flags & _LOOKS) != 0:
            carry = (((right | (left << 8)) & 0x7F7F7F7F) + 0x01010101) >> 7 & 0x01010101
            any_nan = tl.minimum(tl.max(tl.max(tl.max(carry, 2), 1), 0), 1)
            tl.store(most + tl.program_id(0), any_nan)
        _put_prepared(words, expert, row, first, M, columns, left, right, ELEMENTS, ROWS, BLOCK)
    else:
        halves = _stored_by_two(stored, expert, row, first, M, columns, ELEMENTS, BLOCK)
        _put_prepared(words, expert, row, first, M, columns, halves[0], halves[1], ELEMENTS, ROWS, BLOCK)


@triton.jit
def _of_e2m1(code):
    """Return the float32 number of a code in int32, whose sign is bit 15."""
    size = ((code & 7) << 22).to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126
    return (size.to(tl.int32, bitcast=True) | ((code & 0x8000) << 16)).to(tl.float32, bitcast=True)


@triton.jit
def _numbers(half, zero, ELEMENTS: tl.constexpr):
    """The numbers of half a tile's codes without a scale, float32 [rows, s, 8]; ``half`` is as ``_put_prepared``'s."""
    code = _eight(half)
    if ELEMENTS == _E4M3:
        numbers = _of_e4m3(code)
    else:
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
        place = (expert * tl.cdiv(M, 128) + row // 128) * tl.cdiv(columns, 128) + first // 128  # int64
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
