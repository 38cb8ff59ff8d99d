"""The activation before a GEMM with quantised x: ``activation`` of h and ``quantize`` of its result, in one launch.

h is read once. The activation's result stays in registers, rounded to h's dtype as if it were stored, so codes and
scales have the bits that the two row kernels give.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .activation import _end_of, _product, _row_of

# The values of kernels/rowops/__init__.py, as activation.py and quantize.py have them.
_GATED: tl.constexpr = tl.constexpr(8)
_INTERLEAVED: tl.constexpr = tl.constexpr(16)
_GROUP: tl.constexpr = tl.constexpr(128)  # columns that share a scale
_WORDS: tl.constexpr = tl.constexpr(32)  # words of 4 codes, for a group
_MOST: tl.constexpr = tl.constexpr(448.0)  # the largest e4m3 number
_LEAST: tl.constexpr = tl.constexpr(2.0**-126)  # least scale: a smaller one's inverse is infinite, times 0 NaN


@triton.jit
def _half(
    h, at, inside, columns, first, HALF: tl.constexpr, flags, limit, alpha, beta, linear_beta, BLOCK: tl.constexpr
):
    """act(gate) * up of half ``HALF`` (0, 1) of each 16 columns in [first, first + BLOCK): [rows, groups, 64].

    ``at`` is the offset of each row in h, ``inside`` a mask of rows. Results are float32, rounded to h's dtype.
    """
    ROWS: tl.constexpr = at.shape[0]
    of_row, there = at[:, None, None], inside[:, None, None]
    a = tl.arange(0, BLOCK // 16)[None, :, None]
    if (flags & _INTERLEAVED) != 0:
        both = 2 * (first + 16 * a + 8 * HALF) + tl.arange(0, 16)[None, None, :]
        pair = tl.load(h + of_row + both, mask=there & (both < 2 * columns), other=0.0)
        gate, up = tl.split(tl.reshape(pair, (ROWS, BLOCK // 16, 8, 2)))
    else:
        col = first + 16 * a + 8 * HALF + tl.arange(0, 8)[None, None, :]
        mask = there & (col < columns)
        gate = tl.load(h + of_row + col, mask=mask, other=0.0)
        up = tl.load(h + of_row + col + columns, mask=mask & ((flags & _GATED) != 0), other=1.0)
    gate, up = gate.to(tl.float32), up.to(tl.float32)
    value = _product(gate, up, flags, limit, alpha, beta, linear_beta).to(h.dtype.element_ty).to(tl.float32)
    return tl.reshape(value, (ROWS, BLOCK // _GROUP, _GROUP // 2))


@triton.jit
def _bytes(value, factor, BLOCK: tl.constexpr):
    """The codes of a half: of columns 2 c and those of 2 c + 1, [rows, BLOCK // 16, 4] each."""
    code = (value * (1.0 / factor)[:, :, None]).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    return tl.split(tl.reshape(code.to(tl.int32), (value.shape[0], BLOCK // 16, 4, 2)))


@triton.jit
def _block(
    h, codes, scale, row, inside, M, columns, first, flags, limit, alpha, beta, linear_beta, BLOCK: tl.constexpr
):
    """Writes columns [first, first + BLOCK) of these rows."""
    ROWS: tl.constexpr = row.shape[0]
    at = row * _row_of(flags, columns)
    left = _half(h, at, inside, columns, first, 0, flags, limit, alpha, beta, linear_beta, BLOCK)
    right = _half(h, at, inside, columns, first, 1, flags, limit, alpha, beta, linear_beta, BLOCK)
    factor = tl.maximum(tl.max(tl.abs(left), 2), tl.max(tl.abs(right), 2)) * (1.0 / _MOST)
    factor = tl.where(factor > 0, tl.maximum(factor, _LEAST), 1.0)
    group = first // _GROUP + tl.arange(0, BLOCK // _GROUP)[None, :]
    there = inside[:, None]
    tl.store(
        scale + group.to(tl.int64) * (tl.cdiv(M, 4) * 4) + row[:, None], factor, mask=there & (group * _GROUP < columns)
    )
    # Of 64 columns k = 16 s + 8 h + 2 c + p is byte 16 c + 4 s + 2 p + (1 - h): the four of an s and c are a word.
    left_even, left_odd = _bytes(left, factor, BLOCK)
    right_even, right_odd = _bytes(right, factor, BLOCK)
    word = right_even | (left_even << 8) | (right_odd << 16) | (left_odd << 24)
    word = tl.reshape(word, (ROWS, BLOCK // 64, 4, 4)).permute(0, 1, 3, 2)
    word = tl.reshape(word, (ROWS, BLOCK // 4))
    words = codes.to(tl.pointer_type(tl.int32), bitcast=True)
    place = first // _GROUP * _WORDS + tl.arange(0, BLOCK // 4)[None, :]
    width = columns // _GROUP * _WORDS
    tl.store(words + row[:, None] * width + place, word, mask=there & (place < width))


@triton.jit
def activation_codes(
    h, used, codes, scale, M, columns, flags, limit, alpha, beta, linear_beta, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """codes[i, k] = a[i, k] / scale[k // 128, i] as e4m3 of a[i] = act(gate of h[i]) * up of h[i], or act(h[i]).

    scale[g, i] = max |a[i, 128 g : 128 (g + 1)]| / 448, 2^-126 at least, or 1 of zeros; a is rounded to h's dtype.

    h [M, 2*columns] (or [M, columns]), rows dense; codes and scale are as ``quantize`` writes them; ``used`` int32 [1]:
    rows from there on are neither read nor written. A program does BLOCK columns of ROWS rows at a time, until there
    are no more.
    """
    blocks = tl.cdiv(columns, BLOCK)
    end = _end_of(used, M, flags)
    tile = tl.program_id(0)
    tiles = tl.cdiv(end, ROWS) * blocks
    while tile < tiles:
        row = (tile // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        first = tile % blocks * BLOCK
        _block(h, codes, scale, row, row < end, M, columns, first, flags, limit, alpha, beta, linear_beta, BLOCK)
        tile += tl.num_programs(0)
