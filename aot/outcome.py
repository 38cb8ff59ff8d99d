"""What the tuner tells: while it runs, and in the end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..artifacts.types import Gpu
from .records import Failure, Measured


@dataclass(frozen=True, slots=True)
class Progress:
    """How far it is: cells ``done`` of ``total``, variants that ``failed``, and the ``last`` cell measured."""

    done: int
    total: int
    seconds_left: float
    failed: int
    last: Measured | None = None


@dataclass(frozen=True, slots=True)
class TuneObservers:
    """Whom to tell while it goes on: at the start, after each cell, and remarks."""

    on_start: Callable[[Progress], None] = lambda progress: None
    on_cell: Callable[[Progress], None] = lambda progress: None
    on_note: Callable[[str], None] = lambda note: None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run of the tuner did. ``total`` cells were asked for, of which ``known`` were in the journal before.

    ``too_large`` do not fit the GPU's memory, ``unable`` could not be measured; ``left`` were not reached.
    ``measurements`` are (variant, cell) pairs timed now, of ``exhaustive`` that a search of all would time;
    ``repeated`` were timed once more, to confirm.
    """

    sm: int
    gpu: Gpu
    total: int
    known: int
    measured: int
    too_large: int
    unable: int
    left: int
    failures: tuple[Failure, ...]
    measurements: int
    repeated: int
    exhaustive: int
    seconds: float

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do."""
        return not self.left

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "gpu": {"name": self.gpu.name, "sm": self.sm, "sm_count": self.gpu.sm_count,
                    "memory_mib": self.gpu.memory_mib, "driver": self.gpu.driver},
            "cells": self.total, "known": self.known, "measured": self.measured, "too_large": self.too_large,
            "unable": self.unable, "left": self.left, "finished": self.finished,
            "failed": [{"problem": str(one.problem), "bucket": one.bucket, "variant": one.variant.hex(),
                        "kind": one.kind, "reason": one.reason} for one in self.failures],
            "measurements": self.measurements, "repeated": self.repeated, "exhaustive": self.exhaustive,
            "seconds": round(self.seconds, 1),
        }  # fmt: skip
