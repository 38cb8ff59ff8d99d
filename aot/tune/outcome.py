"""What the tuner tells: while it runs, and in the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...artifacts.records.target import Gpu
from ..journal.records import Failure, Measured


@dataclass(frozen=True, slots=True)
class CellsDone:
    """How far it is: cells ``done`` of ``total``, variants that ``failed``, and the ``last`` cell measured.

    ``looking``, at the start of a stage: at cells that are measured already.
    """

    done: int
    total: int
    seconds_left: float
    failed: int
    last: Measured | None = None
    looking: bool = False


@dataclass(frozen=True, slots=True)
class TuneObservers:
    """Whom to tell while it goes on: at the start of each stage, after each cell, and remarks."""

    on_start: Callable[[CellsDone], None] = lambda progress: None
    on_cell: Callable[[CellsDone], None] = lambda progress: None
    on_note: Callable[[str], None] = lambda note: None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run of the tuner did. ``total`` cells were asked for, of which ``known`` were in the journal before.

    ``too_large`` do not fit the GPU's memory, ``unable`` could not be measured; ``left`` were not reached. ``looked``
    were measured once more, by what would ship, which took ``look_seconds`` of all; ``to_look`` are still to be.
    ``measurements`` are the (variant, cell) pairs timed of ``measured`` cells, of ``exhaustive`` that a search of all
    would time; ``repeated`` were timed once more, to confirm.
    """

    sm: int
    gpu: Gpu
    total: int
    known: int
    measured: int
    looked: int
    too_large: int
    unable: int
    left: int
    to_look: int
    failures: tuple[Failure, ...]
    measurements: int
    repeated: int
    exhaustive: int
    seconds: float
    look_seconds: float

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do."""
        return not self.left and not self.to_look

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "gpu": {
                "name": self.gpu.name,
                "sm": self.sm,
                "sm_count": self.gpu.sm_count,
                "memory_mib": self.gpu.memory_mib,
                "driver": self.gpu.driver,
            },
            "cells": self.total,
            "known": self.known,
            "measured": self.measured,
            "too_large": self.too_large,
            "unable": self.unable,
            "left": self.left,
            "looked_at": self.looked,
            "to_look_at": self.to_look,
            "finished": self.finished,
            "failed": [
                {
                    "problem": str(one.problem),
                    "bucket": one.bucket,
                    "variant": one.variant.hex(),
                    "kind": one.kind,
                    "reason": one.reason,
                }
                for one in self.failures
            ],
            "measurements": self.measurements,
            "repeated": self.repeated,
            "exhaustive": self.exhaustive,
            "seconds": round(self.seconds, 1),
            "look_seconds": round(self.look_seconds, 1),
        }
