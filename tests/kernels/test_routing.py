from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretuned.kernels.cost import BLOCKS, SKEW, expected_rows


# (E, rows, experts in use, rows of the busiest), drawn: normal logits with a popularity of 0.3 log(rank), top-k.
@pytest.mark.parametrize(
    ("E", "M", "active", "busiest"),
    [
        (8, 32, 8, 10),
        (8, 16384, 8, 3165),
        (32, 64, 23, 8),
        (32, 32768, 31, 2782),
        (64, 128, 52, 6),
        (64, 65536, 62, 3470),
        (128, 128, 76, 5),
        (128, 65536, 124, 2678),
        (256, 128, 91, 4),
        (256, 65536, 248, 2368),
        (512, 160, 116, 9),
        (512, 1280, 406, 37),
        (512, 81920, 496, 2225),
    ],
)
def test_against_drawn_routings(E: int, M: int, active: int, busiest: int) -> None:
    rows = expected_rows(E, M)
    assert rows.active == pytest.approx(active, rel=0.14)
    if M >= 64 * E:
        assert rows.busiest == pytest.approx(busiest, rel=0.3)


@given(E=st.integers(1, 600), M=st.integers(1, 2**31 - 1))
def test_bounds_that_no_routing_leaves(E: int, M: int) -> None:
    rows = expected_rows(E, M)
    assert 0.999 <= rows.active <= min(E, M) * 1.001
    for block in BLOCKS:
        assert rows.active * 0.999 <= rows.tiles[block] <= M / block + E * 1.001
        assert rows.tiles[block] >= M / block * 0.999


def test_one_row_is_one_tile() -> None:
    rows = expected_rows(128, 1)
    assert rows.active == pytest.approx(1.0)
    assert rows.tiles[16] == pytest.approx(1.0)


def test_one_expert_has_it_all() -> None:
    rows = expected_rows(1, 1000)
    assert rows.active == 1.0
    assert rows.busiest == pytest.approx(1000.0)
    assert rows.tiles[128] == pytest.approx(8.0, abs=0.5)


@pytest.mark.parametrize("E", [60, 128, 512])
def test_sums_are_exact(E: int) -> None:
    """Ranks of two Pythons choose alike: from 3.12 on ``sum`` rounds in another way than before."""
    total = sum(Fraction(rank**-SKEW) for rank in range(1, E + 1))
    assert expected_rows(E, 1).busiest == 1.0 / float(total)
