"""Rows of tokens: copied into the sorted order, and each token's added up again."""

from __future__ import annotations

import triton
import triton.language as tl

# The values of kernels.passes.
_USED: tl.constexpr = tl.constexpr(32)
_NOTES: tl.constexpr = tl.constexpr(1024)
_BY_TOKEN: tl.constexpr = tl.constexpr(2048)
_ROWS: tl.constexpr = tl.constexpr(256)  # NOTED_ROWS
_SLOTS: tl.constexpr = tl.constexpr(8)  # whose loads are under way at once


@triton.jit
def _copy(x, out, token, row, columns, BLOCK: tl.constexpr):
    """out[row] = x[token]."""
    for first in tl.range(0, columns, BLOCK):
        col = first + tl.arange(0, BLOCK)
        mask = col < columns
        tl.store(out + row * columns + col, tl.load(x + token * columns + col, mask=mask, other=0.0), mask=mask)


@triton.jit
def _row_for(index, rows, end, slot, top_k, first, index_step):
    """The row that takes its token from this slot, -1 where ``rows`` knows of none."""
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
    """Stores a token's row wherever ``rows`` and the index agree that it goes: it is read once."""
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
    rows from ``used`` on are left as they are. One program a row.

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
        elif program < end:
            token = (tl.load(index + program * index_step) // top_k).to(tl.int64)
            _copy(x, out, token, program, columns, BLOCK)


@triton.jit
def combine(y, experts, out, M, columns, top_k, E, BLOCK: tl.constexpr):
    """out[t] = sum over s of y[t * top_k + s], of the slots whose expert is in [0, E).

    y [M * top_k, columns], experts int32 [M * top_k], out [M, columns], rows dense. Slots are added in their order, in
    fp32, and rounded once; rows of others are not read. One program for BLOCK columns of a token.
    """
    blocks = tl.cdiv(columns, BLOCK)
    token = tl.program_id(0) // blocks
    col = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = col < columns
    acc = tl.zeros((BLOCK,), tl.float32)
    for first in tl.range(0, top_k, _SLOTS):
        for slot in tl.static_range(_SLOTS):
            flat = token.to(tl.int64) * top_k + first + slot
            there = first + slot < top_k
            expert = tl.load(experts + flat, mask=there, other=-1)
            here = there & (expert >= 0) & (expert < E)
            acc += tl.load(y + flat * columns + col, mask=inside & here, other=0.0).to(tl.float32)
    tl.store(out + token.to(tl.int64) * columns + col, acc.to(out.dtype.element_ty), mask=inside)
