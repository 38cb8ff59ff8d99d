"""The slots of tokens in the order of their experts: a stable counting sort, in one launch or three."""

from __future__ import annotations

import triton
import triton.language as tl

# Flags of kernels/rowops/__init__.py.
_COUNTS: tl.constexpr = tl.constexpr(1)
_ADDS: tl.constexpr = tl.constexpr(2)
_PLACES: tl.constexpr = tl.constexpr(4)
_BINS: tl.constexpr = tl.constexpr(512)  # the most experts
_FEW_BINS: tl.constexpr = tl.constexpr(256)
_CHUNKS: tl.constexpr = tl.constexpr(128)  # chunks whose counts are added up at a time
_COLUMNS: tl.constexpr = tl.constexpr(32)  # experts whose counts are added up at a time
_OTHERS: tl.constexpr = tl.constexpr(16)  # slots that each slot of a chunk is compared with at a time


@triton.jit
def _experts(ids, i, M, E, ids_step):
    """Return each slot's expert: E for no expert, E + 1 past the last slot."""
    word = ids + i.to(tl.int64) * ids_step
    low = tl.load(word, mask=i < M, other=-1)
    high = tl.load(word + (ids_step - 1), mask=i < M, other=-1)
    here = (low >= 0) & (low < E) & ((ids_step == 1) | (high == 0))
    return tl.where(i < M, tl.where(here, low, E), E + 1)


@triton.jit
def _before(expert, experts, slots, alone, BLOCK: tl.constexpr):
    """For each slot of a chunk, the number of earlier slots of its expert, plus lower experts' slots unless ``alone``.

    Each thread has one slot and compares it with all others.
    """
    # (expert, slot) is one number: one unsigned comparison counts the numbers from ``least`` up to the slot's own.
    least = tl.where(alone, 0, expert * BLOCK)
    own = (expert * BLOCK + tl.arange(0, BLOCK) - least).to(tl.uint32)
    count = tl.zeros((BLOCK,), tl.int32)
    for first in tl.range(0, slots, _OTHERS):
        other = first + tl.arange(0, _OTHERS)
        its = tl.load(experts + other) * BLOCK + other
        ahead = (its[:, None] - least[None, :]).to(tl.uint32) < own[None, :]
        count += tl.sum(ahead.to(tl.int32), 0)
    return count


@triton.jit
def _tally(experts, slots, bounds, m_sizes, E, BINS: tl.constexpr):
    """Store each expert's number of slots and its first place, for one chunk: faster than a histogram for few slots."""
    column = tl.arange(0, BINS)
    found = tl.zeros((BINS,), tl.int32)
    below = tl.zeros((BINS,), tl.int32)
    for first in tl.range(0, slots, _OTHERS):
        its = tl.load(experts + first + tl.arange(0, _OTHERS))
        found += tl.sum((its[:, None] == column[None, :]).to(tl.int32), 0)
        below += tl.sum((its[:, None] < column[None, :]).to(tl.int32), 0)
    tl.store(m_sizes + column, found, mask=column < E)
    tl.store(bounds + column, below, mask=column < E)
    tl.store(bounds + E, tl.sum(found * (column < E).to(tl.int32), 0))


@triton.jit
def _count(expert, slots, counts, E, BINS: tl.constexpr):
    """Store the number of this chunk's slots that have each expert, and that have none."""
    column = tl.arange(0, BINS)
    found = tl.histogram(expert, BINS, mask=expert < E)
    tl.store(counts + column, found, mask=column < E)
    tl.store(counts + E, slots - tl.sum(found, 0))


@triton.jit
def _bound(bounds, m_sizes, E, BINS: tl.constexpr):
    """Store the place where each expert's slots begin; every program stores the same numbers."""
    column = tl.arange(0, BINS)
    size = tl.load(m_sizes + column, mask=column < E, other=0)
    tl.store(bounds + column, tl.cumsum(size, 0) - size, mask=column < E)
    tl.store(bounds + E, tl.sum(size, 0))


@triton.jit
def _add(counts, m_sizes, block, chunks, E):
    """Replace the chunks' counts of some experts by the sums of earlier chunks; store the total in m_sizes."""
    column = block * _COLUMNS + tl.arange(0, _COLUMNS)
    total = tl.zeros((_COLUMNS,), tl.int32)
    for first in tl.range(0, chunks, _CHUNKS):
        chunk = first + tl.arange(0, _CHUNKS)
        at = counts + chunk[:, None] * (E + 1) + column[None, :]
        there = (chunk < chunks)[:, None] & (column <= E)[None, :]
        count = tl.load(at, mask=there, other=0)
        tl.store(at, total[None, :] + tl.cumsum(count, 0) - count, mask=there)
        total += tl.sum(count, 0)
    tl.store(m_sizes + column, total, mask=column < E)


@triton.jit
def sort_slots(ids, experts, order, places, bounds, m_sizes, counts, M, E, ids_step, flags, BLOCK: tl.constexpr):
    """order[bounds[e] + j] = the j-th slot i, in rising order, with ids[i] = e; after them the slots of no expert.

    And places[i] = slot i's place in the order, -1 for one of no expert.

    ids [M] points at int32 words, a step of 2 means int64; experts int32 [M]: ids, E where they are not in [0, E), with
    room for whole chunks of BLOCK slots; order int64 [M]; places int32 [M]; bounds int32 [E + 1]; m_sizes int32 [E];
    counts: room for [chunks, E + 1] int32. One program where there is one chunk, with COUNTS and PLACES of ``flags`` at
    once; else a launch for each: COUNTS and PLACES with a program a chunk, ADDS between them with one for 32 experts. E
    is at most 512.
    """
    chunk = tl.program_id(0)
    few = E <= _FEW_BINS
    if flags == _ADDS:
        _add(counts, m_sizes, chunk, tl.cdiv(M, BLOCK), E)
    else:
        alone = flags == _COUNTS | _PLACES
        i = chunk * BLOCK + tl.arange(0, BLOCK)
        slots = tl.minimum(M - chunk * BLOCK, BLOCK)
        own = experts + chunk * BLOCK
        held = counts + chunk * (E + 1)
        if (flags & _COUNTS) != 0:
            expert = _experts(ids, i, M, E, ids_step)
            tl.store(experts + i, expert)
            tl.debug_barrier()
            if alone:
                if few:
                    _tally(own, slots, bounds, m_sizes, E, _FEW_BINS)
                else:
                    _tally(own, slots, bounds, m_sizes, E, _BINS)
            else:
                if few:
                    _count(expert, slots, held, E, _FEW_BINS)
                else:
                    _count(expert, slots, held, E, _BINS)
        if (flags & _PLACES) != 0:
            expert = tl.load(experts + i)
            place = tl.load(held + expert, mask=(i < M) & (not alone), other=0)
            if not alone:
                if few:
                    _bound(bounds, m_sizes, E, _FEW_BINS)
                else:
                    _bound(bounds, m_sizes, E, _BINS)
            place += _before(expert, own, slots, alone, BLOCK)
            if not alone:
                tl.debug_barrier()
                place += tl.load(bounds + expert, mask=i < M, other=0)
            tl.store(order + place, i.to(tl.int64), mask=i < M)
            tl.store(places + i, tl.where(expert < E, place, -1), mask=i < M)
