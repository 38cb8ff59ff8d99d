"""Hopper (sm_90): what won on an H200, and its neighbours. Best guesses first."""

from __future__ import annotations

from ...artifacts.records.precision import DType
from ...artifacts.records.problem import Op
from ..contract.config import Cache, Config, Edge, Loads, Schedule
from .tiles import Row, configs, fp32, scaled

# Forward: what was within 2 % of the fastest somewhere on an H200 (bf16, docs/inside/cost-model.md).
PERSISTENT: tuple[Row, ...] = (
    (128, 256, 64, 8, 3),
    (128, 256, 64, 8, 4),
    (64, 128, 128, 4, 4),
    (64, 256, 64, 4, 4),
    (128, 128, 64, 4, 3),
    (32, 128, 128, 4, 3),
    (16, 256, 128, 4, 3),
    (16, 128, 256, 8, 3),
    (64, 128, 64, 4, 4),
    (64, 128, 64, 4, 6),
    (64, 128, 128, 8, 3),
    (64, 256, 64, 8, 3),
    (64, 256, 64, 4, 3),
    (32, 64, 256, 4, 3),
)
TILE: tuple[Row, ...] = (
    (16, 64, 128, 4, 4),
    (16, 64, 256, 4, 3),
    (16, 128, 128, 4, 3),
    (16, 64, 128, 4, 3),
    (16, 256, 128, 4, 3),
    (32, 128, 128, 4, 3),
    (64, 256, 64, 4, 4),
    (64, 128, 64, 4, 6),
    (64, 128, 128, 4, 3),
    (32, 64, 128, 4, 4),
    (16, 32, 256, 4, 4),
)
POINTER: tuple[Row, ...] = (
    (16, 64, 128, 4, 4),
    (16, 64, 128, 4, 3),
    (16, 128, 128, 4, 3),
    (16, 64, 256, 4, 3),
)
# The same, evict-first: at one token, w's lines leave L2 first.
EVICT_FIRST: tuple[Row, ...] = (
    (16, 64, 128, 4, 4),
    (16, 128, 128, 4, 3),
    (16, 64, 256, 4, 3),
)
# Forward and dX, cooperative: what won at large M.
COOPERATIVE: tuple[Row, ...] = (
    (128, 256, 64, 8, 4),
    (128, 128, 64, 8, 6),
    (128, 128, 64, 8, 5),
    (128, 256, 64, 8, 3),
)
# The same, pingpong.
PINGPONG: tuple[Row, ...] = (
    (128, 192, 64, 8, 5),
    (128, 128, 64, 8, 6),
)
# The same, the tiles fitted to the rows: by both warpgroups, and in turns.
FITTED: tuple[Row, ...] = ((256, 128, 64, 8, 4),)
FITTED_PINGPONG: tuple[Row, ...] = ((192, 128, 64, 8, 5),)
# dX: what was within 2 % of the fastest somewhere.
DX_PERSISTENT: tuple[Row, ...] = (
    (128, 256, 64, 8, 3),
    (64, 256, 64, 4, 4),
    (64, 256, 64, 4, 3),
    (128, 256, 64, 8, 4),
    (64, 256, 64, 8, 4),
    (64, 128, 64, 4, 4),
    (64, 128, 128, 8, 3),
    (128, 128, 64, 4, 3),
    (64, 128, 128, 4, 4),
    (16, 128, 256, 8, 3),
    (32, 128, 128, 4, 3),
    (64, 128, 64, 4, 6),
    (16, 256, 128, 4, 3),
    (64, 256, 64, 8, 3),
)
DX_TILE: tuple[Row, ...] = (
    (16, 128, 128, 4, 3),
    (32, 128, 128, 4, 3),
    (16, 64, 256, 4, 3),
    (16, 64, 128, 4, 3),
    (16, 64, 128, 4, 4),
    (64, 128, 128, 4, 3),
    (32, 64, 128, 4, 4),
    (16, 256, 128, 4, 3),
    (64, 256, 64, 4, 4),
)
DX_POINTER: tuple[Row, ...] = (
    (16, 128, 128, 4, 3),
    (16, 64, 256, 4, 3),
    (16, 64, 128, 4, 4),
)
# dW (a tile is block_n x block_k of one expert, block_m rows a step): the same,
# warp-specialised kernels aside.
DW: tuple[Row, ...] = (
    (32, 64, 256, 4, 4),
    (32, 128, 128, 4, 4),
    (32, 128, 256, 8, 4),
    (32, 128, 128, 4, 6),
    (64, 128, 256, 8, 3),
    (16, 64, 128, 4, 6),
    (64, 128, 128, 4, 3),
    (32, 128, 256, 8, 6),
    (64, 128, 256, 8, 4),
    (32, 256, 128, 8, 6),
    (32, 64, 256, 4, 3),
    (32, 128, 128, 4, 3),
    (16, 64, 256, 4, 6),
)
DW_UNGROUPED: tuple[Row, ...] = (  # group_m 1
    (32, 128, 256, 8, 4),
    (64, 128, 256, 8, 3),
    (64, 128, 256, 8, 4),
    (32, 128, 256, 8, 6),
)
DW_POINTER: tuple[Row, ...] = (
    (32, 128, 128, 4, 3),
    (16, 64, 128, 4, 4),
)
# dW, cooperative: a tile is 128 x block_k. Then pingpong.
DW_COOPERATIVE: tuple[Row, ...] = ((32, 128, 256, 8, 8),)
DW_PINGPONG: tuple[Row, ...] = (
    (32, 128, 192, 8, 10),
    (32, 192, 128, 8, 10),
)
# tf32, as they are: with fewer than 64 rows or 4 warps a tile runs on mma.sync. wgmma wants the reduction
# contiguous in both operands of this type in shared memory: dX's w goes through registers, where the fastest tiles are
# two to an SM. Of dW neither is: specialised kernels run it on mma.sync (kernels/gemm/hopper/tf32.py).
TF32: tuple[Row, ...] = ((128, 128, 32, 8, 4),)
TF32_DX: tuple[Row, ...] = (
    (128, 128, 32, 4, 3),
    (64, 128, 32, 4, 4),
    (32, 256, 32, 4, 3),
    (32, 128, 64, 4, 3),
    (64, 64, 32, 2, 4),
)
TF32_DW: tuple[Row, ...] = (
    (32, 64, 128, 2, 3),
    (16, 32, 256, 4, 4),
    (32, 64, 64, 2, 4),
)
TF32_DW_COOPERATIVE: tuple[Row, ...] = (
    (32, 128, 256, 8, 3),
    (64, 128, 256, 8, 2),
)


