"""The portable kernels for plain dtypes, for all supported GPUs.

- ``rows`` (rows.py): forward and dX. Operands come through pointers or, from sm_90 on, TMA.
- ``weight`` (weight.py): dW.

The lists of configs to try are by generation of GPU. Other folders reuse this one's arguments and shapes.
"""

from __future__ import annotations

from ...artifacts.records import PLAIN_DTYPES, DType, Fusion, Op
from ..arch import Arch, Feature, Generation
from ..entry import (
    LANES,
    WIDE_FROM_REGISTERS,
    Box,
    Constants,
    KernelEntry,
    Limits,
    Order,
    Rows,
    Sizes,
    TensorShape,
    Tiles,
    configs,
    dense,
    instruction,
    of_rows,
    ragged,
)
from ..spec import (
    MAX_EXPERTS,
    MAX_EXPERTS_FALLBACK,
    Cache,
    Config,
    Loads,
    Schedule,
    Spec,
    indexed,
    result_columns,
    w_kn,
)

# Fusions as ``spec.code_of`` returns them.
PLAIN = frozenset((Fusion.NONE, Fusion.SCATTER))
UNGATHERED = PLAIN | {Fusion.LOW_RANK}
GATHERING = frozenset((Fusion.GATHER, Fusion.LOW_RANK | Fusion.GATHER))
LOW_OPERANDS = ("low_x", "low_w")
# A program with a single tile looks its expert up once (kernels/portable_plain/lookup.py). Persistent programs scan the
# counts for each tile if there are more than MAX_EXPERTS.
_LIMITS = {Schedule.TILE: Limits(MAX_EXPERTS), Schedule.PERSISTENT: Limits(MAX_EXPERTS_FALLBACK)}


_ROW_TILES = tuple(
    Tiles(limits, {"schedule": (schedule,), "loads": (loads,), "cache": caches}, zeroes=schedule is Schedule.TILE)
    for loads, caches in ((Loads.POINTER, (Cache.DEFAULT,)), (Loads.TMA, tuple(Cache)))
    for schedule, limits in _LIMITS.items()
)
_WEIGHT_TILES = tuple(
    Tiles(limits, {"schedule": (schedule,), "loads": tuple(Loads)}) for schedule, limits in _LIMITS.items()
)


def row_operands(spec: Spec) -> tuple[str, ...]:
    """Return the operands of forward and dX that TMA loads; it can't load rows that an index picks."""
    if spec.config.loads is not Loads.TMA:
        return ()
    return ("w",) if Fusion.GATHER in spec.fusion else ("x", "w")


def without_low_rank(spec: Spec) -> tuple[str, ...]:
    """Return the arguments of LOW_RANK if the variant does not have it; they are absent."""
    return () if Fusion.LOW_RANK in spec.fusion else (*LOW_OPERANDS, "R")


def needs_low_rank(spec: Spec) -> tuple[str, ...]:
    """Return the arguments of LOW_RANK if the variant has it; they are required."""
    return (*LOW_OPERANDS, "R") if Fusion.LOW_RANK in spec.fusion else ()


def _weight_operands(spec: Spec) -> tuple[str, ...]:
    return ("dy", "x") if spec.config.loads is Loads.TMA else ()


def _row_boxes(spec: Spec) -> dict[str, Box]:
    c = spec.config
    w = (1, c.block_k, c.block_n) if w_kn(spec) else (1, c.block_n, c.block_k)
    return {"x": (c.block_m, c.block_k), "w": w}


def _weight_boxes(spec: Spec) -> dict[str, Box]:
    c = spec.config
    return {"dy": (1, 1, c.block_m, c.block_n), "x": (1, 1, c.block_m, c.block_k)}


def row_shapes(spec: Spec, n: Sizes) -> dict[str, TensorShape]:
    """Return the shapes of the descriptors of forward and dX; w may have fewer rows than y has columns (``w_rows``)."""
    kn, strides = w_kn(spec), (n["stride_w_e"], n["stride_w_row"])
    w = (n["E"], n["K"], n["N"]) if kn else (n["E"], n["w_rows"], n["K"])
    read = ("E", *(("K", "N") if kn else ("N", "K")), "stride_w_e", "stride_w_row", "one")
    return {
        "x": of_rows(n["K"], "stride_x_m", ("M", "K", "stride_x_m", "one")),
        "w": TensorShape(lambda _M, _stride: (w, strides), read=read),
        "y_map": ragged(result_columns(n["N"], spec.fusion), "stride_y_m"),
        **low_shapes(n, kn=kn),
    }


def low_shapes(n: Sizes, *, kn: bool) -> dict[str, TensorShape]:
    """Return the shapes of LOW_RANK's descriptors. ``low_w`` has contiguous columns if w has (``kn``)."""
    sizes = (n["R"], n["N"]) if kn else (n["N"], n["R"])
    return {"low_x": of_rows(n["R"], ""), "low_w": dense(n["E"], *sizes)}


