"""Ampere and Ada: pointers (cp.async). Best guesses first."""

from __future__ import annotations

from ...artifacts.records.precision import DType
from ...artifacts.records.problem import Op
from ..contract.config import Config, Schedule
from .tiles import Row, configs, fp32, scaled

# Small M: one tile a program, long reduction steps.
DECODE: tuple[Row, ...] = (
    (16, 64, 256, 4, 3),
    (16, 64, 128, 4, 4),
    (16, 64, 128, 4, 3),
    (16, 128, 128, 4, 3),
    (16, 32, 256, 4, 4),
    (32, 64, 128, 4, 4),
    (32, 128, 128, 4, 3),
    (64, 64, 128, 4, 3),
    (64, 128, 128, 4, 3),
)
# Large M. 128x128x64 with 4 warps spills 120 bytes a thread on sm_80.
PERSISTENT: tuple[Row, ...] = (
    (128, 256, 64, 8, 3),
    (128, 256, 32, 8, 4),
    (128, 256, 32, 8, 3),
    (256, 128, 32, 8, 3),
    (128, 128, 64, 8, 3),
    (128, 128, 32, 4, 4),
    (128, 128, 32, 8, 4),
    (64, 256, 32, 4, 4),
    (64, 128, 64, 4, 4),
    (64, 128, 32, 4, 4),
    (128, 64, 64, 4, 3),
    (64, 64, 64, 4, 4),
    (32, 128, 64, 4, 4),
)
TILE: tuple[Row, ...] = (
    *DECODE,
    (16, 64, 64, 4, 4),
    (16, 128, 64, 4, 4),
    (32, 64, 64, 4, 4),
    (32, 128, 64, 4, 3),
    (64, 64, 64, 4, 4),
    (64, 128, 64, 4, 3),
)
# dW, nothing measured: short steps waste less on ragged ends.
DW: tuple[Row, ...] = (
    (64, 128, 256, 8, 3),
    (32, 128, 256, 8, 3),
    (32, 128, 256, 8, 4),
    (32, 256, 128, 8, 3),
    (64, 128, 128, 8, 3),
    (64, 128, 128, 4, 3),
    (32, 128, 128, 4, 3),
    (32, 128, 128, 4, 4),
    (32, 128, 128, 8, 4),
    (16, 128, 128, 4, 4),
    (16, 128, 256, 8, 4),
    (64, 64, 128, 4, 3),
    (32, 64, 256, 4, 4),
    (32, 64, 128, 4, 4),
    (16, 64, 128, 4, 4),
    (32, 64, 64, 4, 4),
    (64, 64, 64, 4, 4),
)


def candidates(op: Op, dtype: DType) -> list[Config]:
    """The pool of an op and dtype."""
    if dtype is DType.FP32:
        return fp32(op)
    if op is Op.DW:
        rows = scaled(DW, op, dtype)
        return configs(rows) + configs(rows[:4], group_m=1) + configs(rows[6:7])
    persistent = scaled(PERSISTENT, op, dtype)
    pool = configs(persistent) + configs(scaled(TILE, op, dtype), Schedule.TILE)
    return pool + configs(persistent[4:5], group_m=1)
