"""What is seen while a build runs: a bar with an ETA in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from ...artifacts.names import printable
from ..build import Observers
from ..outcome import TuneObservers
from ..workers import Result
from .echo import echo

_LINE_EVERY_S = 5.0


class Progress:
    """Counts the variants of a build as they are ready. ``quiet`` shows nothing but warnings."""

    def __init__(self, quiet: bool, verbose: bool) -> None:
        self._quiet, self._verbose = quiet, verbose
        self._bar = _Bar() if not quiet and sys.stderr.isatty() else None
        self._total = self._done = self._cached = self._failed = 0
        self._begun = self._last_line = time.monotonic()

    def observers(self, tune: TuneObservers | None = None) -> Observers:
        """To hand to ``build``; ``tune`` shows the measuring."""
        return Observers(self._start, self._result, self._say, tune or TuneObservers())

    def pause(self) -> None:
        """Take the bar away: something else is shown from here on."""
        if self._bar:
            self._bar.stop()
            self._bar = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar:
            self._bar.stop()

    def _start(self, total: int) -> None:
        self._total = total
        self._begun = self._last_line = time.monotonic()
        if self._bar:
            self._bar.start(total)

    def _result(self, result: Result) -> None:
        self._done += 1
        self._cached += result.cached
        self._failed += result.compiled is None
        if result.compiled is None and self._verbose:
            self._say(f"failed: {result.reason}")
        if self._bar:
            self._bar.show(self._done, self._counts())
        elif not self._quiet and not result.cached:
            self._line()

    def _line(self) -> None:
        now = time.monotonic()
        if now - self._last_line < _LINE_EVERY_S and self._done < self._total:
            return
        self._last_line = now
        fresh = self._done - self._cached
        left_s = (now - self._begun) / fresh * (self._total - self._done)
        text = f"{self._done} of {self._total} variants{self._counts()}"
        echo(text + (f", about {left_s:.0f} s left" if self._done < self._total else ""), err=True)

    def _counts(self) -> str:
        return (f", {self._cached} cached" if self._cached else "") + (
            f", {self._failed} failed" if self._failed else ""
        )

    def _say(self, note: str) -> None:
        if self._bar:
            self._bar.say(note)
        else:
            echo(note, err=True)


class _Bar:
    """rich's bar; rich is imported for a terminal only."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._rich = Progress(
            TextColumn("compiling"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("variants{task.fields[counts]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )

    def start(self, total: int) -> None:
        self._task = self._rich.add_task("", total=total, counts="")
        self._rich.start()

    def show(self, done: int, counts: str) -> None:
        self._rich.update(self._task, completed=done, counts=counts)

    def say(self, note: str) -> None:
        self._rich.console.print(printable(note), markup=False, highlight=False)

    def stop(self) -> None:
        self._rich.stop()
