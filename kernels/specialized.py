"""The grouped GEMM by rows for sm_90, warp-specialised: one warp loads through TMA, two warpgroups multiply.

A tile has 128 rows, 64 for each warpgroup (warpgroups.py). Tiles are handed out as programs become free. The arguments
are those of ``forward.rows``, and ``counter``, an int32 that is zero before and after.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, mbarrier, tma

from .pipeline import (
    BESIDE_BIT,
    BOTH,
    END,
    GATHER_FLAG,
    NARROW_BIT,
    ZERO_TAIL_FLAG,
    add,
    advance,
    barriers,
    counts,
    drain,
    expect,
    expert_ends,
    next_tile,
    publish,
    say,
    take,
)
from .warpgroups import flat_index, multiply


@gluon.jit
def _load_rows(
    x, w, a, b, full, empty, queue, filled, free, m_sizes, counter, moved, M, N, K, E, m_sizes_step, stride_x_m,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    EXPERTS: gl.constexpr, W_KN: gl.constexpr, GATHER: gl.constexpr, GATED: gl.constexpr,
):  # fmt: skip
    """The loading warp of the row-grouped GEMM; four, where rows of x are gathered: those come through pointers.

    A tile whose right half lies past the last column is loaded at half its width. So is each half of the last tiles,
    where those are so few that the halves keep no more than all programs busy.
    """
    HALF: gl.constexpr = BLOCK_N // 2
    WARPS: gl.constexpr = 4 if GATHER else 1
    layout: gl.constexpr = gl.BlockedLayout([EXPERTS // 32 // WARPS], [32], [WARPS], [0])
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_K, BLOCK_K // 8], [4, 1], [1, 0])
    half_bytes: gl.constexpr = 64 * BLOCK_K * w.dtype.primitive_bitwidth // 8
    b_bytes: gl.constexpr = HALF * BLOCK_K * w.dtype.primitive_bitwidth // 8
    tiles_n = gl.cdiv(N, BLOCK_N)
    steps = gl.cdiv(K, BLOCK_K)
    count, end = expert_ends(m_sizes, m_sizes_step, M, E, EXPERTS, layout)
    tile_end = gl.associative_scan((count // 128 + (count % 128 != 0).to(gl.int32)) * tiles_n, 0, add)
    whole = gl.max(tile_end, 0)
    last = whole % gl.num_programs(0)
    split = gl.where((2 * last <= gl.num_programs(0)) & (GATED == 0), last, 0)
    whole -= split
    total = whole + 2 * split
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    slot = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    number = gl.program_id(0)
    while number < total:
        past = gl.maximum(number - whole, 0)
        tile = number - past + past // 2
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
        if GATED:
            col = rest // height
            second = N // 2 + col * HALF
            wide = col >= 0
        else:
            col = rest // height * 2 + past % 2
            second = (col + 1) * HALF
            wide = (number < whole) & (second < N)
        word = steps | (expert << 20) | gl.where(wide, 0, NARROW_BIT)
        publish(queue, filled, free, slot, turn, row, col, row_end, word, WARPS)
        slot, turn = advance(slot, turn, 2)
        drawn = gl.atomic_add(counter, 1, sem="relaxed")  # looked at when this tile's loads are under way
        both = row + 64 < row_end
        if GATHER:
            index, _row_weights, _bias, index_step, index_end, x_divisor, flags = moved
            m = row + gl.arange(0, 128, layout=gl.SliceLayout(1, ROWS))
            flat, inside = flat_index(index, index_step, index_end, flags, m, row_end)
            source = gl.where((flags & GATHER_FLAG) != 0, flat // x_divisor, m)
            k = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, ROWS))
            x_at = x + (gl.where(inside, source, 0).to(gl.int64)[:, None] * stride_x_m + k[None, :])
        for start in range(0, K, BLOCK_K):
            mbarrier.wait(empty.index(stage), phase ^ 1)
            bar = full.index(stage)
            if GATHER:
                mbarrier.expect(bar, b_bytes, pred=wide == 0)
                mbarrier.expect(bar, 2 * b_bytes, pred=wide)
                both_halves = a.index(stage * 2)._reinterpret(w.dtype, [128, BLOCK_K], a.layout)
                in_k = (start + k < K)[None, :]
                async_copy.async_copy_global_to_shared(both_halves, x_at, mask=inside[:, None] & in_k)
                async_copy.mbarrier_arrive(bar, increment_count=False)
                x_at += BLOCK_K
            else:
                expect(bar, half_bytes, both, b_bytes, wide)
                tma.async_copy_global_to_shared(x, [row, start], bar, a.index(stage * 2))
                tma.async_copy_global_to_shared(x, [row + 64, start], bar, a.index(stage * 2 + 1), pred=both)
            if W_KN:
                left = b.index(stage * 2)._reinterpret(w.dtype, [1, BLOCK_K, HALF], w.layout)
                right = b.index(stage * 2 + 1)._reinterpret(w.dtype, [1, BLOCK_K, HALF], w.layout)
                tma.async_copy_global_to_shared(w, [expert, start, col * HALF], bar, left)
                tma.async_copy_global_to_shared(w, [expert, start, second], bar, right, pred=wide)
            else:
                left = b.index(stage * 2)._reinterpret(w.dtype, [1, HALF, BLOCK_K], w.layout)
                right = b.index(stage * 2 + 1)._reinterpret(w.dtype, [1, HALF, BLOCK_K], w.layout)
                tma.async_copy_global_to_shared(w, [expert, col * HALF, start], bar, left)
                tma.async_copy_global_to_shared(w, [expert, second, start], bar, right, pred=wide)
            stage, phase = advance(stage, phase, STAGES)
        number = next_tile(counter, drawn, total)
    publish(queue, filled, free, slot, turn, -1, 0, 0, 0, WARPS)


@gluon.jit
def _load_pair(
    x, w, a, b, full, empty, stage, phase, rank, row, row_end, col, expert, narrow, N, K,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, W_KN: gl.constexpr, GATED: gl.constexpr,
    TALL: gl.constexpr,
):  # fmt: skip
    """One program's loads of two tiles, one below the other (TALL) or beside: of what both read, half. (stage, phase)."""
    HALF: gl.constexpr = BLOCK_N // 2
    a_bytes: gl.constexpr = 64 * BLOCK_K * w.dtype.primitive_bitwidth // 8
    b_bytes: gl.constexpr = HALF * BLOCK_K * w.dtype.primitive_bitwidth // 8
    if TALL:
        row += rank * 128
    elif GATED:
        col += rank
    else:
        col += rank * 2
    if GATED:
        second = N // 2 + col * HALF
        any_column = col * HALF < N // 2
        wide = any_column
    else:
        second = (col + 1) * HALF
        any_column = col * HALF < N
        wide = (narrow == 0) & (second < N)
    one = row < row_end
    both = row + 64 < row_end
    for start in range(0, K, BLOCK_K):
        mbarrier.wait(empty.index(stage), phase ^ 1)
        bar = full.index(stage)
        if TALL:
            mbarrier.expect(bar, b_bytes, pred=(one == 0) & (wide == 0))
            mbarrier.expect(bar, 2 * b_bytes, pred=(one == 0) & wide)
            mbarrier.expect(bar, a_bytes + b_bytes, pred=one & (both == 0) & (wide == 0))
            mbarrier.expect(bar, a_bytes + 2 * b_bytes, pred=one & (both == 0) & wide)
            mbarrier.expect(bar, 2 * a_bytes + b_bytes, pred=both & (wide == 0))
            mbarrier.expect(bar, 2 * a_bytes + 2 * b_bytes, pred=both & wide)
            tma.async_copy_global_to_shared(x, [row, start], bar, a.index(stage * 2), pred=one)
            tma.async_copy_global_to_shared(x, [row + 64, start], bar, a.index(stage * 2 + 1), pred=both)
            column = gl.where(rank == 0, col * HALF, second)
            say(True, BOTH)
            if W_KN:
                tile = b.index(stage * 2 + rank)._reinterpret(w.dtype, [1, BLOCK_K, HALF], w.layout)
                tma.async_copy_global_to_shared(w, [expert, start, column], bar, tile, pred=wide | (rank == 0))
            else:
                tile = b.index(stage * 2 + rank)._reinterpret(w.dtype, [1, HALF, BLOCK_K], w.layout)
                tma.async_copy_global_to_shared(w, [expert, column, start], bar, tile, pred=wide | (rank == 0))
            say(True, END)
        else:
            mbarrier.expect(bar, a_bytes, pred=(both == 0) & (any_column == 0))
            mbarrier.expect(bar, 2 * a_bytes, pred=both & (any_column == 0))
            mbarrier.expect(bar, a_bytes + b_bytes, pred=(both == 0) & any_column & (wide == 0))
            mbarrier.expect(bar, 2 * a_bytes + b_bytes, pred=both & any_column & (wide == 0))
            mbarrier.expect(bar, a_bytes + 2 * b_bytes, pred=(both == 0) & wide)
            mbarrier.expect(bar, 2 * a_bytes + 2 * b_bytes, pred=both & wide)
            say(True, BOTH)
            tma.async_copy_global_to_shared(
                x, [row + rank * 64, start], bar, a.index(stage * 2 + rank), pred=both | (rank == 0)
            )
            say(True, END)
            if W_KN:
                left = b.index(stage * 2)._reinterpret(w.dtype, [1, BLOCK_K, HALF], w.layout)
                right = b.index(stage * 2 + 1)._reinterpret(w.dtype, [1, BLOCK_K, HALF], w.layout)
                tma.async_copy_global_to_shared(w, [expert, start, col * HALF], bar, left, pred=any_column)
                tma.async_copy_global_to_shared(w, [expert, start, second], bar, right, pred=wide)
            else:
                left = b.index(stage * 2)._reinterpret(w.dtype, [1, HALF, BLOCK_K], w.layout)
                right = b.index(stage * 2 + 1)._reinterpret(w.dtype, [1, HALF, BLOCK_K], w.layout)
                tma.async_copy_global_to_shared(w, [expert, col * HALF, start], bar, left, pred=any_column)
                tma.async_copy_global_to_shared(w, [expert, second, start], bar, right, pred=wide)
        stage, phase = advance(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def _load_row_pairs(
    x, w, a, b, full, empty, queue, filled, free, m_sizes, counter, M, N, K, E, m_sizes_step,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    EXPERTS: gl.constexpr, W_KN: gl.constexpr, GATED: gl.constexpr, TALL: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """``_load_rows`` of a cluster: two tiles below each other (TALL), beside each other (WIDE), or, where both are
    given, below each other and those of an expert's last odd row of tiles beside each other.

    The first program draws pairs of tiles and tells the other.
    """
    layout: gl.constexpr = gl.BlockedLayout([EXPERTS // 32], [32], [1], [0])
    GROUP: gl.constexpr = GROUP_M // 2 if TALL and GROUP_M > 1 else GROUP_M
    ROWS: gl.constexpr = 256 if TALL else 128
    rank = gl.program_id(0) % 2
    clusters = gl.num_programs(0) // 2
    tiles_n = gl.cdiv(N, BLOCK_N)
    pairs_n = gl.cdiv(N, 2 * BLOCK_N)
    steps = gl.cdiv(K, BLOCK_K)
    count, end = expert_ends(m_sizes, m_sizes_step, M, E, EXPERTS, layout)
    tiles_m = count // 128 + (count % 128 != 0).to(gl.int32)
    if TALL and WIDE:
        tiles = tiles_m // 2 * tiles_n + tiles_m % 2 * pairs_n
    elif TALL:
        tiles = (tiles_m + 1) // 2 * tiles_n
    else:
        tiles = tiles_m * pairs_n
    tile_end = gl.associative_scan(tiles, 0, add)
    whole = gl.max(tile_end, 0)
    last = whole % clusters
    split = gl.where((2 * last <= clusters) & (GATED == 0), last, 0)
    whole -= split
    total = whole + 2 * split
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    slot = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    row = gl.to_tensor(0)
    drawn = gl.to_tensor(0)
    number = gl.program_id(0) // 2
    while row >= 0:
        if rank == 0:
            past = gl.maximum(number - whole, 0)
            tile = number - past + past // 2
            done = tile_end <= tile
            expert = gl.sum(done.to(gl.int32), 0)
            first_tile = gl.max(gl.where(done, tile_end, 0), 0)
            row_start = gl.max(gl.where(done, end, 0), 0)
            row_end = gl.min(gl.where(done, M, end), 0)
            # GROUP row tiles share a column before the next.
            inner = tile - first_tile
            if TALL and WIDE:
                tall_rows = (row_end - row_start + 127) // 256
                beside = inner >= tall_rows * tiles_n
            else:
                tall_rows = gl.cdiv(row_end - row_start, ROWS)
                beside = inner < 0
            columns = tiles_n if TALL else pairs_n
            per_group = GROUP * columns
            group = inner // per_group
            first = group * GROUP
            height = gl.maximum(gl.minimum(tall_rows - first, GROUP), 1)
            rest = inner - group * per_group
            tile_m = first + rest % height
            tile_n = rest // height
            if TALL and WIDE:
                tile_m = gl.where(beside, tall_rows, tile_m)
                tile_n = gl.where(beside, (inner - tall_rows * tiles_n) * 2, tile_n)
            elif WIDE:
                tile_n *= 2
            col = tile_n if GATED else tile_n * 2 + past % 2
            row = gl.where(number < total, row_start + tile_m * ROWS, -1)
            word = steps | (expert << 20) | gl.where(number < whole, 0, NARROW_BIT)
            word |= gl.where(beside, BESIDE_BIT, 0)
            publish(queue, filled, free, slot, turn, row, col, row_end, word, 1, True)
        else:
            mbarrier.expect(filled.index(slot), 16)
            row, col, row_end, word = take(queue, filled, free, slot, turn, True, 1)
        slot, turn = advance(slot, turn, 2)
        if row >= 0:
            if rank == 0:
                drawn = gl.atomic_add(counter, 1, sem="relaxed")  # looked at when this tile's loads are under way
            expert = (word >> 20) & 0x3FF
            narrow = (word & NARROW_BIT) != 0
            if TALL and WIDE:
                if word < 0:
                    stage, phase = _load_pair(
                        x, w, a, b, full, empty, stage, phase, rank, row, row_end, col, expert, narrow, N, K,
                        BLOCK_N, BLOCK_K, STAGES, W_KN, GATED, False,
                    )  # fmt: skip
                else:
                    stage, phase = _load_pair(
                        x, w, a, b, full, empty, stage, phase, rank, row, row_end, col, expert, narrow, N, K,
                        BLOCK_N, BLOCK_K, STAGES, W_KN, GATED, True,
                    )  # fmt: skip
            else:
                stage, phase = _load_pair(
                    x, w, a, b, full, empty, stage, phase, rank, row, row_end, col, expert, narrow, N, K,
                    BLOCK_N, BLOCK_K, STAGES, W_KN, GATED, TALL,
                )  # fmt: skip
            if rank == 0:
                if drawn == total - 1:
                    gl.store(counter, 0)
                number = clusters + drawn
    drain(empty, free, stage, phase, slot, turn, rank == 0, STAGES)


@gluon.jit
def rows_specialized(
    x, w, y, y_map, m_sizes, index, row_weights, bias, counter, M, N, K, E, stride_x_m, stride_w_e, stride_w_row,
    stride_y_m, m_sizes_step, index_step, index_end, x_divisor, flags,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, SLOTS: gl.constexpr, GROUP_M: gl.constexpr,
    EXPERTS: gl.constexpr, W_KN: gl.constexpr, INDEXED: gl.constexpr, GATHER: gl.constexpr, GATED: gl.constexpr,
    REGISTERS: gl.constexpr, CLUSTER: gl.constexpr = 0,
):  # fmt: skip
    """y[to(m), n] = weight(m) * (sum_k x[from(m), k] * w[expert of m, n, k] + bias[expert of m, n]).

    ``forward.rows``. x and w come through TMA, x in GATHER code through pointers; y leaves through ``y_map``, a
    ragged descriptor (``kernels/abi.py``, RAGGED_SIZES), in INDEXED code, which has none, through pointers.
    GATED code stores silu(gate) * up in its place, y [M, N // 2]: a tile of w is HALF rows of gate, then those of up.
    """
    element: gl.constexpr = w.dtype
    lines: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    a = gl.allocate_shared_memory(element, [2 * STAGES, 64, BLOCK_K], lines)
    if W_KN:
        b = gl.allocate_shared_memory(element, [2 * STAGES, BLOCK_K, BLOCK_N // 2], lines)
    else:
        b = gl.allocate_shared_memory(element, [2 * STAGES, BLOCK_N // 2, BLOCK_K], lines)
    buffers = gl.allocate_shared_memory(element, [2 * SLOTS, 64, 64], lines)
    full, empty, queue, filled, free = barriers(STAGES, 129 if GATHER else 1, CLUSTER)
    moved = (index, row_weights, bias, index_step, index_end, x_divisor, flags)
    result = y if INDEXED else y_map
    gl.barrier()
    TALL: gl.constexpr = CLUSTER == 1 or CLUSTER == 3
    WIDE: gl.constexpr = CLUSTER == 2 or CLUSTER == 3
    ROW_STEP: gl.constexpr = 128 if TALL else 0
    COL_STEP: gl.constexpr = (1 if GATED else 2) if WIDE else 0
    if CLUSTER:
        gl.warp_specialize(
            [
                (multiply, (
                    0, a, b, full, empty, queue, filled, free, buffers, result, moved, N, stride_y_m, BLOCK_N, STAGES,
                    SLOTS, True, not W_KN, False, INDEXED, GATHER, GATED, not GATED, CLUSTER, ROW_STEP, COL_STEP,
                )),
                (multiply, (
                    1, a, b, full, empty, queue, filled, free, buffers, result, moved, N, stride_y_m, BLOCK_N, STAGES,
                    SLOTS, True, not W_KN, False, INDEXED, GATHER, GATED, not GATED, CLUSTER, ROW_STEP, COL_STEP,
                )),
                (_load_row_pairs, (
                    x, w, a, b, full, empty, queue, filled, free, m_sizes, counter, M, N, K, E, m_sizes_step,
                    BLOCK_N, BLOCK_K, STAGES, GROUP_M, EXPERTS, W_KN, GATED, TALL, WIDE,
                )),
            ],
            [4, 4 if GATHER else 1],
            [REGISTERS, 504 - 2 * REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (multiply, (
                    0, a, b, full, empty, queue, filled, free, buffers, result, moved, N, stride_y_m, BLOCK_N, STAGES,
                    SLOTS, True, not W_KN, False, INDEXED, GATHER, GATED, not GATED, CLUSTER, ROW_STEP, COL_STEP,
                )),
                (multiply, (
                    1, a, b, full, empty, queue, filled, free, buffers, result, moved, N, stride_y_m, BLOCK_N, STAGES,
                    SLOTS, True, not W_KN, False, INDEXED, GATHER, GATED, not GATED, CLUSTER, ROW_STEP, COL_STEP,
                )),
                (_load_rows, (
                    x, w, a, b, full, empty, queue, filled, free, m_sizes, counter, moved, M, N, K, E, m_sizes_step,
                    stride_x_m, BLOCK_N, BLOCK_K, STAGES, GROUP_M, EXPERTS, W_KN, GATHER, GATED,
                )),
            ],
            [4, 4 if GATHER else 1],
            [REGISTERS, 504 - 2 * REGISTERS],
        )  # fmt: skip

    if (flags & ZERO_TAIL_FLAG) != 0:
        experts: gl.constexpr = gl.BlockedLayout([EXPERTS // 128], [32], [4], [0])
        wanted = gl.sum(counts(m_sizes, m_sizes_step, M, E, EXPERTS, experts).to(gl.int64), 0)
        used = gl.minimum(wanted, M.to(gl.int64)).to(gl.int32)
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
        width = N // 2 if GATED else N
        for row in range(used + 4 * gl.program_id(0), M, 4 * gl.num_programs(0)):
            m = row + gl.arange(0, 4, layout=gl.SliceLayout(1, layout)).to(gl.int64)
            for col in range(0, width, 256):
                n = col + gl.arange(0, 256, layout=gl.SliceLayout(0, layout))
                address = y + m[:, None] * stride_y_m + n[None, :]
                gl.store(
                    address,
                    gl.zeros([4, 256], y.dtype.element_ty, layout),
                    mask=(m < M)[:, None] & (n < width)[None, :],
                )
