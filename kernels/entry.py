"""The declaration of a kernel: ``Entry`` for a row kernel; for a GEMM ``KernelEntry``, with a ``Tiles`` for each kind.

A kernel's folder has its entries in ``__init__.py``, kernels/registry.py lists the folders. Search, compiler, loader,
cost model and launcher read the entry and nothing else of a kernel. An ``Order`` says in which order a kernel sums K,
which decides whether two variants give the same bits for the same operands.

The launch ABI is the meaning of each argument of a kernel, on which compiler and launcher agree. The names in a
variant's ``arguments`` by launch ABI 1:

=======================  =====================================================================
``x w y dy dw``          a device pointer, or a TMA descriptor by value (kind ``desc2`` ...)
``m_sizes index``        device pointers to 32-bit words: counts [E], and an index for each row
``row_weights bias``     device pointers: float32 weights by index, bias [E, N] in the dtype
``M N K E``              int32: rows, the result's columns, the reduction, experts; for dW N and K are dw's; with
                         ``Fusion.SILU`` N is the columns of gate and up together, and y has half as many
``stride_x_m`` ...       int64, in elements: row strides of x, y, dy; expert and row stride of w, dw
``m_sizes_step``         int32: 1 for int32 counts, 2 for int64 counts; ``index_step`` likewise
``index_end``            int32: rows whose index is below 0, or this or more, are left out
``x_divisor``            int32: an index names x's row ``index // x_divisor``
``flags``                int32: values of artifacts.records.Fusion below 16 (``SILU`` and ``LOW_RANK`` are
                         variants of their own, no flags), and ``ZERO_TAIL``
``counter``              device pointer to an int32 that is zero before and after the launch
``dy_at x_at``           device pointers to dy and x, whose names are descriptors: for dW with ``Cache.EVICT_FIRST``
``low_x low_w``          with ``Fusion.LOW_RANK``: u [M, R] of sorted rows and b [E, N, R], or [E, R, N] if w's columns
                         are contiguous; dense; device pointers or TMA descriptors. ``R`` int32: the rank
``starts``               with ``Fusion.STARTS``: null, or a device pointer to 32-bit words, each expert's first row
``starts_step room``     int32: 0 without ``starts``, else like ``m_sizes_step``; the most rows of an expert, and those
                         from one to the next without ``starts``
``packs``                int32: 1 if rows of y are sorted without padding, and begin at ``bounds``, int32 [E + 1]
``stride_scale_m`` ...   int32, in elements: x_scale's strides of rows, of 128 of K (``_k``) and of experts (``_e``)
``y_map``                y again, as a TMA descriptor of ragged rows through which a specialised kernel stores
=======================  =====================================================================

Pointers that ``flags`` does not need are null. dX runs the forward's kernel with dy as x and dx as y (see ``gemm_of``).
After the named arguments all kernels take two more pointers, Triton's global and profile scratch. A descriptor of rank
r is passed as 128 bytes, then r int32 sizes, then r int64 strides; dW's describe ragged rows, see ``RAGGED_SIZES``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

from ..artifacts.records import DType, Fusion, Layout, Op, Problem
from ..artifacts.tuples import NamedTuple
from .arch import Arch, Feature
from .spec import FIELDS, RANGES, SIZES, Cache, Config, Edge, Loads, Schedule, Spec, TileRows, misfit

TORCH_GROUPS = 1024  # the most experts that torch's grouped_mm supports
ALIGNMENT_BYTES = 16  # of all pointers, row strides and row lengths of aligned variants
LAUNCH_ABI = 1
READS_ABI = (1, 1)  # the first and last launch ABI that this runtime can launch

ZERO_TAIL = 16  # a flag: zero the rows of y that belong to no expert; with SCATTER, rows that no index entry names
CLEARER_ROWS = 16  # rows that a program zeroes: there are ``cdiv(index_end, CLEARER_ROWS)`` more programs
# Element types of pointers by Triton's names, "" for the dtype. A kernel's entry adds its own, or replaces these.
POINTEES = dict.fromkeys(("x", "w", "y", "dy", "dw", "dy_at", "x_at", "bias", "low_x", "low_w"), "") | {
    "m_sizes": "*i32",
    "index": "*i32",
    "counter": "*i32",
    "starts": "*i32",
    "bounds": "*i32",
    "row_weights": "*fp32",
    "w_outer": "*fp32",
    "w_scale": "*fp32",
    "x_scale": "*fp32",
}
FLAGS = Fusion.GATHER | Fusion.SCATTER | Fusion.WEIGHT | Fusion.BIAS  # the fusions that ``flags`` contains

# A descriptor of ragged rows is [.., .., rows, columns] with these sizes and the strides of ``ragged_strides``:
# the address of (2^30, end, 2^30 - count + row, column) is that of row ``end - count + row``, because 2^30 times
# the first stride is a multiple of 2^64 minus the row stride. Past the expert's end TMA reads zeros.
RAGGED_SIZES = (0x7FFF0000, 0x7FFF0000, 1 << 30)


def parameter_bytes(arguments: tuple[tuple[str, str], ...]) -> tuple[int, ...]:
    """Return the size in bytes of each parameter for these (name, kind), Triton's own two pointers included."""
    sizes: list[int] = []
    for _, kind in arguments:
        if kind.startswith("desc"):
            rank = int(kind[4:])
            sizes += [128, *[4] * rank, *[8] * rank]
        else:
            sizes.append(4 if kind == "i32" else 8)
    return (*sizes, 8, 8)


