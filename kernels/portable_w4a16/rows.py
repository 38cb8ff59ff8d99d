"""The row-grouped GEMM of a quantised w, whose codes become x's type in registers: forward and dX.

One source serves y[g] = x[g] @ w[g].T and, with ``DX``, dx[g] = dy[g] @ w[g]: in this kernel N is always the result's
columns and K the reduction, so w's rows are N or, with ``DX``, K.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..portable_plain.lookup import find
from ..portable_plain.rows import _store_rows
from ..portable_plain.tiles import GATHER, ZERO_TAIL, count_tiles, flat_index, zero_rows
from ..portable_plain.zero_rows import clear_unnamed
from .codes import factor, ordered, stored

_TO_CLEAR: tl.constexpr = tl.constexpr(2 | 16)  # SCATTER and ZERO_TAIL
_CLEARED: tl.constexpr = tl.constexpr(16)  # rows for a program: CLEARER_ROWS in kernels/entry.py
_FEW_ROWS: tl.constexpr = tl.constexpr(32)  # as in kernels/portable_plain/rows.py
_BLOCK: tl.constexpr = tl.constexpr(64)  # rows, and columns, of a block of prepared codes


@triton.jit
def _scales_at(
    scales,
    row,
    column,
    R,
    C,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    ORDER: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
):
    """A scale for each row and group of a tile's columns from ``column`` on: [ROWS, groups], 0 past the matrix."""
    if GROUP == 0:
        raw = tl.load(scales + row[:, None], mask=(row < R)[:, None], other=0)
    else:
        GROUPS: tl.constexpr = COLS // GROUP if COLS > GROUP else 1
        wide = tl.cdiv(C, GROUP)
        group = column // GROUP + tl.arange(0, GROUPS)
        if ORDER != 0 and SCALE_ROWS == 1:
            HELD: tl.constexpr = _BLOCK // GROUP if _BLOCK > GROUP else 1  # in a row of a block
            line = (row // _BLOCK).to(tl.int64) * (wide * _BLOCK) + row % _BLOCK * HELD
            at = line[:, None] + (group // HELD * (_BLOCK * HELD) + group % HELD)[None, :]
        else:
            at = (row // SCALE_ROWS).to(tl.int64)[:, None] * wide + group[None, :]
        raw = tl.load(scales + at, mask=(row < R)[:, None] & (group < wide)[None, :], other=0)
    return raw


@triton.jit
def _tile(
    x,
    w,
    w_scale,
    w_zero,
    w_outer,
    y,
    index,
    row_weights,
    bias,
    expert,
    row_m,
    col_n,
    row_end,
    N,
    K,
    stride_x_m,
    stride_y_m,
    index_step,
    index_end,
    x_divisor,
    flags,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    INDEXED: tl.constexpr,
    DX: tl.constexpr,
    CODES: tl.constexpr,
    SCALES: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    OUTER: tl.constexpr,
    ZERO: tl.constexpr,
    ORDER: tl.constexpr,
):
    # w is R x C, its tile ROWS x COLS.
    R = K if DX else N
    C = N if DX else K
    ROWS: tl.constexpr = BLOCK_K if DX else BLOCK_N
    COLS: tl.constexpr = BLOCK_N if DX else BLOCK_K
    k = tl.arange(0, BLOCK_K)
    line = row_m.to(tl.int64) + tl.arange(0, BLOCK_M)
    there = line < row_end
    source = tl.minimum(line, row_end - 1)
    if INDEXED:
        gathers = (flags & GATHER) != 0
        if gathers:
            flat, counts = flat_index(index, index_step, index_end, flags, source, row_end)
            source = (tl.where(counts, flat, 0).to(tl.int32) // x_divisor).to(tl.int64)
    x_at = x + source[:, None] * stride_x_m + k[None, :]

    matrix = expert.to(tl.int64)
    first = tl.arange(0, ROWS) if DX else col_n + tl.arange(0, ROWS)
    if ORDER == 0:
        A_BYTE: tl.constexpr = 1 if CODES == "e4m3" else 2  # codes
        width = C // A_BYTE
        byte = tl.arange(0, COLS // A_BYTE)
        if DX:
            byte += col_n // A_BYTE
        w_at = w + matrix * R * width + first[:, None].to(tl.int64) * width + byte[None, :]
        w_step = BLOCK_K * width if DX else BLOCK_K // A_BYTE
    else:
        WORDS: tl.constexpr = 4 if CODES == "e4m3" else 2
        LINE: tl.constexpr = 4 * WORDS  # words of a row of a block
        blocks = C // _BLOCK
        word = tl.arange(0, COLS // _BLOCK * LINE)
        if DX:
            word += col_n // _BLOCK * LINE
        within = (word % LINE)[None, :]
        if ORDER == 2:
            within = ((within // WORDS) ^ (first // 2 % 4)[:, None]) * WORDS + within % WORDS
        begins = (first // _BLOCK).to(tl.int64) * blocks * (_BLOCK * LINE) + first % _BLOCK * LINE
        w_at = w + matrix * R * blocks * LINE + begins[:, None] + (word // LINE * (_BLOCK * LINE))[None, :] + within
        w_step = BLOCK_K * blocks * LINE if DX else BLOCK_K * LINE
    many = matrix * R if GROUP == 0 else matrix * tl.cdiv(R, SCALE_ROWS) * tl.cdiv(C, GROUP)
    scales = w_scale + many
    outer = tl.load(w_outer + expert) if OUTER else 1.0

    # Load scales a step ahead: they are too narrow for asynchronous copies.
    scale = _scales_at(scales, first, col_n if DX else 0, R, C, GROUP, SCALE_ROWS, ORDER, ROWS, COLS)
    zero = scale
    if ZERO:
        zero = _scales_at(w_zero + many, first, col_n if DX else 0, R, C, GROUP, SCALE_ROWS, ORDER, ROWS, COLS)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(0, K, BLOCK_K):
        in_k = start + k < K
        in_x = in_k[None, :]
        if BLOCK_M <= _FEW_ROWS:
            in_x &= there[:, None]
        x_tile = tl.load(x_at, mask=in_x, other=0.0)
        x_at += BLOCK_K
        row = start + first if DX else first
        if ORDER == 0:
            in_w = (byte < width)[None, :] if DX else (byte + start // A_BYTE < width)[None, :]
        else:
            in_w = (word // LINE < blocks)[None, :] if DX else (word // LINE + start // _BLOCK < blocks)[None, :]
        raw = tl.load(w_at, mask=in_w & (row < R)[:, None], other=0)
        w_at += w_step
        ahead = start + BLOCK_K
        next_row = ahead + first if DX else first
        next_column = col_n if DX else ahead
        next_scale = _scales_at(scales, next_row, next_column, R, C, GROUP, SCALE_ROWS, ORDER, ROWS, COLS)
        values = stored(raw, CODES, ROWS, COLS) if ORDER == 0 else ordered(raw, CODES, ROWS, COLS)
        by = factor(scale, SCALES)
        if OUTER:
            by *= outer
        GROUPS: tl.constexpr = scale.shape[1]
        values = values.reshape(ROWS, GROUPS, COLS // GROUPS)
        if ZERO:
            values -= zero.to(tl.float32)[:, :, None]
            zero = _scales_at(w_zero + many, next_row, next_column, R, C, GROUP, SCALE_ROWS, ORDER, ROWS, COLS)
        w_tile = (values * by[:, :, None]).reshape(ROWS, COLS).to(x.dtype.element_ty)
        acc = tl.dot(x_tile, w_tile if DX else w_tile.T, acc)
        scale = next_scale
    _store_rows(
        y,
        acc,
        index,
        row_weights,
        bias,
        expert,
        row_m,
        col_n,
        row_end,
        N,
        stride_y_m,
        index_step,
        index_end,
        flags,
        INDEXED,
    )


@triton.jit
def coded(
    x,
    w,
    w_scale,
    w_zero,
    w_outer,
    y,
    m_sizes,
    index,
    row_weights,
    bias,
    M,
    N,
    K,
    E,
    stride_x_m,
    stride_y_m,
    m_sizes_step,
    index_step,
    index_end,
    x_divisor,
    flags,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EXPERTS: tl.constexpr,
    INDEXED: tl.constexpr,
    DX: tl.constexpr,
    CODES: tl.constexpr,
    SCALES: tl.constexpr,
    GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    OUTER: tl.constexpr,
    ZERO: tl.constexpr,
    ORDER: tl.constexpr,
):
    """y[to(m), n] = weight(m) * (sum_k x[from(m), k] * w[e, n, k] + bias[e, n]); with DX w[e, k, n].

    e is m's expert; x [M, K] and y [M, N] of 16 bits, m_sizes [E]; from, to, weight, bias and ``flags`` are those of
    rows.py. An element of w is (code - zero) * (scale * outer) in float32, rounded once to x's type; sums are float32.

    w is E matrices of R x C, [N, K] or with DX [K, N], of codes ``CODES`` (e2m1, e4m3, int4 whose zero is 8, or uint4),
    stored row after row or in the ORDER that prepared_layout.py numbers. ``SCALES`` is the type of w_scale: a scale for
    each SCALE_ROWS x GROUP of a matrix; GROUP 0 is a whole row. With ZERO, w_zero has a zero point, a byte, for each
    scale; with OUTER, w_outer [E] float32 has a scale for each expert. A program has one tile, as in rows.py.
    """
    tiles_n = tl.cdiv(N, BLOCK_N)
    clearing = 0
    if INDEXED:
        clearing = tl.where((flags & _TO_CLEAR) == _TO_CLEAR, tl.cdiv(index_end, _CLEARED), 0)
    if tl.program_id(0) < clearing:
        clear_unnamed(
            y,
            index,
            m_sizes,
            tl.program_id(0) * _CLEARED,
            M,
            N,
            E,
            stride_y_m,
            m_sizes_step,
            index_step,
            index_end,
            _CLEARED,
            EXPERTS,
            BLOCK_N,
        )
    else:
        there, expert, tile_m, tile_n, row_start, row_end = find(
            tl.program_id(0) - clearing, m_sizes, m_sizes_step, M, E, tiles_n, BLOCK_M, GROUP_M
        )
        if there:
            _tile(
                x,
                w,
                w_scale,
                w_zero,
                w_outer,
                y,
                index,
                row_weights,
                bias,
                expert,
                row_start + tile_m * BLOCK_M,
                tile_n * BLOCK_N,
                row_end,
                N,
                K,
                stride_x_m,
                stride_y_m,
                index_step,
                index_end,
                x_divisor,
                flags,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
                INDEXED,
                DX,
                CODES,
                SCALES,
                GROUP,
                SCALE_ROWS,
                OUTER,
                ZERO,
                ORDER,
            )
    if (flags & (_TO_CLEAR if INDEXED else ZERO_TAIL)) == ZERO_TAIL:
        _all, used = count_tiles(m_sizes, m_sizes_step, M, E, tiles_n, BLOCK_M, EXPERTS)
        zero_rows(y, used, M, N, stride_y_m, 16, BLOCK_N)
