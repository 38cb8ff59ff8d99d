"""Ratios of new to old from batches of two trees in turns, with the range of 90 % of bootstrap samples of processes."""

from __future__ import annotations

import random
import statistics
from typing import Any, NamedTuple

Pair = dict[str, dict[str, list[float]]]  # {tree: {call: batches in us}}, run in turns
DRAWS = 1000


class Row(NamedTuple):
    """A call's median us, old and new, and ratios of new to old; or the geometric means over several calls."""

    old: float
    new: float
    ratio: float  # the median over all adjacent batches
    drawn: list[float]  # the median for each bootstrap draw of pairs of processes
    pairs: list[float]  # the median for each pair of processes
    medians: float  # the ratio of the medians of all batches
    least: float  # the ratio of the fastest batches

    def interval(self) -> tuple[float, float]:
        """Return the middle 90 % of draws; NaN for a single pair of processes."""
        if len(self.pairs) < 2:
            return float("nan"), float("nan")
        steps = statistics.quantiles(self.drawn, n=20, method="inclusive")
        return steps[0], steps[-1]

    def as_dict(self) -> dict[str, Any]:
        """Return the row for a result file."""
        low, high = self.interval()
        return {
            "old": round(self.old, 3),
            "new": round(self.new, 3),
            "ratio": round(self.ratio, 4),
            "low": round(low, 4) if low == low else None,
            "high": round(high, 4) if high == high else None,
            "pairs": [round(ratio, 4) for ratio in self.pairs],
            "medians": round(self.medians, 4),
            "least": round(self.least, 4),
        }


def rows(pairs: list[Pair]) -> dict[str, Row]:
    """A row for each call. All calls share the bootstrap's draws of pairs."""
    chance = random.Random(0)
    draws = [[chance.randrange(len(pairs)) for _ in pairs] for _ in range(DRAWS if len(pairs) > 1 else 1)]
    rows = {}
    for name in pairs[0]["new"]:
        old, new = ([us for pair in pairs for us in pair[tree][name]] for tree in ("old", "new"))
        turns = [[b / a for a, b in zip(pair["old"][name], pair["new"][name], strict=True)] for pair in pairs]
        drawn = [statistics.median([time_us for i in draw for time_us in turns[i]]) for draw in draws]
        medians = statistics.median(old), statistics.median(new)
        rows[name] = Row(
            *medians,
            statistics.median([time_us for each in turns for time_us in each]),
            drawn,
            [statistics.median(each) for each in turns],
            medians[1] / medians[0],
            min(new) / min(old),
        )
    return rows


def mean(rows: list[Row]) -> Row:
    """The geometric means of the rows' figures."""
    each = statistics.geometric_mean
    drawn, pairs = (
        [each(column) for column in zip(*lists, strict=True)]
        for lists in ([row.drawn for row in rows], [row.pairs for row in rows])
    )
    return Row(
        each(row.old for row in rows),
        each(row.new for row in rows),
        each(row.ratio for row in rows),
        drawn,
        pairs,
        each(row.medians for row in rows),
        each(row.least for row in rows),
    )


def torchs(calls: dict[str, Row]) -> dict[str, Row]:
    """Return the rows of torch's own calls: the same code in both trees."""
    return {name: row for name, row in calls.items() if name.startswith("torch")}


def ours(calls: dict[str, Row]) -> dict[str, Row]:
    return {name: row for name, row in calls.items() if not name.startswith("torch")}


def show(pairs: list[Pair], most: float) -> list[str]:
    """Print the table; return the names of our calls above ``most``."""
    calls = rows(pairs)
    print(f"{'call':42} {'old':>8} {'new':>8} us  ratio   90 % of draws    of pairs         medians   least")
    for name, row in calls.items():
        print(f"{name:42} {row.old:8.2f} {row.new:8.2f}   {_shown(row)}")
    for name, those in (("ours", ours(calls)), ("torch, the same code in both", torchs(calls))):
        if those:
            print(f"{name:42} {'':8} {'':8}   {_shown(mean(list(those.values())))}")
    if torchs(calls):
        off = [abs(row.ratio - 1) for row in torchs(calls).values()]
        rms = statistics.fmean(difference**2 for difference in off) ** 0.5
        print(f"torch's ratios are off 1 by {rms:.1%} (root mean square), at most {max(off):.1%}: the noise of these")
    unsure = [name for name, row in ours(calls).items() if row.ratio <= most and not row.interval()[1] <= most]
    if unsure:
        print(f"not shown to be within {most}, as 90 % of draws or one pair can't tell: {', '.join(unsure)}")
    return [name for name, row in ours(calls).items() if row.ratio > most]


def _shown(row: Row) -> str:
    low, high = row.interval()
    between = f"{low:.3f} to {high:.3f}" if low == low else "-"
    pairs = f"{min(row.pairs):.3f} to {max(row.pairs):.3f}"
    return f"{row.ratio:7.3f}   {between:14}   {pairs:14}   {row.medians:7.3f} {row.least:7.3f}"
