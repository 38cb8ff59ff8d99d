"""``python -m pretuned.runtime --prove``: all code that was never run on these GPUs' capability, in a child process.

A first use proves code, too, but in the process that serves: code that hangs or faults takes that along. Here it takes
a child along, and the next child goes on after it. What is found is remembered (``runtime/verdicts.py``).
"""

from __future__ import annotations

import contextlib
import json
import queue
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import IO, Any

from ...artifacts.errors import CudaError, HostError
from ...artifacts.names import printable
from ...artifacts.records.target import LocalGpu
from .. import verdicts
from ..dispatch import snapshot as dispatch_snapshot
from .doctor import gpus_and_driver
from .survey import Unproven, survey

CHILD: tuple[str, ...] = (sys.executable, "-m", "pretuned.runtime.inspect.prover")
START_S = 300.0  # until a child has imported torch and begun
LONGEST_S = 60.0  # for one variant
_END_S = 10.0  # for it to end, once it is told to
_LONGEST_LINE = 1 << 16  # characters of a child's output that are looked at together


@dataclass(frozen=True, slots=True)
class GpuProof:
    """What was proven on one GPU; ``wrong`` has a line to file for each variant that is left out from now on."""

    gpu: str
    judged: int
    proven: int
    wrong: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class ProofReport:
    """What ``prove`` found."""

    gpus: tuple[GpuProof, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong; true where there is no GPU."""
        return not any(one.wrong for one in self.gpus)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values."""
        return {"ok": self.ok, "gpus": [asdict(one) for one in self.gpus]}

    def __str__(self) -> str:
        lines = [] if self.gpus else ["GPU       none: nothing to prove"]
        for i, one in enumerate(self.gpus):
            lines.append(f"GPU {i}     {one.gpu}")
            lines.append(f"judged    {one.judged} variants, before, on this capability")
            lines.append(f"proven    {one.proven} variants, on this GPU ({one.seconds:.1f} s)")
            lines += [f"wrong     {line}" for line in one.wrong] or ["wrong     none"]
        return "\n".join(map(printable, (*lines, "ok        " + ("yes" if self.ok else "no"))))


def examine() -> ProofReport:
    """Prove all that is left on every GPU of this machine; without one there is nothing to prove.

    Raises
    ------
    HostError
        where no process can be had that does it, or its GPU has no room.
    """
    try:
        gpus, _ = gpus_and_driver()
    except CudaError:  # no driver
        gpus = ()
    return prove(gpus)


def prove(gpus: Sequence[LocalGpu]) -> ProofReport:
    """The same on these GPUs, one after another."""
    snapshot = dispatch_snapshot.snapshot()
    found = []
    for device, local in enumerate(gpus):
        began = time.perf_counter()
        for one, wrong in _proofs(device, survey(snapshot, local).left):
            verdicts.note(one.variant, local, verdicts.verdict(wrong is None, wrong or ""))
        snapshot.reconsider()
        after = survey(snapshot, local)
        found.append(
            GpuProof(str(local), after.judged, after.proven, after.wrong, time.perf_counter() - began)
        )  # fmt: skip
    return ProofReport(tuple(found))


def _proofs(device: int, left: Sequence[Unproven]) -> Iterator[tuple[Unproven, str | None]]:
    """What each gets wrong. A child that hangs or dies over one is followed by another, which begins after it."""
    while left:
        done = 0
        with _Child(device, left) as child:
            for found in child.found():
                yield left[done], found
                done += 1
        if not done:
            raise HostError(f"a process that proves code could not begin: {child.last_words()}")
        left = left[done:]


class _Child:
    """A process that tries variants one after another and tells of each when it begins and what it found."""

    def __init__(self, device: int, left: Sequence[Unproven]) -> None:
        self._mark = f"pretuned-proof {secrets.token_hex(16)} "  # code prints to the same output, and can't know it
        asked = [[one.bundle.path, one.bundle.digest.hex(), one.index] for one in left]
        self._asked = json.dumps([self._mark, device, asked])
        self._count = len(left)
        self._lines: queue.Queue[str | None] = queue.Queue()

    def __enter__(self) -> _Child:
        try:
            self._process = subprocess.Popen(
                CHILD, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8",
                errors="replace",
            )  # fmt: skip
        except OSError as error:
            raise HostError(f"can't start {CHILD[0]!r}: {error.strerror or error}") from error
        self._errors: list[str] = []
        self._readers = [threading.Thread(target=one, daemon=True) for one in (self._read_lines, self._read_errors)]
        for one in self._readers:
            one.start()
        with contextlib.suppress(OSError):  # it died already: its end is read below
            self._stdin.write(self._asked)
            self._stdin.close()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that the driver holds is left to it
            self._process.wait(_END_S)
        for one in self._readers:
            one.join(_END_S)

    @property
    def _stdin(self) -> IO[str]:
        assert self._process.stdin is not None
        return self._process.stdin

    def _read_lines(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in _lines(lines):
                if line.startswith(self._mark):
                    self._lines.put(line.removeprefix(self._mark))
        self._lines.put(None)

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in _lines(lines):
                self._errors = [*self._errors[-20:], line.strip()]

    def found(self) -> Iterator[str | None]:
        """What each variant gets wrong, in order, up to the one that ends the process: of that, how."""
        begun = False
        for _ in range(2 * self._count):
            try:
                line = self._lines.get(timeout=LONGEST_S if begun else START_S)
            except queue.Empty:
                if begun:
                    yield f"it did not end within {LONGEST_S:.0f} s"
                return
            if line is None:
                if begun:
                    yield self._ending()
                return
            told = json.loads(line)
            if "stopped" in told:
                raise HostError(f"a process that proves code can't go on: {told['stopped']}")
            begun = "begin" in told
            if not begun:
                yield told["wrong"]

    def _ending(self) -> str:
        try:
            code = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return "the process that ran it closed its output and went on"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"the process that ran it ended by {signal.Signals(-code).name}"
        return f"the process that ran it ended with exit code {code}: {self.last_words()}"

    def last_words(self) -> str:
        """The last line that it wrote to its standard error."""
        self._readers[1].join(_END_S)
        return next((line for line in reversed(self._errors) if line), "it said nothing")


def _lines(stream: IO[str]) -> Iterator[str]:
    """Its lines; of one that does not end, pieces."""
    return iter(lambda: stream.readline(_LONGEST_LINE), "")
