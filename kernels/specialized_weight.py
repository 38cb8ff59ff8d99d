"""dW for sm_90, warp-specialised: one warp loads through TMA, two warpgroups multiply.

A tile is 128 rows of dw, 64 for each warpgroup (warpgroups.py), by BLOCK_K columns. Tiles are handed out as programs
become free. The arguments are those of ``grad_weight.weight``, and ``counter``, an int32 that is zero before and after.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from .pipeline import (
    INDEX_END,
    BOTH,
    END,
    advance,
    barriers,
    drain,
    expert_ends,
    next_tile,
    publish,
    say,
    take,
)
from .warpgroups import multiply


@gluon.jit
def _load_weight(
    dy, x, a, b, full, empty, queue, filled, free, m_sizes, counter, M, N, K, E, m_sizes_step,
    BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    EXPERTS: gl.constexpr,
):  # fmt: skip
    """The loading warp of dW: both operands end with the expert's rows, see ``kernels/abi.py``, RAGGED_SIZES."""
    WARPS: gl.constexpr = 1
    layout: gl.constexpr = gl.BlockedLayout([EXPERTS // 32], [32], [1], [0])
    half_bytes: gl.constexpr = 64 * BLOCK_M * x.dtype.primitive_bitwidth // 8
    b_bytes: gl.constexpr = BLOCK_K * BLOCK_M * x.dtype.primitive_bitwidth // 8
    tiles_n = gl.cdiv(N, 128)
    tiles_k = gl.cdiv(K, BLOCK_K)
    per_expert = tiles_n * tiles_k
    per_group = GROUP_M * tiles_k
    total = E * per_expert
    _count, end = expert_ends(m_sizes, m_sizes_step, M, E, EXPERTS, layout)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    slot = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    tile = gl.program_id(0)
    while tile < total:
        expert = tile // per_expert
        inner = tile - expert * per_expert
        group = inner // per_group
        first = group * GROUP_M
        height = gl.minimum(tiles_n - first, GROUP_M)
        rest = inner - group * per_group
        n = (first + rest % height) * 128
        k = rest // height
        i = gl.arange(0, EXPERTS, layout=layout)
        row_start = gl.max(gl.where(i < expert, end, 0), 0)
        row_end = gl.max(gl.where(i <= expert, end, 0), 0)
        count = row_end - row_start
        steps = gl.cdiv(count, BLOCK_M)
        publish(queue, filled, free, slot, turn, n, 2 * k, N, steps | (expert << 20), WARPS)
        slot, turn = advance(slot, turn, 2)
        drawn = gl.atomic_add(counter, 1, sem="relaxed")  # looked at when this tile's loads are under way
        both = n + 64 < N
        for row in range(0, count, BLOCK_M):
            mbarrier.wait(empty.index(stage), phase ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, half_bytes + b_bytes, pred=both == 0)
            mbarrier.expect(bar, 2 * half_bytes + b_bytes, pred=both)
            at = INDEX_END - count + row
            left = a.index(stage * 2)._reinterpret(x.dtype, [1, 1, BLOCK_M, 64], dy.layout)
            right = a.index(stage * 2 + 1)._reinterpret(x.dtype, [1, 1, BLOCK_M, 64], dy.layout)
            tma.async_copy_global_to_shared(dy, [INDEX_END, row_end, at, n], bar, left)
            tma.async_copy_global_to_shared(dy, [INDEX_END, row_end, at, n + 64], bar, right, pred=both)
            b_tile = b.index(stage * 2)._reinterpret(x.dtype, [1, 1, BLOCK_M, BLOCK_K], x.layout)
            tma.async_copy_global_to_shared(x, [INDEX_END, row_end, at, k * BLOCK_K], bar, b_tile)
            stage, phase = advance(stage, phase, STAGES)
        tile = next_tile(counter, drawn, total)
    publish(queue, filled, free, slot, turn, -1, 0, 0, 0, WARPS)


@gluon.jit
def _load_weight_pairs(
    dy, x, a, b, full, empty, queue, filled, free, m_sizes, counter, M, N, K, E, m_sizes_step,
    BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    EXPERTS: gl.constexpr, TALL: gl.constexpr,
):  # fmt: skip
    """``_load_weight`` of a cluster: two tiles that share x's columns (TALL), or dy's. Each loads half of what both read.

    The first program draws pairs of tiles and tells the other.
    """
    layout: gl.constexpr = gl.BlockedLayout([EXPERTS // 32], [32], [1], [0])
    ROWS: gl.constexpr = 256 if TALL else 128
    COLUMNS: gl.constexpr = BLOCK_K if TALL else 2 * BLOCK_K
    GROUP: gl.constexpr = GROUP_M * 128 // ROWS if GROUP_M * 128 >= ROWS else 1
    half_bytes: gl.constexpr = 64 * BLOCK_M * x.dtype.primitive_bitwidth // 8
    b_bytes: gl.constexpr = BLOCK_K * BLOCK_M * x.dtype.primitive_bitwidth // 8
    rank = gl.program_id(0) % 2
    tiles_n = gl.cdiv(N, ROWS)
    tiles_k = gl.cdiv(K, COLUMNS)
    per_expert = tiles_n * tiles_k
    per_group = GROUP * tiles_k
    total = E * per_expert
    _count, end = expert_ends(m_sizes, m_sizes_step, M, E, EXPERTS, layout)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    slot = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    n = gl.to_tensor(0)
    drawn = gl.to_tensor(0)
    tile = gl.program_id(0) // 2
    while n >= 0:
        if rank == 0:
            expert = tile // per_expert
            inner = tile - expert * per_expert
            group = inner // per_group
            first = group * GROUP
            height = gl.minimum(tiles_n - first, GROUP)
            rest = inner - group * per_group
            n = gl.where(tile < total, (first + rest % height) * ROWS, -1)
            col = rest // height * (COLUMNS * 2 // BLOCK_K)
            i = gl.arange(0, EXPERTS, layout=layout)
            row_start = gl.max(gl.where(i < expert, end, 0), 0)
            row_end = gl.max(gl.where(i <= expert, end, 0), 0)
            word = gl.cdiv(row_end - row_start, BLOCK_M) | (expert << 20)
            publish(queue, filled, free, slot, turn, n, col, N, word, 1, True)
        else:
            mbarrier.expect(filled.index(slot), 16)
            n, col, _limit, word = take(queue, filled, free, slot, turn, True, 1)
        slot, turn = advance(slot, turn, 2)
        if n >= 0:
            if rank == 0:
                drawn = gl.atomic_add(counter, 1, sem="relaxed")  # looked at when this tile's loads are under way
            expert = (word >> 20) & 0x3FF
            i = gl.arange(0, EXPERTS, layout=layout)
            row_start = gl.max(gl.where(i < expert, end, 0), 0)
            row_end = gl.max(gl.where(i <= expert, end, 0), 0)
            count = row_end - row_start
            k = col // 2 * BLOCK_K
            mine = n
            if TALL:
                mine += rank * 128
            else:
                k += rank * BLOCK_K
            one = mine < N
            both = mine + 64 < N
            has_k = k < K
            for row in range(0, count, BLOCK_M):
                mbarrier.wait(empty.index(stage), phase ^ 1)
                bar = full.index(stage)
                at = INDEX_END - count + row
                if TALL:
                    mbarrier.expect(bar, b_bytes, pred=one == 0)
                    mbarrier.expect(bar, half_bytes + b_bytes, pred=one & (both == 0))
                    mbarrier.expect(bar, 2 * half_bytes + b_bytes, pred=both)
                    left = a.index(stage * 2)._reinterpret(x.dtype, [1, 1, BLOCK_M, 64], dy.layout)
                    right = a.index(stage * 2 + 1)._reinterpret(x.dtype, [1, 1, BLOCK_M, 64], dy.layout)
                    tma.async_copy_global_to_shared(dy, [INDEX_END, row_end, at, mine], bar, left, pred=one)
                    tma.async_copy_global_to_shared(dy, [INDEX_END, row_end, at, mine + 64], bar, right, pred=both)
                    b_tile = b.index(stage * 2 + rank)._reinterpret(x.dtype, [1, 1, BLOCK_M, BLOCK_K // 2], x.layout)
                    say(True, BOTH)
                    tma.async_copy_global_to_shared(
                        x, [INDEX_END, row_end, at, k + rank * (BLOCK_K // 2)], bar, b_tile
                    )
                    say(True, END)
                else:
                    mbarrier.expect(bar, half_bytes, pred=(both == 0) & (has_k == 0))
                    mbarrier.expect(bar, half_bytes + b_bytes, pred=(both == 0) & has_k)
                    mbarrier.expect(bar, 2 * half_bytes, pred=both & (has_k == 0))
                    mbarrier.expect(bar, 2 * half_bytes + b_bytes, pred=both & has_k)
                    a_tile = a.index(stage * 2 + rank)._reinterpret(x.dtype, [1, 1, BLOCK_M, 64], dy.layout)
                    say(True, BOTH)
                    tma.async_copy_global_to_shared(
                        dy, [INDEX_END, row_end, at, n + rank * 64], bar, a_tile, pred=both | (rank == 0)
                    )
                    say(True, END)
                    b_tile = b.index(stage * 2)._reinterpret(x.dtype, [1, 1, BLOCK_M, BLOCK_K], x.layout)
                    tma.async_copy_global_to_shared(x, [INDEX_END, row_end, at, k], bar, b_tile, pred=has_k)
                stage, phase = advance(stage, phase, STAGES)
            if rank == 0:
                if drawn == total - 1:
                    gl.store(counter, 0)
                tile = gl.num_programs(0) // 2 + drawn
    drain(empty, free, stage, phase, slot, turn, rank == 0, STAGES)


@gluon.jit
def weight_specialized(
    dy, x, dw, m_sizes, counter, M, N, K, E, stride_dy_m, stride_x_m, stride_dw_e, stride_dw_row, m_sizes_step,
    BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, GROUP_M: gl.constexpr,
    EXPERTS: gl.constexpr, REGISTERS: gl.constexpr, CLUSTER: gl.constexpr = 0,
):  # fmt: skip
    """dw[e, n, k] = sum over the expert's rows m of dy[m, n] * x[m, k]: ``grad_weight.weight``.

    All three are TMA descriptors.
    """
    element: gl.constexpr = x.dtype
    lines: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    a = gl.allocate_shared_memory(element, [2 * STAGES, BLOCK_M, 64], lines)
    b = gl.allocate_shared_memory(element, [2 * STAGES, BLOCK_M, BLOCK_K // 2], lines)
    buffers = gl.allocate_shared_memory(element, [2 * SLOTS, 64, 64], lines)
    full, empty, queue, filled, free = barriers(STAGES, 1, CLUSTER)
    gl.barrier()
    ROW_STEP: gl.constexpr = 128 if CLUSTER == 1 else 0
    COL_STEP: gl.constexpr = 2 if CLUSTER == 2 else 0
    if CLUSTER:
        gl.warp_specialize(
            [
                (multiply, (
                    0, a, b, full, empty, queue, filled, free, buffers, dw, (), K, stride_dw_row, BLOCK_K, STAGES, SLOTS,
                    False, False, True, False, False, False, False, CLUSTER, ROW_STEP, COL_STEP,
                )),
                (multiply, (
                    1, a, b, full, empty, queue, filled, free, buffers, dw, (), K, stride_dw_row, BLOCK_K, STAGES, SLOTS,
                    False, False, True, False, False, False, False, CLUSTER, ROW_STEP, COL_STEP,
                )),
                (_load_weight_pairs, (
                    dy, x, a, b, full, empty, queue, filled, free, m_sizes, counter, M, N, K, E, m_sizes_step, BLOCK_M,
                    BLOCK_K, STAGES, GROUP_M, EXPERTS, CLUSTER == 1,
                )),
            ],
            [4, 1],
            [REGISTERS, 504 - 2 * REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (multiply, (
                    0, a, b, full, empty, queue, filled, free, buffers, dw, (), K, stride_dw_row, BLOCK_K, STAGES, SLOTS,
                    False, False, True, False, False, False, False, CLUSTER, ROW_STEP, COL_STEP,
                )),
                (multiply, (
                    1, a, b, full, empty, queue, filled, free, buffers, dw, (), K, stride_dw_row, BLOCK_K, STAGES, SLOTS,
                    False, False, True, False, False, False, False, CLUSTER, ROW_STEP, COL_STEP,
                )),
                (_load_weight, (
                    dy, x, a, b, full, empty, queue, filled, free, m_sizes, counter, M, N, K, E, m_sizes_step, BLOCK_M,
                    BLOCK_K, STAGES, GROUP_M, EXPERTS,
                )),
            ],
            [4, 1],
            [REGISTERS, 504 - 2 * REGISTERS],
        )  # fmt: skip
