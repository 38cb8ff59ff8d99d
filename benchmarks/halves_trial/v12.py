"""The same grouped GEMMs for sm_90, warp-specialised: one warp loads through TMA, two warpgroups multiply.

A tile has 128 rows, 64 for each warpgroup. Tiles are handed out as programs become free. The arguments are
those of ``forward.rows`` and ``grad_weight.weight``, and ``counter``, an int32 that is zero before and after.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

_INDEX_END: gl.constexpr = gl.constexpr(0x40000000)
# What ``flags`` says, as in forward.py and tiles.py.
_GATHER: gl.constexpr = gl.constexpr(1)
_SCATTER: gl.constexpr = gl.constexpr(2)
_WEIGHT: gl.constexpr = gl.constexpr(4)
_BIAS: gl.constexpr = gl.constexpr(8)
_ZERO_TAIL: gl.constexpr = gl.constexpr(16)
_INDEXED: gl.constexpr = gl.constexpr(1 | 2 | 4)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _add_capped(a, b):
    return gl.minimum(a + b, 0x7FFFFFFF)


@gluon.jit
def _counts(m_sizes, m_sizes_step, M, E, EXPERTS: gl.constexpr, LAYOUT: gl.constexpr):
    """The rows that each expert asks for, [EXPERTS] uint32: none below zero, none above M."""
    expert = gl.arange(0, EXPERTS, layout=LAYOUT)
    word = m_sizes + expert * m_sizes_step
    low = gl.load(word, mask=expert < E, other=0).to(gl.int64)
    high = gl.load(word + (m_sizes_step - 1), mask=expert < E, other=0).to(gl.int64)
    wide = (high << 32) | (low & 0xFFFFFFFF)
    count = gl.where(m_sizes_step == 1, low, wide)
    return gl.minimum(gl.maximum(count, 0), M.to(gl.int64)).to(gl.uint32)


@gluon.jit
def _expert_ends(m_sizes, m_sizes_step, M, E, EXPERTS: gl.constexpr, LAYOUT: gl.constexpr):
    """(rows, end row) of every expert, [EXPERTS] int32: no row passes M."""
    count = _counts(m_sizes, m_sizes_step, M, E, EXPERTS, LAYOUT)
    end = gl.associative_scan(count, 0, _add_capped)
    limit = M.to(gl.uint32)
    start = gl.minimum(end - count, limit)
    end = gl.minimum(end, limit)
    return (end - start).to(gl.int32), end.to(gl.int32)


@gluon.jit
def _barriers(STAGES: gl.constexpr, FULL: gl.constexpr):
    """(full, empty) of each stage of operands, (queue, filled, free) of the two slots that tell of tiles."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    queue = gl.allocate_shared_memory(gl.int32, [2, 4], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    filled = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=FULL)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(filled.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    return full, empty, queue, filled, free


@gluon.jit
def _publish(queue, filled, free, slot, phase, a, b, c, d, WARPS: gl.constexpr):
    """Puts four numbers into the queue for both warpgroups; waits until they took what was there."""
    mbarrier.wait(free.index(slot), phase ^ 1)
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    i = gl.arange(0, 4, layout=layout)
    queue.index(slot).store(gl.where(i == 0, a, gl.where(i == 1, b, gl.where(i == 2, c, d))))
    gl.barrier()
    mbarrier.arrive(filled.index(slot), count=1)


@gluon.jit
def _take(queue, filled, free, slot, phase):
    """The next four numbers of the queue."""
    mbarrier.wait(filled.index(slot), phase)
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    i = gl.arange(0, 4, layout=layout)
    values = queue.index(slot).load(layout)
    a = gl.sum(gl.where(i == 0, values, 0), 0)
    b = gl.sum(gl.where(i == 1, values, 0), 0)
    c = gl.sum(gl.where(i == 2, values, 0), 0)
    d = gl.sum(gl.where(i == 3, values, 0), 0)
    gl.barrier()
    mbarrier.arrive(free.index(slot), count=1)
    return a, b, c, d


