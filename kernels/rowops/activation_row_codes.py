"""The activation before a GEMM of codes: the row kernels ``activation`` and ``quantize_rows`` fused into one.

The activation is rounded to h's dtype in registers, so codes and scales equal those of the two row kernels, bit for
bit. A program has whole rows, for their scale; the part of a wide row that it can't hold is read twice.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .activation import _end_of, _row_of
from .activation_codes import _bytes, _half
from .quantize_rows import _scale

_GROUP: tl.constexpr = tl.constexpr(128)  # columns of a group of ``_half``


@triton.jit
def _halves(h, at, inside, columns, first, flags, limit, alpha, beta, linear_beta, BLOCK: tl.constexpr):
    """act(gate) * up of columns [first, first + BLOCK) of these rows: eight of each 16, and the other eight."""
    left = _half(h, at, inside, columns, first, 0, flags, limit, alpha, beta, linear_beta, BLOCK)
    right = _half(h, at, inside, columns, first, 1, flags, limit, alpha, beta, linear_beta, BLOCK)
    return left, right


@triton.jit
def _larger(left, right):
    """Return the larger magnitude of each pair."""
    return tl.maximum(tl.abs(left), tl.abs(right))


@triton.jit
def _store(codes, left, right, factor, row, inside, columns, first, BLOCK: tl.constexpr):
    """Writes columns [first, first + BLOCK) of these rows."""
    ROWS: tl.constexpr = row.shape[0]
    spread = tl.broadcast_to(factor[:, None], (ROWS, BLOCK // _GROUP))
    # Of 64 columns k = 16 s + 8 h + 2 c + p is byte 16 c + 4 s + 2 p + (1 - h): the four of an s and c are a word.
    left_even, left_odd = _bytes(left, spread, BLOCK)
    right_even, right_odd = _bytes(right, spread, BLOCK)
    word = right_even | (left_even << 8) | (right_odd << 16) | (left_odd << 24)
    word = tl.reshape(word, (ROWS, BLOCK // 64, 4, 4)).permute(0, 1, 3, 2)
    word = tl.reshape(word, (ROWS, BLOCK // 4))
    words = codes.to(tl.pointer_type(tl.int32), bitcast=True)
    place = first // 4 + tl.arange(0, BLOCK // 4)[None, :]
    width = columns // 4
    tl.store(words + row[:, None] * width + place, word, mask=inside[:, None] & (place < width))


@triton.jit
def _rows(
    h,
    codes,
    scale,
    row,
    end,
    columns,
    flags,
    limit,
    alpha,
    beta,
    linear_beta,
    BLOCK: tl.constexpr,
    WHOLE: tl.constexpr,
):
    """Write codes and scales of these rows, BLOCK columns at a time; with WHOLE a BLOCK holds all columns."""
    inside = row < end
    at = row * _row_of(flags, columns)
    left, right = _halves(h, at, inside, columns, 0, flags, limit, alpha, beta, linear_beta, BLOCK)
    most = _larger(left, right)
    if not WHOLE:
        for first in tl.range(BLOCK, columns, BLOCK):
            more, others = _halves(h, at, inside, columns, first, flags, limit, alpha, beta, linear_beta, BLOCK)
            most = tl.maximum(most, _larger(more, others))
    factor = _scale(tl.max(tl.max(most, 2), 1))
    tl.store(scale + row, factor, mask=inside)
    _store(codes, left, right, factor, row, inside, columns, 0, BLOCK)
    if not WHOLE:
        for first in tl.range(BLOCK, columns, BLOCK):
            left, right = _halves(h, at, inside, columns, first, flags, limit, alpha, beta, linear_beta, BLOCK)
            _store(codes, left, right, factor, row, inside, columns, first, BLOCK)


@triton.jit
def activation_row_codes(
    h, used, codes, scale, M, columns, flags, limit, alpha, beta, linear_beta, BLOCK: tl.constexpr, ROWS: tl.constexpr
):
    """codes[i, k] = a[i, k] / scale[i] as e4m3 of a[i] = act(gate of h[i]) * up of h[i], or act(h[i]).

    scale[i] = max |a[i]| / 448, 2^-126 at least, or 1 of zeros; a is rounded to h's dtype.

    h [M, 2*columns] (or [M, columns]), rows dense; codes and scale are as ``quantize_rows`` writes them; ``used`` int32
    [1]: rows from there on are neither read nor written. A program does ROWS rows of up to BLOCK columns at a time,
    of wider ones a row, BLOCK * ROWS columns at a time, until there are no more.
    """
    end = _end_of(used, M, flags)
    if columns <= BLOCK:
        group = tl.program_id(0)
        groups = tl.cdiv(end, ROWS)
        while group < groups:
            _rows(
                h,
                codes,
                scale,
                group.to(tl.int64) * ROWS + tl.arange(0, ROWS),
                end,
                columns,
                flags,
                limit,
                alpha,
                beta,
                linear_beta,
                BLOCK,
                True,
            )
            group += tl.num_programs(0)
    else:
        row = tl.program_id(0)
        while row < end:
            _rows(
                h,
                codes,
                scale,
                row.to(tl.int64) + tl.arange(0, 1),
                end,
                columns,
                flags,
                limit,
                alpha,
                beta,
                linear_beta,
                BLOCK * ROWS,
                False,
            )
            row += tl.num_programs(0)
