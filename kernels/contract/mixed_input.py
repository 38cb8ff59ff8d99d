"""The entry of the kernel for codes of w and an x of bf16 on Hopper: ``rows_wna16``."""

from __future__ import annotations

from ...artifacts.records.precision import DType
from ...artifacts.records.problem import Op
from ..codes import BLOCK, CODES, WORD_ROW
from ..hardware.arch import Arch, Feature
from .config import Loads, Schedule, TileRows
from .entry import Box, Constants, KernelEntry, Limits, Tiles
from .portable import PLAIN
from .spec import MAX_EXPERTS, Spec

_MOST_STEPS = (1 << 20) - 1  # the loading warp passes on a tile's steps in 20 bits


DTYPES = frozenset(map(DType, CODES))
SIZES = "N and K must be multiples of 64, of fp8_block of 128, and K of int4_g128 of 128"


def prepares(dtype: DType, N: int, K: int) -> bool:
    """Whether matrices of N x K can be in the order that kernels read: whole blocks, and whole blocks of scales."""
    scale = dtype.precision.w.scale
    rows, columns = (BLOCK, BLOCK) if scale is None else (max(BLOCK, scale.rows), max(BLOCK, scale.columns))
    return N % rows == 0 and K % columns == 0


def _tiles(rows: TileRows, m: tuple[int, ...], n: tuple[int, ...], k: tuple[int, ...]) -> tuple[Tiles, ...]:
    deep = tuple(size for size in k if size >= 2 * BLOCK)
    limits = Limits(MAX_EXPERTS, _MOST_STEPS)
    wide = DTYPES - {DType.INT4_G128}

    def of(k: tuple[int, ...], dtypes: frozenset[DType]) -> Tiles:
        knobs = {
            "schedule": (Schedule.MIXED_INPUT,), "loads": (Loads.TMA,), "rows": (rows,), "block_m": m, "block_n": n,
            "block_k": k, "num_warps": (8,), "num_stages": range(2, 13),
        }  # fmt: skip
        return Tiles(limits, knobs, dtypes=dtypes, zeroes=True)

    return of(k, wide), of(deep, frozenset((DType.INT4_G128,)))


def _scaled(spec: Spec) -> tuple[str, ...]:
    codes = CODES[spec.dtype.value]
    return (("w_scale",) if codes.scale_bytes else ()) + (("w_outer",) if codes.outer else ())


def _descriptors(spec: Spec) -> tuple[str, ...]:
    return ("x", "w", "w_scale") if CODES[spec.dtype.value].scale_bytes else ("x", "w")


def _absent(spec: Spec) -> tuple[str, ...]:
    return tuple(name for name in ("w_scale", "w_outer") if name not in _scaled(spec))


def _boxes(spec: Spec) -> dict[str, Box]:
    c, codes = spec.config, CODES[spec.dtype.value]
    blocks = c.block_k // BLOCK
    return {
        "x": (min(c.block_m, BLOCK), BLOCK),
        "w": (codes.words * blocks, WORD_ROW),
        "w_scale": (blocks // codes.blocks_per_scale, codes.scale_bytes),
    }


def _constants(spec: Spec, _arch: Arch) -> Constants:
    c = spec.config
    return {
        "BLOCK_M": c.block_m,
        "BLOCK_N": c.block_n,
        "BLOCK_K": c.block_k,
        "STAGES": c.num_stages,
        "GROUP_M": c.group_m,
        "EXPERTS": MAX_EXPERTS,
        "FORMAT": spec.dtype.value,
        "INDEXED": bool(spec.fusion),
        "FITTED": c.rows is TileRows.FITTED,
        "REGISTERS": 216,
    }


ROWS_WNA16 = KernelEntry(
    name="rows_wna16",
    revision=1,
    home="gemm.hopper.wna16",
    sha256="22a489d67d3d9ba610a30ff16713e98efcc62a036a713afd31bcbeaf521021c1",
    launched_since=1,
    ops=frozenset((Op.FORWARD,)),
    dtypes=DTYPES,
    fusions=PLAIN,
    needs=frozenset((Feature.WGMMA,)),
    tiles=(
        *_tiles(TileRows.FIXED, (16, 32, 64), (64, 128, 256), (128, 256, 512, 1024)),
        *_tiles(TileRows.FITTED, (64, 128, 256), (128, 256), (64, 128, 256)),
    ),
    pointers=("x", "w", "w_scale", "w_outer", "y", "m_sizes", "index", "row_weights", "bias", "counter"),
    strides=("stride_y_m", "stride_outer_e"),
    steps=("m_sizes_step", "index_step", "index_end", "x_divisor", "flags"),
    ranks={"x": 2, "w": 2, "w_scale": 2},
    descriptors=_descriptors,
    absent=_absent,
    required=lambda spec: ("x", "w", *_scaled(spec), "y", "m_sizes", "counter"),
    boxes=_boxes,
    constants=_constants,
    loading_warps=4,
)
