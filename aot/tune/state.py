"""What is known of the cells: what the journal has, and what is added to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...artifacts.errors import CompileError
from ..choose.bundle import Ships
from ..journal.file import Journal
from ..journal.records import Failure, Record
from ..journal.timings import Cell, cell_of
from .remeasure import Remeasure, looks
from .shortlist import Winners
from .space import TuningSpace


class TuningState:
    """The cells that are measured with these candidates (``cells``), what won there, and what ``failed``.

    One counts as measured only with what the runtime runs there today.
    """

    def __init__(self, ground: TuningSpace, journal: Journal, ships: Ships | None) -> None:
        self.cells: set[Cell] = set()
        self.failed: dict[bytes, Failure] = {}
        self.winners = Winners()
        self._ground, self._journal, self._ships = ground, journal, ships
        self._records: list[Record] = []
        self._timed: dict[Cell, set[bytes]] = {}
        self._asked: dict[Cell, frozenset[bytes]] = {}
        self._learn(journal.contents.records)

    def add(self, records: Sequence[Record]) -> None:
        """Keep records in the journal."""
        self._journal.append(records)
        self._learn(records)

    def missing(self) -> list[Cell]:
        """The cells that are asked for and not measured."""
        every = ((problem, bucket) for problem, buckets in self._ground.cells.items() for bucket in buckets)
        return [cell for cell in every if cell not in self.cells or self._lacks_incumbent(cell)]

    def looks(self) -> dict[Cell, Remeasure]:
        """The cells to be looked at once more, by what would ship, less those that were, as well as they can be."""
        if self._ships is None:
            return {}
        contents = replace(self._journal.contents, records=tuple(self._records))
        try:
            found = looks(self._ships(contents), contents, self._ground.estimates)
        except CompileError:  # nothing ships
            return {}
        return {
            cell: look
            for cell, look in found.items()
            if cell in self.cells and not look.variants <= self._asked.get(cell, frozenset())
        }

    def looked_at(self, cell: Cell, look: Remeasure) -> None:
        """What a look was to time is not asked for again, whether or not it could be timed."""
        self._asked[cell] = self._asked.get(cell, frozenset()) | look.variants

    def _lacks_incumbent(self, cell: Cell) -> bool:
        ran = self._ground.ran(*cell, without=self.failed).values()
        return any(one.variant not in self._timed[cell] for one in ran)

    def _learn(self, records: Sequence[Record]) -> None:
        self._records += records
        for record in records:
            if isinstance(record, Failure):
                self.failed[record.variant] = record
                continue
            cell = cell_of(record.problem, record.bucket)
            if self._ground.has(record):
                self.cells.add(cell)
                self._timed.setdefault(cell, set()).update(timing.variant for timing in record.timings)
            # What won in a cell that nobody asks for tells of those near it, too.
            known = [one for one in record.timings if one.variant in self._ground.configs]
            if known:
                best = min(known, key=lambda one: (one.time_ns, one.variant)).variant
                self.winners.add(*cell, self._ground.configs[best])
