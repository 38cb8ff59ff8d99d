"""Sorted rows as e4m3 codes along M, transposed: the operands of dW in fp8.

A program takes 128 rows of one expert by 128 columns at a time, and copies the next columns to shared memory
meanwhile. A thread has eight columns of eight neighbouring rows: the codes of a column's four rows are a word of the
transposed codes. Words change threads in shared memory, so that eight threads store the 128 bytes of a column.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from ..gluon.pipeline import add, async_load, expert_ends
from .packed import larger, lower_of, packed, upper_of

# Flags; kernels/rowops/__init__.py has equal values.
PICKED: gl.constexpr = gl.constexpr(32768)
BLOCKS: gl.constexpr = gl.constexpr(65536)
_EXPERTS: gl.constexpr = gl.constexpr(512)  # largest number of experts
GROUP: gl.constexpr = gl.constexpr(128)  # rows that share a scale
_WORDS: gl.constexpr = gl.constexpr(32)  # words of four codes of a column and group
_PAIRS: gl.constexpr = gl.constexpr(64)  # pairs of neighbouring columns of a tile
_AHEAD: gl.constexpr = gl.constexpr(4)  # blocks of columns for which a program looks up its rows once
_MOST: gl.constexpr = gl.constexpr(448.0)  # the largest e4m3 number
_LEAST: gl.constexpr = gl.constexpr(2.0**-126)  # least scale: a smaller one's inverse is infinite, times 0 NaN


@gluon.jit
def factor_of(most):
    """The scale of elements whose largest magnitude is ``most``."""
    factor = most * (1.0 / _MOST)
    return gl.where(factor > 0, gl.maximum(factor, _LEAST), 1.0)


@gluon.jit
def _smaller(first_a, second_a, first_b, second_b):
    return gl.minimum(first_a, first_b), gl.minimum(second_a, second_b)


@gluon.jit
def locate(group, group_ends, ends, M):
    """The first row of a group of 128 rows, and the end of its expert's rows."""
    done = group_ends <= group
    # ends - group_ends * GROUP never rises from an expert to the next, so its minimum is the latest complete expert's.
    spare, end = gl.reduce((gl.where(done, ends - group_ends * GROUP, 0), gl.where(done, M, ends)), 0, _smaller)
    return group * GROUP + spare, end


