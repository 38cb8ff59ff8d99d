"""Warp-specialised kernels for plain dtypes on H100/H200 (sm_90).

- ``rows_specialized`` (rows.py): forward and dX in tiles of 128 rows.
- ``rows_fitted`` (fitted.py): forward and dX in tiles that are fitted to each expert's rows.
- ``weight_specialized`` (weight.py): dW.

A cooperative tile is shared by two warpgroups, a pingpong tile belongs to one. The entries extend those of
``portable_plain``, whose arguments they share.
"""

from __future__ import annotations

from ...artifacts.records import DType, Fusion, Op
from ..arch import Arch, Feature
from ..entry import Box, Constants, Limits, Rows, Tiles, configs, no_configs
from ..portable_plain import GATHERING, LOW_OPERANDS, ROWS, UNGATHERED, WEIGHT, row_operands, without_low_rank
from ..spec import MAX_EXPERTS, PINGPONG_COLUMNS, Cache, Config, Edge, Loads, Schedule, Spec, TileRows, indexed, w_kn

ROWS_OF_TILE = 128  # 64 for each warpgroup; for a fitted tile its columns
MOST_STEPS = (1 << 20) - 1  # the queue of tiles has 20 bits for a tile's steps: kernels/gluon/consumer.py
_MOST_COLUMN_TILES = 1 << 20  # pingpong's queue has 20 bits for a tile's column: kernels/gluon/pingpong.py
_PART = 64  # rows of a tile that a warpgroup multiplies, columns that it stores at once

_HALVES = frozenset((DType.BF16, DType.FP16))

# Cooperative and pingpong tiles.
_COOPERATIVE = {
    "schedule": (Schedule.COOPERATIVE,),
    "loads": (Loads.TMA,),
    "num_warps": (8,),
    "num_stages": range(2, 9),
}
_PINGPONG = _COOPERATIVE | {"schedule": (Schedule.PINGPONG,), "num_stages": range(2, 16)}
_COOPERATIVE_LIMITS = Limits(MAX_EXPERTS, MOST_STEPS)
_PINGPONG_LIMITS = Limits(MAX_EXPERTS, MOST_STEPS, _MOST_COLUMN_TILES)
_EDGES = (Edge.WHOLE, Edge.HALF)
_CACHES = (Cache.DEFAULT, Cache.EVICT_FIRST)

# Pingpong loads w in parts of 64 columns, as lines of 64 along the reduction: deeper steps would be in wrong order.
_PINGPONG_ROWS = _PINGPONG | {"block_m": (ROWS_OF_TILE,), "block_k": (64,)}
_ROW_TILES = (
    Tiles(_COOPERATIVE_LIMITS, _COOPERATIVE | {"block_m": (ROWS_OF_TILE,), "edge": _EDGES}, zeroes=True),
    Tiles(_PINGPONG_LIMITS, _PINGPONG_ROWS | {"block_n": (PINGPONG_COLUMNS,)}, fusions=UNGATHERED, zeroes=True),
    Tiles(_PINGPONG_LIMITS, _PINGPONG_ROWS | {"block_n": (128,)}, fusions=UNGATHERED, dealt=True, zeroes=True),
)
_FITTED = {"rows": (TileRows.FITTED,), "block_n": (ROWS_OF_TILE,), "block_k": (64,)}
_FITTED_TILES = (
    Tiles(_COOPERATIVE_LIMITS, _COOPERATIVE | _FITTED | {"block_m": (256,)}, zeroes=True),
    Tiles(_PINGPONG_LIMITS, _PINGPONG | _FITTED | {"block_m": (PINGPONG_COLUMNS,)}, zeroes=True),
)
_COOPERATIVE_DW = _COOPERATIVE | {"block_n": (ROWS_OF_TILE,), "cache": _CACHES}
_PINGPONG_DW = _PINGPONG | {"block_n": (ROWS_OF_TILE,), "block_k": (PINGPONG_COLUMNS,)}
_PINGPONG_DW_TRANSPOSED = _PINGPONG | {"block_n": (PINGPONG_COLUMNS,), "block_k": (ROWS_OF_TILE,)}
_WEIGHT_TILES = (
    Tiles(_COOPERATIVE_LIMITS, _COOPERATIVE_DW | {"edge": _EDGES}, dtypes=_HALVES),
    Tiles(_COOPERATIVE_LIMITS, _COOPERATIVE_DW | {"block_k": (256,)}, dtypes=frozenset((DType.TF32,))),
    Tiles(_PINGPONG_LIMITS, _PINGPONG_DW, dtypes=_HALVES),
    Tiles(_PINGPONG_LIMITS, _PINGPONG_DW_TRANSPOSED, dtypes=_HALVES, transposed=True),
)


