"""The entry of the kernel for codes of w and an x of bf16 on Hopper: ``rows_wna16``."""

from __future__ import annotations

from collections.abc import Iterator

from ...artifacts.records.precision import DType
from ...artifacts.records.problem import Fusion, Op
from ..codes import BLOCK, CODES, WORD_ROW
from ..hardware.arch import Arch, Feature
from .config import Loads, Schedule, TileRows
from .entry import Box, Constants, KernelEntry, Limits, Tiles
from .portable import LOW_OPERANDS, UNGATHERED, needs_low_rank, without_low_rank
from .spec import MAX_EXPERTS, Spec, indexed

_MOST_STEPS = (1 << 20) - 1  # the loading warp passes on a tile's steps in 20 bits


DTYPES = frozenset(map(DType, CODES))
# dX's reduction is over w's rows, and sums can't be multiplied by scales of these.
_TURNED = DTYPES - {DType.FP8_CHANNEL_A16}
SIZES = "N and K must be multiples of 64, of fp8_block of 128, and K of int4_g128 of 128"


def prepares(dtype: DType, N: int, K: int) -> bool:
    """Whether matrices of N x K can be in the order that kernels read: whole blocks, and whole blocks of scales."""
    scale = dtype.precision.w.scale
    rows, columns = (BLOCK, BLOCK) if scale is None else (max(BLOCK, scale.rows), max(BLOCK, scale.columns))
    return N % rows == 0 and K % columns == 0


def _tiles(rows: TileRows, m: tuple[int, ...], n: tuple[int, ...], k: tuple[int, ...]) -> Iterator[Tiles]:
    limits, twice = Limits(MAX_EXPERTS, _MOST_STEPS), frozenset((DType.INT4_G128,))

    def deep(sizes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(size for size in sizes if size >= 2 * BLOCK)

    def of(op: Op, n: tuple[int, ...], k: tuple[int, ...], dtypes: frozenset[DType]) -> Tiles:
        knobs = {
            "schedule": (Schedule.MIXED_INPUT,), "loads": (Loads.TMA,), "rows": (rows,), "block_m": m, "block_n": n,
            "block_k": k, "num_warps": (8,), "num_stages": range(2, 13),
        }  # fmt: skip
        forms = UNGATHERED if op is Op.FORWARD else frozenset((Fusion.NONE, Fusion.LOW_RANK))
        return Tiles(limits, knobs, dtypes=dtypes, ops=frozenset((op,)), fusions=forms, zeroes=True)

    # Two blocks of w's columns have a scale: a stage, or a tile, has both.
    yield of(Op.FORWARD, n, k, DTYPES - twice)
    yield of(Op.FORWARD, n, deep(k), twice)
    yield of(Op.DX, n, k, _TURNED - twice)
    yield of(Op.DX, deep(n), k, twice)


def _scaled(spec: Spec) -> tuple[str, ...]:
    codes = CODES[spec.dtype.value]
    return (("w_scale",) if codes.scale_bytes else ()) + (("w_outer",) if codes.outer else ())


def _descriptors(spec: Spec) -> tuple[str, ...]:
    low = LOW_OPERANDS if Fusion.LOW_RANK in spec.fusion else ()
    return ("x", "w", *(("w_scale",) if CODES[spec.dtype.value].scale_bytes else ()), *low)


def _absent(spec: Spec) -> tuple[str, ...]:
    scales = tuple(name for name in ("w_scale", "w_outer") if name not in _scaled(spec))
    return (*scales, *without_low_rank(spec))


def _boxes(spec: Spec) -> dict[str, Box]:
    c, codes = spec.config, CODES[spec.dtype.value]
    blocks = (c.block_n if spec.op is Op.DX else c.block_k) // BLOCK  # one after the other in memory
    return {
        "x": (min(c.block_m, BLOCK), BLOCK),
        "w": (codes.words * blocks, WORD_ROW),
        "w_scale": (blocks // codes.blocks_per_scale, codes.scale_bytes),
        "low_x": (min(c.block_m, BLOCK), BLOCK),
        "low_w": (1, BLOCK, BLOCK),
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
        "INDEXED": indexed(spec.fusion),
        "FITTED": c.rows is TileRows.FITTED,
        "REGISTERS": 216,
        "DX": spec.op is Op.DX,
        "LOW_RANK": Fusion.LOW_RANK in spec.fusion,
    }


ROWS_WNA16 = KernelEntry(
    name="rows_wna16",
    revision=2,
    home="gemm.hopper.wna16",
    sha256="f011c0181edc9bfb5f28d7cf3d721bac3fbf1e01c97c54f77dc373aa3be73db5",
    launched_since=1,
    ops=frozenset((Op.FORWARD, Op.DX)),
    dtypes=DTYPES,
    fusions=UNGATHERED,
    needs=frozenset((Feature.WGMMA,)),
    tiles=(
        *_tiles(TileRows.FIXED, (16, 32, 64), (64, 128, 256), (128, 256, 512, 1024)),
        *_tiles(TileRows.FITTED, (64, 128, 256), (128, 256), (64, 128, 256)),
    ),
    pointers=("x", "w", "w_scale", "w_outer", "y", "m_sizes", "index", "row_weights", "bias", *LOW_OPERANDS, "counter"),
    strides=("stride_y_m", "stride_outer_e"),
    steps=("m_sizes_step", "index_step", "index_end", "x_divisor", "flags", "R"),
    ranks={"x": 2, "w": 2, "w_scale": 2, "low_x": 2, "low_w": 3},
    descriptors=_descriptors,
    absent=_absent,
    required=lambda spec: ("x", "w", *_scaled(spec), "y", "m_sizes", "counter", *needs_low_rank(spec)),
    boxes=_boxes,
    constants=_constants,
    loading_warps=4,
)
