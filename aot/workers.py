"""Many variants, N at a time, in worker processes that may abort, with a cache of what is compiled."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import msgpack

from ..artifacts.blob import read_checked, write_checked
from ..artifacts.errors import CompileError, HostError
from ..artifacts.types import DType, Fusion, Layout, Op, TensorMap, Variant
from ..kernels.abi import Spec
from .compile import Compiled, compile_variant, job_key

TIMEOUT_S = 300.0  # a variant takes 0.2 to 5 s; a compiler that hangs is killed


@dataclass(frozen=True, slots=True)
class Job:
    """A variant to compile for a capability."""

    spec: Spec
    sm: int


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a job: ``compiled``, or the ``reason`` why not. ``cached``: nothing had to be compiled."""

    job: Job
    compiled: Compiled | None
    reason: str = ""
    cached: bool = False


def default_workers() -> int:
    """One a core that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def compile_all(
    jobs: Iterable[Job],
    *,
    workers: int | None = None,
    cache_dir: Path | None = None,
    on_result: Callable[[Result], None] = lambda result: None,
    timeout_s: float = TIMEOUT_S,
) -> list[Result]:
    """Compile every job; the results come in the order of the jobs.

    A variant that fails, hangs or takes its process down is a Result with a reason, never an
    exception. Finished variants are in ``cache_dir`` at once, so an interrupted run loses only what
    is in flight. ``on_result`` hears of each as it finishes.
    """
    jobs = list(jobs)
    results: dict[Job, Result] = {}

    def done(result: Result) -> None:
        results[result.job] = result
        on_result(result)

    waiting = []
    for job in dict.fromkeys(jobs):
        compiled = _from_cache(cache_dir, job)
        if compiled is not None:
            done(Result(job, compiled, cached=True))
        else:
            waiting.append(job)
    if waiting:
        _run(waiting, min(workers or default_workers(), len(waiting)), cache_dir, done, timeout_s)
    return [results[job] for job in jobs]


def _run(
    jobs: list[Job], workers: int, cache_dir: Path | None, done: Callable[[Result], None], timeout_s: float
) -> None:
    from pebble import ProcessPool

    pool = ProcessPool(max_workers=workers, context=get_context("spawn"), initializer=_start_worker)
    try:
        running: dict[Future[Compiled], Job] = {
            pool.schedule(compile_variant, (job.spec, job.sm), timeout=timeout_s): job for job in jobs
        }
        while running:
            finished, _ = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                job = running.pop(future)
                result = _result(job, future)
                if result.compiled is not None:
                    _to_cache(cache_dir, job, result.compiled)
                done(result)
        pool.close()
    finally:
        pool.stop()  # after close() and the last result there is nothing left to stop
        pool.join()


def _start_worker() -> None:
    # Ctrl-C goes to the whole process group; the parent stops its workers itself.
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _result(job: Job, future: Future[Compiled]) -> Result:
    from pebble import ProcessExpired

    try:
        return Result(job, future.result())
    except CompileError as error:
        return Result(job, None, str(error))
    except TimeoutError:
        return Result(job, None, f"{job.spec} for sm_{job.sm}: the compiler did not end in time")
    except ProcessExpired as error:
        return Result(job, None, f"{job.spec} for sm_{job.sm}: the compiler's process died (exit {error.exitcode})")


def _cache_path(cache_dir: Path, job: Job) -> Path:
    key = job_key(job.spec, job.sm)
    return cache_dir / key[:2] / f"{key}.bin"


def _from_cache(cache_dir: Path | None, job: Job) -> Compiled | None:
    if cache_dir is None:
        return None
    payload = read_checked(_cache_path(cache_dir, job))
    return None if payload is None else _unpack(payload)


def _to_cache(cache_dir: Path | None, job: Job, compiled: Compiled) -> None:
    if cache_dir is None:
        return
    path = _cache_path(cache_dir, job)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_checked(path, _pack(compiled))
    except (HostError, OSError):
        return  # a cache that can't be written costs the next run time, not this one its result


def _pack(compiled: Compiled) -> bytes:
    v = compiled.variant
    maps = [(m.argument, m.element, m.box, m.swizzle) for m in v.tensor_maps]
    fields = (v.kernel, v.revision, v.abi, v.op.value, v.dtype.value, v.layout.value, v.fusion.value, v.alignment,
              v.max_experts, v.config, v.entry, v.arguments, maps, v.threads, v.shared_bytes, v.registers,
              v.spill_bytes, v.scratch_bytes)  # fmt: skip
    packed: bytes = msgpack.packb((fields, compiled.cubin))
    return packed


def _unpack(payload: bytes) -> Compiled | None:
    """The entry, or None where another version wrote it in another form: it is then compiled again."""
    try:
        fields, cubin = msgpack.unpackb(payload, use_list=False, max_bin_len=1 << 24)
        (kernel, revision, abi, op, dtype, layout, fusion, alignment, max_experts, config, entry, arguments, maps,
         threads, shared, registers, spill, scratch) = fields  # fmt: skip
        variant = Variant(
            kernel, revision, abi, Op(op), DType(dtype), Layout(layout), Fusion(fusion), alignment, max_experts,
            config, entry, arguments, tuple(TensorMap(*m) for m in maps), threads, shared, registers, spill, scratch,
            len(cubin), hashlib.sha256(cubin).digest(),
        )  # fmt: skip
    except (ValueError, TypeError, msgpack.UnpackException):
        return None
    return Compiled(variant, cubin)