def _weight_shapes(_spec: Spec, n: Sizes) -> dict[str, TensorShape]:
    sizes, strides = (n["E"], n["N"], n["K"]), (n["stride_dw_e"], n["stride_dw_row"])
    return {
        "dy": ragged(n["N"], "stride_dy_m"),
        "x": ragged(n["K"], "stride_x_m"),
        "dw": TensorShape(lambda _M, _stride: (sizes, strides)),
    }


def _row_constants(spec: Spec, arch: Arch) -> Constants:
    descriptors = row_operands(spec)
    return {
        "X_TMA": "x" in descriptors,
        "W_TMA": "w" in descriptors,
        "W_KN": w_kn(spec),
        "INDEXED": indexed(spec.fusion),
        "LOW_RANK": Fusion.LOW_RANK in spec.fusion,
        "TURNED": _turned(spec, arch),
        "CLEARS": spec.fusion == Fusion.SCATTER and spec.config.schedule is Schedule.TILE,
    } | _sizes(spec)


def _turned(spec: Spec, arch: Arch) -> bool:
    """Return whether the kernel computes transposed tiles, with w in registers: kernels/portable_plain/rows.py."""
    wgmma = arch.has(Feature.WGMMA) and spec.config.block_m >= 64 and spec.config.num_warps >= 4
    turned = wgmma and spec.dtype is DType.TF32 and w_kn(spec) and "w" in row_operands(spec)
    return turned and Fusion.LOW_RANK not in spec.fusion  # LOW_RANK's sums are not transposed


def order_of_plain(spec: Spec, arch: Arch, _reduction: int) -> Order:
    """One sum over all of K, whatever a tile's steps are; zeros past K don't change it.

    tf32 on wgmma takes w from shared memory, or from registers (``_turned``): these are not known to give equal bits.
    """
    low, rounds = Fusion.LOW_RANK in spec.fusion, Fusion.SILU not in spec.fusion
    if spec.dtype is DType.FP32:
        return Order("fp32", LANES, 1, low_rank=low, rounds=rounds)
    halves = spec.dtype is not DType.TF32
    by = WIDE_FROM_REGISTERS if _turned(spec, arch) else instruction(spec, arch, agree=halves)
    return Order(spec.dtype.value, by, 16 if halves else 8, low_rank=low, rounds=rounds)


def _weight_constants(spec: Spec, _arch: Arch) -> Constants:
    return {"TMA": spec.config.loads is Loads.TMA} | _sizes(spec)


def _sizes(spec: Spec) -> Constants:
    c = spec.config
    return {
        "BLOCK_M": c.block_m,
        "BLOCK_N": c.block_n,
        "BLOCK_K": c.block_k,
        "GROUP_M": c.group_m,
        "EXPERTS": min(spec.max_experts, MAX_EXPERTS),
        "SCAN": spec.max_experts > MAX_EXPERTS,
        "PERSISTENT": c.schedule is Schedule.PERSISTENT,
        "PRECISION": "ieee" if spec.dtype is DType.FP32 else "tf32",
    }


# The configs to try, best guesses first.
# IEEE fp32 runs on the FMA pipes, without tensor cores: small tiles.
FP32: Rows = (
    (64, 64, 16, 4, 3),
    (64, 64, 32, 4, 2),
    (64, 32, 32, 4, 3),
    (32, 64, 32, 4, 3),
    (32, 32, 32, 4, 3),
    (16, 64, 32, 4, 3),
    (16, 32, 64, 2, 3),
)
FP32_DW: Rows = (
    (16, 64, 64, 4, 3),
    (32, 64, 64, 4, 2),
    (32, 64, 32, 4, 3),
    (32, 32, 64, 4, 3),
    (32, 32, 32, 4, 3),
    (16, 32, 32, 2, 3),
)

