"""The grouped GEMM by rows for sm_90 in tiles that are fitted to each expert's rows, warp-specialised.

An expert's rows are shared out evenly among as few tiles of BLOCK_M rows at most as hold them, and a tile computes as
many of its rows as there are, rounded up to 16: wgmma computes 64 rows at a time, but any eight columns, so a tile is
computed transposed, 128 columns of y by its rows, and transposed back when it is stored. rows.py, whose tiles
are of 128 rows in halves of 64, loses up to 63 rows of each expert's last tile, and loads w once for every 128.

Both warpgroups share a tile of 256 rows, 64 columns each, or take whole tiles of 192 in turns
(kernels/gluon/pingpong.py). Tiles are handed out as programs become free. The arguments are those of ``rows`` in
kernels/portable_plain/rows.py, and ``counter``, an int32 that is zero before and after.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ..gluon.consumer import ask, biased, lines_of, look_up, note, noted_at, parts_of, store_box, tables
from ..gluon.pingpong import ordering
from ..gluon.pipeline import (
    SCATTER_FLAG,
    ZERO_TAIL_FLAG,
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
    tile_of,
    tma_load,
    told,
    view,
    zero_tail,
)
from ..gluon.zero_rows import clear_unnamed

GRAIN: gl.constexpr = gl.constexpr(16)  # rows: 8 is no faster, 32 up to 1.06 x as long
BOX: gl.constexpr = gl.constexpr(64)  # rows of x, loaded at once: 32, 128 and 256 were slower
COLUMNS: gl.constexpr = gl.constexpr(128)  # of a tile
WRITTEN: gl.constexpr = gl.constexpr(256)  # rows of a product, until aot/compile/ptx.py fits it


@gluon.jit
def _load_step(
    x,
    w,
    a,
    b,
    bar,
    expert,
    row,
    boxes,
    col,
    start,
    stage,
    BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr,
    W_KN: gl.constexpr,
):
    """Load one step of a tile's reduction: w's part, and as many boxes of x as the tile has."""
    BOXES: gl.constexpr = BLOCK_M // BOX
    w_bytes: gl.constexpr = COLUMNS * BLOCK_K * w.dtype.primitive_bitwidth // 8
    box_bytes: gl.constexpr = BOX * BLOCK_K * w.dtype.primitive_bitwidth // 8
    for i in gl.static_range(1, BOXES + 1):
        mbarrier.expect(bar, w_bytes + i * box_bytes, pred=boxes == i)
    if W_KN:
        for i in gl.static_range(2):
            part = view(a.index(stage * 2 + i), w.dtype, [1, BLOCK_K, 64], w.layout)
            tma_load(w, [expert, start, col * COLUMNS + i * 64], bar, part)
    else:
        whole = view(tile_of(a, stage, 2, COLUMNS, BLOCK_K), w.dtype, [1, COLUMNS, BLOCK_K], w.layout)
        tma_load(w, [expert, col * COLUMNS, start], bar, whole)
    for i in gl.static_range(BOXES):
        box = b.index(stage * BOXES + i)
        tma_load(x, [row + i * BOX, start], bar, box, pred=i < boxes)


@gluon.jit
def _load_fitted(
    x,
    w,
    low_x,
    low_w,
    a,
    b,
    full,
    empty,
    queue,
    filled,
    free,
    m_sizes,
    counter,
    M,
    N,
    K,
    E,
    R,
    m_sizes_step,
    BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    EXPERTS: gl.constexpr,
    W_KN: gl.constexpr,
    INDEXED: gl.constexpr,
    LOW_RANK: gl.constexpr,
):
    """The loading warp: see ``_load_rows`` in rows.py. A stage has w's part of a tile, and the tile's boxes of x."""
    AHEAD: gl.constexpr = 4  # steps
    layout: gl.constexpr = gl.BlockedLayout([EXPERTS // 32], [32], [1], [0])
    tiles_n = gl.cdiv(N, COLUMNS)
    steps = gl.cdiv(K, BLOCK_K)
    draw_at = gl.maximum(steps - AHEAD, 0) * BLOCK_K
    if LOW_RANK:
        steps += gl.cdiv(R, BLOCK_K)
    count, end = expert_ends(m_sizes, m_sizes_step, M, E, EXPERTS, layout)
    tile_end = gl.associative_scan((count // BLOCK_M + (count % BLOCK_M != 0).to(gl.int32)) * tiles_n, 0, add)
    total = gl.max(tile_end, 0)
    stage, phase, slot, turn = begin()
    tile = gl.program_id(0)
    while tile < total:
        done = tile_end <= tile
        expert = gl.sum(done.to(gl.int32), 0)
        first_tile = gl.max(gl.where(done, tile_end, 0), 0)
        row_start = gl.max(gl.where(done, end, 0), 0)
        row_end = gl.min(gl.where(done, M, end), 0)
        rows = row_end - row_start
        tiles_m = gl.cdiv(rows, BLOCK_M)
        height = gl.cdiv(gl.cdiv(rows, tiles_m), GRAIN) * GRAIN
        row_tile, col = grouped(tile - first_tile, tiles_m, tiles_n, GROUP_M)
        row = row_start + row_tile * height
        row_end = gl.minimum(row_end, row + height)
        grains = gl.cdiv(row_end - row, GRAIN)
        at = stage | (phase << 4)
        word = steps | (expert << 20) if INDEXED else steps
        publish(queue, filled, free, slot, turn, row, col, row_end, word, 1, grains, at)
        slot, turn = advance(slot, turn, 2)
        drawn = gl.to_tensor(0)
        boxes = gl.cdiv(row_end - row, BOX)
        for start in range(0, K, BLOCK_K):
            if start == draw_at:
                drawn = draw(counter)
            mbarrier.wait(empty.index(stage), phase ^ 1)
            _load_step(x, w, a, b, full.index(stage), expert, row, boxes, col, start, stage, BLOCK_M, BLOCK_K, W_KN)
            stage, phase = advance(stage, phase, STAGES)
        if LOW_RANK:
            for start in range(0, R, BLOCK_K):
                mbarrier.wait(empty.index(stage), phase ^ 1)
                bar = full.index(stage)
                _load_step(low_x, low_w, a, b, bar, expert, row, boxes, col, start, stage, BLOCK_M, BLOCK_K, W_KN)
                stage, phase = advance(stage, phase, STAGES)
        tile = next_tile(counter, told(drawn), gl.num_programs(0), total)
    for _ in gl.static_range(2):  # row -1 ends a warpgroup; warpgroups that take turns read a slot each
        publish(queue, filled, free, slot, turn, -1, 0, 0, 0, 1)
        slot, turn = advance(slot, turn, 2)


@gluon.jit
def _fit(grains, MOST: gl.constexpr):
    """Mark in the PTX the register with the number of rows of this loop's products, for ``fit`` in aot/compile/ptx.py.

    ``fit`` copies the loop for each number of rows. Copies in this source would double all code around the loop, too: a
    launch, whose code comes from memory, would take 2 to 8 us more.
    """
    gl.inline_asm_elementwise(
        f"mov.b32 $0, $1; // products of $1 times {GRAIN} rows, {MOST} times at most",
        "=r,r",
        [grains],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _products(
    half,
    a,
    b,
    full,
    empty,
    upper,
    lower,
    steps,
    grains,
    stage,
    phase,
    BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr,
    A_MK: gl.constexpr,
    TURNS: gl.constexpr,
):
    """Return a tile's sums, of which the last step is still being multiplied, and the next stage and phase.

    They are of 64 columns, or in TURNS of the upper 64 and the lower.
    """
    BOXES: gl.constexpr = BLOCK_M // BOX
    DEPTH: gl.constexpr = b.shape[2]
    for step in range(steps):
        mbarrier.wait(full.index(stage), phase)
        a_upper = a.index(stage * 2 + (0 if TURNS else half))
        a_lower = a.index(stage * 2 + 1)
        if not A_MK:
            a_upper = a_upper.permute((1, 0))
            a_lower = a_lower.permute((1, 0))
        b_tile = tile_of(b, stage, BOXES, WRITTEN, DEPTH).permute((1, 0))
        _fit(grains, BLOCK_M // GRAIN)
        upper = warpgroup_mma(a_upper, b_tile, upper, is_async=True)
        if TURNS:
            lower = warpgroup_mma(a_lower, b_tile, lower, is_async=True)
            upper, lower = warpgroup_mma_wait(num_outstanding=2, deps=(upper, lower))
        else:
            upper = warpgroup_mma_wait(num_outstanding=1, deps=(upper,))
        gl.barrier()
        mbarrier.arrive(empty.index(before(stage, STAGES)), count=1, pred=step > 0)
        stage, phase = advance(stage, phase, STAGES)
    return upper, lower, stage, phase


@gluon.jit
def _multiply_fitted(
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
    BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr,
    SLOTS: gl.constexpr,
    A_MK: gl.constexpr,
    TURNS: gl.constexpr,
    INDEXED: gl.constexpr,
):
    """One warpgroup: multiplies its 64 columns of every tile, or every other tile (TURNS), and stores them.

    A tile in the queue is (first row, column tile, end of its rows, steps of the reduction + in INDEXED code
    2^20 x expert, its rows in units of 16, the stage that it begins with + 16 x that one's phase).
    """
    BOXES: gl.constexpr = BLOCK_M // BOX
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WRITTEN, 16])
    slot = half if TURNS else 0
    slot = gl.to_tensor(slot)
    turn = gl.to_tensor(0)
    stored = gl.to_tensor(0)
    row, col, row_end, word, grains, at = take_all(queue, filled, free, slot, turn, 4)
    while row >= 0:
        steps = word
        if INDEXED:
            steps = word & 0xFFFFF
            # With TURNS the look-up waits until the other warpgroup has begun: here it would delay this one's turn
            # (1.01 to 1.02 x the time at T = 8192; without TURNS waiting gains little, and loses with few rows:
            # docs/inside/trials.md, scatter-beside).
            asked = ask(moved, row, row_end, WRITTEN)
            if not TURNS:
                found = look_up(moved, asked, row, row_end)
        stage = at & 15
        phase = at >> 4
        upper = gl.zeros([64, WRITTEN], gl.float32, mma)
        lower = gl.zeros([64, WRITTEN], gl.float32, mma) if TURNS else gl.to_tensor(0)
        if TURNS:
            mbarrier.wait(order.index(half), turn ^ 1 ^ half)  # the very first turn is the first warpgroup's
        upper, lower, stage, phase = _products(
            half, a, b, full, empty, upper, lower, steps, grains, stage, phase, BLOCK_M, STAGES, A_MK, TURNS
        )
        if TURNS:
            gl.barrier()
            mbarrier.arrive(order.index(1 - half), count=1)
            if INDEXED:
                found = look_up(moved, asked, row, row_end)
            upper, lower = warpgroup_mma_wait(num_outstanding=0, deps=(upper, lower))
        else:
            upper = warpgroup_mma_wait(num_outstanding=0, deps=(upper,))
        gl.barrier()
        mbarrier.arrive(empty.index(before(stage, STAGES)), count=1)
        if INDEXED:
            note(noted, half, found)
            uppers = parts_of(upper)
            lowers = parts_of(lower) if TURNS else uppers
            for i in gl.static_range(BOXES):
                if row + BOX * i < row_end:
                    by_rows: gl.constexpr = gl.SliceLayout(0, uppers[i].type.layout)
                    target, scale = noted_at(noted, half, BOX * i, gl.SliceLayout(1, LINES), by_rows)
                    for h in gl.static_range(2 if TURNS else 1):
                        first = col * COLUMNS + 64 * (h if TURNS else half)
                        part = biased(lowers[i] if h == 1 else uppers[i], moved, word >> 20, first, N, True)
                        buffer = buffers.index(half * SLOTS + (i + h) % SLOTS)
                        buffer.permute((1, 0)).store((part * scale[None, :]).to(buffers.dtype))
                        lines_of(buffer, y, target, target >= 0, first, N, stride_y_m, LINES)
        else:
            for h in gl.static_range(2 if TURNS else 1):
                parts = parts_of((lower if h == 1 else upper).to(buffers.dtype))
                first = col * COLUMNS + 64 * (h if TURNS else half)
                for i in gl.static_range(BOXES):
                    mine = row + BOX * i
                    if mine < row_end:
                        buffer = buffers.index(half * SLOTS + (stored + i) % SLOTS)
                        store_box(y_map, parts[i], buffer, first, row_end, mine, 0, False, SLOTS, True)
                stored = (stored + gl.cdiv(row_end - row, BOX)) % SLOTS
        if TURNS:
            turn = turn ^ 1
        else:
            slot, turn = advance(slot, turn, 2)
        row, col, row_end, word, grains, at = take_all(queue, filled, free, slot, turn, 4)
    if not INDEXED:
        tma.store_wait(0)


@gluon.jit
def rows_fitted(
    x,
    w,
    y,
    y_map,
    m_sizes,
    index,
    row_weights,
    bias,
    low_x,
    low_w,
    counter,
    M,
    N,
    K,
    E,
    stride_x_m,
    stride_w_e,
    stride_w_row,
    stride_y_m,
    m_sizes_step,
    index_step,
    index_end,
    x_divisor,
    flags,
    R,
    BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    SLOTS: gl.constexpr,
    GROUP_M: gl.constexpr,
    EXPERTS: gl.constexpr,
    W_KN: gl.constexpr,
    INDEXED: gl.constexpr,
    PINGPONG: gl.constexpr,
    REGISTERS: gl.constexpr,
    LOW_RANK: gl.constexpr,
):
    """y[to(m), n] = weight(m) * (sum_k x[m, k] * w[expert of m, n, k] + bias[expert of m, n]).

    See ``rows`` in kernels/portable_plain/rows.py; no gather. x and w are loaded by TMA. y is stored through ``y_map``,
    a ragged descriptor (``kernels/entry.py``, RAGGED_SIZES), in INDEXED code through pointers.
    LOW_RANK code has low_x and low_w through TMA, in steps of the reduction after those of x and w.
    """
    element: gl.constexpr = w.dtype
    BOXES: gl.constexpr = BLOCK_M // BOX
    READERS: gl.constexpr = 1 if PINGPONG else 2
    lines: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    if W_KN:
        a = gl.allocate_shared_memory(element, [2 * STAGES, BLOCK_K, 64], lines)
    else:
        a = gl.allocate_shared_memory(element, [2 * STAGES, 64, BLOCK_K], lines)
    # A view of 256 rows reaches one box past a ring of 192 rows, though no product reads it. INDEXED code has other
    # memory there.
    SPARE: gl.constexpr = 0 if INDEXED else WRITTEN // BOX - BOXES
    b = gl.allocate_shared_memory(element, [BOXES * STAGES + SPARE, BOX, BLOCK_K], lines)
    buffers = gl.allocate_shared_memory(element, [2 * SLOTS, 64, 64], lines)
    full, empty, queue, filled, free = barriers(STAGES, 1, READERS, READERS)
    order = ordering()
    moved = (index, row_weights, bias, index_step, index_end, x_divisor, flags)
    if INDEXED:
        noted = tables(WRITTEN)
        gl.barrier()
        gl.warp_specialize(
            [
                (
                    _multiply_fitted,
                    (
                        0,
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
                        BLOCK_M,
                        STAGES,
                        SLOTS,
                        not W_KN,
                        PINGPONG,
                        INDEXED,
                    ),
                ),
                (
                    _multiply_fitted,
                    (
                        1,
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
                        BLOCK_M,
                        STAGES,
                        SLOTS,
                        not W_KN,
                        PINGPONG,
                        INDEXED,
                    ),
                ),
                (
                    _load_fitted,
                    (
                        x,
                        w,
                        low_x,
                        low_w,
                        a,
                        b,
                        full,
                        empty,
                        queue,
                        filled,
                        free,
                        m_sizes,
                        counter,
                        M,
                        N,
                        K,
                        E,
                        R,
                        m_sizes_step,
                        BLOCK_M,
                        BLOCK_K,
                        STAGES,
                        GROUP_M,
                        EXPERTS,
                        W_KN,
                        INDEXED,
                        LOW_RANK,
                    ),
                ),
                (clear_unnamed, (y, m_sizes, moved, M, E, N, stride_y_m, m_sizes_step)),
            ],
            [4, 1, 1],
            [REGISTERS, 504 - 2 * REGISTERS, 504 - 2 * REGISTERS],
        )
    else:
        gl.barrier()
        gl.warp_specialize(
            [
                (
                    _multiply_fitted,
                    (
                        0,
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
                        (),
                        N,
                        stride_y_m,
                        BLOCK_M,
                        STAGES,
                        SLOTS,
                        not W_KN,
                        PINGPONG,
                        INDEXED,
                    ),
                ),
                (
                    _multiply_fitted,
                    (
                        1,
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
                        (),
                        N,
                        stride_y_m,
                        BLOCK_M,
                        STAGES,
                        SLOTS,
                        not W_KN,
                        PINGPONG,
                        INDEXED,
                    ),
                ),
                (
                    _load_fitted,
                    (
                        x,
                        w,
                        low_x,
                        low_w,
                        a,
                        b,
                        full,
                        empty,
                        queue,
                        filled,
                        free,
                        m_sizes,
                        counter,
                        M,
                        N,
                        K,
                        E,
                        R,
                        m_sizes_step,
                        BLOCK_M,
                        BLOCK_K,
                        STAGES,
                        GROUP_M,
                        EXPERTS,
                        W_KN,
                        INDEXED,
                        LOW_RANK,
                    ),
                ),
            ],
            [4, 1],
            [REGISTERS, 504 - 2 * REGISTERS],
        )
    if ((flags & ZERO_TAIL_FLAG) != 0) & ((flags & SCATTER_FLAG) == 0 if INDEXED else True):
        zero_tail(y, m_sizes, m_sizes_step, M, E, N, stride_y_m, EXPERTS)
