"""The end of an MoE layer: each token's rows added up."""

from __future__ import annotations

import triton
import triton.language as tl

_SLOTS: tl.constexpr = tl.constexpr(8)  # whose loads are under way at once


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
