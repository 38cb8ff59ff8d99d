from __future__ import annotations
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from .pipeline import INDEX_END, advance, before, take

@gluon.jit
def _halves(tile):
    return tile.reshape([tile.shape[0], 2, tile.shape[1] // 2]).permute(0, 2, 1).split()

@gluon.jit
def _parts(tile):
    WIDTH: gl.constexpr = tile.shape[1]
    if WIDTH == 64:
        parts = (tile,)
    else:
        left, right = _halves(tile)
        parts = (left, right) if WIDTH == 128 else _halves(left) + _halves(right)
    return parts

@gluon.jit
def _store_box(y, part, buffer, row, row_end, col, expert, WEIGHT: gl.constexpr, SLOTS: gl.constexpr):
    tma.store_wait(SLOTS - 1)
    gl.barrier()
    buffer.store(part)
    fence_async_shared()
    gl.barrier()
    if WEIGHT:
        box = buffer._reinterpret(part.dtype, [1, 64, 64], y.layout)
        tma.async_copy_shared_to_global(y, [expert, row, col], box)
    else:
        box = buffer._reinterpret(part.dtype, [1, 1, 64, 64], y.layout)
        tma.async_copy_shared_to_global(y, [INDEX_END, row_end, INDEX_END - row_end + row, col], box)

@gluon.jit
def _loop(a, b, full, empty, after, top, low, steps, stage, phase, WIDTH: gl.constexpr, PARTS: gl.constexpr, STAGES: gl.constexpr, A_MK: gl.constexpr, B_NK: gl.constexpr, BOTH: gl.constexpr):
    DEPTH: gl.constexpr = b.shape[2] if B_NK else b.shape[1]
    for step in range(steps):
        mbarrier.wait(full.index(stage), phase)
        a_top = a.index(stage * 2)
        a_low = a.index(stage * 2 + 1)
        if not A_MK:
            a_top = a_top.permute((1, 0))
            a_low = a_low.permute((1, 0))
        if B_NK:
            b_tile = b.index(stage * PARTS)._reinterpret(b.dtype, [WIDTH, DEPTH], b.layout).permute((1, 0))
        else:
            b_tile = b.index(stage * PARTS)._reinterpret(b.dtype, [DEPTH, WIDTH], b.layout)
        top = warpgroup_mma(a_top, b_tile, top, is_async=True)
        if BOTH:
            low = warpgroup_mma(a_low, b_tile, low, is_async=True)
            top, low = warpgroup_mma_wait(num_outstanding=2, deps=(top, low))
        else:
            top = warpgroup_mma_wait(num_outstanding=1, deps=(top,))
        gl.barrier()
        mbarrier.arrive(empty.index(before(stage, STAGES)), count=1, pred=step > 0)
        stage, phase = advance(stage, phase, STAGES)
    gl.barrier()
    mbarrier.arrive(after, count=1)
    if BOTH:
        top, low = warpgroup_mma_wait(num_outstanding=0, deps=(top, low))
    else:
        top = warpgroup_mma_wait(num_outstanding=0, deps=(top,))
    if steps > 0:
        gl.barrier()
        mbarrier.arrive(empty.index(before(stage, STAGES)), count=1)
    return top, low

@gluon.jit
def multiply(half, a, b, full, empty, order, queue, filled, free, buffers, y, PARTS: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, A_MK: gl.constexpr, B_NK: gl.constexpr, WEIGHT: gl.constexpr, SKIP: gl.constexpr):
    WIDTH: gl.constexpr = 128 if PARTS == 2 else 256
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16])
    turn = gl.to_tensor(0)
    row, col, row_end, word = take(queue, filled, free, half, turn)
    while row >= 0:
        turn = turn ^ 1
        steps = word & 0xFFFFF
        expert = (word >> 20) & 0x3FF
        stage = (col >> 20) & 0xF
        phase = (col >> 24) & 1
        first = (col & 0xFFFFF) * (PARTS * 64)
        top = gl.zeros([64, WIDTH], gl.float32, mma)
        low = gl.zeros([64, WIDTH], gl.float32, mma)
        both = row + 64 < row_end
        mbarrier.wait(order.index(half), turn ^ half)
        if SKIP:
            if both:
                top, low = _loop(a, b, full, empty, order.index(1 - half), top, low, steps, stage, phase, WIDTH, PARTS, STAGES, A_MK, B_NK, True)
            else:
                top, low = _loop(a, b, full, empty, order.index(1 - half), top, low, steps, stage, phase, WIDTH, PARTS, STAGES, A_MK, B_NK, False)
        else:
            top, low = _loop(a, b, full, empty, order.index(1 - half), top, low, steps, stage, phase, WIDTH, PARTS, STAGES, A_MK, B_NK, True)
        parts = _parts(top.to(buffers.dtype))
        for i in gl.static_range(PARTS):
            _store_box(y, parts[i], buffers.index(half * SLOTS + i % SLOTS), row, row_end, first + 64 * i, expert, WEIGHT, SLOTS)
        parts2 = _parts(low.to(buffers.dtype))
        for i in gl.static_range(PARTS):
            _store_box(y, parts2[i], buffers.index(half * SLOTS + (i + PARTS) % SLOTS), row + 64, row_end, first + 64 * i, expert, WEIGHT, SLOTS)
        row, col, row_end, word = take(queue, filled, free, half, turn)
    tma.store_wait(0)
