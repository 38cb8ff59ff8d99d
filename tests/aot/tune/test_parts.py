"""The cells of one of several tuners."""

from __future__ import annotations

from pathlib import Path

import pytest

from pretuned.aot.journal.timings import cell_of
from pretuned.aot.models.load import load_models
from pretuned.aot.plan.plan import plan, planned_on
from pretuned.aot.tune.space import _seconds, part_of, weight_key
from pretuned.artifacts.errors import InputError

LISTED = Path(__file__).parents[3] / "benchmarks" / "shipped-sm90.txt"


@pytest.mark.slow
def test_parts_are_all_cells_once_whole_weights_and_about_as_much_work() -> None:
    cells = planned_on(plan(load_models([str(LISTED)]).shapes), (90,)).buckets
    parts = [part_of(cells, number, 8) for number in range(1, 9)]
    assert parts[2] == part_of(dict(reversed(cells.items())), 3, 8)
    assert {problem: row for part in parts for problem, row in part.items()} == dict(cells)
    keys = [{weight_key(problem.canonical) for problem in part} for part in parts]
    assert sum(map(len, keys)) == len(set.union(*keys))
    measured = [{cell_of(problem, M) for problem, row in part.items() for M in row} for part in parts]
    assert sum(map(len, measured)) == len(set.union(*measured)), "a product of two names is measured once"
    work = [sum(_seconds(part)) for part in parts]
    assert max(work) < 1.02 * min(work)


def test_one_part_is_all_and_more_parts_than_weights_are_refused() -> None:
    cells = plan(load_models(["shape:E=8,H=256,I=128,k=2 dtype=bf16 tokens=1..8 name=mine"]).shapes).buckets
    assert part_of(cells, 1, 1) == dict(cells)
    assert {*part_of(cells, 1, 2), *part_of(cells, 2, 2)} == set(cells)
    with pytest.raises(InputError, match="--part 3/3: the models have 2 weights"):
        part_of(cells, 3, 3)
