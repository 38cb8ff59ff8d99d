"""The warp-specialised kernels for fp8 128x128 block on H100/H200 (sm_90): forward, and dW of codes.

w is prepared and has a scale for each 128x128 block; x is e4m3 with a scale for each row and 128 of K. For
``rows_w8a8`` a row kernel quantises x before, or orders its codes. ``rows_w8a8_starts`` reads codes and scales of
padded rows where they arrive. ``weight_w8a8`` multiplies codes of dy and x with a scale for each 128 rows and column.
"""

from __future__ import annotations

from ...artifacts.records import DType, Fusion, Op
from ..arch import Arch, Feature
from ..codes import BLOCK, WORD_ROW
from ..entry import (
    CODES_OF_X,
    PREPARED,
    WIDE,
    WORDS,
    Box,
    Constants,
    Element,
    KernelEntry,
    Limits,
    Order,
    Rows,
    Sizes,
    TensorShape,
    Tiles,
    configs,
    no_configs,
    of_rows,
    ragged,
)
from ..portable_plain import PLAIN
from ..spec import MAX_EXPERTS, Config, Loads, Schedule, Spec

DTYPES = frozenset((DType.FP8_BLOCK,))
GROUP = 128  # elements of K, and rows of w, that share a scale
SCALES = 256  # scales of x that TMA loads at once
_ROWS, _COLUMNS = 128, 256  # of a tile
_BUFFER_BYTES = 2 * 64 * 64 * 2  # of one buffer for both warpgroups' results
_QUARTERS = BLOCK * BLOCK // 4 // WORD_ROW  # rows of w's TMA descriptor that hold a block of codes
_MOST_STEPS = (1 << 20) - 1  # the queue of tiles has 20 bits for a tile's steps


def stage_bytes() -> int:
    """Return the bytes of shared memory for a step's operands and scales of x."""
    return (_ROWS + _COLUMNS) * GROUP + 4 * SCALES


