"""Every cell of some models: each library judged against fp32, then all timed in turns (aot/measure/clock.py)."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from ...artifacts.errors import HostError
from ...artifacts.records.precision import DType
from ...artifacts.records.problem import Op, Problem
from ...runtime import explain
from ..measure.clock import Clock, HostClock, Replayed
from ..measure.inputs import MAX_ERROR, activations, routed_rows, weights
from ..models.layer import LayerGemm, LayerShard
from .libraries import Libraries, Library, Made, NoCall, PeerProduct, found, reason
from .products import Inputs, ours
from .result import OURS, ComparedCell, Comparison
from .timing import replayed_error, taken

FIRST_OF_TRAINING = 1024  # tokens: a gradient of fewer is nobody's
_ROUNDS = (5, 50)


def cells_of(
    shards: Sequence[LayerShard], ops: Sequence[Op], tokens: Sequence[int]
) -> list[tuple[LayerShard, LayerGemm, Op, int]]:
    """What is to be timed, few tokens first: arithmetic heats the chip, and its clock falls."""
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
        where the largest weights find no room on the GPU.
    """
    begun = time.monotonic()
    wanted = cells_of(shards, ops, tokens)
    there = found(device)
    bench = _Compared(there, device, budget_ms, max(gemm.E * gemm.N * gemm.K for _, gemm, _, _ in wanted))
    cells = []
    for i, cell in enumerate(bench.all(wanted)):
        cells.append(cell)
        on_cell(i + 1, len(wanted))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    versions = {one.name: one.version for one in there.here}
    return Comparison(name, versions, dict(there.absent), tuple(cells), time.monotonic() - begun)


class _Compared:
    """One device, and memory for the largest weights, held throughout: freeing much slows later launches."""

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
        """The cells, one after another; weights are drawn where another product's begin."""
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
        libraries = (Library(OURS, "", lambda one: Made(ours(one.op, one.inputs))), *self._there.here)
        graphs, errors, left_out = [], {}, {}
        names = []
        for library in libraries:
            try:
                made = library.make(product)
                one = taken(self._clock, made.call)
                error = replayed_error(self._clock, one, inputs, op.value, made.at)
            except torch.cuda.OutOfMemoryError:
                left_out[library.name] = "no room on this GPU"
            except NoCall as why:
                left_out[library.name] = str(why)
            except Exception as failed:  # another library's own; the others go on
                if library.name == OURS:
                    raise
                left_out[library.name] = reason(failed)
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)  # an illegal access ends the run here
            else:
                if error < MAX_ERROR:
                    names.append(library.name)
                    graphs.append(one.graph)
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
        """The medians in microseconds, in turns; the first two rounds warm up and tell how many there is time for."""
        if not graphs:
            return []
        least, most = _ROUNDS
        once = sum(row[-1] for row in self._clock.rounds_us(graphs, 2))
        rounds = max(least, min(most, int(len(graphs) * self._budget_ms * 1000 / max(once, 1.0))))
        return [statistics.median(row) for row in self._clock.rounds_us(graphs, rounds)]

    def _runs(self, problem: Problem, M: int) -> str:
        """What ran pretuned's side: a config, ``torch`` if no bundle has a kernel, ``reference`` on the CPU."""
        if self._device.type != "cuda":
            return "reference"
        told = explain(problem, M=M)
        if told.torch_us is not None:
            return "torch, measured faster"
        return str(told.chosen.config) if told.chosen is not None else told.runs
