"""Rows of tokens: copied into the sorted order, and each token's added up again."""

from __future__ import annotations

import triton
import triton.language as tl

# Flags of kernels/rowops/__init__.py.
_USED: tl.constexpr = tl.constexpr(32)
_WEIGHTED: tl.constexpr = tl.constexpr(64)
_NOTES: tl.constexpr = tl.constexpr(1024)
_BY_TOKEN: tl.constexpr = tl.constexpr(2048)
_NARROW: tl.constexpr = tl.constexpr(4096)
_BIASED: tl.constexpr = tl.constexpr(16384)
_ROWS: tl.constexpr = tl.constexpr(256)  # NOTED_ROWS
_SLOTS: tl.constexpr = tl.constexpr(8)  # slots whose loads run at the same time
_BIASED_SLOTS: tl.constexpr = tl.constexpr(4)  # slots with a bias: more slots are more code, which is loaded, too


@triton.jit
def _copy(x, out, token, row, columns, BLOCK: tl.constexpr):
    """out[row] = x[token]."""
    for first in tl.range(0, columns, BLOCK):
        col = first + tl.arange(0, BLOCK)
        mask = col < columns
        tl.store(out + row * columns + col, tl.load(x + token * columns + col, mask=mask, other=0.0), mask=mask)


@triton.jit
def _row_for(index, rows, end, slot, top_k, first, index_step):
    """The row that takes its token from this slot; -1 if ``rows`` has none."""
    flat = first + slot
    row = tl.load(rows + flat, mask=slot < top_k, other=-1)
    there = (row >= 0) & (row < end)
    named = tl.load(index + row.to(tl.int64) * index_step, mask=there, other=-1)
    return tl.where(there & (named == flat), row, -1).to(tl.int64)


@triton.jit
def _spread(out, value, row, columns, col):
    tl.store(out + row * columns + col, value, mask=(col < columns) & (row >= 0))


@triton.jit
def _by_token(x, index, rows, end, out, token, columns, top_k, index_step, BLOCK: tl.constexpr):
    """Store a token's row to each row that ``rows`` and the index assign to it; the token is read once."""
    first = token * top_k
    for slot in tl.range(0, top_k, 4):
        a = _row_for(index, rows, end, slot, top_k, first, index_step)
        b = _row_for(index, rows, end, slot + 1, top_k, first, index_step)
        c = _row_for(index, rows, end, slot + 2, top_k, first, index_step)
        d = _row_for(index, rows, end, slot + 3, top_k, first, index_step)
        if tl.maximum(tl.maximum(a, b), tl.maximum(c, d)) >= 0:
            for at in tl.range(0, columns, BLOCK):
                col = at + tl.arange(0, BLOCK)
                value = tl.load(x + token * columns + col, mask=col < columns, other=0.0)
                _spread(out, value, a, columns, col)
                _spread(out, value, b, columns, col)
                _spread(out, value, c, columns, col)
                _spread(out, value, d, columns, col)


