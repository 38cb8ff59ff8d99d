"""``KERNELS``: the entries of all GEMM kernels. What is asked of a variant is answered from its kernel's entry.

A new kernel is a folder, and its name in ``FOLDERS``. A folder is imported when one of its kernels is first asked for:
a process with plain weights needs none of the others.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..artifacts.records.precision import DType
from ..artifacts.records.problem import Fusion, Layout, Op, Problem
from .contract.config import Config, out_of_range
from .contract.entry import Box, Constants, Entry, KernelEntry, Limits, Tiles
from .contract.order import Order
from .contract.spec import Spec, gemm_of
from .contract.words import POINTEES
from .hardware.arch import arch_of

if TYPE_CHECKING:
    from .rowops import RowOpSpec

# The search tries their configs in this order.
FOLDERS = (
    "hopper_plain",
    "hopper_w4a16",
    "hopper_w8a8_block",
    "hopper_w8a8_channel",
    "portable_plain",
    "portable_w4a16",
    "portable_w8a8",
)
_PLAIN = ("hopper_plain", "portable_plain")  # all that compute plain dtypes, and nothing else

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
    """Those with kernels for a dtype."""
    return FOLDERS if dtype.quantised else _PLAIN


def entry_named(name: str) -> Entry | KernelEntry | None:
    """The entry of a kernel, of a GEMM or of rows; None where there is none of that name."""
    for one in _kernels(_PLAIN):
        if one.name == name:
            return one
    from .rowops import ROW_OPS  # here, as a plain product needs none

    others: tuple[Entry | KernelEntry, ...] = (*ROW_OPS, *_kernels(FOLDERS))
    return next((one for one in others if one.name == name), None)


def _kind(dtype: DType) -> tuple[bool, ...]:
    """Which operands are of codes, w and x, and whether w has zero points or is mxfp8: kernels may share a schedule."""
    scale = dtype.precision.w.scale
    zero = scale is not None and bool(scale.zero_bits)
    return dtype.quantised, dtype.quantises_x, zero, dtype is DType.MXFP8


@functools.cache
def _by_form(folders: tuple[str, ...]) -> Mapping[tuple[object, ...], KernelEntry]:
    return {
        (op, kind, *how): one
        for one in _kernels(folders)
        for kind in {_kind(dtype) for dtype in one.dtypes}
        for op in one.ops
        for how in one.schedules()
    }


_KINDS = tuple(dict.fromkeys(map(_kind, DType)))
_NOTHING = Limits(experts=0)


def kernel_of(op: Op, config: Config, dtype: DType = DType.BF16) -> KernelEntry | None:
    """The kernel that computes an op by a config's schedule, of operands of such a kind; None where none does.

    Where none of that kind has such a schedule it is one of another kind, which says what it is for.
    """
    how = config.schedule, config.rows
    own = _by_form(_folders(dtype)).get((op, _kind(dtype), *how))
    if own is not None:
        return own
    found = (_by_form(FOLDERS).get((op, kind, *how)) for kind in _KINDS)
    return next(filter(None, found), None)


def has_code(op: Op, dtype: DType, sm: int, layout: Layout | None = None) -> bool:
    """Whether some kernel computes an op of a dtype, and of w that lies so, on a capability, of sizes that suit it."""
    able = (
        one
        for one in _kernels(_folders(dtype))
        if op in one.ops and dtype in one.dtypes and one.needs <= arch_of(sm).features
    )
    return any(layout is None or layout in one.layouts(op) for one in able)


def entry_of(spec: Spec | RowOpSpec) -> Entry | KernelEntry:
    """The kernel that a variant is compiled from.

    Raises
    ------
    LookupError
        where there is none: ``refusal`` says so first.
    """
    if isinstance(spec, Spec):
        return gemm_entry(spec)
    from .rowops import ROW_OPS

    return next(one for one in ROW_OPS if one.name == spec.op.value)


def gemm_entry(spec: Spec) -> KernelEntry:
    """The kernel of a product: see ``entry_of``."""
    found = kernel_of(spec.op, spec.config, spec.dtype)
    if found is None:
        raise LookupError(f"no kernel of {spec.op.value} has such a schedule: {spec.config}")
    return found


@functools.lru_cache(maxsize=4096)
def refusal(spec: Spec, sm: int | None = None) -> str | None:
    """Why no kernel can be compiled, or launched, for this on a capability, or None: the one statement of validity.

    ``sm`` is None of compiled code, which says itself where it runs. What fits a GPU is read from the compiled cubin.
    """
    wrong, entry = out_of_range(spec.config), kernel_of(spec.op, spec.config, spec.dtype)
    if wrong or entry is None:
        return wrong or f"no kernel of {spec.op.value} has such a schedule: {spec.config}"
    return entry.refusal(spec, None if sm is None else arch_of(sm))


@functools.lru_cache(maxsize=4096)
def tiles_of(op: Op, config: Config, dtype: DType = DType.BF16) -> Tiles | None:
    """What the kernel of an op, of operands of such a kind, declares of such tiles, or None where it has none."""
    entry = kernel_of(op, config, dtype)
    return None if entry is None else entry.tiles_of(config)


def limits_of(op: Op, config: Config, dtype: DType = DType.BF16) -> Limits:
    """The most that a kernel of this config can do: nothing where there is none."""
    tiles = tiles_of(op, config, dtype)
    return _NOTHING if tiles is None else tiles.limits


def dealt(op: Op, config: Config) -> bool:
    """Whether warp-specialised code deals most tiles out in turn, and not as programs become free."""
    tiles = tiles_of(op, config)
    return tiles is not None and tiles.dealt


def transposed(op: Op, config: Config) -> bool:
    """Whether dw is computed turned round: its rows are the tile's columns."""
    tiles = tiles_of(op, config)
    return tiles is not None and tiles.transposed


