"""The row-grouped GEMM for sm_90 with e4m3 x and w, which have scales of blocks along K; warp-specialised.

A tile is 128 rows of x by 256 columns. Each of two warpgroups has 128 columns, which share a scale of w. A step is 128
of K, in which each row of x has one scale. A warpgroup multiplies the upper 64 rows of a step and adds the product,
times its scales, to sums in fp32, because the tensor cores keep only 14 bits of a long sum of e4m3. Then it does the
lower 64 rows, if there are any. Meanwhile the tensor cores multiply for the other warpgroup.

w is prepared (prepared_layout.py): blocks of 64 x 64, in which a row's 64 codes of K have the order of x's codes.
TMA puts two blocks of columns one below the other, as wgmma reads them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ..gluon.consumer import ask, look_up, note, store_boxes, store_noted, tables
from ..gluon.pipeline import (
    SCATTER_FLAG,
    ZERO_TAIL_FLAG,
    add,
    advance,
    barriers,
    begin,
    draw,
    expert_ends,
    grouped,
    next_tile,
    publish,
    take_all,
    tma_load,
    told,
    view,
    zero_tail,
)
from ..gluon.zero_rows import clear_unnamed

ROWS: gl.constexpr = gl.constexpr(128)  # rows of a tile
COLUMNS: gl.constexpr = gl.constexpr(256)
GROUP: gl.constexpr = gl.constexpr(128)  # elements of K, and rows of w, that share a scale
BLOCK: gl.constexpr = gl.constexpr(64)  # rows of w, and elements of K, in a block of prepared codes
SCALES: gl.constexpr = gl.constexpr(256)  # scales of x that one copy loads: TMA begins at a multiple of 16 bytes


def _prepared() -> gl.SharedLinearLayout:
    """[128 columns, 128 of K]: 64 codes of K of each column, one after another, in TMA's swizzle; then the next 64."""
    codes = [[0, 1 << bit] for bit in range(6)]
    columns = [[1, 0], [2, 16], [4, 32], [8, 0], [16, 0], [32, 0], [64, 0]]
    return gl.SharedLinearLayout([*codes, *columns, [0, 64]], alignment=1024)


PREPARED: gl.constexpr = gl.constexpr(_prepared())


