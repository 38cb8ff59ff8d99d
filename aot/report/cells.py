"""The data of a report: one cell for each problem, bucket and GPU that was measured, and a GPU's roofline."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ...artifacts.records import DType, Gpu, Layout, Model, Op, Problem
from ...kernels.chips import Chip
from ...kernels.cost import expected_rows
from ...kernels.spec import result_columns


class Roofline(NamedTuple):
    """The least times of memory traffic and of arithmetic, each alone, in microseconds."""

    memory_us: float
    compute_us: float

    @property
    def least_us(self) -> float:
        """max(memory_us, compute_us): no launch can be faster."""
        return max(self.memory_us, self.compute_us)

    @property
    def bound(self) -> str:
        """The limit that applies: ``memory`` or ``compute``."""
        return "memory" if self.memory_us >= self.compute_us else "compute"


def roofline(problem: Problem, M: int, chip: Chip) -> Roofline:
    """The roofline of ``problem`` with M rows in all.

    compute = 2 M N K / rate. memory = bytes / bandwidth, everything read or written once, s bytes an element:

    - forward, dX: A W + (M N + M K) s, W the bytes of a matrix of w with its scales and A the expected active experts
      of the routing in kernels/cost.py; with silu in the epilogue M N / 2 are written
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


GemmKey = tuple[int, int, int, DType, Layout]


def gemm_key(problem: Problem) -> GemmKey:
    """The key of the GEMM that a problem belongs to."""
    return (problem.E, problem.N, problem.K, problem.dtype, problem.layout)


class State(enum.Enum):
    """The evidence for a cell."""

    MEASURED = "measured"
    MODELLED = "modelled"
    MISSING = "missing"

    __hash__ = object.__hash__  # Enum.__hash__ is slow


class TimedCandidate(NamedTuple):
    """A variant that was measured in a cell. ``model_us`` is the cost model's estimate, if its cubin is known."""

    config: str
    time_us: float
    model_us: float | None


class Cell(NamedTuple):
    """One problem and bucket. Times are microseconds of one launch with ``bucket`` rows.

    ``time_us`` is the choice's, measured or modelled as in ``state``; ``model_us`` is this version's estimate for the
    same variant. ``torch_us`` is torch's grouped_mm at the same GPU clock. ``tried`` variants were measured; their
    median is ``spread`` times the fastest. ``candidates`` lists them for a sample of cells, fastest first. ``failures``
    are variants that failed, with reasons. ``plan`` names the ways of a call that run another variant.
    """

    problem: Problem
    bucket: int
    state: State
    roofline: Roofline
    config: str = ""
    time_us: float = math.nan
    runner_up: str = ""
    runner_up_us: float | None = None
    model_us: float | None = None
    torch_us: float | None = None
    gpu: Gpu | None = None
    tried: int = 0
    spread: float | None = None
    candidates: tuple[TimedCandidate, ...] = ()
    failures: tuple[str, ...] = ()
    plan: str = ""

    @property
    def fraction(self) -> float:
        """The fraction of the roofline that the choice reaches: 1 is all of it."""
        return self.roofline.least_us / self.time_us

    @property
    def against_torch(self) -> float | None:
        """How many times faster than torch's grouped_mm; None unless both were measured."""
        return self._over_measured(self.torch_us)

    @property
    def model_ratio(self) -> float | None:
        """Modelled over measured time; None unless both are known."""
        return self._over_measured(self.model_us)

    def _over_measured(self, us: float | None) -> float | None:
        return us / self.time_us if us is not None and self.state is State.MEASURED else None


@dataclass(frozen=True, slots=True)
class WeightCells:
    """The cells of one weight: E matrices of N x K, in every op and fusion."""

    E: int
    N: int
    K: int
    dtype: DType
    layout: Layout
    cells: tuple[Cell, ...]

    @property
    def key(self) -> GemmKey:
        """The key that identifies the weight."""
        return (self.E, self.N, self.K, self.dtype, self.layout)

    @property
    def title(self) -> str:
        """The weight's name in headings."""
        text = f"E={self.E} N={self.N} K={self.K} {self.dtype.value}"
        return text if self.layout is Layout.NK else f"{text} w={self.layout.value}"


@dataclass(frozen=True, slots=True)
class Sheet:
    """The contents of one report. The rooflines are by the published figures of ``chips``."""

    title: str
    facts: Mapping[str, str]
    sm: int
    chips: tuple[Chip, ...]
    models: tuple[Model, ...]
    gemms: tuple[WeightCells, ...]
    notes: tuple[str, ...]

    @property
    def cells(self) -> list[Cell]:
        """All cells, problem by problem."""
        return [cell for gemm in self.gemms for cell in gemm.cells]
