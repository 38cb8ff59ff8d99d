"""The progress and the outcome of the tuner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...artifacts.records import Gpu
from ..journal.records import Failure, Measured


@dataclass(frozen=True, slots=True)
class CellsDone:
    """The progress: cells ``done`` of ``total``, variants that ``failed``, and the ``last`` cell measured.

    ``second_pass`` is set when the second measurement pass starts.
    """

    done: int
    total: int
    seconds_left: float
    failed: int
    last: Measured | None = None
    second_pass: bool = False


@dataclass(frozen=True, slots=True)
class TuneObservers:
    """Callbacks: at the start of each stage, after each cell, and for notes."""

    on_start: Callable[[CellsDone], None] = lambda progress: None
    on_cell: Callable[[CellsDone], None] = lambda progress: None
    on_note: Callable[[str], None] = lambda note: None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a run of the tuner. Of ``total`` cells, ``in_journal`` were in the journal before.

    ``too_large`` cells do not fit the GPU's memory, ``unable`` could not be measured, ``left`` were not reached. The
    second measurement pass measured ``remeasured`` cells again in ``remeasure_seconds``, and has ``to_remeasure`` left.
    ``measurements`` (variant, cell) pairs were timed in ``measured`` cells; timing all candidates would take
    ``exhaustive``. ``repeated`` were timed once more, in duels.
    """

    sm: int
    gpu: Gpu
    total: int
    in_journal: int
    measured: int
    remeasured: int
    too_large: int
    unable: int
    left: int
    to_remeasure: int
    failures: tuple[Failure, ...]
    measurements: int
    repeated: int
    exhaustive: int
    seconds: float
    remeasure_seconds: float

    @property
    def finished(self) -> bool:
        """True if nothing is left to do."""
        return not self.left and not self.to_remeasure

    def to_dict(self) -> dict[str, object]:
        """The outcome as plain values for JSON."""
        return {
            "gpu": {
                "name": self.gpu.name,
                "sm": self.sm,
                "sm_count": self.gpu.sm_count,
                "memory_mib": self.gpu.memory_mib,
                "driver": self.gpu.driver,
            },
            "cells": self.total,
            "known": self.in_journal,
            "measured": self.measured,
            "too_large": self.too_large,
            "unable": self.unable,
            "left": self.left,
            "looked_at": self.remeasured,
            "to_look_at": self.to_remeasure,
            "finished": self.finished,
            "failed": [
                {
                    "problem": str(failure.problem),
                    "bucket": failure.bucket,
                    "variant": failure.variant.hex(),
                    "kind": failure.kind,
                    "reason": failure.reason,
                }
                for failure in self.failures
            ],
            "measurements": self.measurements,
            "repeated": self.repeated,
            "exhaustive": self.exhaustive,
            "seconds": round(self.seconds, 1),
            "look_seconds": round(self.remeasure_seconds, 1),
        }
