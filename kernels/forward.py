"""The row-grouped GEMM, y[g] = x[g] @ w[g].T, through pointers and through TMA descriptors.

One source serves the forward and dX (dx[g] = dy[g] @ w[g]): in the kernel's words N is the result's
columns and K the reduction, and ``W_KN`` says that w's columns are the contiguous ones.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import count_tiles, expert_rows, expert_tiles, locate, place, search


@triton.jit
def _store_rows(y, acc, stride_y_m, row, row_end, col, N):
    """Stores a tile; rows past the expert's end and columns past N are left as they are."""
    address = y + row[:, None].to(tl.int64) * stride_y_m + col[None, :]
    tl.store(address, acc.to(y.dtype.element_ty), mask=(row[:, None] < row_end) & (col[None, :] < N))


@triton.jit
def _pointer_tile(
    x, w, y, expert, row_m, col_n, row_end, N, K, stride_x_m, stride_w_e, stride_w_row, stride_y_m,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    W_KN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = row_m.to(tl.int64) + tl.arange(0, BLOCK_M)
    col = col_n + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Rows past the end read the last row again: no mask in the loop, and what they compute is never stored.
    x_at = x + tl.minimum(row, row_end - 1)[:, None] * stride_x_m + k[None, :]
    w_at = w + expert.to(tl.int64) * stride_w_e
    if W_KN:
        w_at += k[:, None].to(tl.int64) * stride_w_row + col[None, :]
    else:
        w_at += k[:, None] + tl.minimum(col, N - 1)[None, :].to(tl.int64) * stride_w_row
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(0, K, BLOCK_K):
        in_k = start + k < K
        x_tile = tl.load(x_at, mask=in_k[None, :], other=0.0)
        if W_KN:
            w_tile = tl.load(w_at, mask=in_k[:, None] & (col[None, :] < N), other=0.0)
        else:
            w_tile = tl.load(w_at, mask=in_k[:, None], other=0.0)
        acc = tl.dot(x_tile, w_tile, acc, input_precision=PRECISION)
        x_at += BLOCK_K
        if W_KN:
            w_at += BLOCK_K * stride_w_row
        else:
            w_at += BLOCK_K
    _store_rows(y, acc, stride_y_m, row, row_end, col, N)


@triton.jit
def rows_pointer(
    x, w, y, m_sizes, M, N, K, E, stride_x_m, stride_w_e, stride_w_row, stride_y_m, m_sizes_step,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    EXPERTS: tl.constexpr, SCAN: tl.constexpr, PERSISTENT: tl.constexpr, W_KN: tl.constexpr, PRECISION: tl.constexpr,

):  # fmt: skip
    """y[m, n] = sum_k x[m, k] * w[expert of m, n, k], by pointers (cp.async): for every capability.

    x [M, K], w [E, N, K] (or [E, K, N]), y [M, N], m_sizes [E]; accumulates in fp32.
    """
    tiles_n = tl.cdiv(N, BLOCK_N)
    if SCAN:
        total = count_tiles(m_sizes, m_sizes_step, M, E, tiles_n, BLOCK_M, EXPERTS)
    else:
        starts, ends = expert_rows(m_sizes, m_sizes_step, M, E, 0, 0, EXPERTS)
        tile_ends = expert_tiles(starts, ends, tiles_n, BLOCK_M)
        total = tl.max(tile_ends, 0)
    if PERSISTENT:
        for tile in tl.range(tl.program_id(0), total, tl.num_programs(0)):
            if SCAN:
                expert, inner, row_start, row_end = search(tile, m_sizes, m_sizes_step, M, E, tiles_n, BLOCK_M, EXPERTS)
            else:
                expert, inner, row_start, row_end = locate(tile, tile_ends, ends, M)
            tile_m, tile_n = place(inner, row_end - row_start, tiles_n, BLOCK_M, GROUP_M)
            _pointer_tile(
                x, w, y, expert, row_start + tile_m * BLOCK_M, tile_n * BLOCK_N, row_end, N, K,
                stride_x_m, stride_w_e, stride_w_row, stride_y_m,
                BLOCK_M, BLOCK_N, BLOCK_K, W_KN, PRECISION,
            )  # fmt: skip
    else:
        tile = tl.program_id(0)
        if tile < total:
            if SCAN:
                expert, inner, row_start, row_end = search(tile, m_sizes, m_sizes_step, M, E, tiles_n, BLOCK_M, EXPERTS)
            else:
                expert, inner, row_start, row_end = locate(tile, tile_ends, ends, M)
            tile_m, tile_n = place(inner, row_end - row_start, tiles_n, BLOCK_M, GROUP_M)
            _pointer_tile(
                x, w, y, expert, row_start + tile_m * BLOCK_M, tile_n * BLOCK_N, row_end, N, K,
                stride_x_m, stride_w_e, stride_w_row, stride_y_m,
                BLOCK_M, BLOCK_N, BLOCK_K, W_KN, PRECISION,
            )  # fmt: skip


@triton.jit
def _tma_tile(
    x_desc, w_desc, y, expert, row_m, col_n, row_end, N, K, stride_y_m,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    W_KN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in tl.range(0, K, BLOCK_K):
        # Past K both operands read zero; rows of the next expert only reach rows that are not stored.
        x_tile = x_desc.load([row_m, k])
        if W_KN:
            w_tile = w_desc.load([expert, k, col_n]).reshape(BLOCK_K, BLOCK_N)
        else:
            w_tile = w_desc.load([expert, col_n, k]).reshape(BLOCK_N, BLOCK_K).T
        acc = tl.dot(x_tile, w_tile, acc, input_precision=PRECISION)
    row = row_m.to(tl.int64) + tl.arange(0, BLOCK_M)
    _store_rows(y, acc, stride_y_m, row, row_end, col_n + tl.arange(0, BLOCK_N), N)


@triton.jit
def rows_tma(
    x_desc, w_desc, y, m_sizes, M, N, K, E, stride_y_m, m_sizes_step,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    EXPERTS: tl.constexpr, SCAN: tl.constexpr, PERSISTENT: tl.constexpr, W_KN: tl.constexpr, PRECISION: tl.constexpr,

):  # fmt: skip
    """As ``rows_pointer``, with x [M, K] and w [E, N, K] loaded through TMA: sm_90 and later."""
    tiles_n = tl.cdiv(N, BLOCK_N)
    if SCAN:
        total = count_tiles(m_sizes, m_sizes_step, M, E, tiles_n, BLOCK_M, EXPERTS)
    else:
        starts, ends = expert_rows(m_sizes, m_sizes_step, M, E, 0, 0, EXPERTS)
        tile_ends = expert_tiles(starts, ends, tiles_n, BLOCK_M)
        total = tl.max(tile_ends, 0)
    if PERSISTENT:
        for tile in tl.range(tl.program_id(0), total, tl.num_programs(0), flatten=True):
            if SCAN:
                expert, inner, row_start, row_end = search(tile, m_sizes, m_sizes_step, M, E, tiles_n, BLOCK_M, EXPERTS)
            else:
                expert, inner, row_start, row_end = locate(tile, tile_ends, ends, M)
            tile_m, tile_n = place(inner, row_end - row_start, tiles_n, BLOCK_M, GROUP_M)
            _tma_tile(
                x_desc, w_desc, y, expert, row_start + tile_m * BLOCK_M, tile_n * BLOCK_N, row_end, N, K,
                stride_y_m, BLOCK_M, BLOCK_N, BLOCK_K, W_KN, PRECISION,
            )  # fmt: skip
    else:
        tile = tl.program_id(0)
        if tile < total:
            if SCAN:
                expert, inner, row_start, row_end = search(tile, m_sizes, m_sizes_step, M, E, tiles_n, BLOCK_M, EXPERTS)
            else:
                expert, inner, row_start, row_end = locate(tile, tile_ends, ends, M)
            tile_m, tile_n = place(inner, row_end - row_start, tiles_n, BLOCK_M, GROUP_M)
            _tma_tile(
                x_desc, w_desc, y, expert, row_start + tile_m * BLOCK_M, tile_n * BLOCK_N, row_end, N, K,
                stride_y_m, BLOCK_M, BLOCK_N, BLOCK_K, W_KN, PRECISION,
            )  # fmt: skip
