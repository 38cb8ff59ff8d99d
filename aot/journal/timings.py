"""Combine a journal's records of each cell, in any order: times, duels and failures."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...artifacts.limits import MAX_TIME_NS
from ...artifacts.records import Fusion, Gpu, Problem
from ...kernels.chips import Chip, chip_of
from .file import Contents
from .records import LONG_NS, Failure, Measured, Rematch, Timing, geometric_mean

LEAST_BAND = 0.005  # a smaller relative difference counts as noise
_STANDARD_ERRORS = 2.0
_CLOCKS_APART = 8.0  # a drift of 1.7 was seen on an H200 (docs/use/tuning.md)

Cell = tuple[Problem, int]  # problem and bucket, see ``cell_of``
_Times = dict[bytes, list[tuple[float, int]]]  # cubin -> (time, rounds)


@dataclass(frozen=True, slots=True)
class CellTimes:
    """The times of one cell by cubin, in nanoseconds, with their relative noise and the duels between candidates."""

    times_ns: Mapping[bytes, int]
    noise: Mapping[bytes, float]
    duels: tuple[Rematch, ...]
    driver: int
    plain_ns: Mapping[bytes, int] = field(default_factory=dict)  # for a fusion: the plain product's times
    torch_ns: int | None = None  # torch's grouped_mm, at the same clock
    incumbents: tuple[bytes, ...] = ()  # the baseline kernels, the fastest first

    def improves(self, challenger: bytes, incumbent: bytes) -> bool:
        """True if the challenger replaces the incumbent: faster by more than noise, and by the combined times too."""
        return self.times_ns[challenger] < self.times_ns[incumbent] and self.beats(challenger, incumbent)

    def beats(self, challenger: bytes, modelled: bytes) -> bool:
        """True if the challenger is faster by more than noise: by their duels if there are any, else by their times."""
        fought = [duel for duel in self.duels if (duel.challenger, duel.modelled) == (challenger, modelled)]
        if fought:
            return all(duel.won for duel in fought)
        error = math.hypot(self.noise[challenger], self.noise[modelled])
        band = max(LEAST_BAND, _STANDARD_ERRORS * error)
        return self.times_ns[challenger] < self.times_ns[modelled] * (1 - band)

    def torch_beats(self, sha: bytes, more_ns: int) -> bool:
        """True if torch's grouped_mm plus ``more_ns`` is faster than a variant by more than noise."""
        if self.torch_ns is None:
            return False
        band = max(LEAST_BAND, _STANDARD_ERRORS * math.sqrt(2) * self.noise[sha])  # torch's noise is taken to be equal
        return self.torch_ns + more_ns < self.times_ns[sha] * (1 - band)

    def best_of(self, able: Sequence[bytes]) -> bytes | None:
        """The variant for a bundle to choose: the fastest, or if it lost a duel, the variant that it lost to.

        If the duel was within noise, the times decide; in long launches, timed in few rounds, the duel decides. Of
        equally fast variants the first is taken. None if no variant was timed.
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
    """All times of a journal. ``failed`` are cubins that must not ship; ``gpus`` differ only in their driver."""

    sm: int
    gpus: tuple[Gpu, ...]
    cells: Mapping[Cell, CellTimes]
    failed: Mapping[bytes, Failure]
    held_against: tuple[bytes, ...] = ()  # the digests of the bundles with the baseline kernels

    @classmethod
    def of(cls, contents: Contents) -> Timings:
        """Combine the records of a journal as read."""
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
        incumbents = (i for records in measured.values() for record in records for i in record.incumbents)
        return cls(
            contents.header.sm,
            tuple(gpu._replace(driver=driver) for driver in drivers),
            {cell: _combined(records) for cell, records in measured.items()},
            {sha: min(some, key=_order) for sha, some in failures.items()},
            tuple(sorted({incumbent.bundle for incumbent in incumbents})),
        )

    def clock(self, problem: Problem, bucket: int) -> float:
        """The factor that makes a cell's times comparable with the plain product's; 1 if there is no evidence.

        It is the ratio of a plain variant's times in both cells. Each cell has a GPU clock of its own, by the power
        that its candidates draw: on an H200 up to 1.2 apart.
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
        """The GPU's figures for the cost model; None if nothing was measured."""
        return chip_of(self.gpus[0], self.sm) if self.gpus else None

    def gpu_of(self, cell: CellTimes) -> int:
        """The place in ``gpus`` of the GPU that a cell was measured on."""
        return [gpu.driver for gpu in self.gpus].index(cell.driver)


