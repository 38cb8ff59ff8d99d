from __future__ import annotations
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from .pipeline import INDEX_END, advance, expert_ends, next_tile, publish
from .mul import multiply
from .rows import barriers

@gluon.jit
def _load_weight(dy, x, a, b, full, empty, queue, filled, free, m_sizes, counter, M, N, K, E, m_sizes_step,
    BLOCK_M: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr, EXPERTS: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([EXPERTS // 32], [32], [1], [0])
    half_bytes: gl.constexpr = 64 * BLOCK_M * x.dtype.primitive_bitwidth // 8
    BLOCK_K: gl.constexpr = PARTS * 64
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
        word = steps | (expert << 20)
        publish(queue, filled, free, slot, turn, n, k | (stage << 20) | (phase << 24), N, word, 1)
        slot, turn = advance(slot, turn, 2)
        drawn = gl.atomic_add(counter, 1, sem="relaxed")
        both = n + 64 < N
        for row in range(0, count, BLOCK_M):
            mbarrier.wait(empty.index(stage), phase ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, (1 + PARTS) * half_bytes, pred=both == 0)
            mbarrier.expect(bar, (2 + PARTS) * half_bytes, pred=both)
            at = INDEX_END - count + row
            left = a.index(stage * 2)._reinterpret(x.dtype, [1, 1, BLOCK_M, 64], dy.layout)
            right = a.index(stage * 2 + 1)._reinterpret(x.dtype, [1, 1, BLOCK_M, 64], dy.layout)
            tma.async_copy_global_to_shared(dy, [INDEX_END, row_end, at, n], bar, left)
            tma.async_copy_global_to_shared(dy, [INDEX_END, row_end, at, n + 64], bar, right, pred=both)
            for c in gl.static_range(PARTS):
                box = b.index(stage * PARTS + c)._reinterpret(x.dtype, [1, 1, BLOCK_M, 64], x.layout)
                tma.async_copy_global_to_shared(x, [INDEX_END, row_end, at, k * BLOCK_K + 64 * c], bar, box)
            stage, phase = advance(stage, phase, STAGES)
        tile = next_tile(counter, drawn, total)
    publish(queue, filled, free, slot, turn, -1, 0, 0, 0, 1)
    slot, turn = advance(slot, turn, 2)
    publish(queue, filled, free, slot, turn, -1, 0, 0, 0, 1)

@gluon.jit
def weight_specialized(
    dy, x, dw, m_sizes, counter, M, N, K, E, stride_dy_m, stride_x_m, stride_dw_e, stride_dw_row, m_sizes_step,
    BLOCK_M: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, GROUP_M: gl.constexpr,
    EXPERTS: gl.constexpr, REGISTERS: gl.constexpr, SKIP: gl.constexpr,
):
    element: gl.constexpr = x.dtype
    PAD: gl.constexpr = 1 if PARTS == 3 else 0
    lines: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    a = gl.allocate_shared_memory(element, [2 * STAGES, BLOCK_M, 64], lines)
    b = gl.allocate_shared_memory(element, [PARTS * STAGES + PAD, BLOCK_M, 64], lines)
    buffers = gl.allocate_shared_memory(element, [2 * SLOTS, 64, 64], lines)
    full, empty, order, queue, filled, free = barriers(STAGES)
    gl.barrier()
    gl.warp_specialize(
        [
            (multiply, (0, a, b, full, empty, order, queue, filled, free, buffers, dw, PARTS, STAGES, SLOTS, False, False, True, SKIP)),
            (multiply, (1, a, b, full, empty, order, queue, filled, free, buffers, dw, PARTS, STAGES, SLOTS, False, False, True, SKIP)),
            (_load_weight, (dy, x, a, b, full, empty, queue, filled, free, m_sizes, counter, M, N, K, E, m_sizes_step, BLOCK_M, PARTS, STAGES, GROUP_M, EXPERTS)),
        ],
        [4, 1],
        [REGISTERS, 504 - 2 * REGISTERS],
    )
