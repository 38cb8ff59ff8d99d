"""How the lists of a generation are written, and what all of them have: tiles of IEEE fp32."""

from __future__ import annotations

from typing import TypeAlias

from ...artifacts.records.precision import DType
from ...artifacts.records.problem import Op
from ..contract.config import Cache, Config, Edge, Loads, Schedule, TileRows

Row: TypeAlias = "tuple[int, int, int, int, int]"  # block_m, block_n, block_k, warps, stages
Rows: TypeAlias = "tuple[Row, ...]"

# IEEE fp32 has no tensor cores: small tiles, bound by the FMA pipes.
FP32: tuple[Row, ...] = (
    (64, 64, 16, 4, 3),
    (64, 64, 32, 4, 2),
    (64, 32, 32, 4, 3),
    (32, 64, 32, 4, 3),
    (32, 32, 32, 4, 3),
    (16, 64, 32, 4, 3),
    (16, 32, 64, 2, 3),
)
FP32_DW: tuple[Row, ...] = (
    (16, 64, 64, 4, 3),
    (32, 64, 64, 4, 2),
    (32, 64, 32, 4, 3),
    (32, 32, 64, 4, 3),
    (32, 32, 32, 4, 3),
    (16, 32, 32, 2, 3),
)


def configs(
    rows: Rows,
    schedule: Schedule = Schedule.PERSISTENT,
    loads: Loads = Loads.POINTER,
    *,
    group_m: int = 8,
    cache: Cache = Cache.DEFAULT,
    edge: Edge = Edge.WHOLE,
    fitted: bool = False,
) -> list[Config]:
    """A config of each row."""
    tile_rows = TileRows.FITTED if fitted else TileRows.FIXED
    return [Config(*row, group_m, loads, schedule, cache, edge, tile_rows) for row in rows]


def scaled(rows: Rows, op: Op, dtype: DType) -> Rows:
    """Rows that were found for 2 bytes: of 4 the reduction step is half as long, so the bytes are the same."""
    if dtype is not DType.TF32:
        return rows
    if op is Op.DW:
        return tuple((max(16, m // 2), n, k, warps, stages) for m, n, k, warps, stages in rows)
    return tuple((m, n, max(16, k // 2), warps, stages) for m, n, k, warps, stages in rows)


def fp32(op: Op) -> list[Config]:
    """What is tried of IEEE fp32, on any GPU."""
    return configs(FP32_DW if op is Op.DW else FP32)
