"""``Spec``, a variant before it is compiled, and ``Gemm``, a problem with the sizes that a kernel sees."""

from __future__ import annotations

from ...artifacts.records.precision import DType
from ...artifacts.records.problem import Fusion, Layout, Op, Problem
from ...artifacts.tuples import NamedTuple
from .config import Config

MAX_EXPERTS = 512  # a kernel keeps the rows of so many experts in registers: one cubin serves all smaller E
MAX_EXPERTS_FALLBACK = 65536  # with more experts the counts are scanned for each tile, MAX_EXPERTS at a time


class Spec(NamedTuple):
    """A variant before it is compiled. A spec and a target give one cubin."""

    op: Op
    dtype: DType
    config: Config
    layout: Layout = Layout.NK
    fusion: Fusion = Fusion.NONE
    alignment: int = 16
    max_experts: int = MAX_EXPERTS

    def __str__(self) -> str:
        text = f"{self.op.value} {self.dtype.value} {self.config}"
        text += f" w={self.layout.value}" if self.layout is not Layout.NK else ""
        text += " gather" if Fusion.GATHER in self.fusion else ""
        text += " silu" if Fusion.SILU in self.fusion else ""
        text += " low-rank" if Fusion.LOW_RANK in self.fusion else ""
        return text + (" unaligned" if self.alignment == 1 else "")


class Gemm(NamedTuple):
    """A forward or dX with the sizes that the kernel sees: the result's ``columns``, ``reduction``, w's order.

    ``w_kn``: the elements of w that belong to neighbouring result columns are contiguous.
    """

    columns: int
    reduction: int
    w_kn: bool


def gemm_of(problem: Problem) -> Gemm:
    """Return the sizes of a forward or dX that the kernel sees.

    The forward multiplies by w[g].T: columns N, reduction K. dX multiplies by w[g]: columns K, reduction N, and the
    same memory is read transposed.
    """
    forward = problem.op is Op.FORWARD
    kn = (problem.layout is Layout.KN) == forward
    return Gemm(problem.N, problem.K, kn) if forward else Gemm(problem.K, problem.N, kn)


def code_of(op: Op, fusion: Fusion) -> Fusion:
    """Return the fusion of the variants that run a call with ``fusion``.

    - NONE runs calls without fusion; it is separate because it is faster.
    - SCATTER runs SCATTER, WEIGHT and BIAS in any combination, chosen at run time by flags.
    - GATHER runs these with GATHER, which needs other loads.
    - SILU and SILU with GATHER are variants of their own, for the forward.
    - LOW_RANK and LOW_RANK with GATHER are variants of their own; the second takes flags.

    dW has no fusions: rows are gathered before. Through an index an H200 took 2.3 ms instead of 0.8 (Qwen3-30B,
    gate_up, T=8192).

    Raises
    ------
    ValueError
        for SILU with anything but GATHER, or not of the forward; for LOW_RANK of dW, or with other fusions but without
        GATHER.
    """
    if Fusion.LOW_RANK in fusion:
        other = fusion & ~Fusion.LOW_RANK
        if op is Op.DW or Fusion.SILU in other or (other and Fusion.GATHER not in other):
            raise ValueError(f"there is no code for {fusion} of {op.value}: LOW_RANK goes alone, or with GATHER")
        return Fusion.LOW_RANK | (other & Fusion.GATHER)
    if Fusion.SILU in fusion:
        if op is not Op.FORWARD or fusion & ~(Fusion.SILU | Fusion.GATHER):
            raise ValueError(f"there is no code for {fusion} of {op.value}: SILU goes with GATHER, of the forward")
        return fusion
    if op is Op.DW or not fusion:
        return Fusion.NONE
    return Fusion.GATHER if Fusion.GATHER in fusion else Fusion.SCATTER


def indexed(fusion: Fusion) -> bool:
    """Return whether a variant reads ``flags``, and by them an index, weights or a bias."""
    return bool(fusion & ~Fusion.LOW_RANK) and Fusion.SILU not in fusion


def result_columns(columns: int, fusion: Fusion) -> int:
    """Return the columns of y for a product with ``columns``: half as many if silu joins gate and up."""
    return columns // 2 if Fusion.SILU in fusion else columns


def w_kn(spec: Spec) -> bool:
    return (spec.layout is Layout.KN) == (spec.op is Op.FORWARD)


def takes_codes_of_x(dtype: DType, layout: Layout) -> bool:
    """Return whether a row kernel must quantise x before: kernels for the checkpoint layout quantise x themselves."""
    return dtype.quantises_x and layout is not Layout.STORED