def ragged_strides(row_stride: int) -> tuple[int, int, int]:
    """Return the strides, in elements, of a ragged descriptor's first three dimensions."""
    return (1 << 34) - row_stride, row_stride, row_stride


def is_aligned(alignment: int, *values_bytes: int) -> bool:
    """Return whether all values, pointers and lengths in bytes, are multiples of ``alignment``, a power of two."""
    mixed = 0
    for value in values_bytes:
        mixed |= value
    return mixed % alignment == 0


def has_aligned_rows(problem: Problem) -> bool:
    """Return whether rows of N and of K elements, and a row of w's codes, are multiples of 16 bytes."""
    size, codes = problem.dtype.itemsize, problem.K * problem.dtype.precision.w.bits // 8
    return is_aligned(ALIGNMENT_BYTES, problem.N * size, problem.K * size, codes)


def torch_multiplies(problem: Problem) -> bool:
    """Return whether torch's grouped_mm supports a problem: forward or dX, no fusion, bf16, aligned rows."""
    plain = problem.op is not Op.DW and problem.dtype is DType.BF16 and not problem.fusion
    return plain and problem.E <= TORCH_GROUPS and has_aligned_rows(problem)


def slow_rows(problem: Problem) -> str | None:
    """Return a warning if rows of w begin at odd multiples of 16 bytes, which is slow; else None.

    In bf16 and fp16 they do if K is an odd multiple of 8. An H100 at 8,192 tokens, E=32, N=2048
    (benchmarks/results/unknown-h100-odd-k.journal.xz): K=1000 takes 1.5 times as long as K=1024 in the forward, 1.1 in
    dX, 1.3 in dW.
    """
    name, row = ("N", problem.N) if problem.layout is Layout.KN else ("K", problem.K)
    if problem.dtype.quantised or row * problem.dtype.itemsize % (2 * ALIGNMENT_BYTES) != ALIGNMENT_BYTES:
        return None
    step = 2 * ALIGNMENT_BYTES // problem.dtype.itemsize
    return (
        f"with {name}={row}, rows of w begin at odd multiples of {ALIGNMENT_BYTES} bytes: every kernel takes up to 1.5 "
        f"times as long, and torch's may be faster for thousands of rows. Pad {name} with zeros to a multiple of {step}"
    )


# Instructions whose own sums over K are not known to agree have different names.
# On sm_90 wgmma and mma.sync of 16-bit operands agree: one bit pattern of all shipped forwards on an H100 (issue 71).
WIDE_OR_NARROW, WIDE, WIDE_FROM_REGISTERS, TENSOR_MEMORY, NARROW, LANES = (
    "wgmma or mma.sync",
    "wgmma",
    "wgmma from registers",
    "tcgen05",
    "mma.sync",
    "fma",
)
PREPARED = "prepared codes"  # the operands of kernels that are faster than those for the checkpoint layout
_PREFERENCE = (WIDE_OR_NARROW, TENSOR_MEMORY, WIDE, WIDE_FROM_REGISTERS, NARROW, LANES)
_ROWS_OF_WGMMA, _WARPS_OF_WGMMA = 64, 4


