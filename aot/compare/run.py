"""Compare the cells of some models: check each library against fp32, then time all in turns (aot/measure/clock.py)."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from ...artifacts.errors import HostError
from ...artifacts.records import DType, Op, Problem
from ...runtime import explain
from ..measure.clock import Clock, HostClock, Replayed
from ..measure.inputs import MAX_ERROR, activations, routed_rows, weights
from ..models.layer import LayerGemm, LayerShard
from .libraries import Libraries, Library, NoCall, PeerProduct, PreparedCall, find_libraries, reason
from .products import Call, Inputs, ours, relative_error
from .result import OURS, ComparedCell, Comparison


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


FIRST_OF_TRAINING = 1024  # tokens: smaller batches are not trained
_ROUNDS = (5, 50)


def cells_of(
    shards: Sequence[LayerShard], ops: Sequence[Op], tokens: Sequence[int]
) -> list[tuple[LayerShard, LayerGemm, Op, int]]:
    """The cells to time, few tokens first: arithmetic heats the chip, and its clock falls."""
    return [
        (shard, gemm, op, T)
        for many in (False, True)
        for shard in shards
        for gemm in shard.gemms()
        for op in ops
        for T in tokens
        if (T >= FIRST_OF_TRAINING) is many and (op is Op.FORWARD or many)
    ]


def compare(
    shards: Sequence[LayerShard],
    ops: Sequence[Op],
    tokens: Sequence[int],
    device: torch.device,
    budget_ms: float,
    on_cell: Callable[[int, int], None] = lambda done, total: None,
) -> Comparison:
    """Time all cells in bf16, each library up to ``budget_ms`` a cell.

    Raises
    ------
    HostError
        if the largest weights do not fit the GPU.
    """
    begun = time.monotonic()
    wanted = cells_of(shards, ops, tokens)
    there = find_libraries(device)
    bench = _Compared(there, device, budget_ms, max(gemm.E * gemm.N * gemm.K for _, gemm, _, _ in wanted))
    cells = []
    for i, cell in enumerate(bench.all(wanted)):
        cells.append(cell)
        on_cell(i + 1, len(wanted))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    versions = {library.name: library.version for library in there.here}
    return Comparison(name, versions, dict(there.absent), tuple(cells), time.monotonic() - begun)


class _Compared:
    """One device, with memory for the largest weights throughout: freeing much slows later launches."""

    def __init__(self, there: Libraries, device: torch.device, budget_ms: float, most: int) -> None:
        self._there, self._device, self._budget_ms = there, device, budget_ms
        self._clock: Clock | HostClock = Clock(device) if device.type == "cuda" else HostClock()
        try:
            self._room = torch.empty(most, dtype=torch.bfloat16, device=device)
        except torch.cuda.OutOfMemoryError:
            raise HostError(
                f"no room on this GPU for weights of {2 * most / 2**30:.1f} GiB: name a shard of the model, e.g. tp=4"
            ) from None

    def all(self, wanted: Sequence[tuple[LayerShard, LayerGemm, Op, int]]) -> Iterator[ComparedCell]:
        """Yield the cells in order; weights are made when another product's cells begin."""
        last: LayerGemm | None = None
        for shard, gemm, op, T in wanted:
            if gemm != last:
                w = weights(gemm.E, gemm.N, gemm.K, torch.bfloat16, self._device, self._room)
                last = gemm
            try:
                with torch.no_grad():
                    cell = self._cell(shard, gemm, op, T, w)
            except torch.cuda.OutOfMemoryError as error:
                raise HostError(f"{gemm.role} {op.value} at {T} tokens: {reason(error)}. Name fewer --tokens") from None
            yield cell
            self._clock.release()

    def _cell(self, shard: LayerShard, gemm: LayerGemm, op: Op, T: int, w: torch.Tensor) -> ComparedCell:
        top_k = max(1, min(gemm.E, math.ceil(shard.experts_per_token / shard.ep)))
        M = T * top_k
        dy = None if op is Op.FORWARD else activations(M, gemm.N, w.dtype, self._device)
        m_sizes = routed_rows(gemm.E, top_k, T).to(self._device)
        inputs = Inputs(activations(M, gemm.K, w.dtype, self._device), w, m_sizes, dy)
        product = PeerProduct(op.value, inputs, shard.width, top_k, T)
        libraries = (Library(OURS, "", lambda cell: PreparedCall(ours(cell.op, cell.inputs))), *self._there.here)
        graphs, errors, left_out = [], {}, {}
        names = []
        for library in libraries:
            try:
                prepared = library.make(product)
                captured = capture_call(self._clock, prepared.call)
                error = replayed_error(self._clock, captured, inputs, op.value, prepared.at)
            except torch.cuda.OutOfMemoryError:
                left_out[library.name] = "no room on this GPU"
            except NoCall as why:
                left_out[library.name] = str(why)
            except Exception as failed:  # an error of one library: the others go on
                if library.name == OURS:
                    raise
                left_out[library.name] = reason(failed)
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)  # an illegal access ends the run here
            else:
                if error < MAX_ERROR:
                    names.append(library.name)
                    graphs.append(captured.graph)
                    errors[library.name] = float(f"{error:.3g}")
                else:
                    left_out[library.name] = f"wrong: relative error {error:.2g}, wanted below {MAX_ERROR}"
        times = self._times(graphs)
        return ComparedCell(
            str(shard.name),
            shard.tp,
            shard.ep,
            gemm.role,
            op.value,
            T,
            M,
            gemm.E,
            gemm.N,
            gemm.K,
            self._runs(Problem(op, DType.BF16, gemm.E, gemm.N, gemm.K), M),
            {name: round(us, 3) for name, us in zip(names, times, strict=True)},
            errors,
            left_out,
        )

    def _times(self, graphs: Sequence[Replayed]) -> list[float]:
        """The medians in microseconds, in turns; the first two rounds warm up and show how many fit the budget."""
        if not graphs:
            return []
        least, most = _ROUNDS
        once = sum(row[-1] for row in self._clock.rounds_us(graphs, 2))
        rounds = max(least, min(most, int(len(graphs) * self._budget_ms * 1000 / max(once, 1.0))))
        return [statistics.median(row) for row in self._clock.rounds_us(graphs, rounds)]

    def _runs(self, problem: Problem, M: int) -> str:
        """The kernel of pretuned's call: a config, ``torch`` if no bundle has a kernel, ``reference`` on the CPU."""
        if self._device.type != "cuda":
            return "reference"
        explanation = explain(problem, M=M)
        if explanation.torch_us is not None:
            return "torch, measured faster"
        return str(explanation.chosen.config) if explanation.chosen is not None else explanation.runs
