"""How a kernel is timed and judged here: the routing, the inputs, the clock, the reference.

- Time on the device: CUDA-graph replay, the L2 cache flushed before every call, events right around
  the replay, the median.
- Correct first: relative Frobenius error against fp32 below 1e-2, the output poisoned with NaN before.
- Weights N(0, 0.05), activations N(0, 1). Rows sorted by expert.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

FLUSH_BYTES = 256 << 20
MAX_ERROR = 1e-2
# One H200, measured: what a large bf16 product and a large copy reach.
FLOPS = 790e12
BYTES_PER_S = 4.3e12


def routed_rows(E: int, top_k: int, T: int, seed: int = 0) -> torch.Tensor:
    """Rows of each expert, int32 [E], for T tokens: skewed by rank (exponent 0.3), some experts empty."""
    g = torch.Generator().manual_seed(seed * 7919 + T * 31 + E)
    rank = torch.randperm(E, generator=g) + 1
    logits = torch.randn(T, E, generator=g) - 0.3 * torch.log(rank.float())
    none = E // 32 if E >= 32 else int(E >= 16)
    if none:
        logits[:, rank > E - none] = -50.0
    chosen = logits.softmax(-1).topk(top_k, -1).indices
    return torch.bincount(chosen.flatten(), minlength=E).to(torch.int32)


@dataclass(frozen=True)
class Inputs:
    """One problem's tensors on the GPU: x [M, K], w [E, N, K], m_sizes [E], and for a gradient dy [M, N]."""

    x: torch.Tensor
    w: torch.Tensor
    m_sizes: torch.Tensor
    dy: torch.Tensor | None = None


def weights(E: int, N: int, K: int, dtype: torch.dtype, device: str = "cuda") -> torch.Tensor:
    """w [E, N, K] ~ N(0, 0.05), made expert by expert: DeepSeek-V3's is 15 GB."""
    g = torch.Generator(device).manual_seed(1)
    w = torch.empty(E, N, K, dtype=dtype, device=device)
    for matrix in w:
        matrix.copy_(torch.randn(N, K, generator=g, device=device) * 0.05)
    return w


def activations(M: int, K: int, dtype: torch.dtype, device: str = "cuda") -> torch.Tensor:
    """x [M, K] ~ N(0, 1)."""
    return torch.randn(M, K, generator=torch.Generator(device).manual_seed(2), device=device).to(dtype)


def relative_error(result: torch.Tensor, inputs: Inputs, op: str = "forward") -> float:
    """||result - ref|| / ||ref||, ref in fp32, expert by expert. NaN where anything is not finite.

    forward: y[g] = x[g] @ w[g].T; dX: dx[g] = dy[g] @ w[g]; dW: dw[g] = dy[g].T @ x[g].
    """
    wrong = total = 0.0
    start = 0
    torch.backends.cuda.matmul.allow_tf32 = False  # whatever the call under test was allowed
    for expert, rows in enumerate(inputs.m_sizes.tolist()):
        here = slice(start, start + rows)
        start += rows
        if not rows and op != "dW":
            continue
        if op == "forward":
            want = inputs.x[here].float() @ inputs.w[expert].float().T
        else:
            assert inputs.dy is not None
            dy = inputs.dy[here].float()
            want = dy @ inputs.w[expert].float() if op == "dX" else dy.T @ inputs.x[here].float()
        got = result[expert if op == "dW" else here].float()
        wrong += float((got - want).square().sum(dtype=torch.float64))
        total += float(want.square().sum(dtype=torch.float64))
    return (wrong / total) ** 0.5 if total else 0.0


class Clock:
    """Times a launch by graph replay with a cold L2."""

    def __init__(self) -> None:
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")

    def capture(self, call: Callable[[], object]) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph

    def median_us(self, call: Callable[[], object], repeats: int = 50, budget_ms: float = 200.0) -> float:
        """The median of up to ``repeats`` replays, fewer (at least 5) where they would pass the budget."""
        graph = self.capture(call)
        one = self._times_us(graph, 2)[-1]
        count = max(5, min(repeats, int(budget_ms * 1000 / max(one, 1.0))))
        return statistics.median(self._times_us(graph, count))

    def _times_us(self, graph: torch.cuda.CUDAGraph, count: int) -> list[float]:
        pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(count)]
        for start, end in pairs:
            self.flush.zero_()
            start.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
        return [1000 * start.elapsed_time(end) for start, end in pairs]


def floor_us(M: int, N: int, K: int, active: int, itemsize: int = 2) -> float:
    """The least time: arithmetic, or every byte moved once.

    ``active``: the experts whose weights are moved; those with rows, but all of them for dW.
    """
    moved = itemsize * (active * N * K + M * K + M * N)
    return 1e6 * max(2.0 * M * N * K / FLOPS, moved / BYTES_PER_S)
