"""dW for sm_90, warp-specialised: one warp loads through TMA, two warpgroups multiply.

A tile is 128 rows of dw, 64 for each warpgroup (warpgroups.py), by BLOCK_K columns. Tiles are handed out as programs
become free. The arguments are those of ``grad_weight.weight``, and ``counter``, an int32 that is zero before and after.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from .pipeline import (
    INDEX_END,
    NARROW_BIT,
    add,
    advance,
    after,
    take_all,
    barriers,
    counts,
    draw,
    expect,
    expert_ends,
    grouped,
    next_tile,
    publish,
    told,
)
from .turns import PART, multiply_in_turns, ordering, publish_turn
from .warpgroups import multiply


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
    """The same in few steps, for up to 512 experts: of twice the mean rows and more, of the mean and more, the others.

    Each of these sizes has 10 bits of a word, so one scan counts all three.
    """
    expert = gl.arange(0, EXPERTS, layout=LAYOUT)
    share = count.to(gl.float32) * (E.to(gl.float32) / M.to(gl.float32))
    field = (share < 2.0).to(gl.int32) * 10 + (share < 1.0).to(gl.int32) * 10
    one = (expert < E).to(gl.int32) << field
    upto = gl.associative_scan(one, 0, add)
    first = gl.sum(one, 0) * ((1 << 10) + (1 << 20))  # in each field those of the sizes before it
    place = ((first >> field) & 1023) + ((upto >> field) & 1023) - 1
    return gl.where(expert < E, place, -1)


@gluon.jit
def _ask(at, first, rows, stride, columns):
    """Asks L2 for this program's share of the lines of ``rows`` rows from ``first`` on, and waits for nothing.

    Of 2^25 elements and more, which no L2 holds, nothing is asked for.
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
                "=r,l,r,r", [begin.to(gl.int64, bitcast=True), line, end], dtype=gl.int32, is_pure=False, pack=1,
            )  # fmt: skip


