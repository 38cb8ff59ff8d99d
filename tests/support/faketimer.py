"""Stands where a GPU would be: times made of a digest, the same in every process. All around it is real."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

from pretuned.aot.journal.records import FAULT, WRONG, Failure, Measured, Rematch, Timing
from pretuned.aot.journal.timings import plain_of
from pretuned.aot.measure.job import MeasureJob, MeasureResult, Setup, WorkerInfo
from pretuned.artifacts.bundle_file import open_bundle
from pretuned.artifacts.errors import HostError
from pretuned.artifacts.records import Fusion, Gpu, Problem

H200 = Gpu("NVIDIA H200", 132, 143771, 13000)


def greet(setup: Setup) -> WorkerInfo:
    return WorkerInfo(90, H200)


def introduced(setup: Setup) -> WorkerInfo:
    """Return the worker's name and its setup."""
    return WorkerInfo(90, H200, (str(os.getpid()), setup.candidates, setup.digest.hex(), str(setup.device)))


def wake(device: int) -> None:
    Path(os.environ["WOKEN"]).write_text(f"{os.getpid()} {device}")


def wake_badly(device: int) -> None:
    raise RuntimeError("no context")


def wake_and_die(device: int) -> None:
    """It dies when it has nothing to do any more."""
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()


def time_ns(job: MeasureJob, sha: bytes) -> int:
    """From 10 to 20 us."""
    text = f"{job.problem} {job.bucket}".encode() + sha
    return 10_000 + int.from_bytes(hashlib.sha256(text).digest()[:4], "big") % 10_000


def run(setup: Setup, job: MeasureJob) -> MeasureResult:
    with open_bundle(setup.candidates) as bundle:
        shas = [bundle.variant(i).cubin_sha256 for i in job.contenders]
        plain, product = None, plain_of(job.problem)
        if job.plain is not None and product is not None:
            sha = bundle.variant(job.plain).cubin_sha256
            plain = sha, (time_ns(MeasureJob(product, job.bucket, ()), sha),) * 2
    timings = tuple(Timing(sha, (time_ns(job, sha),) * 2, 0.001, 20, 0.0017) for sha in shas)
    fastest = min(timings, key=lambda value: value.time_ns)
    ran = [timing for timing, i in zip(timings, job.contenders, strict=True) if i in job.incumbents]
    held = min(ran, key=lambda value: value.time_ns, default=timings[0])
    duel = None
    if fastest.variant != held.variant:
        ratio = round(fastest.time_ns / held.time_ns, 5)
        duel = Rematch(fastest.variant, held.variant, fastest.ns, held.ns, ratio, 0.005)
    return MeasureResult(Measured(job.problem, job.bucket, shas[0], timings, duel, None, 1.0, 13000, plain))


def steady(setup: Setup, job: MeasureJob) -> MeasureResult:
    """Looked at again, in more rounds, all take the same time."""
    record = run(setup, job).measured
    if not job.again or record is None:
        raise AssertionError(f"{job} is no second look")
    timings = tuple(Timing(timing.variant, (12_000, 12_000), 0.0005, 60, timing.error) for timing in record.timings)
    return MeasureResult(replace(record, timings=timings, duel=None))


def unable(setup: Setup, job: MeasureJob) -> MeasureResult:
    """Nothing can be timed."""
    return MeasureResult(None)


def dies_beside(setup: Setup, job: MeasureJob) -> MeasureResult:
    """Whatever is timed in turns with the plain product takes its process down."""
    if job.plain is not None:
        os.kill(os.getpid(), signal.SIGKILL)
    return run(setup, job)


def slow(setup: Setup, job: MeasureJob) -> MeasureResult:
    time.sleep(0.05)
    return run(setup, job)


def _first_aligned(setup: Setup, job: MeasureJob) -> tuple[int, bytes]:
    """The candidate that misbehaves: the first one of the forward."""
    with open_bundle(setup.candidates) as bundle:
        return 0, bundle.variant(0).cubin_sha256


def wrong(setup: Setup, job: MeasureJob) -> MeasureResult:
    """Variant 0 computes something else."""
    bad, sha = _first_aligned(setup, job)
    failures = (Failure(job.problem, job.bucket, sha, WRONG, "relative error 0.5"),) if bad in job.contenders else ()
    rest = tuple(i for i in job.contenders if i != bad)
    if not rest or job.contenders[0] == bad:
        return MeasureResult(None, failures)
    return MeasureResult(run(setup, MeasureJob(job.problem, job.bucket, rest)).measured, failures)


