"""What journals know of each cell, for a report: candidates, the choice that follows, torch's time, failures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...artifacts.records.problem import Problem
from ...artifacts.records.target import Gpu
from ..journal.file import Contents
from ..journal.records import Failure
from ..journal.timings import Timings, cell_of

Key = tuple[Problem, int]


@dataclass(frozen=True, slots=True)
class Search:
    """One cell. ``fastest`` are (time in us, cubin's sha256) of all that were measured, ``choice`` one of them.

    A variant that failed anywhere is no choice; ``choice`` is None where no other was measured. ``torch_us`` is torch's
    grouped_mm, at the clock of ``fastest``.
    """

    gpu: Gpu
    fastest: tuple[tuple[float, bytes], ...]
    choice: bytes | None
    torch_us: float | None
    failures: tuple[Failure, ...]

    @property
    def runner_up(self) -> tuple[float, bytes] | None:
        """The fastest beside the choice."""
        return next((one for one in self.fastest if one[1] != self.choice), None)


def searches(journals: Sequence[Contents]) -> dict[Key, list[Search]]:
    """Every cell of every journal, as ``cell_of`` names it, in the journals' order."""
    found: dict[Key, list[Search]] = {}
    for journal in journals:
        for key, search in _of(journal).items():
            found.setdefault(key, []).append(search)
    return found


def _of(journal: Contents) -> dict[Key, Search]:
    evidence = Timings.of(journal)
    failures: dict[Key, list[Failure]] = {}
    for record in journal.records:
        if isinstance(record, Failure):
            failures.setdefault(cell_of(record.problem, record.bucket), []).append(record)
    found: dict[Key, Search] = {}
    for key in dict.fromkeys([*evidence.cells, *failures]):
        broken = tuple(sorted(failures.get(key, ()), key=lambda one: (one.variant, one.kind, one.reason)))
        if key not in evidence.cells:
            found[key] = Search(journal.header.gpu, (), None, None, broken)
            continue
        times, clock = evidence.cells[key], evidence.clock(*key)  # as the bundle has them
        found[key] = Search(
            evidence.gpus[evidence.gpu_of(times)],
            tuple(sorted((clock * time_ns / 1e3, sha) for sha, time_ns in times.times_ns.items())),
            times.best_of([sha for sha in sorted(times.times_ns) if sha not in evidence.failed]),
            None if times.torch_ns is None else clock * times.torch_ns / 1e3,
            broken,
        )
    return found