@gluon.jit
def _load_both(
    x,
    w,
    x_scale,
    a,
    b,
    s,
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
    m_sizes_step,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    EXPERTS: gl.constexpr,
):
    """The loading warp: see ``rows._load_rows``. x's lower 64 rows are loaded where there are any."""
    AHEAD: gl.constexpr = 4  # steps
    layout: gl.constexpr = gl.BlockedLayout([EXPERTS // 32], [32], [1], [0])
    W_BYTES: gl.constexpr = COLUMNS * GROUP
    HALF_BYTES: gl.constexpr = 64 * GROUP
    SCALE_BYTES: gl.constexpr = SCALES * 4
    tiles_n = gl.cdiv(N, COLUMNS)
    blocks_n = N // BLOCK
    steps = gl.cdiv(K, GROUP)
    count, end = expert_ends(m_sizes, m_sizes_step, M, E, EXPERTS, layout)
    tile_end = gl.associative_scan((count // ROWS + (count % ROWS != 0).to(gl.int32)) * tiles_n, 0, add)
    total = gl.max(tile_end, 0)
    draw_at = gl.maximum(steps - AHEAD, 0)
    stage, phase, slot, turn = begin()
    tile = gl.program_id(0)
    while tile < total:
        done = tile_end <= tile
        expert = gl.sum(done.to(gl.int32), 0)
        first_tile = gl.max(gl.where(done, tile_end, 0), 0)
        row_start = gl.max(gl.where(done, end, 0), 0)
        row_end = gl.min(gl.where(done, M, end), 0)
        row_tile, col = grouped(tile - first_tile, gl.cdiv(row_end - row_start, ROWS), tiles_n, GROUP_M)
        row = row_start + row_tile * ROWS
        publish(queue, filled, free, slot, turn, row, col, row_end, steps | (expert << 20), 1)
        slot, turn = advance(slot, turn, 2)
        drawn = gl.to_tensor(0)
        both = row + 64 < row_end
        block = expert * blocks_n + col * (COLUMNS // BLOCK)
        for step in range(steps):
            if step == draw_at:
                drawn = draw(counter)
            mbarrier.wait(empty.index(stage), phase ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, W_BYTES + SCALE_BYTES + HALF_BYTES, pred=both == 0)
            mbarrier.expect(bar, W_BYTES + SCALE_BYTES + 2 * HALF_BYTES, pred=both)
            for i in gl.static_range(2):
                codes = view(b.index(stage * 2 + i), w.dtype, [2, 2, 4, 256], w.layout)
                tma_load(w, [2 * step, block + 2 * i, 0, 0], bar, codes)
            tma_load(x, [row, step * GROUP], bar, a.index(stage * 2))
            tma_load(x, [row + 64, step * GROUP], bar, a.index(stage * 2 + 1), pred=both)
            tma_load(x_scale, [step, row & -4], bar, s.index(stage))
            stage, phase = advance(stage, phase, STAGES)
        tile = next_tile(counter, told(drawn), gl.num_programs(0), total)
    publish(queue, filled, free, slot, turn, -1, 0, 0, 0, 1)


@gluon.jit
def _scales(held, row, MMA: gl.constexpr):
    """x's scales of 64 rows from ``row`` on."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    every = view(held, gl.float32, [SCALES], flat)
    return every.gather(row + gl.arange(0, 64, layout=gl.SliceLayout(1, MMA)), 0)


@gluon.jit
def _multiply_scaled(
    half,
    a,
    b,
    s,
    full,
    empty,
    queue,
    filled,
    free,
    buffers,
    w_scale,
    y,
    y_map,
    moved,
    noted,
    N,
    K,
    stride_y_m,
    STAGES: gl.constexpr,
    SLOTS: gl.constexpr,
    INDEXED: gl.constexpr,
):
    """One warpgroup: multiply its 128 columns of every tile, and store them."""
    WIDTH: gl.constexpr = COLUMNS // 2
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 32])
    groups_n = N // GROUP
    groups_k = gl.cdiv(K, GROUP)
    stage, phase, slot, turn = begin()
    row, col, row_end, word, _e, _f = take_all(queue, filled, free, slot, turn, 4)
    while row >= 0:
        slot, turn = advance(slot, turn, 2)
        steps = word & 0xFFFFF
        expert = word >> 20
        group = col * 2 + half
        if INDEXED:
            found = look_up(moved, ask(moved, row, row_end, ROWS), row, row_end)
        upper = gl.zeros([64, WIDTH], gl.float32, mma)
        lower = gl.zeros([64, WIDTH], gl.float32, mma)
        both = row + 64 < row_end
        at = w_scale + (expert.to(gl.int64) * groups_n + gl.minimum(group, groups_n - 1)) * groups_k
        by = gl.load(at)
        for step in range(steps):
            following = gl.load(at + gl.minimum(step + 1, steps - 1))
            mbarrier.wait(full.index(stage), phase)
            b_tile = view(b.index(stage * 2 + half), gl.float8e4nv, [WIDTH, GROUP], PREPARED).permute((1, 0))
            part = gl.zeros([64, WIDTH], gl.float32, mma)
            part = warpgroup_mma(a.index(stage * 2), b_tile, part, use_acc=False, is_async=True)
            scale = _scales(s.index(stage), row & 3, mma) * by
            part = warpgroup_mma_wait(num_outstanding=0, deps=(part,))
            upper += part * scale[:, None]
            if both:
                # The sums above end here: else the compiler starts the next products before it has added these, which
                # needs the registers of two products, more than there are.
                upper, part = warpgroup_mma_wait(num_outstanding=0, deps=(upper, part))
                part = warpgroup_mma(a.index(stage * 2 + 1), b_tile, part, use_acc=False, is_async=True)
                scale = _scales(s.index(stage), (row & 3) + 64, mma) * by
                part = warpgroup_mma_wait(num_outstanding=0, deps=(part,))
                lower += part * scale[:, None]
            gl.barrier()
            mbarrier.arrive(empty.index(stage), count=1)
            by = following
            stage, phase = advance(stage, phase, STAGES)
        if group < groups_n:
            first = group * WIDTH
            if INDEXED:
                note(noted, half, found)
            for i in gl.static_range(2):
                mine = row + 64 * i
                result = upper if i == 0 else lower
                if mine < row_end:
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
                            WIDTH // 64,
                            mma,
                            lines,
                        )
                    else:
                        store_boxes(
                            y_map, result, buffers, half, mine, row_end, first, expert, SLOTS, False, WIDTH // 64
                        )
        row, col, row_end, word, _e, _f = take_all(queue, filled, free, slot, turn, 4)
    if not INDEXED:
        tma.store_wait(0)


@gluon.jit
def rows_w8a8(
    x,
    w,
    x_scale,
    w_scale,
    y,
    y_map,
    m_sizes,
    index,
    row_weights,
    bias,
    counter,
    M,
    N,
    K,
    E,
    stride_y_m,
    m_sizes_step,
    index_step,
    index_end,
    x_divisor,
    flags,
    STAGES: gl.constexpr,
    SLOTS: gl.constexpr,
    GROUP_M: gl.constexpr,
    EXPERTS: gl.constexpr,
    INDEXED: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """y[to(m), n] = weight(m) * (sum_g xs[g, m] * ws[e, n // 128, g] * sum_k x[m, k] * w[e, n, k] + bias[e, n]).

    Like ``portable_plain.rows`` without a gather; e is the expert of m, and k runs over g's 128 of K. x is e4m3
    [M, K], each 64 of K in ``K_ORDER`` (prepared_layout.py); x_scale is xs, fp32 [K / 128, M], M padded to fours.
    w is prepared, and seen as blocks, int32 [K / 64, E * N / 64, 4, 256]; w_scale is ws, fp32 [E, N / 128, K / 128].
    Like ``rows_specialized`` y leaves through ``y_map``, in INDEXED code through pointers.
    """
    swizzled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    lines: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    a = gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES, 64, GROUP], swizzled)
    b = gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES, COLUMNS // 2, GROUP], swizzled)
    s = gl.allocate_shared_memory(gl.float32, [STAGES, 1, SCALES], flat)
    buffers = gl.allocate_shared_memory(y.dtype.element_ty, [2 * SLOTS, 64, 64], lines)
    full, empty, queue, filled, free = barriers(STAGES, 1, 2, 2)
    moved = (index, row_weights, bias, index_step, index_end, x_divisor, flags)
    noted = tables(ROWS) if INDEXED else ()
    gl.barrier()
    if INDEXED:
        gl.warp_specialize(
            [
                (
                    _multiply_scaled,
                    (
                        0,
                        a,
                        b,
                        s,
                        full,
                        empty,
                        queue,
                        filled,
                        free,
                        buffers,
                        w_scale,
                        y,
                        y_map,
                        moved,
                        noted,
                        N,
                        K,
                        stride_y_m,
                        STAGES,
                        SLOTS,
                        INDEXED,
                    ),
                ),
                (
                    _multiply_scaled,
                    (
                        1,
                        a,
                        b,
                        s,
                        full,
                        empty,
                        queue,
                        filled,
                        free,
                        buffers,
                        w_scale,
                        y,
                        y_map,
                        moved,
                        noted,
                        N,
                        K,
                        stride_y_m,
                        STAGES,
                        SLOTS,
                        INDEXED,
                    ),
                ),
                (
                    _load_both,
                    (
                        x,
                        w,
                        x_scale,
                        a,
                        b,
                        s,
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
                        m_sizes_step,
                        STAGES,
                        GROUP_M,
                        EXPERTS,
                    ),
                ),
                (clear_unnamed, (y, m_sizes, moved, M, E, N, stride_y_m, m_sizes_step)),
            ],
            [4, 1, 1],
            [REGISTERS, 504 - 2 * REGISTERS, 504 - 2 * REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (
                    _multiply_scaled,
                    (
                        0,
                        a,
                        b,
                        s,
                        full,
                        empty,
                        queue,
                        filled,
                        free,
                        buffers,
                        w_scale,
                        y,
                        y_map,
                        moved,
                        noted,
                        N,
                        K,
                        stride_y_m,
                        STAGES,
                        SLOTS,
                        INDEXED,
                    ),
                ),
                (
                    _multiply_scaled,
                    (
                        1,
                        a,
                        b,
                        s,
                        full,
                        empty,
                        queue,
                        filled,
                        free,
                        buffers,
                        w_scale,
                        y,
                        y_map,
                        moved,
                        noted,
                        N,
                        K,
                        stride_y_m,
                        STAGES,
                        SLOTS,
                        INDEXED,
                    ),
                ),
                (
                    _load_both,
                    (
                        x,
                        w,
                        x_scale,
                        a,
                        b,
                        s,
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
                        m_sizes_step,
                        STAGES,
                        GROUP_M,
                        EXPERTS,
                    ),
                ),
            ],
            [4, 1],
            [REGISTERS, 504 - 2 * REGISTERS],
        )
    if ((flags & ZERO_TAIL_FLAG) != 0) & ((flags & SCATTER_FLAG) == 0 if INDEXED else True):
        zero_tail(y, m_sizes, m_sizes_step, M, E, N, stride_y_m, EXPERTS)
