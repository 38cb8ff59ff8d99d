"""Rows of tokens: copied into the sorted order, and each token's added up again."""

from __future__ import annotations

import triton
import triton.language as tl

_USED: tl.constexpr = tl.constexpr(32)  # the value of kernels.passes
_SLOTS: tl.constexpr = tl.constexpr(8)  # whose loads are under way at once


@triton.jit
def gather(x, index, used, out, M, columns, top_k, index_step, flags, BLOCK: tl.constexpr):
    """out[i] = x[index[i] // top_k].

    x [T, columns], out [M, columns], rows dense; ``index`` points at int32 words, a step of 2 means int64. With USED
    rows from ``used`` on are left as they are. One program a row.
    """
    row = tl.program_id(0).to(tl.int64)
    token = (tl.load(index + row * index_step) // top_k).to(tl.int64)
    end = M
    if (flags & _USED) != 0:
        end = tl.minimum(tl.load(used), M)
    if row < end:
        for first in tl.range(0, columns, BLOCK):
            col = first + tl.arange(0, BLOCK)
            tl.store(
                out + row * columns + col,
                tl.load(x + token * columns + col, mask=col < columns, other=0.0),
                mask=col < columns,
            )


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