def _stores(spec: Spec) -> bool:
    """Return whether the kernel has ``y_map``, through which it can't store to rows that an index names."""
    return not indexed(spec.fusion) or Fusion.GATHER in spec.fusion


def _row_descriptors(spec: Spec) -> tuple[str, ...]:
    low = LOW_OPERANDS if Fusion.LOW_RANK in spec.fusion else ()
    return (*row_operands(spec), *(("y_map",) if _stores(spec) else ()), *low)


def _absent_from_rows(spec: Spec) -> tuple[str, ...]:
    return (*(() if _stores(spec) else ("y_map",)), *without_low_rank(spec))


def _absent_from_weight(spec: Spec) -> tuple[str, ...]:
    """Only evict-first variants have the addresses, by which they prefetch rows into L2."""
    return () if spec.config.cache is Cache.EVICT_FIRST else ("dy_at", "x_at")


def _required_by_rows(spec: Spec) -> tuple[str, ...]:
    """Silu's results, half of the columns, can only be stored through ``y_map``."""
    return (*ROWS.required(spec), "counter", *(("y_map",) if Fusion.SILU in spec.fusion else ()))


def _required_by_fitted(spec: Spec) -> tuple[str, ...]:
    """Without an index, tiles of any height can only be stored through ``y_map``."""
    return (*ROWS.required(spec), "counter", *(() if indexed(spec.fusion) else ("y_map",)))


def _pingpong(spec: Spec) -> bool:
    return spec.config.schedule is Schedule.PINGPONG


