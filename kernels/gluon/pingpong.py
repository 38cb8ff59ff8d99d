"""Pingpong: each warpgroup multiplies whole tiles, and stores its results while the other warpgroup multiplies.

A tile is 128 rows by 128 or 192 columns: one warpgroup's registers hold the sums of 192 at most. Gluon has no tensor of
192 columns. So the products are written for 256, of which the last quarter is neither loaded nor stored, and
aot/compile/ptx.py replaces their instructions by those for 192 columns. The ring of stages has 64 more columns at its
end, because a view of 256 columns reaches into them. A tile of dW always has 192 columns; with ACROSS these are rows of
dw.

A warpgroup waits for its first stage only after the other has begun on the last of its own (``order``): a stage's
barrier has one phase bit, which does not tell a load from the load before the last.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from .consumer import ask, look_up, note, store_boxes, store_noted
from .pipeline import advance, before, publish, take, tile_of

PART: gl.constexpr = gl.constexpr(64)  # columns


@gluon.jit
def ordering():
    """The barriers by which each warpgroup says that the other may begin."""
    order = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(order.index(i), count=1)
    return order


@gluon.jit
def publish_turn(queue, filled, free, slot, turn, row, col, row_end, word, stage, phase, WARPS: gl.constexpr, e=0, f=0):
    """Send a tile, and the stage that it begins with, to the warpgroup whose turn it is.

    ``col``, in tiles, has 20 bits, and ``stage`` 4.
    """
    publish(queue, filled, free, slot, turn, row, col | (stage << 20) | (phase << 24), row_end, word, WARPS, e, f)


@gluon.jit
def multiply_in_turns(
    half,
    a,
    b,
    full,
    empty,
    order,
    queue,
    filled,
    free,
    buffers,
    y,
    y_map,
    moved,
    noted,
    N,
    stride_y_m,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    SLOTS: gl.constexpr,
    A_MK: gl.constexpr,
    B_NK: gl.constexpr,
    WEIGHT: gl.constexpr,
    ACROSS: gl.constexpr,
    INDEXED: gl.constexpr,
):
    """One warpgroup: multiplies every other tile, and stores it. See ``multiply`` in consumer.py."""
    PARTS: gl.constexpr = COLUMNS // PART
    WRITTEN: gl.constexpr = 256 if PARTS == 3 else COLUMNS
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WRITTEN, 16])
    DEPTH: gl.constexpr = b.shape[2] if B_NK else b.shape[1]
    turn = gl.to_tensor(0)
    row, place, row_end, word = take(queue, filled, free, half, turn)
    if WEIGHT:
        upper = gl.zeros([64, WRITTEN], gl.float32, mma)
        lower = gl.zeros([64, WRITTEN], gl.float32, mma)
    while row >= 0:
        steps = word & 0xFFFFF
        expert = (word >> 20) & 0x3FF
        first = (place & 0xFFFFF) * COLUMNS
        stage = (place >> 20) & 0xF
        phase = (place >> 24) & 1
        if INDEXED:
            found = look_up(moved, ask(moved, row, row_end, 128), row, row_end)
        if WEIGHT:  # the first product overwrites the sums: zeroing them would take 2 to 7 % of a short reduction
            gl.assume(steps > 0)
        else:
            upper = gl.zeros([64, WRITTEN], gl.float32, mma)
            lower = gl.zeros([64, WRITTEN], gl.float32, mma)
        mbarrier.wait(order.index(half), turn ^ 1 ^ half)  # the first warpgroup begins
        for step in range(steps):
            mbarrier.wait(full.index(stage), phase)
            a_upper = a.index(stage * 2)
            a_lower = a.index(stage * 2 + 1)
            if not A_MK:
                a_upper = a_upper.permute((1, 0))
                a_lower = a_lower.permute((1, 0))
            if B_NK:
                b_tile = tile_of(b, stage, PARTS, WRITTEN, DEPTH).permute((1, 0))
            else:
                b_tile = tile_of(b, stage, PARTS, DEPTH, WRITTEN)
            adds = step > 0 if WEIGHT else True
            upper = warpgroup_mma(a_upper, b_tile, upper, use_acc=adds, is_async=True)
            lower = warpgroup_mma(a_lower, b_tile, lower, use_acc=adds, is_async=True)
            if WEIGHT:  # reductions are short: the other warpgroup begins once the last step is issued
                gl.barrier()  # each warp must have seen its turn before the order barrier's phase flips again
                mbarrier.arrive(order.index(1 - half), count=1, pred=step == steps - 1)
            upper, lower = warpgroup_mma_wait(num_outstanding=2, deps=(upper, lower))
            gl.barrier()
            mbarrier.arrive(empty.index(before(stage, STAGES)), count=1, pred=step > 0)
            stage, phase = advance(stage, phase, STAGES)
        if not WEIGHT:
            gl.barrier()
            mbarrier.arrive(order.index(1 - half), count=1)
        upper, lower = warpgroup_mma_wait(num_outstanding=0, deps=(upper, lower))
        if WEIGHT or steps > 0:
            gl.barrier()
            mbarrier.arrive(empty.index(before(stage, STAGES)), count=1)
        if INDEXED:
            note(noted, half, found)
        for i in gl.static_range(2):
            mine = row + 64 * i
            result = upper if i == 0 else lower
            if INDEXED:
                store_noted(
                    y,
                    result,
                    buffers,
                    half,
                    moved,
                    noted,
                    64 * i,
                    expert,
                    first,
                    N,
                    stride_y_m,
                    SLOTS,
                    PARTS,
                    mma,
                    lines,
                )
            else:
                store_boxes(y_map, result, buffers, half, mine, row_end, first, expert, SLOTS, WEIGHT, PARTS, ACROSS)
        turn = turn ^ 1
        row, place, row_end, word = take(queue, filled, free, half, turn)
    if not INDEXED:
        tma.store_wait(0)
