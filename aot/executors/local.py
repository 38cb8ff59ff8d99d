"""The local GPUs as executors: a worker process each, ended when it hangs and replaced when it dies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

from ...artifacts.errors import HostError, InputError
from ..compile.pool import interrupts_held, start_worker, stderr_to
from ..journal.records import DIED, HUNG
from ..measure.job import MeasureJob, MeasureResult, Setup, WorkerInfo, WorkerLost
from ..process.child import how_ended
from ..process.gpus import gpu_count
from ..process.scratch import scratch_folder

START_TIMEOUT_S = 300.0  # importing torch from a slow disk, and the context
JOB_TIMEOUT_S = 120.0  # a job takes 0.1 to 5 s

T = TypeVar("T")


def greet(setup: Setup) -> WorkerInfo:
    """In a worker: start the GPU."""
    from ..measure.bench import hello  # brings torch along, which only workers need

    return hello(setup)


def wake(device: int) -> None:
    """In a worker that has no candidates yet: what takes it long, torch and the GPU's context and matrix products."""
    import torch

    from ..measure import bench  # noqa: F401  (and what it brings along)

    if torch.cuda.is_available():
        square = torch.zeros(16, 16, device=torch.device("cuda", device), dtype=torch.bfloat16)
        torch.mm(square, square)
        torch.cuda.synchronize(device)


def run(setup: Setup, job: MeasureJob) -> MeasureResult:
    """In a worker: measure."""
    from ..measure.bench import run as measured

    return measured(setup, job)


class LocalExecutor:
    """A GPU of this machine, as a ``GpuExecutor``."""

    def __init__(
        self,
        setup: Setup,
        scratch: Path,
        *,
        timeout_s: float = JOB_TIMEOUT_S,
        greet: Callable[[Setup], WorkerInfo] = greet,
        run: Callable[[Setup, MeasureJob], MeasureResult] = run,
    ) -> None:
        self._setup, self._scratch, self._timeout_s = setup, scratch, timeout_s
        self._greet, self._run = greet, run
        self._pool: Any = None
        self._begun = False

    @property
    def name(self) -> str:
        """``GPU 0``."""
        return f"GPU {self._setup.device}"

    def start(self) -> Future[WorkerInfo]:
        """A new process, whatever was there before; or the one that has ``begun``."""
        begun, self._begun = self._begun, False
        if begun:
            with contextlib.suppress(RuntimeError):  # of a pool that is broken: its process died once it was awake
                return self._schedule(self._greet, (self._setup,), START_TIMEOUT_S)
        self._renew()
        return self._schedule(self._greet, (self._setup,), START_TIMEOUT_S)

    def begin(self, wake: Callable[[int], None] = wake) -> None:
        """The process now, which wakes up while the caller makes candidates: ``measures``, then ``start``."""
        self._renew()
        self._begun = True
        self._schedule(wake, (self._setup.device,), START_TIMEOUT_S)  # what goes wrong ``start`` meets, too, and tells

    def measures(self, candidates: str, digest: bytes) -> None:
        """What it is to measure, where that was not known before."""
        self._setup = Setup(candidates, digest, self._setup.device)

    def _renew(self) -> None:
        from pebble import ProcessPool

        self.shutdown()
        self._pool = ProcessPool(
            max_workers=1, context=get_context("spawn"), initializer=start_worker, initargs=(str(self._scratch),)
        )

    def submit(self, job: MeasureJob) -> Future[MeasureResult]:
        """Measure in the worker."""
        try:
            return self._schedule(self._run, (self._setup, job), self._timeout_s)
        except RuntimeError:  # the pool, which ran, is broken: its process died with nothing to do
            told: Future[MeasureResult] = Future()
            told.set_exception(WorkerLost(DIED, f"the process on {self.name} died between two jobs"))
            return told

    def shutdown(self) -> None:
        """End the worker."""
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None

    def _schedule(self, function: Callable[..., T], given: tuple[object, ...], timeout_s: float) -> Future[T]:
        with stderr_to(self._scratch / "workers"), interrupts_held():  # the pool starts with its first task
            future = self._pool.schedule(function, given, timeout=timeout_s)
        told: Future[T] = Future()
        told.set_running_or_notify_cancel()
        future.add_done_callback(lambda done: _tell(done, told, self.name, timeout_s))
        return told


def _tell(done: Any, told: Future[T], name: str, timeout_s: float) -> None:
    """The pool's outcome in the seam's words."""
    from pebble import ProcessExpired

    try:
        told.set_result(done.result())
    except FutureTimeout:
        told.set_exception(WorkerLost(HUNG, f"it did not end within {timeout_s:g} s"))
    except ProcessExpired as error:
        told.set_exception(WorkerLost(DIED, f"the process on {name} died ({how_ended(error.exitcode)})"))
    except BrokenProcessPool as error:  # as where it died before the pool had heard that it took the job
        told.set_exception(WorkerLost(DIED, f"the process on {name} is lost: {error}"))
    except BaseException as error:  # what a worker raises is for the tuner to tell
        told.set_exception(error)


@contextlib.contextmanager
def local_gpus(candidates: str, digest: bytes, gpus: Sequence[int] | None) -> Iterator[list[LocalExecutor]]:
    """Executors for this machine's GPUs, or for those of the ordinals ``gpus``; their processes end with the block.

    Raises
    ------
    HostError
        if there is no GPU.
    InputError
        if there is none of an ordinal.
    """
    count = gpu_count()
    if not count:
        raise HostError("no CUDA GPU here: measure on the machine that has it (aot compile makes what it needs)")
    wanted = tuple(dict.fromkeys(gpus)) if gpus is not None else tuple(range(count))
    for number in wanted:
        if not 0 <= number < count:
            raise InputError(f"--gpus: there is no GPU {number}; this machine shows {count}, 0 to {count - 1}")
    with scratch_folder() as scratch:
        executors = [LocalExecutor(Setup(candidates, digest, number), scratch) for number in wanted]
        try:
            yield executors
        finally:
            for executor in executors:
                executor.shutdown()


@contextlib.contextmanager
def begun(device: int) -> Iterator[LocalExecutor | None]:
    """The executor of one GPU of this machine, begun, and ended with the block; None where it has no such GPU."""
    if not 0 <= device < gpu_count():
        yield None
        return
    with scratch_folder() as scratch:
        executor = LocalExecutor(Setup("", b"", device), scratch)
        executor.begin()
        try:
            yield executor
        finally:
            executor.shutdown()
