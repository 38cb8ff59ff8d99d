"""The method of all benchmarks: how a kernel is timed and tested, and the least time that it could take.

It is the tuner's method (aot/measure/clock.py, aot/measure/inputs.py):

- Time on the device: CUDA-graph replay, the L2 cache flushed before each call, events around the replay, the median.
- Correctness first: relative Frobenius error against fp32 below 1e-2; the output holds NaN before the call.
- Weights N(0, 0.05), activations N(0, 1). Rows sorted by expert.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

from pretuned.aot.compare.run import Inputs, relative_error
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

# Measured on an H200: the rates of a large bf16 product and of a large copy.
FLOPS = 790e12
BYTES_PER_S = 4.3e12


def floor_us(M: int, N: int, K: int, active: int, itemsize: int = 2) -> float:
    """Return the least possible time in us: of the arithmetic, or of moving each byte once.

    ``active`` is the number of experts whose weights are moved: experts with rows; all for dW.
    """
    return max(2e6 * M * N * K / FLOPS, bytes_us(M, N, K, active, itemsize))


def bytes_us(M: int, N: int, K: int, active: int, itemsize: int = 2) -> float:
    """Return the time in us of moving each byte once."""
    return 1e6 * itemsize * (active * N * K + M * K + M * N) / BYTES_PER_S


def median_us(clock: Clock, call: Callable[[], object], repeats: int = 20, budget_ms: float = 30.0) -> float:
    """Return the median time in us of up to ``repeats`` replays; fewer, but at least 5, if the budget is short."""
    graph = clock.capture(call)
    last_us = clock.rounds_us([graph], 2)[0][-1]
    count = max(5, min(repeats, int(budget_ms * 1000 / max(last_us, 1.0))))
    return statistics.median(clock.rounds_us([graph], count)[0])
