"""The grouped GEMM of ``rows.py`` for rows of x with gaps between experts: codes and scales are read in place.

Expert e's rows begin at starts[e], or at e * room, in x and in y. x's codes are in their natural order of K, and w's
are prepared, in ``K_ORDER``: the sixteen neighbours that a thread loads of a row hold all of its codes of 64 of K, and
two byte permutations make two words of a product's left operand. That operand is in registers.

Each warpgroup has 64 of a tile's 128 rows and all of its 256 columns: no code of x is read twice. A step moves 128 KB
through shared memory: 1,024 clocks, as many as the tensor cores take. Split by columns it would be 144 KB, and with
codes reordered in shared memory 176 KB (docs/inside/trials.md, codes-in-place).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ..gluon.consumer import store_box
from ..gluon.pipeline import (
    add,
    advance,
    async_load,
    barriers,
    begin,
    draw,
    grouped,
    next_tile,
    publish,
    take_all,
    tma_load,
    told,
    view,
)

ROWS: gl.constexpr = gl.constexpr(128)  # of a tile
COLUMNS: gl.constexpr = gl.constexpr(256)
GROUP: gl.constexpr = gl.constexpr(128)  # elements of K, and columns, that share a scale
BLOCK: gl.constexpr = gl.constexpr(64)  # rows of w, and elements of K, in a block


def _prepared() -> gl.SharedLinearLayout:
    """[64 columns, 64 of K]: the codes of each column, one after another, in TMA's swizzle."""
    codes = [[0, 1 << bit] for bit in range(6)]
    columns = [[1, 0], [2, 16], [4, 32], [8, 0], [16, 0], [32, 0]]
    return gl.SharedLinearLayout([*codes, *columns], alignment=1024)