# Codes of w and bf16 x: what was within 2 % of the fastest somewhere on an H100
# (benchmarks/results/quantised-h100.journal.xz).
# A tile of 64 columns shares out K between its warpgroups. Those of 8 bits take twice the room.
MIXED_4_BITS: tuple[Row, ...] = (
    (16, 64, 1024, 8, 3),
    (16, 128, 512, 8, 4),
    (16, 256, 256, 8, 4),
    (32, 128, 512, 8, 3),
)
MIXED_8_BITS: tuple[Row, ...] = (
    (16, 64, 512, 8, 3),
    (16, 128, 256, 8, 4),
    (32, 128, 256, 8, 4),
)
MIXED_4_BITS_FITTED: tuple[Row, ...] = (
    (64, 256, 128, 8, 5),
    (128, 128, 128, 8, 4),
    (128, 256, 128, 8, 3),
    (256, 128, 64, 8, 5),
    (256, 128, 128, 8, 2),
)
MIXED_8_BITS_FITTED: tuple[Row, ...] = (
    (64, 256, 128, 8, 3),
    (64, 128, 128, 8, 4),
    (128, 128, 128, 8, 3),
    (128, 256, 64, 8, 5),
    (256, 128, 64, 8, 4),
)
# dX of them: the same on an H100 (benchmarks/results/coded-dx-h100.json.xz).
MIXED_DX_4_BITS: tuple[Row, ...] = (
    (16, 64, 512, 8, 3),
    (16, 128, 256, 8, 4),
    (32, 128, 256, 8, 4),
)
MIXED_DX_8_BITS: tuple[Row, ...] = (
    (16, 64, 512, 8, 2),
    (16, 128, 256, 8, 4),
)
MIXED_DX_4_BITS_FITTED: tuple[Row, ...] = (
    (128, 128, 128, 8, 4),
    (256, 128, 128, 8, 2),
    (256, 128, 64, 8, 5),
)
MIXED_DX_8_BITS_FITTED: tuple[Row, ...] = (
    (128, 128, 128, 8, 3),
    (256, 128, 64, 8, 4),
)
BLOCK_SCALED: tuple[Row, ...] = (
    (128, 256, 128, 8, 4),
    (128, 256, 128, 8, 3),
)
ROW_SCALED: tuple[Row, ...] = (
    (16, 64, 512, 8, 3),
    (16, 64, 1024, 8, 2),
    (16, 128, 256, 8, 4),
    (16, 128, 256, 8, 6),
    (32, 128, 256, 8, 4),
)
ROW_SCALED_FITTED: tuple[Row, ...] = (
    (256, 128, 128, 8, 4),
    (128, 128, 128, 8, 6),
    (64, 128, 256, 8, 4),
)


