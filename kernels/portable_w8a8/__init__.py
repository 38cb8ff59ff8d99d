"""The portable kernel ``w8a8`` for fp8 w and x, for GPUs that multiply e4m3: forward only.

w has the checkpoint layout. The kernel quantises x itself. H100/H200 (sm_90) have faster kernels for prepared w.
"""

from __future__ import annotations

from ...artifacts.records import DType, Fusion, Layout, Op
from ..arch import Arch, Feature, Generation
from ..entry import Constants, KernelEntry, Limits, Order, Rows, Tiles, configs, instruction, no_configs
from ..portable_plain import PLAIN
from ..spec import MAX_EXPERTS, Config, Schedule, Spec

DTYPES = frozenset((DType.FP8_BLOCK, DType.FP8_CHANNEL))
STEP = 128  # elements of K, the block of fp8_block's scales
_LINE_BYTES = 16  # of a row of codes, loaded at once
# Not measured. x takes most of shared memory: it has 16 bits until it is loaded.
CANDIDATES: Rows = (
    (16, 64, 128, 4, 4),
    (16, 128, 128, 4, 3),
    (32, 64, 128, 4, 3),
    (64, 64, 128, 4, 3),
    (64, 128, 128, 8, 3),
    (128, 128, 128, 8, 2),
    (128, 128, 128, 8, 3),
)
FALLBACKS: Rows = ((32, 64, 128, 4, 2),)


def _candidates(op: Op, dtype: DType, arch: Arch) -> list[Config]:
    """Return no configs for Hopper, which has faster kernels for prepared w."""
    return no_configs(op, dtype, arch) if arch.generation is Generation.HOPPER else configs(CANDIDATES, Schedule.TILE)


def _fallbacks(op: Op, dtype: DType, arch: Arch) -> list[Config]:
    hopper = arch.generation is Generation.HOPPER
    return no_configs(op, dtype, arch) if hopper else configs(FALLBACKS, Schedule.TILE)


def _constants(spec: Spec, _arch: Arch) -> Constants:
    c, scale = spec.config, spec.dtype.precision.w.scale
    return {
        "BLOCK_M": c.block_m,
        "BLOCK_N": c.block_n,
        "BLOCK_K": c.block_k,
        "GROUP_M": c.group_m,
        "EXPERTS": MAX_EXPERTS,
        "INDEXED": bool(spec.fusion),
        "SCALE_ROWS": 0 if scale is None else scale.rows,
    }


def _order(spec: Spec, arch: Arch, _reduction: int) -> Order:
    return Order("codes, codes of x made on load", instruction(spec, arch), 32, partial=STEP)


W8A8 = KernelEntry(
    name="w8a8",
    revision=1,
    home="portable_w8a8.rows",
    sha256="5c903b5d8d8c999e81a24c6dcaf82e7ee1a7d3df32e42ae42605ccb388513100",
    launched_since=1,
    ops=frozenset((Op.FORWARD,)),
    dtypes=DTYPES,
    fusions=PLAIN | {Fusion.GATHER},
    needs=frozenset((Feature.FP8,)),
    tiles=(
        Tiles(
            Limits(MAX_EXPERTS),
            {"schedule": (Schedule.TILE,), "block_n": (64, 128), "block_k": (STEP,)},
            zeroes=True,
        ),
    ),
    pointers=("x", "w", "w_scale", "y", "m_sizes", "index", "row_weights", "bias"),
    strides=("stride_x_m", "stride_y_m"),
    steps=("m_sizes_step", "index_step", "index_end", "x_divisor", "flags"),
    required=lambda _spec: ("x", "w", "w_scale", "y", "m_sizes"),
    constants=_constants,
    order=_order,
    candidates=_candidates,
    fallbacks=_fallbacks,
    cost="portable_w4a16.cost",
    layouts=lambda _op: frozenset((Layout.STORED,)),
    pointees=lambda _spec: {"w": "*u8"},
    multiples=lambda _spec: {"N": 8, "K": _LINE_BYTES, "w_scale": _LINE_BYTES},
)
ENTRIES = (W8A8,)
