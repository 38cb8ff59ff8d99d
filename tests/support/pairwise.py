"""Parametrize a test so that each pair of values is tried by day, and each combination by night."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pytest


def pairwise(
    axes: Mapping[str, Collection[Any]], *, strength: int = 2, indirect: Sequence[str] = ()
) -> pytest.MarkDecorator:
    """``pytest.mark.parametrize`` with all combinations of the axes' values; those beyond a cover are ``nightly``.

    Parameters
    ----------
    axes
        The values of each argument. Arguments that change together are a key "a, b", their values tuples.
    strength
        The cover has each combination of the values of so many axes.
    indirect
        Arguments that are parameters of fixtures.
    """
    values = [[value if ", " in key else (value,) for value in options] for key, options in axes.items()]
    chosen = cover([len(some) for some in values], strength)
    cases = [
        pytest.param(
            *itertools.chain.from_iterable(some[i] for some, i in zip(values, row, strict=True)),
            marks=() if row in chosen else pytest.mark.nightly,
        )
        for row in itertools.product(*(range(len(some)) for some in values))
    ]
    return pytest.mark.parametrize(", ".join(axes), cases, indirect=list(indirect))


def cover(sizes: Sequence[int], strength: int = 2) -> set[tuple[int, ...]]:
    """Few rows of indices below ``sizes`` that have each combination of the indices of ``strength`` columns."""
    columns = list(itertools.combinations(range(len(sizes)), strength))
    # In this order the greedy choice takes fewest: of 4, 4, 4 and 4 values 18 rows, where 16 are the least.
    rows = sorted(itertools.product(*map(range, sizes)), key=lambda row: sum(row) % max(sizes))
    new = {row: {(at, tuple(row[i] for i in at)) for at in columns} for row in rows}
    missing = set().union(*new.values())
    chosen: set[tuple[int, ...]] = set()
    while missing:
        best = max(rows, key=lambda row: len(new[row] & missing))
        chosen.add(best)
        missing -= new[best]
    return chosen
