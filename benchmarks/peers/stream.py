"""A kernel that only reads and writes given numbers of bytes: its time is memory's share of a product's."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from .products import Call

BLOCK, WARPS = 4096, 8  # words that a program reads at once


@triton.jit
def stream(source, target, words, stored, BLOCK: tl.constexpr):
    """target[i] = a program's sum of its part of ``source``, for each i below ``stored``; persistent."""
    lane = tl.arange(0, BLOCK)
    own = tl.program_id(0).to(tl.int64) * BLOCK
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    total = tl.zeros((BLOCK,), tl.int32)
    for first in range(own, words, step):
        total += tl.load(source + first + lane, mask=first + lane < words, other=0)
    if tl.sum(total, 0) != 0:  # the sum is 0, but the compiler can't know that, so it keeps all loads
        tl.store(target + lane, total)
    for first in range(own, stored, step):
        tl.store(target + first + lane, tl.zeros((BLOCK,), tl.int32), mask=first + lane < stored)


def reader(read_bytes: int, written_bytes: int, device: str, programs: int) -> Call:
    """Return a launch of the reading kernel on its own memory, zeros in whole 4 KB, so that no access is split."""
    words, stored = (-(-size // 4096) * 1024 for size in (read_bytes, written_bytes))
    source = torch.zeros(max(1, words), dtype=torch.int32, device=device)
    target = torch.empty(max(BLOCK, stored), dtype=torch.int32, device=device)
    return partial(stream[(programs,)], source, target, words, stored, BLOCK=BLOCK, num_warps=WARPS)
