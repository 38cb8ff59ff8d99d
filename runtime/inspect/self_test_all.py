"""``python -m pretuned.runtime --self-test``: test all kernels that were never run on these GPUs' capability.

A first use tests code, too, but in the process that serves: code that hangs or faults takes that along. Here child
processes test it. If a child dies, the next goes on after the kernel that ended it. ``runtime/self_test_results.py``
keeps the results.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from subprocess import DEVNULL
from typing import Any

from ...artifacts.errors import CudaError, HostError
from ...artifacts.limits import printable
from ...artifacts.records import LocalGpu
from .. import self_test_results
from ..dispatch import snapshot as dispatch_snapshot
from .doctor import Untested, gpus_and_driver, survey

CHILD: tuple[str, ...] = (sys.executable, "-m", "pretuned.runtime.inspect.self_test_child")
SILENT_S = 300.0  # longest silence of a child: it imports torch from a slow disk, and a hanging kernel takes 30 s
_END_S = 10.0  # wait for the child to end after it was asked to
_MOST_LOST = 3  # stop after so many variants in a row lose their process in one way: it is not the variants' fault
_MOST_REASONS = 10  # failures listed in a report
_MOST_WORDS = 1 << 16  # bytes of what a child prints that are read


@dataclass(frozen=True, slots=True)
class GpuSelfTest:
    """The self-test's results on one GPU.

    ``wrong`` has a line to report for each variant that is left out from now on. ``untested`` says how many variants
    have no result yet, and why: the next self-test tries them again.
    """

    gpu: str
    tested_before: int
    passed: int
    wrong: tuple[str, ...]
    untested: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class SelfTestReport:
    """The report of ``run``."""

    gpus: tuple[GpuSelfTest, ...]

    @property
    def ok(self) -> bool:
        """True if all was tested and nothing is wrong; true where there is no GPU."""
        return not any(result.wrong or result.untested for result in self.gpus)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values."""
        return {"ok": self.ok, "gpus": [asdict(result) for result in self.gpus]}

    def __str__(self) -> str:
        lines = [] if self.gpus else ["GPU       none: nothing to test"]
        for i, result in enumerate(self.gpus):
            lines.append(f"GPU {i}     {result.gpu}")
            lines.append(f"tested    {result.tested_before} kernels, before, on this capability")
            lines.append(f"passed    {result.passed} kernels, on this GPU ({result.seconds:.1f} s)")
            lines += [f"wrong     {line}" for line in result.wrong] or ["wrong     none"]
            lines += [f"untested  {line}. Run this again to test them" for line in result.untested]
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
    return run(gpus)


def run(gpus: Sequence[LocalGpu]) -> SelfTestReport:
    """Test all that is left on these GPUs, one after another. Raises as ``examine`` does."""
    snapshot = dispatch_snapshot.snapshot()
    results = []
    for device, local in enumerate(gpus):
        began, untested = time.perf_counter(), Counter[str]()
        for entry, wrong, reason in _results(device, survey(snapshot, local).left):
            if reason is None:
                self_test_results.note(
                    entry.variant, local, self_test_results.result_of_today(wrong is None, wrong or "")
                )
            else:
                untested[reason] += 1
        snapshot.reconsider()
        after = survey(snapshot, local)
        lines = [f"{count} kernel{'s'[: count > 1]}: {why}" for why, count in untested.most_common(_MOST_REASONS)]
        if (rest := untested.total() - sum(count for _, count in untested.most_common(_MOST_REASONS))) > 0:
            lines.append(f"{rest} more, for other reasons")
        seconds = time.perf_counter() - began
        results.append(GpuSelfTest(str(local), after.tested, after.passed, after.wrong, tuple(lines), seconds))
    return SelfTestReport(tuple(results))


def _results(device: int, left: Sequence[Untested]) -> Iterator[tuple[Untested, str | None, str | None]]:
    """Yield (variant, fault, reason why it could not be tested) of each; both are None for a right variant.

    If a child ends, another goes on with the next variant.
    """
    done, lost, last = 0, 0, ""  # lost: number of children in a row that ended in the way ``last``
    while done < len(left):
        with _child() as (process, pipe, last_words):
            if _message(pipe) is None:
                why = f"a process that tests code could not begin: {last_words()}"
                if not done:
                    raise HostError(why)
                yield from ((rest, None, why) for rest in left[done:])
                return
            jobs = [[device, entry.bundle.path, entry.bundle.digest.hex(), entry.index] for entry in left[done:]]
            with contextlib.suppress(OSError):  # it died: the missing message says so
                pipe.send_bytes(json.dumps(jobs).encode())
            ends = False
            while not ends and done < len(left):
                message = _message(pipe)
                wrong, untested, ends = (
                    (None, _ending(process, last_words), True) if message is None else json.loads(message)
                )
                yield left[done], wrong, untested
                done += 1
                lost = 0 if not ends or untested is None else lost + 1 if untested == last else 1
                last = untested or ""
                if lost == _MOST_LOST:
                    yield from ((rest, None, untested) for rest in left[done:])
                    return


@contextlib.contextmanager
def _child() -> Iterator[tuple[subprocess.Popen[bytes], Connection, Callable[[], str]]]:
    """A process that tests variants (``self_test_child.py``), its pipe, and a function for its last line on stderr."""
    pipe, theirs = multiprocessing.Pipe()
    with pipe, tempfile.TemporaryFile() as errors:

        def last_words() -> str:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_S)
            errors.seek(max(0, errors.seek(0, os.SEEK_END) - _MOST_WORDS))
            lines = errors.read(_MOST_WORDS).decode(errors="replace").split("\n")
            return next((line.strip() for line in reversed(lines) if line.strip()), "it said nothing")

        with theirs:
            command = (*CHILD, str(theirs.fileno()))
            try:
                process = subprocess.Popen(
                    command, pass_fds=[theirs.fileno()], stdin=DEVNULL, stdout=DEVNULL, stderr=errors
                )
            except OSError as error:
                raise HostError(f"can't start {CHILD[0]!r}: {error.strerror or error}") from error
        try:
            yield process, pipe, last_words
        finally:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # a process that hangs in the driver can't be ended
                process.wait(_END_S)


def _message(pipe: Connection) -> bytes | None:
    """A child's next message; None where it ended, or says nothing for long."""
    with contextlib.suppress(OSError, EOFError):
        return pipe.recv_bytes() if pipe.poll(SILENT_S) else None
    return None


def _ending(process: subprocess.Popen[bytes], last_words: Callable[[], str]) -> str:
    try:
        code = process.wait(_END_S)
    except subprocess.TimeoutExpired:
        return f"the process that tested it said nothing for {SILENT_S:.0f} s"
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"the process that tested it ended by {signal.Signals(-code).name}"
    return f"the process that tested it ended with exit code {code}: {last_words()}"
