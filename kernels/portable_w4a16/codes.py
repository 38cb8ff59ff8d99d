"""Dequantise codes of w to float32 in registers by plain arithmetic: no table, no type that a GPU may lack.

A tile is ROWS rows of w by COLS of its columns. ``stored`` is how a checkpoint has codes (``ORDER`` 0), ``ordered`` how
runtime/weights/prepared_layout.py lays them out for the kernels of sm_90 (1 and 2).
"""

from __future__ import annotations

import triton
import triton.language as tl

_E2M1: tl.constexpr = tl.constexpr(2.0**126)  # the bits in ``_e2m1_of`` are too small by this
_E4M3: tl.constexpr = tl.constexpr(2.0**120)  # the bits in ``_e4m3_of`` are too small by this
_BLOCK: tl.constexpr = tl.constexpr(64)  # rows, and columns, of a block of prepared codes


@triton.jit
def _e2m1_of(bits):
    """The value of bits with the sign at bit 31 and the rest at bits 24 to 22; correct for subnormal values, too."""
    return bits.to(tl.float32, bitcast=True) * _E2M1


@triton.jit
def _integer_of(code, ZERO: tl.constexpr):
    """code - ZERO as a float, code from 0 to 15: a float's bits with code last are 2^23 + code."""
    return (code | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + ZERO)


@triton.jit
def _e4m3_of(code):
    """e4m3 of a byte; 127 of either sign is NaN."""
    bits = ((code & 0x80) << 24) | ((code & 0x7F) << 20)
    value = bits.to(tl.float32, bitcast=True) * _E4M3
    return tl.where((code & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def _number(raw, CODES: tl.constexpr):
    """Return the number of the lowest code of each word."""
    if CODES == "e2m1":
        value = _e2m1_of(((raw & 8) << 28) | ((raw & 7) << 22))
    elif CODES == "int4":
        value = _integer_of(raw & 15, 8.0)
    elif CODES == "uint4":
        value = _integer_of(raw & 15, 0.0)
    else:
        value = _e4m3_of(raw & 0xFF)
    return value


@triton.jit
def stored(raw, CODES: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """Return codes [ROWS, COLS] of rows of bytes: two codes of 4 bits a byte, the low one first, or one of 8."""
    wide = raw.to(tl.uint32)
    if CODES == "e4m3":
        values = _number(wide, CODES)
    else:
        values = tl.join(_number(wide, CODES), _number(wide >> 4, CODES)).reshape(ROWS, COLS)
    return values


@triton.jit
def _last_e2m1(half):
    """The fourth code of the upper half of each word, whose bits are apart."""
    return _e2m1_of(((half << 1) & 0x80000000) | ((half >> 5) & 0x01000000) | ((half >> 4) & 0x00C00000))


@triton.jit
def _pair(low, high, PLACE: tl.constexpr, CODES: tl.constexpr):
    """Return code PLACE of both halves of each word: [..., 2]; ``low`` has the lower halves moved up."""
    if CODES == "int4":
        first = _integer_of((low >> (16 + 4 * PLACE)) & 15, 8.0)
        second = _integer_of((high >> (16 + 4 * PLACE)) & 15, 8.0)
    elif CODES == "e4m3":
        first, second = _e4m3_of((low >> (24 - 8 * PLACE)) & 0xFF), _e4m3_of((high >> (24 - 8 * PLACE)) & 0xFF)
    elif PLACE == 3:
        first, second = _last_e2m1(low), _last_e2m1(high)
    else:
        first, second = _e2m1_of((low << (3 * PLACE)) & 0x81C00000), _e2m1_of((high << (3 * PLACE)) & 0x81C00000)
    return tl.join(first, second)


@triton.jit
def ordered(raw, CODES: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):
    """[ROWS, COLS] of int32 words [ROWS, blocks of COLS, c, word]: prepared_layout.py says where each code is."""
    WORDS: tl.constexpr = 4 if CODES == "e4m3" else 2
    high = raw.to(tl.uint32, bitcast=True).reshape(ROWS, COLS // _BLOCK, 4, WORDS)
    low = high << 16
    first = tl.join(_pair(low, high, 0, CODES), _pair(low, high, 1, CODES))  # dimensions: row, block, c, word, p, i
    if CODES == "e4m3":
        values = first.permute(0, 1, 3, 5, 2, 4)
    else:
        second = tl.join(_pair(low, high, 2, CODES), _pair(low, high, 3, CODES))
        values = tl.join(first, second).permute(0, 1, 3, 6, 5, 2, 4)
    return values.reshape(ROWS, COLS)


@triton.jit
def factor(raw, SCALES: tl.constexpr):
    """Scales with their bits in memory, converted to float32."""
    if SCALES == "e8m0":
        bits = raw.to(tl.uint32)
        power = tl.where(bits == 0, 0x00400000, bits << 23).to(tl.float32, bitcast=True)  # 2^-127 is subnormal
        value = tl.where(bits == 255, float("nan"), power)
    elif SCALES == "e4m3":
        value = _e4m3_of(raw.to(tl.uint32))
    else:
        value = raw.to(tl.float32)
    return value
