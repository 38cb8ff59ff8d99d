"""GPUs of many machines: Dask workers as ``GpuExecutor``s. Needs the extra ``dask``.

    with dask_gpus("dask://scheduler:8786", "candidates.msgpack", print) as gpus:
        tune_problems(..., executors=gpus.joined(), joined=gpus.joined)

A worker offers the resource of its GPU's capability (``--resources "sm90=1"``). Each job needs one, on a chosen worker,
which keeps weights between jobs. The candidates go to a worker once, through the scheduler. Workers may come and go.
The tuner, not Dask, runs a lost job again, to find the variant that caused it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import re
import ssl
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from pathlib import Path
from typing import Any, TypeVar

from ...artifacts import codec
from ...artifacts.bundle_file import open_bundle
from ...artifacts.errors import HostError, InputError
from ..journal.records import DIED
from ..measure.job import GpuGone, MeasureJob, MeasureResult, WorkerInfo, first_line
from . import dask_worker
from .dask_worker import Session, info_of, result_of

CONNECT_S = 15.0
FIRST_WORKER_S = 60.0  # a cluster may still be starting
_POLL_S = 0.5
_TIDYING_S = 10.0
_LEFT = "the worker has left the cluster, or was killed"

T = TypeVar("T")


def scheduler_address(text: str) -> str:
    """Parse ``dask://scheduler:8786``, or with encryption and certificates ``tls://``, into Dask's address.

    Raises
    ------
    InputError
        if it is no such address.
    """
    match = re.fullmatch(r"(dask|tls)://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})/?", text)
    if match is None or not 0 < int(match[3]) < 1 << 16:
        raise InputError(
            f"--executor {text}: wanted dask://HOST:PORT of a Dask scheduler, e.g. dask://scheduler:8786, or "
            "tls://HOST:PORT of one with certificates"
        )
    return f"{match[1].replace('dask', 'tcp')}://{match[2]}:{match[3]}"


class DaskGpu:
    """The GPU of a Dask worker, as a ``GpuExecutor``."""

    def __init__(self, client: Any, address: str, tag: str, session: Session, candidates: bytes) -> None:
        self.address = address
        self._client, self._session = client, session
        self._candidates: Any = candidates
        self._shipped = False
        self._tasks = client.get_executor(workers=[address], resources={tag: 1}, retries=0, pure=False)
        self._waiting: set[Future[Any]] = set()
        self._latest: Future[Any] | None = None
        self._gone = ""

    @property
    def name(self) -> str:
        """``Dask worker tcp://10.0.0.7:40123``."""
        return f"Dask worker {self.address}"

    def start(self) -> Future[WorkerInfo]:
        """Start a new process on the worker's GPU."""
        if not self._shipped and not self._gone:
            try:
                self._candidates = self._client.scatter(
                    self._candidates, workers=[self.address], direct=False, hash=False
                )
                self._shipped = True
            except Exception as error:  # the worker left: Dask has a dozen errors for that
                self.lose(f"the candidates did not get there: {error or type(error).__name__}")
        return self._ask(info_of, dask_worker.start)

    def submit(self, job: MeasureJob) -> Future[MeasureResult]:
        """Measure a job on the worker."""
        return self._ask(result_of, dask_worker.measure, job)

    def shutdown(self) -> None:
        """End the process on the worker's GPU, whatever it does."""
        if not self._gone:
            self.lose("it is shut down")
            _bounded(
                lambda: self._client.run(dask_worker.end, self._session.id, workers=[self.address], on_error="ignore")
            )

    def lose(self, reason: str) -> None:
        """Mark the worker as gone, and fail all futures that wait for it."""
        self._gone = self._gone or reason
        for answer in list(self._waiting):
            _fail(answer, GpuGone(DIED, self._gone))

    def _ask(self, read: Callable[[object], T], function: Callable[..., bytes], *arguments: object) -> Future[T]:
        answer: Future[T] = Future()
        answer.set_running_or_notify_cancel()
        if self._gone:
            answer.set_exception(GpuGone(DIED, self._gone))
            return answer
        self._waiting.add(answer)
        answer.add_done_callback(self._waiting.discard)
        try:
            task = self._tasks.submit(function, self._session, self._candidates, *arguments)
        except Exception as error:  # the scheduler is gone
            _fail(answer, GpuGone(DIED, f"the scheduler takes no jobs: {error or type(error).__name__}"))
        else:
            # Keep the previous task until Dask has this one, because Dask's client sends only every 10 ms.
            self._latest = task
            task.add_done_callback(lambda done: self._pass_on(done, read, answer))
        if self._gone:
            _fail(answer, GpuGone(DIED, self._gone))
        return answer

    def _pass_on(self, done: Future[bytes], read: Callable[[object], T], answer: Future[T]) -> None:
        """Pass Dask's outcome on, as the executors' errors."""
        from distributed import KilledWorker

        try:
            result = read(done.result())
        except (CancelledError, KilledWorker):  # the candidates are lost with the worker
            self.lose(_LEFT)
        except ValueError as error:
            self.lose(f"its answer is none: {first_line(error)}")
        except BaseException as error:  # the tuner reports what a worker raises
            _fail(answer, error)
        else:
            with contextlib.suppress(InvalidStateError):
                answer.set_result(result)


def _fail(answer: Future[Any], error: BaseException) -> None:
    with contextlib.suppress(InvalidStateError):  # set already, by the watch or by Dask
        answer.set_exception(error)


