"""Capture a call in a graph, and check what its replay writes; shared by ``aot bench`` and the peer benchmarks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..measure.clock import Clock, HostClock, Replayed
from .products import Call, Inputs, relative_error


@dataclass
class CapturedCall:
    """A call in a graph; ``held`` is the tensor that a replay writes. Every replay reads the tensors of the call."""

    call: Call
    graph: Replayed
    held: list[torch.Tensor]

    @property
    def result(self) -> torch.Tensor:
        """The tensor that the last replay wrote."""
        return self.held[0]


def capture_call(clock: Clock | HostClock, call: Call) -> CapturedCall:
    """Run ``call`` once, then capture it."""
    held: list[torch.Tensor] = []

    def once() -> torch.Tensor:
        held[:] = [call()]
        return held[0]

    clock.flush.zero_()  # flush counters in L2 too
    return CapturedCall(call, clock.capture(once), held)


def replayed_error(
    clock: Clock | HostClock, captured: CapturedCall, inputs: Inputs, op: str, at: torch.Tensor | None = None
) -> float:
    """The error of a replay's result, written over NaN; ``at``: the places of sorted rows in a padded result."""
    captured.result.fill_(float("nan"))
    clock.flush.zero_()
    captured.graph.replay()
    return relative_error(captured.result if at is None else captured.result[at], inputs, op)
