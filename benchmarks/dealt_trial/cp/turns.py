# ruff: noqa
"""Warpgroups in turns (pingpong): each multiplies whole tiles, and the results of one leave while the other multiplies.

A tile is 128 rows by 192 columns, the most whose sums one warpgroup's registers hold. The language has no tensor of 192
columns: the products are written for 256, of which the last quarter is neither loaded nor stored, and the compiler is
handed instructions of 192 columns in their place (aot/rewriting.py). The ring has 64 columns more at its end, which
the words ``256 columns from here`` reach. A tile of dW may lie ACROSS: its 192 columns are rows of dw.

A warpgroup waits for its first stage only after the other has begun on the last of its own (``order``): the barrier of
a stage tells the next load from the last, and not from the one before.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from .pipeline import advance, before, publish, release, take
from .warpgroups import store_boxes, store_lines, targets, weights


@gluon.jit
def ordering():
    """The barriers by which each warpgroup says that the other may begin."""
    order = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(order.index(i), count=1)
    return order


@gluon.jit
def publish_turn(
    queue,
    filled,
    free,
    slot,
    turn,
    row,
    col,
    row_end,
    word,
    stage,
    phase,
    WARPS: gl.constexpr,
    SENT: gl.constexpr = False,
):
    """Tells the warpgroup whose turn it is of a tile, and of the stage that it begins with.

    ``col``, in tiles, has 20 bits, and ``stage`` 4.
    """
    publish(queue, filled, free, slot, turn, row, col | (stage << 20) | (phase << 24), row_end, word, WARPS, SENT)


@gluon.jit
def multiply_in_turns(
    half, a, b, full, empty, order, queue, filled, free, buffers, y, y_map, moved, N, stride_y_m,
    STAGES: gl.constexpr, A_MK: gl.constexpr, B_NK: gl.constexpr, WEIGHT: gl.constexpr, ACROSS: gl.constexpr,
    INDEXED: gl.constexpr, PARTS: gl.constexpr, CLUSTER: gl.constexpr,
):  # fmt: skip
    """One warpgroup: multiplies every other tile, and stores it. See ``warpgroups.multiply``."""
    WRITTEN: gl.constexpr = 256 if PARTS == 3 else PARTS * 64
    SENT: gl.constexpr = CLUSTER == 2
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WRITTEN, 16])
    DEPTH: gl.constexpr = b.shape[2] if B_NK else b.shape[1]
    turn = gl.to_tensor(0)
    row, place, row_end, word = take(queue, filled, free, half, turn, SENT)
    while row >= 0:
        steps = word & 0xFFFFF
        expert = (word >> 20) & 0x3FF
        first = (place & 0xFFFFF) * (PARTS * 64)
        if CLUSTER:
            first += gl.program_id(0) % 2 * (PARTS * 64)
        stage = (place >> 20) & 0xF
        phase = (place >> 24) & 1
        upper = gl.zeros([64, WRITTEN], gl.float32, mma)
        lower = gl.zeros([64, WRITTEN], gl.float32, mma)
        mbarrier.wait(order.index(half), turn ^ 1 ^ half)  # the very first turn is the first warpgroup's
        for step in range(steps):
            mbarrier.wait(full.index(stage), phase)
            a_upper = a.index(stage * 2)
            a_lower = a.index(stage * 2 + 1)
            if not A_MK:
                a_upper = a_upper.permute((1, 0))
                a_lower = a_lower.permute((1, 0))
            if B_NK:
                b_tile = b.index(stage * PARTS)._reinterpret(b.dtype, [WRITTEN, DEPTH], b.layout).permute((1, 0))
            else:
                b_tile = b.index(stage * PARTS)._reinterpret(b.dtype, [DEPTH, WRITTEN], b.layout)
            upper = warpgroup_mma(a_upper, b_tile, upper, is_async=True)
            lower = warpgroup_mma(a_lower, b_tile, lower, is_async=True)
            upper, lower = warpgroup_mma_wait(num_outstanding=2, deps=(upper, lower))
            gl.barrier()
            release(empty.index(before(stage, STAGES)), step > 0, CLUSTER)
            stage, phase = advance(stage, phase, STAGES)
        gl.barrier()
        mbarrier.arrive(order.index(1 - half), count=1)
        upper, lower = warpgroup_mma_wait(num_outstanding=0, deps=(upper, lower))
        if steps > 0:
            gl.barrier()
            release(empty.index(before(stage, STAGES)), True, CLUSTER)
        for i in gl.static_range(2):
            mine = row + 64 * i
            result = upper if i == 0 else lower
            if INDEXED:
                scale = weights(moved, mine, row_end, gl.SliceLayout(1, mma))
                target, inside = targets(moved, mine, row_end, gl.SliceLayout(1, lines))
                store_lines(
                    y, result, buffers, half, moved, scale, target, inside, expert, first, N, stride_y_m, 1, PARTS,
                    lines,
                )  # fmt: skip
            else:
                store_boxes(y_map, result, buffers, half, mine, row_end, first, expert, 1, WEIGHT, PARTS, ACROSS)
        turn = turn ^ 1
        row, place, row_end, word = take(queue, filled, free, half, turn, SENT)
    if not INDEXED:
        tma.store_wait(0)