# Ampere and Ada: pointers (cp.async).
# Small M: one tile a program, long reduction steps.
AMPERE_DECODE: Rows = (
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
AMPERE_PERSISTENT: Rows = (
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
AMPERE_TILE: Rows = (
    *AMPERE_DECODE,
    (16, 64, 64, 4, 4),
    (16, 128, 64, 4, 4),
    (32, 64, 64, 4, 4),
    (32, 128, 64, 4, 3),
    (64, 64, 64, 4, 4),
    (64, 128, 64, 4, 3),
)
# dW, not measured: short steps waste less on ragged ends.
AMPERE_DW: Rows = (
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

# Blackwell: TMA, not measured.
# 128 rows for large M, 64-row tiles where experts have few rows.
BLACKWELL_PERSISTENT: Rows = (
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
    # These fit 99 KiB.
    (128, 256, 32, 8, 4),
    (128, 128, 32, 8, 4),
    (64, 256, 32, 4, 4),
    (64, 128, 64, 4, 3),
)
_BLACKWELL_SMALL = 15  # index of the first that fits 99 KiB
# dW: short steps waste less on ragged ends.
BLACKWELL_DW: Rows = (
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

# Hopper: the fastest configs on an H200, and similar ones.
# Forward: within 2 % of the fastest in some cell on an H200 (bf16, docs/inside/cost-model.md).
HOPPER_PERSISTENT: Rows = (
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
HOPPER_TILE: Rows = (
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
HOPPER_POINTER: Rows = (
    (16, 64, 128, 4, 4),
    (16, 64, 128, 4, 3),
    (16, 128, 128, 4, 3),
    (16, 64, 256, 4, 3),
)
# Forward at one token, with w evicted from L2 first.
HOPPER_EVICT_FIRST: Rows = (
    (16, 64, 128, 4, 4),
    (16, 128, 128, 4, 3),
    (16, 64, 256, 4, 3),
)
# dX: within 2 % of the fastest in some cell.
HOPPER_DX_PERSISTENT: Rows = (
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
HOPPER_DX_TILE: Rows = (
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
HOPPER_DX_POINTER: Rows = (
    (16, 128, 128, 4, 3),
    (16, 64, 256, 4, 3),
    (16, 64, 128, 4, 4),
)
# dW (a tile is block_n x block_k of one expert, a step block_m rows): within 2 % of the fastest of these kernels.
HOPPER_DW: Rows = (
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
HOPPER_DW_UNGROUPED: Rows = (  # group_m 1
    (32, 128, 256, 8, 4),
    (64, 128, 256, 8, 3),
    (64, 128, 256, 8, 4),
    (32, 128, 256, 8, 6),
)
HOPPER_DW_POINTER: Rows = (
    (32, 128, 128, 4, 3),
    (16, 64, 128, 4, 4),
)
# tf32 (not scaled by ``scaled``). With fewer than 64 rows or 4 warps a tile runs on mma.sync. For tf32, wgmma needs the
# reduction contiguous in both operands in shared memory. In dX w is not, and goes through registers; the fastest tiles
# are two to an SM. In dW neither operand is: specialised kernels run it on mma.sync (kernels/gluon/tf32.py).
TF32: Rows = ((128, 128, 32, 8, 4),)
TF32_DX: Rows = (
    (128, 128, 32, 4, 3),
    (64, 128, 32, 4, 4),
    (32, 256, 32, 4, 3),
    (32, 128, 64, 4, 3),
    (64, 64, 32, 2, 4),
)
TF32_DW: Rows = (
    (32, 64, 128, 2, 3),
    (16, 32, 256, 4, 4),
    (32, 64, 64, 2, 4),
)


def _row_candidates(op: Op, dtype: DType, arch: Arch) -> list[Config]:
    if dtype is DType.FP32:
        return configs(FP32)
    if arch.generation is Generation.HOPPER:
        return _hopper_row_candidates(op, dtype)
    blackwell, tile = arch.has(Feature.TMA), scaled(AMPERE_TILE, dtype)
    persistent = scaled(BLACKWELL_PERSISTENT if blackwell else AMPERE_PERSISTENT, dtype)
    if not blackwell:
        return configs(persistent) + configs(tile, Schedule.TILE) + configs(persistent[4:5], group_m=1)
    decode, tma = scaled(AMPERE_DECODE, dtype), Loads.TMA
    pool = configs(persistent[:_BLACKWELL_SMALL], loads=tma) + configs(decode, Schedule.TILE, tma)
    pool += configs(tile[:5], Schedule.TILE) + configs(persistent[:1], loads=tma, group_m=1)
    return pool + configs(persistent[_BLACKWELL_SMALL:], loads=tma) + configs(tile[len(decode) :], Schedule.TILE, tma)


def _hopper_row_candidates(op: Op, dtype: DType) -> list[Config]:
    dx, tma = op is Op.DX, Loads.TMA
    persistent = scaled(HOPPER_DX_PERSISTENT if dx else HOPPER_PERSISTENT, dtype)
    pool = configs(TF32_DX if dx else TF32, loads=tma) if dtype is DType.TF32 else []
    pool += configs(persistent, loads=tma)
    pool += [] if dx else configs(persistent[:1], loads=tma, group_m=32)
    pool += configs(scaled(HOPPER_DX_TILE if dx else HOPPER_TILE, dtype), Schedule.TILE, tma)
    pool += configs(scaled(HOPPER_DX_POINTER if dx else HOPPER_POINTER, dtype), Schedule.TILE)
    if dx:
        return pool + configs(persistent[:1], loads=tma, group_m=16) + configs(persistent[:1], loads=tma, group_m=1)
    return pool + configs(scaled(HOPPER_EVICT_FIRST, dtype), Schedule.TILE, tma, cache=Cache.EVICT_FIRST)


def _weight_candidates(_op: Op, dtype: DType, arch: Arch) -> list[Config]:
    if dtype is DType.FP32:
        return configs(FP32_DW)
    hopper, tma = arch.generation is Generation.HOPPER, Loads.TMA
    ampere = scaled_dw(AMPERE_DW, dtype)
    if not arch.has(Feature.TMA):
        return configs(ampere) + configs(ampere[:4], group_m=1) + configs(ampere[6:7])
    if not hopper:
        rows = scaled_dw(BLACKWELL_DW, dtype)
        return configs(rows, loads=tma) + configs(rows[:4], loads=tma, group_m=1) + configs(ampere[6:7])
    pool = configs(TF32_DW, loads=tma) if dtype is DType.TF32 else []
    pool += configs(scaled_dw(HOPPER_DW, dtype), loads=tma)
    pool += configs(scaled_dw(HOPPER_DW_UNGROUPED, dtype), loads=tma, group_m=1)
    return pool + configs(scaled_dw(HOPPER_DW_POINTER, dtype))


def _row_fallbacks(_op: Op, dtype: DType, _arch: Arch) -> list[Config]:
    if dtype is DType.FP32:
        return configs(((16, 32, 32, 4, 2), (64, 64, 16, 8, 2)))
    # 8 warps, so that a thread's share of MAX_EXPERTS counts and of single-element loads fits in registers.
    return configs(((16, 64, 64, 8, 2), (64, 128, 32, 8, 2)))


def _weight_fallbacks(_op: Op, dtype: DType, _arch: Arch) -> list[Config]:
    return configs(((32, 32, 32, 4, 2),) if dtype is DType.FP32 else ((32, 64, 64, 4, 2),))


def scaled(rows: Rows, dtype: DType) -> Rows:
    """Adapt configs of 2-byte dtypes to tf32: half the reduction step, so that its bytes are equal."""
    if dtype is not DType.TF32:
        return rows
    return tuple((m, n, max(16, k // 2), warps, stages) for m, n, k, warps, stages in rows)


def scaled_dw(rows: Rows, dtype: DType) -> Rows:
    """Adapt dW's configs of 2-byte dtypes to tf32: half the rows of a step."""
    if dtype is not DType.TF32:
        return rows
    return tuple((max(16, m // 2), n, k, warps, stages) for m, n, k, warps, stages in rows)


ROWS = KernelEntry(
    name="rows",
    revision=2,
    home="portable_plain.rows",
    sha256="2172bbd465d854a2a84bb451e296c3fb503ce061203309c0116424176539b15d",
    launched_since=2,
    ops=frozenset((Op.FORWARD, Op.DX)),
    dtypes=PLAIN_DTYPES,
    fusions=UNGATHERED | GATHERING,
    needs=frozenset(),
    tiles=_ROW_TILES,
    pointers=("x", "w", "y", "m_sizes", "index", "row_weights", "bias", *LOW_OPERANDS),
    strides=("stride_x_m", "stride_w_e", "stride_w_row", "stride_y_m"),
    steps=("m_sizes_step", "index_step", "index_end", "x_divisor", "flags", "R"),
    ranks={"x": 2, "w": 3, "y_map": 4, "low_x": 2, "low_w": 3},
    descriptors=row_operands,
    absent=without_low_rank,
    required=lambda spec: ("x", "w", "y", "m_sizes", *needs_low_rank(spec)),
    boxes=_row_boxes,
    constants=_row_constants,
    order=order_of_plain,
    candidates=_row_candidates,
    fallbacks=_row_fallbacks,
    shapes=row_shapes,
)
WEIGHT = KernelEntry(
    name="weight",
    revision=1,
    home="portable_plain.weight",
    sha256="fcedbb616690c95a047fc67c554c4c9d08754ec0ee521ebf2d68e0bde1753461",
    launched_since=1,
    ops=frozenset((Op.DW,)),
    dtypes=PLAIN_DTYPES,
    fusions=frozenset((Fusion.NONE,)),
    needs=frozenset(),
    tiles=_WEIGHT_TILES,
    pointers=("dy", "x", "dw", "m_sizes"),
    strides=("stride_dy_m", "stride_x_m", "stride_dw_e", "stride_dw_row"),
    steps=("m_sizes_step",),
    ranks={"dy": 4, "x": 4, "dw": 3},
    descriptors=_weight_operands,
    required=lambda _spec: ("dy", "x", "dw", "m_sizes"),
    boxes=_weight_boxes,
    constants=_weight_constants,
    order=order_of_plain,
    candidates=_weight_candidates,
    fallbacks=_weight_fallbacks,
    shapes=_weight_shapes,
)
ENTRIES = (ROWS, WEIGHT)
