"""The journals' records of each cell, for a report: candidates, the resulting choice, torch's time, failures."""

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
    """The search in one cell; ``times`` is None if nothing was timed. A bundle has these times multiplied by ``clock``.

    ``failed`` are the variants that failed anywhere, which are never chosen.
    """

    gpu: Gpu
    times: CellTimes | None
    clock: float
    failed: Container[bytes]
    failures: tuple[Failure, ...]

    @property
    def fastest(self) -> list[tuple[float, bytes]]:
        """(time in us, cubin's sha256) of all measured variants, fastest first."""
        times = {} if self.times is None else self.times.times_ns
        return sorted((self.clock * time_ns / 1e3, sha) for sha, time_ns in times.items())

    @property
    def choice(self) -> bytes | None:
        """The variant that a bundle of this journal would choose; None if no variant was timed that never failed."""
        if self.times is None:
            return None
        return self.times.best_of([sha for sha in sorted(self.times.times_ns) if sha not in self.failed])

    @property
    def tried(self) -> int:
        """The number of measured variants."""
        return 0 if self.times is None else len(self.times.times_ns)

    @property
    def spread(self) -> float | None:
        """The median of the measured times over the fastest."""
        if not self.tried or self.times is None:
            return None
        ordered = sorted(self.times.times_ns.values())
        half = len(ordered) // 2
        return (ordered[half] + ordered[~half]) / 2 / ordered[0]

    @property
    def torch_us(self) -> float | None:
        """The time of torch's grouped_mm, at the clock of ``fastest``."""
        torch_ns = None if self.times is None else self.times.torch_ns
        return None if torch_ns is None else self.clock * torch_ns / 1e3


Searches = dict[Problem, dict[int, list[Search]]]


def searches(journals: Sequence[Contents]) -> Searches:
    """Every cell of every journal by product and bucket, under ``cell_of``'s key, in the journals' order."""
    by_cell: Searches = {}
    for journal in journals:
        _add(journal, by_cell)
    return by_cell


def _add(journal: Contents, by_cell: Searches) -> None:
    evidence = Timings.of(journal)
    failures: dict[tuple[Problem, int], list[Failure]] = {}
    for record in journal.records:
        if isinstance(record, Failure):
            failures.setdefault(cell_of(record.problem, record.bucket), []).append(record)
    gpus = {gpu.driver: gpu for gpu in evidence.gpus}
    for (problem, bucket), times in evidence.cells.items():
        broken = _ordered(failures.pop((problem, bucket), ()))
        clock = evidence.clock(problem, bucket) if times.plain_ns else 1.0
        search = Search(gpus[times.driver], times, clock, evidence.failed, broken)
        by_cell.setdefault(problem, {}).setdefault(bucket, []).append(search)
    for (problem, bucket), some in failures.items():
        search = Search(journal.header.gpu, None, 1.0, evidence.failed, _ordered(some))
        by_cell.setdefault(problem, {}).setdefault(bucket, []).append(search)


def _ordered(failures: Sequence[Failure]) -> tuple[Failure, ...]:
    return tuple(sorted(failures, key=lambda failure: (failure.variant, failure.kind, failure.reason)))
