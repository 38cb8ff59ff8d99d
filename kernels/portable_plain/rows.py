"""The row-grouped GEMM y[g] = x[g] @ w[g].T, with operands through pointers or TMA, and rows gathered or scattered.

One source serves the forward and dX (dx[g] = dy[g] @ w[g]): in this kernel N is always the result's
columns and K the reduction, and ``W_KN`` says that w's columns are the contiguous ones.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .lookup import find
from .tiles import (
    GATHER,
    SCATTER,
    ZERO_TAIL,
    count_tiles,
    expert_rows,
    expert_tiles,
    flat_index,
    locate,
    place,
    search,
    zero_rows,
)
from .zero_rows import clear_unnamed

_WEIGHT: tl.constexpr = tl.constexpr(4)
_BIAS: tl.constexpr = tl.constexpr(8)
_TO_CLEAR: tl.constexpr = tl.constexpr(2 | 16)  # SCATTER and ZERO_TAIL
_CLEARED: tl.constexpr = tl.constexpr(16)  # rows for a program: CLEARER_ROWS in kernels/entry.py
_FEW_ROWS: tl.constexpr = tl.constexpr(32)  # rows of the largest tile whose loads leave out rows past the end


@triton.jit
def _store_rows(
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
    INDEXED: tl.constexpr,
):
    """Store a tile; rows past the expert's end and columns past N stay unchanged.

    Rows and columns are computed again here: kept during the loop they would cost registers.
    """
    row = row_m.to(tl.int64) + tl.arange(0, acc.shape[0])
    col = col_n + tl.arange(0, acc.shape[1])
    inside = row < row_end
    target = row
    if INDEXED:
        flat, inside = flat_index(index, index_step, index_end, flags, row, row_end)
        target = tl.where((flags & SCATTER) != 0, flat, row)
        has_bias = (flags & _BIAS) != 0
        has_weight = (flags & _WEIGHT) != 0
        added = tl.load(bias + expert.to(tl.int64) * N + col, mask=(col < N) & has_bias, other=0.0)
        scale = tl.load(row_weights + flat, mask=inside & has_weight, other=1.0)
        acc = (acc + added[None, :].to(tl.float32)) * scale[:, None]
    address = y + target[:, None] * stride_y_m + col[None, :]
    tl.store(address, acc.to(y.dtype.element_ty), mask=inside[:, None] & (col[None, :] < N))


@triton.jit
def _in_registers(tile):
    """The tile, unchanged; the compiler then passes it to the tensor cores from registers, in any order."""
    return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tile], dtype=tile.dtype, is_pure=True, pack=1)


@triton.jit
def _add_low_rank(
    low_x,
    low_w,
    acc,
    expert,
    row_m,
    col_n,
    row_end,
    N,
    R,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    W_KN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """acc + low_x @ low_w[expert].T: a longer reduction, of a second pair of operands, both contiguous."""
    k = tl.arange(0, BLOCK_K)
    row = row_m.to(tl.int64) + tl.arange(0, BLOCK_M)
    col = col_n + tl.arange(0, BLOCK_N)
    w_e = low_w + expert.to(tl.int64) * N * R
    for start in tl.range(0, R, BLOCK_K):
        r = start + k
        x_at = low_x + row[:, None] * R + r[None, :]
        x_tile = tl.load(x_at, mask=(row < row_end)[:, None] & (r < R)[None, :], other=0.0)
        inside = (r < R)[:, None] & (col < N)[None, :]
        w_at = w_e + (r[:, None] * N + col[None, :] if W_KN else r[:, None] + col[None, :] * R)
        acc = tl.dot(x_tile, tl.load(w_at, mask=inside, other=0.0), acc, input_precision=PRECISION)
    return acc


@triton.jit
def _tile(
    x,
    w,
    y,
    index,
    row_weights,
    bias,
    low_x,
    low_w,
    expert,
    row_m,
    col_n,
    row_end,
    N,
    K,
    R,
    stride_x_m,
    stride_w_e,
    stride_w_row,
    stride_y_m,
    index_step,
    index_end,
    x_divisor,
    flags,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    X_TMA: tl.constexpr,
    W_TMA: tl.constexpr,
    W_KN: tl.constexpr,
    INDEXED: tl.constexpr,
    LOW_RANK: tl.constexpr,
    PRECISION: tl.constexpr,
    TURNED: tl.constexpr,
):
    k = tl.arange(0, BLOCK_K)
    if not X_TMA:
        # Rows past the end read the last row again, and what they compute is never stored. Small tiles leave them out:
        # with one token most rows are past the end, and all programs would read the same lines (0.95 x as fast:
        # docs/inside/trials.md, gathered-few-rows).
        row = row_m.to(tl.int64) + tl.arange(0, BLOCK_M)
        there = row < row_end
        source = tl.minimum(row, row_end - 1)
        if (flags & GATHER) != 0:
            flat, counts = flat_index(index, index_step, index_end, flags, source, row_end)
            source = (tl.where(counts, flat, 0).to(tl.int32) // x_divisor).to(tl.int64)
        x_at = x + source[:, None] * stride_x_m + k[None, :]
    if not W_TMA:
        col = col_n + tl.arange(0, BLOCK_N)
        w_at = w + expert.to(tl.int64) * stride_w_e
        if W_KN:
            w_at += k[:, None].to(tl.int64) * stride_w_row + col[None, :]
        else:
            w_at += k[:, None] + tl.minimum(col, N - 1)[None, :].to(tl.int64) * stride_w_row
    acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32) if TURNED else tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(0, K, BLOCK_K):
        # Past K both operands are zero; through TMA the rows of the next expert only reach rows that are not stored.
        in_k = start + k < K
        if X_TMA:
            x_tile = x.load([row_m, start])
        else:
            in_x = in_k[None, :]
            if BLOCK_M <= _FEW_ROWS:
                in_x &= there[:, None]
            x_tile = tl.load(x_at, mask=in_x, other=0.0)
            x_at += BLOCK_K
        if W_TMA:
            if W_KN:
                w_tile = w.load([expert, start, col_n]).reshape(BLOCK_K, BLOCK_N)
            else:
                w_tile = w.load([expert, col_n, start]).reshape(BLOCK_N, BLOCK_K).T
        elif W_KN:
            w_tile = tl.load(w_at, mask=in_k[:, None] & (col[None, :] < N), other=0.0)
            w_at += BLOCK_K * stride_w_row
        else:
            w_tile = tl.load(w_at, mask=in_k[:, None], other=0.0)
            w_at += BLOCK_K
        if TURNED:
            acc = tl.dot(_in_registers(w_tile.T), x_tile.T, acc, input_precision=PRECISION)
        else:
            acc = tl.dot(x_tile, w_tile, acc, input_precision=PRECISION)
    if LOW_RANK:
        acc = _add_low_rank(
            low_x, low_w, acc, expert, row_m, col_n, row_end, N, R, BLOCK_M, BLOCK_N, BLOCK_K, W_KN, PRECISION
        )
    if TURNED:
        acc = acc.T
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
def _found_tile(
    tile,
    x,
    w,
    y,
    m_sizes,
    index,
    row_weights,
    bias,
    low_x,
    low_w,
    M,
    N,
    K,
    E,
    stride_x_m,
    stride_w_e,
    stride_w_row,
    stride_y_m,
    m_sizes_step,
    index_step,
    index_end,
    x_divisor,
    flags,
    R,
    tiles_n,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    X_TMA: tl.constexpr,
    W_TMA: tl.constexpr,
    W_KN: tl.constexpr,
    INDEXED: tl.constexpr,
    LOW_RANK: tl.constexpr,
    PRECISION: tl.constexpr,
    TURNED: tl.constexpr,
):
    """Compute the tile of a program that has one tile at most; it may have none."""
    there, expert, tile_m, tile_n, row_start, row_end = find(
        tile, m_sizes, m_sizes_step, M, E, tiles_n, BLOCK_M, GROUP_M
    )
    if there:
        _tile(
            x,
            w,
            y,
            index,
            row_weights,
            bias,
            low_x,
            low_w,
            expert,
            row_start + tile_m * BLOCK_M,
            tile_n * BLOCK_N,
            row_end,
            N,
            K,
            R,
            stride_x_m,
            stride_w_e,
            stride_w_row,
            stride_y_m,
            index_step,
            index_end,
            x_divisor,
            flags,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            X_TMA,
            W_TMA,
            W_KN,
            INDEXED,
            LOW_RANK,
            PRECISION,
            TURNED,
        )


@triton.jit
def rows(
    x,
    w,
    y,
    m_sizes,
    index,
    row_weights,
    bias,
    low_x,
    low_w,
    M,
    N,
    K,
    E,
    stride_x_m,
    stride_w_e,
    stride_w_row,
    stride_y_m,
    m_sizes_step,
    index_step,
    index_end,
    x_divisor,
    flags,
    R,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EXPERTS: tl.constexpr,
    SCAN: tl.constexpr,
    PERSISTENT: tl.constexpr,
    X_TMA: tl.constexpr,
    W_TMA: tl.constexpr,
    W_KN: tl.constexpr,
    INDEXED: tl.constexpr,
    LOW_RANK: tl.constexpr,
    PRECISION: tl.constexpr,
    TURNED: tl.constexpr,
    CLEARS: tl.constexpr,
):
    """y[to(m), n] = weight(m) * (sum_k x[from(m), k] * w[expert of m, n, k] + bias[expert of m, n]).

    x [M, K], w [E, N, K] (or [E, K, N]), y [M, N], m_sizes [E]; x and w are pointers, or TMA descriptors
    where X_TMA and W_TMA say so; accumulates in fp32. INDEXED code moves rows, and ``flags`` chooses at run
    time: from(m) = index[m] // x_divisor (1, by pointers only), to(m) = index[m] (2), weight(m) =
    row_weights[index[m]] (4), bias [E, N] (8); otherwise from and to are m itself, and the weight is one.
    ZERO_TAIL (16) sets the rows that belong to no expert to zero; with 2, code that CLEARS, which has one tile a
    program, sets those of y [index_end, N] that no row goes to, by cdiv(index_end, 16) programs before the others, and
    no other code may be told so. Code that is not INDEXED ignores the other ``flags``: on an H200 the index alone costs
    tiles of 128 x 256 up to 5 %, and a branch at run time 17 % in the mean (docs/inside/trials.md, forward-index-always
    and docs/inside/trials.md, forward-branch-at-run-time).
    LOW_RANK code adds sum_r low_x[m, r] * low_w[expert of m, n, r] to the sum over k: low_x [M, R] of sorted rows,
    low_w [E, N, R], with W_KN [E, R, N], both dense. Other code has none of the three.
    TURNED code multiplies w's tile by x's, from registers: wgmma takes elements of 32 bits from shared memory only
    where the reduction is contiguous, which it isn't in [E, K, N], but those of its first operand from registers too.
    """
    tiles_n = tl.cdiv(N, BLOCK_N)
    if PERSISTENT:
        if SCAN:
            total, used = count_tiles(m_sizes, m_sizes_step, M, E, tiles_n, BLOCK_M, EXPERTS)
        else:
            starts, ends = expert_rows(m_sizes, m_sizes_step, M, E, 0, 0, EXPERTS)
            tile_ends = expert_tiles(starts, ends, tiles_n, BLOCK_M)
            total, used = tl.max(tile_ends, 0), tl.max(ends, 0)
        for tile in tl.range(tl.program_id(0), total, tl.num_programs(0), flatten=X_TMA and W_TMA):
            if SCAN:
                expert, inner, row_start, row_end = search(tile, m_sizes, m_sizes_step, M, E, tiles_n, BLOCK_M, EXPERTS)
            else:
                expert, inner, row_start, row_end = locate(tile, tile_ends, ends, M)
            tile_m, tile_n = place(inner, row_end - row_start, tiles_n, BLOCK_M, GROUP_M)
            _tile(
                x,
                w,
                y,
                index,
                row_weights,
                bias,
                low_x,
                low_w,
                expert,
                row_start + tile_m * BLOCK_M,
                tile_n * BLOCK_N,
                row_end,
                N,
                K,
                R,
                stride_x_m,
                stride_w_e,
                stride_w_row,
                stride_y_m,
                index_step,
                index_end,
                x_divisor,
                flags,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
                X_TMA,
                W_TMA,
                W_KN,
                INDEXED,
                LOW_RANK,
                PRECISION,
                TURNED,
            )
    elif CLEARS:
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
            _found_tile(
                tl.program_id(0) - clearing,
                x,
                w,
                y,
                m_sizes,
                index,
                row_weights,
                bias,
                low_x,
                low_w,
                M,
                N,
                K,
                E,
                stride_x_m,
                stride_w_e,
                stride_w_row,
                stride_y_m,
                m_sizes_step,
                index_step,
                index_end,
                x_divisor,
                flags,
                R,
                tiles_n,
                BLOCK_M,
                BLOCK_N,
                BLOCK_K,
                GROUP_M,
                X_TMA,
                W_TMA,
                W_KN,
                INDEXED,
                LOW_RANK,
                PRECISION,
                TURNED,
            )
    else:
        _found_tile(
            tl.program_id(0),
            x,
            w,
            y,
            m_sizes,
            index,
            row_weights,
            bias,
            low_x,
            low_w,
            M,
            N,
            K,
            E,
            stride_x_m,
            stride_w_e,
            stride_w_row,
            stride_y_m,
            m_sizes_step,
            index_step,
            index_end,
            x_divisor,
            flags,
            R,
            tiles_n,
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            GROUP_M,
            X_TMA,
            W_TMA,
            W_KN,
            INDEXED,
            LOW_RANK,
            PRECISION,
            TURNED,
        )
    _asked: tl.constexpr = _TO_CLEAR if CLEARS else ZERO_TAIL
    if (flags & _asked) == ZERO_TAIL:
        if not PERSISTENT:
            _all, used = count_tiles(m_sizes, m_sizes_step, M, E, tiles_n, BLOCK_M, EXPERTS)
        zero_rows(y, used, M, N, stride_y_m, 16, BLOCK_N)
