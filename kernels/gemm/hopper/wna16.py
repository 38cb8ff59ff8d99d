"""The grouped GEMM by rows for sm_90 with a w of codes (4 bits) and an x of bf16, warp-specialised.

A tile is 64 columns of y for each warpgroup by BLOCK_M rows: w's codes become bf16 in registers and are wgmma's left
operand, rows of x its right one, so a tile lies across and is turned back when it is stored. One warp loads codes,
scales and x through TMA. A stage has KB blocks of 64 of K of each.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from .consumer import ask, lines_of, look_up, note, parts_of
from .dequantize import operand
from .pipeline import (
    BIAS_FLAG,
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
    told,
    zero_tail,
)
from .zero_rows import clear_unnamed

GRAIN: gl.constexpr = gl.constexpr(16)


@gluon.jit
def _load_codes(
    x, w, w_scale, a, s, b, full, empty, queue, filled, free, m_sizes, counter, M, N, K, E, m_sizes_step,
    BLOCK_M: gl.constexpr, WARPGROUPS: gl.constexpr, KB: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    EXPERTS: gl.constexpr, WORDS: gl.constexpr, BLOCKS_PER_SCALE: gl.constexpr, SCALE_BYTES: gl.constexpr, SCALES: gl.constexpr, SPLIT: gl.constexpr, PER: gl.constexpr,
):  # fmt: skip
    """The loading warp: see ``rows._load_rows``."""
    AHEAD: gl.constexpr = 4 if KB == 1 else 1
    WIDE: gl.constexpr = 1 if SPLIT else WARPGROUPS * PER  # blocks of 64 columns in a tile
    BOX: gl.constexpr = min(BLOCK_M, 64)
    BOXES: gl.constexpr = BLOCK_M // BOX
    layout: gl.constexpr = gl.BlockedLayout([EXPERTS // 32], [32], [1], [0])
    codes_bytes: gl.constexpr = WIDE * (KB * 1024 * WORDS + KB // BLOCKS_PER_SCALE * SCALE_BYTES)
    box_bytes: gl.constexpr = KB * BOX * 64 * 2
    blocks_n = N // 64
    blocks_k = K // 64
    tiles_n = gl.cdiv(blocks_n, WIDE)
    steps = gl.cdiv(blocks_k, KB)
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
        first = (expert * blocks_n + col * WIDE) * blocks_k
        for step in range(steps):
            if step == draw_at:
                drawn = draw(counter)
            mbarrier.wait(empty.index(stage), phase ^ 1)
            bar = full.index(stage)
            for i in gl.static_range(1, BOXES + 1):
                mbarrier.expect(bar, codes_bytes + i * box_bytes, pred=boxes == i)
            for h in gl.static_range(WIDE):
                block = first + h * blocks_k + step * KB
                at = (stage * WIDE + h) * KB
                codes = a.index(at)._reinterpret(gl.int32, [WORDS * KB, 256], a.layout)
                tma.async_copy_global_to_shared(w, [block * WORDS, 0], bar, codes)
                if SCALE_BYTES:
                    scales = s.index((stage * WIDE + h) * scale_places(KB, BLOCKS_PER_SCALE, SCALES))
                    scales = scales._reinterpret(gl.uint8, [KB // BLOCKS_PER_SCALE, SCALE_BYTES], s.layout)
                    tma.async_copy_global_to_shared(w_scale, [block // BLOCKS_PER_SCALE, 0], bar, scales)
            for j in gl.static_range(KB):
                for i in gl.static_range(BOXES):
                    box = b.index((stage * KB + j) * BOXES + i)
                    tma.async_copy_global_to_shared(x, [row + i * BOX, (step * KB + j) * 64], bar, box, pred=i < boxes)
            stage, phase = advance(stage, phase, STAGES)
        tile = next_tile(counter, told(drawn), gl.num_programs(0), total)
    publish(queue, filled, free, slot, turn, -1, 0, 0, 0, 1)


@gluon.jit
def _scaled(part, outer, expert, col, N, SCALES: gl.constexpr):
    """The part by the scales that are an expert's, or one of each of its rows, which are y's columns."""
    if SCALES == "e4m3":
        part = part * gl.load(outer[0] + expert)
    elif SCALES == "none":
        n = col + gl.arange(0, part.shape[0], layout=gl.SliceLayout(1, part.type.layout))
        part = part * gl.load(outer[0] + expert * outer[1] + n, mask=n < N, other=0.0)[:, None]
    return part


@gluon.jit
def fit(grains, MOST: gl.constexpr):
    """``ragged._fit``."""
    gl.inline_asm_elementwise(
        f"mov.b32 $0, $1; // products of $1 times {GRAIN} rows, {MOST} times at most",
        "=r,r", [grains], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _biased(part, moved, expert, col, N):
    """The part, whose rows are y's columns from ``col`` on, and the bias of those."""
    if (moved[6] & BIAS_FLAG) != 0:
        n = col + gl.arange(0, part.shape[0], layout=gl.SliceLayout(1, part.type.layout))
        added = gl.load(moved[2] + expert.to(gl.int64) * N + n, mask=n < N, other=0.0)
        part += added.to(gl.float32)[:, None]
    return part


