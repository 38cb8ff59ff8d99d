"""The options of the verbs that measure, and their progress."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import click

from ...artifacts.errors import InputError
from ...artifacts.records import Problem
from ..journal.records import Measured, geometric_mean
from ..tune.shortlist import SHARE
from ..tune.tuner import DEFAULT_BUDGET_S, CellsDone, Outcome, TuneObservers, tune_problems
from .options import file_path
from .progress import Shown
from .table import duration

F = TypeVar("F", bound=Callable[..., Any])

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def _seconds(ctx: click.Context, parameter: click.Parameter, value: str) -> float | None:
    """Parse ``90s``, ``10m``, ``1h30m`` or ``none`` into seconds or None."""
    text = value.strip().lower()
    if text == "none":
        return None
    parts = re.findall(r"([0-9]+(?:\.[0-9]+)?)([smh]?)", text)
    seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
    if not parts or "".join(number + unit for number, unit in parts) != text or not math.isfinite(seconds):
        raise click.BadParameter(f"'{value}' is no duration; wanted e.g. 90s, 10m, 1h30m or none", ctx, parameter)
    return seconds


def budget_and_gpus(function: F) -> F:
    """Add --budget, --gpus and --executor."""
    for option in reversed(
        (
            click.option(
                "--budget",
                callback=_seconds,
                default=f"{DEFAULT_BUDGET_S / 60:.0f}m",
                show_default=True,
                metavar="TIME",
                help="Stop measuring after this time and use the best so far: 90s, 10m, 1h, "
                "none. Repeat the command to continue.",
            ),
            click.option("--gpus", metavar="LIST", help="Measure on these GPUs only, e.g. 0,1.  [default: all]"),
            click.option(
                "--executor",
                metavar="dask://HOST:PORT",
                help="Measure on the workers of a Dask cluster that "
                "offer the capability as a resource (sm90). tls://HOST:PORT uses its certificates. Needs "
                "pretuned[dask].",
            ),
        )
    ):
        function = option(function)
    return function


@dataclass(frozen=True, slots=True)
class HowMuch:
    """The options of ``aot measure`` on which cells to measure, and how.

    ``part`` is (number, count): the cells of one of several tuners.
    """

    share: float
    like: Path | None
    no_torch: bool
    quick: bool
    once: bool
    part: tuple[int, int] | None


def _part(ctx: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, int] | None:
    """Parse ``3/8`` into (3, 8)."""
    if value is None:
        return None
    match = re.fullmatch(r"([0-9]{1,3})/([0-9]{1,3})", value)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise click.BadParameter(f"'{value}' is no part; wanted e.g. 1/8, to 8/8", ctx, parameter)
    return int(match[1]), int(match[2])


def _share(ctx: click.Context, parameter: click.Parameter, value: float) -> float:
    if math.isnan(value):  # click's ranges accept NaN
        raise click.BadParameter("nan is no share, wanted more than 0 and at most 1", ctx, parameter)
    return value


def how_much(function: Callable[..., None]) -> Callable[..., None]:
    """Add the options of ``HowMuch``, which are passed on as ``how``."""

    @functools.wraps(function)
    def with_how(**values: Any) -> None:
        how = HowMuch(**{field.name: values.pop(field.name) for field in fields(HowMuch)})
        function(how=how, **values)

    wrapped: Callable[..., None] = with_how
    for option in reversed(
        (
            click.option(
                "--share",
                type=click.FloatRange(0, 1, min_open=True),
                default=SHARE,
                show_default=True,
                callback=_share,
                help="Measure this share of each cell's candidates. 1 measures all, into its own journal.",
            ),
            click.option(
                "--like",
                metavar="BUNDLE",
                type=file_path,
                help="Also try the choices of this bundle, measured on another GPU of the capability.",
            ),
            click.option(
                "--no-torch",
                is_flag=True,
                help="Do not time torch's grouped_mm, which aot report compares with and a build may choose.",
            ),
            click.option(
                "--quick",
                is_flag=True,
                help="Run two fifths of the rounds: more cells in the same time, less exact times.",
            ),
            click.option("--once", is_flag=True, help="Skip the second measurement pass."),
            click.option(
                "--part",
                metavar="N/OF",
                callback=_part,
                help="Measure one part of the cells, e.g. 1/8, if several tuners share them. Each has its "
                "own GPUs and journal.",
            ),
        )
    ):
        wrapped = option(wrapped)
    return wrapped


def ordinals(text: str | None) -> tuple[int, ...] | None:
    """Parse --gpus into ordinals."""
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[0-9]{1,4}", part) for part in parts):
        raise InputError(f"--gpus {text}: wanted ordinals, e.g. 0,1")
    return tuple(int(part) for part in parts)


def check_executor(executor: str | None, gpus: str | None) -> None:
    """Check that the cluster can be reached, before anything is compiled.

    Raises
    ------
    InputError, HostError
        as ``executors.dask.connected``.
    """
    if executor is None:
        return
    if gpus is not None:
        raise InputError("--gpus is of this machine, --executor measures on others: choose")
    from ..executors.dask import connected

    with connected(executor):
        pass


def tune(
    executor: str | None,
    gpus: Sequence[int] | None,
    problems: Mapping[Problem, Sequence[int]],
    candidates: Path,
    journal: Path,
    *,
    observers: TuneObservers,
    **how: Any,
) -> Outcome:
    """``tune_problems`` on this machine's GPUs, or on a cluster's."""
    if executor is None:
        return tune_problems(problems, candidates, journal, gpus=gpus, observers=observers, **how)
    from ..executors.dask import dask_gpus

    with dask_gpus(executor, candidates, observers.on_note) as there:
        return tune_problems(
            problems, candidates, journal, executors=there.joined(), joined=there.joined, observers=observers, **how
        )


class TuneProgress:
    """Shows the measuring: a bar with an ETA in a terminal, occasional lines elsewhere. ``quiet`` shows notes only.

    ``pause`` is called before the first line, to end the progress of compiling.
    """

    def __init__(self, quiet: bool, budget_s: float | None, pause: Callable[[], None] = lambda: None) -> None:
        self._quiet, self._budget_s, self._pause = quiet, budget_s, pause
        self._shown = Shown("measuring", quiet)

    def observers(self) -> TuneObservers:
        """The observers for the tuner."""
        return TuneObservers(self._start, self._cell, self._shown.say)

    def __enter__(self) -> TuneProgress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shown.stop()

    def _start(self, progress: CellsDone) -> None:
        self._pause()
        if self._quiet:
            return
        left = duration(progress.seconds_left)
        if progress.second_pass:
            self._shown.say(f"second pass: measuring {progress.total} cells again: about {left}")
        else:
            limit = f"; it stops after {duration(self._budget_s)} (--budget)" if self._budget_s is not None else ""
            before = f", {progress.done} of them measured before" if progress.done else ""
            self._shown.say(f"measuring {progress.total} cells{before}: about {left}{limit}")
        self._shown.start(progress.total, progress.done, f"cells, {left} left")

    def _cell(self, progress: CellsDone) -> None:
        if progress.last is None:
            return
        left, last = duration(progress.seconds_left), described(progress.last)
        failed = f", {progress.failed} variants failed" if progress.failed else ""
        line = f"{progress.done} of {progress.total} cells{failed}, about {left} left: {last}"
        self._shown.show(progress.done, f"cells, {left} left: {last}", line, last=progress.done == progress.total)


def described(record: Measured) -> str:
    """Describe the last cell in a line: the best time, compared with the modelled choice's and torch's."""
    times = {timing.variant: timing.time_ns for timing in record.timings}
    best = min(times.values())
    text = f"{record.problem} M={record.bucket} {best / 1000:.1f} us, {times[record.modelled] / best:.2f}x the modelled"
    return text + (f", {geometric_mean(record.torch_ns) / best:.2f}x torch" if record.torch_ns else "")


def outcome_text(outcome: Outcome) -> str:
    """Summarise the tuner's run, for the end of a command."""
    text = f"measured {outcome.measured} cells in {duration(outcome.seconds)} on {outcome.gpu.name}"
    text += f", {outcome.in_journal} were measured before" if outcome.in_journal else ""
    text += f", {outcome.remeasured} measured again in the second pass" if outcome.remeasured else ""
    if outcome.exhaustive:
        text += f"; {outcome.measurements} of {outcome.exhaustive} possible measurements"
    for count, what in (
        (outcome.too_large, "cells do not fit its memory and stay modelled"),
        (outcome.unable, "cells could not be measured and stay modelled"),
        (len(outcome.failures), "variants failed and are left out"),
        (outcome.left, "cells are left: repeat the command to measure them"),
        (outcome.to_remeasure, "cells are left for the second pass: repeat the command to measure them"),
    ):
        text += f"\n{count} {what}" if count else ""
    return text
