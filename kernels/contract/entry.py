"""What a kernel declares of itself: ``Entry``; a GEMM's ``KernelEntry``, and of each kind of tile one ``Tiles``.

A folder of kernels has entries in its ``__init__.py``. kernels/registry.py lists the folders.
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
from .order import Order
from .spec import Spec
from .words import RAGGED_SIZES, ragged_strides

Constants: TypeAlias = "dict[str, int | str | bool | None]"
Box: TypeAlias = "tuple[int, ...]"
Sizes: TypeAlias = "Mapping[str, int]"  # the numbers of all launches of a launcher, by the arguments' names
Rows: TypeAlias = "tuple[tuple[int, int, int, int, int], ...]"  # block_m, block_n, block_k, warps, stages
Pool: TypeAlias = "Callable[[Op, DType, Arch], list[Config]]"


class Element(NamedTuple):
    """A descriptor's element type, if it is not the dtype: Triton's name, CUtensorMapDataType, bits, swizzle."""

    name: str
    code: int
    bits: int
    swizzle: int = 0


# Codes of w and scales as the hardware has them: their rows are not swizzled.
WORDS, BYTES, CODES_OF_X = Element("i32", 2, 32), Element("u8", 0, 8), Element("fp8e4nv", 0, 8, 128)


class TensorShape(NamedTuple):
    """The tensor that a descriptor describes, in elements, outermost dimension first.

    ``of(M, stride)`` are its sizes, and the strides of all dimensions but the last, which is contiguous. ``rows`` says
    that they depend on M; ``stride`` names the number of a call that is the stride of its rows. ``read`` names the
    arguments that a kernel reads as the descriptor's own sizes and strides; without them it reads none.
    """

    of: Callable[[int, int], tuple[Box, Box]]
    rows: bool = False
    stride: str = ""
    read: tuple[str, ...] = ()


def dense(*sizes: int) -> TensorShape:
    """A tensor of these sizes, the same in every call, without gaps."""
    strides = tuple(math.prod(sizes[i:]) for i in range(1, len(sizes)))
    return TensorShape(lambda _M, _stride: (sizes, strides))


def of_rows(columns: int, stride: str, read: tuple[str, ...] = ()) -> TensorShape:
    """The M rows of a call, of so many columns; without a name of their stride they are dense."""
    return TensorShape(lambda M, given: ((M, columns), (given if stride else columns,)), True, stride, read)


def ragged(columns: int, stride: str) -> TensorShape:
    """Rows of which a kernel reads and stores those of an expert alone: see ``words.RAGGED_SIZES``."""
    return TensorShape(lambda _M, given: ((*RAGGED_SIZES, columns), ragged_strides(given)), stride=stride)


class Entry(NamedTuple):
    """A kernel of row operations: its function, and the source it stands for. ``KernelEntry`` begins likewise.

    From the first release on ``revision`` goes up whenever the source changes; until then only where a launcher has to
    know. Bundles record it: when they are merged a later one beats an earlier one, and one of two sources is refused.
    """

    name: str  # of the function, and the symbol in cubins
    revision: int
    home: str  # the module that has the function, below ``kernels``
    sha256: str  # of what it is compiled from: revisions.source_sha256
    launched_since: int  # the first revision whose code does all that today's launchers ask of it


class Limits(NamedTuple):
    """The most that the code can do; None is any number."""

    experts: int
    steps: int | None = None  # of the reduction
    column_tiles: int | None = None  # columns of the result are this many tiles wide at most


class Tiles(NamedTuple):
    """Configs that a kernel can be compiled for: each knob has one of its values here, whatever the others have.

    A knob that is not among ``knobs`` has its default, or if it is a number any that plain kernels can have.
    """

    limits: Limits
    knobs: Mapping[str, Sequence[int]]
    dtypes: frozenset[DType] | None = None  # None: the entry's
    ops: frozenset[Op] | None = None  # None: the entry's
    fusions: frozenset[Fusion] | None = None  # None: the entry's
    dealt: bool = False  # most tiles are dealt out in turn; of other warp-specialised code as programs become free
    zeroes: bool = False  # code of SCATTER can zero the rows of y that an index sends no row to
    transposed: bool = False  # dw's rows are the tile's columns: the kernel computes dw turned round

    def allowed(self, knob: str) -> Sequence[int]:
        """The values that a knob of ``Config`` can have."""
        return self.knobs.get(knob) or _OTHERWISE[knob]

    def misfits(self, config: Config, experts: int = 0) -> Iterator[str]:
        """Each knob of a config that has none of its values, and which they are; and experts that are too many."""
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
    """A config of each row."""
    tile_rows = TileRows.FITTED if fitted else TileRows.FIXED
    return [Config(*row, group_m, loads, schedule, cache, edge, tile_rows) for row in rows]


def no_configs(_op: Op, _dtype: DType, _arch: Arch) -> list[Config]:
    """Of kernels without such configs."""
    return []


def _plain_layouts(_op: Op) -> frozenset[Layout]:
    return frozenset((Layout.NK, Layout.KN))


def _none(_spec: Spec) -> tuple[str, ...]:
    return ()


def _nothing(_spec: Spec, *_: Any) -> Mapping[str, Any]:
    return {}


class KernelEntry(NamedTuple):
    """A GEMM's kernel: what it can be compiled for, and what the compiler and the launcher are told of a variant."""

    name: str
    revision: int
    home: str
    sha256: str
    launched_since: int
    ops: frozenset[Op]
    dtypes: frozenset[DType]
    fusions: frozenset[Fusion]  # the forms it has code for
    needs: frozenset[Feature]  # beside TMA, where the config loads so
    tiles: tuple[Tiles, ...]
    pointers: tuple[str, ...]  # its arguments, in order: addresses or descriptors, then sizes, strides and steps
    strides: tuple[str, ...]
    steps: tuple[str, ...]
    required: Callable[[Spec], tuple[str, ...]]  # the arguments without which no launcher can run it
    constants: Callable[[Spec, Arch], Constants]  # but for what is absent
    order: Callable[[Spec, Arch, int], Order]  # how a variant sums so many of K
    candidates: Pool  # the configs to try, best guesses first, of its ops and dtypes
    fallbacks: Pool = no_configs  # those also compiled for any alignment, so that any N and K run: small M, large M
    cost: str = ""  # the module below ``kernels`` whose ``estimate_us`` is its cost; "": cost_model.py
    absent: Callable[[Spec], tuple[str, ...]] = _none  # the pointers and steps that a variant goes without
    descriptors: Callable[[Spec], tuple[str, ...]] = _none  # the pointers that are, in the arguments' order
    ranks: Mapping[str, int] = MappingProxyType({})  # of descriptors
    boxes: Callable[[Spec], Mapping[str, Box]] = _nothing  # of descriptors, outermost dimension first
    held: Mapping[str, Element] = MappingProxyType({})  # descriptors of other elements than the dtype's
    shapes: Callable[[Spec, Sizes], Mapping[str, TensorShape]] = _nothing  # what each descriptor describes
    numbers: Callable[[Spec, Sizes], Mapping[str, int]] = _nothing  # arguments of its own, made of the others
    plain_scales: bool = True  # of quantised weights: it reads ``ExpertWeights.plain_scale``, not ``kernel_scale``
    loading_warps: int = 0  # beside those that multiply
    layouts: Callable[[Op], frozenset[Layout]] = _plain_layouts  # of w, for an op
    pointees: Callable[[Spec], Mapping[str, str]] = _nothing  # what pointers point at that is not the dtype's
    multiples: Callable[[Spec], Mapping[str, int]] = _nothing  # of aligned code, beside those of all kernels

    def schedules(self) -> frozenset[tuple[int, ...]]:
        """How it can run, and with which rows a tile."""
        return frozenset(
            how for one in self.tiles for how in itertools.product(one.allowed("schedule"), one.allowed("rows"))
        )

    def tiles_of(self, config: Config) -> Tiles | None:
        """The tiles that a config has, if they are among these; of any dtype and form."""
        return next((one for one in self.tiles if not any(one.misfits(config))), None)

    def threads(self, config: Config) -> int:
        """Of a program."""
        return 32 * (config.num_warps + self.loading_warps)

    def refusal(self, spec: Spec, arch: Arch | None) -> str | None:
        """Why there is no such code for an architecture (None: whichever it was compiled for), or None."""
        there = [
            one
            for one in self.tiles
            if spec.dtype in (one.dtypes or self.dtypes)
            and spec.op in (one.ops or self.ops)
            and _code(spec.fusion) in (one.fusions or self.fusions)
        ]
        if there:  # told of the tiles that are nearest
            near = [one for one in there if spec.config.schedule in one.allowed("schedule")] or there
            wrong = min((list(one.misfits(spec.config, spec.max_experts)) for one in near), key=len)
        else:
            wrong = [
                f"its dtypes are {', '.join(sorted(one.value for one in self.dtypes))}",
                f"its forms are {', '.join(sorted(map(_named, self.fusions)))}",
            ]
        if spec.layout not in (layouts := self.layouts(spec.op)):
            wrong.append(f"w is {spec.layout.value}, wanted {' or '.join(sorted(one.value for one in layouts))}")
        needed = self.needs | ({Feature.TMA} if spec.config.loads is Loads.TMA else set())
        if arch is not None:
            wrong += [f"{arch} has no {one.value}" for one in Feature if one in needed - arch.features]
        return f"{self.name} has no code of {spec}: {'; '.join(wrong)}" if wrong else None


def _code(fusion: Fusion) -> Fusion:
    """Whose code a form runs, as ``spec.code_of``: those that gather nothing differ by flags alone."""
    own = fusion & (Fusion.GATHER | Fusion.SILU | Fusion.LOW_RANK)
    return own or (Fusion.SCATTER if fusion else Fusion.NONE)


def _named(fusion: Fusion) -> str:
    return " + ".join(str(one.name).lower() for one in Fusion if one and one in fusion) or "plain"