class Order(NamedTuple):
    """How one element of a product is summed. Variants whose orders are equal give equal bits.

    Which rows share a tile, how many warps and stages there are, and which rows are loaded together is no part of it.
    """

    operands: str  # what the instructions multiply
    instruction: str  # one of the names above
    step: int  # elements of K that one instruction sums; sums of steps are added in ascending order of K
    accumulators: int = 1  # accumulators that share K; their sums are added at the end
    share: int = 0  # elements of K that one of several accumulators gets in a row
    partial: int = 0  # elements of K after which the tensor cores' sum is added to a sum in registers; 0: never
    kept: str = "fp32"  # the type of the sum in registers
    low_rank: bool = False  # the product with an adapter's columns follows in the same accumulator
    rounds: bool = True  # the sum, with bias and weight, is rounded to y's dtype before anything else is done with it

    @property
    def preference(self) -> tuple[object, ...]:
        """Ascending: of orders that a problem has variants of, the batch-invariant mode takes the first.

        Code of one accumulator has tiles for any number of rows, code that shares out K for few rows alone.
        """
        exact = not self.rounds, self.accumulators, self.kept != "fp32"
        return (*exact, not self.operands.startswith(PREPARED), _PREFERENCE.index(self.instruction), *map(str, self))

    def __str__(self) -> str:
        words = [f"{self.operands} by {self.instruction}, {self.step} of K at a time"]
        if self.accumulators > 1:
            words.append(f"K shared out between {self.accumulators} sums, {self.share} at a time")
        if self.partial:
            words.append(f"sums of {self.partial} of K added in {self.kept}")
        words += ["then an adapter's columns"] if self.low_rank else []
        words += [] if self.rounds else ["not rounded before the activation"]
        return "; ".join(words)


def wide(spec: Spec, arch: Arch) -> bool:
    """True if Triton compiles a dot of this tile to a warpgroup's instructions (wgmma, tcgen05)."""
    c = spec.config
    return arch.has(Feature.MMA_ASYNC) and c.block_m >= _ROWS_OF_WGMMA and c.num_warps >= _WARPS_OF_WGMMA


def instruction(spec: Spec, arch: Arch, *, agree: bool = False) -> str:
    """The tensor cores' instruction of a dot of Triton's; ``agree``: of operands for which sm_90's are known to agree.

    Ampere, Ada and sm_120 have mma.sync alone. Of Blackwell's two nobody knows whether they agree.
    """
    if agree and arch.has(Feature.WGMMA):
        return WIDE_OR_NARROW
    if not wide(spec, arch):
        return NARROW
    return WIDE if arch.has(Feature.WGMMA) else TENSOR_MEMORY


Constants: TypeAlias = "dict[str, int | str | bool | None]"
Box: TypeAlias = "tuple[int, ...]"
Sizes: TypeAlias = "Mapping[str, int]"  # the numbers of a launcher's calls that don't depend on M, by argument
Rows: TypeAlias = "tuple[tuple[int, int, int, int, int], ...]"  # block_m, block_n, block_k, warps, stages
Pool: TypeAlias = "Callable[[Op, DType, Arch], list[Config]]"


class Element(NamedTuple):
    """A descriptor's element type, if it is not the dtype: Triton's name, CUtensorMapDataType, bits, swizzle bytes."""

    name: str
    code: int
    bits: int
    swizzle: int = 0


# Prepared codes of w and scales are not swizzled.
WORDS, BYTES, CODES_OF_X = Element("i32", 2, 32), Element("u8", 0, 8), Element("fp8e4nv", 0, 8, 128)


class TensorShape(NamedTuple):
    """The shape of a descriptor's tensor, in elements, outermost dimension first.

    ``of(M, stride)`` returns the sizes, and the strides of all dimensions but the last, which is contiguous. ``rows``:
    they depend on M. ``stride`` names the argument that is passed as ``stride``. ``read`` names the arguments that the
    kernel reads from the descriptor's own sizes and strides; () if it reads none.
    """

    of: Callable[[int, int], tuple[Box, Box]]
    rows: bool = False
    stride: str = ""
    read: tuple[str, ...] = ()


def dense(*sizes: int) -> TensorShape:
    """Return the shape of a dense tensor whose sizes are equal in all calls."""
    strides = tuple(math.prod(sizes[i:]) for i in range(1, len(sizes)))
    return TensorShape(lambda _M, _stride: (sizes, strides))


def of_rows(columns: int, stride: str, read: tuple[str, ...] = ()) -> TensorShape:
    """Return the shape of a call's M rows; without the name of a stride they are dense."""
    return TensorShape(lambda M, row: ((M, columns), (row if stride else columns,)), True, stride, read)


