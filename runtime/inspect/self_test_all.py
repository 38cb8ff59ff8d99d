"""``python -m pretuned.runtime --self-test``: test all kernels that were never run on these GPUs' capability.

An untested kernel's first use tests it, too, but in the process that serves: a kernel that hangs or faults would end
that process. Here child processes test kernels. If a child dies, the next child goes on after the kernel that ended it.
``runtime/self_test_results.py`` stores the results.
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
SILENT_S = 300.0  # longest silence of a child: a slow disk delays its import of torch, a hanging kernel takes 30 s
_END_S = 10.0  # wait for the child to end after it was asked to
_MOST_LOST = 3  # stop after so many children in a row ended in the same way: the variants are not the cause
_MOST_REASONS = 10  # failures listed in a report
_MOST_WORDS = 1 << 16  # most bytes to read of a child's output


@dataclass(frozen=True, slots=True)
class GpuSelfTest:
    """The self-test's results on one GPU.

    ``wrong`` has a line for each variant that failed and is not used from now on. ``untested`` says how many variants
    have no result yet, and why: the next self-test tests them again.
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
        """True if all variants were tested and none is wrong; True without a GPU."""
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
    """Test all untested variants on every GPU of this machine; without a GPU there is nothing to test.

    Raises
    ------
    HostError
        if no child process can be started.
    """
    try:
        gpus, _ = gpus_and_driver()
    except CudaError:  # no driver
        gpus = ()
    return run(gpus)


def run(gpus: Sequence[LocalGpu]) -> SelfTestReport:
    """Test all untested variants on these GPUs, one GPU after another. Raises HostError as ``examine`` does."""
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
    """Yield (variant, fault, reason why it could not be tested) for each; the last two are None for a right variant.

    If a child process ends, a new child goes on with the next variant.
    """
    done, lost, last = 0, 0, ""  # lost: number of children in a row that ended with the message ``last``
    while done < len(left):
        with _child() as (process, pipe, last_words):
            if _message(pipe) is None:
                why = f"a process that tests code could not begin: {last_words()}"
                if not done:
                    raise HostError(why)
                yield from ((rest, None, why) for rest in left[done:])
                return
            jobs = [[device, entry.bundle.path, entry.bundle.digest.hex(), entry.index] for entry in left[done:]]
            with contextlib.suppress(OSError):  # the child died: the missing message shows it
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
    """(a process that tests variants by ``self_test_child.py``, its pipe, a function for its last line on stderr)."""
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
    """A child's next message; None if the child ended, or sent nothing for ``SILENT_S``."""
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
