"""Blackwell: TMA, nothing measured. Best guesses first."""

from __future__ import annotations

from ...artifacts.records.precision import DType
from ...artifacts.records.problem import Op
from ..contract.config import Config, Loads, Schedule
from . import ampere
from .tiles import Row, configs, fp32, scaled

# 128 rows for large M, 64-row tiles where experts have few rows.
PERSISTENT: tuple[Row, ...] = (
    (128, 256, 64, 8, 3),
    (128, 256, 64, 8, 4),
    (128, 128, 64, 8, 4),
    (128, 128, 64, 4, 4),
    (128, 128, 64, 8, 3),
    (128, 128, 128, 8, 3),
    (256, 128, 64, 8, 3),
    (64, 256, 64, 8, 4),
    (64, 256, 64, 4, 3),
    (64, 128, 128, 4, 4),
    (64, 128, 64, 4, 4),
    (64, 64, 128, 4, 4),
    (128, 64, 64, 4, 4),
    (32, 128, 128, 4, 3),
    (16, 128, 256, 8, 3),
    # what fits 99 KiB
    (128, 256, 32, 8, 4),
    (128, 128, 32, 8, 4),
    (64, 256, 32, 4, 4),
    (64, 128, 64, 4, 3),
)
_SMALL = 15  # where those begin that fit 99 KiB
# dW: short steps waste less on ragged ends.
DW: tuple[Row, ...] = (
    (64, 128, 256, 8, 3),
    (64, 128, 256, 8, 4),
    (32, 128, 256, 8, 4),
    (32, 128, 256, 8, 6),
    (64, 256, 128, 8, 3),
    (32, 256, 128, 8, 4),
    (64, 128, 128, 8, 4),
    (64, 128, 128, 4, 4),
    (32, 128, 128, 4, 6),
    (32, 128, 128, 8, 6),
    (32, 128, 128, 4, 4),
    (16, 128, 128, 4, 6),
    (16, 128, 256, 8, 6),
    (64, 64, 128, 4, 4),
    (32, 64, 256, 4, 4),
    (32, 64, 128, 4, 6),
    (16, 64, 128, 4, 6),
    (32, 64, 64, 4, 6),
)


def candidates(op: Op, dtype: DType) -> list[Config]:
    """The pool of an op and dtype."""
    if dtype is DType.FP32:
        return fp32(op)
    if op is Op.DW:
        rows = scaled(DW, op, dtype)
        pool = configs(rows, loads=Loads.TMA) + configs(rows[:4], loads=Loads.TMA, group_m=1)
        return pool + configs(scaled(ampere.DW[6:7], op, dtype))
    persistent = scaled(PERSISTENT, op, dtype)
    tile = scaled(ampere.TILE, op, dtype)
    decode = scaled(ampere.DECODE, op, dtype)
    pool = configs(persistent[:_SMALL], loads=Loads.TMA)
    pool += configs(decode, Schedule.TILE, Loads.TMA)
    pool += configs(tile[:5], Schedule.TILE)
    pool += configs(persistent[:1], loads=Loads.TMA, group_m=1)
    pool += configs(persistent[_SMALL:], loads=Loads.TMA)
    return pool + configs(tile[len(decode) :], Schedule.TILE, Loads.TMA)
