"""A call in a graph, judged by what a replay writes: what ``aot bench`` and the benchmarks beside peers share."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..measure.clock import Clock, HostClock, Replayed
from .products import Call, Inputs, relative_error


@dataclass
class Taken:
    """A call in a graph; ``held`` is the tensor that a replay writes. What the call holds is read by every replay."""

    call: Call
    graph: Replayed
    held: list[torch.Tensor]

    @property
    def result(self) -> torch.Tensor:
        """What the last replay wrote."""
        return self.held[0]


def taken(clock: Clock | HostClock, call: Call) -> Taken:
    """Run ``call`` once, then capture it."""
    held: list[torch.Tensor] = []

    def once() -> torch.Tensor:
        held[:] = [call()]
        return held[0]

    clock.flush.zero_()  # a counter that lies there, too
    return Taken(call, clock.capture(once), held)


def replayed_error(
    clock: Clock | HostClock, one: Taken, inputs: Inputs, op: str, at: torch.Tensor | None = None
) -> float:
    """The error of what a replay writes over NaN; ``at``: where the sorted rows stand in a result with padding."""
    one.result.fill_(float("nan"))
    clock.flush.zero_()
    one.graph.replay()
    return relative_error(one.result if at is None else one.result[at], inputs, op)
