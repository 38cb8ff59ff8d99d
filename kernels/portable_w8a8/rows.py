"""The row-grouped GEMM with e4m3 w and x, for GPUs that multiply e4m3; the kernel quantises x.

x has 16 bits and becomes codes in registers, step by step: no row kernel is launched for it, and rows are gathered as
they are loaded. Each step's product is scaled and added to sums in fp32, so the tensor cores, which keep fewer
bits of a long sum of e4m3, sum over 128 of K at most.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..portable_plain.lookup import find
from ..portable_plain.rows import _store_rows
from ..portable_plain.tiles import GATHER, ZERO_TAIL, count_tiles, flat_index, zero_rows
from ..portable_plain.zero_rows import clear_unnamed

_TO_CLEAR: tl.constexpr = tl.constexpr(2 | 16)  # SCATTER and ZERO_TAIL
_CLEARED: tl.constexpr = tl.constexpr(16)  # rows for a program: CLEARER_ROWS in kernels/entry.py
_FEW_ROWS: tl.constexpr = tl.constexpr(32)  # as in kernels/portable_plain/rows.py
_MOST: tl.constexpr = tl.constexpr(448.0)  # the largest e4m3 number
_LEAST: tl.constexpr = tl.constexpr(2.0**-126)  # least scale: a smaller one's inverse is infinite, times 0 NaN


@triton.jit
def _scale(most):
    """The scale of elements whose largest magnitude is ``most``, as kernels/rowops/quantize.py computes it."""
    factor = most * (1.0 / _MOST)
    return tl.where(factor > 0, tl.maximum(factor, _LEAST), 1.0)


@triton.jit
def _tile(
    x,
    w,
    w_scale,
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
    SCALE_ROWS: tl.constexpr,
):
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
    column = col_n + tl.arange(0, BLOCK_N)
    in_n = column < N
    w_at = w + matrix * N * K + column[:, None].to(tl.int64) * K + k[None, :]

    if SCALE_ROWS == 1:  # one scale for each row of w and of x
        most = tl.zeros((BLOCK_M,), tl.float32)
        ahead = x_at
        for start in tl.range(0, K, BLOCK_K):
            wide = tl.load(ahead, mask=(start + k < K)[None, :] & there[:, None], other=0.0).to(tl.float32)
            ahead += BLOCK_K
            most = tl.maximum(most, tl.max(tl.abs(wide), 1))
        scale = _scale(most)
        by = scale
    else:
        wide_k = tl.cdiv(K, BLOCK_K)
        scale_at = w_scale + (matrix * tl.cdiv(N, SCALE_ROWS) + col_n // SCALE_ROWS) * wide_k
        by = tl.load(scale_at)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in tl.range(0, K, BLOCK_K):
        in_k = start + k < K
        in_x = in_k[None, :]
        if BLOCK_M <= _FEW_ROWS:
            in_x &= there[:, None]
        value = tl.load(x_at, mask=in_x, other=0.0).to(tl.float32)
        x_at += BLOCK_K
        raw = tl.load(w_at, mask=in_k[None, :] & in_n[:, None], other=0)
        w_at += BLOCK_K
        if SCALE_ROWS != 1:
            scale = _scale(tl.max(tl.abs(value), 1))
        codes = (value * (1.0 / scale)[:, None]).to(tl.float8e4nv)
        part = tl.dot(codes, raw.to(tl.float8e4nv, bitcast=True).T)
        # Scales of rows also multiply each part: a plain sum would be left to the tensor cores.
        if SCALE_ROWS == 1:
            acc += part * scale[:, None]
        else:
            acc += part * (scale * by)[:, None]
            scale_at += 1
            by = tl.load(scale_at, mask=start + BLOCK_K < K, other=0.0)
    if SCALE_ROWS == 1:
        acc *= tl.load(w_scale + matrix * N + column, mask=in_n, other=0.0)[None, :]
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
def w8a8(
    x,
    w,
    w_scale,
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
    SCALE_ROWS: tl.constexpr,
):
    """y[to(m), n] = weight(m) * (sum_g xs[m, g] * ws[e, n, g] * sum_k xq[from(m), k] * w[e, n, k] + bias[e, n]).

    e is m's expert, g counts groups of 128 of K, and k runs over a group. x [M, K] and y [M, N] have 16 bits, w is e4m3
    [E, N, K], dense, and m_sizes is [E]. from, to, weight, bias and ``flags`` are as in kernels/portable_plain/rows.py.
    xq is x / xs as e4m3, xs the largest |x| / 448 of a row and group, at least 2^-126, or 1 if all are zero.

    SCALE_ROWS 128: ws[e, n, g] = w_scale[e, n / 128, g], fp32 [E, ceil(N / 128), ceil(K / 128)]. SCALE_ROWS 1: w_scale
    is fp32 [E, N], and one group is all of K. A program has one tile; BLOCK_K is 128.
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
                SCALE_ROWS,
            )
    if (flags & (_TO_CLEAR if INDEXED else ZERO_TAIL)) == ZERO_TAIL:
        _all, used = count_tiles(m_sizes, m_sizes_step, M, E, tiles_n, BLOCK_M, EXPERTS)
        zero_rows(y, used, M, N, stride_y_m, 16, BLOCK_N)
