# ruff: noqa
"""Pingpong by clusters of two programs whose tiles lie beside each other: the rows that both read are loaded once."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from .pipeline import (
    BOTH,
    END,
    INDEX_END,
    add,
    advance,
    barriers,
    counts,
    drain,
    expert_ends,
    grouped,
    publish,
    say,
    take,
)
from .turns import multiply_in_turns, ordering, publish_turn


@gluon.jit
def _row_tile(tile_end, end, number, total, M, steps, pairs_n, GROUP_M: gl.constexpr, PROGRAMS: gl.constexpr):
    done = tile_end <= number
    expert = gl.sum(done.to(gl.int32), 0)
    first_tile = gl.max(gl.where(done, tile_end, 0), 0)
    row_start = gl.max(gl.where(done, end, 0), 0)
    row_end = gl.min(gl.where(done, M, end), 0)
    tiles_m = gl.maximum(gl.cdiv(row_end - row_start, 128), 1)
    tile_m, tile_n = grouped(number - first_tile, tiles_m, pairs_n, GROUP_M)
    row = gl.where(number < total, row_start + tile_m * 128, -1)
    return row, tile_n * PROGRAMS, row_end, steps | (expert << 20)


@gluon.jit
def _weight_tile(
    end, tile, total, N, per_expert, tiles_n, tiles_k, GROUP_M: gl.constexpr, PROGRAMS: gl.constexpr,
    BLOCK_M: gl.constexpr, EXPERTS: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    expert = tile // per_expert
    n, k = grouped(tile - expert * per_expert, tiles_n, tiles_k, GROUP_M)
    n = gl.where(tile < total, n * 128, -1)
    i = gl.arange(0, EXPERTS, layout=LAYOUT)
    count = gl.max(gl.where(i <= expert, end, 0), 0) - gl.max(gl.where(i < expert, end, 0), 0)
    return n, k * PROGRAMS, N, gl.cdiv(count, BLOCK_M) | (expert << 20)


@gluon.jit
def _load_rows_pair(
    x, w, a, b, full, empty, queue, filled, free, m_sizes, counter, M, N, K, E, m_sizes_step,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    EXPERTS: gl.constexpr, W_KN: gl.constexpr, PARTS: gl.constexpr, CLUSTER: gl.constexpr, DYN: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([EXPERTS // 32], [32], [1], [0])
    SENT: gl.constexpr = CLUSTER == 2
    PROGRAMS: gl.constexpr = 2 if CLUSTER else 1
    half_bytes: gl.constexpr = 64 * BLOCK_K * w.dtype.primitive_bitwidth // 8
    b_bytes: gl.constexpr = BLOCK_N * BLOCK_K * w.dtype.primitive_bitwidth // 8
    rank = gl.program_id(0) % PROGRAMS
    clusters = gl.num_programs(0) // PROGRAMS
    pairs_n = gl.cdiv(N, PROGRAMS * BLOCK_N)
    steps = gl.cdiv(K, BLOCK_K)
    count, end = expert_ends(m_sizes, m_sizes_step, M, E, EXPERTS, layout)
    tile_end = gl.associative_scan((count // 128 + (count % 128 != 0).to(gl.int32)) * pairs_n, 0, add)
    total = gl.max(tile_end, 0)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    slot = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    row = gl.to_tensor(0)
    drawn = gl.to_tensor(0)
    number = gl.program_id(0) // PROGRAMS
    while row >= 0:
        if SENT:
            if rank == 1:
                mbarrier.expect(filled.index(slot), 16)
                row, col, row_end, word = take(queue, filled, free, slot, turn, True, 1)
                col = col & 0xFFFFF
            else:
                row, col, row_end, word = _row_tile(tile_end, end, number, total, M, steps, pairs_n, GROUP_M, PROGRAMS)
                publish_turn(queue, filled, free, slot, turn, row, col, row_end, word, stage, phase, 1, True)
        else:
            row, col, row_end, word = _row_tile(tile_end, end, number, total, M, steps, pairs_n, GROUP_M, PROGRAMS)
            publish_turn(queue, filled, free, slot, turn, row, col, row_end, word, stage, phase, 1)
        slot, turn = advance(slot, turn, 2)
        if row >= 0:
            if SENT:
                if rank == 0:
                    drawn = gl.atomic_add(counter, 1, sem="relaxed")
            elif DYN:
                drawn = gl.atomic_add(counter, 1, sem="relaxed")
            expert = (word >> 20) & 0x3FF
            both = row + 64 < row_end
            for start in range(0, K, BLOCK_K):
                mbarrier.wait(empty.index(stage), phase ^ 1)
                bar = full.index(stage)
                mbarrier.expect(bar, half_bytes + b_bytes, pred=both == 0)
                mbarrier.expect(bar, 2 * half_bytes + b_bytes, pred=both)
                if CLUSTER:
                    say(True, BOTH)
                    tma.async_copy_global_to_shared(
                        x, [row + rank * 64, start], bar, a.index(stage * 2 + rank), pred=both | (rank == 0)
                    )
                    say(True, END)
                else:
                    tma.async_copy_global_to_shared(x, [row, start], bar, a.index(stage * 2))
                    tma.async_copy_global_to_shared(x, [row + 64, start], bar, a.index(stage * 2 + 1), pred=both)
                for j in gl.static_range(PARTS):
                    part = b.index(stage * PARTS + j)
                    n = (col + rank) * BLOCK_N + j * 64
                    if W_KN:
                        part = part._reinterpret(w.dtype, [1, BLOCK_K, 64], w.layout)
                        tma.async_copy_global_to_shared(w, [expert, start, n], bar, part)
                    else:
                        part = part._reinterpret(w.dtype, [1, 64, BLOCK_K], w.layout)
                        tma.async_copy_global_to_shared(w, [expert, n, start], bar, part)
                stage, phase = advance(stage, phase, STAGES)
            if SENT:
                if rank == 0:
                    if drawn == total - 1:
                        gl.store(counter, 0)
                    number = clusters + drawn
            elif DYN:
                if drawn == total - 1:
                    gl.store(counter, 0)
                number = clusters + drawn
            else:
                number += clusters
    # each warpgroup has a slot of its own
    if SENT:
        if rank == 1:
            mbarrier.expect(filled.index(slot), 16)
            take(queue, filled, free, slot, turn, True, 1)
        else:
            publish(queue, filled, free, slot, turn, -1, 0, 0, 0, 1, True)
    else:
        publish(queue, filled, free, slot, turn, -1, 0, 0, 0, 1)
    slot, turn = advance(slot, turn, 2)
    if CLUSTER:
        drain(empty, free, stage, phase, slot, turn, rank == 0, STAGES, SENT)


@gluon.jit
def _load_weight_pair(
    dy, x, a, b, full, empty, queue, filled, free, m_sizes, counter, M, N, K, E, m_sizes_step,
    BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    EXPERTS: gl.constexpr, PARTS: gl.constexpr, CLUSTER: gl.constexpr, DYN: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([EXPERTS // 32], [32], [1], [0])
    SENT: gl.constexpr = CLUSTER == 2
    PROGRAMS: gl.constexpr = 2 if CLUSTER else 1
    half_bytes: gl.constexpr = 64 * BLOCK_M * x.dtype.primitive_bitwidth // 8
    b_bytes: gl.constexpr = BLOCK_K * BLOCK_M * x.dtype.primitive_bitwidth // 8
    rank = gl.program_id(0) % PROGRAMS
    clusters = gl.num_programs(0) // PROGRAMS
    tiles_n = gl.cdiv(N, 128)
    tiles_k = gl.cdiv(K, PROGRAMS * BLOCK_K)
    per_expert = tiles_n * tiles_k
    total = E * per_expert
    _count, end = expert_ends(m_sizes, m_sizes_step, M, E, EXPERTS, layout)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    slot = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    drawn = gl.to_tensor(0)
    n = gl.to_tensor(0)
    tile = gl.program_id(0) // PROGRAMS
    while n >= 0:
        if SENT:
            if rank == 1:
                mbarrier.expect(filled.index(slot), 16)
                n, k, limit, word = take(queue, filled, free, slot, turn, True, 1)
                k = k & 0xFFFFF
            else:
                n, k, limit, word = _weight_tile(
                    end, tile, total, N, per_expert, tiles_n, tiles_k, GROUP_M, PROGRAMS, BLOCK_M, EXPERTS, layout
                )  # fmt: skip
                publish_turn(queue, filled, free, slot, turn, n, k, limit, word, stage, phase, 1, True)
        else:
            n, k, limit, word = _weight_tile(
                end, tile, total, N, per_expert, tiles_n, tiles_k, GROUP_M, PROGRAMS, BLOCK_M, EXPERTS, layout
            )  # fmt: skip
            publish_turn(queue, filled, free, slot, turn, n, k, limit, word, stage, phase, 1)
        slot, turn = advance(slot, turn, 2)
        if n >= 0:
            if SENT:
                if rank == 0:
                    drawn = gl.atomic_add(counter, 1, sem="relaxed")
            elif DYN:
                drawn = gl.atomic_add(counter, 1, sem="relaxed")
            expert = (word >> 20) & 0x3FF
            i = gl.arange(0, EXPERTS, layout=layout)
            row_end = gl.max(gl.where(i <= expert, end, 0), 0)
            count = row_end - gl.max(gl.where(i < expert, end, 0), 0)
            both = n + 64 < N
            for row in range(0, count, BLOCK_M):
                mbarrier.wait(empty.index(stage), phase ^ 1)
                bar = full.index(stage)
                mbarrier.expect(bar, half_bytes + b_bytes, pred=both == 0)
                mbarrier.expect(bar, 2 * half_bytes + b_bytes, pred=both)
                at = INDEX_END - count + row
                if CLUSTER:
                    mine = a.index(stage * 2 + rank)._reinterpret(x.dtype, [1, 1, BLOCK_M, 64], dy.layout)
                    say(True, BOTH)
                    tma.async_copy_global_to_shared(
                        dy, [INDEX_END, row_end, at, n + rank * 64], bar, mine, pred=both | (rank == 0)
                    )
                    say(True, END)
                else:
                    left = a.index(stage * 2)._reinterpret(x.dtype, [1, 1, BLOCK_M, 64], dy.layout)
                    right = a.index(stage * 2 + 1)._reinterpret(x.dtype, [1, 1, BLOCK_M, 64], dy.layout)
                    tma.async_copy_global_to_shared(dy, [INDEX_END, row_end, at, n], bar, left)
                    tma.async_copy_global_to_shared(dy, [INDEX_END, row_end, at, n + 64], bar, right, pred=both)
                for j in gl.static_range(PARTS):
                    part = b.index(stage * PARTS + j)._reinterpret(x.dtype, [1, 1, BLOCK_M, 64], x.layout)
                    column = (k + rank) * BLOCK_K + j * 64
                    tma.async_copy_global_to_shared(x, [INDEX_END, row_end, at, column], bar, part)
                stage, phase = advance(stage, phase, STAGES)
            if SENT:
                if rank == 0:
                    if drawn == total - 1:
                        gl.store(counter, 0)
                    tile = clusters + drawn
            elif DYN:
                if drawn == total - 1:
                    gl.store(counter, 0)
                tile = clusters + drawn
            else:
                tile += clusters
    if SENT:
        if rank == 1:
            mbarrier.expect(filled.index(slot), 16)
            take(queue, filled, free, slot, turn, True, 1)
        else:
            publish(queue, filled, free, slot, turn, -1, 0, 0, 0, 1, True)
    else:
        publish(queue, filled, free, slot, turn, -1, 0, 0, 0, 1)
    slot, turn = advance(slot, turn, 2)
    if CLUSTER:
        drain(empty, free, stage, phase, slot, turn, rank == 0, STAGES, SENT)


@gluon.jit
def weight_specialized(
    dy, x, dw, m_sizes, counter, M, N, K, E, stride_dy_m, stride_x_m, stride_dw_e, stride_dw_row, m_sizes_step,
    BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, GROUP_M: gl.constexpr,
    EXPERTS: gl.constexpr, PARTS: gl.constexpr, CLUSTER: gl.constexpr, DYN: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    element: gl.constexpr = x.dtype
    lines: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    a = gl.allocate_shared_memory(element, [2 * STAGES, BLOCK_M, 64], lines)
    b = gl.allocate_shared_memory(element, [PARTS * STAGES + (1 if PARTS == 3 else 0), BLOCK_M, 64], lines)
    buffers = gl.allocate_shared_memory(element, [2, 64, 64], lines)
    order = ordering()
    full, empty, queue, filled, free = barriers(STAGES, 1, 1, CLUSTER)
    gl.barrier()
    gl.warp_specialize(
        [
            (multiply_in_turns, (
                0, a, b, full, empty, order, queue, filled, free, buffers, None, dw, (), K, stride_dw_row, STAGES,
                False, False, True, False, False, PARTS, CLUSTER,
            )),
            (multiply_in_turns, (
                1, a, b, full, empty, order, queue, filled, free, buffers, None, dw, (), K, stride_dw_row, STAGES,
                False, False, True, False, False, PARTS, CLUSTER,
            )),
            (_load_weight_pair, (
                dy, x, a, b, full, empty, queue, filled, free, m_sizes, counter, M, N, K, E, m_sizes_step, BLOCK_M,
                BLOCK_K, STAGES, GROUP_M, EXPERTS, PARTS, CLUSTER, DYN,
            )),
        ],
        [4, 1],
        [REGISTERS, 504 - 2 * REGISTERS],
    )  # fmt: skip


@gluon.jit
def rows_specialized(
    x, w, y, y_map, m_sizes, index, row_weights, bias, counter, M, N, K, E, stride_x_m, stride_w_e, stride_w_row,
    stride_y_m, m_sizes_step, index_step, index_end, x_divisor, flags,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, GROUP_M: gl.constexpr,
    EXPERTS: gl.constexpr, W_KN: gl.constexpr, PARTS: gl.constexpr, CLUSTER: gl.constexpr, DYN: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    element: gl.constexpr = w.dtype
    lines: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    a = gl.allocate_shared_memory(element, [2 * STAGES, 64, BLOCK_K], lines)
    COUNT: gl.constexpr = PARTS * STAGES + (1 if PARTS == 3 else 0)
    if W_KN:
        b = gl.allocate_shared_memory(element, [COUNT, BLOCK_K, 64], lines)
    else:
        b = gl.allocate_shared_memory(element, [COUNT, 64, BLOCK_K], lines)
    buffers = gl.allocate_shared_memory(element, [2, 64, 64], lines)
    order = ordering()
    full, empty, queue, filled, free = barriers(STAGES, 1, 1, CLUSTER)
    gl.barrier()
    gl.warp_specialize(
        [
            (multiply_in_turns, (
                0, a, b, full, empty, order, queue, filled, free, buffers, y, y_map, (), N, stride_y_m, STAGES,
                True, not W_KN, False, False, False, PARTS, CLUSTER,
            )),
            (multiply_in_turns, (
                1, a, b, full, empty, order, queue, filled, free, buffers, y, y_map, (), N, stride_y_m, STAGES,
                True, not W_KN, False, False, False, PARTS, CLUSTER,
            )),
            (_load_rows_pair, (
                x, w, a, b, full, empty, queue, filled, free, m_sizes, counter, M, N, K, E, m_sizes_step, BLOCK_N,
                BLOCK_K, STAGES, GROUP_M, EXPERTS, W_KN, PARTS, CLUSTER, DYN,
            )),
        ],
        [4, 1],
        [REGISTERS, 504 - 2 * REGISTERS],
    )  # fmt: skip
