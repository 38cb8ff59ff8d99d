"""Warp-specialised kernels for prepared quantised w and bf16 x on H100/H200 (sm_90): forward and dX.

w's codes become bf16 in registers before they are multiplied.

- ``rows_wna16`` (rows.py): mxfp4, nvfp4, int4 without zero points, fp8.
- ``rows_wna16_zero`` (rows_zero.py): int4 with zero points.
- ``rows_wna16_mx8`` (rows_mx8.py): mxfp8.

``can_be_prepared`` says which N and K can be prepared, ``padded_width`` pads a layer's width I to such a size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from ...artifacts.records import DType, Fusion, Op
from ..arch import Arch, Feature
from ..codes import BLOCK, CODES, WORD_ROW, CodeLayout
from ..entry import (
    BYTES,
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
)
from ..portable_plain import LOW_OPERANDS, UNGATHERED, low_shapes, needs_low_rank, without_low_rank
from ..spec import MAX_EXPERTS, Config, Loads, Schedule, Spec, TileRows, indexed

_MOST_STEPS = (1 << 20) - 1  # the loading warp passes a tile's steps on in 20 bits
_ZERO = "_zp"  # suffix of formats with zero points; without it the name is that of the format without zero points
ZERO_DTYPES = frozenset(dtype for dtype in DType if dtype.value.endswith(_ZERO))
_OWN = frozenset(map(DType, CODES))
_MX8 = frozenset((DType.MXFP8,))
DTYPES = _OWN | ZERO_DTYPES | _MX8
_MX8_LAYOUT = CodeLayout("e4m3", "e8m0", 2)
# dX sums over w's rows, so it can't apply a scale for each row to the sums.
_OWN_DX = _OWN - {DType.FP8_CHANNEL_A16}
SIZES = "N and K must be multiples of 64, of fp8_block of 128, and K of int4_g128 of 128"


def code_layout(dtype: DType) -> CodeLayout:
    """Return the layout of a format's prepared codes and scales; zero points don't change it."""
    return _MX8_LAYOUT if dtype in _MX8 else CODES[dtype.value.removesuffix(_ZERO)]


def zero_bytes(dtype: DType) -> int:
    """Return the bytes of a block's zero points: one for each scale; 0 without zero points."""
    return code_layout(dtype).scale_bytes // 2 if dtype in ZERO_DTYPES else 0


def can_be_prepared(dtype: DType, N: int, K: int) -> bool:
    """Return whether matrices of N x K can be prepared: whole blocks of 64 x 64, and whole blocks of scales."""
    scale = dtype.precision.w.scale
    rows, columns = (BLOCK, BLOCK) if scale is None else (max(BLOCK, scale.rows), max(BLOCK, scale.columns))
    return N % rows == 0 and K % columns == 0