def candidates(op: Op, dtype: DType) -> list[Config]:
    """The pool of an op and dtype."""
    if dtype.quantised:
        own = {DType.FP8_BLOCK: _block_scaled, DType.FP8_CHANNEL: _row_scaled}.get(dtype)
        return _mixed_input(op, dtype) if own is None else own(op)
    if dtype is DType.FP32:
        return fp32(op)
    if dtype is DType.TF32:
        return _tf32(op) + _portable(op, dtype)
    return _specialized(op) + _portable(op, dtype)


def _mixed_input(op: Op, dtype: DType) -> list[Config]:
    if op is Op.DW or (op is Op.DX and dtype is DType.FP8_CHANNEL_A16):
        return []
    four = dtype.precision.w.bits == 4
    mixed, tma = Schedule.MIXED_INPUT, Loads.TMA
    if op is Op.DX:
        pool = configs(MIXED_DX_4_BITS if four else MIXED_DX_8_BITS, mixed, tma)
        return pool + configs(MIXED_DX_4_BITS_FITTED if four else MIXED_DX_8_BITS_FITTED, mixed, tma, fitted=True)
    pool = configs(MIXED_4_BITS if four else MIXED_8_BITS, mixed, tma)
    return pool + configs(MIXED_4_BITS_FITTED if four else MIXED_8_BITS_FITTED, mixed, tma, fitted=True)


def _block_scaled(op: Op) -> list[Config]:
    if op is not Op.FORWARD:
        return []
    scaled, tma = Schedule.BLOCK_SCALED, Loads.TMA
    return configs(BLOCK_SCALED, scaled, tma) + configs(BLOCK_SCALED, scaled, tma, group_m=16)


def _row_scaled(op: Op) -> list[Config]:
    if op is not Op.FORWARD:
        return []
    scaled, tma = Schedule.ROW_SCALED, Loads.TMA
    pool = configs(ROW_SCALED, scaled, tma) + configs(ROW_SCALED_FITTED, scaled, tma, fitted=True)
    return pool + configs(ROW_SCALED_FITTED[:1], scaled, tma, group_m=1, fitted=True)


def _portable(op: Op, dtype: DType) -> list[Config]:
    if op is Op.DW:
        pool = configs(scaled(DW, op, dtype), loads=Loads.TMA)
        pool += configs(scaled(DW_UNGROUPED, op, dtype), loads=Loads.TMA, group_m=1)
        return pool + configs(scaled(DW_POINTER, op, dtype))
    if op is Op.DX:
        persistent = scaled(DX_PERSISTENT, op, dtype)
        pool = configs(persistent, loads=Loads.TMA)
        pool += configs(scaled(DX_TILE, op, dtype), Schedule.TILE, Loads.TMA)
        pool += configs(scaled(DX_POINTER, op, dtype), Schedule.TILE)
        pool += configs(persistent[:1], loads=Loads.TMA, group_m=16)
        return pool + configs(persistent[:1], loads=Loads.TMA, group_m=1)
    persistent = scaled(PERSISTENT, op, dtype)
    pool = configs(persistent, loads=Loads.TMA) + configs(persistent[:1], loads=Loads.TMA, group_m=32)
    pool += configs(scaled(TILE, op, dtype), Schedule.TILE, Loads.TMA)
    pool += configs(scaled(POINTER, op, dtype), Schedule.TILE)
    return pool + configs(scaled(EVICT_FIRST, op, dtype), Schedule.TILE, Loads.TMA, cache=Cache.EVICT_FIRST)


def _tf32(op: Op) -> list[Config]:
    if op is Op.DW:
        pool = configs(TF32_DW_COOPERATIVE, Schedule.COOPERATIVE, Loads.TMA)
        return pool + configs(TF32_DW, loads=Loads.TMA)
    return configs(TF32_DX if op is Op.DX else TF32, loads=Loads.TMA)


def _specialized(op: Op) -> list[Config]:
    """Of 16 bits, warp-specialised."""
    both, turns, tma = Schedule.COOPERATIVE, Schedule.PINGPONG, Loads.TMA
    if op is Op.DW:
        first = DW_COOPERATIVE[:1]
        pool = configs(DW_COOPERATIVE, both, tma) + configs(first, both, tma, group_m=1)
        pool += configs(first, both, tma, group_m=1, cache=Cache.EVICT_FIRST)
        pool += configs(first, both, tma, edge=Edge.HALF)
        return pool + configs(DW_PINGPONG, turns, tma)
    pool = configs(COOPERATIVE, both, tma) + configs(COOPERATIVE[:1], both, tma, group_m=32)
    pool += configs(PINGPONG, turns, tma) + configs(FITTED, both, tma, fitted=True)
    return pool + configs(FITTED_PINGPONG, turns, tma, fitted=True)
