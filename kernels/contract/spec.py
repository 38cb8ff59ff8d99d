"""What a variant is before it is compiled, and a problem in its kernel's words."""

from __future__ import annotations

from ...artifacts.records.precision import DType
from ...artifacts.records.problem import Fusion, Layout, Op, Problem
from ...artifacts.tuples import NamedTuple
from .config import Config

MAX_EXPERTS = 512  # whose rows a kernel keeps in registers: every shape up to here is served by one cubin
MAX_EXPERTS_FALLBACK = 65536  # beyond, the counts are scanned for every tile, MAX_EXPERTS of them at a time


class Spec(NamedTuple):
    """One variant before it is compiled: kernel, config and specialisation. With a target it is one cubin."""

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
    """A problem in the kernel's words: ``columns`` of the result, ``reduction``, and how w lies.

    ``w_kn`` is true where w's columns (the result's) are the contiguous ones.
    """

    columns: int
    reduction: int
    w_kn: bool


def gemm_of(problem: Problem) -> Gemm:
    """The kernel's view of a row-grouped problem.

    The forward multiplies by w[g].T: columns N, reduction K. dX multiplies by w[g]: columns K,
    reduction N, and the same memory read the other way round.
    """
    forward = problem.op is Op.FORWARD
    kn = (problem.layout is Layout.KN) == forward
    return Gemm(problem.N, problem.K, kn) if forward else Gemm(problem.K, problem.N, kn)


def code_of(op: Op, fusion: Fusion) -> Fusion:
    """The fusion whose variants run a call: NONE, SCATTER (every form that gathers nothing), GATHER (every form).

    What a call does beside the product is chosen at run time, by flags; only gathering needs other loads,
    and the plain code is kept apart because it is faster. dW has plain code alone, and rows are gathered for it
    beforehand: through an index an H200 took 2.3 ms where the plain code took 0.8 (Qwen3-30B, gate_up, T=8192).
    SILU, alone and with GATHER, has code of its own, which does nothing else. So has LOW_RANK, with GATHER every form.

    Raises
    ------
    ValueError
        for SILU with anything but GATHER, or of another op than the forward; for LOW_RANK of dW, or with rows that are
        moved in other ways.
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
    """Whether code reads ``flags``, and an index or a bias if they say so."""
    return bool(fusion & ~Fusion.LOW_RANK) and Fusion.SILU not in fusion


def result_columns(columns: int, fusion: Fusion) -> int:
    """The columns of y, of a product of so many: half as many where gate and up become one."""
    return columns // 2 if Fusion.SILU in fusion else columns


def w_kn(spec: Spec) -> bool:
    return (spec.layout is Layout.KN) == (spec.op is Op.FORWARD)


def takes_codes_of_x(dtype: DType, layout: Layout) -> bool:
    """Whether kernels read x as codes that a pass has made: those for w as it is stored quantise x themselves."""
    return dtype.quantises_x and layout is not Layout.STORED