@gluon.constexpr_function
def scale_places(KB, BLOCKS_PER_SCALE, SCALES):
    """Places for the scales of a tile's part of a stage: TMA writes to multiples of 128 bytes, a block has 16 or more."""
    return max(KB // BLOCKS_PER_SCALE, 8 if SCALES == "block" else 1)


@gluon.jit
def _block(
    a, s, stage, unit: gl.constexpr, half, WARPGROUPS: gl.constexpr, KB: gl.constexpr, SPLIT: gl.constexpr,
    PER: gl.constexpr, BLOCKS_PER_SCALE: gl.constexpr, GROUPS: gl.constexpr, CODES: gl.constexpr, SCALES: gl.constexpr, OPERAND: gl.constexpr,
):  # fmt: skip
    """What a warpgroup multiplies in its turn ``unit`` of a stage: PER blocks of columns of one K, then of the next."""
    if SPLIT:
        tile, k = stage, 2 * unit + half
    else:
        tile, k = (stage * WARPGROUPS + half) * PER + unit % PER, unit // PER
    return operand(
        a.index(tile * KB + k),
        s.index(tile * scale_places(KB, BLOCKS_PER_SCALE, SCALES) + k // BLOCKS_PER_SCALE),
        GROUPS,
        CODES,
        SCALES,
        OPERAND,
    )


@gluon.jit
def _x_tile(b, stage, j, half, BLOCK_M: gl.constexpr, KB: gl.constexpr, SPLIT: gl.constexpr, WRITTEN: gl.constexpr):
    BOXES: gl.constexpr = BLOCK_M // min(BLOCK_M, 64)
    at = stage * KB + (2 * j + half if SPLIT else j)
    return b.index(at * BOXES)._reinterpret(b.dtype, [WRITTEN, 64], b.layout).permute((1, 0))


@gluon.jit
def _multiply_codes(
    half, a, s, b, full, empty, queue, filled, free, buffers, sums, summed, y, moved, outer, noted, N, stride_y_m,
    BLOCK_M: gl.constexpr, WARPGROUPS: gl.constexpr, KB: gl.constexpr, STAGES: gl.constexpr, BLOCKS_PER_SCALE: gl.constexpr,
    GROUPS: gl.constexpr, CODES: gl.constexpr, SCALES: gl.constexpr, INDEXED: gl.constexpr, FIT: gl.constexpr, SPLIT: gl.constexpr, AHEAD: gl.constexpr, PER: gl.constexpr,
):  # fmt: skip
    """One warpgroup: its 64 columns of every tile, or in SPLIT code every other block of K of the same 64.

    The next block's codes become bf16 while this one's product is under way, which is over before the next begins: sums
    that are in flight across a step's end would be kept out of registers.
    """
    BOX: gl.constexpr = min(BLOCK_M, 64)
    BOXES: gl.constexpr = BLOCK_M // BOX
    WRITTEN: gl.constexpr = BLOCK_M if BLOCK_M != 192 else 256
    UNITS: gl.constexpr = KB // 2 if SPLIT else KB * PER  # products of a stage
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WRITTEN, 16])
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
        acc = gl.zeros([64, WRITTEN], gl.float32, mma)
        more = gl.zeros([64, WRITTEN], gl.float32, mma) if PER == 2 else gl.to_tensor(0)
        grains = gl.cdiv(row_end - row, GRAIN)
        if AHEAD:
            mbarrier.wait(full.index(stage), phase)
            now = _block(
                a, s, stage, 0, half, WARPGROUPS, KB, SPLIT, PER, BLOCKS_PER_SCALE, GROUPS, CODES, SCALES, OPERAND
            )
        for step in range(steps):
            if FIT:
                fit(grains, BLOCK_M // GRAIN)
            if not AHEAD:
                mbarrier.wait(full.index(stage), phase)
                now = _block(
                    a, s, stage, 0, half, WARPGROUPS, KB, SPLIT, PER, BLOCKS_PER_SCALE, GROUPS, CODES, SCALES, OPERAND
                )
            last = stage
            for unit in gl.static_range(UNITS):
                x_tile = _x_tile(b, last, unit // PER, half, BLOCK_M, KB, SPLIT, WRITTEN)
                if unit % PER == 0:
                    acc = warpgroup_mma(now, x_tile, acc, is_async=True)
                else:
                    more = warpgroup_mma(now, x_tile, more, is_async=True)
                following = now
                if unit + 1 < UNITS:
                    following = _block(
                        a, s, last, unit + 1, half, WARPGROUPS, KB, SPLIT, PER, BLOCKS_PER_SCALE, GROUPS, CODES, SCALES, OPERAND
                    )  # fmt: skip
                elif AHEAD:
                    stage, phase = advance(stage, phase, STAGES)
                    mbarrier.wait(full.index(stage), phase, pred=step + 1 < steps)
                    following = _block(
                        a,
                        s,
                        stage,
                        0,
                        half,
                        WARPGROUPS,
                        KB,
                        SPLIT,
                        PER,
                        BLOCKS_PER_SCALE,
                        GROUPS,
                        CODES,
                        SCALES,
                        OPERAND,
                    )
                if unit % PER == 0:
                    acc, now = warpgroup_mma_wait(num_outstanding=0, deps=(acc, now))
                else:
                    more, now = warpgroup_mma_wait(num_outstanding=0, deps=(more, now))
                now = following
            gl.barrier()
            mbarrier.arrive(empty.index(last), count=1)
            if not AHEAD:
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
            for p in gl.static_range(PER):
                first = (col if SPLIT else (col * WARPGROUPS + half) * PER + p) * 64
                tile = acc if p == 0 else more
                parts = parts_of(tile) if WRITTEN > 64 else (tile,)
                for i in gl.static_range(BOXES):
                    mine = row + BOX * i
                    if (mine < row_end) & (first < N):
                        part = _scaled(parts[i], outer, expert, first, N, SCALES)
                        if INDEXED:
                            target = noted[0].index(half).slice(BOX * i, BOX).load(gl.SliceLayout(1, LINES))
                            scale = noted[1].index(half).slice(BOX * i, BOX).load(gl.SliceLayout(0, part.type.layout))
                            part = _biased(part, moved, expert, first, N) * scale[None, :]
                            inside = target >= 0
                        else:
                            target = mine + gl.arange(0, BOX, layout=gl.SliceLayout(1, LINES))
                            inside = target < row_end
                        buffer = buffers.index(half)
                        buffer.permute((1, 0)).store(part.to(buffers.dtype))
                        lines_of(buffer, y, target, inside, first, N, stride_y_m, LINES)
        row, col, row_end, word, _e, _f = take_all(queue, filled, free, slot, turn, 4)


@gluon.jit
def _tables(ROWS: gl.constexpr, WARPGROUPS: gl.constexpr):
    """``consumer.tables`` of so many warpgroups."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return (
        gl.allocate_shared_memory(gl.int32, [WARPGROUPS, ROWS], layout),
        gl.allocate_shared_memory(gl.float32, [WARPGROUPS, ROWS], layout),
    )


@gluon.jit
def rows_wna16(
    x, w, w_scale, w_outer, y, m_sizes, index, row_weights, bias, counter, M, N, K, E, stride_y_m, stride_outer_e, m_sizes_step, index_step,
    index_end, x_divisor, flags,
    BLOCK_M: gl.constexpr, WARPGROUPS: gl.constexpr, KB: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    EXPERTS: gl.constexpr, CODES: gl.constexpr, SCALES: gl.constexpr, BLOCKS_PER_SCALE: gl.constexpr, GROUPS: gl.constexpr, SCALE_BYTES: gl.constexpr,
    INDEXED: gl.constexpr, FIT: gl.constexpr, SPLIT: gl.constexpr, AHEAD: gl.constexpr, PER: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """y[to(m), n] = weight(m) * (sum_k x[m, k] * w[expert of m, n, k] + bias[expert of m, n]), w = codes x scales.

    w and w_scale are prepared, and seen as rows of blocks: int32 [E * N / 64 * K / 64 * WORDS, 256] and uint8 [the
    blocks / BLOCKS_PER_SCALE, SCALE_BYTES]. w_outer are scales that a sum is multiplied by: ``_scaled``.
    """
    flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    flat8: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=8, rank=2)
    lines: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    WORDS: gl.constexpr = 4 if CODES == "e4m3" else 2
    BOX: gl.constexpr = min(BLOCK_M, 64)
    BOXES: gl.constexpr = BLOCK_M // BOX
    SPARE: gl.constexpr = 1 if BLOCK_M == 192 else 0  # boxes: a product as it is written has 256 rows
    BLOCKS: gl.constexpr = (1 if SPLIT else WARPGROUPS * PER) * STAGES * KB
    a = gl.allocate_shared_memory(gl.int32, [BLOCKS, WORDS, 256], flat)
    PLACES: gl.constexpr = BLOCKS // KB * scale_places(KB, BLOCKS_PER_SCALE, SCALES)
    s = gl.allocate_shared_memory(gl.uint8, [PLACES, 1, max(SCALE_BYTES, 16)], flat8)
    b = gl.allocate_shared_memory(x.dtype, [STAGES * KB * BOXES + SPARE, BOX, 64], lines)
    buffers = gl.allocate_shared_memory(x.dtype, [WARPGROUPS, BOX, 64], lines)
    full, empty, queue, filled, free = barriers(STAGES, 1, WARPGROUPS, WARPGROUPS)
    sums = (
        gl.allocate_shared_memory(gl.float32, [64, BLOCK_M], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])) if SPLIT else ()
    )
    summed = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(summed.index(i), count=1)
    outer = (w_outer, stride_outer_e)
    moved = (index, row_weights, bias, index_step, index_end, x_divisor, flags)
    noted = _tables(BLOCK_M, WARPGROUPS) if INDEXED else ()
    gl.barrier()
    if WARPGROUPS == 2 and INDEXED:
        gl.warp_specialize(
            [
                (_multiply_codes, (
                    0, a, s, b, full, empty, queue, filled, free, buffers, sums, summed, y, moved, outer, noted, N,
                    stride_y_m, BLOCK_M, WARPGROUPS, KB, STAGES, BLOCKS_PER_SCALE, GROUPS, CODES, SCALES, INDEXED, FIT, SPLIT,
                    AHEAD, PER,
                )),
                (_multiply_codes, (
                    1, a, s, b, full, empty, queue, filled, free, buffers, sums, summed, y, moved, outer, noted, N,
                    stride_y_m, BLOCK_M, WARPGROUPS, KB, STAGES, BLOCKS_PER_SCALE, GROUPS, CODES, SCALES, INDEXED, FIT, SPLIT,
                    AHEAD, PER,
                )),
                (_load_codes, (
                    x, w, w_scale, a, s, b, full, empty, queue, filled, free, m_sizes, counter, M, N, K, E,
                    m_sizes_step, BLOCK_M, WARPGROUPS, KB, STAGES, GROUP_M, EXPERTS, WORDS, BLOCKS_PER_SCALE, SCALE_BYTES,
                    SCALES, SPLIT, PER,
                )),
                (clear_unnamed, (y, m_sizes, moved, M, E, N, stride_y_m, m_sizes_step)),
            ],
            [4, 1, 1],
            [REGISTERS, 504 - 2 * REGISTERS, 504 - 2 * REGISTERS],
        )  # fmt: skip
    elif WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (_multiply_codes, (
                    0, a, s, b, full, empty, queue, filled, free, buffers, sums, summed, y, moved, outer, noted, N,
                    stride_y_m, BLOCK_M, WARPGROUPS, KB, STAGES, BLOCKS_PER_SCALE, GROUPS, CODES, SCALES, INDEXED, FIT, SPLIT,
                    AHEAD, PER,
                )),
                (_multiply_codes, (
                    1, a, s, b, full, empty, queue, filled, free, buffers, sums, summed, y, moved, outer, noted, N,
                    stride_y_m, BLOCK_M, WARPGROUPS, KB, STAGES, BLOCKS_PER_SCALE, GROUPS, CODES, SCALES, INDEXED, FIT, SPLIT,
                    AHEAD, PER,
                )),
                (_load_codes, (
                    x, w, w_scale, a, s, b, full, empty, queue, filled, free, m_sizes, counter, M, N, K, E,
                    m_sizes_step, BLOCK_M, WARPGROUPS, KB, STAGES, GROUP_M, EXPERTS, WORDS, BLOCKS_PER_SCALE, SCALE_BYTES,
                    SCALES, SPLIT, PER,
                )),
            ],
            [4, 1],
            [REGISTERS, 504 - 2 * REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_multiply_codes, (
                    0, a, s, b, full, empty, queue, filled, free, buffers, sums, summed, y, moved, outer, noted, N,
                    stride_y_m, BLOCK_M, WARPGROUPS, KB, STAGES, BLOCKS_PER_SCALE, GROUPS, CODES, SCALES, INDEXED, FIT, SPLIT,
                    AHEAD, PER,
                )),
                (_load_codes, (
                    x, w, w_scale, a, s, b, full, empty, queue, filled, free, m_sizes, counter, M, N, K, E,
                    m_sizes_step, BLOCK_M, WARPGROUPS, KB, STAGES, GROUP_M, EXPERTS, WORDS, BLOCKS_PER_SCALE, SCALE_BYTES,
                    SCALES, SPLIT, PER,
                )),
            ],
            [1],
            [24],
        )  # fmt: skip
    if ((flags & ZERO_TAIL_FLAG) != 0) & ((flags & SCATTER_FLAG) == 0 if INDEXED else True):
        zero_tail(y, m_sizes, m_sizes_step, M, E, N, stride_y_m, EXPERTS)
