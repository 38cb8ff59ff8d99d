"""The list of all kernels (``KERNELS``), and questions about a variant, answered from its kernel's entry.

A variant before it is compiled is a ``Spec``: op, dtype, config, layout, fusion, alignment. For example
``refusal(spec, 90)`` says why no kernel can be compiled for it on sm_90, ``arguments(spec)`` lists its arguments, and
``constants(spec, 90)`` its compile-time values. A folder of kernels is imported when one of its kernels is needed: a
process with plain weights needs no kernel of quantised weights.
"""

from __future__ import annotations

import functools
import importlib
import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..artifacts.records import DType, Fusion, Layout, Op, Problem, RowOp, TensorMap, Variant
from .arch import SmLimits, arch_of
from .entry import POINTEES, Box, Constants, Entry, KernelEntry, Limits, Order, Tiles
from .spec import Config, Loads, Spec, gemm_of, out_of_range

if TYPE_CHECKING:
    from .rowops import RowOpSpec

_HERE = os.path.dirname(__file__)  # noqa: PTH120 (pathlib is not imported in a process's first call)
_SHARED = ("gluon", "rowops")  # folders beside those of GEMM kernels


def _is_folder(name: str) -> bool:
    return "." not in name and name not in _SHARED and os.access(f"{_HERE}/{name}/__init__.py", os.R_OK)


# The folders of GEMM kernels. The search tries their configs in this order.
FOLDERS = tuple(sorted(filter(_is_folder, os.listdir(_HERE))))  # noqa: PTH208
_PLAIN = tuple([name for name in FOLDERS if name.endswith("_plain")])  # the folders of all kernels for plain dtypes

KERNELS: tuple[KernelEntry, ...]  # of all folders
ENTRIES: Mapping[str, Entry | KernelEntry]  # of these and of the row kernels, by name


def __getattr__(name: str) -> object:
    if name == "KERNELS":
        return _kernels(FOLDERS)
    if name == "ENTRIES":
        return _entries()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def _entries() -> Mapping[str, Entry | KernelEntry]:
    from .rowops import ROW_OPS

    entries: tuple[Entry | KernelEntry, ...] = (*_kernels(FOLDERS), *ROW_OPS)
    return {entry.name: entry for entry in entries}


@functools.cache
def _kernels(folders: tuple[str, ...]) -> tuple[KernelEntry, ...]:
    modules = [importlib.import_module(f".{name}", __package__) for name in folders]
    return tuple([entry for module in modules for entry in module.ENTRIES])


def _folders(dtype: DType) -> tuple[str, ...]:
    """Return the folders that may have kernels for a dtype."""
    return FOLDERS if dtype.quantised else _PLAIN


def entry_named(name: str) -> Entry | KernelEntry | None:
    """Return the entry of a GEMM's or row kernel by its name; None if there is none."""
    for entry in _kernels(_PLAIN):
        if entry.name == name:
            return entry
    from .rowops import ROW_OPS  # here, because a plain product needs no row kernel

    others: tuple[Entry | KernelEntry, ...] = (*ROW_OPS, *_kernels(FOLDERS))
    return next((entry for entry in others if entry.name == name), None)


@functools.cache
def names_for(dtype: DType) -> frozenset[str]:
    """Return the names of the GEMM kernels for a dtype."""
    return frozenset(entry.name for entry in _kernels(_folders(dtype)) if dtype in entry.dtypes)


def _kind(dtype: DType) -> tuple[bool, ...]:
    """Return (w is quantised, x is quantised, w has zero points, w is mxfp8), to tell kernels of one schedule apart."""
    scale = dtype.precision.w.scale
    zero = scale is not None and bool(scale.zero_bits)
    return dtype.quantised, dtype.quantises_x, zero, dtype is DType.MXFP8


