"""Where a program finds its tile.

The PTX of kernels/portable_plain/lookup.py, run as it stands, against plain counting.
"""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from warp import LANES, Warp

from pretuned.kernels.portable_plain.lookup import text

MOST = 0x7FFFFFFF


def tile_at(m_sizes: list[int], M: int, block_m: int, part: int, *, wide: bool, chunks: int) -> tuple[int, ...]:
    """(expert, tile rows before it, first row, end row), as every lane has it."""
    mask = 0xFFFFFFFF
    words = [w for count in m_sizes for w in ((count & mask, (count >> 32) & mask) if wide else (count & mask,))]
    operands = {"$4": 0, "$5": 1 + wide, "$6": M, "$7": len(m_sizes), "$8": part, "$9": block_m - 1}
    warp = Warp(words, operands)
    warp.run(text(chunks))
    results = [warp.registers[f"${i}"] for i in range(4)]
    assert all((result == result[0]).all() for result in results), "lanes differ"
    expert, *rest = (int(result[0]) for result in results)
    return (-1 if expert == mask else expert, *rest)


def wanted(m_sizes: list[int], M: int, block_m: int) -> list[tuple[int, int, int, int]]:
    """Return every tile row that there is, in the form of ``tile_at``."""
    tiles, row = [], 0
    for expert, asked in enumerate(m_sizes):
        end = min(row + min(max(asked, 0), M), M)
        before = len(tiles)
        tiles += [(expert, before, row, end)] * -(-(end - row) // block_m)
        row = end
    return tiles


def check(m_sizes: list[int], M: int, block_m: int, *, wide: bool, chunks: int = 16) -> None:
    tiles = wanted(m_sizes, M, block_m)
    places = range(len(tiles)) if len(tiles) < 40 else [0, 1, len(tiles) // 3, len(tiles) // 2, len(tiles) - 1]
    for part in places:
        assert tile_at(m_sizes, M, block_m, part, wide=wide, chunks=chunks) == tiles[part], part
    if sum(max(count, 0) for count in m_sizes) <= M:
        assert tile_at(m_sizes, M, block_m, len(tiles), wide=wide, chunks=chunks)[0] == -1


@pytest.mark.slow
@given(
    m_sizes=st.lists(st.sampled_from([0, 0, 0, 1, 2, 15, 16, 17, 40, 130, -3, -(2**31)]), min_size=1, max_size=512),
    more=st.integers(0, 50),
    block_m=st.sampled_from([16, 32, 64, 128]),
    wide=st.booleans(),
)
@settings(max_examples=40, deadline=None)
@example(m_sizes=[0] * 511 + [1], more=0, block_m=16, wide=False)
@example(m_sizes=[1] * 512, more=0, block_m=16, wide=True)
def test_every_tile_row_is_found(m_sizes: list[int], more: int, block_m: int, wide: bool) -> None:
    M = sum(max(count, 0) for count in m_sizes) + more
    check(m_sizes, M, block_m, wide=wide)
    if len(m_sizes) <= 4 * LANES:
        check(m_sizes, M, block_m, wide=wide, chunks=4)


@pytest.mark.parametrize(
    ("m_sizes", "wide"),
    [
        ([5, 3, 900, 7], False),
        ([5, 3, MOST, MOST, 2], False),
        ([MOST] * 128, False),
        ([4, 2**40, 3, 1], True),
        ([4, 2**32 - 1, 3, 1], True),
        ([4, 2**31, 3, 1], True),
        ([4, -(2**40), 3, -1], True),
        ([2**63 - 1, -(2**63), 3], True),
        ([0, 0, 0], False),
    ],
)
@pytest.mark.parametrize("M", [1, 23, 100_000, 1 << 26])
def test_counts_that_ask_for_more_than_there_is_are_cut_off(m_sizes: list[int], wide: bool, M: int) -> None:
    check(m_sizes, M, 16, wide=wide, chunks=4)
    check(m_sizes, M, 64, wide=wide)


@pytest.mark.parametrize("M", [MOST, (1 << 30) + 5])
@pytest.mark.parametrize("part", [0, 1, 1 << 26, 1 << 27, 1 << 30, MOST])
def test_whatever_the_counts_say_no_row_passes_m(M: int, part: int) -> None:
    for m_sizes in ([MOST] * 128, [MOST, 1] * 60, [1 << 30] * 7):
        _expert, _before, start, end = tile_at(m_sizes, M, 16, part, wide=False, chunks=4)
        assert 0 <= start <= M
        assert 0 <= end <= M
