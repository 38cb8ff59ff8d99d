"""Select the variants that a bundle ships: the smallest set that loses next to nothing against all candidates.

A few configs serve all shapes: 8 of them lose 0.4 % at most, in the mean, against each shape's own best on
an H200, 4 lose 1.0 % (docs/inside/cost-model.md). Greedy growth, then swaps, then dropping variants that
hardly help; equal tables give equal sets.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from ...artifacts.records import DType, Fusion, Layout, Op, Problem

MAX_LOSS = 0.02  # a shape may lose this much against its own best before a larger set is worth it
MIN_GAIN = 0.0005  # the least reduction of the mean loss that is worth one more variant
SMALL_TABLE = 5000  # entries of a table of times; for larger tables the set grows from one start only
MISSING = 2.0  # a variant without a time for a shape counts as this many times the slowest one there

Family = tuple[Op, DType, Layout, Fusion]


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of one family with its set: ``mean_loss`` (geometric) and ``max_loss`` are fractions over the best."""

    family: Family
    variants: tuple[int, ...]
    mean_loss: float
    max_loss: float


class _Costs:
    """log(time / best time) of every variant in every cell, to score sets of variants."""

    def __init__(self, cells: Sequence[Sequence[tuple[int, float]]], allowed: Container[int] | None) -> None:
        timed = sorted({variant for cell in cells for variant, _ in cell})
        self.variants = [variant for variant in timed if allowed is None or variant in allowed]
        self._allowed = math.log1p(MAX_LOSS)
        columns: dict[int, list[float]] = {variant: [] for variant in timed}
        for cell in cells:
            times = dict(cell)
            best = min(times.values())
            absent = math.log(max(times.values()) / best * MISSING)
            for variant, column in columns.items():
                column.append(math.log(times[variant] / best) if variant in times else absent)
        self.columns = columns
        self.count = len(cells)
        self._added: dict[frozenset[int], tuple[float, int] | None] = {}

    def floor(self, chosen: Sequence[int]) -> list[float]:
        """The least cost of each cell over ``chosen``."""
        if not chosen:
            return [math.inf] * self.count
        return [min(costs) for costs in zip(*(self.columns[variant] for variant in chosen), strict=True)]

    def score(self, floor: Sequence[float], extra: int | None = None) -> float:
        """The mean cost, plus all costs above the allowance; with ``extra``, the cost of the set that includes it."""
        if extra is not None:
            floor = [a if a < b else b for a, b in zip(floor, self.columns[extra], strict=True)]
        allowed = self._allowed
        # fsum, as sum rounds differently from Python 3.12 on: equal tables must give equal sets.
        return math.fsum(floor) / self.count + math.fsum([cost - allowed for cost in floor if cost > allowed])

    def add(self, chosen: list[int]) -> tuple[float, int] | None:
        """The best (score, variant) to join ``chosen``, the least variant on a tie."""
        key = frozenset(chosen)  # growth from another start may reach the same set
        if key not in self._added:
            floor = self.floor(chosen)
            steps = ((self.score(floor, v), v) for v in self.variants if v not in key)
            self._added[key] = min(steps, default=None)
        return self._added[key]


def _grow(costs: _Costs, limit: int, first: int | None) -> tuple[float, list[int]]:
    """Greedy growth, then swaps while one lowers the score: (score, chosen)."""
    chosen = [] if first is None else [first]
    score = costs.score(costs.floor(chosen)) if chosen else math.inf
    while len(chosen) < limit:
        step = costs.add(chosen)
        if step is None or score - step[0] < MIN_GAIN:
            break
        score = step[0]
        chosen.append(step[1])
    improved = True
    while improved:
        improved = False
        for old in list(chosen):
            rest = [variant for variant in chosen if variant != old]
            step = costs.add(rest)
            if step is not None and step[0] < score - 1e-9:
                score, chosen, improved = step[0], [*rest, step[1]], True
    return score, sorted(chosen)


def _choose(costs: _Costs, limit: int) -> list[int]:
    # A small table is cheap enough to grow from every variant: single swaps stop at local optima.
    small = costs.count * len(costs.variants) <= SMALL_TABLE
    starts: list[int | None] = [None, *costs.variants] if small else [None]
    score, chosen = min(_grow(costs, limit, first) for first in starts)
    while len(chosen) > 1:
        rests = [[variant for variant in chosen if variant != old] for old in chosen]
        cheapest_score, cheapest = min((costs.score(costs.floor(rest)), rest) for rest in rests)
        if cheapest_score - score >= MIN_GAIN:
            break
        score, chosen = cheapest_score, cheapest
    return chosen


def select(
    table: Mapping[tuple[Problem, int], Sequence[tuple[int, float]]],
    limit: int = 16,
    allowed: Container[int] | None = None,
) -> Loss:
    """Select the variants to ship for one family, at most ``limit``, and only ``allowed`` ones if that is set.

    ``table`` maps (problem, bucket) to (variant, time) pairs in any one unit; only ratios within a
    cell count. Minimises mean(log(time / best)) plus the sum of the cells' excess over
    log(1 + MAX_LOSS): first every shape within the bound, then the mean.
    A variant with no time, or an infinite one, is taken as twice the slowest of that cell.

    Raises
    ------
    ValueError
        if ``limit`` is below 1, or there is no cell or no allowed variant, or a cell has no finite time, or a time is
        not positive.
    """
    keys = sorted(table, key=lambda key: (key[0].sort_key, key[1]))
    if limit < 1 or not keys:
        raise ValueError(f"limit is {limit} and {len(keys)} cells are given, wanted at least 1 of each")
    costs = _Costs([_finite(key, table[key]) for key in keys], allowed)
    if not costs.variants:
        raise ValueError("not one of the variants is allowed")
    chosen = _choose(costs, limit)
    floor = costs.floor(chosen)
    first = keys[0][0].canonical
    family = (first.op, first.dtype, first.layout, first.fusion)
    return Loss(family, tuple(chosen), math.expm1(math.fsum(floor) / len(floor)), math.expm1(max(floor)))


def _finite(key: tuple[Problem, int], cell: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """The variants of a cell that have a time, by variant: the input's order must not matter."""
    finite = sorted([pair for pair in cell if pair[1] not in (math.inf, -math.inf)])
    if not finite or not all(time > 0 for _, time in finite):
        raise ValueError(f"{key[0]}, bucket {key[1]}: times {[time for _, time in cell]}, wanted one above 0 or more")
    return finite
