"""The least time of a grouped GEMM by a GPU's published figures, to compare measured times with."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ...artifacts.records.precision import DType
from ...artifacts.records.problem import Op, Problem
from ...kernels.contract.spec import result_columns
from ...kernels.cost.routing import expected_rows
from ...kernels.hardware.chips import Chip


class Roofline(NamedTuple):
    """The least times of memory traffic and of arithmetic, each alone, in microseconds."""

    memory_us: float
    compute_us: float

    @property
    def least_us(self) -> float:
        """The longer of the two: no launch can be faster."""
        return max(self.memory_us, self.compute_us)

    @property
    def bound(self) -> str:
        """The limit that applies: ``memory`` or ``compute``."""
        return "memory" if self.memory_us >= self.compute_us else "compute"


def roofline(problem: Problem, M: int, chip: Chip) -> Roofline:
    """The roofline of ``problem`` with M rows in all.

    compute = 2 M N K / rate. memory = bytes / bandwidth, everything read or written once, s bytes an element:

    - forward, dX: A W + (M N + M K) s, W the bytes of a matrix of w with its scales and A the expected active experts
      of the routing in kernels/cost/routing.py; with silu in the epilogue M N / 2 are written
    - dW: (E N K + M N + M K) s, as dw of every expert is written

    Rates and bandwidth are published figures of ``chip``: dense, at boost clock.
    """
    return rooflines(problem, chip)(M)


def rooflines(problem: Problem, chip: Chip) -> Callable[[int], Roofline]:
    """``roofline`` as a function of M, to call it for many."""
    E, N, K, size = problem.E, problem.N, problem.K, problem.dtype.itemsize
    all_experts, w_bytes = problem.op is Op.DW, problem.dtype.precision.w_bytes(N, K)
    row_bytes = (result_columns(N, problem.fusion) + K) * size
    rates = {DType.FP32: chip.fp32_tflops, DType.TF32: chip.tf32_tflops}
    tflops = rates.get(problem.dtype, chip.bf16_tflops)

    def of(M: int) -> Roofline:
        moved_bytes = (float(E) if all_experts else expected_rows(E, M).active) * w_bytes + M * row_bytes
        return Roofline(moved_bytes / chip.bandwidth_gbs * 1e-3, 2.0 * M * N * K / tflops * 1e-6)

    return of
