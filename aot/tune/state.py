"""The measured cells of a run: the journal's, and those added to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...artifacts.errors import CompileError
from ..choose.bundle import Ships
from ..journal.file import Journal
from ..journal.records import Failure, Record
from ..journal.timings import Cell, cell_of
from .remeasure import Remeasure, cells_to_remeasure
from .shortlist import Winners
from .space import TuningSpace


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