def _natural() -> gl.DistributedLinearLayout:
    """[64 rows, 64 of K]: a thread has 16 neighbours of each of two rows."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 8], [8, 0]],
        lane_bases=[[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 64],
    )


PREPARED: gl.constexpr = gl.constexpr(_prepared())
NATURAL: gl.constexpr = gl.constexpr(_natural())
# Of two words, k = 16 s + 8 h + 2 c + p of h = 0 and of h = 1: the bytes of an even c, then those of an odd one, each
# p = 0 of h = 1, p = 0 of h = 0, p = 1 of h = 1, p = 1 of h = 0.
_TWO_WORDS: gl.constexpr = gl.constexpr("prmt.b32 $0, $2, $3, 0x1504; prmt.b32 $1, $2, $3, 0x3726;")


@gluon.jit
def _number(words, step, i, inside):
    """An entry of int32, or of int64 if ``step`` is 2, as int64; 0 for entries not ``inside``."""
    word = words + i * step
    low = gl.load(word, mask=inside, other=0).to(gl.int64)
    high = gl.load(word + (step - 1), mask=inside, other=0).to(gl.int64)
    return gl.where(step == 1, low, (high << 32) | (low & 0xFFFFFFFF))


@gluon.jit
def _rows_of(placed, e, inside, M):
    """(first row, number of rows) of expert e, cut to the M rows like in ``rowops.place``."""
    m_sizes, starts, room, m_sizes_step, starts_step = placed
    first = e.to(gl.int64) * room
    if starts_step != 0:
        first = _number(starts, starts_step, e, inside)
    left = gl.minimum(gl.where(first >= 0, gl.maximum(M.to(gl.int64) - first, 0), 0), room.to(gl.int64))
    count = gl.minimum(gl.maximum(_number(m_sizes, m_sizes_step, e, inside), 0), left)
    return first.to(gl.int32), count.to(gl.int32)


@gluon.jit
def _load_both(
    x,
    w,
    x_scale,
    w_scale,
    a,
    b,
    s,
    full,
    empty,
    queue,
    filled,
    free,
    placed,
    packed,
    packs,
    scale_strides,
    counter,
    M,
    N,
    K,
    E,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    EXPERTS: gl.constexpr,
):
    """The loading warp: see ``rows._load_both``.

    A step's scales are copied to shared memory one by one: x's for each row, then w's. If a warpgroup loaded them
    itself, it would wait in each step, because the next step's scales go into the registers of the current step's.
    """
    AHEAD: gl.constexpr = 4  # steps
    layout: gl.constexpr = gl.BlockedLayout([EXPERTS // 32], [32], [1], [0])
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    W_BYTES: gl.constexpr = COLUMNS * GROUP
    HALF_BYTES: gl.constexpr = 64 * GROUP
    stride_m, stride_k, stride_e = scale_strides
    tiles_n = gl.cdiv(N, COLUMNS)
    blocks_n = N // BLOCK
    groups_n = N // GROUP
    steps = gl.cdiv(K, GROUP)
    e = gl.arange(0, EXPERTS, layout=layout)
    _first, count = _rows_of(placed, e, e < E, M)
    tile_end = gl.associative_scan((count // ROWS + (count % ROWS != 0).to(gl.int32)) * tiles_n, 0, add)
    total = gl.max(tile_end, 0)
    draw_at = gl.maximum(steps - AHEAD, 0)
    m = gl.arange(0, ROWS, layout=lanes)
    part = gl.minimum(gl.arange(0, 32, layout=lanes), 1)
    stage, phase, slot, turn = begin()
    tile = gl.program_id(0)
    while tile < total:
        done = tile_end <= tile
        expert = gl.sum(done.to(gl.int32), 0)
        first_tile = gl.max(gl.where(done, tile_end, 0), 0)
        row_start, rows = _rows_of(placed, expert, True, M)
        row_end = row_start + rows
        row_tile, col = grouped(tile - first_tile, gl.cdiv(rows, ROWS), tiles_n, GROUP_M)
        row = row_start + row_tile * ROWS
        to = gl.load(packed + expert, mask=packs != 0, other=0)  # the expert's first row in y
        to = gl.where(packs != 0, to - row_start, 0)
        publish(queue, filled, free, slot, turn, row + to, col, row_end + to, steps | (expert << 20), 1)
        slot, turn = advance(slot, turn, 2)
        drawn = gl.to_tensor(0)
        both = row + 64 < row_end
        block = expert * blocks_n + col * (COLUMNS // BLOCK)
        of_scales = gl.where(placed[4] == 0, row - row_start, row)
        of_x = x_scale + expert.to(gl.int64) * stride_e + of_scales.to(gl.int64) * stride_m
        of_x += gl.minimum(m, row_end - row - 1) * stride_m
        of_w = w_scale + expert.to(gl.int64) * groups_n * steps + gl.minimum(col * 2 + part, groups_n - 1) * steps
        for step in range(steps):
            if step == draw_at:
                drawn = draw(counter)
            mbarrier.wait(empty.index(stage), phase ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, W_BYTES + HALF_BYTES, pred=both == 0)
            mbarrier.expect(bar, W_BYTES + 2 * HALF_BYTES, pred=both)
            for i in gl.static_range(2):
                codes = view(b.index(stage * 8 + i * 4), w.dtype, [2, 2, 4, 256], w.layout)
                tma_load(w, [2 * step, block + 2 * i, 0, 0], bar, codes)
            for i in gl.static_range(4):
                at_k = step * GROUP + i % 2 * BLOCK
                tma_load(x, [row + i // 2 * 64, at_k], bar, a.index(stage * 4 + i), pred=both if i > 1 else True)
            async_load(s.index(stage).slice(0, ROWS), of_x)
            async_load(s.index(stage).slice(ROWS, 32), of_w)
            async_copy.mbarrier_arrive(bar, increment_count=False)
            of_x += stride_k
            of_w += 1
            stage, phase = advance(stage, phase, STAGES)
        tile = next_tile(counter, told(drawn), gl.num_programs(0), total)
    publish(queue, filled, free, slot, turn, -1, 0, 0, 0, 1)


@gluon.jit
def _in_order(codes, OPERAND: gl.constexpr):
    """Return 64 rows of 64 codes, each row put into ``K_ORDER``, as a product's left operand."""
    words = view(codes, gl.int8, [64, BLOCK], codes.layout).load(NATURAL).reshape([64, 4, 2, 2, 4])
    low, high = words.permute((0, 1, 3, 4, 2)).split()
    even, odd = gl.inline_asm_elementwise(
        _TWO_WORDS, "=&r,=r,r,r", [low, high], dtype=(gl.int8, gl.int8), is_pure=True, pack=4
    )
    ordered = gl.join(even, odd).permute((0, 2, 4, 1, 3)).reshape([64, BLOCK])
    return gl.convert_layout(ordered.to(gl.float8e4nv, bitcast=True), OPERAND)