@gluon.jit
def _advance(stage, phase, STAGES: gl.constexpr):
    following = stage + 1
    wrapped = following == STAGES
    return gl.where(wrapped, 0, following), gl.where(wrapped, phase ^ 1, phase)


@gluon.jit
def _before(stage, STAGES: gl.constexpr):
    return gl.where(stage == 0, STAGES, stage) - 1


@gluon.jit
def _next_tile(counter, drawn, total):
    """The tile that ``drawn`` stands for; the one who draws the last number leaves the counter at zero."""
    if drawn == total - 1:
        gl.store(counter, 0)
    return gl.num_programs(0) + drawn


@gluon.jit
def _flat(index, index_step, index_end, flags, row, row_end):
    """index[row], and which rows count: see ``tiles.flat_index``."""
    inside = row < row_end
    indexed = (flags & _INDEXED) != 0
    flat = gl.load(index + row.to(gl.int64) * index_step, mask=inside & indexed, other=0)
    return flat, inside & (((flat >= 0) & (flat < index_end)) | (not indexed))


@gluon.jit
def _weights(moved, row, row_end, LAYOUT: gl.constexpr):
    """The factor of each row, one where the call has none."""
    index, row_weights, _bias, index_step, index_end, _x_divisor, flags = moved
    m = row + gl.arange(0, 64, layout=LAYOUT)
    flat, inside = _flat(index, index_step, index_end, flags, m, row_end)
    return gl.load(row_weights + flat, mask=inside & ((flags & _WEIGHT) != 0), other=1.0)


@gluon.jit
def _targets(moved, row, row_end, LAYOUT: gl.constexpr):
    """(the row of y that each row goes to, whether it goes anywhere)."""
    index, _row_weights, _bias, index_step, index_end, _x_divisor, flags = moved
    m = row + gl.arange(0, 64, layout=LAYOUT)
    flat, inside = _flat(index, index_step, index_end, flags, m, row_end)
    return gl.where((flags & _SCATTER) != 0, flat, m), inside


@gluon.jit
def _biased(acc, moved, expert, col, N, BLOCK_N: gl.constexpr, MMA: gl.constexpr):
    _index, _row_weights, bias, _index_step, _index_end, _x_divisor, flags = moved
    if (flags & _BIAS) != 0:
        n = col + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, MMA))
        added = gl.load(bias + expert.to(gl.int64) * N + n, mask=n < N, other=0.0)
        acc += added.to(gl.float32)[None, :]
    return acc