@functools.cache
def _by_schedule(folders: tuple[str, ...]) -> Mapping[tuple[object, ...], KernelEntry]:
    return {
        (op, kind, *schedule): entry
        for entry in _kernels(folders)
        for kind in {_kind(dtype) for dtype in entry.dtypes}
        for op in entry.ops
        for schedule in entry.schedules()
    }


_KINDS = tuple(dict.fromkeys(map(_kind, DType)))
_NOTHING = Limits(experts=0)


def kernel_of(op: Op, config: Config, dtype: DType = DType.BF16) -> KernelEntry | None:
    """Return the kernel for an op, a config's schedule and a dtype; None if no kernel has the schedule.

    If only kernels for other kinds of dtypes have the schedule, the first of these is returned, because its
    ``refusal`` says which dtypes it supports.
    """
    schedule = config.schedule, config.rows
    own = _by_schedule(_folders(dtype)).get((op, _kind(dtype), *schedule))
    if own is not None:
        return own
    kernels = (_by_schedule(FOLDERS).get((op, kind, *schedule)) for kind in _KINDS)
    return next(filter(None, kernels), None)


def has_code(op: Op, dtype: DType, sm: int, layout: Layout | None = None) -> bool:
    """Return whether a kernel supports an op, dtype and layout of w (None: any) on a capability, for some sizes."""
    features, pool = arch_of(sm).features, _kernels(_folders(dtype))
    kernels = (entry for entry in pool if op in entry.ops and dtype in entry.dtypes and entry.needs <= features)
    return any(layout is None or layout in entry.layouts(op) for entry in kernels)


def entry_of(spec: Spec | RowOpSpec) -> Entry | KernelEntry:
    """Return the kernel that a variant is compiled from.

    Raises
    ------
    LookupError
        if there is none. ``refusal`` is the check to make before.
    """
    if isinstance(spec, Spec):
        return gemm_entry(spec)
    from .rowops import ROW_OPS

    return next(entry for entry in ROW_OPS if entry.name == spec.op.value)


def gemm_entry(spec: Spec) -> KernelEntry:
    """Return the kernel that a GEMM's variant is compiled from: see ``entry_of``."""
    entry = kernel_of(spec.op, spec.config, spec.dtype)
    if entry is None:
        raise LookupError(f"no kernel of {spec.op.value} has such a schedule: {spec.config}")
    return entry


@functools.lru_cache(maxsize=4096)
def refusal(spec: Spec, sm: int | None = None) -> str | None:
    """Return why no kernel can be compiled or launched for ``spec``, None if one can. All validity checks are here.

    ``sm`` is None for compiled code, whose bundle names its capability. Whether shared memory and registers suffice is
    read from the compiled cubin.
    """
    wrong, entry = out_of_range(spec.config), kernel_of(spec.op, spec.config, spec.dtype)
    if wrong or entry is None:
        return wrong or f"no kernel of {spec.op.value} has such a schedule: {spec.config}"
    return entry.refusal(spec, None if sm is None else arch_of(sm))


@functools.lru_cache(maxsize=4096)
def tiles_of(op: Op, config: Config, dtype: DType = DType.BF16) -> Tiles | None:
    """Return the kernel's declaration for a config's tiles, None if no kernel has such tiles."""
    entry = kernel_of(op, config, dtype)
    return None if entry is None else entry.tiles_of(config)


def limits_of(op: Op, config: Config, dtype: DType = DType.BF16) -> Limits:
    """Return the largest sizes that a config's kernel supports; no experts at all if there is no such kernel."""
    tiles = tiles_of(op, config, dtype)
    return _NOTHING if tiles is None else tiles.limits


def dealt(op: Op, config: Config) -> bool:
    """Return whether a warp-specialised kernel's programs take most tiles in a fixed order, not as they become free."""
    tiles = tiles_of(op, config)
    return tiles is not None and tiles.dealt


