"""What a journal says of each cell, whatever the order of its records: times, who beat whom, what failed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...artifacts.limits import MAX_TIME_NS
from ...artifacts.records.problem import Fusion, Problem
from ...artifacts.records.target import Gpu
from ...kernels.hardware.chips import Chip, chip_of
from .file import Contents
from .records import LONG_NS, Failure, Measured, Rematch, Timing, geometric_mean

LEAST_BAND = 0.005  # a difference below this fraction is never taken for real
_STANDARD_ERRORS = 2.0
_CLOCKS_APART = 8.0  # a drift of 1.7 was seen on an H200 (docs/use/tuning.md)

Cell = tuple[Problem, int]  # a product by one name alone, see ``cell_of``
_Times = dict[bytes, list[tuple[float, int]]]  # of each variant (time, rounds)


@dataclass(frozen=True, slots=True)
class CellTimes:
    """The times of one cell by cubin, in nanoseconds, their relative noise, and the duels fought there."""

    times_ns: Mapping[bytes, int]
    noise: Mapping[bytes, float]
    duels: tuple[Rematch, ...]
    driver: int
    plain_ns: Mapping[bytes, int] = field(default_factory=dict)  # of a form: the plain product's, timed with these
    torch_ns: int | None = None  # torch's grouped_mm, at the same clock
    incumbents: tuple[bytes, ...] = ()  # what the runtime ran here before, the fastest first

    def improves(self, challenger: bytes, incumbent: bytes) -> bool:
        """Whether the challenger takes the incumbent's place: faster by more than noise, and by the times, too."""
        return self.times_ns[challenger] < self.times_ns[incumbent] and self.beats(challenger, incumbent)

    def beats(self, challenger: bytes, modelled: bytes) -> bool:
        """Whether the challenger is faster by more than noise: as their duel says, or else their times."""
        fought = [duel for duel in self.duels if (duel.challenger, duel.modelled) == (challenger, modelled)]
        if fought:
            return all(duel.won for duel in fought)
        error = math.hypot(self.noise[challenger], self.noise[modelled])
        band = max(LEAST_BAND, _STANDARD_ERRORS * error)
        return self.times_ns[challenger] < self.times_ns[modelled] * (1 - band)

    def torch_beats(self, sha: bytes, more_ns: int) -> bool:
        """Whether torch's grouped_mm and ``more_ns`` beside it are faster than a variant by more than noise."""
        if self.torch_ns is None:
            return False
        band = max(LEAST_BAND, _STANDARD_ERRORS * math.sqrt(2) * self.noise[sha])  # torch's noise is taken to be equal
        return self.torch_ns + more_ns < self.times_ns[sha] * (1 - band)

    def best_of(self, able: Sequence[bytes]) -> bytes | None:
        """The one of these that a bundle has: the fastest, but for one that lost its duel with another: then that one.

        Where neither won by more than noise the times decide, but for long launches, whose times are of few rounds.
        Equally fast ones are taken in the order given. None where not one was timed.
        """
        timed = [sha for sha in able if sha in self.times_ns]
        if not timed:
            return None
        best = min(timed, key=lambda sha: self.times_ns[sha])
        long = self.times_ns[best] > LONG_NS
        fought = [duel for duel in self.duels if duel.challenger == best]
        won = {duel.modelled for duel in fought if duel.ratio >= (1.0 if long else 1.0 + duel.band)}
        return next((sha for sha in timed if sha in won), best)


