"""The Dask worker's part of measuring: it keeps the candidates and a process on its GPU, and passes jobs to it.

The process is a ``LocalExecutor``'s, as on the tuner's own machine, so that a kernel that hangs or faults ends no Dask
worker. The functions are Dask tasks; nothing here imports Dask. Answers are msgpack: decoding checks them, and runs no
code.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import os
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass
from multiprocessing import current_process
from typing import Any, TypeVar

import msgpack

from ...artifacts.bundle_file import open_bundle
from ...artifacts.errors import HostError
from ...artifacts.records import Gpu
from ..journal.records import DIED, MAX_REASON_CHARS, Failure, from_value, to_value
from ..measure.job import MeasureJob, MeasureResult, Setup, WorkerInfo, WorkerLost
from ..process.child import scratch_folder
from .local import JOB_TIMEOUT_S, LocalExecutor, greet, run

_LIMITS = {
    "max_str_len": 4 * MAX_REASON_CHARS,
    "max_array_len": 1 << 16,
    "max_map_len": 64,
    "max_bin_len": 0,
    "max_ext_len": 0,
}


def info_bytes(info: WorkerInfo) -> bytes:
    """Encode a worker's description of its GPU."""
    gpu = info.gpu
    return _packed(["info", info.sm, [gpu.name, gpu.sm_count, gpu.memory_mib, gpu.driver], list(info.notes), info.uuid])


def info_of(data: object) -> WorkerInfo:
    """Decode ``info_bytes``.

    Raises
    ------
    ValueError
        if the bytes are something else.
    """
    sm, gpu, notes, uuid = _fields(data, "info")
    name, *numbers = _list(gpu) or [None]
    if len(numbers) != 3 or not all(type(number) is int and number >= 0 for number in (sm, *numbers)):
        raise ValueError(f"a GPU of {numbers!r}")
    return WorkerInfo(sm, Gpu(_text(name), *numbers), tuple(map(_text, _list(notes))), _text(uuid))


def result_bytes(result: MeasureResult) -> bytes:
    """Encode the result of a job."""
    measured = None if result.measured is None else to_value(result.measured)
    return _packed(["result", measured, [*map(to_value, result.failures)], result.broken, list(result.notes)])


def result_of(data: object) -> MeasureResult:
    """Decode ``result_bytes``.

    Raises
    ------
    ValueError
        if the bytes are something else.
    """
    value, failures, broken, notes = _fields(data, "result")
    try:
        measured = None if value is None else from_value(value)
        failed = tuple(map(from_value, _list(failures)))
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"a record that is none: {error!r}") from None
    records = tuple(record for record in failed if isinstance(record, Failure))
    if isinstance(measured, Failure) or len(records) != len(failed) or type(broken) is not bool:
        raise ValueError("records that are in each other's place")
    return MeasureResult(measured, records, broken, tuple(map(_text, _list(notes))))


def _packed(value: list[object]) -> bytes:
    data: bytes = msgpack.packb(value)
    return data


def _fields(data: object, kind: str) -> list[Any]:
    if type(data) is not bytes:
        raise ValueError(f"a {type(data).__name__}, wanted bytes")
    try:
        value = msgpack.unpackb(data, **_LIMITS)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise ValueError(f"no msgpack: {error}") from None
    if type(value) is not list or len(value) != 5 or value[0] != kind:
        raise ValueError(f"no {kind}")
    return value[1:]


def _list(value: object) -> list[Any]:
    if type(value) is not list:
        raise ValueError(f"a {type(value).__name__}, wanted an array")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > MAX_REASON_CHARS:
        raise ValueError("a text that is none, or a very long one")
    return value


IDLE_S = 300.0  # the process on the GPU ends after this long without a job, in case its tuner was killed
_LOOK_S = 0.5
_ENDED = "its tuner has ended it"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Session:
    """The settings of all tasks of a tuner: its id, its pretuned, its candidates' digest, and how to measure."""

    id: str
    pretuned: str
    digest: bytes
    timeout_s: float = JOB_TIMEOUT_S
    idle_s: float = IDLE_S
    greet: Callable[[Setup], WorkerInfo] = greet
    run: Callable[[Setup, MeasureJob], MeasureResult] = run


