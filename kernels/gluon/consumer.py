"""The multiplying warpgroups of a warp-specialised kernel: the products of 64 rows of each tile, and their stores."""

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
    BIAS_FLAG,
    INDEX_END,
    INDEXED_FLAGS,
    MOVED_FLAGS,
    NARROW_BIT,
    SCATTER_FLAG,
    WEIGHT_FLAG,
    WHOLE_BIT,
    advance,
    before,
    begin,
    take,
    tile_of,
    tma_store,
    view,
)
from .tf32 import MMA, multiply_rows


@gluon.jit
def index_at(index, index_step, flags, row, row_end):
    """index[row], or 0 where there is none."""
    indexed = (flags & INDEXED_FLAGS) != 0
    return gl.load(index + row.to(gl.int64) * index_step, mask=(row < row_end) & indexed, other=0)


@gluon.jit
def counting(flat, index_end, flags, row, row_end):
    """True for rows before ``row_end`` whose index ``flat`` is in [0, index_end); for all if there is no index."""
    indexed = (flags & INDEXED_FLAGS) != 0
    return (row < row_end) & (((flat >= 0) & (flat < index_end)) | (not indexed))


@gluon.jit
def flat_index(index, index_step, index_end, flags, row, row_end):
    """index[row], and which rows take part: see ``flat_index`` in kernels/portable_plain/tiles.py."""
    flat = index_at(index, index_step, flags, row, row_end)
    return flat, counting(flat, index_end, flags, row, row_end)


@gluon.jit
def ask(moved, row, row_end, ROWS: gl.constexpr):
    """Begin to load index[row] of ROWS rows; ``look_up`` waits for it."""
    m = row + gl.arange(0, ROWS, layout=gl.BlockedLayout([1], [32], [4], [0]))
    return index_at(moved[0], moved[3], moved[6], m, row_end)


@gluon.jit
def look_up(moved, flat, row, row_end):
    """(the row of y that each row is stored to, or -1; its routing weight), from the indices that ``ask`` loads.

    Called before the product, which hides the latency; GATHER code calls it after the product, as few tiles need it.
    """
    _index, row_weights, _bias, _index_step, index_end, _x_divisor, flags = moved
    m = row + gl.arange(0, flat.shape[0], layout=gl.BlockedLayout([1], [32], [4], [0]))
    inside = counting(flat, index_end, flags, m, row_end)
    factor = gl.load(row_weights + flat, mask=inside & ((flags & WEIGHT_FLAG) != 0), other=1.0)
    return gl.where(inside, gl.where((flags & SCATTER_FLAG) != 0, flat, m), -1), factor


@gluon.jit
def tables(ROWS: gl.constexpr):
    """Shared memory for each warpgroup's ``look_up`` until it stores its results: one or two rows for each thread.

    If the index and the weights are loaded only when results are stored, a call takes up to 1.1 x as long
    (docs/inside/trials.md, scatter-looked-up). In registers, in the results' layout, they would leave none free.
    """
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return (
        gl.allocate_shared_memory(gl.int32, [2, ROWS], layout),
        gl.allocate_shared_memory(gl.float32, [2, ROWS], layout),
    )


@gluon.jit
def note(noted, half, found):
    noted[0].index(half).store(found[0])
    noted[1].index(half).store(found[1])


@gluon.jit
def noted_at(noted, half, row, TO: gl.constexpr, BY: gl.constexpr):
    """Return ``look_up``'s result for 64 rows of the tile from ``row`` on, in these layouts."""
    return noted[0].index(half).slice(row, 64).load(TO), noted[1].index(half).slice(row, 64).load(BY)


@gluon.jit
def biased(part, moved, expert, col, N, ACROSS: gl.constexpr = False):
    """The part and the bias of its columns, from ``col`` on, of y, or ACROSS of its rows, which are y's columns."""
    _index, _row_weights, bias, _index_step, _index_end, _x_divisor, flags = moved
    if (flags & BIAS_FLAG) != 0:
        n = col + gl.arange(0, part.shape[1], layout=gl.SliceLayout(1 if ACROSS else 0, part.type.layout))
        added = gl.load(bias + expert.to(gl.int64) * N + n, mask=n < N, other=0.0)
        part += gl.expand_dims(added.to(gl.float32), 1 if ACROSS else 0)
    return part


