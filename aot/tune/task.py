"""What the tuner keeps of each cell that it measures, and of each GPU that it measures on."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ...artifacts.records.problem import Problem
from ..measure.job import GpuExecutor, WorkerLost
from .remeasure import Remeasure


@dataclass(slots=True, eq=False)
class Task:
    """A cell to measure. ``alone``: contenders to try one by one, as a process died over them, once (``split``).

    ``kills``: the GPUs that have gone while the first of ``alone`` ran there. ``look``: what to time, of a cell that
    was measured before.
    """

    problem: Problem
    bucket: int
    seconds: float
    alone: deque[int] = field(default_factory=deque)
    split: bool = False
    kills: int = 0
    look: Remeasure | None = None

    def __str__(self) -> str:
        return f"{self.problem}, {self.bucket} rows"


@dataclass(slots=True, eq=False)
class Worker:
    """One GPU: the cells that wait for it, the one under way, and what its worker was lost over."""

    executor: GpuExecutor
    uuid: str = ""
    waiting: deque[Task] = field(default_factory=deque)
    trial: Task | None = None
    sent: tuple[int, ...] = ()
    lost: WorkerLost | None = None
    starts: int = 0

    @property
    def waiting_s(self) -> float:
        """What waits for it takes, about."""
        return sum(trial.seconds for trial in self.waiting)