@gluon.jit
def groups_of(m_sizes, m_sizes_step, M, E):
    """The number of groups of 128 rows up to and with every expert, and the ends of their rows: [512] int32."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([_EXPERTS // 32 // gl.num_warps()], [32], [gl.num_warps()], [0])
    count, ends = expert_ends(m_sizes, m_sizes_step, M, E, _EXPERTS, LAYOUT)
    return gl.associative_scan(count // GROUP + (count % GROUP != 0).to(gl.int32), 0, add), ends


@gluon.jit
def divider(top_k):
    """The factor top_k's inverse, 2^32 / top_k rounded up, that ``divided`` multiplies by."""
    return (gl.full([1], 1 << 32, gl.int64, gl.BlockedLayout([1], [32], [gl.num_warps()], [0])) // top_k + 1).sum(0)


@gluon.jit
def divided(number, by, top_k):
    """number // top_k of int32 numbers from 0 on, without a division."""
    quotient = ((number.to(gl.int64) * by) >> 32).to(gl.int32)  # at most 1 too large
    return gl.where(quotient * top_k > number, quotient - 1, quotient)


@gluon.jit
def quarters(tile):
    """The four rows of each word of transposed codes, of a tile [128, C]: four [32, C]."""
    even, odd = gl.reshape(tile, (tile.shape[0] // 4, 2, 2, tile.shape[1])).permute((0, 3, 1, 2)).split()
    a, c = even.split()
    b, d = odd.split()
    return a, b, c, d


@gluon.jit
def store_columns(tile, codes, scale, group, block, columns, places, flags):
    """Quantise 128 rows (a group) by the 128 columns ``block`` along M, and store codes and scales.

    The tile has words of two bfloat16 numbers. A thread has four words of eight rows.
    """
    WARPS: gl.constexpr = gl.num_warps()
    REDUCED: gl.constexpr = gl.BlockedLayout([4, 1], [WARPS // 2, 64 // WARPS], [1, WARPS], [1, 0])
    LINES: gl.constexpr = gl.BlockedLayout([4, 1], [8, 4], [1, WARPS], [0, 1])
    a, b, c, d = quarters(tile)
    most = larger(larger(a, b), larger(c, d))
    if WARPS == 8:  # a thread has two of these rows
        first, second = gl.reshape(most, (_WORDS // 2, 2, _PAIRS)).permute((0, 2, 1)).split()
        most = larger(first, second)
    r, s, t, u = quarters(gl.convert_layout(most, REDUCED))
    most = larger(larger(r, s), larger(t, u))
    low, high = gl.max(gl.abs(lower_of(most)), 0), gl.max(gl.abs(upper_of(most)), 0)
    shared = (flags & BLOCKS) != 0
    if shared:
        both = gl.max(gl.maximum(low, high), 0)
        low, high = gl.zeros_like(low) + both, gl.zeros_like(high) + both
    low, high = factor_of(low), factor_of(high)
    pair = gl.arange(0, _PAIRS, layout=low.type.layout)
    of_group, one = gl.where(shared, columns // GROUP, columns), gl.where(shared, 0, 1)
    of_pair = gl.where(shared, block, block * GROUP) + 2 * one * pair
    place = scale + group.to(gl.int64) * of_group + of_pair
    gl.store(place, low, mask=(pair == 0) | (not shared))
    gl.store(place + 1, high, mask=(pair >= 0) & (not shared))
    OF_TILE: gl.constexpr = gl.SliceLayout(0, a.type.layout)
    low = gl.convert_layout(gl.div_rn(1.0, low), OF_TILE)[None, :]
    high = gl.convert_layout(gl.div_rn(1.0, high), OF_TILE)[None, :]
    left = packed(lower_of(a) * low, lower_of(b) * low, lower_of(c) * low, lower_of(d) * low)
    right = packed(upper_of(a) * high, upper_of(b) * high, upper_of(c) * high, upper_of(d) * high)
    word = gl.convert_layout(gl.reshape(gl.join(left, right), (_WORDS, GROUP)), LINES)
    quarter = gl.arange(0, _WORDS, layout=gl.SliceLayout(1, LINES))
    column = gl.arange(0, GROUP, layout=gl.SliceLayout(0, LINES))
    words = codes.to(gl.pointer_type(gl.int32), bitcast=True) + (block * GROUP).to(gl.int64) * (places // 4)
    gl.store(words + group * _WORDS + column.to(gl.int64)[None, :] * (places // 4) + quarter[:, None], word)


@gluon.jit
def largest_of_rows(tile):
    """The largest magnitude of each row of a tile of words of two bfloat16 numbers."""
    ROWS: gl.constexpr = tile.shape[0]
    left, right = gl.reshape(tile, (ROWS, 32, 2)).split()
    left, right = gl.reshape(larger(left, right), (ROWS, 16, 2)).split()
    left, right = gl.reshape(larger(left, right), (ROWS, 8, 2)).split()
    most = larger(left, right)
    return gl.max(gl.maximum(gl.abs(lower_of(most)), gl.abs(upper_of(most))), 1)


@gluon.jit
def store_rows(tile, codes, scale, first, row_end, block, columns, M):
    """Quantise 128 rows from ``first`` on by the 128 columns ``block`` along K, and store codes like ``quantize``.

    A thread has eight words of four rows, as ``WIDE``.
    """
    LINES: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
    factor = factor_of(largest_of_rows(tile))
    row = first + gl.arange(0, GROUP, layout=factor.type.layout)
    gl.store(scale + block.to(gl.int64) * (gl.cdiv(M, 4) * 4) + row, factor, mask=row < row_end)
    # Of 64 columns k = 16 s + 8 h + 2 c + p is byte 16 c + 4 s + 2 p + (1 - h): the four of an s and c are a word.
    front, back = gl.reshape(tile, (GROUP, 8, 2, 4)).permute((0, 1, 3, 2)).split()
    by = gl.convert_layout(1.0 / factor, gl.SliceLayout(1, gl.SliceLayout(2, front.type.layout)))[:, None, None]
    word = packed(lower_of(back) * by, lower_of(front) * by, upper_of(back) * by, upper_of(front) * by)
    word = gl.reshape(gl.reshape(word, (GROUP, 2, 4, 4)).permute((0, 1, 3, 2)), (GROUP, _WORDS))
    word = gl.convert_layout(word, LINES)
    row = (first + gl.arange(0, GROUP, layout=gl.SliceLayout(1, LINES)))[:, None]
    place = block * _WORDS + gl.arange(0, _WORDS, layout=gl.SliceLayout(0, LINES))[None, :]
    words = codes.to(gl.pointer_type(gl.int32), bitcast=True)
    gl.store(words + row.to(gl.int64) * (columns // 4) + place, word, mask=(row < row_end) & (place >= 0))


@gluon.jit
def _copy(tile, at, block, inside, pairs, LAYOUT: gl.constexpr):
    """Begin to copy words of 128 columns from rows of x at ``at``; zeros for rows not ``inside``."""
    pair = block * _PAIRS + gl.arange(0, _PAIRS, layout=gl.SliceLayout(0, LAYOUT))
    async_load(tile, at + pair[None, :], mask=inside & (pair < pairs)[None, :])
    async_copy.commit_group()


@gluon.jit
def _work(item, groups, chunks, across, group_ends, ends, M, flags):
    """An item's group, first and last block of columns, first row and the end of its expert's rows.

    Items past the last one have no rows: their end is 0.
    """
    picked, some = (flags & PICKED) != 0, gl.maximum(groups, 1)
    group = gl.where(picked, item % some, item // chunks)
    chunk = gl.where(picked, item // some, item % chunks)
    first, row_end = locate(group, group_ends, ends, M)
    row_end = gl.where(item < groups * chunks, row_end, 0)
    return group, chunk * _AHEAD, gl.minimum(chunk * _AHEAD + _AHEAD, across), first, row_end


@gluon.jit
def _rows(x, index, first, row_end, by, top_k, pairs, index_step, flags, LAYOUT: gl.constexpr):
    """The beginnings in x of the 128 rows from ``first`` on, and which of them there are."""
    row = first + gl.arange(0, GROUP, layout=gl.SliceLayout(1, LAYOUT))
    there, picked = row < row_end, (flags & PICKED) != 0
    number = gl.load(index + row.to(gl.int64) * index_step, mask=there & picked, other=0)
    source = gl.where(picked, divided(number, by, top_k), row)
    return x.to(gl.pointer_type(gl.int32), bitcast=True) + source.to(gl.int64)[:, None] * pairs, there[:, None]


@gluon.jit
def _quantize(
    x,
    index,
    m_sizes,
    column_codes,
    column_scale,
    codes,
    scale,
    M,
    columns,
    places,
    E,
    top_k,
    index_step,
    m_sizes_step,
    flags,
    ROWS: gl.constexpr,
):
    """Store codes along M, and with ROWS also along K."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([64 // gl.num_warps(), 4], [2, 16], [gl.num_warps(), 1], [1, 0])
    WIDE: gl.constexpr = gl.BlockedLayout([32 // gl.num_warps(), 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 1, [1, 0])
    tiles = gl.allocate_shared_memory(gl.int32, [2, GROUP, _PAIRS], PLAIN)
    group_ends, ends = groups_of(m_sizes, m_sizes_step, M, E)
    groups = gl.max(group_ends, 0)
    across, pairs = columns // GROUP, columns // 2
    chunks = gl.cdiv(across, _AHEAD)
    by = divider(top_k)
    item, stage = gl.program_id(0), 0
    group, block, end, first, row_end = _work(item, groups, chunks, across, group_ends, ends, M, flags)
    at, there = _rows(x, index, first, row_end, by, top_k, pairs, index_step, flags, LAYOUT)
    _copy(tiles.index(0), at, block, there, pairs, LAYOUT)
    while item < groups * chunks:
        next_item, next_group, next_block, next_end = item, group, block + 1, end
        next_first, next_row_end = first, row_end
        if next_block == end:
            next_item = item + gl.num_programs(0)
            next_group, next_block, next_end, next_first, next_row_end = _work(
                next_item, groups, chunks, across, group_ends, ends, M, flags
            )
            at, there = _rows(x, index, next_first, next_row_end, by, top_k, pairs, index_step, flags, LAYOUT)
        _copy(tiles.index(stage ^ 1), at, next_block, there, pairs, LAYOUT)
        async_copy.wait_group(1)
        gl.barrier()
        tile = tiles.index(stage).load(LAYOUT)
        store_columns(tile, column_codes, column_scale, group, block, columns, places, flags)
        if ROWS:
            store_rows(tiles.index(stage).load(WIDE), codes, scale, first, row_end, block, columns, M)
        gl.barrier()
        stage ^= 1
        item, group, block, end, first, row_end = next_item, next_group, next_block, next_end, next_first, next_row_end
    async_copy.wait_group(0)


@gluon.jit
def quantize_columns(
    x,
    index,
    m_sizes,
    column_codes,
    column_scale,
    M,
    columns,
    places,
    E,
    top_k,
    index_step,
    m_sizes_step,
    flags,
    BLOCK: gl.constexpr,
):
    """Codes of sorted rows with a scale for each 128 rows of an expert and column, transposed.

    column_scale[g, c] = max |x[m, c]| / 448 of the m of group g, 2^-126 at least, or 1 of zeros. column_codes[c, p] =
    x[m(p), c] / column_scale[p // 128, c] as e4m3. With BLOCKS, 128 columns share a scale: column_scale is
    [places / 128, columns / 128]. Each expert's rows begin at a multiple of 128 of p; behind its last row codes are
    zeros up to the next multiple.

    x [M, columns], rows dense, columns whole 128s; PICKED, row i of x is ``index[i] // top_k`` (int32 words, a step of
    2 means int64). m_sizes [E], E at most 512. column_codes are bytes [columns, places], column_scale is fp32
    [places / 128, columns]. A program does 128 rows and up to four times BLOCK = 128 columns at a time, until there are
    no more. With PICKED the same columns of all rows come first: rows that several experts pick are in the L2 cache.
    """
    _quantize(
        x,
        index,
        m_sizes,
        column_codes,
        column_scale,
        column_codes,
        column_scale,
        M,
        columns,
        places,
        E,
        top_k,
        index_step,
        m_sizes_step,
        flags,
        False,
    )


@gluon.jit
def quantize_both(
    x,
    index,
    m_sizes,
    column_codes,
    column_scale,
    codes,
    scale,
    M,
    columns,
    places,
    E,
    top_k,
    index_step,
    m_sizes_step,
    flags,
    BLOCK: gl.constexpr,
):
    """``quantize_columns`` and ``quantize`` in one read: codes along M, transposed, and codes along K.

    codes are bytes [M, columns], scale fp32 [columns / 128, M], as ``quantize`` writes them for rows that have an
    expert.
    """
    _quantize(
        x,
        index,
        m_sizes,
        column_codes,
        column_scale,
        codes,
        scale,
        M,
        columns,
        places,
        E,
        top_k,
        index_step,
        m_sizes_step,
        flags,
        True,
    )
