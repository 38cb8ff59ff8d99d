"""``python -m pretuned.runtime --prove``: test all code that was never run on these GPUs' capability.

A first use tests code, too, but in the process that serves: code that hangs or faults takes that along. Here child
processes test it, and where one ends the next goes on after it. Results are remembered (``runtime/verdicts.py``).
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
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import IO, Any, NamedTuple

from ...artifacts.errors import CudaError, HostError
from ...artifacts.names import printable
from ...artifacts.records.target import LocalGpu
from .. import verdicts
from ..dispatch import snapshot as dispatch_snapshot
from .doctor import gpus_and_driver
from .survey import Unproven, survey

CHILD: tuple[str, ...] = (sys.executable, "-m", "pretuned.runtime.inspect.prover")
SILENT_S = 300.0  # that a child may say nothing: it imports torch, and its disk may be slow
_END_S = 10.0  # for it to end, once it is told to
_MOST_LOST = 3  # children in a row that end at their first variant, by nothing that it did
_LONGEST_LINE = 1 << 16  # characters of a child's output that are looked at together


@dataclass(frozen=True, slots=True)
class GpuProof:
    """What was found on one GPU.

    ``wrong`` has a line to file for each variant that is left out from now on. ``untested`` says of how many variants
    nothing is known yet, and why: the next time they are tested again.
    """

    gpu: str
    judged: int
    proven: int
    wrong: tuple[str, ...]
    untested: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class ProofReport:
    """What ``prove`` found."""

    gpus: tuple[GpuProof, ...]

    @property
    def ok(self) -> bool:
        """Whether all was tested and nothing is wrong; true where there is no GPU."""
        return not any(one.wrong or one.untested for one in self.gpus)

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
            lines += [f"untested  {line}. Run this again to test them" for line in one.untested]
        return "\n".join(map(printable, (*lines, "ok        " + ("yes" if self.ok else "no"))))


def examine() -> ProofReport:
    """Test all that is left on every GPU of this machine; without a GPU there is nothing to test.

    Raises
    ------
    HostError
        where no process can be had that does it.
    """
    try:
        gpus, _ = gpus_and_driver()
    except CudaError:  # no driver
        gpus = ()
    return prove(gpus)


def prove(gpus: Sequence[LocalGpu]) -> ProofReport:
    """Test all that is left on these GPUs, one after another. Raises as ``examine`` does."""
    snapshot = dispatch_snapshot.snapshot()
    found = []
    for device, local in enumerate(gpus):
        began, untested = time.perf_counter(), Counter[str]()
        for one, result in _results(device, survey(snapshot, local).left):
            if result.untested is None:
                verdicts.note(one.variant, local, verdicts.verdict(result.wrong is None, result.wrong or ""))
            else:
                untested[result.untested] += 1
        snapshot.reconsider()
        after = survey(snapshot, local)
        lines = tuple(f"{count} variant{'s'[: count > 1]}: {why}" for why, count in untested.items())
        seconds = time.perf_counter() - began
        found.append(GpuProof(str(local), after.judged, after.proven, after.wrong, lines, seconds))
    return ProofReport(tuple(found))


class _Result(NamedTuple):
    """What a variant gets wrong, None where it is right; or why it could not be tested."""

    wrong: str | None = None
    untested: str | None = None
    lost: bool = False  # its process ended, by nothing that is known to be the variant's doing


def _results(device: int, left: Sequence[Unproven]) -> Iterator[tuple[Unproven, _Result]]:
    """The result of each variant. A child that ends early is followed by another, which begins after its last."""
    first, lost = True, 0
    while left:
        done, result = 0, _Result()
        with _Child(device, left) as child:
            for result in child.results():
                yield left[done], result
                done += 1
        if not done:
            why = f"a process that tests code could not begin: {child.last_words()}"
            if first:
                raise HostError(why)
            lost, result = _MOST_LOST, _Result(untested=why)
        lost = lost + 1 if done <= 1 and (result.lost or not done) else 0
        left, first = left[done:], False
        if lost >= _MOST_LOST:
            yield from ((one, result) for one in left)
            return


class _Child:
    """A process that tests variants one after another and tells of each when it begins and what it found."""

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

    def results(self) -> Iterator[_Result]:
        """The result of each variant, in order, up to the one during which the process ended."""
        begun = False
        for _ in range(2 * self._count):
            try:
                line = self._lines.get(timeout=SILENT_S)
            except queue.Empty:
                line, ending = None, f"the process that tested it said nothing for {SILENT_S:.0f} s"
            else:
                ending = "" if line else self._ending()
            if line is None:
                if begun:
                    yield _Result(untested=ending, lost=True)
                return
            told = json.loads(line)
            begun = "begin" in told
            if not begun:
                yield _Result(**told)

    def _ending(self) -> str:
        try:
            code = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return "the process that tested it closed its output and went on"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"the process that tested it ended by {signal.Signals(-code).name}"
        return f"the process that tested it ended with exit code {code}: {self.last_words()}"

    def last_words(self) -> str:
        """The last line that it wrote to its standard error."""
        self._readers[1].join(_END_S)
        return next((line for line in reversed(self._errors) if line), "it said nothing")


def _lines(stream: IO[str]) -> Iterator[str]:
    """Its lines; of one that does not end, pieces."""
    return iter(lambda: stream.readline(_LONGEST_LINE), "")
