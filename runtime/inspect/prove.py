"""``python -m pretuned.runtime --self-test``: test all kernels that were never run on these GPUs' capability.

A first use tests code, too, but in the process that serves: code that hangs or faults takes that along. Here child
processes test it, and where one ends the next goes on after it. Results are remembered (``runtime/verdicts.py``).
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from ...artifacts.errors import CudaError, HostError
from ...artifacts.names import printable
from ...artifacts.records.target import LocalGpu
from .. import verdicts
from ..dispatch import snapshot as dispatch_snapshot
from .doctor import gpus_and_driver
from .survey import Untested, survey

CHILD: tuple[str, ...] = (sys.executable, "-m", "pretuned.runtime.inspect.prover")
SILENT_S = 300.0  # that a child may say nothing: it imports torch, and its disk may be slow
_END_S = 10.0  # for it to end, once it is told to
_MOST_LOST = 3  # variants in a row whose process ends in one way, by nothing that they did
_MOST_REASONS = 10  # that are listed
_LONGEST_LINE = 1 << 16  # characters of what a child prints that are kept as one


@dataclass(frozen=True, slots=True)
class GpuSelfTest:
    """What was found on one GPU.

    ``wrong`` has a line to file for each variant that is left out from now on. ``untested`` says of how many variants
    nothing is known yet, and why: the next time they are tested again.
    """

    gpu: str
    tested_before: int
    passed: int
    wrong: tuple[str, ...]
    untested: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class SelfTestReport:
    """What ``prove`` found."""

    gpus: tuple[GpuSelfTest, ...]

    @property
    def ok(self) -> bool:
        """Whether all was tested and nothing is wrong; true where there is no GPU."""
        return not any(one.wrong or one.untested for one in self.gpus)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values."""
        return {"ok": self.ok, "gpus": [asdict(one) for one in self.gpus]}

    def __str__(self) -> str:
        lines = [] if self.gpus else ["GPU       none: nothing to test"]
        for i, one in enumerate(self.gpus):
            lines.append(f"GPU {i}     {one.gpu}")
            lines.append(f"tested    {one.tested_before} kernels, before, on this capability")
            lines.append(f"passed    {one.passed} kernels, on this GPU ({one.seconds:.1f} s)")
            lines += [f"wrong     {line}" for line in one.wrong] or ["wrong     none"]
            lines += [f"untested  {line}. Run this again to test them" for line in one.untested]
        return "\n".join(map(printable, (*lines, "ok        " + ("yes" if self.ok else "no"))))


def examine() -> SelfTestReport:
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


def prove(gpus: Sequence[LocalGpu]) -> SelfTestReport:
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
        lines = [f"{count} kernel{'s'[: count > 1]}: {why}" for why, count in untested.most_common(_MOST_REASONS)]
        if (rest := untested.total() - sum(count for _, count in untested.most_common(_MOST_REASONS))) > 0:
            lines.append(f"{rest} more, for other reasons")
        seconds = time.perf_counter() - began
        found.append(GpuSelfTest(str(local), after.tested, after.passed, after.wrong, tuple(lines), seconds))
    return SelfTestReport(tuple(found))


class _Result(NamedTuple):
    """What a variant gets wrong, None where it is right; or why it could not be tested."""

    wrong: str | None = None
    untested: str | None = None
    ends: bool = False  # the process that tested it, or can't go on


def _results(device: int, left: Sequence[Untested]) -> Iterator[tuple[Untested, _Result]]:
    """The result of each variant. A child that ends is followed by another, which goes on with the next variant."""
    with contextlib.ExitStack() as running:
        child: _Child | None = None
        lost: list[_Result] = []
        for number, one in enumerate(left):
            if child is None:
                child = running.enter_context(_Child())
                if (why := child.not_ready()) is not None:
                    if not number:
                        raise HostError(why)
                    yield from ((rest, _Result(untested=why)) for rest in left[number:])
                    return
            result = child.test(device, one)
            yield one, result
            ended = result.ends and result.untested is not None  # by nothing that is known to be the variant's doing
            lost = [*(each for each in lost if each == result), result] if ended else []
            if len(lost) == _MOST_LOST:
                yield from ((rest, result) for rest in left[number + 1 :])
                return
            if result.ends:
                running.close()
                child = None


class _Child:
    """A process that tests variants one after another (``prover.py``)."""

    def __init__(self) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    (*CHILD, str(theirs.fileno())), pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, encoding="utf-8", errors="replace",
                )  # fmt: skip
            except OSError as error:
                raise HostError(f"can't start {CHILD[0]!r}: {error.strerror or error}") from error
        self._errors: deque[str] = deque(maxlen=20)
        self._reader = threading.Thread(target=self._read_errors, daemon=True)
        self._reader.start()

    def __enter__(self) -> _Child:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that the driver holds is left to it
            self._process.wait(_END_S)
        self._pipe.close()

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as lines:
            for line in iter(lambda: lines.readline(_LONGEST_LINE), ""):
                if line.strip():
                    self._errors.append(line.strip())

    def not_ready(self) -> str | None:
        """Why no variant can be tested by it; None where one can."""
        if self._answer() is not None:
            return None
        return f"a process that tests code could not begin: {self._last_words()}"

    def test(self, device: int, one: Untested) -> _Result:
        """The result of a variant; of one during which the process ends without any, how it ends."""
        with contextlib.suppress(OSError):  # it died: its end is told below
            asked = [device, one.bundle.path, one.bundle.digest.hex(), one.index]
            self._pipe.send_bytes(json.dumps(asked).encode())
        answer = self._answer()
        if answer is None:
            return _Result(untested=self._ending(), ends=True)
        return _Result(**json.loads(answer))

    def _answer(self) -> bytes | None:
        """Its next message; None where it ended, or says nothing for long."""
        with contextlib.suppress(OSError, EOFError):
            return self._pipe.recv_bytes() if self._pipe.poll(SILENT_S) else None
        return None

    def _ending(self) -> str:
        try:
            code = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return f"the process that tested it said nothing for {SILENT_S:.0f} s"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"the process that tested it ended by {signal.Signals(-code).name}"
        return f"the process that tested it ended with exit code {code}: {self._last_words()}"

    def _last_words(self) -> str:
        """The last line that it wrote to its standard error."""
        self._reader.join(_END_S)
        return self._errors[-1] if self._errors else "it said nothing"
