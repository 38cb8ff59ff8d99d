"""The folded parts of the page on the cost model and the search, with statistics instead of many marks."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from .cells import Cell
from .data import form
from .markup import mean, table, times

_NEAR = 0.2
_RANGES = (("1 to 128", 1, 128), ("256 to 8192", 129, 8192), ("more", 8193, 1 << 62))
_RANKS = 16


def model_against_measured(cells: Sequence[Cell]) -> str:
    """A table by op and rows: modelled over measured time of all choices and candidates with both; else empty."""
    by_rows: dict[tuple[str, str], list[float]] = {}
    for cell in cells:
        ratios = [timed.model_us / timed.time_us for timed in cell.candidates if timed.model_us is not None]
        if (ratio := cell.model_ratio) is not None:
            ratios.append(ratio)
        if ratios:
            rows = next(name for name, low, high in _RANGES if low <= cell.bucket <= high)
            by_rows.setdefault((form(cell), rows), []).extend(ratios)
    if not by_rows:
        return ""
    lines = []
    for (name, rows), ratios in by_rows.items():
        near = sum(1 - _NEAR <= ratio <= 1 + _NEAR for ratio in ratios) / len(ratios)
        tenths = statistics.quantiles(ratios, n=10) if len(ratios) > 1 else [ratios[0]] * 9
        lines.append(
            [name, rows, f"{len(ratios):,}", times(mean(ratios)), times(tenths[0]), times(tenths[-1]), f"{near:.0%}"]
        )
    head = ("op", "M near", "times", "modelled / measured", "a tenth is below", "a tenth is above", "within 20 %")
    return table(head, lines, numbers=range(2, len(head)))


def search(cells: Sequence[Cell]) -> str:
    """A table by the cost model's rank: the candidate's measured time over the cell's fastest; empty without ranks."""
    ranked: dict[int, list[float]] = {}
    for cell in cells:
        order = sorted((timed.model_us, timed.time_us) for timed in cell.candidates if timed.model_us is not None)
        if len(order) > 1:
            best = min(candidate.time_us for candidate in cell.candidates)
            for rank, (_, time_us) in enumerate(order, 1):
                ranked.setdefault(rank, []).append(time_us / best)
    if not ranked:
        return ""
    lines = []
    for rank in sorted(ranked)[:_RANKS]:
        ratios = ranked[rank]
        tenths = statistics.quantiles(ratios, n=10) if len(ratios) > 1 else [ratios[0]] * 9
        won = sum(ratio == 1 for ratio in ratios) / len(ratios)
        lines.append([str(rank), f"{len(ratios):,}", f"{won:.0%}", times(statistics.median(ratios)), times(tenths[-1])])
    head = ("rank by the model", "cells", "it was the fastest", "median time / fastest", "a tenth is above")
    return table(head, lines, numbers=range(len(head)))
