"""How a kernel is timed and judged here: what the tuner uses (aot/clock.py, aot/inputs.py), and the floor.

- Time on the device: CUDA-graph replay, the L2 cache flushed before every call, events right around
  the replay, the median.
- Correct first: relative Frobenius error against fp32 below 1e-2, the output poisoned with NaN before.
- Weights N(0, 0.05), activations N(0, 1). Rows sorted by expert.
"""

from __future__ import annotations

from pretuned.aot.clock import Clock
from pretuned.aot.inputs import MAX_ERROR, Inputs, activations, relative_error, routed_rows, weights

__all__ = [
    "BYTES_PER_S",
    "FLOPS",
    "MAX_ERROR",
    "Clock",
    "Inputs",
    "activations",
    "bytes_us",
    "floor_us",
    "relative_error",
    "routed_rows",
    "weights",
]

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
