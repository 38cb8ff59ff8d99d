"""The row-grouped GEMM for sm_90 with e4m3 x and w, which have a scale for each row; warp-specialised.

w is wgmma's left operand and x its right one, both in shared memory. So a tile is transposed, BLOCK_N columns of y by
BLOCK_M rows, and transposed back when it is stored. One warp loads through TMA, BLOCK_K of the reduction a stage. Each
of two warpgroups has half of a tile's columns. In a tile of 64 columns, for few rows, each has half of a stage's K, and
the sums are added. An expert's rows are shared out evenly among its tiles (FITTED,
kernels/hopper_plain/fitted.py).

The tensor cores keep 14 bits of a long sum of e4m3, so sums over PART of K are added to sums of their own: in fp32
where registers hold both, else in fp16, times 2^-17, two to a register. The last part stays in fp32.

w is prepared (prepared_layout.py): blocks of 64 x 64, in which a row's 64 codes of K have the order of x's codes.
wgmma reads them in TMA's swizzle of 64 bytes.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ..gluon.consumer import ask, counting, lines_of, parts_of, store_box
from ..gluon.pipeline import (
    SCATTER_FLAG,
    WEIGHT_FLAG,
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
from ..hopper_plain.fitted import GRAIN, _fit
from ..hopper_w4a16.dequantize import biased_across

BLOCK: gl.constexpr = gl.constexpr(64)  # rows of w, and elements of K, in a block of prepared codes
FEW: gl.constexpr = gl.constexpr(128)  # the loading warp finds a tile's expert among 128 1 us sooner than among 512
LINE: gl.constexpr = gl.constexpr(128)  # elements of K that one copy loads of each row of x
CODES: gl.constexpr = gl.constexpr(
    gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=2)
)  # layout of w's codes


@gluon.constexpr_function
def _packs(BLOCK_M, BLOCK_N):  # type: ignore[no-untyped-def]
    """True if the sums of earlier parts are kept in fp16: in fp32 they would take more than 128 registers."""
    return BLOCK_M * max(1, BLOCK_N // 128) > 128


@gluon.jit
def _load_both(
    loads,
    M,
    N,
    K,
    E,
    m_sizes_step,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    EXPERTS: gl.constexpr,
):
    """The loading warp: see ``rows._load_rows``. A stage has a step's blocks of w, and boxes of a tile's rows."""
    x, w, a, b, full, empty, queue, filled, free, m_sizes, counter = loads
    WIDE: gl.constexpr = BLOCK_N // BLOCK  # blocks of columns of a tile
    DEEP: gl.constexpr = BLOCK_K // BLOCK  # blocks of K of a stage
    LINES: gl.constexpr = BLOCK_K // LINE
    AHEAD: gl.constexpr = 4 if LINES == 1 else 1  # steps
    BOX: gl.constexpr = min(BLOCK_M, 64)
    BOXES: gl.constexpr = BLOCK_M // BOX
    layout: gl.constexpr = gl.BlockedLayout([EXPERTS // 32], [32], [1], [0])
    w_bytes: gl.constexpr = BLOCK_N * BLOCK_K
    box_bytes: gl.constexpr = BOX * BLOCK_K
    blocks_n = N // BLOCK
    tiles_n = gl.cdiv(blocks_n, WIDE)
    steps = gl.cdiv(K, BLOCK_K)
    count, end = expert_ends(m_sizes, m_sizes_step, M, E, EXPERTS, layout)
    tile_end = gl.associative_scan((count // BLOCK_M + (count % BLOCK_M != 0).to(gl.int32)) * tiles_n, 0, add)
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
        rows = row_end - row_start
        tiles_m = gl.cdiv(rows, BLOCK_M)
        height = gl.cdiv(gl.cdiv(rows, tiles_m), GRAIN) * GRAIN
        row_tile, col = grouped(tile - first_tile, tiles_m, tiles_n, GROUP_M)
        row = row_start + row_tile * height
        row_end = gl.minimum(row_end, row + height)
        publish(queue, filled, free, slot, turn, row, col, row_end, steps | (expert << 20), 1)
        slot, turn = advance(slot, turn, 2)
        drawn = gl.to_tensor(0)
        boxes = gl.cdiv(row_end - row, BOX)
        block = expert * blocks_n + col * WIDE
        for step in range(steps):
            if step == draw_at:
                drawn = draw(counter)
            mbarrier.wait(empty.index(stage), phase ^ 1)
            bar = full.index(stage)
            for i in gl.static_range(1, BOXES + 1):
                mbarrier.expect(bar, w_bytes + i * box_bytes, pred=boxes == i)
            codes = view(a, a.dtype, [STAGES, WIDE, 4 * DEEP, 256], w.layout).index(stage)
            tma_load(w, [block, step * (4 * DEEP), 0], bar, codes)
            for k in gl.static_range(LINES):
                for i in gl.static_range(BOXES):
                    box = b.index((stage * LINES + k) * BOXES + i)
                    tma_load(x, [row + i * BOX, step * BLOCK_K + k * LINE], bar, box, pred=i < boxes)
            stage, phase = advance(stage, phase, STAGES)
        tile = next_tile(counter, told(drawn), gl.num_programs(0), total)
    publish(queue, filled, free, slot, turn, -1, 0, 0, 0, 1)


@gluon.jit
def _load(
    loads,
    M,
    N,
    K,
    E,
    m_sizes_step,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    EXPERTS: gl.constexpr,
):
    """The loading warp, for few or many experts."""
    if E <= FEW:
        _load_both(loads, M, N, K, E, m_sizes_step, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M, FEW)
    else:
        _load_both(loads, M, N, K, E, m_sizes_step, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP_M, EXPERTS)


@gluon.jit
def _added(sums, part, PACKED: gl.constexpr):
    """sums + part, the sums over one part of K."""
    if PACKED:
        low, high = part.reshape([part.shape[0], part.shape[1] // 2, 2]).split()
        found = gl.inline_asm_elementwise(
            "{.reg .b16 h0, h1; .reg .f32 a, b; mov.b32 {h0, h1}, $3; cvt.f32.f16 a, h0; cvt.f32.f16 b, h1; "
            "fma.rn.f32 a, $1, 0f37000000, a; fma.rn.f32 b, $2, 0f37000000, b; cvt.rn.f16x2.f32 $0, b, a;}",
            "=r,r,r,r",
            [low, high, sums],
            dtype=gl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        found = sums + part
    return found


@gluon.jit
def _whole(sums, part, PACKED: gl.constexpr):
    """sums + part in fp32; if PACKED, ``sums`` holds pairs of fp16, 2^-17 times the numbers."""
    if PACKED:
        low, high = part.reshape([part.shape[0], part.shape[1] // 2, 2]).split()
        low, high = gl.inline_asm_elementwise(
            "{.reg .b16 h0, h1; .reg .f32 a, b; mov.b32 {h0, h1}, $4; cvt.f32.f16 a, h0; cvt.f32.f16 b, h1; "
            "fma.rn.f32 $0, a, 0f48000000, $2; fma.rn.f32 $1, b, 0f48000000, $3;}",
            "=r,=r,r,r,r",
            [low, high, sums],
            dtype=(gl.float32, gl.float32),
            is_pure=True,
            pack=1,
        )
        found = gl.convert_layout(gl.join(low, high).reshape(part.shape), part.type.layout, assert_trivial=True)
    else:
        found = sums + part
    return found


@gluon.jit
def _none(part, PACKED: gl.constexpr):
    """Return sums of zero."""
    if PACKED:
        low, _high = part.reshape([part.shape[0], part.shape[1] // 2, 2]).split()
        found = gl.zeros(low.shape, gl.int32, low.type.layout)
    else:
        found = gl.zeros(part.shape, gl.float32, part.type.layout)
    return found


@gluon.jit
def _multiply_both(
    half,
    own,
    N,
    stride_y_m,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    SLOTS: gl.constexpr,
    INDEXED: gl.constexpr,
    FITTED: gl.constexpr,
    PART: gl.constexpr,
):
    """One warpgroup: multiply its columns of every tile, or its half of each step, and store the tile."""
    a, b, full, empty, queue, filled, free, buffers, sums, summed, x_scale, w_scale, y, y_map, moved, noted = own
    SPLIT: gl.constexpr = BLOCK_N == BLOCK
    MINE: gl.constexpr = max(1, BLOCK_N // (2 * BLOCK))  # blocks of columns
    PIECES: gl.constexpr = max(BLOCK_N // BLOCK, 2)
    DEPTH: gl.constexpr = BLOCK_K // 2 if SPLIT else BLOCK_K
    LINES: gl.constexpr = DEPTH // LINE
    BOX: gl.constexpr = min(BLOCK_M, 64)
    BOXES: gl.constexpr = BLOCK_M // BOX
    PACKED: gl.constexpr = _packs(BLOCK_M, BLOCK_N)
    AT_ONCE: gl.constexpr = PART // BLOCK_K  # steps that the tensor cores sum without fp32 adds
    BY_TMA: gl.constexpr = BOX == 64 and not INDEXED
    STORED: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_M, 32])
    stage, phase, slot, turn = begin()
    sum_phase = gl.to_tensor(0)
    stored = gl.to_tensor(0)
    row, col, row_end, word, _e, _f = take_all(queue, filled, free, slot, turn, 4)
    while row >= 0:
        slot, turn = advance(slot, turn, 2)
        steps = word & 0xFFFFF
        expert = word >> 20
        m = row + gl.arange(0, BLOCK_M, layout=gl.BlockedLayout([1], [32], [4], [0]))
        factor = gl.load(x_scale + m, mask=m < row_end, other=0.0)
        if INDEXED:
            flat = ask(moved, row, row_end, BLOCK_M)
        grains = gl.cdiv(row_end - row, GRAIN)
        column = (col if SPLIT else (col * 2 + half) * MINE) * BLOCK
        n = column + gl.arange(0, BLOCK, layout=gl.SliceLayout(1, mma))
        scales = w_scale + expert.to(gl.int64) * N + n
        by = gl.load(scales, mask=n < N, other=0.0)
        more_by = gl.load(scales + BLOCK, mask=n + BLOCK < N, other=0.0) if MINE == 2 else by
        acc = gl.zeros([64, BLOCK_M], gl.float32, mma)
        more = gl.zeros([64, BLOCK_M], gl.float32, mma) if MINE == 2 else gl.to_tensor(0)
        acc_sums = _none(acc, PACKED)
        more_sums = _none(more, PACKED) if MINE == 2 else gl.to_tensor(0)
        for first in range(0, steps, AT_ONCE):
            if first > 0:
                acc_sums = _added(acc_sums, acc, PACKED)
                if MINE == 2:
                    more_sums = _added(more_sums, more, PACKED)
            acc = gl.zeros([64, BLOCK_M], gl.float32, mma)
            if MINE == 2:
                more = gl.zeros([64, BLOCK_M], gl.float32, mma)
            for step in range(first, gl.minimum(first + AT_ONCE, steps)):
                mbarrier.wait(full.index(stage), phase)
                if FITTED:
                    _fit(grains, BLOCK_M // GRAIN)
                piece = a.index(stage * PIECES + half * MINE)
                w_tile = view(piece, gl.float8e4nv, [BLOCK, DEPTH], CODES)
                at = stage * 2 + half if SPLIT else stage
                x_tile = tile_of(b, at, LINES * BOXES, BLOCK_M, DEPTH).permute((1, 0))
                acc = warpgroup_mma(w_tile, x_tile, acc, is_async=True)
                if MINE == 2:
                    second = view(a.index(stage * PIECES + half * MINE + 1), gl.float8e4nv, [BLOCK, DEPTH], CODES)
                    more = warpgroup_mma(second, x_tile, more, is_async=True)
                    acc, more = warpgroup_mma_wait(num_outstanding=2, deps=(acc, more))
                else:
                    acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
                gl.barrier()
                mbarrier.arrive(empty.index(before(stage, STAGES)), count=1, pred=step > first)
                stage, phase = advance(stage, phase, STAGES)
            if MINE == 2:
                acc, more = warpgroup_mma_wait(num_outstanding=0, deps=(acc, more))
            else:
                acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
            gl.barrier()
            mbarrier.arrive(empty.index(before(stage, STAGES)), count=1)
        if steps > AT_ONCE:
            acc = _whole(acc_sums, acc, PACKED)
            if MINE == 2:
                more = _whole(more_sums, more, PACKED)
        mine_too = col >= 0
        if SPLIT:
            if half == 1:
                mbarrier.wait(summed.index(1), sum_phase ^ 1)
                sums.store(acc)
                gl.barrier()
                mbarrier.arrive(summed.index(0), count=1)
                mine_too = col < 0
            else:
                mbarrier.wait(summed.index(0), sum_phase)
                acc += sums.load(mma)
                gl.barrier()
                mbarrier.arrive(summed.index(1), count=1)
            sum_phase = sum_phase ^ 1
        if mine_too:
            noted[0].index(half).store(factor)
            if INDEXED:
                inside = counting(flat, moved[4], moved[6], m, row_end)
                weight = gl.load(moved[1] + flat, mask=inside & ((moved[6] & WEIGHT_FLAG) != 0), other=1.0)
                noted[1].index(half).store(weight)
                to = gl.where((moved[6] & SCATTER_FLAG) != 0, flat, m)
                noted[2].index(half).store(gl.where(inside, to, -1))
            for j in gl.static_range(MINE):
                first_n = column + j * BLOCK
                tile = acc * by[:, None] if j == 0 else more * more_by[:, None]
                parts = parts_of(tile) if BLOCK_M > 64 else (tile,)
                for i in gl.static_range(BOXES):
                    mine = row + BOX * i
                    if (mine < row_end) & (first_n < N):
                        part = parts[i]
                        across: gl.constexpr = gl.SliceLayout(0, part.type.layout)
                        part = part * noted[0].index(half).slice(BOX * i, BOX).load(across)[None, :]
                        if INDEXED:
                            part = biased_across(part, moved, expert, first_n, N)
                            part = part * noted[1].index(half).slice(BOX * i, BOX).load(across)[None, :]
                        buffer = buffers.index(half * SLOTS + (stored + i) % SLOTS)
                        if BY_TMA:
                            store_box(
                                y_map, part.to(buffers.dtype), buffer, first_n, row_end, mine, 0, False, SLOTS, True
                            )
                        else:
                            if INDEXED:
                                target = noted[2].index(half).slice(BOX * i, BOX).load(gl.SliceLayout(1, STORED))
                                there = target >= 0
                            else:
                                target = mine + gl.arange(0, BOX, layout=gl.SliceLayout(1, STORED))
                                there = target < row_end
                            buffer.permute((1, 0)).store(part.to(buffers.dtype))
                            lines_of(buffer, y, target, there, first_n, N, stride_y_m, STORED)
                stored = (stored + gl.cdiv(row_end - row, BOX)) % SLOTS
        row, col, row_end, word, _e, _f = take_all(queue, filled, free, slot, turn, 4)
    if BY_TMA:
        tma.store_wait(0)


@gluon.jit
def rows_w8a8_channel(
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
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    SLOTS: gl.constexpr,
    GROUP_M: gl.constexpr,
    EXPERTS: gl.constexpr,
    INDEXED: gl.constexpr,
    FITTED: gl.constexpr,
    PART: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """y[to(m), n] = weight(m) * (xs[m] * ws[e, n] * sum_k x[m, k] * w[e, n, k] + bias[e, n]).

    Like ``portable_plain.rows`` without a gather; e is the expert of m. x is e4m3 [M, K], each 64 of K in
    ``K_ORDER`` (runtime/weights/prepared_layout.py); x_scale is xs, fp32 [M]. w is prepared, and seen as blocks, int32
    [E * N / 64, K / 16, 256]; w_scale is ws, fp32 [E, N]. y leaves through ``y_map`` where BLOCK_M is 64 and more, in
    INDEXED code through pointers.
    """
    flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    swizzled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    lines: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    word: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BOX: gl.constexpr = min(BLOCK_M, 64)
    PIECES: gl.constexpr = max(BLOCK_N // BLOCK, 2)  # of a stage of w, each a warpgroup's left operand
    PIECE: gl.constexpr = BLOCK_N * BLOCK_K // PIECES // 1024
    a = gl.allocate_shared_memory(gl.int32, [STAGES * PIECES, PIECE, 256], flat)
    b = gl.allocate_shared_memory(gl.float8e4nv, [STAGES * (BLOCK_K // LINE) * (BLOCK_M // BOX), BOX, LINE], swizzled)
    buffers = gl.allocate_shared_memory(y.dtype.element_ty, [2 * SLOTS, BOX, 64], lines)
    full, empty, queue, filled, free = barriers(STAGES, 1, 2, 2)
    sums = gl.allocate_shared_memory(gl.float32, [64, BLOCK_M], plain) if BLOCK_N == BLOCK else ()
    summed = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(summed.index(i), count=1)
    factors = gl.allocate_shared_memory(gl.float32, [2, BLOCK_M], word)
    if INDEXED:
        noted = (
            factors,
            gl.allocate_shared_memory(gl.float32, [2, BLOCK_M], word),
            gl.allocate_shared_memory(gl.int32, [2, BLOCK_M], word),
        )
    else:
        noted = (factors,)  # type: ignore[assignment]
    moved = (index, row_weights, bias, index_step, index_end, x_divisor, flags)
    gl.barrier()
    loads = (x, w, a, b, full, empty, queue, filled, free, m_sizes, counter)
    own = (
        a,
        b,
        full,
        empty,
        queue,
        filled,
        free,
        buffers,
        sums,
        summed,
        x_scale,
        w_scale,
        y,
        y_map,
        moved,
        noted,
    )
    if INDEXED:
        gl.warp_specialize(
            [
                (
                    _multiply_both,
                    (
                        0,
                        own,
                        N,
                        stride_y_m,
                        BLOCK_M,
                        BLOCK_N,
                        BLOCK_K,
                        STAGES,
                        SLOTS,
                        INDEXED,
                        FITTED,
                        PART,
                    ),
                ),
                (
                    _multiply_both,
                    (
                        1,
                        own,
                        N,
                        stride_y_m,
                        BLOCK_M,
                        BLOCK_N,
                        BLOCK_K,
                        STAGES,
                        SLOTS,
                        INDEXED,
                        FITTED,
                        PART,
                    ),
                ),
                (
                    _load,
                    (
                        loads,
                        M,
                        N,
                        K,
                        E,
                        m_sizes_step,
                        BLOCK_M,
                        BLOCK_N,
                        BLOCK_K,
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
                    _multiply_both,
                    (
                        0,
                        own,
                        N,
                        stride_y_m,
                        BLOCK_M,
                        BLOCK_N,
                        BLOCK_K,
                        STAGES,
                        SLOTS,
                        INDEXED,
                        FITTED,
                        PART,
                    ),
                ),
                (
                    _multiply_both,
                    (
                        1,
                        own,
                        N,
                        stride_y_m,
                        BLOCK_M,
                        BLOCK_N,
                        BLOCK_K,
                        STAGES,
                        SLOTS,
                        INDEXED,
                        FITTED,
                        PART,
                    ),
                ),
                (
                    _load,
                    (
                        loads,
                        M,
                        N,
                        K,
                        E,
                        m_sizes_step,
                        BLOCK_M,
                        BLOCK_N,
                        BLOCK_K,
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