def cell_of(problem: Problem, bucket: int) -> Cell:
    """The key of a problem's times: a product with two names has one key."""
    return problem.canonical, bucket


def _combined(records: list[Measured]) -> CellTimes:
    """Combine the records of a cell: medians in which a time weighs as many as its rounds.

    In each record the GPU ran at another clock, so all records are scaled to the median clock. A duel counts
    unless its two variants were timed together in more rounds in another record.
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
    fought = ((record.duel, _rounds(record)) for record in records)
    duels = sorted(
        (duel for duel, rounds in fought if duel is not None and rounds >= _most(records, duel)),
        key=lambda duel: (duel.challenger, duel.modelled, duel.ratio, duel.band),
    )
    usual_ns = {sha: _ns(_median(times[sha]) / usual) for sha, _ in ordered}
    before = {incumbent.variant for record in records for incumbent in record.incumbents} & usual_ns.keys()
    return CellTimes(
        usual_ns,
        {sha: max((timing.rounds, timing.noise) for timing in some)[1] for sha, some in ordered},
        tuple(duels),
        max(record.driver for record in records),
        {sha: _ns(_median(some) / usual) for sha, some in sorted(plain.items())},
        _ns(_median(torch) / usual) if torch else None,
        tuple(sorted(before, key=lambda sha: (usual_ns[sha], sha))),
    )


def _alone(record: Measured) -> CellTimes | None:
    """``_combined`` for a single record, as most cells have; None if it times a variant twice."""
    ordered = sorted(record.timings)
    times = {timing.variant: timing.time_ns for timing in ordered}
    if len(times) != len(ordered):
        return None
    duel, plain = record.duel, record.plain
    before = {incumbent.variant for incumbent in record.incumbents if incumbent.variant in times}
    return CellTimes(
        times,
        {timing.variant: timing.noise for timing in ordered},
        (duel,) if duel is not None and _rounds(record) >= _most([record], duel) else (),
        record.driver,
        {} if plain is None else {plain[0]: geometric_mean(plain[1])},
        None if record.torch_ns is None else geometric_mean(record.torch_ns),
        tuple(sorted(before, key=lambda sha: (times[sha], sha))),
    )


def _by_rounds(record: Measured) -> tuple[object, ...]:
    """A sort key: most rounds first, and equal for journals in any order."""
    timings = tuple((timing.variant, timing.ns, timing.rounds, timing.noise) for timing in record.timings)
    return -_rounds(record), timings, record.plain or (), record.torch_ns or ()


def _clock_between(record: Measured, times: _Times, plain: _Times) -> float:
    """The factor that makes a record's times comparable with earlier records; 1 if they have nothing in common.

    It comes from variants in both, or else from the plain product's variant. Without it, an H100 under load that took
    1.11x as long in one record made variants look 3 % faster than kernels that had beaten them by 8 %. A factor larger
    than clocks can differ is ignored.
    """
    rounds = _rounds(record)
    common = (timing for timing in record.timings if timing.variant in times)
    both = [(_median(times[timing.variant]) / timing.time_ns, rounds) for timing in common]
    if not both and record.plain is not None and record.plain[0] in plain:
        both = [(_median(plain[record.plain[0]]) / geometric_mean(record.plain[1]), rounds)]
    clock = _median(both) if both else 1.0
    return clock if 1 / _CLOCKS_APART < clock < _CLOCKS_APART else 1.0


def _ns(time: float) -> int:
    return max(1, min(MAX_TIME_NS, round(time)))


def counting(records: list[Measured]) -> list[Measured]:
    """The records of one cell whose times count.

    If a record of a fusion has the plain product's time, only such records count: the clock of the others is unknown.
    """
    return [record for record in records if record.plain is not None] or records


def _rounds(record: Measured) -> int:
    return max((timing.rounds for timing in record.timings), default=1)


def _most(records: list[Measured], duel: Rematch) -> int:
    """The most rounds in which both variants of a duel were timed together."""
    two = {duel.challenger, duel.modelled}
    return max((_rounds(record) for record in records if two <= {t.variant for t in record.timings}), default=1)


def _median(times: Sequence[tuple[float, int]]) -> float:
    """The median of (time, rounds), each as often as its rounds; of two in the middle, their geometric mean."""
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
    """The plain product of a fusion whose time the runtime compares with the plain one: gathered rows, silu."""
    if not problem.fusion & (Fusion.GATHER | Fusion.SILU):
        return None
    return problem._replace(fusion=Fusion.NONE, top_k=0)


def _order(failure: Failure) -> tuple[object, ...]:
    return (failure.problem.sort_key, failure.bucket, failure.kind, failure.reason)