@gluon.jit
def _left(a, at, MMA: gl.constexpr):
    """128 codes of K of 64 rows: those ``at`` in the ring, and the next."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 4)
    return _in_order(a.index(at), OPERAND), _in_order(a.index(at + 1), OPERAND)


@gluon.jit
def _product(left, right, b, at, MMA: gl.constexpr):
    """Start the product of 128 of K: 64 rows of x by 64 columns of w, the tiles ``at`` and ``at + 2`` of the ring."""
    result = gl.zeros([64, 64], gl.float32, MMA)
    result = warpgroup_mma(left, b.index(at).permute((1, 0)), result, use_acc=False, is_async=True)
    return warpgroup_mma(right, b.index(at + 2).permute((1, 0)), result, is_async=True)


@gluon.jit
def _scales(s, stage, row, part, MMA: gl.constexpr):
    """x's scales of 64 rows, times w's."""
    rows: gl.constexpr = gl.SliceLayout(1, MMA)
    held = s.index(stage)
    of_x = held.gather(row + gl.arange(0, 64, layout=rows), 0)
    return (of_x * held.gather(gl.full([64], ROWS + part, gl.int32, rows), 0))[:, None]


@gluon.jit
def _add_columns(sums_0, sums_1, sums_2, sums_3, a, b, s, stage, half, MMA: gl.constexpr):
    """Add a step's products, times their scales, to the sums of 64 rows by 4 x 64 columns.

    Two products run at a time. Each is added before the next begins; otherwise the compiler adds it later, and needs
    the registers of three products.
    """
    left, right = _left(a, stage * 4 + half * 2, MMA)
    even = _product(left, right, b, stage * 8, MMA)
    odd = _product(left, right, b, stage * 8 + 1, MMA)
    scale = _scales(s, stage, 64 * half, 0, MMA)
    even = warpgroup_mma_wait(num_outstanding=2, deps=(even,))
    sums_0 += even * scale
    odd, sums_0 = warpgroup_mma_wait(num_outstanding=2, deps=(odd, sums_0))
    even = _product(left, right, b, stage * 8 + 4, MMA)
    odd = warpgroup_mma_wait(num_outstanding=2, deps=(odd,))
    sums_1 += odd * scale
    even, sums_1 = warpgroup_mma_wait(num_outstanding=2, deps=(even, sums_1))
    odd = _product(left, right, b, stage * 8 + 5, MMA)
    scale = _scales(s, stage, 64 * half, 1, MMA)
    even = warpgroup_mma_wait(num_outstanding=2, deps=(even,))
    sums_2 += even * scale
    odd = warpgroup_mma_wait(num_outstanding=0, deps=(odd,))
    sums_3 += odd * scale
    return sums_0, sums_1, sums_2, sums_3


@gluon.jit
def _multiply(
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
    y_map,
    N,
    STAGES: gl.constexpr,
    SLOTS: gl.constexpr,
):
    """One warpgroup: multiply its 64 rows of every tile, in products of 64 columns, and store them."""
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 32])
    stage, phase, slot, turn = begin()
    row, col, row_end, word, _e, _f = take_all(queue, filled, free, slot, turn, 4)
    while row >= 0:
        slot, turn = advance(slot, turn, 2)
        steps = word & 0xFFFFF
        expert = word >> 20
        mine = row + half * 64
        if mine < row_end:
            sums_0 = gl.zeros([64, 64], gl.float32, mma)
            sums_1 = gl.zeros([64, 64], gl.float32, mma)
            sums_2 = gl.zeros([64, 64], gl.float32, mma)
            sums_3 = gl.zeros([64, 64], gl.float32, mma)
            for _step in range(steps):
                mbarrier.wait(full.index(stage), phase)
                sums_0, sums_1, sums_2, sums_3 = _add_columns(sums_0, sums_1, sums_2, sums_3, a, b, s, stage, half, mma)
                gl.barrier()
                mbarrier.arrive(empty.index(stage), count=1)
                stage, phase = advance(stage, phase, STAGES)
            first = col * COLUMNS
            _store_64(y_map, sums_0, buffers, half, 0, mine, row_end, first, expert, SLOTS)
            _store_64(y_map, sums_1, buffers, half, 1, mine, row_end, first + 64, expert, SLOTS)
            if first + GROUP < N:
                _store_64(y_map, sums_2, buffers, half, 0, mine, row_end, first + 128, expert, SLOTS)
                _store_64(y_map, sums_3, buffers, half, 1, mine, row_end, first + 192, expert, SLOTS)
        else:
            for _ in range(steps):
                mbarrier.wait(full.index(stage), phase)
                mbarrier.arrive(empty.index(stage), count=1)
                stage, phase = advance(stage, phase, STAGES)
        row, col, row_end, word, _e, _f = take_all(queue, filled, free, slot, turn, 4)
    tma.store_wait(0)


@gluon.jit
def _store_64(y_map, sums, buffers, half, i, row, row_end, col, expert, SLOTS: gl.constexpr):
    """Stores 64 rows and columns by TMA: see ``consumer.store_boxes``."""
    buffer = buffers.index(half * SLOTS + i % SLOTS)
    store_box(y_map, sums.to(buffers.dtype), buffer, row, row_end, col, expert, False, SLOTS, False)


@gluon.jit
def rows_w8a8_starts(
    x,
    w,
    x_scale,
    w_scale,
    y,
    y_map,
    m_sizes,
    starts,
    bounds,
    counter,
    M,
    N,
    K,
    E,
    stride_y_m,
    stride_scale_m,
    stride_scale_k,
    stride_scale_e,
    m_sizes_step,
    starts_step,
    room,
    packs,
    STAGES: gl.constexpr,
    SLOTS: gl.constexpr,
    GROUP_M: gl.constexpr,
    EXPERTS: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """y[to(r), n] = sum_g xs[r, g] * ws[e, n // 128, g] * sum_k x[r, k] * w[e, n, k] of r = start(e) + i, i < count(e).

    start(e) is starts[e], or e * room if ``starts_step`` is 0; count(e) is m_sizes[e], brought into [0, room] and so
    that no row passes M. to(r) is r, or if ``packs`` is 1 bounds[e] + r - start(e). Other rows of y
    are not written. k runs over g's 128 of K. x is e4m3 [M, K]; xs of row r of expert e is x_scale[e * stride_scale_e +
    (r - start(e)) * stride_scale_m + g * stride_scale_k], or with ``starts`` x_scale[r * stride_scale_m + g *
    stride_scale_k]. w, w_scale and y_map are as in ``rows_w8a8``.
    """
    swizzled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=64, element_bitwidth=8, rank=2)
    lines: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    a = gl.allocate_shared_memory(gl.float8e4nv, [4 * STAGES, 64, BLOCK], swizzled)
    b = gl.allocate_shared_memory(gl.float8e4nv, [8 * STAGES, 64, BLOCK], PREPARED)
    s = gl.allocate_shared_memory(gl.float32, [STAGES, 2 * ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    buffers = gl.allocate_shared_memory(y.dtype.element_ty, [2 * SLOTS, 64, 64], lines)
    full, empty, queue, filled, free = barriers(STAGES, 33, 2, 2)  # the loading warp and each lane's copies
    placed = (m_sizes, starts, room, m_sizes_step, starts_step)
    strides = (stride_scale_m, stride_scale_k, stride_scale_e)
    gl.barrier()
    gl.warp_specialize(
        [
            (
                _multiply,
                (0, a, b, s, full, empty, queue, filled, free, buffers, y_map, N, STAGES, SLOTS),
            ),
            (
                _multiply,
                (1, a, b, s, full, empty, queue, filled, free, buffers, y_map, N, STAGES, SLOTS),
            ),
            (
                _load_both,
                (
                    x,
                    w,
                    x_scale,
                    w_scale,
                    a,
                    b,
                    s,
                    full,
                    empty,
                    queue,
                    filled,
                    free,
                    placed,
                    bounds,
                    packs,
                    strides,
                    counter,
                    M,
                    N,
                    K,
                    E,
                    STAGES,
                    GROUP_M,
                    EXPERTS,
                ),
            ),
        ],
        [4, 1],
        [REGISTERS, 504 - 2 * REGISTERS],
    )
