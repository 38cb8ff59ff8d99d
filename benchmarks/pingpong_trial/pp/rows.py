from __future__ import annotations
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from .pipeline import add, advance, expert_ends, next_tile, publish
from .mul import multiply

@gluon.jit
def barriers(STAGES: gl.constexpr):
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    queue = gl.allocate_shared_memory(gl.int32, [2, 4], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    filled = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    order = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(filled.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
        mbarrier.init(order.index(i), count=1)
    return full, empty, order, queue, filled, free

@gluon.jit
def _load_rows(x, w, a, b, full, empty, queue, filled, free, m_sizes, counter, M, N, K, E, m_sizes_step,
    PARTS: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr, EXPERTS: gl.constexpr, W_KN: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([EXPERTS // 32], [32], [1], [0])
    half_bytes: gl.constexpr = 64 * BLOCK_K * w.dtype.primitive_bitwidth // 8
    BLOCK_N: gl.constexpr = PARTS * 64
    tiles_n = gl.cdiv(N, BLOCK_N)
    steps = gl.cdiv(K, BLOCK_K)
    count, end = expert_ends(m_sizes, m_sizes_step, M, E, EXPERTS, layout)
    tile_end = gl.associative_scan((count // 128 + (count % 128 != 0).to(gl.int32)) * tiles_n, 0, add)
    total = gl.max(tile_end, 0)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    slot = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    tile = gl.program_id(0)
    while tile < total:
        done = tile_end <= tile
        expert = gl.sum(done.to(gl.int32), 0)
        first_tile = gl.max(gl.where(done, tile_end, 0), 0)
        row_start = gl.max(gl.where(done, end, 0), 0)
        row_end = gl.min(gl.where(done, M, end), 0)
        inner = tile - first_tile
        tiles_m = gl.cdiv(row_end - row_start, 128)
        per_group = GROUP_M * tiles_n
        group = inner // per_group
        first = group * GROUP_M
        height = gl.minimum(tiles_m - first, GROUP_M)
        rest = inner - group * per_group
        row = row_start + (first + rest % height) * 128
        col = rest // height
        word = steps | (expert << 20)
        publish(queue, filled, free, slot, turn, row, col | (stage << 20) | (phase << 24), row_end, word, 1)
        slot, turn = advance(slot, turn, 2)
        drawn = gl.atomic_add(counter, 1, sem="relaxed")
        both = row + 64 < row_end
        for start in range(0, K, BLOCK_K):
            mbarrier.wait(empty.index(stage), phase ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, (1 + PARTS) * half_bytes, pred=both == 0)
            mbarrier.expect(bar, (2 + PARTS) * half_bytes, pred=both)
            tma.async_copy_global_to_shared(x, [row, start], bar, a.index(stage * 2))
            tma.async_copy_global_to_shared(x, [row + 64, start], bar, a.index(stage * 2 + 1), pred=both)
            for c in gl.static_range(PARTS):
                if W_KN:
                    box = b.index(stage * PARTS + c)._reinterpret(w.dtype, [1, BLOCK_K, 64], w.layout)
                    tma.async_copy_global_to_shared(w, [expert, start, col * BLOCK_N + 64 * c], bar, box)
                else:
                    box = b.index(stage * PARTS + c)._reinterpret(w.dtype, [1, 64, BLOCK_K], w.layout)
                    tma.async_copy_global_to_shared(w, [expert, col * BLOCK_N + 64 * c, start], bar, box)
            stage, phase = advance(stage, phase, STAGES)
        tile = next_tile(counter, drawn, total)
    publish(queue, filled, free, slot, turn, -1, 0, 0, 0, 1)
    slot, turn = advance(slot, turn, 2)
    publish(queue, filled, free, slot, turn, -1, 0, 0, 0, 1)

@gluon.jit
def rows_specialized(
    x, w, y, y_map, m_sizes, index, row_weights, bias, counter, M, N, K, E, stride_x_m, stride_w_e, stride_w_row,
    stride_y_m, m_sizes_step, index_step, index_end, x_divisor, flags,
    PARTS: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, GROUP_M: gl.constexpr,
    EXPERTS: gl.constexpr, W_KN: gl.constexpr, REGISTERS: gl.constexpr, SKIP: gl.constexpr,
):
    element: gl.constexpr = w.dtype
    PAD: gl.constexpr = 1 if PARTS == 3 else 0
    lines: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    a = gl.allocate_shared_memory(element, [2 * STAGES, 64, BLOCK_K], lines)
    if W_KN:
        b = gl.allocate_shared_memory(element, [PARTS * STAGES + PAD, BLOCK_K, 64], lines)
    else:
        b = gl.allocate_shared_memory(element, [PARTS * STAGES + PAD, 64, BLOCK_K], lines)
    buffers = gl.allocate_shared_memory(element, [2 * SLOTS, 64, 64], lines)
    full, empty, order, queue, filled, free = barriers(STAGES)
    gl.barrier()
    gl.warp_specialize(
        [
            (multiply, (0, a, b, full, empty, order, queue, filled, free, buffers, y_map, PARTS, STAGES, SLOTS, True, not W_KN, False, SKIP)),
            (multiply, (1, a, b, full, empty, order, queue, filled, free, buffers, y_map, PARTS, STAGES, SLOTS, True, not W_KN, False, SKIP)),
            (_load_rows, (x, w, a, b, full, empty, queue, filled, free, m_sizes, counter, M, N, K, E, m_sizes_step, PARTS, BLOCK_K, STAGES, GROUP_M, EXPERTS, W_KN)),
        ],
        [4, 1],
        [REGISTERS, 504 - 2 * REGISTERS],
    )