def transposed(op: Op, config: Config) -> bool:
    """Return whether a config of dW computes dw transposed: dw's rows are the tile's columns."""
    tiles = tiles_of(op, config)
    return tiles is not None and tiles.transposed


def clears(fusion: Fusion, config: Config) -> bool:
    """Return whether a config's forward kernel can zero the rows of y that no index entry names.

    Kernels with one tile a program launch more programs for it (kernels/portable_plain/rows.py). Warp-specialised
    kernels have a warp for it (kernels/gluon/zero_rows.py).
    """
    tiles = tiles_of(Op.FORWARD, config)
    return fusion == Fusion.SCATTER and tiles is not None and tiles.zeroes


def too_large(op: Op, columns: int, reduction: int, config: Config) -> str | None:
    """Return why a product's columns or reduction exceed a config's limits, None if they don't.

    For dW, ``columns`` are dw's columns as the kernel sees it: N if it computes dw transposed.
    """
    limits, width = limits_of(op, config), config.block_n
    if op is Op.DW:
        # dW reduces over an expert's rows, whose number only the call has.
        width, reduction = config.block_n if transposed(op, config) else config.block_k, 0
    if limits.steps is not None and reduction > limits.steps * config.block_k:
        return f"the longest reduction of {config} is {limits.steps * config.block_k}, this is {reduction}"
    if limits.column_tiles is not None and columns > limits.column_tiles * width:
        return f"the most columns of {config} are {limits.column_tiles * width}, these are {columns}"
    return None


def beyond(problem: Problem, config: Config) -> str | None:
    """Return why a problem is too large for a config, None if it is not: see ``too_large``."""
    if problem.op is Op.DW:
        return too_large(Op.DW, problem.N if transposed(Op.DW, config) else problem.K, 0, config)
    gemm = gemm_of(problem)
    return too_large(problem.op, gemm.columns, gemm.reduction, config)


@functools.lru_cache(maxsize=4096)
def order_of(spec: Spec, sm: int, reduction: int) -> Order:
    """In which order a variant for capability ``sm`` sums ``reduction`` products: see ``entry.Order``."""
    return gemm_entry(spec).order(spec, arch_of(sm), reduction)


def required(spec: Spec) -> tuple[str, ...]:
    """Return the names of the arguments that a variant's record must have."""
    return gemm_entry(spec).required(spec)


def arguments(spec: Spec) -> tuple[tuple[str, str], ...]:
    """Return (name, kind) of all arguments in the kernel's order; kinds: ptr, i32, i64, desc2, desc3, desc4."""
    entry = gemm_entry(spec)
    descriptors, absent = entry.descriptors(spec), entry.absent(spec)
    pointers = [name for name in entry.pointers if name not in absent]
    return (
        *((name, f"desc{entry.ranks[name]}" if name in descriptors else "ptr") for name in pointers),
        *((name, "i32") for name in ("M", "N", "K", "E")),
        *((name, "i64") for name in entry.strides),
        *((name, "i32") for name in entry.steps if name not in absent),
    )


def pointees(spec: Spec) -> Mapping[str, str]:
    """Return the element type of each pointer argument, by Triton's name; "" for the dtype."""
    return {**POINTEES, **gemm_entry(spec).pointees(spec)}


def boxes(spec: Spec) -> dict[str, Box]:
    """Return the box that TMA copies at once for each descriptor argument, outermost dimension first."""
    entry = gemm_entry(spec)
    blocks = entry.boxes(spec)
    return {name: blocks[name] for name in entry.descriptors(spec)}


def constants(spec: Spec, sm: int) -> Constants:
    """Return the kernel's compile-time arguments for a capability."""
    entry = gemm_entry(spec)
    return entry.constants(spec, arch_of(sm)) | dict.fromkeys(entry.absent(spec))


