# ruff: noqa
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .pipeline import (
    INDEX_END,
    add,
    advance,
    barriers,
    before,
    begin,
    draw,
    expert_ends,
    grouped,
    next_tile,
    publish,
    take,
    told,
)
from .warpgroups import _halves


@gluon.jit
def _load_across(
    x, w, a, b, full, empty, queue, filled, free, m_sizes, counter, M, N, K, E, m_sizes_step,
    TOKENS: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    EXPERTS: gl.constexpr, W_KN: gl.constexpr, GRAIN: gl.constexpr, XBOX: gl.constexpr, AH: gl.constexpr, WB: gl.constexpr, BAL: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([EXPERTS // 32], [32], [1], [0])
    w_bytes: gl.constexpr = AH * 64 * BLOCK_K * 2
    x_bytes: gl.constexpr = XBOX * BLOCK_K * 2
    tiles_n = gl.cdiv(N, 64 * AH)
    steps = gl.cdiv(K, BLOCK_K)
    count, end = expert_ends(m_sizes, m_sizes_step, M, E, EXPERTS, layout)
    tile_end = gl.associative_scan(gl.cdiv(count, TOKENS) * tiles_n, 0, add)
    total = gl.max(tile_end, 0)
    dealt = gl.num_programs(0)
    draw_at = gl.maximum(steps - 4, 0) * BLOCK_K
    stage, phase, slot, turn = begin()
    tile = gl.program_id(0)
    while tile < total:
        done = tile_end <= tile
        expert = gl.sum(done.to(gl.int32), 0)
        first_tile = gl.max(gl.where(done, tile_end, 0), 0)
        row_start = gl.max(gl.where(done, end, 0), 0)
        row_end = gl.min(gl.where(done, M, end), 0)
        rows = row_end - row_start
        chunks = gl.cdiv(rows, TOKENS)
        size = gl.to_tensor(TOKENS)
        if BAL:
            size = gl.cdiv(gl.cdiv(rows, chunks), GRAIN) * GRAIN
        row_tile, col = grouped(tile - first_tile, chunks, tiles_n, GROUP_M)
        row = row_start + row_tile * size
        mine = gl.minimum(size, row_end - row)
        level = gl.cdiv(mine, GRAIN)
        word = steps | (expert << 20)
        publish(queue, filled, free, slot, turn, row, col | (level << 20), row_end, word, 1)
        slot, turn = advance(slot, turn, 2)
        drawn = gl.to_tensor(0)
        boxes = gl.cdiv(mine, XBOX)
        for start in range(0, K, BLOCK_K):
            if start == draw_at:
                drawn = draw(counter)
            mbarrier.wait(empty.index(stage), phase ^ 1)
            bar = full.index(stage)
            for i in gl.static_range(TOKENS // XBOX):
                mbarrier.expect(bar, w_bytes + (i + 1) * x_bytes, pred=boxes == i + 1)
            if WB == 1:
                whole = a.index(stage * AH)._reinterpret(w.dtype, [1, 64 * AH, BLOCK_K], w.layout)
                tma.async_copy_global_to_shared(w, [expert, col * 64 * AH, start], bar, whole)
            for h in gl.static_range(AH if WB != 1 else 0):
                part = a.index(stage * AH + h)
                if W_KN:
                    part = part._reinterpret(w.dtype, [1, BLOCK_K, 64], w.layout)
                    tma.async_copy_global_to_shared(w, [expert, start, col * 64 * AH + h * 64], bar, part)
                else:
                    part = part._reinterpret(w.dtype, [1, 64, BLOCK_K], w.layout)
                    tma.async_copy_global_to_shared(w, [expert, col * 64 * AH + h * 64, start], bar, part)
            for i in gl.static_range(TOKENS // XBOX):
                here = i < boxes
                tma.async_copy_global_to_shared(
                    x, [row + i * XBOX, start], bar, b.index(stage * (TOKENS // XBOX) + i), pred=here
                )
            stage, phase = advance(stage, phase, STAGES)
        tile = next_tile(counter, told(drawn), dealt, total)
    publish(queue, filled, free, slot, turn, -1, 0, 0, 0, 1)


@gluon.jit
def _mark(WIDTH: gl.constexpr):
    if WIDTH == 32:
        gl.inline_asm_elementwise("// tokens 32\n mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    elif WIDTH == 64:
        gl.inline_asm_elementwise("// tokens 64\n mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    elif WIDTH == 96:
        gl.inline_asm_elementwise("// tokens 96\n mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    elif WIDTH == 128:
        gl.inline_asm_elementwise("// tokens 128\n mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    elif WIDTH == 160:
        gl.inline_asm_elementwise("// tokens 160\n mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    elif WIDTH == 192:
        gl.inline_asm_elementwise("// tokens 192\n mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    elif WIDTH == 224:
        gl.inline_asm_elementwise("// tokens 224\n mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    elif WIDTH == 256:
        gl.inline_asm_elementwise("// tokens 256\n mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _products(
    a,
    b,
    full,
    empty,
    half,
    acc,
    stage,
    phase,
    steps,
    WIDTH: gl.constexpr,
    TOKENS: gl.constexpr,
    XBOX: gl.constexpr,
    STAGES: gl.constexpr,
    A_MK: gl.constexpr,
    AH: gl.constexpr,
):
    """The sums of the first WIDTH tokens: written for TOKENS, cut in the PTX."""
    DEPTH: gl.constexpr = b.shape[2]
    for step in range(steps):
        mbarrier.wait(full.index(stage), phase)
        a_tile = a.index(stage * AH + half)
        if not A_MK:
            a_tile = a_tile.permute((1, 0))
        b_tile = b.index(stage * (TOKENS // XBOX))._reinterpret(b.dtype, [TOKENS, DEPTH], b.layout).permute((1, 0))
        _mark(WIDTH)
        acc = warpgroup_mma(a_tile, b_tile, acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
        gl.barrier()
        mbarrier.arrive(empty.index(before(stage, STAGES)), count=1, pred=step > 0)
        stage, phase = advance(stage, phase, STAGES)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    _mark(WIDTH)
    return acc, stage, phase


@gluon.jit
def _multiply_across(
    half, a, b, full, empty, queue, filled, free, buffers, y_map,
    TOKENS: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, A_MK: gl.constexpr, GRAIN: gl.constexpr,
    XBOX: gl.constexpr, AH: gl.constexpr,
):  # fmt: skip
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TOKENS, 16])
    LEVELS: gl.constexpr = TOKENS // GRAIN
    stage, phase, slot, turn = begin()
    row, place, row_end, word = take(queue, filled, free, slot, turn)
    while row >= 0:
        slot, turn = advance(slot, turn, 2)
        steps = word & 0xFFFFF
        level = place >> 20
        col = (place & 0xFFFFF) * 64 * AH + half * 64
        acc = gl.zeros([64, TOKENS], gl.float32, mma)
        if level <= LEVELS // 2:
            if level <= LEVELS // 4:
                if (LEVELS == 8) and (level == 1):
                    acc, stage, phase = _products(
                        a, b, full, empty, half, acc, stage, phase, steps, TOKENS // 8, TOKENS, XBOX, STAGES, A_MK, AH
                    )
                else:
                    acc, stage, phase = _products(
                        a, b, full, empty, half, acc, stage, phase, steps, TOKENS // 4, TOKENS, XBOX, STAGES, A_MK, AH
                    )
            else:
                if (LEVELS == 8) and (level == 3):
                    acc, stage, phase = _products(
                        a,
                        b,
                        full,
                        empty,
                        half,
                        acc,
                        stage,
                        phase,
                        steps,
                        TOKENS * 3 // 8,
                        TOKENS,
                        XBOX,
                        STAGES,
                        A_MK,
                        AH,
                    )
                else:
                    acc, stage, phase = _products(
                        a, b, full, empty, half, acc, stage, phase, steps, TOKENS // 2, TOKENS, XBOX, STAGES, A_MK, AH
                    )
        else:
            if level <= LEVELS * 3 // 4:
                if (LEVELS == 8) and (level == 5):
                    acc, stage, phase = _products(
                        a,
                        b,
                        full,
                        empty,
                        half,
                        acc,
                        stage,
                        phase,
                        steps,
                        TOKENS * 5 // 8,
                        TOKENS,
                        XBOX,
                        STAGES,
                        A_MK,
                        AH,
                    )
                else:
                    acc, stage, phase = _products(
                        a,
                        b,
                        full,
                        empty,
                        half,
                        acc,
                        stage,
                        phase,
                        steps,
                        TOKENS * 3 // 4,
                        TOKENS,
                        XBOX,
                        STAGES,
                        A_MK,
                        AH,
                    )
            else:
                if (LEVELS == 8) and (level == 7):
                    acc, stage, phase = _products(
                        a,
                        b,
                        full,
                        empty,
                        half,
                        acc,
                        stage,
                        phase,
                        steps,
                        TOKENS * 7 // 8,
                        TOKENS,
                        XBOX,
                        STAGES,
                        A_MK,
                        AH,
                    )
                else:
                    acc, stage, phase = _products(
                        a, b, full, empty, half, acc, stage, phase, steps, TOKENS, TOKENS, XBOX, STAGES, A_MK, AH
                    )
        gl.barrier()
        mbarrier.arrive(empty.index(before(stage, STAGES)), count=1)
        end = gl.minimum(row_end, row + level * GRAIN)
        left, right = _halves(acc.to(buffers.dtype))
        parts = _halves(left) + _halves(right)
        for i in gl.static_range(TOKENS // 64):
            if row + 64 * i < end:
                buffer = buffers.index(half * SLOTS + i % SLOTS)
                tma.store_wait(SLOTS - 1)
                gl.barrier()
                buffer.permute((1, 0)).store(parts[i])
                fence_async_shared()
                gl.barrier()
                box = buffer._reinterpret(buffers.dtype, [1, 1, 64, 64], y_map.layout)
                tma.async_copy_shared_to_global(y_map, [INDEX_END, end, INDEX_END - end + row + 64 * i, col], box)
        row, place, row_end, word = take(queue, filled, free, slot, turn)
    tma.store_wait(0)


@gluon.jit
def rows_specialized(
    x, w, y, y_map, m_sizes, index, row_weights, bias, counter, M, N, K, E, stride_x_m, stride_w_e, stride_w_row,
    stride_y_m, m_sizes_step, index_step, index_end, x_divisor, flags,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, GROUP_M: gl.constexpr,
    EXPERTS: gl.constexpr, W_KN: gl.constexpr, TOKENS: gl.constexpr, GRAIN: gl.constexpr, XBOX: gl.constexpr, REGISTERS: gl.constexpr, WB: gl.constexpr, BAL: gl.constexpr,
):  # fmt: skip
    element: gl.constexpr = w.dtype
    AH: gl.constexpr = 2
    lines: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    if W_KN:
        a = gl.allocate_shared_memory(element, [AH * STAGES, BLOCK_K, 64], lines)
    else:
        a = gl.allocate_shared_memory(element, [AH * STAGES, 64, BLOCK_K], lines)
    b = gl.allocate_shared_memory(element, [TOKENS // XBOX * STAGES, XBOX, BLOCK_K], lines)
    buffers = gl.allocate_shared_memory(element, [2 * SLOTS, 64, 64], lines)
    full, empty, queue, filled, free = barriers(STAGES, 1, 2, 2)
    gl.barrier()
    gl.warp_specialize(
        [
            (_multiply_across, (0, a, b, full, empty, queue, filled, free, buffers, y_map, TOKENS, STAGES, SLOTS, not W_KN, GRAIN, XBOX, AH)),
            (_multiply_across, (1, a, b, full, empty, queue, filled, free, buffers, y_map, TOKENS, STAGES, SLOTS, not W_KN, GRAIN, XBOX, AH)),
            (_load_across, (
                x, w, a, b, full, empty, queue, filled, free, m_sizes, counter, M, N, K, E, m_sizes_step,
                TOKENS, BLOCK_K, STAGES, GROUP_M, EXPERTS, W_KN, GRAIN, XBOX, AH, WB, BAL,
            )),
        ],
        [4, 1],
        [REGISTERS, 504 - 2 * REGISTERS],
    )  # fmt: skip
