"""Choose the cells to measure in the second pass, from what would ship, and the variants to time there.

A cell is measured with a few candidates, before it is known which variants ship: a shipped variant that may be the
fastest may be missing there. And times of few rounds are some percent off in long launches: if a choice took longer
than the fastest, more rounds tell whether that is real.
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

NEAR = 0.1  # a variant within this of the fastest may be the fastest
BESIDE = 0.03  # variants within this of the fastest are timed together with missing ones
LIKELY = 1.06  # times the least estimate: 99 % of the winners in an H200's journal (benchmarks/model/shipped.py)


@dataclass(frozen=True, slots=True)
class Remeasure:
    """The variants to time in a cell, by cubin; ``more``: in more rounds than before."""

    variants: frozenset[bytes]
    more: bool


def cells_to_remeasure(
    chosen: Chosen, contents: Contents, estimates: Callable[[Problem, int], Mapping[bytes, float]]
) -> dict[Cell, Remeasure]:
    """The measured cells that lack a variant that may be the fastest, or whose choice looks too slow.

    A missing variant ships, was not timed in the cell, and may be the fastest by the model's estimate: it is timed
    together with the fastest ones. A choice looks too slow if it took over MAX_LOSS more than the fastest, by a single
    record: then all variants that may be the fastest are timed in more rounds.

    ``chosen`` is what would ship by the journal; ``estimates`` returns the cost model's estimate for each cubin that
    serves a cell. Variants that failed anywhere are left out.
    """
    records: dict[Cell, list[Measured]] = {}
    for record in contents.records:
        if isinstance(record, Measured):
            records.setdefault(cell_of(record.problem, record.bucket), []).append(record)
    evidence = Timings.of(contents)
    ships = {code.variant.cubin_sha256 for code in chosen.variants}
    cells = {}
    for problem, choices in chosen.choices.items():
        for choice in choices:
            cell, ours = cell_of(problem, choice.bucket), chosen.variants[choice.variant].variant.cubin_sha256
            able = {sha: us for sha, us in estimates(*cell).items() if sha not in evidence.failed}
            measured_ns = evidence.cells[cell].times_ns if cell in evidence.cells else {}
            times = {sha: ns for sha, ns in measured_ns.items() if sha in able}
            if not times:
                continue
            least = min(times.values())
            doubted = times.get(ours, 0) > least * (1 + MAX_LOSS) and len(counting(records[cell])) == 1
            most = LIKELY * min((us for sha, us in able.items() if sha in ships), default=0.0)
            missing = {sha for sha in ships & able.keys() if able[sha] <= most and sha not in times}
            if doubted or missing:
                ahead = {sha for sha, ns in times.items() if ns <= least * (1 + (NEAR if doubted else BESIDE))}
                cells[cell] = Remeasure(frozenset({*ahead, *missing, *({ours} if doubted else ())}), doubted)
    return cells
