"""Compare a new bundle's choices with the baseline in their cells: how many are faster, and by how much."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...artifacts.records.bundle import Bundle
from ...artifacts.records.problem import Problem
from ..journal.file import Contents
from ..journal.records import Measured
from ..journal.timings import Timings, cell_of
from .incumbents import Running


@dataclass(frozen=True, slots=True)
class BaselineComparison:
    """The cells of a bundle by comparison with the baseline that ran there before.

    ``faster`` cells gain ``gain`` in the geometric mean (0.05 is 5 %). ``as_before`` cells keep their kernel.
    ``slower`` cells occur if the earlier kernel is in no bundle here. The rest is ``not_compared``: torch ran there
    before, or code that could not be measured here.
    """

    faster: int
    gain: float
    as_before: int
    slower: int
    not_compared: int

    @classmethod
    def of(cls, bundle: Bundle, evidence: Timings | None, running: Running | None) -> BaselineComparison | None:
        """Compare by measured times; None if nothing was compared."""
        ratios: list[float] = []
        as_before = slower = others = 0
        compared = False
        for problem, row in bundle.choices.items():
            for choice in row:
                gpu = choice.measured_on(bundle.gpus)
                if gpu is not None and (evidence is None or gpu not in evidence.gpus):
                    continue  # taken over from an installed bundle
                before = _before(problem, choice.bucket, evidence, running or {})
                compared = compared or bool(before)
                now = bundle.variants[choice.variant].cubin_sha256
                cell = evidence.cells.get(cell_of(problem, choice.bucket)) if evidence else None
                times_ns = cell.times_ns if cell else {}
                if now in before:
                    as_before += 1
                elif now in times_ns and before and before <= times_ns.keys():
                    ratio = min(times_ns[sha] for sha in before) / times_ns[now]
                    slower += ratio < 1
                    if ratio >= 1:
                        ratios.append(ratio)
                else:
                    others += 1
        if not compared:
            return None
        gain = math.expm1(math.fsum(map(math.log, ratios)) / len(ratios)) if ratios else 0.0
        return cls(len(ratios), gain, as_before, slower, others)

    def __str__(self) -> str:
        by = f" by {self.gain:.1%}".replace("%", " %") + " in the mean" if self.faster else ""
        text = f"{self.faster} cells faster than before{by}, {self.as_before} as before, {self.slower} slower"
        return text + (f", {self.not_compared} not compared" if self.not_compared else "")

    def to_dict(self) -> dict[str, object]:
        """The comparison as plain values for JSON."""
        return {
            "faster": self.faster,
            "gain": round(self.gain, 4),
            "as_before": self.as_before,
            "slower": self.slower,
            "not_compared": self.not_compared,
        }


def timed_before(contents: Contents) -> frozenset[bytes]:
    """The variants that were timed together with a baseline, and the baselines."""
    records = (record for record in contents.records if isinstance(record, Measured) and record.incumbents)
    return frozenset(timing.variant for record in records for timing in record.timings)


def _before(problem: Problem, bucket: int, evidence: Timings | None, running: Running) -> set[bytes]:
    now = running.get((problem, bucket))
    if now is not None:
        return {now.variant}
    cell = evidence.cells.get(cell_of(problem, bucket)) if evidence else None
    return set(cell.incumbents) if cell else set()
