from __future__ import annotations

import itertools
import math
import random

import pytest

from pretuned.aot.choose.subset import MAX_LOSS, _Costs, select
from pretuned.artifacts.records import DType, Op, Problem

Table = dict[tuple[Problem, int], list[tuple[int, float]]]


def _problem(index: int, op: Op = Op.FORWARD) -> Problem:
    return Problem(op, DType.BF16, 8, 64 * (index + 1), 128)


def _random_table(seed: int, cells: int, variants: int) -> Table:
    draw = random.Random(seed)
    return {
        (_problem(cell), 1 << (cell % 5)): [(variant, draw.uniform(1.0, 1.5)) for variant in range(variants)]
        for cell in range(cells)
    }


def _score(table: Table, chosen: tuple[int, ...]) -> float:
    logs = []
    for times in table.values():
        best = min(time for _, time in times)
        logs.append(math.log(min(time for variant, time in times if variant in chosen) / best))
    return sum(logs) / len(logs) + sum(max(0.0, log - math.log1p(MAX_LOSS)) for log in logs)


def test_one_variant_that_wins_everywhere_is_enough() -> None:
    table: Table = {(_problem(i), 16): [(0, 2.0), (1, 1.0), (2, 1.5)] for i in range(10)}
    selection = select(table)
    assert selection.variants == (1,)
    assert selection.mean_loss == selection.max_loss == 0.0


def test_sums_are_exact() -> None:
    """So that every Python gives the same set: from 3.12 on ``sum`` rounds in another way than before."""
    assert _Costs([[(0, 1.0)]] * 10, None).score([0.001] * 10) == 0.001


def test_each_variant_that_a_shape_needs_is_kept() -> None:
    table: Table = {(_problem(i), 16): [(v, 1.0 if v == i else 1.2) for v in range(6)] for i in range(6)}
    assert select(table).variants == (0, 1, 2, 3, 4, 5)


def test_a_variant_that_hardly_helps_is_left_out() -> None:
    table: Table = {(_problem(i), 16): [(0, 1.0), (1, 1.001 if i else 0.999)] for i in range(20)}
    selection = select(table)
    assert selection.variants == (0,)
    assert 0.0 < selection.max_loss < 0.0011


def test_the_worst_shape_is_bounded_though_the_mean_is_small() -> None:
    table: Table = {(_problem(i), 16): [(0, 1.0), (1, 1.3)] for i in range(200)}
    table[_problem(200), 16] = [(0, 1.05), (1, 1.0)]
    selection = select(table)
    assert selection.variants == (0, 1)
    assert selection.max_loss == 0.0
    alone = select(table, limit=1)
    assert alone.variants == (0,)
    assert alone.max_loss == pytest.approx(0.05)


def test_two_bad_shapes_that_need_two_variants_get_both() -> None:
    table: Table = {(_problem(i), 16): [(0, 1.0), (1, 1.3), (2, 1.3)] for i in range(2000)}
    for i in (1, 2):  # either alone leaves the worst loss where it was
        table[_problem(2000 + i), 16] = [(0, 1.05), (i, 1.0)]
    assert select(table).variants == (0, 1, 2)


def test_the_limit_holds_and_so_does_what_is_allowed() -> None:
    table = _random_table(1, 30, 20)
    assert len(select(table, limit=3).variants) == 3
    assert set(select(table, limit=3, allowed={4, 5, 19}).variants) <= {4, 5, 19}


@pytest.mark.parametrize("seed", range(5))
def test_near_the_best_set_there_is(seed: int) -> None:
    table = _random_table(seed, 25, 9)
    chosen = select(table, limit=3).variants
    best = min(_score(table, subset) for subset in itertools.combinations(range(9), 3))
    assert _score(table, chosen) <= best * 1.02


def test_swaps_repair_a_greedy_start() -> None:
    # 0 is the best alone, and useless once 1 and 2 are there.
    table: Table = {}
    for i in range(10):
        table[_problem(i), 1] = [(0, 1.05), (1, 1.0), (2, 1.2)]
        table[_problem(i), 2] = [(0, 1.05), (1, 1.2), (2, 1.0)]
    assert select(table, limit=2).variants == (1, 2)
    assert select(table, limit=16).variants == (1, 2)


def test_the_order_of_the_input_does_not_matter() -> None:
    table = _random_table(7, 40, 12)
    shuffled = {key: list(reversed(times)) for key, times in reversed(table.items())}
    assert select(table, 5) == select(shuffled, 5)


def test_the_unit_does_not_matter() -> None:
    table = _random_table(3, 20, 8)
    scaled = {key: [(v, 1024 * time) for v, time in times] for key, times in table.items()}
    assert select(table, 4) == select(scaled, 4)


def test_a_variant_without_a_time_is_no_good_there() -> None:
    table: Table = {(_problem(0), 16): [(0, 1.0), (1, 1.1)], (_problem(1), 16): [(1, 1.0), (0, math.inf)]}
    selection = select(table, limit=1)
    assert selection.variants == (1,)
    assert selection.max_loss == pytest.approx(0.1)


def test_bad_input_is_an_error() -> None:
    with pytest.raises(ValueError, match="limit is 0 and 0 cells are given, wanted at least 1"):
        select({}, limit=0)
    with pytest.raises(ValueError, match="0 cells are given, wanted at least 1"):
        select({})
    with pytest.raises(ValueError, match="not one of the variants is allowed"):
        select(_random_table(1, 2, 2), allowed={2})
    for times in ([], [(0, math.inf)], [(0, 0.0)], [(0, math.nan)]):
        with pytest.raises(ValueError, match="forward bf16 E=8 N=64 K=128, bucket 16"):
            select({(_problem(0), 16): times})