def ragged(columns: int, stride: str) -> TensorShape:
    """Return the shape of rows that end with each expert: see ``RAGGED_SIZES``."""
    return TensorShape(lambda _M, row: ((*RAGGED_SIZES, columns), ragged_strides(row)), stride=stride)


class Entry(NamedTuple):
    """A row kernel: its function, its source's digest and revision. ``KernelEntry`` begins with the same fields.

    From the first release on ``revision`` goes up with each change of the source; before, only if a launcher depends on
    the change. Bundles record it: when bundles are merged, later revisions replace earlier ones, and two sources of one
    revision are refused.
    """

    name: str  # of the function, and the symbol in cubins
    revision: int
    home: str  # the module of the function, below ``kernels``
    sha256: str  # of the source and the modules that it imports: aot/compile/revisions.py
    launched_since: int  # the first revision that today's launchers can launch


class Limits(NamedTuple):
    """The largest sizes that a kernel supports; None means any."""

    experts: int
    steps: int | None = None  # of the reduction
    column_tiles: int | None = None  # tiles in a row of the result


class Tiles(NamedTuple):
    """A set of configs that a kernel supports: all combinations of the values in ``knobs``.

    A knob that is not in ``knobs`` may have any number that plain kernels support, or its default if it is an enum.
    """

    limits: Limits
    knobs: Mapping[str, Sequence[int]]
    dtypes: frozenset[DType] | None = None  # None: the entry's
    ops: frozenset[Op] | None = None  # None: the entry's
    fusions: frozenset[Fusion] | None = None  # None: the entry's
    dealt: bool = False  # programs take most tiles in a fixed order; else warp-specialised ones when they become free
    zeroes: bool = False  # with SCATTER the kernel can zero the rows of y that no index entry names
    transposed: bool = False  # the kernel computes dw transposed: dw's rows are the tile's columns

    def allowed(self, knob: str) -> Sequence[int]:
        """Return the values that a knob of ``Config`` can have."""
        return self.knobs.get(knob) or _OTHERWISE[knob]

    def misfits(self, config: Config, experts: int = 0) -> Iterator[str]:
        """Yield an error text for each knob whose value is not allowed, and for too many experts."""
        for name in FIELDS:
            value, allowed = getattr(config, name), self.allowed(name)
            if value not in allowed:
                yield misfit(name, value, allowed)
        if experts > self.limits.experts:
            yield f"it counts {self.limits.experts} experts at most, not {experts}"


_DEFAULTS = Config(16, 16, 16, 1, 1)
_OTHERWISE: Mapping[str, Sequence[int]] = {name: (getattr(_DEFAULTS, name),) for name in FIELDS} | {
    **RANGES,
    "block_m": SIZES,
    "block_n": SIZES,
    "block_k": SIZES,
    "num_stages": range(1, 9),
}


def configs(
    rows: Rows,
    schedule: Schedule = Schedule.PERSISTENT,
    loads: Loads = Loads.POINTER,
    *,
    group_m: int = 8,
    cache: Cache = Cache.DEFAULT,
    edge: Edge = Edge.WHOLE,
    fitted: bool = False,
) -> list[Config]:
    """Return a config for each row of a list."""
    tile_rows = TileRows.FITTED if fitted else TileRows.FIXED
    return [Config(*row, group_m, loads, schedule, cache, edge, tile_rows) for row in rows]


def no_configs(_op: Op, _dtype: DType, _arch: Arch) -> list[Config]:
    """Return no configs, for kernels that have no candidates or fallbacks."""
    return []


def _plain_layouts(_op: Op) -> frozenset[Layout]:
    return frozenset((Layout.NK, Layout.KN))


def _none(_spec: Spec) -> tuple[str, ...]:
    return ()


def _nothing(_spec: Spec, *_: Any) -> Mapping[str, Any]:
    return {}


