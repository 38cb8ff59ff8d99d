"""The tuner's state of each cell to measure, and of each GPU."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ...artifacts.records.problem import Problem
from ..measure.job import GpuExecutor, WorkerLost
from .remeasure import Remeasure


@dataclass(slots=True, eq=False)
class Task:
    """A cell to measure. ``alone``: variants to try one by one, since a process died over them (``split``).

    ``kills``: GPUs lost while the first of ``alone`` ran there. ``remeasure``: the variants to time again.
    """

    problem: Problem
    bucket: int
    seconds: float
    alone: deque[int] = field(default_factory=deque)
    split: bool = False
    kills: int = 0
    remeasure: Remeasure | None = None

    def __str__(self) -> str:
        return f"{self.problem}, {self.bucket} rows"


@dataclass(slots=True, eq=False)
class Worker:
    """One GPU: its waiting cells, the cell being measured, and the error that its worker was lost over."""

    executor: GpuExecutor
    uuid: str = ""
    waiting: deque[Task] = field(default_factory=deque)
    task: Task | None = None
    sent: tuple[int, ...] = ()
    lost: WorkerLost | None = None
    starts: int = 0

    @property
    def waiting_s(self) -> float:
        """The approximate seconds of the waiting cells."""
        return sum(task.seconds for task in self.waiting)
