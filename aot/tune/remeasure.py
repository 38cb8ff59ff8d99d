"""Which measured cells to look at once more, by what would ship, and what to time there.

A cell is measured with a few of all candidates, and which of these ship is known afterwards: of those a cell may lack
one that may be the fastest. And times of a few rounds are some percent off in long launches, and a choice goes by what
other cells need, too: where it took more than the fastest, more rounds tell whether that is a loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ...artifacts.records.problem import Problem
from ..choose.choices import Chosen
from ..choose.subset import MAX_LOSS
from ..journal.file import Contents
from ..journal.records import Measured
from ..journal.timings import Cell, Timings, cell_of, counting

NEAR = 0.1  # over the fastest: may be the fastest
BESIDE = 0.03  # over the fastest: timed beside what was not
LIKELY = 1.06  # times the least estimate: 99 % of the winners in an H200's journal (benchmarks/model/shipped.py)


@dataclass(frozen=True, slots=True)
class Remeasure:
    """What to time in a cell, by cubin; ``more``: in more rounds than before."""

    variants: frozenset[bytes]
    more: bool


def looks(
    chosen: Chosen, contents: Contents, estimates: Callable[[Problem, int], Mapping[bytes, float]]
) -> dict[Cell, Remeasure]:
    """The cells that were measured and that either lack something, or whose choice may be none.

    They lack what ships, was not timed there, and by the model's estimate may be the fastest; it is timed beside who is
    ahead. The choice may be none where it took over MAX_LOSS more than the fastest, and one record alone tells of it:
    then all that may be the fastest is timed, in more rounds.

    ``chosen`` is what would ship by the journal, ``estimates`` what the cost model makes of each cubin that serves a
    cell. What failed anywhere is left out.
    """
    records: dict[Cell, list[Measured]] = {}
    for one in contents.records:
        if isinstance(one, Measured):
            records.setdefault(cell_of(one.problem, one.bucket), []).append(one)
    evidence = Timings.of(contents)
    ships = {one.variant.cubin_sha256 for one in chosen.variants}
    found = {}
    for problem, choices in chosen.choices.items():
        for choice in choices:
            cell, ours = cell_of(problem, choice.bucket), chosen.variants[choice.variant].variant.cubin_sha256
            able = {sha: us for sha, us in estimates(*cell).items() if sha not in evidence.failed}
            known = evidence.cells[cell].times_ns if cell in evidence.cells else {}
            times = {sha: ns for sha, ns in known.items() if sha in able}
            if not times:
                continue
            least = min(times.values())
            doubted = times.get(ours, 0) > least * (1 + MAX_LOSS) and len(counting(records[cell])) == 1
            most = LIKELY * min((us for sha, us in able.items() if sha in ships), default=0.0)
            missing = {sha for sha in ships & able.keys() if able[sha] <= most and sha not in times}
            if doubted or missing:
                ahead = {sha for sha, ns in times.items() if ns <= least * (1 + (NEAR if doubted else BESIDE))}
                found[cell] = Remeasure(frozenset({*ahead, *missing, *({ours} if doubted else ())}), doubted)
    return found
