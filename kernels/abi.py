"""The contract of compiler and launcher, in plain Python: what a variant is, its arguments, its grid.

The names in a variant's ``arguments`` are the words of launch ABI 1:

========================  ====================================================================
``x w y dy dw m_sizes``   device pointers; ``m_sizes`` points at the counts' first 32-bit word
``x_desc w_desc``         TMA descriptors of x [M, K] and w [E, N, K] (or [E, K, N])
``dy_desc x_desc``        of dW: TMA descriptors of ragged rows, see ``RAGGED_SIZES``
``M N K E``               int32: rows, the result's columns, the reduction, experts; of dW: dw's N and K
``stride_x_m`` ...        int64, in elements: the row strides of x, y, dy; w's and dw's expert and row stride
``m_sizes_step``          int32: 1 for int32 counts, 2 for int64 counts
========================  ====================================================================

dX runs the forward's kernels: its x is dy, its y is dx (see ``gemm_of``).
After the named arguments every kernel takes two more pointers, Triton's global and profile scratch.
A descriptor of rank r is passed as 128 bytes, then r int32 sizes, then r int64 strides.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..artifacts.types import DType, Fusion, Layout, Op, Problem
from .config import Config

LAUNCH_ABI = 1
READS_ABI = (1, 1)  # the first and last launch ABI that this runtime can launch

MAX_EXPERTS = 512  # whose rows a kernel keeps in registers: every shape up to here is served by one cubin
MAX_EXPERTS_FALLBACK = 65536  # beyond, the counts are scanned for every tile, MAX_EXPERTS of them at a time

# A descriptor of ragged rows is [.., .., rows, columns] with these sizes and the strides of ``ragged_strides``:
# the address of (2^30, end, 2^30 - count + row, column) is that of row ``end - count + row``, because 2^30 times
# the first stride is a multiple of 2^64 but for the row stride. Past the expert's end TMA reads zeros.
RAGGED_SIZES = (0x7FFF0000, 0x7FFF0000, 1 << 30)


@dataclass(frozen=True, slots=True)
class Spec:
    """One variant before it is compiled: kernel, config and specialisation. With a target it is one cubin."""

    op: Op
    dtype: DType
    config: Config
    layout: Layout = Layout.NK
    fusion: Fusion = Fusion.NONE
    alignment: int = 16
    max_experts: int = MAX_EXPERTS

    @property
    def kernel(self) -> str:
        """The name of the kernel's function."""
        return f"{'weight' if self.op is Op.DW else 'rows'}_{'tma' if self.config.tma else 'pointer'}"

    def __str__(self) -> str:
        text = f"{self.op.value} {self.dtype.value} {self.config}"
        text += f" w={self.layout.value}" if self.layout is not Layout.NK else ""
        return text + (" unaligned" if self.alignment == 1 else "")


@dataclass(frozen=True, slots=True)
class Gemm:
    """A problem in the kernel's words: ``columns`` of the result, ``reduction``, and how w lies.

    ``w_kn`` is true where w's columns (the result's) are the contiguous ones.
    """

    columns: int
    reduction: int
    w_kn: bool


def gemm_of(problem: Problem) -> Gemm:
    """The kernel's view of a row-grouped problem.

    The forward multiplies by w[g].T: columns N, reduction K. dX multiplies by w[g]: columns K,
    reduction N, and the same memory read the other way round.
    """
    forward = problem.op is Op.FORWARD
    kn = (problem.layout is Layout.KN) == forward
    return Gemm(problem.N, problem.K, kn) if forward else Gemm(problem.K, problem.N, kn)


def is_aligned(alignment: int, *values_bytes: int) -> bool:
    """Whether every pointer, row stride and row length, in bytes, keeps to ``alignment``."""
    mixed = 0
    for value in values_bytes:
        mixed |= value
    return mixed % alignment == 0


