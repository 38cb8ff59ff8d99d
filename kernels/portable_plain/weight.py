"""dW: dw[g] = dy[g].T @ x[g], a tile of one expert's [N, K] at a time, reduced over that expert's rows."""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import expert_rows, rows_of, search_rows

_INDEX_END: tl.constexpr = tl.constexpr(0x40000000)


@triton.jit
def _corner(tile, tiles_n, tiles_k, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr):
    """(expert, first n, first k) of a tile: k fastest, within groups of GROUP_M row tiles that share x's columns."""
    per_expert = tiles_n * tiles_k
    expert = tile // per_expert
    inner = tile - expert * per_expert
    per_group = GROUP_M * tiles_k
    group = inner // per_group
    first = group * GROUP_M
    height = tl.minimum(tiles_n - first, GROUP_M)
    rest = inner - group * per_group
    return expert, (first + rest % height) * BLOCK_N, (rest // height) * BLOCK_K


@triton.jit
def _ragged(rows_desc, row_start, row_end, row, col, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr):
    """Rows [row, row + BLOCK_M) of an expert, zero past its end: TMA itself cuts them off.

    The descriptor has two dimensions more, whose strides cancel modulo 2^64, so that the expert's
    end falls on the end of the third one. See kernels/entry.py, RAGGED_SIZES.
    """
    tile = rows_desc.load([_INDEX_END, row_end, _INDEX_END - (row_end - row_start) + row, col])
    return tile.reshape(BLOCK_M, BLOCK)


@triton.jit
def weight(
    dy,
    x,
    dw,
    m_sizes,
    M,
    N,
    K,
    E,
    stride_dy_m,
    stride_x_m,
    stride_dw_e,
    stride_dw_row,
    m_sizes_step,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EXPERTS: tl.constexpr,
    SCAN: tl.constexpr,
    PERSISTENT: tl.constexpr,
    TMA: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """dw[e, n, k] = sum over the expert's rows m of dy[m, n] * x[m, k].

    dy [M, N], x [M, K], dw [E, N, K], m_sizes [E]; dy and x are pointers, or TMA descriptors that end
    with each expert; accumulates in fp32. Nothing of the next expert enters, NaN included. An expert
    without rows gets zeros.
    """
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles_k = tl.cdiv(K, BLOCK_K)
    if not SCAN:
        _starts, ends = expert_rows(m_sizes, m_sizes_step, M, E, 0, 0, EXPERTS)
    step = tl.num_programs(0) if PERSISTENT else E * tiles_n * tiles_k
    for tile in tl.range(tl.program_id(0), E * tiles_n * tiles_k, step, flatten=TMA):
        expert, first_n, first_k = _corner(tile, tiles_n, tiles_k, BLOCK_N, BLOCK_K, GROUP_M)
        if SCAN:
            row_start, row_end = search_rows(expert, m_sizes, m_sizes_step, M, E, EXPERTS)
        else:
            row_start, row_end = rows_of(expert, ends, 0, 0, EXPERTS)
        n = first_n + tl.arange(0, BLOCK_N)
        k = first_k + tl.arange(0, BLOCK_K)
        acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
        if TMA:
            for row in tl.range(0, row_end - row_start, BLOCK_M):
                dy_tile = _ragged(dy, row_start, row_end, row, first_n, BLOCK_M, BLOCK_N)
                x_tile = _ragged(x, row_start, row_end, row, first_k, BLOCK_M, BLOCK_K)
                acc = tl.dot(tl.trans(dy_tile), x_tile, acc, input_precision=PRECISION)
        else:
            for done in tl.range(0, row_end - row_start, BLOCK_M):
                row = row_start.to(tl.int64) + done + tl.arange(0, BLOCK_M)
                inside = row < row_end
                dy_tile = tl.load(
                    dy + row[:, None] * stride_dy_m + n[None, :], mask=inside[:, None] & (n[None, :] < N), other=0.0
                )
                x_tile = tl.load(
                    x + row[:, None] * stride_x_m + k[None, :], mask=inside[:, None] & (k[None, :] < K), other=0.0
                )
                acc = tl.dot(tl.trans(dy_tile), x_tile, acc, input_precision=PRECISION)
        address = dw + expert.to(tl.int64) * stride_dw_e + n[:, None].to(tl.int64) * stride_dw_row + k[None, :]
        tl.store(address, acc.to(dw.dtype.element_ty), mask=(n[:, None] < N) & (k[None, :] < K))
