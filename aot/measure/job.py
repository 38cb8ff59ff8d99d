"""The interface between the tuner and the GPUs: a job is plain data in, records out, wherever it runs.

The tuner (aot/tune/tuner.py) sees each GPU as a ``GpuExecutor``. Local GPUs are worker processes
(aot/executors/local.py), those of other machines are Dask workers (aot/executors/dask.py). Any other engine works that
runs ``measure.bench.run(setup, job)`` in a process on the GPU's machine and returns a ``concurrent.futures.Future``. A
worker keeps weights between jobs, so the tuner sends the jobs of one weight to one executor, one at a time.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from ...artifacts.records import Gpu, Problem
from ..journal.records import Failure, Measured


@dataclass(frozen=True, slots=True)
class Setup:
    """The settings of all jobs of an executor: the candidates' file on its machine, and its GPU's ordinal there.

    ``digest`` is the candidates' index digest: a worker refuses others.
    """

    candidates: str
    digest: bytes
    device: int


@dataclass(frozen=True, slots=True)
class MeasureJob:
    """Measure ``contenders`` (indices into the candidates) for ``problem`` with ``bucket`` rows.

    The first is the modelled choice. ``with_torch`` times torch's grouped_mm too, if it can run. ``plain``, for a
    fusion, is a variant of the plain product to time too, since times of two jobs are of two clocks. ``again`` takes
    more rounds, ``quick`` fewer. ``incumbents``, among the contenders, are the baseline: a faster variant is timed
    against it again, or against the modelled choice if there is none.
    """

    problem: Problem
    bucket: int
    contenders: tuple[int, ...]
    with_torch: bool = False
    plain: int | None = None
    again: bool = False
    incumbents: tuple[int, ...] = ()
    quick: bool = False


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """A started worker's description of its GPU; ``notes`` say why its times may scatter.

    ``uuid`` identifies the GPU, to find two workers on one GPU; empty if the driver has none.
    """

    sm: int
    gpu: Gpu
    notes: tuple[str, ...] = ()
    uuid: str = ""


@dataclass(frozen=True, slots=True)
class MeasureResult:
    """The result of a job. Without ``measured`` no candidate is left, or the worker must be restarted (``broken``)."""

    measured: Measured | None
    failures: tuple[Failure, ...] = ()
    broken: bool = False
    notes: tuple[str, ...] = ()


class WorkerLost(Exception):
    """The job's process died, or was ended as it took too long: ``kind`` is records.DIED or HUNG."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind

    def __reduce__(self) -> tuple[type[WorkerLost], tuple[str, str]]:
        """Make it picklable: it travels between machines."""
        return type(self), (self.kind, str(self))


class GpuGone(WorkerLost):
    """The job's process is lost, and its machine or GPU with it: the executor can't be used any more."""


class GpuExecutor(Protocol):
    """One GPU that runs jobs. A future raises WorkerLost if the job's process is gone, or GpuGone."""

    @property
    def name(self) -> str:
        """The GPU's name in messages, e.g. ``GPU 0``."""

    def start(self) -> Future[WorkerInfo]:
        """Start, or restart after ``broken`` or WorkerLost, ending the worker's process first."""

    def submit(self, job: MeasureJob) -> Future[MeasureResult]:
        """Measure a job; one at a time."""

    def shutdown(self) -> None:
        """End the worker, whatever it does."""


def first_line(error: Exception) -> str:
    """The first line of an error, or its type if it has no text."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
