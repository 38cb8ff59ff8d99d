"""The functions that every grouped-GEMM kernel shares: an expert's rows, and a tile's expert."""

from __future__ import annotations

import triton
import triton.language as tl

# Values of ``flags``: those of artifacts.records.Fusion, and ZERO_TAIL of kernels/entry.py.
GATHER: tl.constexpr = tl.constexpr(1)
SCATTER: tl.constexpr = tl.constexpr(2)
ZERO_TAIL: tl.constexpr = tl.constexpr(16)
_INDEXED: tl.constexpr = tl.constexpr(1 | 2 | 4)


@triton.jit
def flat_index(index, index_step, index_end, flags, row, row_end):
    """index[row] as int64, and which rows count: those before ``row_end`` whose index is in [0, index_end).

    ``index`` points at int32 words, a step of 2 means int64. Without an index every row counts, and its index is 0.
    """
    inside = row < row_end
    word = index + row * index_step
    indexed = (flags & _INDEXED) != 0
    flat = tl.load(word, mask=inside & indexed, other=0)
    return flat.to(tl.int64), inside & (((flat >= 0) & (flat < index_end)) | (not indexed))


@triton.jit
def _add_capped(a, b):
    return tl.minimum(a + b, 0x7FFFFFFF)


@triton.jit
def expert_rows(m_sizes, m_sizes_step, M, E, first, row, EXPERTS: tl.constexpr):
    """First row and end row of the experts from ``first`` on, whose rows begin at ``row``: each [EXPERTS] int32.

    ``m_sizes`` points at int32 words; a step of 2 means int64 counts (little endian). A count below
    zero is zero, and no expert's rows pass M, whatever the counts are. If the counts sum to more
    than M, and M is at least 2^30, an expert may get rows of others.
    """
    expert = first + tl.arange(0, EXPERTS)
    word = m_sizes + expert * m_sizes_step
    low = tl.load(word, mask=expert < E, other=0).to(tl.int64)
    high = tl.load(word + (m_sizes_step - 1), mask=expert < E, other=0).to(tl.int64)
    wide = (high << 32) | (low & 0xFFFFFFFF)
    count = tl.where(m_sizes_step == 1, low, wide)
    count = tl.minimum(tl.maximum(count, 0), tl.cast(M, tl.int64)).to(tl.uint32)
    limit = tl.cast(M, tl.uint32)
    end = tl.associative_scan(count, 0, _add_capped) + tl.cast(row, tl.uint32)
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
def count_tiles(m_sizes, m_sizes_step, M, E, tiles_n, BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr):
    """(all tiles, end of the last expert's rows) of any number of experts, EXPERTS of them at a time."""
    row = 0
    total = 0
    for first in tl.range(0, E, EXPERTS):
        start, end = expert_rows(m_sizes, m_sizes_step, M, E, first, row, EXPERTS)
        total += tl.max(expert_tiles(start, end, tiles_n, BLOCK_M), 0)
        row = tl.max(end, 0)
    return total, row


@triton.jit
def search(tile, m_sizes, m_sizes_step, M, E, tiles_n, BLOCK_M: tl.constexpr, EXPERTS: tl.constexpr):
    """Do what ``locate`` does for any number of experts: the counts are read again for every tile."""
    row = 0
    before = 0
    expert = 0
    inner = 0
    row_start = 0
    row_end = 0
    for first in tl.range(0, E, EXPERTS):
        start, end = expert_rows(m_sizes, m_sizes_step, M, E, first, row, EXPERTS)
        tile_ends = expert_tiles(start, end, tiles_n, BLOCK_M)
        held = tl.max(tile_ends, 0)
        here = (tile >= before) & (tile < before + held)
        skipped, inner_here, start_here, end_here = locate(tile - before, tile_ends, end, M)
        expert = tl.where(here, first + skipped, expert)
        inner = tl.where(here, inner_here, inner)
        row_start = tl.where(here, tl.maximum(start_here, row), row_start)
        row_end = tl.where(here, end_here, row_end)
        before += held
        row = tl.max(end, 0)
    return expert, inner, row_start, row_end


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
def _both_max(first_a, second_a, first_b, second_b):
    return tl.maximum(first_a, first_b), tl.maximum(second_a, second_b)


@triton.jit
def rows_of(expert, ends, first, row, EXPERTS: tl.constexpr):
    """First row and end row of one expert, out of the ends of the experts from ``first`` on."""
    index = first + tl.arange(0, EXPERTS)
    start, end = tl.reduce((tl.where(index < expert, ends, 0), tl.where(index <= expert, ends, 0)), 0, _both_max)
    return tl.maximum(start, row), tl.maximum(end, row)


@triton.jit
def search_rows(expert, m_sizes, m_sizes_step, M, E, EXPERTS: tl.constexpr):
    """``rows_of`` among any number of experts."""
    row = 0
    row_start = 0
    row_end = 0
    for first in tl.range(0, E, EXPERTS):
        _start, end = expert_rows(m_sizes, m_sizes_step, M, E, first, row, EXPERTS)
        start_here, end_here = rows_of(expert, end, first, row, EXPERTS)
        here = (expert >= first) & (expert < first + EXPERTS)
        row_start = tl.where(here, start_here, row_start)
        row_end = tl.where(here, end_here, row_end)
        row = tl.max(end, 0)
    return row_start, row_end


@triton.jit
def zero_rows(y, first, M, N, stride_y_m, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sets the rows [first, M) of y to zero; the programs share them."""
    for start in tl.range(first + ROWS * tl.program_id(0), M, ROWS * tl.num_programs(0)):
        row = start + tl.arange(0, ROWS).to(tl.int64)
        for column in tl.range(0, N, COLUMNS):
            col = column + tl.arange(0, COLUMNS)
            at = y + row[:, None] * stride_y_m + col[None, :]
            tl.store(at, tl.zeros((ROWS, COLUMNS), y.dtype.element_ty), mask=(row[:, None] < M) & (col[None, :] < N))
