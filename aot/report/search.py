"""What journals know of each cell, for a report: candidates, the choice that follows, torch's time, failures."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass

from ...artifacts.records.problem import Problem
from ...artifacts.records.target import Gpu
from ..journal.file import Contents
from ..journal.records import Failure
from ..journal.timings import CellTimes, Timings, cell_of


@dataclass(frozen=True, slots=True)
class Search:
    """One cell; ``times`` is None where nothing was timed. What a bundle has are these times ``clock`` times.

    ``failed`` are the variants that failed anywhere: none of them is a choice.
    """

    gpu: Gpu
    times: CellTimes | None
    clock: float
    failed: Container[bytes]
    failures: tuple[Failure, ...]

    @property
    def fastest(self) -> list[tuple[float, bytes]]:
        """(time in us, cubin's sha256) of all that were measured."""
        times = {} if self.times is None else self.times.times_ns
        return sorted((self.clock * time_ns / 1e3, sha) for sha, time_ns in times.items())

    @property
    def choice(self) -> bytes | None:
        """The variant that a bundle of this journal has; None where not one was timed that never failed."""
        if self.times is None:
            return None
        return self.times.best_of([sha for sha in sorted(self.times.times_ns) if sha not in self.failed])

    @property
    def tried(self) -> int:
        """How many were measured."""
        return 0 if self.times is None else len(self.times.times_ns)

    @property
    def spread(self) -> float | None:
        """The median of what was measured over the fastest."""
        if not self.tried or self.times is None:
            return None
        ordered = sorted(self.times.times_ns.values())
        half = len(ordered) // 2
        return (ordered[half] + ordered[~half]) / 2 / ordered[0]

    @property
    def torch_us(self) -> float | None:
        """Torch's grouped_mm, at the clock of ``fastest``."""
        torch_ns = None if self.times is None else self.times.torch_ns
        return None if torch_ns is None else self.clock * torch_ns / 1e3


Searches = dict[Problem, dict[int, list[Search]]]


def searches(journals: Sequence[Contents]) -> Searches:
    """Every cell of every journal by product and bucket, as ``cell_of`` names it, in the journals' order."""
    found: Searches = {}
    for journal in journals:
        _add(journal, found)
    return found


def _add(journal: Contents, found: Searches) -> None:
    evidence = Timings.of(journal)
    failures: dict[tuple[Problem, int], list[Failure]] = {}
    for record in journal.records:
        if isinstance(record, Failure):
            failures.setdefault(cell_of(record.problem, record.bucket), []).append(record)
    gpus = {gpu.driver: gpu for gpu in evidence.gpus}
    for (problem, bucket), times in evidence.cells.items():
        broken = _ordered(failures.pop((problem, bucket), ()))
        clock = evidence.clock(problem, bucket) if times.plain_ns else 1.0
        one = Search(gpus[times.driver], times, clock, evidence.failed, broken)
        found.setdefault(problem, {}).setdefault(bucket, []).append(one)
    for (problem, bucket), some in failures.items():
        one = Search(journal.header.gpu, None, 1.0, evidence.failed, _ordered(some))
        found.setdefault(problem, {}).setdefault(bucket, []).append(one)


def _ordered(failures: Sequence[Failure]) -> tuple[Failure, ...]:
    return tuple(sorted(failures, key=lambda one: (one.variant, one.kind, one.reason))) if failures else ()