class KernelEntry(NamedTuple):
    """A GEMM's kernel: the problems and configs that it supports, and its variants' arguments and constants."""

    name: str
    revision: int
    home: str
    sha256: str
    launched_since: int
    ops: frozenset[Op]
    dtypes: frozenset[DType]
    fusions: frozenset[Fusion]  # as ``spec.code_of`` returns them
    needs: frozenset[Feature]  # of the GPU, in addition to TMA if the config loads through it
    tiles: tuple[Tiles, ...]
    pointers: tuple[str, ...]  # the kernel's first arguments, in order; then come M, N, K, E, strides and steps
    strides: tuple[str, ...]
    steps: tuple[str, ...]
    required: Callable[[Spec], tuple[str, ...]]  # the arguments that a record must have
    constants: Callable[[Spec, Arch], Constants]  # compile-time arguments; absent ones are added as None
    order: Callable[[Spec, Arch, int], Order]  # the order in which a variant sums K elements
    candidates: Pool  # the configs to try, best guesses first
    fallbacks: Pool = no_configs  # configs that are also compiled for any N and K: for small M, for large M
    cost: str = ""  # the module below ``kernels`` whose ``estimate_us`` is the cost model; "": kernels/cost_model.py
    absent: Callable[[Spec], tuple[str, ...]] = _none  # the pointers and steps that a variant does not have
    descriptors: Callable[[Spec], tuple[str, ...]] = _none  # the pointers that are TMA descriptors, in order
    ranks: Mapping[str, int] = MappingProxyType({})  # of descriptors
    boxes: Callable[[Spec], Mapping[str, Box]] = _nothing  # of descriptors, outermost dimension first
    held: Mapping[str, Element] = MappingProxyType({})  # descriptors whose elements are not of the dtype
    shapes: Callable[[Spec, Sizes], Mapping[str, TensorShape]] = _nothing  # of descriptors' tensors
    numbers: Callable[[Spec, Sizes], Mapping[str, int]] = _nothing  # arguments that are computed from others
    plain_scales: bool = True  # it reads ``ExpertWeights.plain_scale`` of quantised weights, not ``kernel_scale``
    loading_warps: int = 0  # in addition to the warps that multiply
    layouts: Callable[[Op], frozenset[Layout]] = _plain_layouts  # of w, for an op
    pointees: Callable[[Spec], Mapping[str, str]] = _nothing  # element types of pointers that are not the dtype's
    multiples: Callable[[Spec], Mapping[str, int]] = _nothing  # aligned arguments: registry.divisibility

    def schedules(self) -> frozenset[tuple[int, ...]]:
        """Return the (schedule, rows) pairs of its configs."""
        return frozenset(
            pair for tiles in self.tiles for pair in itertools.product(tiles.allowed("schedule"), tiles.allowed("rows"))
        )

    def tiles_of(self, config: Config) -> Tiles | None:
        """Return the ``Tiles`` that allow a config, for any dtype and fusion; None if none do."""
        return next((tiles for tiles in self.tiles if not any(tiles.misfits(config))), None)

    def threads(self, config: Config) -> int:
        """Return the number of threads of a program."""
        return 32 * (config.num_warps + self.loading_warps)

    def refusal(self, spec: Spec, arch: Arch | None) -> str | None:
        """Return why the kernel does not support a variant, None if it does. ``arch`` None: any architecture."""
        suitable = [
            tiles
            for tiles in self.tiles
            if spec.dtype in (tiles.dtypes or self.dtypes)
            and spec.op in (tiles.ops or self.ops)
            and _code(spec.fusion) in (tiles.fusions or self.fusions)
        ]
        if suitable:  # report the tiles with the fewest differences
            near = [tiles for tiles in suitable if spec.config.schedule in tiles.allowed("schedule")] or suitable
            wrong = min((list(tiles.misfits(spec.config, spec.max_experts)) for tiles in near), key=len)
        else:
            wrong = [
                f"its dtypes are {', '.join(sorted(dtype.value for dtype in self.dtypes))}",
                f"its forms are {', '.join(sorted(map(_named, self.fusions)))}",
            ]
        if spec.layout not in (layouts := self.layouts(spec.op)):
            wrong.append(f"w is {spec.layout.value}, wanted {' or '.join(sorted(layout.value for layout in layouts))}")
        needed = self.needs | ({Feature.TMA} if spec.config.loads is Loads.TMA else set())
        if arch is not None:
            wrong += [f"{arch} has no {feature.value}" for feature in Feature if feature in needed - arch.features]
        return f"{self.name} has no code of {spec}: {'; '.join(wrong)}" if wrong else None


def _code(fusion: Fusion) -> Fusion:
    """Return the fusion whose code runs a call, like ``spec.code_of``: others differ by run-time flags alone."""
    own = fusion & (Fusion.GATHER | Fusion.SILU | Fusion.LOW_RANK | Fusion.STARTS)
    return own or (Fusion.SCATTER if fusion else Fusion.NONE)


def _named(fusion: Fusion) -> str:
    return " + ".join(str(flag.name).lower() for flag in Fusion if flag and flag in fusion) or "plain"
