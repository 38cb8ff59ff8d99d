"""Codes of w by the kernel for every GPU (kernels/gemm/portable/coded.py), best guesses first."""

from __future__ import annotations

from ...artifacts.records.precision import DType
from ...artifacts.records.problem import Op
from ..contract.config import Config, Schedule
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
FALLBACK: Rows = ((32, 64, 64, 4, 2),)


def candidates(op: Op, dtype: DType) -> list[Config]:
    """The pool of an op and dtype."""
    if op is Op.DW or dtype.quantises_x:
        return []
    return configs(FOUR_BITS if dtype.precision.w.bits == 4 else EIGHT_BITS, Schedule.TILE)


def fallbacks(op: Op, dtype: DType) -> list[Config]:
    """What is compiled for any N and K."""
    return [] if op is Op.DW or dtype.quantises_x else configs(FALLBACK, Schedule.TILE)
