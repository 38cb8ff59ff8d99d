"""Check how reliable a duel's result is, from cells that were measured twice.

    git show ccc6f4a:benchmarks/results/catalogue-h200.journal.xz > before.journal
    python benchmarks/run.py again before.journal benchmarks/results/catalogue-h200.journal.xz

For each result of the first duel it prints the number of cells, the challenger's time over the modelled choice's in the
second measurement (geometric mean), and in how many cells the challenger was faster. Launches over 10 ms are listed
separately: their times are of three rounds. With one journal as both arguments it compares the cells that this journal
measured twice.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from pathlib import Path

from pretuned.aot.journal.file import Contents, read_journal
from pretuned.aot.journal.records import LONG_NS, Measured, Rematch
from pretuned.artifacts.errors import PretunedError


def said(duel: Rematch) -> str:
    if duel.ratio < 1.0:
        return "won" if duel.won else "even, below 1"
    return "lost" if duel.ratio >= 1.0 + duel.band else "even, 1 and more"


def second_times(before: Contents, after: Contents) -> Iterator[tuple[bool, str, float]]:
    """Yield (launch over 10 ms, first duel's result, challenger / modelled in the second measurement) of each cell."""
    later = {(record.problem, record.bucket): record for record in after.records if isinstance(record, Measured)}
    for first in before.records:
        if not isinstance(first, Measured) or first.duel is None:
            continue
        second, duel = later.get((first.problem, first.bucket), first), first.duel
        times = {timing.variant: timing.time_ns for timing in second.timings}
        if second != first and duel.challenger in times and duel.modelled in times:
            took = next(timing.time_ns for timing in first.timings if timing.variant == duel.challenger)
            yield took > LONG_NS, said(duel), times[duel.challenger] / times[duel.modelled]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    args = parser.parse_args()
    try:
        second = list(second_times(read_journal(args.before), read_journal(args.after)))
    except PretunedError as error:
        parser.error(str(error))
    if not second:
        parser.error(f"no cell with a duel in {args.before} was measured again in {args.after}")
    for long, word in sorted({cell[:2] for cell in second}):
        ratios = [ratio for *of, ratio in second if of == [long, word]]
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        print(
            f"{'over 10 ms' if long else 'shorter':11} {word:17} {len(ratios):4} cells: the second time {mean:.3f} "
            f"of the modelled choice's, the faster in {sum(ratio < 1 for ratio in ratios)}"
        )