def scale_columns(M: int) -> int:
    """Return the columns of x's scales [K / 128, columns] for M rows: TMA needs rows of whole 16 bytes."""
    return -(-M // 4) * 4


def _boxes(_spec: Spec) -> dict[str, Box]:
    return {
        "x": (BLOCK, GROUP),
        "w": (GROUP // BLOCK, GROUP // BLOCK, _QUARTERS, WORD_ROW),
        "x_scale": (1, SCALES),
        "y_map": (1, 1, 64, 64),
    }


def _shapes(_spec: Spec, n: Sizes) -> dict[str, TensorShape]:
    blocks, words = n["K"] // BLOCK, _QUARTERS * WORD_ROW
    w = (blocks, n["E"] * (n["N"] // BLOCK), _QUARTERS, WORD_ROW), (words, blocks * words, WORD_ROW)

    def scales(M: int, _stride: int) -> tuple[Box, Box]:
        return (n["K"] // GROUP, scale_columns(M)), (scale_columns(M),)

    return {
        "x": of_rows(n["K"], ""),
        "w": TensorShape(lambda _M, _stride: w),
        "x_scale": TensorShape(scales, rows=True),
        "y_map": ragged(n["N"], "stride_y_m"),
    }


def _constants(spec: Spec, arch: Arch) -> Constants:
    stages, tables = spec.config.num_stages, 2 * _ROWS * 8 if spec.fusion else 0
    room_bytes = arch.limits.shared_per_block_bytes - 512 - tables - stages * stage_bytes()
    return {
        "STAGES": stages,
        "SLOTS": 2 if room_bytes >= 2 * _BUFFER_BYTES else 1,
        "GROUP_M": spec.config.group_m,
        "EXPERTS": MAX_EXPERTS,
        "INDEXED": bool(spec.fusion),
        "REGISTERS": 216,
    }


def _order(_spec: Spec, _arch: Arch, _reduction: int) -> Order:
    return Order(f"{PREPARED}, codes of x", WIDE, 32, partial=GROUP)


def _descriptors(spec: Spec) -> tuple[str, ...]:
    """Return the descriptors. Results are stored through ``y_map`` unless an index names their rows."""
    return ("x", "w", "x_scale") if spec.fusion else ("x", "w", "x_scale", "y_map")


def _absent(spec: Spec) -> tuple[str, ...]:
    return ("y_map",) if spec.fusion else ()


def _required(spec: Spec) -> tuple[str, ...]:
    return ("x", "w", "x_scale", "w_scale", "y", *(() if spec.fusion else ("y_map",)), "m_sizes", "counter")


CANDIDATES: Rows = (
    (128, 256, 128, 8, 4),
    (128, 256, 128, 8, 3),
)


def _candidates(_op: Op, _dtype: DType, _arch: Arch) -> list[Config]:
    schedule = Schedule.W8A8_BLOCK, Loads.TMA
    return configs(CANDIDATES, *schedule) + configs(CANDIDATES, *schedule, group_m=16)


ROWS_W8A8_BLOCK = KernelEntry(
    name="rows_w8a8",
    revision=1,
    home="hopper_w8a8_block.rows",
    sha256="dc6c8a8abc402a03c18d61a807b8a6c5dc8efb24c6a04d3144a940b691d47416",
    launched_since=1,
    ops=frozenset((Op.FORWARD,)),
    dtypes=DTYPES,
    fusions=PLAIN,
    needs=frozenset((Feature.WGMMA,)),
    tiles=(
        Tiles(
            Limits(MAX_EXPERTS, _MOST_STEPS),
            {
                "schedule": (Schedule.W8A8_BLOCK,),
                "loads": (Loads.TMA,),
                "block_m": (_ROWS,),
                "block_n": (_COLUMNS,),
                "block_k": (GROUP,),
                "num_warps": (8,),
                "num_stages": range(2, 5),
            },
            zeroes=True,
        ),
    ),
    pointers=("x", "w", "x_scale", "w_scale", "y", "y_map", "m_sizes", "index", "row_weights", "bias", "counter"),
    strides=("stride_y_m",),
    steps=("m_sizes_step", "index_step", "index_end", "x_divisor", "flags"),
    ranks={"x": 2, "w": 4, "x_scale": 2, "y_map": 4},
    descriptors=_descriptors,
    absent=_absent,
    required=_required,
    boxes=_boxes,
    constants=_constants,
    order=_order,
    candidates=_candidates,
    cost="hopper_w8a8_block.cost",
    held={"x": CODES_OF_X, "w": WORDS, "x_scale": Element("fp32", 7, 32)},
    shapes=_shapes,
    loading_warps=4,
)


def _starts_boxes(spec: Spec) -> dict[str, Box]:
    boxes = _boxes(spec)
    return {"x": (BLOCK, BLOCK), "w": boxes["w"], "y_map": boxes["y_map"]}


def _starts_shapes(spec: Spec, n: Sizes) -> dict[str, TensorShape]:
    shapes = _shapes(spec, n)
    return {name: shapes[name] for name in ("x", "w", "y_map")}


def _starts_constants(spec: Spec, arch: Arch) -> Constants:
    plain = _constants(spec._replace(fusion=Fusion.NONE), arch)
    return {name: plain[name] for name in ("STAGES", "SLOTS", "GROUP_M", "EXPERTS", "REGISTERS")}


# Not among the candidates that are measured: ``aot/plan/families.py`` compiles them, the cost model chooses.
STARTS_CONFIGS = tuple(configs(((128, 256, 128, 8, 3),), Schedule.W8A8_STARTS, Loads.TMA))


ROWS_W8A8_STARTS = KernelEntry(
    name="rows_w8a8_starts",
    revision=1,
    home="hopper_w8a8_block.starts",
    sha256="b0d063079e14ffd33573e2d68ee0ba3586fa506d2bcfcc61982aeca56eae2fb0",
    launched_since=1,
    ops=frozenset((Op.FORWARD,)),
    dtypes=DTYPES,
    fusions=frozenset((Fusion.STARTS,)),
    needs=frozenset((Feature.WGMMA,)),
    tiles=(
        Tiles(
            Limits(MAX_EXPERTS, _MOST_STEPS),
            {
                "schedule": (Schedule.W8A8_STARTS,),
                "loads": (Loads.TMA,),
                "block_m": (_ROWS,),
                "block_n": (_COLUMNS,),
                "block_k": (GROUP,),
                "num_warps": (8,),
                "num_stages": range(2, 5),
            },
        ),
    ),
    pointers=("x", "w", "x_scale", "w_scale", "y", "y_map", "m_sizes", "starts", "bounds", "counter"),
    strides=("stride_y_m",),
    steps=("stride_scale_m", "stride_scale_k", "stride_scale_e", "m_sizes_step", "starts_step", "room", "packs"),
    ranks={"x": 2, "w": 4, "y_map": 4},
    descriptors=lambda _spec: ("x", "w", "y_map"),
    required=lambda _spec: ("x", "w", "x_scale", "w_scale", "y", "y_map", "m_sizes", "counter"),
    boxes=_starts_boxes,
    constants=_starts_constants,
    order=_order,
    candidates=no_configs,
    cost="hopper_w8a8_block.cost",
    held={"x": CODES_OF_X._replace(swizzle=64), "w": WORDS},
    shapes=_starts_shapes,
    loading_warps=4,
)


ADDS, FP32 = 1, 2  # ``dw_flags``: dw is added to, dw is fp32; kernels/hopper_w8a8_block/weight.py has the same values


def places_for(M: int, E: int) -> int:
    """Return P of codes [C, P] for M rows of E experts, each of which begins at a multiple of 128 of P."""
    return (M + (GROUP - 1) * min(E, M)) // GROUP * GROUP


def _weight_boxes(_spec: Spec) -> dict[str, Box]:
    dy, x = (_ROWS // 2, GROUP), (_COLUMNS // 2, GROUP)
    return {"dy": dy, "x": x, "dy_scale": (1, _ROWS), "dw": (1, 64, 64)}


def _weight_shapes(_spec: Spec, n: Sizes) -> dict[str, TensorShape]:
    def codes(columns: int) -> TensorShape:
        return TensorShape(lambda M, _: ((columns, places_for(M, n["E"])), (places_for(M, n["E"]),)), rows=True)

    dy_scale = TensorShape(lambda M, _: ((places_for(M, n["E"]) // GROUP, n["N"]), (n["N"],)), rows=True)
    dw = (n["E"], n["N"], n["K"]), (n["stride_dw_e"], n["stride_dw_row"])
    return {
        "dy": codes(n["N"]),
        "x": codes(n["K"]),
        "dy_scale": dy_scale,
        "dw": TensorShape(lambda _M, _stride: dw),
    }


def _weight_constants(spec: Spec, arch: Arch) -> Constants:
    stages = spec.config.num_stages
    operand_bytes = stages * ((_ROWS + _COLUMNS) * GROUP + 4 * _ROWS)
    room_bytes = arch.limits.shared_per_block_bytes - 512 - operand_bytes
    return {
        "STAGES": stages,
        "SLOTS": 2 if room_bytes >= 2 * _BUFFER_BYTES else 1,
        "GROUP_M": spec.config.group_m,
        "EXPERTS": MAX_EXPERTS,
        "REGISTERS": 216,
    }


def _weight_order(_spec: Spec, _arch: Arch, _reduction: int) -> Order:
    return Order("codes of dy and x", WIDE, 32, partial=GROUP)


# Not among the candidates that are measured: ``aot/plan/families.py`` compiles them.
WEIGHT_CONFIGS = tuple(configs(((128, 128, 256, 8, 4),), Schedule.W8A8_BLOCK, Loads.TMA))


WEIGHT_W8A8 = KernelEntry(
    name="weight_w8a8",
    revision=1,
    home="hopper_w8a8_block.weight",
    sha256="b1689ec74ec7574c373174e306c4cf54c121c62e726f4c5ec867f5ec8c29c5cd",
    launched_since=1,
    ops=frozenset((Op.DW,)),
    dtypes=DTYPES,
    fusions=frozenset((Fusion.NONE,)),
    needs=frozenset((Feature.WGMMA,)),
    tiles=(
        Tiles(
            Limits(MAX_EXPERTS, _MOST_STEPS),
            {
                "schedule": (Schedule.W8A8_BLOCK,),
                "loads": (Loads.TMA,),
                "block_m": (GROUP,),
                "block_n": (_ROWS,),
                "block_k": (_COLUMNS,),
                "num_warps": (8,),
                "num_stages": range(2, 5),
            },
        ),
    ),
    pointers=("dy", "x", "dy_scale", "x_scale", "dw", "dw_at", "m_sizes", "counter"),
    strides=("stride_dw_e", "stride_dw_row"),
    steps=("m_sizes_step", "dw_flags"),
    ranks={"dy": 2, "x": 2, "dy_scale": 2, "dw": 3},
    descriptors=lambda _spec: ("dy", "x", "dy_scale", "dw"),
    required=lambda _spec: ("dy", "x", "dy_scale", "x_scale", "dw", "dw_at", "m_sizes", "counter"),
    boxes=_weight_boxes,
    constants=_weight_constants,
    order=_weight_order,
    candidates=no_configs,
    cost="hopper_w8a8_block.cost",
    held=dict.fromkeys(("dy", "x"), CODES_OF_X) | {"dy_scale": Element("fp32", 7, 32)},
    shapes=_weight_shapes,
    pointees=lambda _spec: {"dw_at": ""},
    loading_warps=4,
)
ENTRIES = (ROWS_W8A8_BLOCK, ROWS_W8A8_STARTS, WEIGHT_W8A8)
