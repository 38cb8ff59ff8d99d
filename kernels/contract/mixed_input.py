"""The entry of the kernel for codes of w and an x of bf16 on Hopper: ``rows_wna16``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ...artifacts.records.precision import DType
from ...artifacts.records.problem import Op
from ..hardware.arch import Arch, Feature
from .config import Loads, Schedule, TileRows
from .entry import Box, Constants, KernelEntry, Limits, Tiles
from .portable import PLAIN
from .spec import MAX_EXPERTS, Spec

BLOCK = 64  # rows of w, and of K, that lie together: runtime/weights/order.py
_MOST_STEPS = (1 << 20) - 1  # the loading warp passes on a tile's steps in 20 bits
_WARPGROUPS = 2
WORD_ROW = 256  # words that the descriptor of w has in a row


class Codes(NamedTuple):
    """How a format's blocks lie, as the kernel is told."""

    codes: str
    scales: str
    groups: int  # of a row of a block, that have a scale each
    blocks_per_scale: int = 1  # of K
    outer: bool = False  # sums are multiplied by scales of an expert or of y's columns

    @property
    def words(self) -> int:
        """Of 4 codes x 8 bits, or 8 x 4, that a thread has of a row of a block."""
        return 4 if self.codes == "e4m3" else 2

    @property
    def scale_bytes(self) -> int:
        """Of a block, 0 where it has none."""
        if self.scales in ("none", "block"):
            return 16 if self.scales == "block" else 0  # TMA moves 16 at least
        return BLOCK * self.groups * (2 if self.scales == "bf16" else 1)


CODES: Mapping[DType, Codes] = {
    DType.MXFP4: Codes("e2m1", "e8m0", 2),
    DType.NVFP4: Codes("e2m1", "e4m3", 4, outer=True),
    DType.INT4_G32: Codes("int4", "bf16", 2),
    DType.INT4_G64: Codes("int4", "bf16", 1),
    DType.INT4_G128: Codes("int4", "bf16", 1, blocks_per_scale=2),
    DType.FP8_BLOCK_A16: Codes("e4m3", "block", 1),
    DType.FP8_CHANNEL_A16: Codes("e4m3", "none", 1, outer=True),
}


def prepares(dtype: DType, N: int, K: int) -> bool:
    """Whether matrices of N x K can be in the order that the kernel reads: whole blocks, and whole blocks of scales."""
    scale = dtype.precision.w.scale
    rows, columns = (BLOCK, BLOCK) if scale is None else (max(BLOCK, scale.rows), max(BLOCK, scale.columns))
    return N % rows == 0 and K % columns == 0


def _tiles(rows: TileRows, m: tuple[int, ...], n: tuple[int, ...], k: tuple[int, ...]) -> tuple[Tiles, ...]:
    deep = tuple(size for size in k if size >= 2 * BLOCK)
    limits = Limits(MAX_EXPERTS, _MOST_STEPS)
    wide = frozenset(CODES) - {DType.INT4_G128}

    def of(k: tuple[int, ...], dtypes: frozenset[DType]) -> Tiles:
        return Tiles(
            Schedule.MIXED_INPUT, Loads.TMA, limits, m=m, n=n, k=k, warps=(4 * _WARPGROUPS,), stages=(2, 12), rows=rows,
            dtypes=dtypes, zeroes=True,
        )  # fmt: skip

    return of(k, wide), of(deep, frozenset((DType.INT4_G128,)))


def _scaled(spec: Spec) -> tuple[str, ...]:
    codes = CODES[spec.dtype]
    return (("w_scale",) if codes.scale_bytes else ()) + (("w_outer",) if codes.outer else ())


def _descriptors(spec: Spec) -> tuple[str, ...]:
    return ("x", "w", "w_scale") if CODES[spec.dtype].scale_bytes else ("x", "w")


def _absent(spec: Spec) -> tuple[str, ...]:
    return tuple(name for name in ("w_scale", "w_outer") if name not in _scaled(spec))


def _boxes(spec: Spec) -> dict[str, Box]:
    c, codes = spec.config, CODES[spec.dtype]
    blocks = c.block_k // BLOCK
    return {
        "x": (min(c.block_m, BLOCK), BLOCK),
        "w": (codes.words * blocks, WORD_ROW),
        "w_scale": (blocks // codes.blocks_per_scale, codes.scale_bytes),
    }


def _constants(spec: Spec, _arch: Arch) -> Constants:
    c, codes = spec.config, CODES[spec.dtype]
    fitted = c.rows is TileRows.FITTED
    return {
        "BLOCK_M": c.block_m,
        "WARPGROUPS": _WARPGROUPS,
        "KB": c.block_k // BLOCK,
        "STAGES": c.num_stages,
        "GROUP_M": c.group_m,
        "EXPERTS": MAX_EXPERTS,
        "CODES": codes.codes,
        "SCALES": codes.scales,
        "BLOCKS_PER_SCALE": codes.blocks_per_scale,
        "GROUPS": codes.groups,
        "SCALE_BYTES": codes.scale_bytes,
        "INDEXED": bool(spec.fusion),
        "FIT": fitted,
        "SPLIT": c.block_n == BLOCK,
        "AHEAD": fitted and c.block_k == BLOCK,
        "PER": max(1, c.block_n // (_WARPGROUPS * BLOCK)),
        "REGISTERS": 216,
    }


ROWS_WNA16 = KernelEntry(
    name="rows_wna16",
    revision=1,
    home="gemm.hopper.wna16",
    sha256="",
    launched_since=1,
    ops=frozenset((Op.FORWARD,)),
    dtypes=frozenset(CODES),
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