def divisibility(spec: Spec) -> dict[str, int]:
    """Return what the compiler may assume: the argument is a multiple of this, in bytes (pointers) or elements."""
    if spec.alignment == 1:
        return {}
    elements = spec.alignment // spec.dtype.itemsize
    multiples = {}
    for name, kind in arguments(spec):
        if name in ("x", "w", "y", "dy", "dw", "low_x", "low_w") and kind == "ptr":
            multiples[name] = spec.alignment
        elif name in ("N", "K", "R") or kind == "i64":
            multiples[name] = elements
    return multiples | dict(gemm_entry(spec).multiples(spec))


def threads(spec: Spec) -> int:
    """Return the number of threads of a program."""
    return gemm_entry(spec).threads(spec.config)


def weight_tiles(N: int, K: int, E: int, config: Config) -> int:
    """Return the number of tiles of dw [E, N, K]; it does not depend on the rows."""
    return E * -(-N // config.block_n) * -(-K // config.block_k)


def most_tiles(rows: int, E: int, columns: int, config: Config) -> int:
    """Return the largest number of tiles that ``rows`` rows can make, for any distribution over E experts."""
    if rows <= 0 or columns <= 0:
        return 0
    active = min(E, rows)
    return ((rows - active) // config.block_m + active) * -(-columns // config.block_n)


_ELEMENTS = {DType.BF16: (9,), DType.FP16: (6,), DType.FP32: (7,), DType.TF32: (7, 11)}  # CUtensorMapDataType
_WARP = 32
_BYTES = {0: 1, 2: 4, 6: 2, 7: 4, 9: 2, 11: 4}  # of an element, by CUtensorMapDataType
_SPAN_BYTES = 128  # of a swizzled box's row, at most: wider tiles take several boxes
_SWIZZLES = {128: 3, 64: 2, 32: 1}  # CUtensorMapSwizzle by the bytes of a box's row
_STORED = ("y_map", "dw")  # descriptors of results: their shared memory was the operands' before


def unlaunchable(variant: Variant) -> str | None:
    """Return why the launcher can't run a variant, None if it can. The caller has checked the launch ABI's number."""
    entry = entry_named(variant.kernel)
    if entry is not None and variant.revision < (since := entry.launched_since):
        return f"its kernel {variant.kernel} is of revision {variant.revision}, this version launches {since} and later"
    if isinstance(variant.op, RowOp):
        return _unlaunchable_row_op(variant, variant.op)
    try:
        config = Config.from_pairs(variant.config)
    except ValueError as error:
        return str(error)
    spec = Spec(variant.op, variant.dtype, config, variant.layout, variant.fusion, max_experts=variant.max_experts)
    refused = refusal(spec)
    if refused:
        return refused
    declared, held = dict(arguments(spec)), gemm_entry(spec).held
    for name, kind in variant.arguments:
        if kind != (wanted := declared.get(name, "none of that name")):
            return f"argument {name} is of the kind {kind}, launch ABI 1 has {wanted} for {variant.op.value}"
    present = dict(variant.arguments)
    lacking = [name for name in required(spec) if name not in present]
    if lacking:
        return f"its arguments lack {', '.join(lacking)}"
    if variant.tensor_maps and config.loads is not Loads.TMA:
        return "it has tensor maps, and a config without TMA"
    for tensor_map in variant.tensor_maps:
        name, element = tensor_map.argument, tensor_map.element
        own = held.get(name)
        elements = (own.code,) if own is not None else _ELEMENTS.get(variant.dtype, _ELEMENTS[DType.BF16])
        if element not in (elements[:1] if name == "dw" else elements):  # results are not rounded to tf32
            return f"the tensor map of {name} has elements of the type {element}, not {variant.dtype.value}"
    return _wrong_threads(variant)


def undeclared(variant: Variant, limits: SmLimits) -> str | None:
    """Return how a record differs from its kernel's declaration for its config, None if it doesn't.

    A box, swizzle or order of arguments other than the compiled code's would read and write other memory. Records of
    other revisions of the kernel are not compared, because their declaration is unknown here. None also for records
    that ``unlaunchable`` refuses.
    """
    if variant.shared_bytes > limits.shared_per_block_bytes:
        return f"it wants {variant.shared_bytes} bytes of shared memory, a block has {limits.shared_per_block_bytes}"
    entry = entry_named(variant.kernel)
    if isinstance(variant.op, RowOp) or entry is None or variant.revision != entry.revision:
        return None
    try:
        config = Config.from_pairs(variant.config)
    except ValueError:
        return None
    spec = Spec(
        variant.op, variant.dtype, config, variant.layout, variant.fusion, variant.alignment, variant.max_experts
    )
    if refusal(spec):
        return None
    if variant.arguments != (wanted := arguments(spec)):
        pairs = zip(variant.arguments, wanted, strict=False)
        first = next(
            (i for i, (got, want) in enumerate(pairs) if got != want), min(len(variant.arguments), len(wanted))
        )
        argument = _listed(variant.arguments[first : first + 1]) or "there are too few"
        return f"its arguments are not those of {variant.kernel}, from argument {first} on: {argument}"
    if variant.threads != threads(spec):
        return f"it has {variant.threads} threads, {variant.kernel} of {config} has {threads(spec)}"
    blocks, held = boxes(spec), gemm_entry(spec).held
    for tensor_map in variant.tensor_maps:
        name = tensor_map.argument
        plain = name in held and not held[name].swizzle
        box, swizzle = _box_and_swizzle(tensor_map, tuple(blocks.get(name, ())), plain=plain)
        if (tensor_map.box, tensor_map.swizzle) != (box, swizzle):
            got = f"boxes of {tensor_map.box}, swizzle {tensor_map.swizzle}"
            return f"the tensor map of {name} has {got}: wanted {box}, swizzle {swizzle}"
    operands = [tensor_map for tensor_map in variant.tensor_maps if tensor_map.argument not in _STORED]
    least = sum(_BYTES.get(tensor_map.element, 1) * math.prod(tensor_map.box) for tensor_map in operands)
    if variant.shared_bytes < least:
        return f"it wants {variant.shared_bytes} bytes of shared memory, its boxes alone take {least}"
    return None


def _box_and_swizzle(tensor_map: TensorMap, block: tuple[int, ...], *, plain: bool) -> tuple[tuple[int, ...], int]:
    """Return the box and the swizzle that a declared block of a descriptor gives."""
    if plain or not block:
        return block, 0
    size = _BYTES.get(tensor_map.element, 1)
    columns = min(block[-1], _SPAN_BYTES // size)
    return (*block[:-1], columns), _SWIZZLES.get(columns * size, 0)


def _unlaunchable_row_op(variant: Variant, op: RowOp) -> str | None:
    from . import rowops  # here, because a plain product needs no row kernel

    try:
        rowops.Block.from_pairs(variant.config)
    except ValueError as error:
        return str(error)
    wanted = rowops.arguments(op)
    if variant.arguments != wanted:
        return f"its arguments are {_listed(variant.arguments)}, launch ABI 1 has {_listed(wanted)} for {op.value}"
    if op in rowops.WEIGHT_OPS:  # whose grid is of the tile that this version has
        if variant.dtype not in rowops.WEIGHT_DTYPES[op]:
            return f"{op.value} has no kernel for {variant.dtype.value}"
        tile = rowops.RowOpSpec(op, variant.dtype).config
        if variant.config != tile.pairs():
            return f"its config is {dict(variant.config)}, this version launches {tile} of {op.value}"
    return _wrong_threads(variant)


def _wrong_threads(variant: Variant) -> str | None:
    return f"it has {variant.threads} threads, wanted whole warps of {_WARP}" if variant.threads % _WARP else None


def _listed(arguments: tuple[tuple[str, str], ...]) -> str:
    return ", ".join(f"{name} {kind}" for name, kind in arguments)