@dataclass(frozen=True, slots=True)
class Timings:
    """All that a journal knows. ``failed`` are cubins that must not ship; ``gpus`` differ by their driver alone."""

    sm: int
    gpus: tuple[Gpu, ...]
    cells: Mapping[Cell, CellTimes]
    failed: Mapping[bytes, Failure]
    held_against: tuple[bytes, ...] = ()  # the digests of the bundles that had the incumbents

    @classmethod
    def of(cls, contents: Contents) -> Timings:
        """The evidence of a journal as read."""
        measured: dict[Cell, list[Measured]] = {}
        failures: dict[bytes, list[Failure]] = {}
        names: dict[Problem, Problem] = {}
        for record in contents.records:
            if isinstance(record, Failure):
                failures.setdefault(record.variant, []).append(record)
                continue
            name = names.get(record.problem)
            if name is None:
                name = names[record.problem] = record.problem.canonical
            measured.setdefault((name, record.bucket), []).append(record)
        drivers = sorted({record.driver for records in measured.values() for record in records})
        gpu = contents.header.gpu
        before = {one.bundle for records in measured.values() for record in records for one in record.incumbents}
        return cls(
            contents.header.sm,
            tuple(gpu._replace(driver=driver) for driver in drivers),
            {cell: _combined(records) for cell, records in measured.items()},
            {sha: min(some, key=_order) for sha, some in failures.items()},
            tuple(sorted(before)),
        )

    def clock(self, problem: Problem, bucket: int) -> float:
        """What a cell's times are multiplied with to compare with the plain product's; 1 where nothing tells.

        By a variant of the plain product that was timed with both. Each cell has a clock of its own, by the power that
        its contenders draw: on an H200 they are up to 1.2 apart.
        """
        cell = self.cells.get(cell_of(problem, bucket))
        plain = plain_of(problem) if cell is not None and cell.plain_ns else None
        beside = self.cells.get(cell_of(plain, bucket)) if plain is not None else None
        if cell is None or beside is None:
            return 1.0
        both = [beside.times_ns[sha] / ns for sha, ns in cell.plain_ns.items() if sha in beside.times_ns]
        return statistics.median_low(both) if both else 1.0

    @property
    def chip(self) -> Chip | None:
        """What the cost model is told of the GPU; None where nothing was measured."""
        return chip_of(self.gpus[0], self.sm) if self.gpus else None

    def gpu_of(self, cell: CellTimes) -> int:
        """The place in ``gpus`` of the one that a cell was measured on."""
        return [gpu.driver for gpu in self.gpus].index(cell.driver)


def cell_of(problem: Problem, bucket: int) -> Cell:
    """Where the times of a problem and bucket are: those of a product that has two names are under one."""
    return problem.canonical, bucket


def _combined(records: list[Measured]) -> CellTimes:
    """A cell that was measured more than once counts by its medians, in which a time weighs as many as its rounds.

    Each record is of the clock that its contenders left, so all are brought to the median of these. A duel counts
    unless the two were timed together in more rounds, in another record.
    """
    if len(records) == 1 and (alone := _alone(records[0])) is not None:
        return alone
    records = sorted(counting(records), key=_by_rounds)
    timings: dict[bytes, list[Timing]] = {}
    times: _Times = {}
    plain: _Times = {}
    torch: list[tuple[float, int]] = []
    clocks: list[tuple[float, int]] = []
    for record in records:
        clock = _clock_between(record, times, plain)
        clocks.append((clock, _rounds(record)))
        for timing in record.timings:
            timings.setdefault(timing.variant, []).append(timing)
            times.setdefault(timing.variant, []).append((timing.time_ns * clock, timing.rounds))
        if record.plain is not None:
            sha, ns = record.plain
            plain.setdefault(sha, []).append((geometric_mean(ns) * clock, _rounds(record)))
        if record.torch_ns is not None:
            torch.append((geometric_mean(record.torch_ns) * clock, _rounds(record)))
    usual = _median(clocks)
    ordered = sorted(timings.items())
    duels = sorted(
        (one.duel for one in records if one.duel is not None and _rounds(one) >= _most(records, one.duel)),
        key=lambda duel: (duel.challenger, duel.modelled, duel.ratio, duel.band),
    )
    usual_ns = {sha: _ns(_median(times[sha]) / usual) for sha, _ in ordered}
    before = {one.variant for record in records for one in record.incumbents if one.variant in usual_ns}
    return CellTimes(
        usual_ns,
        {sha: max((one.rounds, one.noise) for one in some)[1] for sha, some in ordered},
        tuple(duels),
        max(record.driver for record in records),
        {sha: _ns(_median(some) / usual) for sha, some in sorted(plain.items())},
        _ns(_median(torch) / usual) if torch else None,
        tuple(sorted(before, key=lambda sha: (usual_ns[sha], sha))),
    )