@gluon.jit
def _halves(tile):
    """The left and the right half of a tile's columns."""
    return tile.reshape([tile.shape[0], 2, tile.shape[1] // 2]).permute(0, 2, 1).split()


@gluon.jit
def parts_of(tile):
    """Split a tile into parts of 64 columns."""
    WIDTH: gl.constexpr = tile.shape[1]
    if WIDTH == 64:
        parts = (tile,)
    else:
        left, right = _halves(tile)
        parts = (left, right) if WIDTH == 128 else _halves(left) + _halves(right)  # type: ignore[assignment]
    return parts


@gluon.jit
def lines_of(buffer, y, target, inside, col, N, stride_y_m, LAYOUT: gl.constexpr):
    """Stores 64 x 64 of shared memory through pointers: whole lines are written."""
    tile = buffer.load(LAYOUT)
    n = col + gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    at = y + target.to(gl.int64)[:, None] * stride_y_m + n[None, :]
    gl.store(at, tile, mask=inside[:, None] & (n < N)[None, :])


@gluon.jit
def store_box(
    y,
    part,
    buffer,
    row,
    row_end,
    col,
    expert,
    WEIGHT: gl.constexpr,
    SLOTS: gl.constexpr,
    ACROSS: gl.constexpr,
):
    """Store 64 x 64 by TMA, which cuts off rows and columns past the end and reads the buffer asynchronously.

    ACROSS: the part's rows are columns of y, from ``row`` on, and its columns y's rows, from ``col`` on.
    """
    tma.store_wait(SLOTS - 1)
    gl.barrier()
    if ACROSS:
        buffer.permute((1, 0)).store(part)
    else:
        buffer.store(part)
    fence_async_shared()
    gl.barrier()
    if ACROSS:
        row, col = col, row
    if WEIGHT:
        box = view(buffer, part.dtype, [1, 64, 64], y.layout)
        tma_store(y, [expert, row, col], box)
    else:
        box = view(buffer, part.dtype, [1, 1, 64, 64], y.layout)
        tma_store(y, [INDEX_END, row_end, INDEX_END - row_end + row, col], box)


@gluon.jit
def store_boxes(
    y_map,
    result,
    buffers,
    half,
    row,
    row_end,
    first,
    expert,
    SLOTS: gl.constexpr,
    WEIGHT: gl.constexpr,
    PARTS: gl.constexpr,
    ACROSS: gl.constexpr = False,
):
    """Stores the first PARTS x 64 columns of 64 rows by TMA."""
    parts = parts_of(result.to(buffers.dtype))
    for i in gl.static_range(PARTS):
        buffer = buffers.index(half * SLOTS + i % SLOTS)
        store_box(y_map, parts[i], buffer, row, row_end, first + 64 * i, expert, WEIGHT, SLOTS, ACROSS)


@gluon.jit
def store_noted(
    y,
    result,
    buffers,
    half,
    moved,
    noted,
    row,
    expert,
    first,
    N,
    stride_y_m,
    SLOTS: gl.constexpr,
    PARTS: gl.constexpr,
    MMA: gl.constexpr,
    LINES: gl.constexpr,
):
    """Store PARTS x 64 columns of 64 rows through pointers, with bias and weight, to the rows of y in ``noted``."""
    target, scale = noted_at(noted, half, row, gl.SliceLayout(1, LINES), gl.SliceLayout(1, MMA))
    inside = target >= 0
    parts = parts_of(result)
    for i in gl.static_range(PARTS):
        col = first + 64 * i
        part = biased(parts[i], moved, expert, col, N)
        part = part * gl.convert_layout(scale, gl.SliceLayout(1, part.type.layout))[:, None]
        buffer = buffers.index(half * SLOTS + i % SLOTS)
        buffer.store(part.to(buffers.dtype))
        lines_of(buffer, y, target, inside, col, N, stride_y_m, LINES)


@gluon.jit
def _tile(
    half,
    a,
    b,
    full,
    empty,
    buffers,
    y,
    y_map,
    moved,
    noted,
    row,
    row_end,
    first,
    expert,
    whole,
    steps,
    stage,
    phase,
    N,
    stride_y_m,
    WIDTH: gl.constexpr,
    STAGES: gl.constexpr,
    SLOTS: gl.constexpr,
    A_MK: gl.constexpr,
    B_NK: gl.constexpr,
    WEIGHT: gl.constexpr,
    INDEXED: gl.constexpr,
    GATHER: gl.constexpr,
    GATED: gl.constexpr,
):
    """One warpgroup's 64 rows of one tile, WIDTH columns from ``first`` on. Returns the stage and phase after it.

    GATHER code stores by TMA if nothing else is needed and the tile is ``whole``: TMA stores every row, and rows
    without an index are to be left alone. Operands of 32 bits are tf32, of dW alone (tf32.py).
    """
    TF32: gl.constexpr = b.dtype == gl.float32
    WGMMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16])
    mma: gl.constexpr = MMA if TF32 else WGMMA
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    DEPTH: gl.constexpr = b.shape[2] if B_NK else b.shape[1]
    if INDEXED and not GATHER:
        found = look_up(moved, ask(moved, row, row_end, 64), row, row_end)
    acc = gl.zeros([64, WIDTH], gl.float32, mma)
    for step in range(steps):
        mbarrier.wait(full.index(stage), phase)
        if GATHER:
            fence_async_shared()
        a_tile = a.index(stage * 2 + half)
        b_tile = tile_of(b, stage, 2, WIDTH, DEPTH).permute((1, 0)) if B_NK else tile_of(b, stage, 2, DEPTH, WIDTH)
        if TF32:
            acc = multiply_rows(a_tile, b_tile, acc)
            gl.barrier()
            mbarrier.arrive(empty.index(stage), count=1)
        else:
            if not A_MK:
                a_tile = a_tile.permute((1, 0))
            acc = warpgroup_mma(a_tile, b_tile, acc, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
            gl.barrier()
            mbarrier.arrive(empty.index(before(stage, STAGES)), count=1, pred=step > 0)
        stage, phase = advance(stage, phase, STAGES)
    if not TF32:
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        if steps > 0:
            gl.barrier()
            mbarrier.arrive(empty.index(before(stage, STAGES)), count=1)
    if GATED:
        gate, up = _halves(acc)
        result = gate / (1.0 + gl.exp(-gate)) * up
        store_boxes(y_map, result, buffers, half, row, row_end, first, expert, SLOTS, WEIGHT, WIDTH // 128)
    elif not INDEXED:
        store_boxes(y_map, acc, buffers, half, row, row_end, first, expert, SLOTS, WEIGHT, WIDTH // 64)
    elif not GATHER:
        note(noted, half, found)
        store_noted(
            y, acc, buffers, half, moved, noted, 0, expert, first, N, stride_y_m, SLOTS, WIDTH // 64, mma, lines
        )
    else:
        if whole & ((moved[6] & MOVED_FLAGS) == 0):
            store_boxes(y_map, acc, buffers, half, row, row_end, first, expert, SLOTS, WEIGHT, WIDTH // 64)
        else:
            tma.store_wait(0)  # TMA may still be storing the last tile from the buffers
            note(noted, half, look_up(moved, ask(moved, row, row_end, 64), row, row_end))
            store_noted(
                y, acc, buffers, half, moved, noted, 0, expert, first, N, stride_y_m, SLOTS, WIDTH // 64, mma, lines
            )
    return stage, phase


@gluon.jit
def multiply(
    half,
    a,
    b,
    full,
    empty,
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
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    SLOTS: gl.constexpr,
    A_MK: gl.constexpr,
    B_NK: gl.constexpr,
    WEIGHT: gl.constexpr,
    INDEXED: gl.constexpr,
    GATHER: gl.constexpr,
    GATED: gl.constexpr,
    NARROW: gl.constexpr,
):
    """One warpgroup: multiplies its 64 rows of every tile, and stores them.

    A tile in the queue is (first row, column in halves of BLOCK_N + 2^30 where each row that is gathered has an index,
    end of the rows, steps of the reduction + 2^20 x expert + 2^30 where only the left half of its columns counts).
    y_map is a TMA descriptor, y a pointer, which INDEXED code stores through; GATHER code has both.
    """
    HALF: gl.constexpr = BLOCK_N // 2
    stage, phase, slot, turn = begin()
    row, col, row_end, word = take(queue, filled, free, slot, turn)
    while row >= 0:
        slot, turn = advance(slot, turn, 2)
        steps = word & 0xFFFFF
        expert = (word >> 20) & 0x3FF
        mine = row + half * 64
        whole = (col & WHOLE_BIT) != 0
        if GATHER:
            col = col & (WHOLE_BIT - 1)
        if mine < row_end:
            if NARROW and (word & NARROW_BIT) != 0:
                stage, phase = _tile(
                    half,
                    a,
                    b,
                    full,
                    empty,
                    buffers,
                    y,
                    y_map,
                    moved,
                    noted,
                    mine,
                    row_end,
                    col * HALF,
                    expert,
                    whole,
                    steps,
                    stage,
                    phase,
                    N,
                    stride_y_m,
                    HALF,
                    STAGES,
                    SLOTS,
                    A_MK,
                    B_NK,
                    WEIGHT,
                    INDEXED,
                    GATHER,
                    False,
                )
            else:
                stage, phase = _tile(
                    half,
                    a,
                    b,
                    full,
                    empty,
                    buffers,
                    y,
                    y_map,
                    moved,
                    noted,
                    mine,
                    row_end,
                    col * HALF,
                    expert,
                    whole,
                    steps,
                    stage,
                    phase,
                    N,
                    stride_y_m,
                    BLOCK_N,
                    STAGES,
                    SLOTS,
                    A_MK,
                    B_NK,
                    WEIGHT,
                    INDEXED,
                    GATHER,
                    GATED,
                )
        else:
            for _ in range(steps):
                mbarrier.wait(full.index(stage), phase)
                mbarrier.arrive(empty.index(stage), count=1)
                stage, phase = advance(stage, phase, STAGES)
        row, col, row_end, word = take(queue, filled, free, slot, turn)
    if GATHER or not INDEXED:
        tma.store_wait(0)
