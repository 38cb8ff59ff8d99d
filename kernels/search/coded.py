"""Codes of w by the kernels that are for no one generation (coded.py and w8a8.py of kernels/gemm/portable).

Best guesses first.
"""

from __future__ import annotations

from ...artifacts.records.precision import DType
from ...artifacts.records.problem import Op
from ..contract.config import Config, Schedule
from ..hardware.arch import Arch, Feature, Generation, arch_of
from .tiles import Row, Rows, configs

# Few rows wait for w: long steps of codes, little of anything else. Many are bound by turning codes into bf16, which
# large tiles share out. Each was the fastest of some number of rows on an H200 (benchmarks/speed/coded.py), but for the
# last two of 8 bits, which nobody has timed.
FOUR_BITS: tuple[Row, ...] = (
    (16, 64, 256, 4, 3),
    (64, 128, 64, 4, 3),
    (128, 128, 64, 8, 3),
)
EIGHT_BITS: tuple[Row, ...] = (
    (16, 64, 128, 4, 4),
    (64, 128, 64, 4, 3),
    (128, 128, 64, 8, 3),
    (64, 64, 128, 4, 3),  # dX of codes in order wants one block of columns
    (128, 64, 64, 4, 3),
)
# Codes by codes, of which nothing was timed. A step is 128 of K; x, of 16 bits until it is loaded, takes most room.
BOTH: tuple[Row, ...] = (
    (16, 64, 128, 4, 4),
    (16, 128, 128, 4, 3),
    (32, 64, 128, 4, 3),
    (64, 64, 128, 4, 3),
    (64, 128, 128, 8, 3),
    (128, 128, 128, 8, 2),
    (128, 128, 128, 8, 3),
)
FALLBACK: Rows = ((32, 64, 64, 4, 2),)
FALLBACK_OF_BOTH: Rows = ((32, 64, 128, 4, 2),)


def _none(op: Op, dtype: DType, arch: Arch) -> bool:
    """Whether there is nothing to try. 9.0 has kernels of its own for codes by codes, of w in order."""
    if dtype.quantises_x:
        return op is not Op.FORWARD or not arch.has(Feature.FP8) or arch.generation is Generation.HOPPER
    return op is Op.DW


def candidates(op: Op, dtype: DType, sm: int) -> list[Config]:
    """The pool of an op and dtype on a capability."""
    if _none(op, dtype, arch_of(sm)):
        return []
    if dtype.quantises_x:
        return configs(BOTH, Schedule.TILE)
    return configs(FOUR_BITS if dtype.precision.w.bits == 4 else EIGHT_BITS, Schedule.TILE)


def fallbacks(op: Op, dtype: DType, sm: int) -> list[Config]:
    """What is compiled for any N and K."""
    if _none(op, dtype, arch_of(sm)):
        return []
    return configs(FALLBACK_OF_BOTH if dtype.quantises_x else FALLBACK, Schedule.TILE)
