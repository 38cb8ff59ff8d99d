"""The portable kernel ``coded`` for quantised w and bf16 x, for all supported GPUs: forward and dX.

w's codes become bf16 in registers. The forward reads w in the checkpoint layout; dX reads it in the checkpoint layout
or prepared.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...artifacts.records import DType, Fusion, Layout, Op, Scale
from ..arch import Arch
from ..codes import BLOCK
from ..entry import Constants, KernelEntry, Limits, Order, Rows, Tiles, configs, instruction
from ..portable_plain import PLAIN
from ..spec import MAX_EXPERTS, Config, Schedule, Spec

DTYPES = frozenset(dtype for dtype in DType if dtype.quantised and not dtype.quantises_x)
_LINE_BYTES = 16  # bytes of a row of codes that are loaded at once
_BLOCKS = (64, 128, 256)


def _scale(spec: Spec) -> Scale:
    scale = spec.dtype.precision.w.scale
    if scale is None:
        raise AssertionError(f"{spec.dtype.value} has no scale")
    return scale


def order_of(spec: Spec) -> int:
    """Return the number of the order of codes that a variant reads: see runtime/weights/prepared_layout.py."""
    if spec.layout is Layout.STORED:
        return 0
    return 2 if spec.dtype.precision.w.bits == 8 else 1


def _absent(spec: Spec) -> tuple[str, ...]:
    scale = _scale(spec)
    return (*(() if scale.zero_bits else ("w_zero",)), *(() if scale.outer else ("w_outer",)))


def _constants(spec: Spec, _arch: Arch) -> Constants:
    c, scale = spec.config, _scale(spec)
    whole = scale.zero_bits and not order_of(spec)  # prepared ones are minus 8: runtime/weights/prepared_layout.py
    return {
        "BLOCK_M": c.block_m,
        "BLOCK_N": c.block_n,
        "BLOCK_K": c.block_k,
        "GROUP_M": c.group_m,
        "EXPERTS": MAX_EXPERTS,
        "INDEXED": bool(spec.fusion),
        "DX": spec.op is Op.DX,
        "CODES": "uint4" if whole else spec.dtype.precision.w.name,
        "SCALES": scale.name,
        "GROUP": scale.columns,
        "SCALE_ROWS": scale.rows,
        "OUTER": scale.outer is not None,
        "ZERO": bool(scale.zero_bits),
        "ORDER": order_of(spec),
    }


def _order(spec: Spec, arch: Arch, _reduction: int) -> Order:
    """One sum over all of K, of w rounded once to x's type with all of its scales.

    On an H100, a layer's dX of codes with a scale a row differed with the batch; the cause is not known. So each tile
    counts as an order of its own there.
    """
    c, operands = spec.config, "codes in x's type"
    if spec.op is Op.DX and not _scale(spec).columns:
        operands += f" in tiles of {c.block_m} x {c.block_n} x {c.block_k}"
    return Order(operands, instruction(spec, arch, agree=True), 16)


def _pointees(spec: Spec) -> Mapping[str, str]:
    """Return the element types of codes and scales, by Triton's names."""
    scale = {"e8m0": "u8", "e4m3": "u8", "bf16": "bf16", "fp32": "fp32"}[_scale(spec).name]
    word, zero = ("*i32", "*i8") if order_of(spec) else ("*u8", "*u8")
    return {"w": word, "w_scale": f"*{scale}", "w_zero": zero, "w_outer": "*fp32"}


def _multiples(spec: Spec) -> Mapping[str, int]:
    """Aligned variants assume whole lines of codes in each row of w."""
    codes = BLOCK if order_of(spec) else _LINE_BYTES * 8 // spec.dtype.precision.w.bits
    rows = BLOCK if order_of(spec) else 8
    columns, reduction = (codes, rows) if spec.op is Op.DX else (rows, codes)
    return {"N": columns, "K": reduction, "w_scale": _LINE_BYTES}


def _layouts(op: Op) -> frozenset[Layout]:
    """dX also reads weights that were prepared for another kernel's forward."""
    return frozenset((Layout.STORED,)) if op is Op.FORWARD else frozenset((Layout.NK, Layout.STORED))


# With few rows the time is that of loading w: long steps. With many rows it is that of turning codes into bf16, which
# large tiles do less often. Each config was the fastest for some number of rows on an H200 (benchmarks/speed/coded.py),
# except the last two of 8 bits, which are not measured.
FOUR_BITS: Rows = (
    (16, 64, 256, 4, 3),
    (64, 128, 64, 4, 3),
    (128, 128, 64, 8, 3),
)
EIGHT_BITS: Rows = (
    (16, 64, 128, 4, 4),
    (64, 128, 64, 4, 3),
    (128, 128, 64, 8, 3),
    (64, 64, 128, 4, 3),  # for dX of prepared codes: one block of columns
    (128, 64, 64, 4, 3),
)


def _candidates(_op: Op, dtype: DType, _arch: Arch) -> list[Config]:
    return configs(FOUR_BITS if dtype.precision.w.bits == 4 else EIGHT_BITS, Schedule.TILE)


CODED = KernelEntry(
    name="coded",
    revision=1,
    home="portable_w4a16.rows",
    sha256="d916f45b9b20010f6336bbab13703a4853b41d253a5c1ab54ba5507c2efe2113",
    launched_since=1,
    ops=frozenset((Op.FORWARD, Op.DX)),
    dtypes=DTYPES,
    fusions=PLAIN | {Fusion.GATHER},
    needs=frozenset(),
    tiles=(
        Tiles(
            Limits(MAX_EXPERTS),
            {"schedule": (Schedule.TILE,), "block_n": _BLOCKS, "block_k": _BLOCKS},
            zeroes=True,
        ),
    ),
    pointers=("x", "w", "w_scale", "w_zero", "w_outer", "y", "m_sizes", "index", "row_weights", "bias"),
    strides=("stride_x_m", "stride_y_m"),
    steps=("m_sizes_step", "index_step", "index_end", "x_divisor", "flags"),
    absent=_absent,
    required=lambda spec: ("x", "w", "w_scale", "y", "m_sizes"),
    constants=_constants,
    order=_order,
    candidates=_candidates,
    fallbacks=lambda _op, _dtype, _arch: configs(((32, 64, 64, 4, 2),), Schedule.TILE),
    cost="portable_w4a16.cost",
    layouts=_layouts,
    pointees=_pointees,
    multiples=_multiples,
)
ENTRIES = (CODED,)
