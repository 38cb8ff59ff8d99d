"""How a kernel is timed and judged here: with what the tuner uses (aot/measure/clock.py, aot/measure/inputs.py), and
the floor.

- Time on the device: CUDA-graph replay, the L2 cache flushed before every call, events right around
  the replay, the median.
- Correct first: relative Frobenius error against fp32 below 1e-2, the output poisoned with NaN before.
- Weights N(0, 0.05), activations N(0, 1). Rows sorted by expert.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

from pretuned.aot.compare.products import Inputs, relative_error
from pretuned.aot.measure.clock import Clock
from pretuned.aot.measure.inputs import MAX_ERROR, activations, routed_rows, weights

__all__ = [
    "BYTES_PER_S",
    "FLOPS",
    "MAX_ERROR",
    "MODELS",
    "Clock",
    "Inputs",
    "activations",
    "bytes_us",
    "floor_us",
    "median_us",
    "relative_error",
    "routed_rows",
    "weights",
]

# The six models that the peers were measured on: (name, E, H, I, top_k); two GEMMs each.
MODELS = (
    ("qwen3-30b", 128, 2048, 768, 8),
    ("qwen3-next", 512, 2048, 512, 10),
    ("deepseek-v3", 256, 7168, 2048, 8),
    ("mixtral-8x7b", 8, 4096, 14336, 2),
    ("gpt-oss-20b", 32, 2880, 2880, 4),
    ("olmoe", 64, 2048, 1024, 8),
)

# One H200, measured: what a large bf16 product and a large copy reach.
FLOPS = 790e12
BYTES_PER_S = 4.3e12


def floor_us(M: int, N: int, K: int, active: int, itemsize: int = 2) -> float:
    """The least time: arithmetic, or every byte moved once.

    ``active``: the experts whose weights are moved; those with rows, but all of them for dW.
    """
    return max(2e6 * M * N * K / FLOPS, bytes_us(M, N, K, active, itemsize))


def bytes_us(M: int, N: int, K: int, active: int, itemsize: int = 2) -> float:
    """Every byte moved once."""
    return 1e6 * itemsize * (active * N * K + M * K + M * N) / BYTES_PER_S


def median_us(clock: Clock, call: Callable[[], object], repeats: int = 20, budget_ms: float = 30.0) -> float:
    """The median of up to ``repeats`` replays, fewer (at least 5) where they would pass the budget."""
    graph = clock.capture(call)
    last_us = clock.rounds_us([graph], 2)[0][-1]
    count = max(5, min(repeats, int(budget_ms * 1000 / max(last_us, 1.0))))
    return statistics.median(clock.rounds_us([graph], count)[0])
