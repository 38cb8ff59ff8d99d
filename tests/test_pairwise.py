"""The cases that tests/support/pairwise.py leaves for the day."""

from __future__ import annotations

import itertools

import pytest
from pairwise import cover, pairwise


@pytest.mark.parametrize(
    ("sizes", "strength", "most"),
    [([13, 6, 4], 2, 78), ([3, 2, 2, 2, 3, 2], 3, 20), ([2] * 5, 2, 6), ([4] * 4, 2, 18), ([5], 1, 5), ([1, 1], 2, 1)],
)
def test_each_combination_is_in_a_row_and_rows_are_few(sizes: list[int], strength: int, most: int) -> None:
    rows = cover(sizes, strength)
    assert len(rows) <= most
    for columns in itertools.combinations(range(len(sizes)), strength):
        values = set(itertools.product(*(range(sizes[i]) for i in columns)))
        assert {tuple(row[i] for i in columns) for row in rows} == values


def test_all_combinations_are_cases_and_those_beyond_the_cover_are_for_the_night() -> None:
    mark = pairwise({"a, b": [(1, True), (2, False)], "c": "xy", "d": [None, 0]}).mark
    names, cases = mark.args
    assert names == "a, b, c, d"
    assert [case.values for case in cases] == [
        (*first, c, d) for first, c, d in itertools.product([(1, True), (2, False)], "xy", [None, 0])
    ]
    assert sum(not case.marks for case in cases) == 4
