"""The grouped GEMM by rows for sm_90, warp-specialised: one warp loads through TMA, two warpgroups multiply.

If rows of x are gathered, four warps load, x through pointers.
If rows of y are scattered, one more warp clears the rows that no index names (kernels/gluon/zero_rows.py).
A tile has 128 rows, 64 for each warpgroup (kernels/gluon/consumer.py). Programs take tiles from a counter; most of the
128-column tiles that warpgroups take in turns (kernels/gluon/pingpong.py) are assigned beforehand. The arguments are
those of ``rows`` in kernels/portable_plain/rows.py, and ``counter``, an int32 that is zero before and after.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier

from ..gluon.consumer import multiply, tables
from ..gluon.pingpong import PART, multiply_in_turns, ordering, publish_turn
from ..gluon.pipeline import (
    NARROW_BIT,
    SCATTER_FLAG,
    WHOLE_BIT,
    ZERO_TAIL_FLAG,
    add,
    advance,
    barriers,
    begin,
    draw,
    expect,
    expert_ends,
    grouped,
    next_tile,
    publish,
    tile_of,
    tma_load,
    told,
    view,
    zero_tail,
)
from ..gluon.zero_rows import clear_unnamed
from .gather import copy_rows, rows_at


@gluon.jit
def _load_parts(w, b, bar, expert, col, start, stage, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, W_KN: gl.constexpr):
    """A step of w for a tile that one warpgroup multiplies, by 64 columns."""
    for j in gl.static_range(BLOCK_N // PART):
        part = b.index(stage * (BLOCK_N // PART) + j)
        n = col * BLOCK_N + j * PART
        if W_KN:
            part = view(part, w.dtype, [1, BLOCK_K, PART], w.layout)
            tma_load(w, [expert, start, n], bar, part)
        else:
            part = view(part, w.dtype, [1, PART, BLOCK_K], w.layout)
            tma_load(w, [expert, n, start], bar, part)


@gluon.jit
def _load_halves(
    w,
    b,
    bar,
    expert,
    first,
    second,
    wide,
    start,
    stage,
    HALF: gl.constexpr,
    BLOCK_K: gl.constexpr,
    W_KN: gl.constexpr,
):
    """Load a step of w for a tile of both warpgroups: columns from ``first`` on, if it is wide also from ``second``."""
    if W_KN:
        left = view(b.index(stage * 2), w.dtype, [1, BLOCK_K, HALF], w.layout)
        right = view(b.index(stage * 2 + 1), w.dtype, [1, BLOCK_K, HALF], w.layout)
        tma_load(w, [expert, start, first], bar, left)
        tma_load(w, [expert, start, second], bar, right, pred=wide)
    else:
        left = view(b.index(stage * 2), w.dtype, [1, HALF, BLOCK_K], w.layout)
        right = view(b.index(stage * 2 + 1), w.dtype, [1, HALF, BLOCK_K], w.layout)
        tma_load(w, [expert, first, start], bar, left)
        tma_load(w, [expert, second, start], bar, right, pred=wide)


@gluon.jit
def _load_rows(
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
    moved,
    M,
    N,
    K,
    E,
    R,
    m_sizes_step,
    stride_x_m,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    EXPERTS: gl.constexpr,
    W_KN: gl.constexpr,
    GATHER: gl.constexpr,
    GATED: gl.constexpr,
    PINGPONG: gl.constexpr,
    LOW_RANK: gl.constexpr,
):
    """The loading warp of the row-grouped GEMM; four warps load gathered rows of x, through pointers.

    A tile whose right half is past the last column is loaded at half its width. The last tiles are split in halves, if
    there are at most as many halves as programs. In PINGPONG code every tile is whole.
    A program takes its next tile from the counter a few steps before the loads of the current tile end (K > 0). If it
    takes it before they begin, a call takes up to 1.13 x as long, as the tile waits while other programs are idle.
    In PINGPONG code tiles of 128 columns are assigned beforehand, except those of the last rounds: a call takes up to
    1.08 x as long if all tiles come from the counter, and 1.06 x if none do. With few full rounds all come from the
    counter, else a call takes up to 1.06 x as long (docs/inside/trials.md, tiles-drawn-late).
    """
    DRAWN_ROUNDS: gl.constexpr = 2
    FEW_ROUNDS: gl.constexpr = 4
    AHEAD: gl.constexpr = 4  # steps: 6 is within 0.5 % in the mean, and 2 as good as 6
    HALF: gl.constexpr = BLOCK_N // 2
    WARPS: gl.constexpr = 4 if GATHER else 1
    layout: gl.constexpr = gl.BlockedLayout([EXPERTS // 32], [32], [WARPS], [0])  # each warp has all
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_K, BLOCK_K // 8], [4, 1], [1, 0])
    half_bytes: gl.constexpr = 64 * BLOCK_K * w.dtype.primitive_bitwidth // 8
    b_bytes: gl.constexpr = HALF * BLOCK_K * w.dtype.primitive_bitwidth // 8
    tiles_n = gl.cdiv(N, BLOCK_N)
    steps = gl.cdiv(K, BLOCK_K)
    draw_at = gl.maximum(steps - AHEAD, 0) * BLOCK_K
    if LOW_RANK:
        steps += gl.cdiv(R, BLOCK_K)
    count, end = expert_ends(m_sizes, m_sizes_step, M, E, EXPERTS, layout)
    tile_end = gl.associative_scan((count // 128 + (count % 128 != 0).to(gl.int32)) * tiles_n, 0, add)
    whole = gl.max(tile_end, 0)
    last = whole % gl.num_programs(0)
    split = gl.where((2 * last <= gl.num_programs(0)) & (GATED == 0) & (PINGPONG == 0), last, 0)
    whole -= split
    total = whole + 2 * split
    dealt = gl.num_programs(0)
    if PINGPONG and BLOCK_N == 2 * PART:
        rounds = total // gl.num_programs(0)
        dealt *= gl.where(rounds > FEW_ROUNDS, rounds - DRAWN_ROUNDS, rounds + 1)
    stage, phase, slot, turn = begin()
    number = gl.program_id(0)
    while number < total:
        past = gl.maximum(number - whole, 0)
        tile = number - past + past // 2
        done = tile_end <= tile
        expert = gl.sum(done.to(gl.int32), 0)
        first_tile = gl.max(gl.where(done, tile_end, 0), 0)
        row_start = gl.max(gl.where(done, end, 0), 0)
        row_end = gl.min(gl.where(done, M, end), 0)
        row_tile, col = grouped(tile - first_tile, gl.cdiv(row_end - row_start, 128), tiles_n, GROUP_M)
        row = row_start + row_tile * 128
        if GATED:
            second = N // 2 + col * HALF
            wide = col >= 0
        elif PINGPONG:
            wide = col >= 0
        else:
            col = col * 2 + past % 2
            second = (col + 1) * HALF
            wide = (number < whole) & (second < N)
        word = steps | (expert << 20) | gl.where(wide, 0, NARROW_BIT)
        place = col
        if GATHER:
            k = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, ROWS))
            rows_of_x, there, has_all = rows_at(x, moved, row, row_end, stride_x_m, k, ROWS)
            place = col | gl.where(has_all, WHOLE_BIT, 0)
        if PINGPONG:
            publish_turn(queue, filled, free, slot, turn, row, col, row_end, word, stage, phase, WARPS)
        else:
            publish(queue, filled, free, slot, turn, row, place, row_end, word, WARPS)
        slot, turn = advance(slot, turn, 2)
        number += gl.num_programs(0)
        drawn = gl.to_tensor(0)
        both = row + 64 < row_end
        for start in range(0, K, BLOCK_K):
            if (start == draw_at) & (number >= dealt):
                drawn = gl.atomic_add(counter, 1, sem="relaxed") if GATHER else draw(counter)
            mbarrier.wait(empty.index(stage), phase ^ 1)
            bar = full.index(stage)
            if GATHER:
                mbarrier.expect(bar, b_bytes, pred=wide == 0)
                mbarrier.expect(bar, 2 * b_bytes, pred=wide)
            else:
                expect(bar, half_bytes, both, b_bytes, wide)
                tma_load(x, [row, start], bar, a.index(stage * 2))
                tma_load(x, [row + 64, start], bar, a.index(stage * 2 + 1), pred=both)
            if PINGPONG:
                _load_parts(w, b, bar, expert, col, start, stage, BLOCK_N, BLOCK_K, W_KN)
            else:
                _load_halves(w, b, bar, expert, col * HALF, second, wide, start, stage, HALF, BLOCK_K, W_KN)
            if GATHER:
                tile_of_x = tile_of(a, stage, 2, 128, BLOCK_K)
                copy_rows(tile_of_x, rows_of_x, there, k, K - start)
                async_copy.mbarrier_arrive(bar, increment_count=False)
                rows_of_x += BLOCK_K
            stage, phase = advance(stage, phase, STAGES)
        if LOW_RANK:
            for start in range(0, R, BLOCK_K):
                mbarrier.wait(empty.index(stage), phase ^ 1)
                bar = full.index(stage)
                expect(bar, half_bytes, both, b_bytes, wide)
                tma_load(low_x, [row, start], bar, a.index(stage * 2))
                tma_load(low_x, [row + 64, start], bar, a.index(stage * 2 + 1), pred=both)
                if PINGPONG:
                    _load_parts(low_w, b, bar, expert, col, start, stage, BLOCK_N, BLOCK_K, W_KN)
                else:
                    _load_halves(low_w, b, bar, expert, col * HALF, second, wide, start, stage, HALF, BLOCK_K, W_KN)
                if GATHER:
                    async_copy.mbarrier_arrive(bar, increment_count=False)
                stage, phase = advance(stage, phase, STAGES)
        if number >= dealt:
            number = next_tile(counter, drawn if GATHER else told(drawn), dealt, total)
    publish(queue, filled, free, slot, turn, -1, 0, 0, 0, WARPS)
    if PINGPONG:  # each warpgroup has a slot of its own
        slot, turn = advance(slot, turn, 2)
        publish(queue, filled, free, slot, turn, -1, 0, 0, 0, WARPS)


@gluon.jit
def rows_specialized(
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
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    SLOTS: gl.constexpr,
    GROUP_M: gl.constexpr,
    EXPERTS: gl.constexpr,
    W_KN: gl.constexpr,
    INDEXED: gl.constexpr,
    GATHER: gl.constexpr,
    GATED: gl.constexpr,
    PINGPONG: gl.constexpr,
    REGISTERS: gl.constexpr,
    LOW_RANK: gl.constexpr,
):
    """y[to(m), n] = weight(m) * (sum_k x[from(m), k] * w[expert of m, n, k] + bias[expert of m, n]).

    ``rows`` (portable_plain). x and w come through TMA, x in GATHER code through pointers; y leaves through
    ``y_map``, a ragged descriptor (``kernels/entry.py``, RAGGED_SIZES), in INDEXED code through pointers:
    GATHER code has both, and uses the descriptor for tiles without scatter, weight or bias.
    GATED code stores silu(gate) * up instead, y [M, N // 2]: a tile of w is HALF rows of gate, then those of up.
    LOW_RANK code has low_x and low_w through TMA, in steps of the reduction after those of x and w.
    In PINGPONG code, which gathers no rows, the warpgroups take whole tiles in turns (kernels/gluon/pingpong.py).
    """
    element: gl.constexpr = w.dtype
    lines: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    a = gl.allocate_shared_memory(element, [2 * STAGES, 64, BLOCK_K], lines)
    WIDTH: gl.constexpr = PART if PINGPONG else BLOCK_N // 2
    COUNT: gl.constexpr = BLOCK_N // PART * STAGES + (1 if BLOCK_N == 3 * PART else 0) if PINGPONG else 2 * STAGES
    if W_KN:
        b = gl.allocate_shared_memory(element, [COUNT, BLOCK_K, WIDTH], lines)
    else:
        b = gl.allocate_shared_memory(element, [COUNT, WIDTH, BLOCK_K], lines)
    buffers = gl.allocate_shared_memory(element, [2 * SLOTS, 64, 64], lines)
    READERS: gl.constexpr = 1 if PINGPONG else 2
    full, empty, queue, filled, free = barriers(STAGES, 129 if GATHER else 1, READERS, READERS)
    moved = (index, row_weights, bias, index_step, index_end, x_divisor, flags)
    CLEARS: gl.constexpr = INDEXED and not GATHER
    noted = tables(128 if PINGPONG else 64) if INDEXED else ()
    if PINGPONG:
        order = ordering()
    gl.barrier()
    # (Each call in full: of a list that is put together the language forgets which values are constants.)
    if PINGPONG and CLEARS:
        gl.warp_specialize(
            [
                (
                    multiply_in_turns,
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
                        BLOCK_N,
                        STAGES,
                        SLOTS,
                        True,
                        not W_KN,
                        False,
                        False,
                        INDEXED,
                    ),
                ),
                (
                    multiply_in_turns,
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
                        BLOCK_N,
                        STAGES,
                        SLOTS,
                        True,
                        not W_KN,
                        False,
                        False,
                        INDEXED,
                    ),
                ),
                (
                    _load_rows,
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
                        moved,
                        M,
                        N,
                        K,
                        E,
                        R,
                        m_sizes_step,
                        stride_x_m,
                        BLOCK_N,
                        BLOCK_K,
                        STAGES,
                        GROUP_M,
                        EXPERTS,
                        W_KN,
                        GATHER,
                        GATED,
                        PINGPONG,
                        LOW_RANK,
                    ),
                ),
                (clear_unnamed, (y, m_sizes, moved, M, E, N, stride_y_m, m_sizes_step)),
            ],
            [4, 1, 1],
            [REGISTERS, 504 - 2 * REGISTERS, 504 - 2 * REGISTERS],
        )
    elif PINGPONG:
        gl.warp_specialize(
            [
                (
                    multiply_in_turns,
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
                        BLOCK_N,
                        STAGES,
                        SLOTS,
                        True,
                        not W_KN,
                        False,
                        False,
                        INDEXED,
                    ),
                ),
                (
                    multiply_in_turns,
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
                        BLOCK_N,
                        STAGES,
                        SLOTS,
                        True,
                        not W_KN,
                        False,
                        False,
                        INDEXED,
                    ),
                ),
                (
                    _load_rows,
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
                        moved,
                        M,
                        N,
                        K,
                        E,
                        R,
                        m_sizes_step,
                        stride_x_m,
                        BLOCK_N,
                        BLOCK_K,
                        STAGES,
                        GROUP_M,
                        EXPERTS,
                        W_KN,
                        GATHER,
                        GATED,
                        PINGPONG,
                        LOW_RANK,
                    ),
                ),
            ],
            [4, 1],
            [REGISTERS, 504 - 2 * REGISTERS],
        )
    elif CLEARS:
        gl.warp_specialize(
            [
                (
                    multiply,
                    (
                        0,
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
                        BLOCK_N,
                        STAGES,
                        SLOTS,
                        True,
                        not W_KN,
                        False,
                        INDEXED,
                        GATHER,
                        GATED,
                        not GATED,
                    ),
                ),
                (
                    multiply,
                    (
                        1,
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
                        BLOCK_N,
                        STAGES,
                        SLOTS,
                        True,
                        not W_KN,
                        False,
                        INDEXED,
                        GATHER,
                        GATED,
                        not GATED,
                    ),
                ),
                (
                    _load_rows,
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
                        moved,
                        M,
                        N,
                        K,
                        E,
                        R,
                        m_sizes_step,
                        stride_x_m,
                        BLOCK_N,
                        BLOCK_K,
                        STAGES,
                        GROUP_M,
                        EXPERTS,
                        W_KN,
                        GATHER,
                        GATED,
                        PINGPONG,
                        LOW_RANK,
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
                    multiply,
                    (
                        0,
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
                        BLOCK_N,
                        STAGES,
                        SLOTS,
                        True,
                        not W_KN,
                        False,
                        INDEXED,
                        GATHER,
                        GATED,
                        not GATED,
                    ),
                ),
                (
                    multiply,
                    (
                        1,
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
                        BLOCK_N,
                        STAGES,
                        SLOTS,
                        True,
                        not W_KN,
                        False,
                        INDEXED,
                        GATHER,
                        GATED,
                        not GATED,
                    ),
                ),
                (
                    _load_rows,
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
                        moved,
                        M,
                        N,
                        K,
                        E,
                        R,
                        m_sizes_step,
                        stride_x_m,
                        BLOCK_N,
                        BLOCK_K,
                        STAGES,
                        GROUP_M,
                        EXPERTS,
                        W_KN,
                        GATHER,
                        GATED,
                        PINGPONG,
                        LOW_RANK,
                    ),
                ),
            ],
            [4, 4 if GATHER else 1],
            [REGISTERS, 504 - 2 * REGISTERS],
        )
    if ((flags & ZERO_TAIL_FLAG) != 0) & ((flags & SCATTER_FLAG) == 0 if CLEARS else True):
        zero_tail(y, m_sizes, m_sizes_step, M, E, N // 2 if GATED else N, stride_y_m, EXPERTS)