def padded_width(dtype: DType, width: int) -> int:
    """Return the width I of an expert layer, padded so that the weights of both GEMMs can be prepared.

    Weights without scales are not padded, nor is a width that splits a group of weights with a common scale among
    ranks. Engines don't split groups of mxfp4 (gpt-oss) and fp8 blocks.
    """
    scale = dtype.precision.w.scale
    if scale is None:
        return width
    group = max(1, scale.rows, scale.columns)
    if width % group and dtype is not DType.MXFP4 and scale.rows == 1:
        return width
    block = max(BLOCK, group)
    return -(-width // block) * block


def _tiles(
    dtypes: frozenset[DType],
    dx_dtypes: frozenset[DType],
    rows: TileRows,
    m: tuple[int, ...],
    n: tuple[int, ...],
    k: tuple[int, ...],
) -> Iterator[Tiles]:
    """Yield the tiles of forward and dX with sides ``m`` and ``n`` and steps ``k``."""
    limits = Limits(MAX_EXPERTS, _MOST_STEPS)
    pairs = frozenset(dtype for dtype in dtypes if code_layout(dtype).blocks_per_scale == 2)

    def deep(sizes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(size for size in sizes if size >= 2 * BLOCK)

    def of(op: Op, n: tuple[int, ...], k: tuple[int, ...], dtypes: frozenset[DType]) -> Tiles:
        knobs = {
            "schedule": (Schedule.W4A16,),
            "loads": (Loads.TMA,),
            "rows": (rows,),
            "block_m": m,
            "block_n": n,
            "block_k": k,
            "num_warps": (8,),
            "num_stages": range(2, 13),
        }
        forms = UNGATHERED if op is Op.FORWARD else frozenset((Fusion.NONE, Fusion.LOW_RANK))
        return Tiles(limits, knobs, dtypes=dtypes, ops=frozenset((op,)), fusions=forms, zeroes=True)

    # If two blocks of w's columns share a scale, a stage (forward) or a tile (dX) must have both.
    yield of(Op.FORWARD, n, k, dtypes - pairs)
    yield of(Op.FORWARD, n, deep(k), pairs)
    yield of(Op.DX, n, k, dx_dtypes - pairs)
    yield of(Op.DX, deep(n), k, pairs)


def _all_tiles(dtypes: frozenset[DType], dx_dtypes: frozenset[DType]) -> tuple[Tiles, ...]:
    return (
        *_tiles(dtypes, dx_dtypes, TileRows.FIXED, (16, 32, 64), (64, 128, 256), (128, 256, 512, 1024)),
        *_tiles(dtypes, dx_dtypes, TileRows.FITTED, (64, 128, 256), (128, 256), (64, 128, 256)),
    )


def _scales(spec: Spec) -> tuple[str, ...]:
    """Return the arguments that scale w's codes, in order."""
    codes = code_layout(spec.dtype)
    scales = (("w_scale",) if codes.scale_bytes else ()) + (("w_outer",) if codes.outer else ())
    return (*scales, *(("w_zero",) if spec.dtype in ZERO_DTYPES else ()))


def _descriptors(spec: Spec) -> tuple[str, ...]:
    low = LOW_OPERANDS if Fusion.LOW_RANK in spec.fusion else ()
    return ("x", "w", *(name for name in _scales(spec) if name != "w_outer"), *low)


def _absent(spec: Spec) -> tuple[str, ...]:
    scales = tuple(name for name in ("w_scale", "w_outer") if name not in _scales(spec))
    return (*scales, *without_low_rank(spec))


def _boxes(spec: Spec) -> dict[str, Box]:
    c, codes = spec.config, code_layout(spec.dtype)
    blocks = (c.block_n if spec.op is Op.DX else c.block_k) // BLOCK  # contiguous in memory
    line = (1, 1) if spec.dtype in ZERO_DTYPES else ()  # extra dimensions: expert, line of blocks
    return {
        "x": (min(c.block_m, BLOCK), BLOCK),
        "w": (*line, codes.words * blocks, WORD_ROW),
        "w_scale": (*line, blocks // codes.blocks_per_scale, codes.scale_bytes),
        "w_zero": (*line, blocks // codes.blocks_per_scale, zero_bytes(spec.dtype)),
        "low_x": (min(c.block_m, BLOCK), BLOCK),
        "low_w": (1, BLOCK, BLOCK),
    }


def _w_rows(spec: Spec, n: Sizes) -> int:
    """Return N of w [E, N, K], for dX the length of the reduction."""
    return n["N"] if spec.op is Op.FORWARD else n["K"]


def _shapes(spec: Spec, n: Sizes) -> dict[str, TensorShape]:
    codes, N = code_layout(spec.dtype), _w_rows(spec, n)
    line = n["N"] * n["K"] // N // BLOCK
    scales = line // codes.blocks_per_scale

    def blocks(count: int, size: int) -> TensorShape:
        """Expert and line of blocks are dimensions of their own only for kernels with zero points."""
        sizes = n["E"], N // BLOCK, count, size
        return dense(*sizes) if spec.dtype in ZERO_DTYPES else dense(math.prod(sizes[:3]), size)

    return {
        "x": of_rows(n["K"], "stride_x_m"),
        "w": blocks(line * codes.words, WORD_ROW),
        "w_scale": blocks(scales, codes.scale_bytes),
        "w_zero": blocks(scales, zero_bytes(spec.dtype)),
        **low_shapes(n, kn=spec.op is Op.DX),
    }


def _numbers(spec: Spec, n: Sizes) -> dict[str, int]:
    """stride_outer_e: an expert's outer scales are one, or w's rows if the format has no other scale."""
    return {"stride_outer_e": _w_rows(spec, n) if code_layout(spec.dtype).scales == "none" else 1}


def _constants(spec: Spec, _arch: Arch) -> Constants:
    c = spec.config
    return {
        "BLOCK_M": c.block_m,
        "BLOCK_N": c.block_n,
        "BLOCK_K": c.block_k,
        "STAGES": c.num_stages,
        "GROUP_M": c.group_m,
        "EXPERTS": MAX_EXPERTS,
        "FORMAT": spec.dtype.value.removesuffix(_ZERO),
        "INDEXED": indexed(spec.fusion),
        "FITTED": c.rows is TileRows.FITTED,
        "REGISTERS": 216,
        "DX": spec.op is Op.DX,
        "LOW_RANK": Fusion.LOW_RANK in spec.fusion,
    }


def _order(spec: Spec, _arch: Arch, _reduction: int) -> Order:
    """One sum over all of K; of a tile of 64 columns each warpgroup has every other block of 64 of K."""
    split = spec.config.block_n == BLOCK
    low = Fusion.LOW_RANK in spec.fusion
    return Order(PREPARED, WIDE, 16, 2 if split else 1, BLOCK if split else 0, low_rank=low)


def _without_format(spec: Spec, arch: Arch) -> Constants:
    return {name: value for name, value in _constants(spec, arch).items() if name != "FORMAT"}


# Forward: the configs within 2 % of the fastest in some cell on an H100 (benchmarks/results/quantised-h100.journal.xz).
# A tile of 64 columns splits K between its warpgroups. Codes of 8 bits take twice the room.
FOUR_BITS: Rows = (
    (16, 64, 1024, 8, 3),
    (16, 128, 512, 8, 4),
    (16, 256, 256, 8, 4),
    (32, 128, 512, 8, 3),
)
EIGHT_BITS: Rows = (
    (16, 64, 512, 8, 3),
    (16, 128, 256, 8, 4),
    (32, 128, 256, 8, 4),
)
FOUR_BITS_FITTED: Rows = (
    (64, 256, 128, 8, 5),
    (128, 128, 128, 8, 4),
    (128, 256, 128, 8, 3),
    (256, 128, 64, 8, 5),
    (256, 128, 128, 8, 2),
)
EIGHT_BITS_FITTED: Rows = (
    (64, 256, 128, 8, 3),
    (64, 128, 128, 8, 4),
    (128, 128, 128, 8, 3),
    (128, 256, 64, 8, 5),
    (256, 128, 64, 8, 4),
)
# dX: likewise (benchmarks/results/coded-dx-h100.json.xz).
DX_FOUR_BITS: Rows = (
    (16, 64, 512, 8, 3),
    (16, 128, 256, 8, 4),
    (32, 128, 256, 8, 4),
)
DX_EIGHT_BITS: Rows = (
    (16, 64, 512, 8, 2),
    (16, 128, 256, 8, 4),
)
DX_FOUR_BITS_FITTED: Rows = (
    (128, 128, 128, 8, 4),
    (256, 128, 128, 8, 2),
    (256, 128, 64, 8, 5),
)
DX_EIGHT_BITS_FITTED: Rows = (
    (128, 128, 128, 8, 3),
    (256, 128, 64, 8, 4),
)


def _candidates(op: Op, dtype: DType, _arch: Arch) -> list[Config]:
    if op is Op.DX and dtype is DType.FP8_CHANNEL_A16:
        return []
    four = dtype.precision.w.bits == 4
    if op is Op.DX:
        small, fitted = (DX_FOUR_BITS, DX_FOUR_BITS_FITTED) if four else (DX_EIGHT_BITS, DX_EIGHT_BITS_FITTED)
    else:
        small, fitted = (FOUR_BITS, FOUR_BITS_FITTED) if four else (EIGHT_BITS, EIGHT_BITS_FITTED)
    return configs(small, Schedule.W4A16, Loads.TMA) + configs(fitted, Schedule.W4A16, Loads.TMA, fitted=True)


ROWS_W4A16 = KernelEntry(
    name="rows_wna16",
    revision=2,
    home="hopper_w4a16.rows",
    sha256="c249e600967c58c56b684afd3beb58804a9fd0f55cc56a2092c19c5669a1d558",
    launched_since=1,
    ops=frozenset((Op.FORWARD, Op.DX)),
    dtypes=_OWN,
    fusions=UNGATHERED,
    needs=frozenset((Feature.WGMMA,)),
    tiles=_all_tiles(_OWN, _OWN_DX),
    pointers=("x", "w", "w_scale", "w_outer", "y", "m_sizes", "index", "row_weights", "bias", *LOW_OPERANDS, "counter"),
    strides=("stride_y_m", "stride_outer_e"),
    steps=("m_sizes_step", "index_step", "index_end", "x_divisor", "flags", "R"),
    ranks={"x": 2, "w": 2, "w_scale": 2, "low_x": 2, "low_w": 3},
    descriptors=_descriptors,
    absent=_absent,
    required=lambda spec: ("x", "w", *_scales(spec), "y", "m_sizes", "counter", *needs_low_rank(spec)),
    boxes=_boxes,
    constants=_constants,
    order=_order,
    candidates=_candidates,
    cost="hopper_w4a16.cost",
    held={"w": WORDS, "w_scale": BYTES, "w_zero": BYTES},
    shapes=_shapes,
    numbers=_numbers,
    plain_scales=False,
    loading_warps=4,
)

ROWS_W4A16_ZERO = ROWS_W4A16._replace(
    name="rows_wna16_zero",
    revision=2,
    home="hopper_w4a16.rows_zero",
    sha256="5b400accab3cdad3f2783789325af676d7985705067783d7634664c8b915cc4b",
    launched_since=1,
    dtypes=ZERO_DTYPES,
    tiles=_all_tiles(ZERO_DTYPES, ZERO_DTYPES),
    pointers=("x", "w", "w_scale", "w_zero", "y", "m_sizes", "index", "row_weights", "bias", *LOW_OPERANDS, "counter"),
    strides=("stride_y_m",),
    ranks={"x": 2, "w": 4, "w_scale": 4, "w_zero": 4, "low_x": 2, "low_w": 3},
    absent=without_low_rank,
)

ROWS_W4A16_MX8 = ROWS_W4A16._replace(
    name="rows_wna16_mx8",
    revision=1,
    home="hopper_w4a16.rows_mx8",
    sha256="398f0cffdd8051c94b720ab56090b24a3bfde1f2a80a1dd032d1e600543fda73",
    launched_since=1,
    dtypes=_MX8,
    tiles=_all_tiles(_MX8, _MX8),
    pointers=("x", "w", "w_scale", "y", "m_sizes", "index", "row_weights", "bias", *LOW_OPERANDS, "counter"),
    strides=("stride_y_m",),
    ranks={"x": 2, "w": 2, "w_scale": 2, "low_x": 2, "low_w": 3},
    absent=without_low_rank,
    constants=_without_format,
)

ENTRIES = (ROWS_W4A16, ROWS_W4A16_ZERO, ROWS_W4A16_MX8)
