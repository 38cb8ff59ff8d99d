"""Records of measuring, as plain data that a worker returns, a journal holds and the builder reads.

Times are whole nanoseconds, one a routing, in the order of ``ROUTINGS``. Variants are named by the sha256 of their
cubin: the measured code is byte for byte the code that ships.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...artifacts.format import problem_of
from ...artifacts.limits import MAX_BUCKET_LOG2, MAX_DIM, MAX_TIME_NS
from ...artifacts.records import Problem

MAX_REASON_CHARS = 1 << 16

ROUTINGS = ("skewed", "uniform")  # distributions of rows over experts: inputs.measured_routings

LONG_NS = 10_000_000  # launches that take longer are timed in three rounds
AGAIN = 3  # factor on the rounds of a second measurement
FLUSH_BYTES = 256 << 20  # written before each timed launch: more than any L2 cache holds

# Why a variant failed. A variant that failed anywhere never ships.
WRONG = "wrong"  # its results are wrong
FAULT = "fault"  # a CUDA error
DIED = "died"  # it took its process down
HUNG = "hung"  # it did not end in time
_KINDS = (WRONG, FAULT, DIED, HUNG)


class Timing(NamedTuple):
    """One variant in one cell: the median of ``rounds`` launches a routing, in turns with all other candidates.

    ``noise`` is the relative standard error of the medians, ``error`` the relative error of the results.
    """

    variant: bytes
    ns: tuple[int, ...]
    noise: float
    rounds: int
    error: float

    @property
    def time_ns(self) -> int:
        """The geometric mean over the routings."""
        return geometric_mean(self.ns)


@dataclass(frozen=True, slots=True)
class Rematch:
    """The fastest candidate against the baseline, or else against the modelled choice, timed once more in turns.

    ``modelled`` is the baseline or modelled choice. ``ratio`` is challenger / modelled, the median over the rounds and
    the geometric mean over the routings; ``band`` is how far from 1 noise alone can move it.
    """

    challenger: bytes
    modelled: bytes
    challenger_ns: tuple[int, ...]
    modelled_ns: tuple[int, ...]
    ratio: float
    band: float

    @property
    def won(self) -> bool:
        """True if the challenger is faster by more than noise."""
        return self.ratio < 1.0 - self.band


class Incumbent(NamedTuple):
    """The kernel that the runtime ran in a cell before: its cubin, and the digest of its bundle."""

    variant: bytes
    bundle: bytes


@dataclass(frozen=True, slots=True)
class Measured:
    """One measured cell with its candidates, of which ``modelled`` is the cost model's choice.

    ``torch_ns``: torch's grouped_mm, if timed. ``plain``: for a fusion, a variant of the plain product and its times.
    ``drift``: a reference kernel's time over its time when the worker started. ``driver``: as cuDriverGetVersion
    returns it. ``incumbents``: the candidates that the runtime ran before, from installed bundles; two if the product
    has two names with one each.
    """

    problem: Problem
    bucket: int
    modelled: bytes
    timings: tuple[Timing, ...]
    duel: Rematch | None
    torch_ns: tuple[int, ...] | None
    drift: float
    driver: int
    plain: tuple[bytes, tuple[int, ...]] | None = None
    incumbents: tuple[Incumbent, ...] = ()


@dataclass(frozen=True, slots=True)
class Failure:
    """A variant that failed in a cell: ``kind`` is WRONG, FAULT, DIED or HUNG."""

    problem: Problem
    bucket: int
    variant: bytes
    kind: str
    reason: str


Record = Measured | Failure


def geometric_mean(times: Sequence[int]) -> int:
    """The geometric mean of times in nanoseconds, at least 1."""
    if len(times) == 2 and times[0] > 0 < times[1]:  # the usual case; a sum of two is rounded once, like fsum's
        return round(math.exp((math.log(times[0]) + math.log(times[1])) / 2))
    return max(1, round(math.exp(math.fsum(math.log(max(1, time)) for time in times) / len(times))))


def to_value(record: Record) -> dict[str, object]:
    """The JSON value of a record."""
    where = {"problem": list(record.problem.sort_key), "bucket": record.bucket}
    if isinstance(record, Failure):
        return {
            "record": "failed",
            **where,
            "variant": record.variant.hex(),
            "kind": record.kind,
            "reason": record.reason,
        }
    duel = record.duel
    before = {"incumbents": [[incumbent.variant.hex(), incumbent.bundle.hex()] for incumbent in record.incumbents]}
    return {
        "record": "measured",
        **where,
        "modelled": record.modelled.hex(),
        "timings": [[t.variant.hex(), list(t.ns), t.noise, t.rounds, t.error] for t in record.timings],
        "duel": duel
        and [
            duel.challenger.hex(),
            duel.modelled.hex(),
            list(duel.challenger_ns),
            list(duel.modelled_ns),
            duel.ratio,
            duel.band,
        ],
        "torch_ns": None if record.torch_ns is None else list(record.torch_ns),
        "drift": record.drift,
        "driver": record.driver,
        "plain": None if record.plain is None else [record.plain[0].hex(), list(record.plain[1])],
        **(before if record.incumbents else {}),
    }


def from_value(value: dict[str, object]) -> Record:
    """The record of a JSON value from ``to_value``.

    Raises
    ------
    ValueError, KeyError, TypeError, OverflowError
        if it is no record of this version, a number is out of range or not finite, or a name is unknown.
    """
    fields: dict[str, Any] = dict(value)
    if not isinstance(fields["problem"], list):
        raise ValueError(f"{fields['problem']!r} is no problem")
    problem = _problem(*fields["problem"])
    bucket = _whole(fields["bucket"], 1 << MAX_BUCKET_LOG2, 1)
    if bucket & (bucket - 1):
        raise ValueError(f"bucket {bucket} is no power of two")
    if fields["record"] == "failed":
        if fields["kind"] not in _KINDS:
            raise ValueError(f"{fields['kind']!r} is no kind of failure")
        return Failure(problem, bucket, _sha(fields["variant"]), fields["kind"], _reason(fields["reason"]))
    if fields["record"] != "measured":
        raise ValueError(f"a record of the kind {fields['record']!r}")
    timings = tuple(
        Timing(_sha(sha), _times(ns), _real(noise), _whole(rounds), _real(error))
        for sha, ns, noise, rounds, error in fields["timings"]
    )
    duel = None
    if fields["duel"] is not None:
        challenger, modelled, challenger_ns, modelled_ns, ratio, band = fields["duel"]
        duel = Rematch(
            _sha(challenger), _sha(modelled), _times(challenger_ns), _times(modelled_ns), _real(ratio), _real(band)
        )
    torch_ns = None if fields["torch_ns"] is None else _times(fields["torch_ns"])
    plain = None
    if fields["plain"] is not None:
        sha, ns = fields["plain"]
        plain = _sha(sha), _times(ns)
    incumbents = tuple(Incumbent(_sha(variant), _sha(bundle)) for variant, bundle in fields.get("incumbents", ()))
    return Measured(
        problem,
        bucket,
        _sha(fields["modelled"]),
        timings,
        duel,
        torch_ns,
        _real(fields["drift"]),
        _whole(fields["driver"]),
        plain,
        incumbents,
    )


# A hundred thousand records of a journal name a few thousand problems and a few hundred variants.
@functools.lru_cache(maxsize=1 << 14, typed=True)  # typed, or 1 and True would be one key
def _problem(*value: object) -> Problem:
    return problem_of(list(value))


@functools.lru_cache(maxsize=1 << 14)
def _sha(value: object) -> bytes:
    if not isinstance(value, str) or len(value) != 64:
        raise ValueError(f"{value!r} is no sha256")
    return bytes.fromhex(value)


def _whole(value: object, most: int = MAX_DIM, least: int = 0) -> int:
    if type(value) is not int or not least <= value <= most:
        raise ValueError(f"{value!r} is no whole number from {least} to {most}")
    return value


def _real(value: object) -> float:
    if type(value) not in (int, float) or not 0 <= value < math.inf:  # type: ignore[operator]  # no bool, no NaN
        raise ValueError(f"{value!r} is no number from 0 on")
    return float(value)  # type: ignore[arg-type]


def _reason(value: object) -> str:
    if not isinstance(value, str) or len(value) > MAX_REASON_CHARS:
        raise ValueError("a failure's reason is no text, or a very long one")
    value.encode()  # half a surrogate pair can't be printed; UnicodeError is a ValueError
    return value


def _times(value: Sequence[object]) -> tuple[int, ...]:
    if not value:
        raise ValueError(f"{value!r} are no times")
    for time in value:
        if type(time) is not int or not 1 <= time <= MAX_TIME_NS:
            raise ValueError(f"{time!r} is no whole number from 1 to {MAX_TIME_NS}")
    return tuple(value)  # type: ignore[arg-type]
