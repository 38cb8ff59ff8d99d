"""Which tests are run for a change of a line: first those that reach it, the quick ones before the others."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest

_LIMIT_S = 300
_NOTICED_S = 30  # of those whose times are known; and, as a loop without an end is sooner told by it, of the CPU:
_NOTICED_CPU_S = 10


class Told(NamedTuple):
    """A test: what it took, and the lines of the file that it came through in its own process."""

    name: str
    seconds: float
    lines: frozenset[int]


class _Watch:
    """A plugin that writes down, for each test that passes, its time and the lines of one file."""

    def __init__(self, file: Path, out: Path) -> None:
        self.file, self.out, self.lines, self.timed = str(file), out, set[int](), list[Any]()

    def _line(self, frame: FrameType, event: str, _: object) -> Any:
        self.lines.add(frame.f_lineno)
        return self._line

    def _call(self, frame: FrameType, event: str, _: object) -> Any:
        return self._line if frame.f_code.co_filename == self.file else None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, bool | None, bool | None]:
        self.lines.clear()
        threading.settrace(self._call)
        sys.settrace(self._call)
        begin = time.monotonic()
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type] # as it was
            self.timed.append((item.nodeid, time.monotonic() - begin, sorted(self.lines)))

    def pytest_sessionfinish(self) -> None:
        self.out.write_text(json.dumps(self.timed))


class _Order:
    """A plugin that leaves only these tests, in this order."""

    def __init__(self, names: list[str]) -> None:
        self.names = {name: i for i, name in enumerate(names)}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted(
            (item for item in items if item.nodeid in self.names), key=lambda item: self.names[item.nodeid]
        )


def passes(place: Path, tests: tuple[str, ...], plugin: object = None, seconds: float | None = None) -> bool:
    """Return True if all tests pass with the product at ``place``, in a child, within a limit: some changes never end.

    ``seconds``: what they took when they passed.
    """
    if "pretuned" in sys.modules:
        raise RuntimeError("the product is imported here already: a child would have that one")
    child = os.fork()
    if not child:
        os.setpgid(0, 0)
        os.environ |= {"PYTHONPATH": str(place), "PYTHONDONTWRITEBYTECODE": "1"}
        sys.path.insert(0, str(place))
        sys.dont_write_bytecode = True
        out = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(out, fd)
        signal.alarm(_LIMIT_S if seconds is None else int(_NOTICED_S + 10 * seconds))
        if seconds is not None:
            signal.setitimer(signal.ITIMER_PROF, _NOTICED_CPU_S + 10 * seconds)
        preloaded = ("-W", "ignore::pytest.PytestAssertRewriteWarning")
        options = ["-q", "-x", "-m", "not slow", "-p", "no:cacheprovider", *preloaded, *tests]
        os._exit(int(pytest.main(options, plugins=[plugin] if plugin else [])))
    _, status = os.waitpid(child, 0)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what it left behind
    return os.waitstatus_to_exitcode(status) == 0


def timed(place: Path, file: str, tests: tuple[str, ...]) -> list[Told] | None:
    """Return the lines that a file's tests reach, the quick tests first; None if one fails."""
    out = place / "told.json"
    if not passes(place, tests, _Watch(place / "pretuned" / file, out)):
        return None
    rows = [Told(name, seconds, frozenset(lines)) for name, seconds, lines in json.loads(out.read_text())]
    return sorted(rows, key=lambda row: row.seconds)


def noticed(place: Path, lines: range, tests: list[Told]) -> bool:
    """Return True if a test notices a change in these lines: one that reaches them, or any other."""
    near = [test for test in tests if not test.lines.isdisjoint(lines)]
    for some in (near, [test for test in tests if test not in near]):
        files = dict.fromkeys(value.name.split("::")[0] for value in some)
        order = _Order([value.name for value in some])
        if some and not passes(place, tuple(files), order, sum(value.seconds for value in some)):
            return True
    return False
