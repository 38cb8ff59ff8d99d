"""The place where a tuner registers itself: the runtime itself never tunes."""

from __future__ import annotations

from typing import Protocol

from ..artifacts.errors import InputError
from ..artifacts.records.problem import Problem
from . import settings


class Tuner(Protocol):
    """Makes sure that a choice measured on this GPU exists for the problems, tuning now if there is none."""

    def __call__(self, problems: tuple[Problem, ...], M: int, device: int) -> None:
        """``M`` rows, on ``cuda:device``. What it finds it publishes, and has the runtime read it (``reload``)."""


_tuner: Tuner | None = None


def register_tuner(tuner: Tuner | None) -> None:
    """Make ``autotune=True`` call ``tuner``; None takes it out. ``pretuned.aot`` registers its own when imported."""
    global _tuner
    _tuner = tuner


def demand_tuner() -> Tuner | None:
    """The tuner that ``autotune=True`` asks for, or None with PRETUNED_DISABLE_AUTOTUNE=1.

    Raises
    ------
    InputError
        if none is registered.
    """
    if settings.settings().disable_autotune:
        return None
    if _tuner is None:
        raise InputError(
            "grouped_gemm: autotune=True and no tuner is registered. The runtime never tunes; import pretuned.aot "
            "(pip install 'pretuned[aot]') registers one, or leave autotune out"
        )
    return _tuner
