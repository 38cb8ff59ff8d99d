"""The parts that every grouped-GEMM kernel shares: which rows an expert has, and which tile is whose."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def expert_rows(m_sizes, m_sizes_step, M, E, MAX_EXPERTS: tl.constexpr):
    """First row and end row of every expert, each [MAX_EXPERTS] int32.

    ``m_sizes`` points at int32 words; a step of 2 means int64 counts (little endian). A count below
    zero is zero, and no expert's rows pass M, whatever the counts say.
    """
    expert = tl.arange(0, MAX_EXPERTS)
    word = m_sizes + expert * m_sizes_step
    low = tl.load(word, mask=expert < E, other=0).to(tl.int64)
    high = tl.load(word + (m_sizes_step - 1), mask=expert < E, other=0).to(tl.int64)
    wide = (high << 32) | (low & 0xFFFFFFFF)
    count = tl.where(m_sizes_step == 1, low, wide)
    limit = tl.cast(M, tl.int64)
    count = tl.minimum(tl.maximum(count, 0), limit)
    end = tl.cumsum(count, 0)
    start = tl.minimum(end - count, limit)
    return start.to(tl.int32), tl.minimum(end, limit).to(tl.int32)


@triton.jit
def expert_tiles(start, end, tiles_n, BLOCK_M: tl.constexpr):
    """The number of tiles up to and with every expert, [MAX_EXPERTS] int32."""
    rows = end - start
    # Not (rows + BLOCK_M - 1) // BLOCK_M: that overflows near 2^31 rows.
    return tl.cumsum(rows // BLOCK_M + (rows % BLOCK_M != 0).to(tl.int32), 0) * tiles_n


@triton.jit
def _locate(done_a, tile_a, start_a, end_a, done_b, tile_b, start_b, end_b):
    return done_a + done_b, tl.maximum(tile_a, tile_b), tl.maximum(start_a, start_b), tl.minimum(end_a, end_b)


@triton.jit
def locate(tile, tile_ends, ends, M):
    """The expert that ``tile`` belongs to, the tile's number within it, and the expert's first and end row.

    One reduction: ``tile_ends`` and ``ends`` never fall from one expert to the next.
    """
    done = tile_ends <= tile
    expert, first_tile, row_start, row_end = tl.reduce(
        (done.to(tl.int32), tl.where(done, tile_ends, 0), tl.where(done, ends, 0), tl.where(done, M, ends)),
        0,
        _locate,
    )
    return expert, tile - first_tile, row_start, row_end


@triton.jit
def place(tile, rows, tiles_n, BLOCK_M: tl.constexpr, GROUP_M: tl.constexpr):
    """(row tile, column tile) of an expert's ``tile``: GROUP_M row tiles share a column before the next."""
    tiles_m = rows // BLOCK_M + (rows % BLOCK_M != 0).to(tl.int32)
    per_group = GROUP_M * tiles_n
    group = tile // per_group
    first = group * GROUP_M
    height = tl.minimum(tiles_m - first, GROUP_M)
    rest = tile - group * per_group
    return first + rest % height, rest // height


@triton.jit
def rows_of(expert, ends, MAX_EXPERTS: tl.constexpr):
    """First row and end row of one expert, out of every expert's end."""
    index = tl.arange(0, MAX_EXPERTS)
    return tl.reduce((tl.where(index < expert, ends, 0), tl.where(index <= expert, ends, 0)), 0, _both_max)


@triton.jit
def _both_max(first_a, second_a, first_b, second_b):
    return tl.maximum(first_a, first_b), tl.maximum(second_a, second_b)
