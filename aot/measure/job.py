"""The seam between the tuner and the GPUs: a job is plain data in, records out, wherever it runs.

The tuner (aot/tune/tuner.py) knows GPUs only as ``GpuExecutor``s, one a GPU. Local ones are worker processes
(aot/executors/local.py), those of other machines workers of Dask (aot/executors/dask.py); any engine can stand in that
hands ``measure.run(setup, job)`` to a process on the GPU's machine and returns a ``concurrent.futures.Future``. A
worker keeps weights between jobs, so the tuner sends the jobs of one weight to one executor, one at a time.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from ...artifacts.records.problem import Problem
from ...artifacts.records.target import Gpu
from ..journal.records import Failure, Measured


@dataclass(frozen=True, slots=True)
class Setup:
    """What all jobs of an executor share: the candidates, as a file on its machine, and its GPU's ordinal there.

    ``digest`` is that of the candidates' index: a worker refuses other ones.
    """

    candidates: str
    digest: bytes
    device: int


@dataclass(frozen=True, slots=True)
class MeasureJob:
    """Measure ``contenders`` (indices into the candidates) for ``problem`` with ``bucket`` rows.

    The first is the modelled choice. ``with_torch`` times torch's grouped_mm too, where it can run, and ``plain``, of a
    form, that variant of the plain product: times of two jobs are of two clocks. ``again`` takes more rounds, ``quick``
    fewer.
    ``incumbents``, among the contenders, are what the runtime runs today: what is faster meets them again, or else the
    modelled choice.
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
    """What a worker that has started says of its GPU; ``notes`` tell why its times may scatter.

    ``uuid`` is the GPU's own, by which two workers on one GPU are found; empty where the driver tells none.
    """

    sm: int
    gpu: Gpu
    notes: tuple[str, ...] = ()
    uuid: str = ""


@dataclass(frozen=True, slots=True)
class MeasureResult:
    """What became of a job. Without ``measured`` no contender is left, or the worker has to be renewed (``broken``)."""

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
        """It travels between machines."""
        return type(self), (self.kind, str(self))


class GpuGone(WorkerLost):
    """The job's process is lost, and its machine or GPU with it: the executor is of no more use."""


class GpuExecutor(Protocol):
    """One GPU that jobs are sent to. A future raises WorkerLost where the job's process is gone, or GpuGone."""

    @property
    def name(self) -> str:
        """For messages, e.g. ``GPU 0``."""

    def start(self) -> Future[WorkerInfo]:
        """Begin, or begin anew after ``broken`` or WorkerLost: whatever runs there is ended first."""

    def submit(self, job: MeasureJob) -> Future[MeasureResult]:
        """Measure; one job at a time."""

    def shutdown(self) -> None:
        """End the worker, whatever it does."""


def first_line(error: Exception) -> str:
    """What an error says first, or its kind where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