class DaskGpus:
    """The workers of a cluster that offer ``tag``, watched as they come and go."""

    def __init__(self, client: Any, tag: str, session: Session, candidates: bytes) -> None:
        self._client, self._tag, self._session, self._candidates = client, tag, session, candidates
        self._there: dict[str, DaskGpu] = {}
        self._new: list[DaskGpu] = []
        self._lost = ""
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._look()
        self._watch = threading.Thread(target=self._keep_looking, daemon=True)
        self._watch.start()

    def joined(self) -> Sequence[DaskGpu]:
        """The workers that have joined since the last call.

        Raises
        ------
        HostError
            if the scheduler is gone.
        """
        with self._lock:
            if self._lost:
                raise HostError(f"the Dask scheduler is gone: {self._lost}. What was measured is kept")
            new, self._new = self._new, []
            return new

    def wait_for_one(self, timeout_s: float, on_note: Callable[[str], None]) -> None:
        """Wait until there is a worker.

        Raises
        ------
        HostError
            if none comes.
        """
        end, noted = time.monotonic() + timeout_s, False
        while not self._there:
            self.joined()
            if time.monotonic() >= end:
                raise HostError(self._missing())
            if not noted:
                on_note(f"waiting {timeout_s:.0f} s for a Dask worker that offers {self._tag}")
                noted = True
            time.sleep(_POLL_S)

    def close(self) -> None:
        """End the processes on the workers."""
        self._closing.set()
        self._watch.join(_TIDYING_S)
        there = list(self._there.values())
        for gpu in there:
            gpu.lose("it is shut down")
        if there and not self._lost:
            addresses = [gpu.address for gpu in there]
            _bounded(lambda: self._client.run(dask_worker.end, self._session.id, workers=addresses, on_error="ignore"))

    def _missing(self) -> str:
        others = len(self._client.scheduler_info(n_workers=-1)["workers"])
        there = f"there are {others} without it" if others else "there is none at all"
        return (
            f"no Dask worker offers {self._tag}, {there}: on the GPU machines run "
            f'dask worker {self._client.scheduler.address} --resources "{self._tag}=1" --nthreads 1'
        )

    def _keep_looking(self) -> None:
        while not self._closing.wait(_POLL_S):
            try:
                self._look()
            except Exception as error:  # Dask's client closes when it loses the scheduler
                if self._client.status in ("running", "connecting"):
                    continue
                self._lost = str(error) or type(error).__name__
                return

    def _look(self) -> None:
        workers = self._client.scheduler_info(n_workers=-1)["workers"]
        able = {address for address, facts in workers.items() if facts["resources"].get(self._tag, 0) >= 1}
        with self._lock:
            for address in [address for address in self._there if address not in workers]:
                self._there.pop(address).lose(_LEFT)
            for address in sorted(able - set(self._there)):
                gpu = DaskGpu(self._client, address, self._tag, self._session, self._candidates)
                self._there[address] = gpu
                self._new.append(gpu)


def _bounded(call: Callable[[], object]) -> None:
    """Try a call, for a limited time: the tuner must end even if the cluster does not answer."""

    def attempt() -> None:
        with contextlib.suppress(Exception):
            call()

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(_TIDYING_S)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence Dask, which logs every lost connection to stderr; the tuner reports them."""
    loggers = [logging.getLogger(name) for name in ("distributed", "distributed.client", "tornado.application")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def connected(executor: str, connect_s: float = CONNECT_S) -> Iterator[Any]:
    """A client of the scheduler that ``executor`` names.

    Raises
    ------
    InputError
        if it is no scheduler's address.
    HostError
        if Dask is not installed, or the scheduler can't be reached.
    """
    address = scheduler_address(executor)
    try:
        from distributed import Client
    except ModuleNotFoundError as error:
        raise HostError(f'--executor {executor}: {error.name} is missing: pip install "pretuned[dask]"') from None
    with _quiet():
        try:
            client = Client(address, timeout=connect_s, set_as_default=False, name="pretuned")
        except (TypeError, RuntimeError, ssl.SSLError) as error:  # missing or bad certificates
            raise HostError(
                f"--executor {executor}: {first_line(error)}. Dask's own settings name the certificates: "
                "distributed.comm.tls.ca-file, client.cert and client.key (DASK_DISTRIBUTED__COMM__TLS__CA_FILE, ...)"
            ) from None
        except OSError as error:
            raise HostError(
                f"--executor {executor}: no Dask scheduler answers there within {connect_s:.0f} s "
                f"({first_line(error)}); start one with: dask scheduler --port {address.rpartition(':')[2]}"
            ) from None
        try:
            yield client
        finally:
            _bounded(lambda: client.close(timeout=_TIDYING_S / 2))


@contextlib.contextmanager
def dask_gpus(
    executor: str,
    candidates: str | Path,
    on_note: Callable[[str], None] = lambda note: None,
    *,
    wait_s: float = FIRST_WORKER_S,
    connect_s: float = CONNECT_S,
    **session: Any,
) -> Iterator[DaskGpus]:
    """The GPUs of a Dask cluster for the capability of ``candidates``; processes there end with the context.

    ``session`` holds further fields of ``Session``.

    Raises
    ------
    BundleError
        if the candidates can't be read.
    InputError, HostError
        as ``connected`` does; HostError also if no worker offers the capability.
    """
    with open_bundle(candidates) as bundle:
        shared = Session(uuid.uuid4().hex, importlib.metadata.version("pretuned"), bundle.digest, **session)
        tag = f"sm{bundle.target.sm}"
        data = codec.encode(bundle.load())  # the file may be packed
    with connected(executor, connect_s) as client, contextlib.closing(DaskGpus(client, tag, shared, data)) as gpus:
        gpus.wait_for_one(wait_s, on_note)
        yield gpus