@gluon.jit
def _schedule(
    dy_at, x_at, queue, filled, free, places, m_sizes, counter, M, N, K, E, stride_dy_m, stride_x_m, m_sizes_step,
    BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    EXPERTS: gl.constexpr, NARROW: gl.constexpr, PINGPONG: gl.constexpr, STREAMED: gl.constexpr, LATE: gl.constexpr,
):  # fmt: skip
    """The loading warp of dW: both operands end with the expert's rows, see ``kernels/abi.py``, RAGGED_SIZES.

    In NARROW code a tile whose right half lies past the last column is loaded at half its width. Where tiles are few
    the experts with the most rows come first, so that the last tiles, which other programs wait for, are short. To look
    them up costs every tile: in PINGPONG code, where each tile is long, that is worth it for more of them.
    Where rows are few, storing is what takes the time, and it goes faster the nearer together the tiles lie that
    programs store at once: then a program has one tile waiting, not two, and asks for the next after its loads.
    STREAMED code asks L2 for the rows of 32 experts at a time, all programs together: what is written all the while
    takes 1.18 x as long with a few reads in between (benchmarks/results/trials/reads-among-writes.json).
    """
    WARPS: gl.constexpr = 1
    FEW: gl.constexpr = 32
    FEW_ROWS: gl.constexpr = 96  # an expert
    MANY_ROWS: gl.constexpr = 256
    MANY_TILES: gl.constexpr = 64  # a program
    TOGETHER: gl.constexpr = 32  # experts
    layout: gl.constexpr = gl.BlockedLayout([EXPERTS // 32], [32], [1], [0])
    HALF: gl.constexpr = BLOCK_K // 2
    tiles_n = gl.cdiv(N, 128)
    tiles_k = gl.cdiv(K, BLOCK_K)
    per_expert = tiles_n * tiles_k
    total = E * per_expert
    late = M < FEW_ROWS * E
    pairs: gl.constexpr = gl.BlockedLayout([4, 8], [8, 4], [1, 1], [1, 0])
    if PINGPONG:
        rows_of, end = expert_ends(m_sizes, m_sizes_step, M, E, EXPERTS, layout)
        by_rows = (total <= MANY_TILES * gl.num_programs(0)) & (M >= MANY_ROWS * E)
        if by_rows:
            places.store(_by_size(rows_of, M, E, EXPERTS, layout))
    else:
        by_rows = (E <= FEW) & (total <= 16 * gl.num_programs(0))
        place = gl.arange(0, FEW, layout=gl.SliceLayout(1, pairs))
        if by_rows:
            place = _by_rows(m_sizes, m_sizes_step, M, E, FEW, pairs)
        _count, end = expert_ends(m_sizes, m_sizes_step, M, E, EXPERTS, layout)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    slot = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    tile = gl.program_id(0)
    asked = gl.to_tensor(-1)
    while tile < total:
        expert = tile // per_expert
        if STREAMED:  # noqa: SIM102 - one is known when it is compiled, the other when it runs
            if (expert // TOGETHER != asked) & (by_rows == 0):
                asked = expert // TOGETHER
                e = gl.arange(0, EXPERTS, layout=layout)
                first = gl.max(gl.where(e < asked * TOGETHER, end, 0), 0)
                rows = gl.max(gl.where(e < (asked + 1) * TOGETHER, end, 0), 0) - first
                _ask(x_at, first, rows, stride_x_m, K)
                _ask(dy_at, first, rows, stride_dy_m, N)
        inner = tile - expert * per_expert
        if by_rows:
            if PINGPONG:
                place = places.load(layout)
                this = gl.arange(0, EXPERTS, layout=layout)
            else:
                this = gl.arange(0, FEW, layout=gl.SliceLayout(1, pairs))
            expert = gl.sum(gl.where(place == expert, this, 0), 0)
        n, k = grouped(inner, tiles_n, tiles_k, GROUP_M)
        n *= 128
        i = gl.arange(0, EXPERTS, layout=layout)
        row_start = gl.max(gl.where(i < expert, end, 0), 0)
        row_end = gl.max(gl.where(i <= expert, end, 0), 0)
        count = row_end - row_start
        steps = gl.cdiv(count, BLOCK_M)
        second = (2 * k + 1) * HALF
        wide = second < K if NARROW else gl.to_tensor(True)
        word = steps | (expert << 20) | gl.where(wide, 0, NARROW_BIT)
        if PINGPONG:
            publish_turn(queue, filled, free, slot, turn, n, k, N, word, stage, phase, WARPS, count, row_end)
            stage, phase = after(stage, phase, steps, STAGES)
        else:
            publish(queue, filled, free, slot, turn, n, 2 * k, N, word, WARPS, count, row_end)
        slot, turn = advance(slot, turn, 2)
        if late | LATE:  # wait until the slot is free
            mbarrier.wait(free.index(slot), turn ^ 1)
        tile = next_tile(counter, gl.atomic_add(counter, 1, sem="relaxed"), total)
    publish(queue, filled, free, slot, turn, -1, 0, 0, 0, WARPS)
    slot, turn = advance(slot, turn, 2)
    publish(queue, filled, free, slot, turn, -1, 0, 0, 0, WARPS)


@gluon.jit
def _load_weight(
    dy, x, a, b, full, empty, queue, filled, free, N, K,
    BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, NARROW: gl.constexpr, PINGPONG: gl.constexpr,
):  # fmt: skip
    half_bytes: gl.constexpr = 64 * BLOCK_M * x.dtype.primitive_bitwidth // 8
    HALF: gl.constexpr = BLOCK_K // 2
    b_bytes: gl.constexpr = HALF * BLOCK_M * x.dtype.primitive_bitwidth // 8
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    slot = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    n, k, _N, word, count, row_end = take_all(queue, filled, free, slot, turn, 1)
    while n >= 0:
        if PINGPONG:
            k = k & 0xFFFFF
        else:
            k = k // 2
        wide = (word & NARROW_BIT) == 0
        second = (2 * k + 1) * HALF
        both = n + 64 < N
        for row in range(0, count, BLOCK_M):
            mbarrier.wait(empty.index(stage), phase ^ 1)
            bar = full.index(stage)
            expect(bar, half_bytes, both, b_bytes, wide)
            at = INDEX_END - count + row
            left = a.index(stage * 2)._reinterpret(x.dtype, [1, 1, BLOCK_M, 64], dy.layout)
            right = a.index(stage * 2 + 1)._reinterpret(x.dtype, [1, 1, BLOCK_M, 64], dy.layout)
            tma.async_copy_global_to_shared(dy, [INDEX_END, row_end, at, n], bar, left)
            tma.async_copy_global_to_shared(dy, [INDEX_END, row_end, at, n + 64], bar, right, pred=both)
            if PINGPONG:
                for j in gl.static_range(BLOCK_K // PART):
                    part = b.index(stage * (BLOCK_K // PART) + j)
                    part = part._reinterpret(x.dtype, [1, 1, BLOCK_M, PART], x.layout)
                    column = k * BLOCK_K + j * PART
                    tma.async_copy_global_to_shared(x, [INDEX_END, row_end, at, column], bar, part)
            elif NARROW:
                b_left = b.index(stage * 2)._reinterpret(x.dtype, [1, 1, BLOCK_M, HALF], x.layout)
                b_right = b.index(stage * 2 + 1)._reinterpret(x.dtype, [1, 1, BLOCK_M, HALF], x.layout)
                tma.async_copy_global_to_shared(x, [INDEX_END, row_end, at, k * BLOCK_K], bar, b_left)
                tma.async_copy_global_to_shared(x, [INDEX_END, row_end, at, second], bar, b_right, pred=wide)
            else:
                b_tile = b.index(stage * 2)._reinterpret(x.dtype, [1, 1, BLOCK_M, BLOCK_K], x.layout)
                tma.async_copy_global_to_shared(x, [INDEX_END, row_end, at, k * BLOCK_K], bar, b_tile)
            stage, phase = advance(stage, phase, STAGES)
        slot, turn = advance(slot, turn, 2)
        n, k, _N, word, count, row_end = take_all(queue, filled, free, slot, turn, 1)


@gluon.jit
def weight_specialized(
    dy, x, dw, m_sizes, counter, dy_at, x_at, M, N, K, E, stride_dy_m, stride_x_m, stride_dw_e, stride_dw_row,
    m_sizes_step,
    BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, GROUP_M: gl.constexpr,
    EXPERTS: gl.constexpr, NARROW: gl.constexpr, PINGPONG: gl.constexpr, ACROSS: gl.constexpr,
    STREAMED: gl.constexpr, LATE: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """dw[e, n, k] = sum over the expert's rows m of dy[m, n] * x[m, k]: ``grad_weight.weight``.

    All three are TMA descriptors; STREAMED code has the addresses of dy and x too. ACROSS: x and dy, and K and N, have
    changed places, and each tile is turned round when it is stored (turns.py).
    """
    element: gl.constexpr = x.dtype
    BITS: gl.constexpr = element.primitive_bitwidth
    lines: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=BITS, rank=2)
    a = gl.allocate_shared_memory(element, [2 * STAGES, BLOCK_M, 64], lines)
    WIDTH: gl.constexpr = PART if PINGPONG else BLOCK_K // 2
    COUNT: gl.constexpr = BLOCK_K // PART * STAGES + 1 if PINGPONG else 2 * STAGES
    b = gl.allocate_shared_memory(element, [COUNT, BLOCK_M, WIDTH], lines)
    buffers = gl.allocate_shared_memory(element, [2 * SLOTS, 64, 64], lines)
    full, empty, queue, filled, free = barriers(STAGES, 1, 1 if PINGPONG else 2)
    if PINGPONG:
        order = ordering()
        places = gl.allocate_shared_memory(gl.int32, [EXPERTS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        gl.barrier()
        gl.warp_specialize(
            [
                (multiply_in_turns, (
                    0, a, b, full, empty, order, queue, filled, free, buffers, None, dw, (), K, stride_dw_row, BLOCK_K,
                    STAGES, SLOTS, False, False, True, ACROSS, False,
                )),
                (multiply_in_turns, (
                    1, a, b, full, empty, order, queue, filled, free, buffers, None, dw, (), K, stride_dw_row, BLOCK_K,
                    STAGES, SLOTS, False, False, True, ACROSS, False,
                )),
                (_load_weight, (
                    x if ACROSS else dy, dy if ACROSS else x, a, b, full, empty, queue, filled, free,
                    K if ACROSS else N, N if ACROSS else K, BLOCK_M, BLOCK_K, STAGES, NARROW, PINGPONG,
                )),
                (_schedule, (
                    None, None, queue, filled, free,
                    places, m_sizes, counter, M, K if ACROSS else N, N if ACROSS else K, E, stride_dy_m, stride_x_m,
                    m_sizes_step, BLOCK_M, BLOCK_K, STAGES, GROUP_M, EXPERTS, NARROW, PINGPONG, False, LATE,
                )),
            ],
            [4, 1, 1],
            [REGISTERS, 504 - 2 * REGISTERS, 504 - 2 * REGISTERS],
        )  # fmt: skip
    else:
        gl.barrier()
        gl.warp_specialize(
            [
                (multiply, (
                    0, a, b, full, empty, queue, filled, free, buffers, None, dw, (), K, stride_dw_row, BLOCK_K, STAGES,
                    SLOTS, False, False, True, False, False, False, NARROW,
                )),
                (multiply, (
                    1, a, b, full, empty, queue, filled, free, buffers, None, dw, (), K, stride_dw_row, BLOCK_K, STAGES,
                    SLOTS, False, False, True, False, False, False, NARROW,
                )),
                (_load_weight, (
                    dy, x, a, b, full, empty, queue, filled, free, N, K, BLOCK_M, BLOCK_K, STAGES, NARROW, PINGPONG,
                )),
                (_schedule, (
                    dy_at, x_at, queue, filled, free, None, m_sizes, counter, M, N, K, E,
                    stride_dy_m, stride_x_m, m_sizes_step, BLOCK_M, BLOCK_K, STAGES, GROUP_M, EXPERTS, NARROW, PINGPONG,
                    STREAMED, LATE,
                )),
            ],
            [4, 1, 1],
            [REGISTERS, 504 - 2 * REGISTERS, 504 - 2 * REGISTERS],
        )  # fmt: skip
