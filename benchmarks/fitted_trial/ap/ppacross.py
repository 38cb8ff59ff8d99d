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
    take_all,
    told,
)
from .turns import ordering
from .warpgroups import _halves

BOX: gl.constexpr = gl.constexpr(64)


@gluon.jit
def _load(
    x, w, a, b, full, empty, queue, filled, free, m_sizes, counter, M, N, K, E, m_sizes_step,
    TOKENS: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    EXPERTS: gl.constexpr, W_KN: gl.constexpr, GRAIN: gl.constexpr, DEAL: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([EXPERTS // 32], [32], [1], [0])
    w_bytes: gl.constexpr = 128 * BLOCK_K * 2
    x_bytes: gl.constexpr = BOX * BLOCK_K * 2
    tiles_n = gl.cdiv(N, 128)
    steps = gl.cdiv(K, BLOCK_K)
    count, end = expert_ends(m_sizes, m_sizes_step, M, E, EXPERTS, layout)
    tile_end = gl.associative_scan(gl.cdiv(count, TOKENS) * tiles_n, 0, add)
    total = gl.max(tile_end, 0)
    dealt = gl.num_programs(0)
    if DEAL:
        rounds = total // gl.num_programs(0)
        dealt *= gl.where(rounds > 4, rounds - 2, rounds + 1)
    draw_at = gl.maximum(steps - 4, 0) * BLOCK_K
    stage, phase, slot, turn = begin()
    number = gl.program_id(0)
    while number < total:
        done = tile_end <= number
        expert = gl.sum(done.to(gl.int32), 0)
        first_tile = gl.max(gl.where(done, tile_end, 0), 0)
        row_start = gl.max(gl.where(done, end, 0), 0)
        row_end = gl.min(gl.where(done, M, end), 0)
        rows = row_end - row_start
        chunks = gl.cdiv(rows, TOKENS)
        size = gl.cdiv(gl.cdiv(rows, chunks), GRAIN) * GRAIN
        row_tile, col = grouped(number - first_tile, chunks, tiles_n, GROUP_M)
        row = row_start + row_tile * size
        mine = gl.minimum(size, row_end - row)
        level = gl.cdiv(mine, GRAIN)
        word = steps | (expert << 20)
        publish(
            queue,
            filled,
            free,
            slot,
            turn,
            row,
            col | (stage << 20) | (phase << 24),
            gl.minimum(row_end, row + size),
            word,
            1,
            level,
            0,
        )
        slot, turn = advance(slot, turn, 2)
        number += gl.num_programs(0)
        drawn = gl.to_tensor(0)
        boxes = gl.cdiv(mine, BOX)
        for start in range(0, K, BLOCK_K):
            if (start == draw_at) & (number >= dealt):
                drawn = draw(counter)
            mbarrier.wait(empty.index(stage), phase ^ 1)
            bar = full.index(stage)
            for i in gl.static_range(TOKENS // BOX):
                mbarrier.expect(bar, w_bytes + (i + 1) * x_bytes, pred=boxes == i + 1)
            if W_KN:
                for h in gl.static_range(2):
                    part = a.index(stage * 2 + h)._reinterpret(w.dtype, [1, BLOCK_K, 64], w.layout)
                    tma.async_copy_global_to_shared(w, [expert, start, col * 128 + h * 64], bar, part)
            else:
                whole = a.index(stage * 2)._reinterpret(w.dtype, [1, 128, BLOCK_K], w.layout)
                tma.async_copy_global_to_shared(w, [expert, col * 128, start], bar, whole)
            for i in gl.static_range(TOKENS // BOX):
                tma.async_copy_global_to_shared(
                    x, [row + i * BOX, start], bar, b.index(stage * (TOKENS // BOX) + i), pred=i < boxes
                )
            stage, phase = advance(stage, phase, STAGES)
        if number >= dealt:
            number = next_tile(counter, told(drawn), dealt, total)
    for _ in gl.static_range(2):
        publish(queue, filled, free, slot, turn, -1, 0, 0, 0, 1)
        slot, turn = advance(slot, turn, 2)


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
    upper,
    lower,
    stage,
    phase,
    steps,
    WIDTH: gl.constexpr,
    TOKENS: gl.constexpr,
    WRITTEN: gl.constexpr,
    STAGES: gl.constexpr,
    A_MK: gl.constexpr,
):
    DEPTH: gl.constexpr = b.shape[2]
    for step in range(steps):
        mbarrier.wait(full.index(stage), phase)
        a_upper = a.index(stage * 2)
        a_lower = a.index(stage * 2 + 1)
        if not A_MK:
            a_upper = a_upper.permute((1, 0))
            a_lower = a_lower.permute((1, 0))
        b_tile = b.index(stage * (TOKENS // BOX))._reinterpret(b.dtype, [WRITTEN, DEPTH], b.layout).permute((1, 0))
        _mark(WIDTH)
        upper = warpgroup_mma(a_upper, b_tile, upper, is_async=True)
        lower = warpgroup_mma(a_lower, b_tile, lower, is_async=True)
        upper, lower = warpgroup_mma_wait(num_outstanding=2, deps=(upper, lower))
        gl.barrier()
        mbarrier.arrive(empty.index(before(stage, STAGES)), count=1, pred=step > 0)
        stage, phase = advance(stage, phase, STAGES)
    return upper, lower, stage, phase


@gluon.jit
def _finish(order, half, upper, lower, WIDTH: gl.constexpr):
    gl.barrier()
    mbarrier.arrive(order.index(1 - half), count=1)
    upper, lower = warpgroup_mma_wait(num_outstanding=0, deps=(upper, lower))
    _mark(WIDTH)
    return upper, lower


@gluon.jit
def _turns(
    half, a, b, full, empty, order, queue, filled, free, buffers, y_map,
    TOKENS: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, A_MK: gl.constexpr, GRAIN: gl.constexpr,
):  # fmt: skip
    WRITTEN: gl.constexpr = 256 if TOKENS == 192 else TOKENS
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WRITTEN, 16])
    turn = gl.to_tensor(0)
    row, place, row_end, word, level, _f = take_all(queue, filled, free, half, turn, 4)
    while row >= 0:
        steps = word & 0xFFFFF
        col = (place & 0xFFFFF) * 128
        stage = (place >> 20) & 0xF
        phase = (place >> 24) & 1
        upper = gl.zeros([64, WRITTEN], gl.float32, mma)
        lower = gl.zeros([64, WRITTEN], gl.float32, mma)
        mbarrier.wait(order.index(half), turn ^ 1 ^ half)
        if level <= 2:
            if (level == 1) and (GRAIN == 32):
                upper, lower, stage, phase = _products(
                    a, b, full, empty, upper, lower, stage, phase, steps, 32, TOKENS, WRITTEN, STAGES, A_MK
                )
                upper, lower = _finish(order, half, upper, lower, 32)
            else:
                upper, lower, stage, phase = _products(
                    a, b, full, empty, upper, lower, stage, phase, steps, 64, TOKENS, WRITTEN, STAGES, A_MK
                )
                upper, lower = _finish(order, half, upper, lower, 64)
        else:
            if (level <= 4) or (TOKENS == 128):
                if level == 3:
                    upper, lower, stage, phase = _products(
                        a, b, full, empty, upper, lower, stage, phase, steps, 96, TOKENS, WRITTEN, STAGES, A_MK
                    )
                    upper, lower = _finish(order, half, upper, lower, 96)
                else:
                    upper, lower, stage, phase = _products(
                        a, b, full, empty, upper, lower, stage, phase, steps, 128, TOKENS, WRITTEN, STAGES, A_MK
                    )
                    upper, lower = _finish(order, half, upper, lower, 128)
            else:
                if level == 5:
                    upper, lower, stage, phase = _products(
                        a, b, full, empty, upper, lower, stage, phase, steps, 160, TOKENS, WRITTEN, STAGES, A_MK
                    )
                    upper, lower = _finish(order, half, upper, lower, 160)
                else:
                    upper, lower, stage, phase = _products(
                        a, b, full, empty, upper, lower, stage, phase, steps, 192, TOKENS, WRITTEN, STAGES, A_MK
                    )
                    upper, lower = _finish(order, half, upper, lower, 192)
        gl.barrier()
        mbarrier.arrive(empty.index(before(stage, STAGES)), count=1)
        for h in gl.static_range(2):
            result = upper if h == 0 else lower
            if WRITTEN == 256:
                left, right = _halves(result.to(buffers.dtype))
                parts = _halves(left) + _halves(right)
            else:
                parts = _halves(result.to(buffers.dtype))
            for i in gl.static_range(TOKENS // 64):
                if row + 64 * i < row_end:
                    buffer = buffers.index(half * SLOTS + i % SLOTS)
                    tma.store_wait(SLOTS - 1)
                    gl.barrier()
                    buffer.permute((1, 0)).store(parts[i])
                    fence_async_shared()
                    gl.barrier()
                    box = buffer._reinterpret(buffers.dtype, [1, 1, 64, 64], y_map.layout)
                    tma.async_copy_shared_to_global(
                        y_map, [INDEX_END, row_end, INDEX_END - row_end + row + 64 * i, col + 64 * h], box
                    )
        turn = turn ^ 1
        row, place, row_end, word, level, _f = take_all(queue, filled, free, half, turn, 4)
    tma.store_wait(0)


@gluon.jit
def rows_specialized(
    x, w, y, y_map, m_sizes, index, row_weights, bias, counter, M, N, K, E, stride_x_m, stride_w_e, stride_w_row,
    stride_y_m, m_sizes_step, index_step, index_end, x_divisor, flags,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, GROUP_M: gl.constexpr,
    EXPERTS: gl.constexpr, W_KN: gl.constexpr, TOKENS: gl.constexpr, GRAIN: gl.constexpr, REGISTERS: gl.constexpr, DEAL: gl.constexpr,
):  # fmt: skip
    element: gl.constexpr = w.dtype
    lines: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    if W_KN:
        a = gl.allocate_shared_memory(element, [2 * STAGES, BLOCK_K, 64], lines)
    else:
        a = gl.allocate_shared_memory(element, [2 * STAGES, 64, BLOCK_K], lines)
    b = gl.allocate_shared_memory(element, [TOKENS // 64 * STAGES + (1 if TOKENS == 192 else 0), 64, BLOCK_K], lines)
    buffers = gl.allocate_shared_memory(element, [2 * SLOTS, 64, 64], lines)
    full, empty, queue, filled, free = barriers(STAGES, 1, 1, 1)
    order = ordering()
    gl.barrier()
    gl.warp_specialize(
        [
            (_turns, (0, a, b, full, empty, order, queue, filled, free, buffers, y_map, TOKENS, STAGES, SLOTS, not W_KN, GRAIN)),
            (_turns, (1, a, b, full, empty, order, queue, filled, free, buffers, y_map, TOKENS, STAGES, SLOTS, not W_KN, GRAIN)),
            (_load, (
                x, w, a, b, full, empty, queue, filled, free, m_sizes, counter, M, N, K, E, m_sizes_step,
                TOKENS, BLOCK_K, STAGES, GROUP_M, EXPERTS, W_KN, GRAIN, DEAL,
            )),
        ],
        [4, 1],
        [REGISTERS, 504 - 2 * REGISTERS],
    )  # fmt: skip
