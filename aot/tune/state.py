"""The tuner's state: the measured cells of a run, the cells to measure, each GPU, and the second measurement pass.

A cell is measured with a few candidates, before it is known which variants ship: a shipped variant that may be the
fastest may be missing there. And times of few rounds are some percent off in long launches: if a choice took longer
than the fastest, more rounds tell whether that is real. Such cells are measured again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...artifacts.errors import CompileError
from ...artifacts.records import Problem
from ..choose.bundle import Ships
from ..choose.choices import Chosen
from ..choose.subset import MAX_LOSS
from ..journal.file import Contents, Journal
from ..journal.records import Failure, Measured, Record
from ..journal.timings import Cell, Timings, cell_of, counting
from ..measure.job import GpuExecutor, WorkerLost
from .shortlist import Winners
from .space import TuningSpace

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


@dataclass(slots=True, eq=False)
class Task:
    """A cell to measure. ``alone``: variants to try one by one, since a process died over them (``split``).

    ``kills``: GPUs lost while the first of ``alone`` ran there. ``remeasure``: the variants to time again.
    """

    problem: Problem
    bucket: int
    seconds: float
    alone: deque[int] = field(default_factory=deque)
    split: bool = False
    kills: int = 0
    remeasure: Remeasure | None = None

    def __str__(self) -> str:
        return f"{self.problem}, {self.bucket} rows"


@dataclass(slots=True, eq=False)
class Worker:
    """One GPU: its waiting cells, the cell being measured, and the error that its worker was lost over."""

    executor: GpuExecutor
    uuid: str = ""
    waiting: deque[Task] = field(default_factory=deque)
    task: Task | None = None
    sent: tuple[int, ...] = ()
    lost: WorkerLost | None = None
    starts: int = 0

    @property
    def waiting_s(self) -> float:
        """The approximate seconds of the waiting cells."""
        return sum(task.seconds for task in self.waiting)


class TuningState:
    """The cells measured with these candidates (``cells``), their winners, and the variants that ``failed``.

    A cell counts as measured only if its baseline was timed too.
    """

    def __init__(self, space: TuningSpace, journal: Journal, ships: Ships | None) -> None:
        self.cells: set[Cell] = set()
        self.failed: dict[bytes, Failure] = {}
        self.winners = Winners()
        self._space, self._journal, self._ships = space, journal, ships
        self._records: list[Record] = []
        self._timed: dict[Cell, set[bytes]] = {}
        self._asked: dict[Cell, frozenset[bytes]] = {}
        self._learn(journal.contents.records)

    def add(self, records: Sequence[Record]) -> None:
        """Append records to the journal."""
        self._journal.append(records)
        self._learn(records)

    def missing(self) -> list[Cell]:
        """The cells of the space that are not measured yet."""
        wanted = ((problem, bucket) for problem, buckets in self._space.cells.items() for bucket in buckets)
        return [cell for cell in wanted if cell not in self.cells or self._lacks_incumbent(cell)]

    def to_remeasure(self) -> dict[Cell, Remeasure]:
        """The cells for the second measurement pass, less those that were in it."""
        if self._ships is None:
            return {}
        contents = replace(self._journal.contents, records=tuple(self._records))
        try:
            cells = cells_to_remeasure(self._ships(contents), contents, self._space.estimates)
        except CompileError:  # nothing ships
            return {}
        return {
            cell: remeasure
            for cell, remeasure in cells.items()
            if cell in self.cells and not remeasure.variants <= self._asked.get(cell, frozenset())
        }

    def remeasured(self, cell: Cell, remeasure: Remeasure) -> None:
        """Mark the variants of a second measurement as asked for, whether or not they could be timed."""
        self._asked[cell] = self._asked.get(cell, frozenset()) | remeasure.variants

    def _lacks_incumbent(self, cell: Cell) -> bool:
        ran = self._space.ran(*cell, without=self.failed).values()
        return any(incumbent.variant not in self._timed[cell] for incumbent in ran)

    def _learn(self, records: Sequence[Record]) -> None:
        self._records += records
        for record in records:
            if isinstance(record, Failure):
                self.failed[record.variant] = record
                continue
            cell = cell_of(record.problem, record.bucket)
            if self._space.has(record):
                self.cells.add(cell)
                self._timed.setdefault(cell, set()).update(timing.variant for timing in record.timings)
            # Winners of cells outside the space help with near cells too.
            ours = [timing for timing in record.timings if timing.variant in self._space.configs]
            if ours:
                best = min(ours, key=lambda timing: (timing.time_ns, timing.variant)).variant
                self.winners.add(*cell, self._space.configs[best])
