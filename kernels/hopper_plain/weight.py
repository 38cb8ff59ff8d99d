"""dW for sm_90, warp-specialised: one warp loads through TMA, two warpgroups multiply.

A tile is 128 rows of dw, 64 for each warpgroup (kernels/gluon/consumer.py), by BLOCK_K columns. If the warpgroups take
whole tiles in turns (kernels/gluon/pingpong.py), one more warp announces the tiles. Programs take tiles from a counter.
The arguments are those of ``weight`` in kernels/portable_plain/weight.py, and ``counter``, an int32 that is zero before
and after.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ..gluon.consumer import multiply
from ..gluon.pingpong import PART, multiply_in_turns, ordering, publish_turn
from ..gluon.pipeline import (
    INDEX_END,
    NARROW_BIT,
    add,
    advance,
    barriers,
    begin,
    counts,
    draw,
    expect,
    expert_ends,
    grouped,
    next_tile,
    publish,
    take_all,
    tile_of,
    tma_load,
    told,
    view,
)

FEW_ROWS: gl.constexpr = gl.constexpr(96)  # an expert
FEW_ROWS_STREAMED: gl.constexpr = gl.constexpr(56)


@gluon.jit
def _by_rows(m_sizes, m_sizes_step, M, E, EXPERTS: gl.constexpr, LAYOUT: gl.constexpr):
    """The place of each expert, [EXPERTS] int32, where those with the most rows come first."""
    mine = counts(m_sizes, m_sizes_step, M, E, EXPERTS, gl.SliceLayout(1, LAYOUT))[:, None]
    other = counts(m_sizes, m_sizes_step, M, E, EXPERTS, gl.SliceLayout(0, LAYOUT))[None, :]
    this = gl.arange(0, EXPERTS, layout=gl.SliceLayout(1, LAYOUT))[:, None]
    that = gl.arange(0, EXPERTS, layout=gl.SliceLayout(0, LAYOUT))[None, :]
    return gl.sum(((other > mine) | ((other == mine) & (that < this))).to(gl.int32), 1)


@gluon.jit
def _by_size(count, M, E, EXPERTS: gl.constexpr, LAYOUT: gl.constexpr):
    """Like ``_by_rows`` in few steps: experts with twice the mean rows come first, then those with the mean.

    For up to 512 experts. Each of the three sizes has 10 bits of a word, so one scan counts all three.
    """
    expert = gl.arange(0, EXPERTS, layout=LAYOUT)
    share = count.to(gl.float32) * (E.to(gl.float32) / M.to(gl.float32))
    field = (share < 2.0).to(gl.int32) * 10 + (share < 1.0).to(gl.int32) * 10
    one = (expert < E).to(gl.int32) << field
    upto = gl.associative_scan(one, 0, add)
    first = gl.sum(one, 0) * ((1 << 10) + (1 << 20))  # each field gets the sum of the sizes before it
    place = ((first >> field) & 1023) + ((upto >> field) & 1023) - 1
    return gl.where(expert < E, place, -1)


@gluon.jit
def _ask(at, first, rows, stride, columns):
    """Prefetch this program's share of the lines of ``rows`` rows from ``first`` on into L2, without waiting.

    From 2^25 elements on, which no L2 holds, nothing is prefetched.
    """
    TOO_MUCH: gl.constexpr = 1 << 25
    LINES: gl.constexpr = 32 * 128  # bytes: a line for each lane
    size = (rows - 1).to(gl.int64) * stride + columns
    if (rows > 0) & (size < TOO_MUCH):
        end = size.to(gl.int32) * (at.dtype.element_ty.primitive_bitwidth // 8)
        begin = at + first.to(gl.int64) * stride
        for line in range(gl.program_id(0) * LINES, end, gl.num_programs(0) * LINES):
            gl.inline_asm_elementwise(
                "{.reg .b32 lane, o; .reg .b64 a; .reg .pred in; mov.u32 lane, %laneid; shl.b32 lane, lane, 7; "
                "add.u32 o, lane, $2; setp.lt.u32 in, o, $3; cvt.u64.u32 a, o; add.u64 a, a, $1; "
                "@in prefetch.global.L2 [a]; mov.b32 $0, 0;}",
                "=r,l,r,r",
                [begin.to(gl.int64, bitcast=True), line, end],
                dtype=gl.int32,
                is_pure=False,
                pack=1,
            )


@gluon.jit
def _rows_of(end, expert, EXPERTS: gl.constexpr, LAYOUT: gl.constexpr):
    """(number of an expert's rows, the end of its rows)."""
    i = gl.arange(0, EXPERTS, layout=LAYOUT)
    row_start = gl.max(gl.where(i < expert, end, 0), 0)
    row_end = gl.max(gl.where(i <= expert, end, 0), 0)
    return row_end - row_start, row_end


@gluon.jit
def _load_weight(
    dy,
    x,
    dy_at,
    x_at,
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
    stride_dy_m,
    stride_x_m,
    m_sizes_step,
    BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    EXPERTS: gl.constexpr,
    NARROW: gl.constexpr,
    STREAMED: gl.constexpr,
):
    """The loading warp of dW: both operands end with the expert's rows, see ``kernels/entry.py``,
    RAGGED_SIZES.

    In NARROW code a tile whose right half lies past the last column is loaded at half its width. Where tiles are few
    the experts with the most rows come first, so that the last tiles, which other programs wait for, are short.
    Where rows are few, storing is what takes the time, and it goes faster the nearer together the tiles lie that
    programs store at once: then a program has one tile waiting, not two. STREAMED code, which loads from L2, has two
    from fewer rows on (1.04 x as fast with 64 rows an expert: docs/inside/trials.md, streamed-tiles-ahead).
    STREAMED code asks L2 for the rows of up to 32 experts at a time, all programs together: what is written all the
    while takes 1.18 x as long with a few reads in between (docs/inside/trials.md, reads-among-writes). Of 1, 2,
    4 ... experts it takes the most whose rows, on average, are ASKED bytes at most: more of them leave L2 too early
    (with 32 always up to 1.07 x as long at T <= 2048: docs/inside/trials.md, tiles-fitted).
    """
    WARPS: gl.constexpr = 1
    FEW: gl.constexpr = 32
    TOGETHER: gl.constexpr = 5  # 2^5 experts
    ASKED: gl.constexpr = 13 << 19
    layout: gl.constexpr = gl.BlockedLayout([EXPERTS // 32], [32], [1], [0])
    half_bytes: gl.constexpr = 64 * BLOCK_M * x.dtype.primitive_bitwidth // 8
    HALF: gl.constexpr = BLOCK_K // 2
    b_bytes: gl.constexpr = HALF * BLOCK_M * x.dtype.primitive_bitwidth // 8
    tiles_n = gl.cdiv(N, 128)
    tiles_k = gl.cdiv(K, BLOCK_K)
    per_expert = tiles_n * tiles_k
    total = E * per_expert
    SMALL: gl.constexpr = FEW_ROWS_STREAMED if STREAMED else FEW_ROWS
    late = M < SMALL * E
    pairs: gl.constexpr = gl.BlockedLayout([4, 8], [8, 4], [1, 1], [1, 0])
    by_rows = (E <= FEW) & (total <= 16 * gl.num_programs(0))
    place = gl.arange(0, FEW, layout=gl.SliceLayout(1, pairs))
    if by_rows:
        place = _by_rows(m_sizes, m_sizes_step, M, E, FEW, pairs)
    _count, end = expert_ends(m_sizes, m_sizes_step, M, E, EXPERTS, layout)
    stage, phase, slot, turn = begin()
    tile = gl.program_id(0)
    asked = gl.to_tensor(-1)
    together = gl.to_tensor(TOGETHER)
    if STREAMED:
        rows_bytes = M.to(gl.int64) * (N + K) * (x.dtype.primitive_bitwidth // 8)
        while (together > 0) & ((rows_bytes << together) > E.to(gl.int64) * ASKED):
            together -= 1
    while tile < total:
        expert = tile // per_expert
        if STREAMED:  # noqa: SIM102 - one is known when it is compiled, the other when it runs
            if (expert >> together != asked) & (by_rows == 0):
                asked = expert >> together
                e = gl.arange(0, EXPERTS, layout=layout)
                first = gl.max(gl.where(e < asked << together, end, 0), 0)
                rows = gl.max(gl.where(e < (asked + 1) << together, end, 0), 0) - first
                _ask(x_at, first, rows, stride_x_m, K)
                _ask(dy_at, first, rows, stride_dy_m, N)
        inner = tile - expert * per_expert
        if by_rows:
            this = gl.arange(0, FEW, layout=gl.SliceLayout(1, pairs))
            expert = gl.sum(gl.where(place == expert, this, 0), 0)
        n, k = grouped(inner, tiles_n, tiles_k, GROUP_M)
        n *= 128
        count, row_end = _rows_of(end, expert, EXPERTS, layout)
        second = (2 * k + 1) * HALF
        wide = second < K if NARROW else gl.to_tensor(True)
        word = gl.cdiv(count, BLOCK_M) | (expert << 20) | gl.where(wide, 0, NARROW_BIT)
        if late:  # wait until the previous tile, in the other slot, is taken
            mbarrier.wait(free.index(1 - slot), turn ^ 1 ^ slot)
        publish(queue, filled, free, slot, turn, n, 2 * k, N, word, WARPS)
        slot, turn = advance(slot, turn, 2)
        drawn = draw(counter)  # the result is read after this tile's loads are issued
        both = n + 64 < N
        for row in range(0, count, BLOCK_M):
            mbarrier.wait(empty.index(stage), phase ^ 1)
            bar = full.index(stage)
            expect(bar, half_bytes, both, b_bytes, wide)
            at = INDEX_END - count + row
            left = view(a.index(stage * 2), x.dtype, [1, 1, BLOCK_M, 64], dy.layout)
            right = view(a.index(stage * 2 + 1), x.dtype, [1, 1, BLOCK_M, 64], dy.layout)
            tma_load(dy, [INDEX_END, row_end, at, n], bar, left)
            tma_load(dy, [INDEX_END, row_end, at, n + 64], bar, right, pred=both)
            if NARROW:
                b_left = view(b.index(stage * 2), x.dtype, [1, 1, BLOCK_M, HALF], x.layout)
                b_right = view(b.index(stage * 2 + 1), x.dtype, [1, 1, BLOCK_M, HALF], x.layout)
                tma_load(x, [INDEX_END, row_end, at, k * BLOCK_K], bar, b_left)
                tma_load(x, [INDEX_END, row_end, at, second], bar, b_right, pred=wide)
            else:
                b_tile = view(tile_of(b, stage, 2, BLOCK_M, BLOCK_K), x.dtype, [1, 1, BLOCK_M, BLOCK_K], x.layout)
                tma_load(x, [INDEX_END, row_end, at, k * BLOCK_K], bar, b_tile)
            stage, phase = advance(stage, phase, STAGES)
        tile = next_tile(counter, told(drawn), gl.num_programs(0), total)
    publish(queue, filled, free, slot, turn, -1, 0, 0, 0, WARPS)


@gluon.jit
def _schedule(
    near,
    queue,
    filled,
    free,
    places,
    m_sizes,
    counter,
    M,
    N,
    K,
    E,
    m_sizes_step,
    BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    EXPERTS: gl.constexpr,
):
    """The warp that announces the tiles in PINGPONG code: the loading warp has no time to look them up.

    It takes a tile from the counter when the loading warp is ``near`` the end of the previous tile. If the loading warp
    did this, dW took 1.01 to 1.03 x as long in the mean, and up to 1.21 x with few tiles. If tiles were taken as soon
    as the previous one was announced, dW took up to 1.14 x as long (docs/inside/trials.md, tiles-drawn-late).
    """
    WARPS: gl.constexpr = 1
    MANY_ROWS: gl.constexpr = 256  # an expert
    MANY_TILES: gl.constexpr = 64  # a program
    layout: gl.constexpr = gl.BlockedLayout([EXPERTS // 32], [32], [1], [0])
    tiles_n = gl.cdiv(N, 128)
    tiles_k = gl.cdiv(K, BLOCK_K)
    per_expert = tiles_n * tiles_k
    total = E * per_expert
    late = M < FEW_ROWS * E
    rows, end = expert_ends(m_sizes, m_sizes_step, M, E, EXPERTS, layout)
    by_rows = (total <= MANY_TILES * gl.num_programs(0)) & (M >= MANY_ROWS * E)
    if by_rows:
        places.store(_by_size(rows, M, E, EXPERTS, layout))
    stage, phase, slot, turn = begin()
    parity = gl.to_tensor(0)
    tile = gl.program_id(0)
    while tile < total:
        expert = tile // per_expert
        inner = tile - expert * per_expert
        if by_rows:
            place = places.load(layout)
            expert = gl.sum(gl.where(place == expert, gl.arange(0, EXPERTS, layout=layout), 0), 0)
        n, k = grouped(inner, tiles_n, tiles_k, GROUP_M)
        count, row_end = _rows_of(end, expert, EXPERTS, layout)
        steps = gl.maximum(gl.cdiv(count, BLOCK_M), 1)
        word = steps | (expert << 20)
        publish_turn(queue, filled, free, slot, turn, n * 128, k, N, word, stage, phase, WARPS, count, row_end)
        stage += steps
        phase = phase ^ ((stage // STAGES) & 1)
        stage = stage % STAGES
        slot, turn = advance(slot, turn, 2)
        mbarrier.wait(near.index(0), parity)
        parity = parity ^ 1
        if late:  # like ``_load_weight``, take the next tile only when its slot is free
            mbarrier.wait(free.index(slot), turn ^ 1)
        tile = next_tile(counter, gl.atomic_add(counter, 1, sem="relaxed"), gl.num_programs(0), total)
    for _ in gl.static_range(2):  # row -1 ends a warpgroup; each reads its own slot
        publish(queue, filled, free, slot, turn, -1, 0, 0, 0, WARPS)
        slot, turn = advance(slot, turn, 2)


@gluon.jit
def _load_told(
    dy,
    x,
    a,
    b,
    full,
    empty,
    near,
    queue,
    filled,
    free,
    N,
    BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
):
    """The loading warp of PINGPONG code, which signals when it is ``near`` the end of each tile.

    An expert without rows has one step, of zeros: else the last tile's sums would stay (kernels/gluon/pingpong.py).
    """
    AHEAD: gl.constexpr = 6  # steps: with 4 it takes 1.001 to 1.005 x as long in the mean
    PARTS: gl.constexpr = BLOCK_K // PART
    half_bytes: gl.constexpr = 64 * BLOCK_M * x.dtype.primitive_bitwidth // 8
    stage, phase, slot, turn = begin()
    n, place, _end, _word, count, row_end = take_all(queue, filled, free, slot, turn, 1)
    while n >= 0:
        first = (place & 0xFFFFF) * BLOCK_K
        both = n + 64 < N
        rows = gl.maximum(count, 1)
        last = gl.cdiv(rows, BLOCK_M) * BLOCK_M
        for row in range(0, rows, BLOCK_M):
            mbarrier.wait(empty.index(stage), phase ^ 1)
            mbarrier.arrive(near.index(0), count=1, pred=row == gl.maximum(last - AHEAD * BLOCK_M, 0))
            bar = full.index(stage)
            mbarrier.expect(bar, (1 + PARTS) * half_bytes, pred=both == 0)
            mbarrier.expect(bar, (2 + PARTS) * half_bytes, pred=both)
            at = INDEX_END - count + row
            left = view(a.index(stage * 2), x.dtype, [1, 1, BLOCK_M, 64], dy.layout)
            right = view(a.index(stage * 2 + 1), x.dtype, [1, 1, BLOCK_M, 64], dy.layout)
            tma_load(dy, [INDEX_END, row_end, at, n], bar, left)
            tma_load(dy, [INDEX_END, row_end, at, n + 64], bar, right, pred=both)
            for j in gl.static_range(PARTS):
                part = view(b.index(stage * PARTS + j), x.dtype, [1, 1, BLOCK_M, PART], x.layout)
                tma_load(x, [INDEX_END, row_end, at, first + j * PART], bar, part)
            stage, phase = advance(stage, phase, STAGES)
        slot, turn = advance(slot, turn, 2)
        n, place, _end, _word, count, row_end = take_all(queue, filled, free, slot, turn, 1)


@gluon.jit
def weight_specialized(
    dy,
    x,
    dw,
    m_sizes,
    counter,
    dy_at,
    x_at,
    M,
    N,
    K,
    E,
    stride_dy_m,
    stride_x_m,
    stride_dw_e,
    stride_dw_row,
    m_sizes_step,
    BLOCK_M: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    SLOTS: gl.constexpr,
    GROUP_M: gl.constexpr,
    EXPERTS: gl.constexpr,
    NARROW: gl.constexpr,
    PINGPONG: gl.constexpr,
    ACROSS: gl.constexpr,
    STREAMED: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """dw[e, n, k] = sum over the expert's rows m of dy[m, n] * x[m, k]: ``weight`` (portable_plain).

    All three are TMA descriptors; STREAMED code has the addresses of dy and x too. ACROSS: x and dy, and K and N, have
    changed places, and each tile is transposed when it is stored (kernels/gluon/pingpong.py).
    """
    element: gl.constexpr = x.dtype
    BITS: gl.constexpr = element.primitive_bitwidth
    lines: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=BITS, rank=2)
    a = gl.allocate_shared_memory(element, [2 * STAGES, BLOCK_M, 64], lines)
    WIDTH: gl.constexpr = PART if PINGPONG else BLOCK_K // 2
    COUNT: gl.constexpr = BLOCK_K // PART * STAGES + 1 if PINGPONG else 2 * STAGES
    b = gl.allocate_shared_memory(element, [COUNT, BLOCK_M, WIDTH], lines)
    buffers = gl.allocate_shared_memory(element, [2 * SLOTS, 64, 64], lines)
    full, empty, queue, filled, free = barriers(STAGES, 1, 1 if PINGPONG else 2, 2)
    if PINGPONG:
        order = ordering()
        near = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
        mbarrier.init(near.index(0), count=1)
        places = gl.allocate_shared_memory(gl.int32, [EXPERTS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        gl.barrier()
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
                        None,
                        dw,
                        (),
                        (),
                        K,
                        stride_dw_row,
                        BLOCK_K,
                        STAGES,
                        SLOTS,
                        False,
                        False,
                        True,
                        ACROSS,
                        False,
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
                        None,
                        dw,
                        (),
                        (),
                        K,
                        stride_dw_row,
                        BLOCK_K,
                        STAGES,
                        SLOTS,
                        False,
                        False,
                        True,
                        ACROSS,
                        False,
                    ),
                ),
                (
                    _load_told,
                    (
                        x if ACROSS else dy,
                        dy if ACROSS else x,
                        a,
                        b,
                        full,
                        empty,
                        near,
                        queue,
                        filled,
                        free,
                        K if ACROSS else N,
                        BLOCK_M,
                        BLOCK_K,
                        STAGES,
                    ),
                ),
                (
                    _schedule,
                    (
                        near,
                        queue,
                        filled,
                        free,
                        places,
                        m_sizes,
                        counter,
                        M,
                        K if ACROSS else N,
                        N if ACROSS else K,
                        E,
                        m_sizes_step,
                        BLOCK_M,
                        BLOCK_K,
                        STAGES,
                        GROUP_M,
                        EXPERTS,
                    ),
                ),
            ],
            [4, 1, 1],
            [REGISTERS, 504 - 2 * REGISTERS, 504 - 2 * REGISTERS],
        )
    else:
        gl.barrier()
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
                        None,
                        dw,
                        (),
                        (),
                        K,
                        stride_dw_row,
                        BLOCK_K,
                        STAGES,
                        SLOTS,
                        False,
                        False,
                        True,
                        False,
                        False,
                        False,
                        NARROW,
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
                        None,
                        dw,
                        (),
                        (),
                        K,
                        stride_dw_row,
                        BLOCK_K,
                        STAGES,
                        SLOTS,
                        False,
                        False,
                        True,
                        False,
                        False,
                        False,
                        NARROW,
                    ),
                ),
                (
                    _load_weight,
                    (
                        dy,
                        x,
                        dy_at,
                        x_at,
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
                        stride_dy_m,
                        stride_x_m,
                        m_sizes_step,
                        BLOCK_M,
                        BLOCK_K,
                        STAGES,
                        GROUP_M,
                        EXPERTS,
                        NARROW,
                        STREAMED,
                    ),
                ),
            ],
            [4, 1],
            [REGISTERS, 504 - 2 * REGISTERS],
        )