def _alone(record: Measured) -> CellTimes | None:
    """What ``_combined`` says of one record, as most cells have; None where it repeats itself."""
    ordered = sorted(record.timings)
    times = {one.variant: one.time_ns for one in ordered}
    if len(times) != len(ordered):
        return None
    duel, plain = record.duel, record.plain
    before = {one.variant for one in record.incumbents if one.variant in times}
    return CellTimes(
        times,
        {one.variant: one.noise for one in ordered},
        (duel,) if duel is not None and _rounds(record) >= _most([record], duel) else (),
        record.driver,
        {} if plain is None else {plain[0]: geometric_mean(plain[1])},
        None if record.torch_ns is None else geometric_mean(record.torch_ns),
        tuple(sorted(before, key=lambda sha: (times[sha], sha))),
    )


def _by_rounds(record: Measured) -> tuple[object, ...]:
    """The most rounds first, and else one order whatever that of the journal."""
    timings = tuple((one.variant, one.ns, one.rounds, one.noise) for one in record.timings)
    return -_rounds(record), timings, record.plain or (), record.torch_ns or ()


def _clock_between(record: Measured, times: _Times, plain: _Times) -> float:
    """What a record's times are multiplied with to compare with those before it; 1 where they have nothing in common.

    By the variants that both have, or else the plain product's. An H100 under load took 1.11 x in one record what it
    took in another, and what only the faster one had looked 3 % faster than what had beaten it there by 8 %. What is
    further apart than clocks are is none.
    """
    rounds = _rounds(record)
    both = [(_median(times[one.variant]) / one.time_ns, rounds) for one in record.timings if one.variant in times]
    if not both and record.plain is not None and record.plain[0] in plain:
        both = [(_median(plain[record.plain[0]]) / geometric_mean(record.plain[1]), rounds)]
    clock = _median(both) if both else 1.0
    return clock if 1 / _CLOCKS_APART < clock < _CLOCKS_APART else 1.0


def _ns(time: float) -> int:
    return max(1, min(MAX_TIME_NS, round(time)))


def counting(records: list[Measured]) -> list[Measured]:
    """The records of one cell that its times are from.

    Of a form those alone that have the plain product's time, where one has: no other's clock is known.
    """
    return [record for record in records if record.plain is not None] or records


def _rounds(record: Measured) -> int:
    return max((one.rounds for one in record.timings), default=1)


def _most(records: list[Measured], duel: Rematch) -> int:
    """The most rounds in which the two of a duel were timed together."""
    two = {duel.challenger, duel.modelled}
    return max((_rounds(one) for one in records if two <= {timing.variant for timing in one.timings}), default=1)


def _median(times: Sequence[tuple[float, int]]) -> float:
    """The median of (time, rounds), each as often as its rounds; where two are in the middle, their geometric mean."""
    ordered = sorted((time, max(1, rounds)) for time, rounds in times)
    half, seen = sum(rounds for _, rounds in ordered), 0
    for i, (time, rounds) in enumerate(ordered):
        seen += 2 * rounds
        if seen > half:
            return time
        if seen == half:
            return math.sqrt(time * ordered[i + 1][0])
    raise ValueError("no time")


def plain_of(problem: Problem) -> Problem | None:
    """The plain product, of a form whose time the runtime holds against another's: gathered rows, silu."""
    if not problem.fusion & (Fusion.GATHER | Fusion.SILU):
        return None
    return problem._replace(fusion=Fusion.NONE, top_k=0)


def _order(failure: Failure) -> tuple[object, ...]:
    return (failure.problem.sort_key, failure.bucket, failure.kind, failure.reason)
