"""The warp-specialised kernel ``rows_w8a8_channel`` for fp8 per-channel on H100/H200 (sm_90): forward only.

w is prepared and has a scale for each row; x is e4m3 with a scale for each row. A row kernel quantises x before.
"""

from __future__ import annotations

from ...artifacts.records import DType, Op
from ..arch import Arch, Feature
from ..codes import BLOCK, WORD_ROW
from ..entry import (
    CODES_OF_X,
    PREPARED,
    WIDE,
    WORDS,
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
    of_rows,
    ragged,
)
from ..portable_plain import PLAIN
from ..spec import MAX_EXPERTS, Config, Loads, Schedule, Spec, TileRows

DTYPES = frozenset((DType.FP8_CHANNEL,))
LINE = 128  # elements of K that TMA loads of each row of x at once
PART = 2048  # elements of K that the tensor cores sum
_MOST_K = 32768  # sums are in fp16, and each element of K adds at most 448 x 448 x 2^-17
_MOST_SUMS = 128  # of a thread, in fp32: tiles with more keep the sums of earlier parts in fp16
_SWITCHES_BYTES = 1024  # of shared memory: barriers, and the rest that is not counted here


def stores_by_tma(spec: Spec) -> bool:
    """Return whether results are stored through ``y_map``: in boxes of 64 x 64, unless an index names their rows."""
    return not spec.fusion and spec.config.block_m >= BLOCK


def _boxes(spec: Spec) -> dict[str, Box]:
    c = spec.config
    return {
        "x": (min(c.block_m, BLOCK), LINE),
        "w": (c.block_n // BLOCK, c.block_k // BLOCK * (BLOCK * BLOCK // 4 // WORD_ROW), WORD_ROW),
        "y_map": (1, 1, BLOCK, BLOCK),
    }


def _shapes(_spec: Spec, n: Sizes) -> dict[str, TensorShape]:
    line = n["K"] // BLOCK * (BLOCK * BLOCK // 4 // WORD_ROW)
    return {
        "x": of_rows(n["K"], ""),
        "w": dense(n["E"] * (n["N"] // BLOCK), line, WORD_ROW),
        "y_map": ragged(n["N"], "stride_y_m"),
    }


def _constants(spec: Spec, arch: Arch) -> Constants:
    c = spec.config
    tables = 2 * c.block_m * (12 if spec.fusion else 4)
    sums = BLOCK * c.block_m * 4 if c.block_n == BLOCK else 0
    operands = c.num_stages * (c.block_m + c.block_n) * c.block_k
    buffer = 2 * min(c.block_m, BLOCK) * BLOCK * 2  # for both warpgroups' results
    room = arch.limits.shared_per_block_bytes - _SWITCHES_BYTES - tables - sums - operands
    return {
        "BLOCK_M": c.block_m,
        "BLOCK_N": c.block_n,
        "BLOCK_K": c.block_k,
        "STAGES": c.num_stages,
        "SLOTS": 2 if room >= 2 * buffer else 1,
        "GROUP_M": c.group_m,
        "EXPERTS": MAX_EXPERTS,
        "INDEXED": bool(spec.fusion),
        "FITTED": c.rows is TileRows.FITTED,
        "PART": PART,
        "REGISTERS": 216,
    }


def _order(spec: Spec, _arch: Arch, reduction: int) -> Order:
    """The order of sums: tensor cores sum parts of K; in a tile of 64 columns a warpgroup sums half of every step."""
    c = spec.config
    split, parts = c.block_n == BLOCK, reduction > PART
    packs = parts and c.block_m * max(1, c.block_n // 128) > _MOST_SUMS
    return Order(
        f"{PREPARED}, codes of x",
        WIDE,
        32,
        accumulators=2 if split else 1,
        share=c.block_k // 2 if split else 0,
        partial=PART if parts else 0,
        kept="fp16" if packs else "fp32",
    )


def _descriptors(spec: Spec) -> tuple[str, ...]:
    return ("x", "w", "y_map") if stores_by_tma(spec) else ("x", "w")


def _absent(spec: Spec) -> tuple[str, ...]:
    return () if stores_by_tma(spec) else ("y_map",)


def _required(spec: Spec) -> tuple[str, ...]:
    return ("x", "w", "x_scale", "w_scale", "y", *(("y_map",) if stores_by_tma(spec) else ()), "m_sizes", "counter")


def _tiles(rows: TileRows, m: tuple[int, ...], n: tuple[int, ...], k: tuple[int, ...]) -> tuple[Tiles, ...]:
    def of(depth: int) -> Tiles:
        knobs = {
            "schedule": (Schedule.W8A8_CHANNEL,),
            "loads": (Loads.TMA,),
            "rows": (rows,),
            "block_m": m,
            "block_n": n,
            "block_k": (depth,),
            "num_warps": (8,),
            "num_stages": range(2, 13),
        }
        return Tiles(Limits(MAX_EXPERTS, _MOST_K // depth), knobs, zeroes=True)

    return tuple(of(depth) for depth in k)


FIXED: Rows = (
    (16, 64, 512, 8, 3),
    (16, 64, 1024, 8, 2),
    (16, 128, 256, 8, 4),
    (16, 128, 256, 8, 6),
    (32, 128, 256, 8, 4),
)
FITTED: Rows = (
    (256, 128, 128, 8, 4),
    (128, 128, 128, 8, 6),
    (64, 128, 256, 8, 4),
)


def _candidates(_op: Op, _dtype: DType, _arch: Arch) -> list[Config]:
    schedule = Schedule.W8A8_CHANNEL, Loads.TMA
    pool = configs(FIXED, *schedule) + configs(FITTED, *schedule, fitted=True)
    return pool + configs(FITTED[:1], *schedule, group_m=1, fitted=True)


ROWS_W8A8_CHANNEL = KernelEntry(
    name="rows_w8a8_channel",
    revision=1,
    home="hopper_w8a8_channel.rows",
    sha256="ab2305786e6ce0a01889cda43e44cbdbbd99bd2d56e41e85084f91d63d68aa8b",
    launched_since=1,
    ops=frozenset((Op.FORWARD,)),
    dtypes=DTYPES,
    fusions=PLAIN,
    needs=frozenset((Feature.WGMMA,)),
    tiles=(
        *_tiles(TileRows.FIXED, (16, 32, 64), (64, 128, 256), (128, 256, 512, 1024)),
        *_tiles(TileRows.FITTED, (64, 128), (128, 256), (128, 256)),
        *_tiles(TileRows.FITTED, (256,), (128,), (128, 256)),
    ),
    pointers=("x", "w", "x_scale", "w_scale", "y", "y_map", "m_sizes", "index", "row_weights", "bias", "counter"),
    strides=("stride_y_m",),
    steps=("m_sizes_step", "index_step", "index_end", "x_divisor", "flags"),
    ranks={"x": 2, "w": 3, "y_map": 4},
    descriptors=_descriptors,
    absent=_absent,
    required=_required,
    boxes=_boxes,
    constants=_constants,
    order=_order,
    candidates=_candidates,
    cost="hopper_w8a8_channel.cost",
    held={"x": CODES_OF_X, "w": WORDS},
    shapes=_shapes,
    loading_warps=4,
)
ENTRIES = (ROWS_W8A8_CHANNEL,)