def arguments(spec: Spec) -> tuple[tuple[str, str], ...]:
    """(name, kind) of every argument in the kernel's order; kinds: ptr, i32, i64, desc2, desc3."""
    sizes = (("M", "i32"), ("N", "i32"), ("K", "i32"), ("E", "i32"))
    step = ("m_sizes_step", "i32")
    if spec.op is Op.DW:
        results = (("stride_dw_e", "i64"), ("stride_dw_row", "i64"), step)
        ends = (("dw", "ptr"), ("m_sizes", "ptr"), *sizes)
        if spec.config.tma:
            return (("dy_desc", "desc4"), ("x_desc", "desc4"), *ends, *results)
        return (("dy", "ptr"), ("x", "ptr"), *ends, ("stride_dy_m", "i64"), ("stride_x_m", "i64"), *results)
    if spec.config.tma:
        return (("x_desc", "desc2"), ("w_desc", "desc3"), ("y", "ptr"), ("m_sizes", "ptr"), *sizes,
                ("stride_y_m", "i64"), step)  # fmt: skip
    strides = tuple((f"stride_{name}", "i64") for name in ("x_m", "w_e", "w_row", "y_m"))
    return (("x", "ptr"), ("w", "ptr"), ("y", "ptr"), ("m_sizes", "ptr"), *sizes, *strides, step)


def boxes(spec: Spec) -> dict[str, tuple[int, ...]]:
    """The block of each descriptor argument, outermost dimension first."""
    if not spec.config.tma:
        return {}
    c = spec.config
    if spec.op is Op.DW:
        return {"dy_desc": (1, 1, c.block_m, c.block_n), "x_desc": (1, 1, c.block_m, c.block_k)}
    w = (1, c.block_k, c.block_n) if _w_kn(spec) else (1, c.block_n, c.block_k)
    return {"x_desc": (c.block_m, c.block_k), "w_desc": w}


def constants(spec: Spec) -> dict[str, int | str | bool]:
    """The kernel's compile-time arguments."""
    c = spec.config
    layout = {} if spec.op is Op.DW else {"W_KN": _w_kn(spec)}
    return layout | {
        "BLOCK_M": c.block_m,
        "BLOCK_N": c.block_n,
        "BLOCK_K": c.block_k,
        "GROUP_M": c.group_m,
        "EXPERTS": min(spec.max_experts, MAX_EXPERTS),
        "SCAN": spec.max_experts > MAX_EXPERTS,
        "PERSISTENT": c.persistent,
        "PRECISION": "ieee" if spec.dtype is DType.FP32 else "tf32",
    }


def divisibility(spec: Spec) -> dict[str, int]:
    """What the compiler may assume: the argument is a multiple of this (bytes for pointers, elements else)."""
    if spec.alignment == 1:
        return {}
    elements = spec.alignment // spec.dtype.itemsize
    pointers = dict.fromkeys(("x", "w", "y", "dy", "dw"), spec.alignment)
    lengths = {name: elements for name, kind in arguments(spec) if name in ("N", "K") or kind == "i64"}
    return {name: given for name, given in (pointers | lengths).items() if name in dict(arguments(spec))}


def ragged_strides(row_stride: int) -> tuple[int, int, int]:
    """The strides, in elements, of a ragged descriptor's first three dimensions."""
    return (1 << 34) - row_stride, row_stride, row_stride


def weight_tiles(N: int, K: int, E: int, config: Config) -> int:
    """The tiles of dw [E, N, K]: the same for any rows."""
    return E * -(-N // config.block_n) * -(-K // config.block_k)


def most_tiles(rows: int, E: int, columns: int, config: Config) -> int:
    """The most tiles that ``rows`` rows can make, however they fall on E experts."""
    if rows <= 0 or columns <= 0:
        return 0
    active = min(E, rows)
    return ((rows - active) // config.block_m + active) * -(-columns // config.block_n)


def programs(rows: int, E: int, columns: int, config: Config, sm_count: int, per_sm: int) -> int:
    """The grid: one program a tile, or, persistent, no more than the GPU holds at once.

    Programs without a tile end at once, so the bound needs no look at m_sizes (no synchronisation).
    """
    tiles = most_tiles(rows, E, columns, config)
    return min(tiles, sm_count * per_sm) if config.persistent else tiles


def _w_kn(spec: Spec) -> bool:
    return (spec.layout is Layout.KN) == (spec.op is Op.FORWARD)