@triton.jit
def gather(x, index, used, out, M, columns, top_k, index_step, flags, BLOCK: tl.constexpr):
    """out[i] = x[index[i] // top_k].

    x [T, columns], out [M, columns], rows dense; ``index`` points at int32 words, a step of 2 means int64. With USED
    rows from ``used`` on are neither read nor written. A program does a row at a time, until there are no more.

    Or in two launches, which read each row of x once and not top_k times. The first, NOTES, a program for 256 rows,
    writes to ``out``, int32 [1 + T * top_k], how many rows are used, and for each slot a row that it goes to; there
    ``top_k`` says how many slots there are. The second, BY_TOKEN, takes that as ``used``: T programs, one a token, and
    then one for 256 rows each, which copies those that another row of the same slot has hidden. Words that nobody wrote
    do no harm: the index is asked.
    """
    program = tl.program_id(0).to(tl.int64)
    if (flags & _BY_TOKEN) != 0:
        end = tl.load(used)
        rows = used + 1
        tokens = tl.num_programs(0) - tl.cdiv(M, _ROWS)
        if program < tokens:
            _by_token(x, index, rows, end, out, program, columns, top_k, index_step, BLOCK)
        else:
            first = (program - tokens) * _ROWS
            row = first + tl.arange(0, _ROWS)
            flat = tl.load(index + row * index_step, mask=row < end, other=0)
            hidden = (row < end) & (tl.load(rows + flat, mask=row < end, other=0) != row)
            if tl.max(hidden.to(tl.int32), 0) > 0:
                for one in tl.range(first, tl.minimum(first + _ROWS, end)):
                    slot = tl.load(index + one * index_step).to(tl.int64)
                    if tl.load(rows + slot) != one:
                        _copy(x, out, slot // top_k, one, columns, BLOCK)
    else:
        end = M
        if (flags & _USED) != 0:
            end = tl.minimum(tl.load(used), M)
        if (flags & _NOTES) != 0:
            words = out.to(tl.pointer_type(tl.int32), bitcast=True)
            row = program * _ROWS + tl.arange(0, _ROWS)
            flat = tl.load(index + row * index_step, mask=row < end, other=0)
            tl.store(words + 1 + flat, row.to(tl.int32), mask=(row < end) & (flat >= 0) & (flat < top_k))
            if program == 0:
                tl.store(words, end)
        else:
            number = tl.program_id(0)
            while number < end:
                row = number.to(tl.int64)
                token = (tl.load(index + row * index_step) // top_k).to(tl.int64)
                _copy(x, out, token, row, columns, BLOCK)
                number += tl.num_programs(0)


@triton.jit
def _added(
    y,
    places,
    row_weights,
    experts,
    bias,
    flat,
    col,
    inside,
    columns,
    top_k,
    BLOCK: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BIASED: tl.constexpr,
):
    """The sum of a token's rows: nothing in the loop branches, so its loads run at the same time."""
    SLOTS: tl.constexpr = _BIASED_SLOTS if BIASED else _SLOTS
    acc = tl.zeros((BLOCK,), tl.float32)
    for first in tl.range(0, top_k, SLOTS):
        for slot in tl.static_range(SLOTS):
            at = flat + first + slot
            there = first + slot < top_k
            row = tl.load(places + at, mask=there, other=-1)
            here = row >= 0
            value = tl.load(y + row.to(tl.int64) * columns + col, mask=inside & here, other=0.0).to(tl.float32)
            if BIASED:
                expert = tl.load(experts + at, mask=there, other=0).to(tl.int64)
                value += tl.load(bias + expert * columns + col, mask=inside & here, other=0.0).to(tl.float32)
            if WEIGHTED:
                weight = tl.load(row_weights + at, mask=there, other=0.0).to(tl.float32)
                value *= tl.where(here, weight, 0.0)
            acc += value
    return acc


@triton.jit
def _weighted(y, places, row_weights, experts, bias, flat, col, inside, columns, top_k, flags, BLOCK: tl.constexpr):
    if (flags & _BIASED) != 0:
        acc = _added(y, places, row_weights, experts, bias, flat, col, inside, columns, top_k, BLOCK, True, True)
    else:
        acc = _added(y, places, row_weights, experts, bias, flat, col, inside, columns, top_k, BLOCK, True, False)
    return acc


@triton.jit
def combine(y, places, row_weights, experts, bias, out, M, columns, top_k, flags, BLOCK: tl.constexpr):
    """out[t] = sum over s of weight[t, s] * (y[places[t, s]] + bias[experts[t, s]]), of slots with a place >= 0.

    y [M * top_k, columns], places int32 [M * top_k], out [M, columns], rows dense. With WEIGHTED weight is row_weights
    [M * top_k], float32, or with NARROW of y's dtype, else one; with BIASED, which only weighted sums know, bias is
    [E, columns] and experts int32 [M * top_k], else it is zero. Slots are added in their order, in fp32, and rounded
    once. Of slots without a place no row is read. A program does BLOCK columns of a token at a time, until there are no
    more.
    """
    blocks = tl.cdiv(columns, BLOCK)
    tile = tl.program_id(0)
    tiles = M * blocks
    while tile < tiles:
        token = (tile // blocks).to(tl.int64)
        col = tile % blocks * BLOCK + tl.arange(0, BLOCK)
        inside = col < columns
        flat = token * top_k
        # A loop for each case, so that no loop branches or has loads that only another case needs.
        if (flags & _WEIGHTED) == 0:
            acc = _added(y, places, row_weights, experts, bias, flat, col, inside, columns, top_k, BLOCK, False, False)
        elif (flags & _NARROW) != 0:
            narrow = row_weights.to(tl.pointer_type(y.dtype.element_ty), bitcast=True)
            acc = _weighted(y, places, narrow, experts, bias, flat, col, inside, columns, top_k, flags, BLOCK)
        else:
            acc = _weighted(y, places, row_weights, experts, bias, flat, col, inside, columns, top_k, flags, BLOCK)
        tl.store(out + token * columns + col, acc.to(out.dtype.element_ty), mask=inside)
        tile += tl.num_programs(0)
