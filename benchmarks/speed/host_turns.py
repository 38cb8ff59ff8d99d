"""Two processes of two checkouts in lock step: each runs one small batch of a call when it is asked, else it waits.

Both ends of the pipe are here. ``serve`` is the measured process: it reads a call's name a line and answers with the
time of one batch, until its stdin ends. ``Process`` starts one, ``pair`` asks two of them in turn. Two batches that
follow each other are of the same few milliseconds, so what else the machine does then slows both.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO

Timed = dict[str, tuple[Callable[[], object], int]]  # a call by its name, and how many are a batch
TREES = ("old", "new")
ASKED = ("batches", "work")  # the modes of a measured process
WARM = 20  # untimed runs of each call: afterwards the timed ones are replayed
VISIT = 9  # batches of a call before the next call's turn; odd, so that the trees begin equally often
START_S, BATCH_S = 600, 120  # seconds that a process may take to start, and for a batch
TAIL_LINES = 20  # lines of stderr reported for a process that ended


class Ended(RuntimeError):
    """Raised if a measured process ended or did not answer."""


class Batch(NamedTuple):
    """Microseconds of a call, and the machine's clock when the batch began and ended, in seconds."""

    us: float
    began: float
    ended: float


class Turn(NamedTuple):
    """A batch with its tree and call."""

    tree: str
    call: str
    batch: Batch


def answers() -> TextIO:
    """Keep this process's stdout for answers: other prints go to stderr."""
    own = os.fdopen(os.dup(1), "w")
    sys.stdout.flush()
    os.dup2(2, 1)
    return own


def tell(to: TextIO, answer: object) -> None:
    to.write(json.dumps(answer) + "\n")
    to.flush()


def batch_of(call: Callable[[], object], calls: int, settle: Callable[[], object]) -> Batch:
    """Run an untimed quarter batch to warm the caches, then a timed batch. ``settle`` waits for the GPU."""
    gc.collect()
    for _ in range(calls // 4 + 1):
        call()
    settle()
    began = time.perf_counter()
    for _ in range(calls):
        call()
    us = (time.perf_counter() - began) / calls * 1e6
    settle()
    return Batch(us, began, time.perf_counter())


def serve(timed: Timed, settle: Callable[[], object], about: dict[str, Any], to: TextIO) -> None:
    """Write ``about`` and the calls' names, then a batch of each call that a line of stdin names, until stdin ends."""
    for call, _ in timed.values():
        for _ in range(WARM):
            call()
    settle()
    gc.collect()
    gc.freeze()  # so that collecting between batches takes no time
    gc.disable()
    with contextlib.suppress(BrokenPipeError):  # the parent has ended
        tell(to, {"calls": list(timed), "about": about})
        for line in sys.stdin:
            tell(to, batch_of(*timed[line.strip()], settle))


def cores(count: int) -> list[int]:
    """The last ``count`` cores that this process may use, or all if there are fewer; an empty list for 0."""
    return sorted(os.sched_getaffinity(0))[-count:] if count else []


class Process:
    """A measured process of a tree: ``command``, with ``path`` first on Python's path, on ``pinned`` cores only."""

    def __init__(self, tree: str, command: list[str], path: Path, seed: int, pinned: list[int]) -> None:
        self.tree = tree
        places = os.pathsep.join(filter(None, (str(path), os.environ.get("PYTHONPATH"))))
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env=os.environ | {"PYTHONPATH": places, "PYTHONHASHSEED": str(seed)},
            preexec_fn=(lambda: os.sched_setaffinity(0, pinned)) if pinned else None,
        )

    def _ended(self, what: str) -> Ended:
        self._stderr.seek(0)
        tail = self._stderr.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
        return Ended("\n  ".join([f"the process of the {self.tree} tree {what}. Its stderr ends with", *tail]))

    def answer(self, seconds: float = BATCH_S) -> Any:
        """The process's next line, within so many seconds.

        Raises Ended if the process ends or takes longer, with the end of its stderr.
        """
        stdout = self._process.stdout
        assert stdout is not None
        ready, _, _ = select.select([stdout], [], [], seconds)
        if not ready:
            self._process.kill()
            raise self._ended(f"gave no answer in {seconds:g} s")
        line = stdout.readline()  # one request at a time, so no second line is in the buffer
        if not line.endswith(b"\n"):
            raise self._ended(f"ended with {self._process.wait()}")
        return json.loads(line)

    def batch(self, call: str) -> Batch:
        """Ask the process for one batch of a call."""
        stdin = self._process.stdin
        assert stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the missing answer reports why the process died
            stdin.write(f"{call}\n".encode())
            stdin.flush()
        return Batch(*self.answer())

    def end(self) -> None:
        """Close the process's stdin, which makes it end; kill it if it is busy."""
        with contextlib.suppress(BrokenPipeError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._stderr.close()


@contextlib.contextmanager
def running(make: Callable[[str], Process], trees: tuple[str, ...] = TREES) -> Iterator[dict[str, Process]]:
    """Start a process of each tree at the same time; all end with the block."""
    started: dict[str, Process] = {}
    try:
        for tree in trees:
            started[tree] = make(tree)
        yield started
    finally:
        for process in started.values():
            process.end()


def pair(two: dict[str, Process], calls: list[str], batches: int) -> list[Turn]:
    """Run so many batches of each call in both processes, one at a time: old, new, new, old, old, new, ...

    A call has ``VISIT`` batches, then the next call follows: each call is spread over the whole time of a pair.
    """
    return [
        Turn(tree, call, two[tree].batch(call))
        for first in range(0, batches, VISIT)
        for call in calls
        for turn in range(first, min(first + VISIT, batches))
        for tree in (TREES if turn % 2 == 0 else TREES[::-1])
    ]