def wrong_gated(setup: Setup, job: MeasureJob) -> MeasureResult:
    """Everything with silu in its epilogue computes something else."""
    if Fusion.SILU not in job.problem.fusion:
        return run(setup, job)
    with open_bundle(setup.candidates) as bundle:
        shas = [bundle.variant(i).cubin_sha256 for i in job.contenders]
    return MeasureResult(
        None, tuple(Failure(job.problem, job.bucket, sha, WRONG, "relative error 0.5") for sha in shas)
    )


def faults(setup: Setup, job: MeasureJob) -> MeasureResult:
    """Variant 0 is an illegal instruction; its process can't be used any more."""
    marker = Path(f"{setup.candidates}.broken-{os.getpid()}")
    assert not marker.exists(), "a broken process was used again"
    bad, sha = _first_aligned(setup, job)
    if bad not in job.contenders:
        return run(setup, job)
    marker.touch()
    return MeasureResult(
        None, (Failure(job.problem, job.bucket, sha, FAULT, "CUDA error: illegal instruction"),), broken=True
    )


def dies(setup: Setup, job: MeasureJob) -> MeasureResult:
    """Variant 0 takes its process down."""
    if 0 in job.contenders:
        os.kill(os.getpid(), signal.SIGKILL)
    return run(setup, job)


def hangs(setup: Setup, job: MeasureJob) -> MeasureResult:
    """Variant 0 never ends."""
    if 0 in job.contenders:
        time.sleep(3600)
    return run(setup, job)


def dies_once(setup: Setup, job: MeasureJob) -> MeasureResult:
    """Somebody else's kill, and no variant's fault."""
    marker = Path(f"{setup.candidates}.died")
    if not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return run(setup, job)


def dies_afterwards(setup: Setup, job: MeasureJob) -> MeasureResult:
    """Its process is killed when it has told its result, and waits for a job."""
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGKILL)).start()
    return run(setup, job)


_cells: dict[tuple[Problem, int], int] = {}  # that this process has measured, by their order


def one_alone_at_first(setup: Setup, job: MeasureJob) -> MeasureResult:
    """Of every other cell the first job times one contender alone."""
    seen = (job.problem, job.bucket) in _cells
    order = _cells.setdefault((job.problem, job.bucket), len(_cells))
    return run(setup, job if seen or order % 2 else replace(job, contenders=job.contenders[:1]))


def lost(setup: Setup) -> WorkerInfo:
    """A GPU that has fallen off the bus, once a job died on it."""
    if Path(f"{setup.candidates}.died").exists():
        os.kill(os.getpid(), signal.SIGKILL)
    return greet(setup)


def without_cuda(setup: Setup) -> WorkerInfo:
    """A torch that is built without CUDA."""
    raise HostError("torch 2.13.0+cpu can't use this machine's GPU: it is built without CUDA")


def lost_with_an_error(setup: Setup) -> WorkerInfo:
    """End like ``lost``, with a CUDA error."""
    if Path(f"{setup.candidates}.died").exists():
        raise RuntimeError("CUDA error: device unavailable\nmore of it")
    return greet(setup)


def other_gpu(setup: Setup) -> WorkerInfo:
    """Two kinds of GPU in one machine."""
    return WorkerInfo(90, Gpu("NVIDIA H100 80GB HBM3", 132, 81559, 13000)) if setup.device else greet(setup)


def shipped(setup: Setup) -> WorkerInfo:
    """The candidates came in a file of this user's, in a folder of this user's."""
    path = Path(setup.candidates)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert path.parent.name.startswith("pretuned-build-")
    return greet(setup)


def same_uuid(setup: Setup) -> WorkerInfo:
    """Whatever worker is asked, it is the same GPU."""
    return WorkerInfo(90, H200, uuid="0" * 32)


def kills_its_machine(setup: Setup, job: MeasureJob) -> MeasureResult:
    """Variant 0 takes the Dask worker down that holds its process."""
    if 0 in job.contenders:
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)
    return run(setup, job)


def slow_and_told(setup: Setup, job: MeasureJob) -> MeasureResult:
    """Leaves a mark beside the candidates that tells its GPU."""
    Path(f"{setup.candidates}.on-{setup.device}").touch()
    return slow(setup, job)


def dies_on_1(setup: Setup, job: MeasureJob) -> MeasureResult:
    """GPU 1 takes its process down, whatever runs there."""
    if setup.device == 1:
        Path(f"{setup.candidates}.died").touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return slow(setup, job)


def lost_1(setup: Setup) -> WorkerInfo:
    """And then it is never seen again."""
    return lost(setup) if setup.device == 1 else greet(setup)
