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
from ..process.child import how_ended, scratch_folder
from ..process.gpus import gpu_count

START_TIMEOUT_S = 300.0  # importing torch from a slow disk, and the context
JOB_TIMEOUT_S = 120.0  # a job takes 0.1 to 5 s

T = TypeVar("T")


def greet(setup: Setup) -> WorkerInfo:
    """Start the GPU, in a worker."""
    from ..measure.bench import hello  # imports torch, which only workers need

    return hello(setup)


def wake(device: int) -> None:
    """Load torch and the GPU's context, in a worker that has no candidates yet."""
    import torch

    from ..measure import bench  # noqa: F401  (for its imports)

    if torch.cuda.is_available():
        square = torch.zeros(16, 16, device=torch.device("cuda", device), dtype=torch.bfloat16)
        torch.mm(square, square)
        torch.cuda.synchronize(device)


def run(setup: Setup, job: MeasureJob) -> MeasureResult:
    """Measure a job, in a worker."""
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
        """Start a new process, or use the process that ``begin`` started."""
        begun, self._begun = self._begun, False
        if begun:
            with contextlib.suppress(RuntimeError):  # the pool is broken: its process died after it started
                return self._schedule(self._greet, (self._setup,), START_TIMEOUT_S)
        self._renew()
        return self._schedule(self._greet, (self._setup,), START_TIMEOUT_S)

    def begin(self, wake: Callable[[int], None] = wake) -> None:
        """Start the process early, while the caller makes candidates; ``measures`` and ``start`` follow."""
        self._renew()
        self._begun = True
        self._schedule(wake, (self._setup.device,), START_TIMEOUT_S)  # ``start`` reports errors

    def measures(self, candidates: str, digest: bytes) -> None:
        """Set the candidates, if they were not known before."""
        self._setup = Setup(candidates, digest, self._setup.device)

    def _renew(self) -> None:
        from pebble import ProcessPool

        self.shutdown()
        self._pool = ProcessPool(
            max_workers=1, context=get_context("spawn"), initializer=start_worker, initargs=(str(self._scratch),)
        )

    def submit(self, job: MeasureJob) -> Future[MeasureResult]:
        """Measure a job in the worker."""
        try:
            return self._schedule(self._run, (self._setup, job), self._timeout_s)
        except RuntimeError:  # the pool is broken: its process died between two jobs
            answer: Future[MeasureResult] = Future()
            answer.set_exception(WorkerLost(DIED, f"the process on {self.name} died between two jobs"))
            return answer

    def shutdown(self) -> None:
        """End the worker."""
        if self._pool is not None:
            self._pool.stop()
            self._pool.join()
            self._pool = None

    def _schedule(self, function: Callable[..., T], arguments: tuple[object, ...], timeout_s: float) -> Future[T]:
        with stderr_to(self._scratch / "workers"), interrupts_held():  # the pool starts with its first task
            future = self._pool.schedule(function, arguments, timeout=timeout_s)
        answer: Future[T] = Future()
        answer.set_running_or_notify_cancel()
        future.add_done_callback(lambda done: _tell(done, answer, self.name, timeout_s))
        return answer


def _tell(done: Any, answer: Future[T], name: str, timeout_s: float) -> None:
    """Pass the pool's outcome on, as the executors' errors."""
    from pebble import ProcessExpired

    try:
        answer.set_result(done.result())
    except FutureTimeout:
        answer.set_exception(WorkerLost(HUNG, f"it did not end within {timeout_s:g} s"))
    except ProcessExpired as error:
        answer.set_exception(WorkerLost(DIED, f"the process on {name} died ({how_ended(error.exitcode)})"))
    except BrokenProcessPool as error:  # the worker died before the pool had assigned the job
        answer.set_exception(WorkerLost(DIED, f"the process on {name} is lost: {error}"))
    except BaseException as error:  # the tuner reports what a worker raises
        answer.set_exception(error)


@contextlib.contextmanager
def local_gpus(candidates: str, digest: bytes, gpus: Sequence[int] | None) -> Iterator[list[LocalExecutor]]:
    """Executors for this machine's GPUs, or for the ordinals in ``gpus``; their processes end with the context.

    Raises
    ------
    HostError
        if there is no GPU.
    InputError
        if an ordinal does not exist.
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
    """The executor of one GPU, started early, and ended with the context; None if there is no such GPU."""
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
