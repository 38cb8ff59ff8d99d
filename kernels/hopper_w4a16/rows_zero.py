"""The grouped GEMM by rows for sm_90 with w of int4 codes with zero points and x of bf16: ``rows.py`` for these.

A tile, a stage, a block of w and the order in which programs take tiles are as in ``rows.py``. With the scales of a
line of blocks, TMA loads their zero points, one byte each (dequantize_zero.py). FORMAT is the name of the format of the
same codes and scales without zero points.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from ..gluon.consumer import ask, lines_of, look_up, note, parts_of, tables
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
from ..hopper_plain.fitted import GRAIN, _fit
from .blocks import BLOCK, x_tile_of
from .dequantize import biased_across, blocks_per_scale, places_of, scale_bytes_of, words_of
from .dequantize_zero import grown, zero_bytes_of, zero_places_of, zeroed_block_of


@gluon.jit
def _load_zeroed(
    loads,
    M,
    N,
    K,
    E,
    R,
    m_sizes_step,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    EXPERTS: gl.constexpr,
    FORMAT: gl.constexpr,
    DX: gl.constexpr,
    LOW_RANK: gl.constexpr,
):
    """The loading warp: see ``rows._load_rows``. A stage has blocks of a tile's columns, and boxes of its rows.

    Blocks that are adjacent in memory are loaded together: of w's columns, which are K, with ``DX`` N. What a step
    or a tile has beyond the expert's matrix is zero: another expert's scales, which may be NaN, are not read.
    """
    x, w, w_scale, w_zero, low_x, low_w, a, s, z, b, low, shared, m_sizes, counter = loads
    full, empty, used, queue, filled, free = shared
    WIDE: gl.constexpr = BLOCK_N // BLOCK  # blocks of columns of a tile
    DEEP: gl.constexpr = BLOCK_K // BLOCK  # blocks of K of a stage
    AHEAD: gl.constexpr = 4 if DEEP == 1 else 1  # steps
    BOX: gl.constexpr = min(BLOCK_M, 64)
    BOXES: gl.constexpr = BLOCK_M // BOX
    WORDS: gl.constexpr = words_of(FORMAT)
    SCALE_BYTES: gl.constexpr = scale_bytes_of(FORMAT)
    ZERO_BYTES: gl.constexpr = zero_bytes_of(FORMAT)
    LINES: gl.constexpr = DEEP if DX else WIDE
    LONG: gl.constexpr = WIDE if DX else DEEP  # blocks of a line
    SCALES: gl.constexpr = LONG // blocks_per_scale(FORMAT)
    PLACES: gl.constexpr = places_of(FORMAT, LONG)
    ZERO_PLACES: gl.constexpr = zero_places_of(FORMAT, LONG)
    layout: gl.constexpr = gl.BlockedLayout([EXPERTS // 32], [32], [1], [0])
    w_bytes: gl.constexpr = LINES * (LONG * 1024 * WORDS + SCALES * (SCALE_BYTES + ZERO_BYTES))
    box_bytes: gl.constexpr = BOX * BLOCK_K * 2
    tiles_n = gl.cdiv(N // BLOCK, WIDE)
    steps = gl.cdiv(K // BLOCK, DEEP)
    count, end = expert_ends(m_sizes, m_sizes_step, M, E, EXPERTS, layout)
    tile_end = gl.associative_scan((count // BLOCK_M + (count % BLOCK_M != 0).to(gl.int32)) * tiles_n, 0, add)
    total = gl.max(tile_end, 0)
    draw_at = gl.maximum(steps - AHEAD, 0)
    stage, phase, slot, turn = begin()
    low_phase = gl.to_tensor(0)
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
        for step in range(steps):
            if step == draw_at:
                drawn = draw(counter)
            mbarrier.wait(empty.index(stage), phase ^ 1)
            bar = full.index(stage)
            for i in gl.static_range(1, BOXES + 1):
                mbarrier.expect(bar, w_bytes + i * box_bytes, pred=boxes == i)
            for i in gl.static_range(LINES):
                line = (step * DEEP if DX else col * WIDE) + i
                block = col * WIDE if DX else step * DEEP
                at = stage * LINES + i
                codes = view(a.index(at * LONG), w.dtype, [1, 1, WORDS * LONG, 256], w.layout)
                tma_load(w, [expert, line, block * WORDS, 0], bar, codes)
                group = block // blocks_per_scale(FORMAT)
                scales = view(s.index(at * PLACES), w_scale.dtype, [1, 1, SCALES, SCALE_BYTES], w_scale.layout)
                tma_load(w_scale, [expert, line, group, 0], bar, scales)
                zeros = view(z.index(at * ZERO_PLACES), w_zero.dtype, [1, 1, SCALES, ZERO_BYTES], w_zero.layout)
                tma_load(w_zero, [expert, line, group, 0], bar, zeros)
            for k in gl.static_range(DEEP):
                for i in gl.static_range(BOXES):
                    box = b.index((stage * DEEP + k) * BOXES + i)
                    at_k = (step * DEEP + k) * BLOCK
                    tma_load(x, [row + i * BOX, at_k], bar, box, pred=i < boxes)
            stage, phase = advance(stage, phase, STAGES)
        if LOW_RANK:
            for start in range(0, R, BLOCK):
                mbarrier.wait(empty.index(stage), phase ^ 1)
                mbarrier.wait(used.index(0), low_phase ^ 1)
                low_phase = low_phase ^ 1
                bar = full.index(stage)
                for i in gl.static_range(1, BOXES + 1):
                    mbarrier.expect(bar, (BLOCK_N + i * BOX) * BLOCK * 2, pred=boxes == i)
                for n in gl.static_range(WIDE):
                    part = view(low.index(n), low_w.dtype, [1, BLOCK, BLOCK], low_w.layout)
                    at_n = (col * WIDE + n) * BLOCK
                    if DX:
                        tma_load(low_w, [expert, start, at_n], bar, part)
                    else:
                        tma_load(low_w, [expert, at_n, start], bar, part)
                for i in gl.static_range(BOXES):
                    box = b.index(stage * DEEP * BOXES + i)
                    tma_load(low_x, [row + i * BOX, start], bar, box, pred=i < boxes)
                stage, phase = advance(stage, phase, STAGES)
        tile = next_tile(counter, told(drawn), gl.num_programs(0), total)
    publish(queue, filled, free, slot, turn, -1, 0, 0, 0, 1)


@gluon.jit
def _multiply_zeroed(
    half,
    own,
    N,
    R,
    stride_y_m,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    FORMAT: gl.constexpr,
    INDEXED: gl.constexpr,
    FITTED: gl.constexpr,
    DX: gl.constexpr,
    LOW_RANK: gl.constexpr,
):
    """One warpgroup: multiply its columns of every tile, or its blocks of K, and store them.

    The next block's codes become bf16 while this block's product runs, which ends before the next but one begins. No
    product runs across a step's end, and AHEAD code makes blocks across stages, as in ``rows.py``.
    """
    a, s, z, b, low, shared, buffers, sums, summed, y, moved, noted = own
    full, empty, used, queue, filled, free = shared
    AHEAD: gl.constexpr = FITTED and BLOCK_K == BLOCK
    SPLIT: gl.constexpr = BLOCK_N == BLOCK
    MINE: gl.constexpr = max(1, BLOCK_N // (2 * BLOCK))  # blocks of columns
    UNITS: gl.constexpr = BLOCK_K // (2 * BLOCK) if SPLIT else BLOCK_K // BLOCK * MINE  # products of a stage
    BOX: gl.constexpr = min(BLOCK_M, 64)
    BOXES: gl.constexpr = BLOCK_M // BOX
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_M, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    stage, phase, slot, turn = begin()
    sum_phase = gl.to_tensor(0)
    row, col, row_end, word, _e, _f = take_all(queue, filled, free, slot, turn, 4)
    while row >= 0:
        slot, turn = advance(slot, turn, 2)
        steps = word & 0xFFFFF
        expert = word >> 20
        if INDEXED:
            found = look_up(moved, ask(moved, row, row_end, BLOCK_M), row, row_end)
        acc = gl.zeros([64, BLOCK_M], gl.float32, mma)
        more = gl.zeros([64, BLOCK_M], gl.float32, mma) if MINE == 2 else gl.to_tensor(0)
        grains = gl.cdiv(row_end - row, GRAIN)
        if AHEAD:
            mbarrier.wait(full.index(stage), phase)
            now = zeroed_block_of(a, s, z, stage, half, 0, BLOCK_N, BLOCK_K, FORMAT, DX, OPERAND)
        for step in range(steps):
            if FITTED:
                _fit(grains, BLOCK_M // GRAIN)
            if not AHEAD:
                mbarrier.wait(full.index(stage), phase)
                now = zeroed_block_of(a, s, z, stage, half, 0, BLOCK_N, BLOCK_K, FORMAT, DX, OPERAND)
            last = stage
            before = now  # the running product still reads this operand
            for unit in gl.static_range(UNITS):
                k = 2 * unit + half if SPLIT else unit // MINE
                x_tile = x_tile_of(b, last, k, BLOCK_M, BLOCK_K)
                if unit % MINE == 0:
                    acc = warpgroup_mma(now, x_tile, acc, is_async=True)
                else:
                    more = warpgroup_mma(now, x_tile, more, is_async=True)
                following = now
                if unit + 1 < UNITS:
                    following = zeroed_block_of(a, s, z, last, half, unit + 1, BLOCK_N, BLOCK_K, FORMAT, DX, OPERAND)
                elif AHEAD:
                    stage, phase = advance(stage, phase, STAGES)
                    mbarrier.wait(full.index(stage), phase, pred=step + 1 < steps)
                    following = zeroed_block_of(a, s, z, stage, half, 0, BLOCK_N, BLOCK_K, FORMAT, DX, OPERAND)
                if unit + 1 == UNITS and MINE == 2:
                    acc, more, now, before = warpgroup_mma_wait(num_outstanding=0, deps=(acc, more, now, before))
                elif unit + 1 == UNITS:
                    acc, now, before = warpgroup_mma_wait(num_outstanding=0, deps=(acc, now, before))
                elif unit > 0 and (unit - 1) % MINE == 0:
                    acc, before = warpgroup_mma_wait(num_outstanding=1, deps=(acc, before))
                elif unit > 0:
                    more, before = warpgroup_mma_wait(num_outstanding=1, deps=(more, before))
                before = now
                now = following
            gl.barrier()
            mbarrier.arrive(empty.index(last), count=1)
            if not AHEAD:
                stage, phase = advance(stage, phase, STAGES)
        if LOW_RANK:
            acc = grown(acc)
            if MINE == 2:
                more = grown(more)
            for _start in range(0, R, BLOCK):
                if FITTED:
                    _fit(grains, BLOCK_M // GRAIN)
                mbarrier.wait(full.index(stage), phase)
                x_tile = x_tile_of(b, stage, 0, BLOCK_M, BLOCK_K)
                if (not SPLIT) or half == 0:
                    for j in gl.static_range(MINE):
                        left = low.index(0 if SPLIT else half * MINE + j)
                        if DX:
                            left = left.permute((1, 0))
                        if j == 0:
                            acc = warpgroup_mma(left, x_tile, acc, is_async=True)
                        else:
                            more = warpgroup_mma(left, x_tile, more, is_async=True)
                    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
                    if MINE == 2:
                        more = warpgroup_mma_wait(num_outstanding=0, deps=(more,))
                gl.barrier()
                mbarrier.arrive(empty.index(stage), count=1)
                mbarrier.arrive(used.index(0), count=1)
                stage, phase = advance(stage, phase, STAGES)
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
            if INDEXED:
                note(noted, half, found)
            for j in gl.static_range(MINE):
                first = (col if SPLIT else (col * 2 + half) * MINE + j) * BLOCK
                tile = acc if j == 0 else more
                parts = parts_of(tile) if BLOCK_M > 64 else (tile,)
                for i in gl.static_range(BOXES):
                    mine = row + BOX * i
                    if (mine < row_end) & (first < N):
                        part = parts[i] if LOW_RANK else grown(parts[i])
                        if INDEXED:
                            target = noted[0].index(half).slice(BOX * i, BOX).load(gl.SliceLayout(1, LINES))
                            scale = noted[1].index(half).slice(BOX * i, BOX).load(gl.SliceLayout(0, part.type.layout))
                            part = biased_across(part, moved, expert, first, N) * scale[None, :]
                            inside = target >= 0
                        else:
                            if LOW_RANK:
                                part = biased_across(part, moved, expert, first, N)
                            target = mine + gl.arange(0, BOX, layout=gl.SliceLayout(1, LINES))
                            inside = target < row_end
                        buffer = buffers.index(half)
                        buffer.permute((1, 0)).store(part.to(buffers.dtype))
                        lines_of(buffer, y, target, inside, first, N, stride_y_m, LINES)
        row, col, row_end, word, _e, _f = take_all(queue, filled, free, slot, turn, 4)


@gluon.jit
def rows_wna16_zero(
    x,
    w,
    w_scale,
    w_zero,
    y,
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
    stride_y_m,
    m_sizes_step,
    index_step,
    index_end,
    x_divisor,
    flags,
    R,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    EXPERTS: gl.constexpr,
    FORMAT: gl.constexpr,
    INDEXED: gl.constexpr,
    FITTED: gl.constexpr,
    REGISTERS: gl.constexpr,
    DX: gl.constexpr,
    LOW_RANK: gl.constexpr,
):
    """y[to(m), n] = weight(m) * (sum_k x[m, k] * w[expert of m, n, k] + bias[expert of m, n]).

    An element of w is (code - zero) * scale, with one scale and one zero point for each row and group of K.
    The arguments are those of ``rows_wna16`` (rows.py) without w_outer. w, w_scale and w_zero are prepared: lines of
    blocks, int32 [E, N / 64, K / 64 * 2, 256], and bytes [E, N / 64, K / 64 / blocks per scale, bytes of a block].
    """
    flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    flat_bytes: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8, rank=2)
    lines: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    WIDE: gl.constexpr = BLOCK_N // BLOCK
    DEEP: gl.constexpr = BLOCK_K // BLOCK
    BOX: gl.constexpr = min(BLOCK_M, 64)
    LINES: gl.constexpr = DEEP if DX else WIDE
    PLACES: gl.constexpr = STAGES * LINES * places_of(FORMAT, WIDE if DX else DEEP)
    ZERO_PLACES: gl.constexpr = STAGES * LINES * zero_places_of(FORMAT, WIDE if DX else DEEP)
    a = gl.allocate_shared_memory(gl.int32, [STAGES * WIDE * DEEP, words_of(FORMAT), 256], flat)
    s = gl.allocate_shared_memory(gl.uint8, [PLACES, 1, scale_bytes_of(FORMAT)], flat_bytes)
    z = gl.allocate_shared_memory(gl.uint8, [ZERO_PLACES, 1, zero_bytes_of(FORMAT)], flat_bytes)
    b = gl.allocate_shared_memory(x.dtype, [STAGES * DEEP * (BLOCK_M // BOX), BOX, BLOCK], lines)
    buffers = gl.allocate_shared_memory(x.dtype, [2, BOX, 64], lines)
    full, empty, queue, filled, free = barriers(STAGES, 1, 2, 2)
    sums = gl.allocate_shared_memory(gl.float32, [64, BLOCK_M], plain) if BLOCK_N == BLOCK else ()
    summed = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(summed.index(i), count=1)
    low = gl.allocate_shared_memory(x.dtype, [WIDE, BLOCK, BLOCK], lines) if LOW_RANK else ()
    used = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout()) if LOW_RANK else ()
    if LOW_RANK:
        mbarrier.init(used.index(0), count=2)
    moved = (index, row_weights, bias, index_step, index_end, x_divisor, flags)
    noted = tables(BLOCK_M) if INDEXED else ()
    gl.barrier()
    shared = (full, empty, used, queue, filled, free)
    loads = (x, w, w_scale, w_zero, low_x, low_w, a, s, z, b, low, shared, m_sizes, counter)
    own = (a, s, z, b, low, shared, buffers, sums, summed, y, moved, noted)
    if INDEXED:
        gl.warp_specialize(
            [
                (
                    _multiply_zeroed,
                    (
                        0,
                        own,
                        N,
                        R,
                        stride_y_m,
                        BLOCK_M,
                        BLOCK_N,
                        BLOCK_K,
                        STAGES,
                        FORMAT,
                        INDEXED,
                        FITTED,
                        DX,
                        LOW_RANK,
                    ),
                ),
                (
                    _multiply_zeroed,
                    (
                        1,
                        own,
                        N,
                        R,
                        stride_y_m,
                        BLOCK_M,
                        BLOCK_N,
                        BLOCK_K,
                        STAGES,
                        FORMAT,
                        INDEXED,
                        FITTED,
                        DX,
                        LOW_RANK,
                    ),
                ),
                (
                    _load_zeroed,
                    (
                        loads,
                        M,
                        N,
                        K,
                        E,
                        R,
                        m_sizes_step,
                        BLOCK_M,
                        BLOCK_N,
                        BLOCK_K,
                        STAGES,
                        GROUP_M,
                        EXPERTS,
                        FORMAT,
                        DX,
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
                    _multiply_zeroed,
                    (
                        0,
                        own,
                        N,
                        R,
                        stride_y_m,
                        BLOCK_M,
                        BLOCK_N,
                        BLOCK_K,
                        STAGES,
                        FORMAT,
                        INDEXED,
                        FITTED,
                        DX,
                        LOW_RANK,
                    ),
                ),
                (
                    _multiply_zeroed,
                    (
                        1,
                        own,
                        N,
                        R,
                        stride_y_m,
                        BLOCK_M,
                        BLOCK_N,
                        BLOCK_K,
                        STAGES,
                        FORMAT,
                        INDEXED,
                        FITTED,
                        DX,
                        LOW_RANK,
                    ),
                ),
                (
                    _load_zeroed,
                    (
                        loads,
                        M,
                        N,
                        K,
                        E,
                        R,
                        m_sizes_step,
                        BLOCK_M,
                        BLOCK_N,
                        BLOCK_K,
                        STAGES,
                        GROUP_M,
                        EXPERTS,
                        FORMAT,
                        DX,
                        LOW_RANK,
                    ),
                ),
            ],
            [4, 1],
            [REGISTERS, 504 - 2 * REGISTERS],
        )
    if ((flags & ZERO_TAIL_FLAG) != 0) & ((flags & SCATTER_FLAG) == 0 if INDEXED else True):
        zero_tail(y, m_sizes, m_sizes_step, M, E, N, stride_y_m, EXPERTS)
