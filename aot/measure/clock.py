"""Time launches: CUDA-graph replay, the L2 cache flushed before each, events directly around it."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ..journal.records import FLUSH_BYTES


def orders(count: int, rounds: int) -> list[list[int]]:
    """The order of each round: a random one, then its reverse; none repeats before all were used.

    A launch that draws little power leaves the next a faster clock, so no graph may always follow the same one. When 42
    candidates took turns in one order, the first ran at the clock left by the slow last ones, in 0.8 of its usual time
    (docs/inside/trials.md, turns-drawn).
    """
    draw = random.Random(0)  # noqa: S311
    in_order: list[list[int]] = []
    new: list[list[int]] = []
    while len(in_order) < rounds:
        order = draw.sample(range(count), count)
        if order not in new:
            new += [order, order[::-1]]
            in_order += new[-2:]
        if len(new) >= math.factorial(count):
            new = []
    return in_order[:rounds]


class Replayed(Protocol):
    """A captured call that can run again."""

    def replay(self) -> None: ...


class Captured:
    """A graph with its call: a replay reads what the call holds, so both live equally long."""

    def __init__(self, graph: torch.cuda.CUDAGraph, call: Callable[[], object]) -> None:
        self._graph, self.call = graph, call

    def replay(self) -> None:
        """Run the graph again, on the current stream."""
        self._graph.replay()


class Clock:
    """Times launches on one GPU, alone or in turns."""

    def __init__(self, device: str | torch.device = "cuda") -> None:
        self._device = torch.device(device)
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=self._device)
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._events: list[torch.cuda.Event] = []
        # All graphs share a tiny graph's memory pool: a pool for each would keep its memory until the cache is emptied.
        self._holder: torch.cuda.CUDAGraph | None = None

    def capture(self, call: Callable[[], object], *, warm: bool = True) -> Captured:
        """Capture ``call`` in a graph that keeps it alive; ``warm`` calls it once before."""
        graph = torch.cuda.CUDAGraph()
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            if warm:
                call()
            # torch.cuda.graph() would empty the allocator's cache, which costs more than the measurement.
            torch.cuda.synchronize(self._device)
            if self._holder is None:
                self._holder = torch.cuda.CUDAGraph()
                self._captured(self._holder, self.flush[:16].zero_)
            self._captured(graph, call, self._holder.pool())
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return Captured(graph, call)

    def release(self) -> None:
        """Free the graphs' memory; no graph may be used afterwards. The next capture starts anew."""
        self._holder = None

    def _captured(self, graph: torch.cuda.CUDAGraph, call: Callable[[], object], pool: Any = None) -> None:
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            call()
        finally:
            graph.capture_end()

    def rounds_us(self, graphs: Sequence[Replayed], rounds: int) -> list[list[float]]:
        """Replay the graphs in turns; the times in us of each graph in each round, [graphs][rounds]."""
        count = len(graphs)
        while len(self._events) < 2 * count * rounds:
            self._events.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        events = iter(self._events)
        marks: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in graphs]
        for turns in orders(count, rounds):
            for number in turns:
                start, end = next(events), next(events)
                self.flush.zero_()
                start.record()
                graphs[number].replay()
                end.record()
                marks[number].append((start, end))
        torch.cuda.synchronize(self._device)
        return [[1000.0 * start.elapsed_time(end) for start, end in pairs] for pairs in marks]


class HostClock:
    """``Clock`` for calls on the CPU, by the host's clock: without graphs, so a replay is a call."""

    def __init__(self) -> None:
        self.flush = torch.empty(1 << 20, dtype=torch.int8)

    def capture(self, call: Callable[[], object], *, warm: bool = True) -> Replayed:
        """Wrap ``call`` for replay; ``warm`` calls it once before."""
        if warm:
            call()
        return _Again(call)

    def release(self) -> None:
        """Do nothing, as nothing is held."""

    def rounds_us(self, graphs: Sequence[Replayed], rounds: int) -> list[list[float]]:
        """Call each in turns; the times in us of each in each round, [graphs][rounds]."""
        times_us: list[list[float]] = [[] for _ in graphs]
        for turns in orders(len(graphs), rounds):
            for number in turns:
                self.flush.zero_()
                begun = time.perf_counter()
                graphs[number].replay()
                times_us[number].append(1e6 * (time.perf_counter() - begun))
        return times_us


class _Again:
    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call

    def replay(self) -> None:
        self._call()