def _row_boxes(spec: Spec) -> dict[str, Box]:
    return _boxes_of_rows(spec, _PART if _pingpong(spec) else spec.config.block_n // 2)  # a tile may be half as wide


def _fitted_boxes(spec: Spec) -> dict[str, Box]:
    """w's box has all columns of a tile, or as many as a line has if the columns are contiguous."""
    return _boxes_of_rows(spec, _PART if w_kn(spec) else spec.config.block_n)


def _boxes_of_rows(spec: Spec, columns: int) -> dict[str, Box]:
    depth = spec.config.block_k
    w = (1, depth, columns) if w_kn(spec) else (1, columns, depth)
    x = _PART, depth
    return {"x": x, "w": w, "y_map": (1, 1, _PART, _PART), "low_x": x, "low_w": w}


def _weight_boxes(spec: Spec) -> dict[str, Box]:
    c = spec.config
    columns = _PART if _pingpong(spec) else c.block_k // 2 if c.edge is Edge.HALF else c.block_k
    return {"dy": (1, 1, c.block_m, _PART), "x": (1, 1, c.block_m, columns), "dw": (1, _PART, _PART)}


def _row_constants(spec: Spec, arch: Arch) -> Constants:
    c, gated = spec.config, Fusion.SILU in spec.fusion
    wide = c.block_n == PINGPONG_COLUMNS
    # Half tiles, or silu of both halves, are stored through y_map in parts of 64 columns.
    even = not wide and (not _stores(spec) or c.block_n >= 256)
    noted = 128 if _pingpong(spec) else _PART
    return {
        "BLOCK_N": c.block_n,
        "BLOCK_K": c.block_k,
        "W_KN": w_kn(spec),
        "INDEXED": indexed(spec.fusion),
        "GATHER": Fusion.GATHER in spec.fusion,
        "GATED": gated,
        "LOW_RANK": Fusion.LOW_RANK in spec.fusion,
    } | _common(spec, arch, c.block_n, c.block_k, noted=noted, spare=wide, even=even)


def _fitted_constants(spec: Spec, arch: Arch) -> Constants:
    c = spec.config
    sizes: Constants = {
        "BLOCK_M": c.block_m,
        "BLOCK_K": c.block_k,
        "W_KN": w_kn(spec),
        "INDEXED": indexed(spec.fusion),
        "LOW_RANK": Fusion.LOW_RANK in spec.fusion,
    }
    spare = c.block_m == PINGPONG_COLUMNS and not indexed(spec.fusion)
    # ``even`` for any number of 64-column parts, because this kernel counts the buffers that it uses.
    return sizes | _common(spec, arch, c.block_m, c.block_k, noted=256, spare=spare, even=True)


def _weight_constants(spec: Spec, arch: Arch) -> Constants:
    c, pingpong = spec.config, _pingpong(spec)
    columns = PINGPONG_COLUMNS if pingpong else c.block_k
    even = not pingpong and (c.edge is Edge.WHOLE or c.block_k >= 256)
    return {
        "BLOCK_M": c.block_m,
        "BLOCK_K": columns,
        "NARROW": c.edge is Edge.HALF,
        "ACROSS": pingpong and c.block_n == PINGPONG_COLUMNS,
        "STREAMED": c.cache is Cache.EVICT_FIRST,
    } | _common(spec, arch, columns, c.block_m, noted=_PART, spare=pingpong, even=even)


def _common(spec: Spec, arch: Arch, columns: int, depth: int, *, noted: int, spare: bool, even: bool) -> Constants:
    """Return the constants of all three kernels.

    Results leave through shared memory, 64 x 64 of each warpgroup at a time. SLOTS is 2, two buffers used in turns, if
    two conditions hold. First, shared memory has room for them next to the operands (plus a ``spare`` part, see
    kernels/gluon/pingpong.py) and the indices of ``noted`` rows of each warpgroup. Second, all tiles are stored in an
    ``even`` number of parts of 64 columns: TMA still reads a tile's last part while the next tile's first part is
    written, so both must not use the same buffer.
    """
    c, size = spec.config, spec.dtype.itemsize
    operands = c.num_stages * (ROWS_OF_TILE + columns) * depth + (_PART * depth if spare else 0)
    noted_bytes = 2 * noted * 8 if indexed(spec.fusion) else 0
    room_bytes = arch.limits.shared_per_block_bytes - 512 - operands * size - noted_bytes
    return {
        "STAGES": c.num_stages,
        "SLOTS": 2 if even and 4 * _PART * _PART * size <= room_bytes else 1,
        "GROUP_M": c.group_m,
        "EXPERTS": MAX_EXPERTS,
        "PINGPONG": _pingpong(spec),
        "REGISTERS": _registers(spec),
    }


def _registers(spec: Spec) -> int:
    """Return the registers of a multiplying thread; the loading warps have the rest of 168 for each of 12 warps."""
    if _pingpong(spec):
        return 224  # registers; 192 of them hold sums
    return 208 if Fusion.GATHER in spec.fusion else 216  # with GATHER loading threads hold their rows' addresses


# The configs to try, best guesses first.
# Forward and dX, cooperative: the fastest at large M.
COOPERATIVE: Rows = (
    (128, 256, 64, 8, 4),
    (128, 128, 64, 8, 6),
    (128, 128, 64, 8, 5),
    (128, 256, 64, 8, 3),
)
# Forward and dX, pingpong.
PINGPONG: Rows = (
    (128, 192, 64, 8, 5),
    (128, 128, 64, 8, 6),
)
# Forward and dX, tiles fitted to the rows: cooperative and pingpong.
FITTED: Rows = ((256, 128, 64, 8, 4),)
FITTED_PINGPONG: Rows = ((192, 128, 64, 8, 5),)
# dW, where a tile is block_n x block_k: cooperative and pingpong.
DW_COOPERATIVE: Rows = ((32, 128, 256, 8, 8),)
DW_PINGPONG: Rows = (
    (32, 128, 192, 8, 10),
    (32, 192, 128, 8, 10),
)
# dW in tf32 on mma.sync: kernels/gluon/tf32.py.
TF32_DW_COOPERATIVE: Rows = (
    (32, 128, 256, 8, 3),
    (64, 128, 256, 8, 2),
)


def _row_candidates(_op: Op, _dtype: DType, _arch: Arch) -> list[Config]:
    cooperative, tma = Schedule.COOPERATIVE, Loads.TMA
    pool = configs(COOPERATIVE, cooperative, tma) + configs(COOPERATIVE[:1], cooperative, tma, group_m=32)
    return pool + configs(PINGPONG, Schedule.PINGPONG, tma)


def _fitted_candidates(_op: Op, _dtype: DType, _arch: Arch) -> list[Config]:
    pool = configs(FITTED, Schedule.COOPERATIVE, Loads.TMA, fitted=True)
    return pool + configs(FITTED_PINGPONG, Schedule.PINGPONG, Loads.TMA, fitted=True)


def _weight_candidates(_op: Op, dtype: DType, _arch: Arch) -> list[Config]:
    cooperative, tma = Schedule.COOPERATIVE, Loads.TMA
    if dtype is DType.TF32:
        return configs(TF32_DW_COOPERATIVE, cooperative, tma)
    pool = configs(DW_COOPERATIVE, cooperative, tma) + configs(DW_COOPERATIVE, cooperative, tma, group_m=1)
    pool += configs(DW_COOPERATIVE, cooperative, tma, group_m=1, cache=Cache.EVICT_FIRST)
    pool += configs(DW_COOPERATIVE, cooperative, tma, edge=Edge.HALF)
    return pool + configs(DW_PINGPONG, Schedule.PINGPONG, tma)


ROWS_SPECIALIZED = ROWS._replace(
    name="rows_specialized",
    home="hopper_plain.rows",
    sha256="30075a94b5128a81186d07d2078389be20fa1aec07b00330688ec53c8d528db0",
    dtypes=_HALVES,
    fusions=UNGATHERED | GATHERING | {Fusion.SILU, Fusion.SILU | Fusion.GATHER},
    needs=frozenset((Feature.WGMMA,)),
    tiles=_ROW_TILES,
    pointers=(*ROWS.pointers[:3], "y_map", *ROWS.pointers[3:], "counter"),
    descriptors=_row_descriptors,
    absent=_absent_from_rows,
    required=_required_by_rows,
    boxes=_row_boxes,
    constants=_row_constants,
    candidates=_row_candidates,
    fallbacks=no_configs,
    loading_warps=4,
)
ROWS_FITTED = ROWS_SPECIALIZED._replace(
    name="rows_fitted",
    home="hopper_plain.fitted",
    sha256="b4e0f3ff10da03ff37fccccc47490ac537e44373fe43fdc360a4171310ca09b6",
    fusions=UNGATHERED,
    tiles=_FITTED_TILES,
    required=_required_by_fitted,
    boxes=_fitted_boxes,
    constants=_fitted_constants,
    candidates=_fitted_candidates,
)
WEIGHT_SPECIALIZED = WEIGHT._replace(
    name="weight_specialized",
    home="hopper_plain.weight",
    sha256="1d373ff98d8081f08604da671ad8c24cb5dae78ff1882e0717792f732d2b77cc",
    dtypes=_HALVES | {DType.TF32},
    needs=ROWS_SPECIALIZED.needs,
    tiles=_WEIGHT_TILES,
    pointers=(*WEIGHT.pointers, "counter", "dy_at", "x_at"),
    descriptors=lambda _spec: ("dy", "x", "dw"),
    absent=_absent_from_weight,
    required=lambda spec: (*WEIGHT.required(spec), "counter"),
    boxes=_weight_boxes,
    constants=_weight_constants,
    candidates=_weight_candidates,
    fallbacks=no_configs,
    loading_warps=4,
)
ENTRIES = (ROWS_SPECIALIZED, ROWS_FITTED, WEIGHT_SPECIALIZED)
