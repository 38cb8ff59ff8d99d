"""Compile many variants, several at a time, in worker processes that may abort or hang."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import get_context, parent_process, resource_tracker
from pathlib import Path

from ...artifacts.errors import CompileError, HostError
from ...kernels.rowops import RowOpSpec
from ...kernels.spec import Spec
from ..process.child import end_with_parent, how_ended, scratch_folder
from .cache import CompileCache
from .toolchain import unable
from .triton import Compiled, compile_variant

TIMEOUT_S = 300.0  # a variant takes 0.2 to 5 s; a compiler that hangs is killed

Compile = Callable[[Spec | RowOpSpec, int], Compiled]
Ready = Callable[[Spec | RowOpSpec, int], Compiled | None]


@dataclass(frozen=True, slots=True)
class CompileJob:
    """A variant to compile for a capability."""

    spec: Spec | RowOpSpec
    sm: int


@dataclass(frozen=True, slots=True)
class CompileResult:
    """The outcome of a job: ``compiled``, or the ``reason`` of the failure.

    ``cached``: the compile cache had it. ``shipped``: it came compiled with a package.
    """

    job: CompileJob
    compiled: Compiled | None
    reason: str = ""
    cached: bool = False
    shipped: bool = False


def default_workers() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def compile_all(
    jobs: Iterable[CompileJob],
    *,
    workers: int | None = None,
    cache: CompileCache | None = None,
    on_result: Callable[[CompileResult], None] = lambda result: None,
    timeout_s: float = TIMEOUT_S,
    compile_one: Compile = compile_variant,
    shipped: Ready = lambda spec, sm: None,
) -> list[CompileResult]:
    """Compile every job that ``shipped`` does not have; the results come in the order of the jobs.

    A variant that fails, hangs or takes its process down has a result with a reason, never an exception; so has a
    variant that no installed Triton can compile. Finished variants are in ``cache`` at once: an interrupted run loses
    only variants in flight. ``on_result`` is called with each result as it is ready.

    Raises
    ------
    HostError
        if the machine stops the compiler: a full disk, no memory, workers that can't start.
    """
    jobs = list(jobs)
    results: dict[CompileJob, CompileResult] = {}

    def done(result: CompileResult) -> None:
        results[result.job] = result
        on_result(result)

    waiting = []
    for job in dict.fromkeys(jobs):
        compiled = shipped(job.spec, job.sm)
        if compiled is not None:
            done(CompileResult(job, compiled, shipped=True))
            continue
        reason = unable(job.spec)
        if reason is not None:
            done(CompileResult(job, None, f"{job.spec} for sm_{job.sm}: {reason}"))
            continue
        compiled = cache.get(job.spec, job.sm) if cache else None
        if compiled is not None:
            done(CompileResult(job, compiled, cached=True))
        else:
            waiting.append(job)
    if waiting:
        _run(waiting, min(workers or default_workers(), len(waiting)), cache, done, timeout_s, compile_one)
    return [results[job] for job in jobs]


def _run(
    jobs: list[CompileJob],
    workers: int,
    cache: CompileCache | None,
    done: Callable[[CompileResult], None],
    timeout_s: float,
    compile_one: Compile,
) -> None:
    from pebble import ProcessPool

    with scratch_folder() as scratch:
        pool = ProcessPool(
            max_workers=workers, context=get_context("spawn"), initializer=start_worker, initargs=(str(scratch),)
        )
        try:
            with stderr_to(scratch / "workers"), interrupts_held():
                running: dict[Future[Compiled], CompileJob] = {
                    pool.schedule(compile_one, (job.spec, job.sm), timeout=timeout_s): job for job in jobs
                }
            while running:
                finished, _ = wait(running, return_when=FIRST_COMPLETED)
                for future in finished:
                    job = running.pop(future)
                    result = _result(job, future, timeout_s)
                    if result.compiled is not None and cache:
                        cache.put(job.spec, job.sm, result.compiled)
                    done(result)
            pool.close()
        finally:
            pool.stop()  # after close() and the last result there is nothing left to stop
            pool.join()


@contextlib.contextmanager
def stderr_to(path: Path) -> Iterator[None]:
    """Send the standard error of processes that start in this context to a file.

    A worker that is ended while it starts, and the resource tracker of a killed build, would print tracebacks.
    """
    try:
        saved = os.dup(2)
    except OSError:  # this process has no standard error
        yield
        return
    sys.stderr.flush()
    with path.open("wb") as sink:
        os.dup2(sink.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(saved, 2)
        os.close(saved)


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Block Ctrl-C and hangups while the pool starts: its workers inherit that, and only the pool ends them."""
    held = {signal.SIGINT, signal.SIGHUP}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, held)
    resource_tracker.ensure_running()  # else the pool starts the tracker, which unblocks Ctrl-C
    signal.pthread_sigmask(signal.SIG_BLOCK, held)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def start_worker(scratch: str) -> None:
    """Initialise a worker: a process group of its own, so that ending it ends the assembler that it runs."""
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, lambda number, frame: os.killpg(0, signal.SIGKILL))
    tempfile.tempdir = scratch
    parent = parent_process()
    if parent is not None:
        end_with_parent(parent.sentinel, Path(scratch))


def _result(job: CompileJob, future: Future[Compiled], timeout_s: float) -> CompileResult:
    from pebble import ProcessExpired

    what = f"{job.spec} for sm_{job.sm}"
    try:
        return CompileResult(job, future.result())
    except CompileError as error:
        return CompileResult(job, None, str(error))
    except FutureTimeout:
        return CompileResult(job, None, f"{what}: the compiler did not end within {timeout_s:g} s")
    except ProcessExpired as error:
        return CompileResult(job, None, f"{what}: the compiler's process died ({ended(error.exitcode)})")
    except BrokenProcessPool as error:
        raise HostError(f"the compile workers can't start: {error}. Is there memory enough? Try --workers 1") from None
    except MemoryError:
        raise HostError(f"{what}: out of memory. Try --workers 1") from None
    except OSError as error:
        raise HostError(
            f"{what}: the compiler can't work: {error}. It needs some MB in '{tempfile.gettempdir()}'; "
            "TMPDIR names another place"
        ) from error


def ended(exitcode: int | None) -> str:
    """How a worker ended, with a likely reason."""
    return how_ended(exitcode) + (", perhaps out of memory: try --workers 1" if exitcode == -signal.SIGKILL else "")