def clears(fusion: Fusion, config: Config) -> bool:
    """Whether code of rows can set the rows of y to zero that an index sends no row to.

    Of one tile a program by more programs (kernels/portable_plain/rows.py), specialised by a warp in each
    (kernels/gluon/zero_rows.py).
    """
    tiles = tiles_of(Op.FORWARD, config)
    return fusion == Fusion.SCATTER and tiles is not None and tiles.zeroes


def too_large(op: Op, columns: int, reduction: int, config: Config) -> str | None:
    """Why a kernel can't be told of tiles of such a product, or None; of dW ``columns`` are its kernel's."""
    limits, width = limits_of(op, config), config.block_n
    if op is Op.DW:
        # How many steps it has its rows say, which only the call knows.
        width, reduction = config.block_n if transposed(op, config) else config.block_k, 0
    if limits.steps is not None and reduction > limits.steps * config.block_k:
        return f"the longest reduction of {config} is {limits.steps * config.block_k}, this is {reduction}"
    if limits.column_tiles is not None and columns > limits.column_tiles * width:
        return f"the most columns of {config} are {limits.column_tiles * width}, these are {columns}"
    return None


def beyond(problem: Problem, config: Config) -> str | None:
    """Why a problem is too large for a kernel of this config, or None: see ``too_large``."""
    if problem.op is Op.DW:
        return too_large(Op.DW, problem.N if transposed(Op.DW, config) else problem.K, 0, config)
    gemm = gemm_of(problem)
    return too_large(problem.op, gemm.columns, gemm.reduction, config)


@functools.lru_cache(maxsize=4096)
def order_of(spec: Spec, sm: int, reduction: int) -> Order:
    """In which order a variant for capability ``sm`` sums ``reduction`` products: see ``contract/order.py``."""
    return gemm_entry(spec).order(spec, arch_of(sm), reduction)


def required(spec: Spec) -> tuple[str, ...]:
    """The arguments without which no launcher can run such code."""
    return gemm_entry(spec).required(spec)


def arguments(spec: Spec) -> tuple[tuple[str, str], ...]:
    """(name, kind) of every argument in the kernel's order; kinds: ptr, i32, i64, desc2, desc3, desc4."""
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
    """The element type of each pointer argument, as Triton names it; "" for the dtype."""
    return {**POINTEES, **gemm_entry(spec).pointees(spec)}


def boxes(spec: Spec) -> dict[str, Box]:
    """The block of each descriptor argument, outermost dimension first."""
    entry = gemm_entry(spec)
    blocks = entry.boxes(spec)
    return {name: blocks[name] for name in entry.descriptors(spec)}


def constants(spec: Spec, sm: int) -> Constants:
    """The kernel's compile-time arguments for a capability."""
    entry = gemm_entry(spec)
    return entry.constants(spec, arch_of(sm)) | dict.fromkeys(entry.absent(spec))


def divisibility(spec: Spec) -> dict[str, int]:
    """What the compiler may assume: the argument is a multiple of this (bytes for pointers, elements else)."""
    if spec.alignment == 1:
        return {}
    elements = spec.alignment // spec.dtype.itemsize
    given = {}
    for name, kind in arguments(spec):
        if name in ("x", "w", "y", "dy", "dw", "low_x", "low_w") and kind == "ptr":
            given[name] = spec.alignment
        elif name in ("N", "K", "R") or kind == "i64":
            given[name] = elements
    return given | dict(gemm_entry(spec).multiples(spec))


def threads(spec: Spec) -> int:
    """Of a program."""
    return gemm_entry(spec).threads(spec.config)


def weight_tiles(N: int, K: int, E: int, config: Config) -> int:
    """The tiles of dw [E, N, K]: the same for any rows."""
    return E * -(-N // config.block_n) * -(-K // config.block_k)


def most_tiles(rows: int, E: int, columns: int, config: Config) -> int:
    """The most tiles that ``rows`` rows can make, however they fall on E experts."""
    if rows <= 0 or columns <= 0:
        return 0
    active = min(E, rows)
    return ((rows - active) // config.block_m + active) * -(-columns // config.block_n)