class _Held:
    """A session's candidates, in a private file, and its process on the GPU."""

    def __init__(self, session: Session, data: bytes) -> None:
        self.session = session
        self._idle: threading.Timer | None = None
        self._closed = threading.Event()
        with contextlib.ExitStack() as stack:
            scratch = stack.enter_context(scratch_folder())
            path = scratch / "candidates.msgpack"
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(data)
            with open_bundle(path) as bundle:
                if bundle.digest != session.digest:
                    raise HostError(f"the candidates came as {bundle.digest.hex()}, not as {session.digest.hex()}")
            setup = Setup(str(path), session.digest, 0)
            self._gpu = LocalExecutor(setup, scratch, timeout_s=session.timeout_s, greet=session.greet, run=session.run)
            stack.callback(self._gpu.shutdown)
            self._stack = stack.pop_all()

    def start(self) -> WorkerInfo:
        """Start a new process on the GPU."""
        return self._awaited(self._gpu.start())

    def measure(self, job: MeasureJob) -> MeasureResult:
        """Measure in the process on the GPU."""
        return self._awaited(self._gpu.submit(job))

    def _awaited(self, future: Future[T]) -> T:
        """The future's result. ``close`` may come at any time, and then not every future is ever resolved."""
        while not wait([future], timeout=_LOOK_S).done:
            if self._closed.is_set():
                raise WorkerLost(DIED, _ENDED)
        try:
            return future.result()
        except CancelledError:
            raise WorkerLost(DIED, _ENDED) from None

    def expire_later(self) -> None:
        """Close this session some time after the last job."""
        self.stay()
        self._idle = threading.Timer(self.session.idle_s, _expire, (self,))
        self._idle.daemon = True
        self._idle.start()

    def stay(self) -> None:
        """Cancel the expiry."""
        if self._idle is not None:
            self._idle.cancel()
            self._idle = None

    def close(self) -> None:
        """End the process, whatever it does, and remove the candidates."""
        self._closed.set()
        self.stay()
        self._stack.close()


_turn = threading.Lock()  # one job at a time, however many threads the worker has
_held: dict[str, _Held] = {}
_ended: set[str] = set()


def start(session: Session, data: bytes) -> bytes:
    """Start a process on this worker's GPU with the candidates ``data``; returns its WorkerInfo as ``wire`` bytes.

    Raises
    ------
    HostError
        if this worker has another pretuned, or its GPU can't be used.
    WorkerLost
        if the process does not start.
    """
    has = importlib.metadata.version("pretuned")
    if has != session.pretuned:
        raise HostError(f"it has pretuned {has}, the tuner has {session.pretuned}: install the same on all machines")
    with _turn:
        held = _holding(session, data)
        try:
            return info_bytes(held.start())
        finally:
            held.expire_later()


def measure(session: Session, data: bytes, job: MeasureJob) -> bytes:
    """Run a job; returns its MeasureResult as ``wire`` bytes.

    If the process was ended for being idle, or for another tuner, a new one is started.

    Raises
    ------
    WorkerLost
        if the process died over it, or took too long.
    """
    with _turn:
        fresh = session.id not in _held
        held = _holding(session, data)
        try:
            if fresh:
                held.start()
            return result_bytes(held.measure(job))
        finally:
            held.expire_later()


async def end(session_id: str) -> None:
    """End a session's process for good, whatever it does. Not a task: it gets through while one runs."""
    _ended.add(session_id)  # a job may still be on its way
    held = _held.pop(session_id, None)
    if held is not None:
        await asyncio.to_thread(held.close)


def _holding(session: Session, data: bytes) -> _Held:
    """Return the session of this id, made if it is new, and close all others: two would share the GPU's memory."""
    if session.id in _ended:
        raise WorkerLost(DIED, _ENDED)
    for other in [id_ for id_ in _held if id_ != session.id]:
        _held.pop(other).close()
    if session.id not in _held:
        # A worker under a nanny is daemonic and may have no children; this child ends with it anyway.
        current_process().daemon = False
        session_held = _held[session.id] = _Held(session, data)
        if session.id in _ended:  # ``end`` came meanwhile, and found nothing to close
            _held.pop(session.id, None)
            session_held.close()
            raise WorkerLost(DIED, _ENDED)
    held = _held[session.id]
    held.stay()
    return held


def _expire(held: _Held) -> None:
    with _turn:
        if _held.get(held.session.id) is held:
            _held.pop(held.session.id).close()
