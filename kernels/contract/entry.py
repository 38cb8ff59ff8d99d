"""The declaration of a kernel: ``Entry`` for a row kernel; for a GEMM ``KernelEntry``, with a ``Tiles`` for each kind.

A kernel's folder has its entries in ``__init__.py``, kernels/registry.py lists the folders. Search, compiler, loader,
cost model and launcher read the entry and nothing else of a kernel.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

from ...artifacts.records.precision import DType
from ...artifacts.records.problem import Fusion, Layout, Op
from ...artifacts.tuples import NamedTuple
from ..hardware.arch import Arch, Feature
from .config import FIELDS, RANGES, SIZES, Cache, Config, Edge, Loads, Schedule, TileRows, misfit
from .launch_abi import RAGGED_SIZES, ragged_strides
from .order import Order
from .spec import Spec

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
    """Return the shape of rows that end with each expert: see ``launch_abi.RAGGED_SIZES``."""
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
    cost: str = ""  # the module below ``kernels`` whose ``estimate_us`` is the cost model; "": cost_model.py
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
    multiples: Callable[[Spec], Mapping[str, int]] = _nothing  # of aligned variants' arguments: registry.divisibility

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
    own = fusion & (Fusion.GATHER | Fusion.SILU | Fusion.LOW_RANK)
    return own or (Fusion.SCATTER if fusion else Fusion.NONE)


def _named(fusion: Fusion) -> str:
    return " + ".join(str(flag.name).lower() for flag in Fusion if flag and flag in fusion) or "plain"
