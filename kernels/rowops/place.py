"""List the rows of padded experts in a buffer, expert after expert, as an index for a gather."""

from __future__ import annotations

import triton
import triton.language as tl

_EXPERTS: tl.constexpr = tl.constexpr(512)  # largest number of experts


@triton.jit
def _numbers(words, step, e, E):
    """Entries of int32, or int64 if ``step`` is 2; zero for entries past E."""
    word = words + e * step
    low = tl.load(word, mask=e < E, other=0).to(tl.int64)
    high = tl.load(word + (step - 1), mask=e < E, other=0).to(tl.int64)
    return tl.where(step == 1, low, (high << 32) | (low & 0xFFFFFFFF))


@triton.jit
def place_rows(m_sizes, starts, index, counts, bounds, M, E, room, m_sizes_step, starts_step, BLOCK: tl.constexpr):
    """index[bounds[e] + i] = starts[e] + i for i < counts[e]; 0 from bounds[E] on.

    m_sizes [E] and starts [E] point at int32 words, a step of 2 means int64; without starts, a step of 0, they are
    e * room. counts int32 [E] are m_sizes brought into [0, room], so that no row passes M; an expert that begins
    outside [0, M) has none. bounds int32 [E + 1] are the sums of those before, M at most. index int32 [M]. One program
    an expert; E is at most 512.
    """
    own = tl.program_id(0)
    e = tl.arange(0, _EXPERTS)
    most = tl.cast(M, tl.int64)
    first = e.to(tl.int64) * room
    if starts_step != 0:
        first = _numbers(starts, starts_step, e, E)
    left = tl.minimum(tl.where(first >= 0, tl.maximum(most - first, 0), 0), room)
    count = tl.where(e < E, tl.minimum(tl.maximum(_numbers(m_sizes, m_sizes_step, e, E), 0), left), 0)
    total = tl.minimum(tl.sum(count, 0), most).to(tl.int32)
    begin = tl.minimum(tl.sum(tl.where(e < own, count, 0), 0), most).to(tl.int32)
    end = tl.minimum(tl.sum(tl.where(e <= own, count, 0), 0), most).to(tl.int32)
    start = tl.sum(tl.where(e == own, first, 0), 0).to(tl.int32)
    tl.store(bounds + own, begin)
    tl.store(counts + own, end - begin)
    if own == 0:
        tl.store(bounds + E, total)
    for row in tl.range(begin, end, BLOCK):
        i = row + tl.arange(0, BLOCK)
        tl.store(index + i, start + (i - begin), mask=i < end)
    for row in tl.range(total + own * BLOCK, M, E * BLOCK):
        i = row + tl.arange(0, BLOCK)
        tl.store(index + i, tl.zeros((BLOCK,), tl.int32), mask=i < M)
