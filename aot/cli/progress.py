"""Show the progress of a verb: a bar in a terminal, occasional lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

from ...artifacts.limits import printable
from ..build.options import Observers
from ..compile.pool import CompileResult
from ..tune.scheduler import TuneObservers
from .table import echo

_LINE_EVERY_S = 5.0


class Shown:
    """A bar of ``what`` in a terminal, lines elsewhere; ``quiet`` and ``notes`` as for ``Progress``."""

    def __init__(self, what: str, quiet: bool, notes: bool = True) -> None:
        self._what, self._quiet, self._notes = what, quiet, notes
        self._rich: Any = None
        self._last_line = 0.0

    def __enter__(self) -> Shown:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, total: int, done: int = 0, text: str = "") -> None:
        """Begin, with ``done`` of ``total``."""
        self._last_line = time.monotonic()
        self.stop()
        if self._quiet or not sys.stderr.isatty():
            return
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        console = Console(stderr=True)
        if console.is_dumb_terminal:
            return
        columns = (
            TextColumn(self._what),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.description}", markup=False),
        )
        self._rich = Progress(*columns, console=console, transient=True)
        self._task = self._rich.add_task(text, total=total, completed=done)
        self._rich.start()

    def show(self, done: int, text: str, line: str, *, last: bool) -> None:
        """Show that ``done`` are ready; without a bar, print ``line`` if it is time or the ``last``."""
        if self._rich is not None:
            self._rich.update(self._task, completed=done, description=printable(text))
        elif not self._quiet and (last or time.monotonic() - self._last_line >= _LINE_EVERY_S):
            self._last_line = time.monotonic()
            echo(line, err=True)

    def say(self, note: str) -> None:
        """Print a remark."""
        if not self._notes and note.startswith("note: "):
            return
        if self._rich is not None:
            self._rich.console.print(printable(note), markup=False, highlight=False)
        else:
            echo(note, err=True)

    def stop(self) -> None:
        """Remove the bar."""
        if self._rich is not None:
            self._rich.stop()
            self._rich = None


class Progress:
    """Counts the variants of a build as they are ready. ``quiet``: only warnings, and ``notes`` if wanted."""

    def __init__(self, quiet: bool, verbose: bool, notes: bool = True) -> None:
        self._verbose, self._shown = verbose, Shown("compiling", quiet, notes)
        self._total = self._done = self._shipped = self._cached = self._failed = 0
        self._begun, self._started = time.monotonic(), False

    def observers(self, tune: TuneObservers | None = None) -> Observers:
        """The observers for ``build``; ``tune`` shows the measuring."""
        return Observers(self._start, self._result, self._shown.say, tune or TuneObservers())

    def pause(self) -> None:
        """Remove the bar, as other progress follows."""
        self._shown.stop()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shown.stop()

    def _start(self, total: int) -> None:
        self._total, self._begun, self._started = total, time.monotonic(), False

    def _result(self, result: CompileResult) -> None:
        self._done += 1
        self._shipped += result.shipped
        self._cached += result.cached
        self._failed += result.compiled is None
        if result.compiled is None and self._verbose:
            self._shown.say(f"failed: {result.reason}")
        if result.cached or result.shipped:
            return
        if not self._started:  # no bar where nothing is compiled
            self._started = True
            self._shown.start(self._total)
        left = self._total - self._done
        left_s = (time.monotonic() - self._begun) / (self._done - self._cached - self._shipped) * left
        counts = (("shipped", self._shipped), ("cached", self._cached), ("failed", self._failed))
        text = "variants" + "".join(f", {count} {name}" for name, count in counts if count)
        text += f", about {left_s:.0f} s left" if left else ""
        self._shown.show(self._done, text, f"{self._done} of {self._total} {text}", last=not left)