@gluon.jit
def _halves(tile):
    """The left and the right half of a tile's columns."""
    return tile.reshape([tile.shape[0], 2, tile.shape[1] // 2]).permute(0, 2, 1).split()


@gluon.jit
def _store_lines(y, part, buffer, target, inside, col, N, stride_y_m, LAYOUT: gl.constexpr):
    """Stores 64 x 64 through shared memory, so that whole lines are written."""
    buffer.store(part)
    tile = buffer.load(LAYOUT)
    n = col + gl.arange(0, 64, layout=gl.SliceLayout(0, LAYOUT))
    at = y + target.to(gl.int64)[:, None] * stride_y_m + n[None, :]
    gl.store(at, tile, mask=inside[:, None] & (n < N)[None, :])


@gluon.jit
def _store_box(y, part, buffer, row, row_end, col, expert, WEIGHT: gl.constexpr, SLOTS: gl.constexpr):
    """Stores 64 x 64 by TMA, which cuts off rows and columns past the end. It reads the buffer on its own."""
    tma.store_wait(SLOTS - 1)
    gl.barrier()
    buffer.store(part)
    fence_async_shared()
    gl.barrier()
    if WEIGHT:
        box = buffer._reinterpret(part.dtype, [1, 64, 64], y.layout)
        tma.async_copy_shared_to_global(y, [expert, row, col], box)
    else:
        box = buffer._reinterpret(part.dtype, [1, 1, 64, 64], y.layout)
        tma.async_copy_shared_to_global(y, [_INDEX_END, row_end, _INDEX_END - row_end + row, col], box)


@gluon.jit
def _multiply(
    half, a, b, full, empty, queue, filled, free, buffers, y, moved, N, stride_y_m,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, A_MK: gl.constexpr, B_NK: gl.constexpr,
    WEIGHT: gl.constexpr, INDEXED: gl.constexpr, GATHER: gl.constexpr,
):  # fmt: skip
    """One warpgroup: multiplies its 64 rows of every tile, and stores them.

    A tile in the queue is (first row, column tile, end of the rows, steps of the reduction + 2^20 x expert).
    y is a TMA descriptor, INDEXED a pointer.
    """
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    slot = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    row, col, row_end, word = _take(queue, filled, free, slot, turn)
    while row >= 0:
        slot, turn = _advance(slot, turn, 2)
        steps = word & 0xFFFFF
        mine = row + half * 64
        if mine < row_end:
            if INDEXED:  # read now, their latency passes while the product is computed
                scale = _weights(moved, mine, row_end, gl.SliceLayout(1, mma))
                target, inside = _targets(moved, mine, row_end, gl.SliceLayout(1, lines))
            acc = gl.zeros([64, BLOCK_N], gl.float32, mma)
            for step in range(steps):
                mbarrier.wait(full.index(stage), phase)
                if GATHER:
                    fence_async_shared()
                a_tile = a.index(stage * 2 + half)
                b_tile = b.index(stage)
                if not A_MK:
                    a_tile = a_tile.permute((1, 0))
                if B_NK:
                    b_tile = b_tile.permute((1, 0))
                acc = warpgroup_mma(a_tile, b_tile, acc, is_async=True)
                acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
                gl.barrier()
                mbarrier.arrive(empty.index(_before(stage, STAGES)), count=1, pred=step > 0)
                stage, phase = _advance(stage, phase, STAGES)
            acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
            if steps > 0:
                gl.barrier()
                mbarrier.arrive(empty.index(_before(stage, STAGES)), count=1)
            expert = word >> 20
            first = col * BLOCK_N
            if INDEXED:
                acc = _biased(acc, moved, expert, first, N, BLOCK_N, mma) * scale[:, None]
            left, right = _halves(acc.to(buffers.dtype))
            parts = (left, right) if BLOCK_N == 128 else _halves(left) + _halves(right)
            for i in gl.static_range(BLOCK_N // 64):
                buffer = buffers.index(half * SLOTS + i % SLOTS)
                if INDEXED:
                    _store_lines(y, parts[i], buffer, target, inside, first + 64 * i, N, stride_y_m, lines)
                else:
                    _store_box(y, parts[i], buffer, mine, row_end, first + 64 * i, expert, WEIGHT, SLOTS)
        else:
            for _ in range(steps):
                mbarrier.wait(full.index(stage), phase)
                mbarrier.arrive(empty.index(stage), count=1)
                stage, phase = _advance(stage, phase, STAGES)
        row, col, row_end, word = _take(queue, filled, free, slot, turn)
    if not INDEXED:
        tma.store_wait(0)


@gluon.jit
def _load_rows(
    x, w, a, b, full, empty, queue, filled, free, m_sizes, counter, moved, M, N, K, E, m_sizes_step, stride_x_m,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    EXPERTS: gl.constexpr, W_KN: gl.constexpr, GATHER: gl.constexpr,
):  # fmt: skip
    """The loading warp of the row-grouped GEMM; four, where rows of x are gathered: those come through pointers."""
    WARPS: gl.constexpr = 4 if GATHER else 1
    layout: gl.constexpr = gl.BlockedLayout([EXPERTS // 32 // WARPS], [32], [WARPS], [0])
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_K, BLOCK_K // 8], [4, 1], [1, 0])
    half_bytes: gl.constexpr = 64 * BLOCK_K * w.dtype.primitive_bitwidth // 8
    b_bytes: gl.constexpr = BLOCK_N * BLOCK_K * w.dtype.primitive_bitwidth // 8
    tiles_n = gl.cdiv(N, BLOCK_N)
    steps = gl.cdiv(K, BLOCK_K)
    count, end = _expert_ends(m_sizes, m_sizes_step, M, E, EXPERTS, layout)
    tile_end = gl.associative_scan((count // 128 + (count % 128 != 0).to(gl.int32)) * tiles_n, 0, _add)
    total = gl.max(tile_end, 0)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    slot = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    tile = gl.program_id(0)
    while tile < total:
        done = tile_end <= tile
        expert = gl.sum(done.to(gl.int32), 0)
        first_tile = gl.max(gl.where(done, tile_end, 0), 0)
        row_start = gl.max(gl.where(done, end, 0), 0)
        row_end = gl.min(gl.where(done, M, end), 0)
        # GROUP_M row tiles share a column before the next.
        inner = tile - first_tile
        tiles_m = gl.cdiv(row_end - row_start, 128)
        per_group = GROUP_M * tiles_n
        group = inner // per_group
        first = group * GROUP_M
        height = gl.minimum(tiles_m - first, GROUP_M)
        rest = inner - group * per_group
        row = row_start + (first + rest % height) * 128
        col = rest // height
        _publish(queue, filled, free, slot, turn, row, col, row_end, steps | (expert << 20), WARPS)
        slot, turn = _advance(slot, turn, 2)
        drawn = gl.atomic_add(counter, 1, sem="relaxed")  # looked at when this tile's loads are under way
        both = row + 64 < row_end
        if GATHER:
            index, _row_weights, _bias, index_step, index_end, x_divisor, flags = moved
            m = row + gl.arange(0, 128, layout=gl.SliceLayout(1, ROWS))
            flat, inside = _flat(index, index_step, index_end, flags, m, row_end)
            source = gl.where((flags & _GATHER) != 0, flat // x_divisor, m)
            k = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, ROWS))
            x_at = x + (gl.where(inside, source, 0).to(gl.int64)[:, None] * stride_x_m + k[None, :])
        for start in range(0, K, BLOCK_K):
            mbarrier.wait(empty.index(stage), phase ^ 1)
            bar = full.index(stage)
            if GATHER:
                mbarrier.expect(bar, b_bytes)
                both_halves = a.index(stage * 2)._reinterpret(w.dtype, [128, BLOCK_K], a.layout)
                in_k = (start + k < K)[None, :]
                async_copy.async_copy_global_to_shared(both_halves, x_at, mask=inside[:, None] & in_k)
                async_copy.mbarrier_arrive(bar, increment_count=False)
                x_at += BLOCK_K
            else:
                mbarrier.expect(bar, half_bytes + b_bytes, pred=both == 0)
                mbarrier.expect(bar, 2 * half_bytes + b_bytes, pred=both)
                tma.async_copy_global_to_shared(x, [row, start], bar, a.index(stage * 2))
                tma.async_copy_global_to_shared(x, [row + 64, start], bar, a.index(stage * 2 + 1), pred=both)
            if W_KN:
                b_tile = b.index(stage)._reinterpret(w.dtype, [1, BLOCK_K, BLOCK_N], w.layout)
                tma.async_copy_global_to_shared(w, [expert, start, col * BLOCK_N], bar, b_tile)
            else:
                b_tile = b.index(stage)._reinterpret(w.dtype, [1, BLOCK_N, BLOCK_K], w.layout)
                tma.async_copy_global_to_shared(w, [expert, col * BLOCK_N, start], bar, b_tile)
            stage, phase = _advance(stage, phase, STAGES)
        tile = _next_tile(counter, drawn, total)
    _publish(queue, filled, free, slot, turn, -1, 0, 0, 0, WARPS)


@gluon.jit
def rows_specialized(
    x, w, y, y_map, m_sizes, index, row_weights, bias, counter, M, N, K, E, stride_x_m, stride_w_e, stride_w_row,
    stride_y_m, m_sizes_step, index_step, index_end, x_divisor, flags,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, GROUP_M: gl.constexpr,
    EXPERTS: gl.constexpr, W_KN: gl.constexpr, INDEXED: gl.constexpr, GATHER: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """y[to(m), n] = weight(m) * (sum_k x[from(m), k] * w[expert of m, n, k] + bias[expert of m, n]).

    ``forward.rows``. x and w come through TMA, x in GATHER code through pointers; y leaves through ``y_map``, a
    ragged descriptor (``kernels/abi.py``, RAGGED_SIZES), in INDEXED code, which has none, through pointers.
    """
    element: gl.constexpr = w.dtype
    lines: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    a = gl.allocate_shared_memory(element, [2 * STAGES, 64, BLOCK_K], lines)
    if W_KN:
        b = gl.allocate_shared_memory(element, [STAGES, BLOCK_K, BLOCK_N], lines)
    else:
        b = gl.allocate_shared_memory(element, [STAGES, BLOCK_N, BLOCK_K], lines)
    buffers = gl.allocate_shared_memory(element, [2 * SLOTS, 64, 64], lines)
    full, empty, queue, filled, free = _barriers(STAGES, 129 if GATHER else 1)
    moved = (index, row_weights, bias, index_step, index_end, x_divisor, flags)
    result = y if INDEXED else y_map
    gl.barrier()
    gl.warp_specialize(
        [
            (_multiply, (
                0, a, b, full, empty, queue, filled, free, buffers, result, moved, N, stride_y_m, BLOCK_N, STAGES,
                SLOTS, True, not W_KN, False, INDEXED, GATHER,
            )),
            (_multiply, (
                1, a, b, full, empty, queue, filled, free, buffers, result, moved, N, stride_y_m, BLOCK_N, STAGES,
                SLOTS, True, not W_KN, False, INDEXED, GATHER,
            )),
            (_load_rows, (
                x, w, a, b, full, empty, queue, filled, free, m_sizes, counter, moved, M, N, K, E, m_sizes_step,
                stride_x_m, BLOCK_N, BLOCK_K, STAGES, GROUP_M, EXPERTS, W_KN, GATHER,
            )),
        ],
        [4, 4 if GATHER else 1],
        [REGISTERS, 504 - 2 * REGISTERS],
    )  # fmt: skip

    if (flags & _ZERO_TAIL) != 0:
        experts: gl.constexpr = gl.BlockedLayout([EXPERTS // 128], [32], [4], [0])
        wanted = gl.sum(_counts(m_sizes, m_sizes_step, M, E, EXPERTS, experts).to(gl.int64), 0)
        used = gl.minimum(wanted, M.to(gl.int64)).to(gl.int32)
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
        for row in range(used + 4 * gl.program_id(0), M, 4 * gl.num_programs(0)):
            m = row + gl.arange(0, 4, layout=gl.SliceLayout(1, layout)).to(gl.int64)
            for col in range(0, N, 256):
                n = col + gl.arange(0, 256, layout=gl.SliceLayout(0, layout))
                address = y + m[:, None] * stride_y_m + n[None, :]
                gl.store(
                    address, gl.zeros([4, 256], y.dtype.element_ty, layout), mask=(m < M)[:, None] & (n < N)[None, :]
                )


@gluon.jit
def _load_weight(
    dy, x, a, b, full, empty, queue, filled, free, m_sizes, counter, M, N, K, E, m_sizes_step,
    BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    EXPERTS: gl.constexpr,
):  # fmt: skip
    """The loading warp of dW: both operands end with the expert's rows, see ``kernels/abi.py``, RAGGED_SIZES."""
    WARPS: gl.constexpr = 1
    layout: gl.constexpr = gl.BlockedLayout([EXPERTS // 32], [32], [1], [0])
    half_bytes: gl.constexpr = 64 * BLOCK_M * x.dtype.primitive_bitwidth // 8
    b_bytes: gl.constexpr = BLOCK_K * BLOCK_M * x.dtype.primitive_bitwidth // 8
    tiles_n = gl.cdiv(N, 128)
    tiles_k = gl.cdiv(K, BLOCK_K)
    per_expert = tiles_n * tiles_k
    per_group = GROUP_M * tiles_k
    total = E * per_expert
    _count, end = _expert_ends(m_sizes, m_sizes_step, M, E, EXPERTS, layout)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    slot = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    tile = gl.program_id(0)
    while tile < total:
        expert = tile // per_expert
        inner = tile - expert * per_expert
        group = inner // per_group
        first = group * GROUP_M
        height = gl.minimum(tiles_n - first, GROUP_M)
        rest = inner - group * per_group
        n = (first + rest % height) * 128
        k = rest // height
        i = gl.arange(0, EXPERTS, layout=layout)
        row_start = gl.max(gl.where(i < expert, end, 0), 0)
        row_end = gl.max(gl.where(i <= expert, end, 0), 0)
        count = row_end - row_start
        steps = gl.cdiv(count, BLOCK_M)
        _publish(queue, filled, free, slot, turn, n, k, N, steps | (expert << 20), WARPS)
        slot, turn = _advance(slot, turn, 2)
        drawn = gl.atomic_add(counter, 1, sem="relaxed")  # looked at when this tile's loads are under way
        both = n + 64 < N
        for row in range(0, count, BLOCK_M):
            mbarrier.wait(empty.index(stage), phase ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, half_bytes + b_bytes, pred=both == 0)
            mbarrier.expect(bar, 2 * half_bytes + b_bytes, pred=both)
            at = _INDEX_END - count + row
            left = a.index(stage * 2)._reinterpret(x.dtype, [1, 1, BLOCK_M, 64], dy.layout)
            right = a.index(stage * 2 + 1)._reinterpret(x.dtype, [1, 1, BLOCK_M, 64], dy.layout)
            tma.async_copy_global_to_shared(dy, [_INDEX_END, row_end, at, n], bar, left)
            tma.async_copy_global_to_shared(dy, [_INDEX_END, row_end, at, n + 64], bar, right, pred=both)
            b_tile = b.index(stage)._reinterpret(x.dtype, [1, 1, BLOCK_M, BLOCK_K], x.layout)
            tma.async_copy_global_to_shared(x, [_INDEX_END, row_end, at, k * BLOCK_K], bar, b_tile)
            stage, phase = _advance(stage, phase, STAGES)
        tile = _next_tile(counter, drawn, total)
    _publish(queue, filled, free, slot, turn, -1, 0, 0, 0, WARPS)


@gluon.jit
def weight_specialized(
    dy, x, dw, m_sizes, counter, M, N, K, E, stride_dy_m, stride_x_m, stride_dw_e, stride_dw_row, m_sizes_step,
    BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, GROUP_M: gl.constexpr,
    EXPERTS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """dw[e, n, k] = sum over the expert's rows m of dy[m, n] * x[m, k]: ``grad_weight.weight``.

    All three are TMA descriptors.
    """
    element: gl.constexpr = x.dtype
    lines: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    a = gl.allocate_shared_memory(element, [2 * STAGES, BLOCK_M, 64], lines)
    b = gl.allocate_shared_memory(element, [STAGES, BLOCK_M, BLOCK_K], lines)
    buffers = gl.allocate_shared_memory(element, [2 * SLOTS, 64, 64], lines)
    full, empty, queue, filled, free = _barriers(STAGES, 1)
    gl.barrier()
    gl.warp_specialize(
        [
            (_multiply, (
                0, a, b, full, empty, queue, filled, free, buffers, dw, (), K, stride_dw_row, BLOCK_K, STAGES, SLOTS,
                False, False, True, False, False,
            )),
            (_multiply, (
                1, a, b, full, empty, queue, filled, free, buffers, dw, (), K, stride_dw_row, BLOCK_K, STAGES, SLOTS,
                False, False, True, False, False,
            )),
            (_load_weight, (
                dy, x, a, b, full, empty, queue, filled, free, m_sizes, counter, M, N, K, E, m_sizes_step, BLOCK_M,
                BLOCK_K, STAGES, GROUP_M, EXPERTS,
            )),
        ],
        [4, 1],
        [REGISTERS, 504 - 2 * REGISTERS],
    )  # fmt: skip
