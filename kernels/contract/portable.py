"""The entries of the kernels that run on every GPU: ``rows`` (forward and dX) and ``weight`` (dW)."""

from __future__ import annotations

from ...artifacts.records.precision import PLAIN_DTYPES, DType
from ...artifacts.records.problem import Fusion, Op
from ..hardware.arch import Arch, Feature
from .config import Cache, Loads, Schedule
from .entry import Box, Constants, KernelEntry, Limits, Sizes, TensorShape, Tiles, dense, of_rows, ragged
from .spec import MAX_EXPERTS, MAX_EXPERTS_FALLBACK, Spec, indexed, result_columns, w_kn

# The forms of rows that gather nothing: see spec.code_of.
PLAIN = frozenset((Fusion.NONE, Fusion.SCATTER))
UNGATHERED = PLAIN | {Fusion.LOW_RANK}
GATHERING = frozenset((Fusion.GATHER, Fusion.LOW_RANK | Fusion.GATHER))
LOW_OPERANDS = ("low_x", "low_w")
# A program that has one tile asks once for its expert (kernels/gemm/portable/lookup.py). Others scan the counts for
# every tile, where they are of more than MAX_EXPERTS.
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
    """What products of rows load through TMA: rows that an index picks can't."""
    if spec.config.loads is not Loads.TMA:
        return ()
    return ("w",) if Fusion.GATHER in spec.fusion else ("x", "w")


def without_low_rank(spec: Spec) -> tuple[str, ...]:
    """The words of a low-rank part, of code that adds none."""
    return () if Fusion.LOW_RANK in spec.fusion else (*LOW_OPERANDS, "R")


def needs_low_rank(spec: Spec) -> tuple[str, ...]:
    """The same, of code that does."""
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
    """Shapes of the descriptors of a product of rows; w may have fewer rows than y has columns (``w_rows``)."""
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
    """Shapes of a low-rank part's descriptors. Its second matrix has contiguous columns if w has."""
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
    """Whether code on wgmma takes w from registers, turned round on the way: see kernels/gemm/portable/rows.py."""
    wgmma = arch.has(Feature.WGMMA) and spec.config.block_m >= 64 and spec.config.num_warps >= 4
    turned = wgmma and spec.dtype is DType.TF32 and w_kn(spec) and "w" in row_operands(spec)
    return turned and Fusion.LOW_RANK not in spec.fusion  # whose sums are not turned round


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


ROWS = KernelEntry(
    name="rows",
    revision=2,
    home="gemm.portable.rows",
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
    shapes=row_shapes,
)
WEIGHT = KernelEntry(
    name="weight",
    revision=1,
    home="gemm.portable.weight",
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
    absent=lambda _spec: (),
    required=lambda _spec: ("dy", "x", "dw", "m_sizes"),
    boxes=_weight_boxes,
    constants=_weight_constants,
    shapes=_weight_shapes,
)
