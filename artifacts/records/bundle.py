"""The records of a bundle: variants (compiled kernels), choices among them, and the GPUs and models they are for.

A lookup goes problem -> choices, one for each bucket of M and GPU -> variant -> cubin.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence

from ..tuples import NamedTuple
from .precision import DType
from .problem import Fusion, Layout, Op, Problem, RowOp
from .target import Gpu, Target

_HELD_AGAINST = "held_against="
_HELD_DIGITS = 16
_MOST_HELD = 10  # digests: an option has at most 200 characters


class Source(enum.Enum):
    """Whether a choice was measured on a GPU or computed by the cost model. A modelled choice is never called tuned."""

    MEASURED = "measured"
    MODELLED = "modelled"


class TensorMap(NamedTuple):
    """A TMA descriptor argument's encoding by the host (CUDA driver API, cuTensorMapEncodeTiled).

    ``box`` is in elements, outermost dimension first, like in the kernel's source. ``element`` and ``swizzle`` are
    values of CUtensorMapDataType and CUtensorMapSwizzle.
    """

    argument: str
    element: int
    box: tuple[int, ...]
    swizzle: int


class Variant(NamedTuple):
    """A compiled kernel's record: all facts needed to choose, load and launch its cubin.

    A cubin serves all shapes: E, M, N, K and the strides are arguments. ``alignment``, 16 or 1 byte, is assumed of all
    pointers, row strides and row lengths. ``max_experts`` is the largest E. ``arguments`` are (name, kind) in the
    kernel's order, a kind being ``ptr i32 i64 desc2 desc3 desc4 desc5``; ``abi``, the launch ABI number, defines the
    names' meanings. No choice names a variant of a ``RowOp``: it runs all calls that fit its dtype and alignment.
    """

    kernel: str
    revision: int
    abi: int
    op: Op | RowOp
    dtype: DType
    layout: Layout
    fusion: Fusion
    alignment: int
    max_experts: int
    config: tuple[tuple[str, int], ...]
    entry: str
    arguments: tuple[tuple[str, str], ...]
    tensor_maps: tuple[TensorMap, ...]
    threads: int
    shared_bytes: int
    registers: int
    spill_bytes: int
    scratch_bytes: int
    cubin_bytes: int
    cubin_sha256: bytes


class Way(enum.IntEnum):
    """A way to run a call other than by the choice's own variant. A bundle stores the member's value."""

    ROWS_FIRST = 0  # a row kernel gathers the rows of x, then a variant without a gather multiplies them
    ROWS_FIRST_BY_INDEX = 1  # ROWS_FIRST for calls that also scatter, weigh or add a bias: the variant stores by index
    FUSED_SILU = 2  # a variant with silu in its epilogue runs the product and the activation
    QUANTISED_X = 3  # x is quantised, and a variant multiplies codes by codes

    def problems(self, problem: Problem) -> tuple[Problem, ...]:
        """The problems whose variants run ``problem`` this way; () if none can."""
        bare = problem._replace(fusion=problem.fusion & ~Fusion.GATHER, top_k=0)
        if self is Way.QUANTISED_X:
            dtype = problem.dtype.with_x_quantised
            return () if dtype is None else (problem._replace(dtype=dtype),)
        if self is Way.FUSED_SILU:
            names = [name for name in (problem, problem.transposed) if name is not None and name.op is Op.FORWARD]
            kept = {Fusion.NONE: (Fusion.NONE,), Fusion.GATHER: (Fusion.GATHER, Fusion.NONE)}.get(problem.fusion, ())
            return tuple(name._replace(fusion=fusion | Fusion.SILU, top_k=0) for name in names for fusion in kept)
        if problem.fusion != Fusion.GATHER:
            return ()
        return (bare,) if self is Way.ROWS_FIRST else (bare._replace(fusion=Fusion.SCATTER),)


class PlanRow(NamedTuple):
    """A line of a choice's plan: calls of ``way`` with this ``top_k`` or more run ``variant``; None: the choice's own.

    ``top_k`` is the number of sorted rows that read each row of x, 0 if no row kernel can gather them. ``checks``: the
    line is for calls whose index must be brought into range first. If a way has no such line, its other lines are for
    these calls, too.
    """

    way: Way
    checks: bool
    top_k: int
    variant: int | None

    def __str__(self) -> str:
        runs = "the choice's own" if self.variant is None else self.variant
        return f"{self.way.name.lower()} from top_k {self.top_k}{' with a check' * self.checks}: variant {runs}"


class Choice(NamedTuple):
    """The variant chosen for a problem, a bucket of M and a GPU.

    - ``bucket``: a power of two; the choice is for the M that are nearest to it.
    - ``time_ns``: median time on the GPU, or the cost model's estimate if ``source`` is modelled. Some fusions' times
      are scaled to be comparable with the plain product's.
    - ``gpu``: index into the bundle's GPUs, None if modelled. Each GPU may have its own choice for a bucket.
    - ``torch_ns``: time of torch's grouped_mm, if it is faster by more than noise: torch then runs this cell.
    - ``plan``: the variants that run certain calls instead of ``variant``, ascending.
    """

    bucket: int
    variant: int
    source: Source
    time_ns: int
    runner_up: int | None = None
    runner_up_ns: int | None = None
    gpu: int | None = None
    torch_ns: int | None = None
    plan: tuple[PlanRow, ...] = ()

    @property
    def sort_key(self) -> tuple[int, int]:
        """The order of a problem's choices: by bucket, then the modelled choice, then GPUs. No two are equal."""
        return (self.bucket, -1 if self.gpu is None else self.gpu)

    def measured_on(self, gpus: Sequence[Gpu]) -> Gpu | None:
        """The GPU of ``gpus`` that the choice was measured on, None if it is modelled."""
        return None if self.gpu is None else gpus[self.gpu]

    def variants(self) -> list[int]:
        """The indices of all variants that the choice names: its own, its runner-up's, those in its plan."""
        named = (self.variant, self.runner_up, *(row.variant for row in self.plan))
        return [index for index in named if index is not None]


def planned(plan: Sequence[PlanRow], way: Way, top_k: int, *, checks: bool) -> int | None:
    """Return the variant that a plan names for a call of a way; None if the choice's own variant runs the call."""
    rows = [row for row in plan if row.way is way]
    if checks and any(row.checks for row in rows):
        rows = [row for row in rows if row.checks]
    else:
        rows = [row for row in rows if not row.checks]
    return next((row.variant for row in reversed(rows) if row.top_k <= top_k), None)


class Timed(NamedTuple):
    """A measured choice with the plain values of its record: variants and the GPU are indices, ``source`` is 1."""

    log2_bucket: int
    variant: int
    source: int
    time_ns: int
    runner_up: int | None
    runner_up_ns: int | None
    gpu: int


class Kernel(NamedTuple):
    """A kernel whose variants a bundle holds: its revision and the digest of its source."""

    name: str
    revision: int
    source_sha256: bytes


class Producer(NamedTuple):
    """The versions that built a bundle, and the compile options that all its variants share.

    The option ``held_against=`` is not the compiler's. It has the first digits of baseline bundles' digests: of bundles
    in use on the GPU when this bundle was measured, or whose measured choices it took over. A bundle with baselines is
    used only for the cells that it measured.
    """

    pretuned: str
    triton: str
    ptxas: str
    options: tuple[str, ...]

    @property
    def compile_options(self) -> tuple[str, ...]:
        """The options of the compiler."""
        return tuple(option for option in self.options if not option.startswith(_HELD_AGAINST))

    @property
    def held_against(self) -> tuple[str, ...]:
        """The first digits of the baseline bundles' digests, ascending."""
        lists = (option.removeprefix(_HELD_AGAINST) for option in self.options if option.startswith(_HELD_AGAINST))
        return tuple(sorted(digits for text in lists for digits in text.split(",")))

    def with_held_against(self, digests: Iterable[str]) -> Producer:
        """Return a copy with these baseline bundles; at most ten are recorded."""
        recorded = sorted({digest[:_HELD_DIGITS] for digest in digests})[:_MOST_HELD]
        option = (f"{_HELD_AGAINST}{','.join(recorded)}",) if recorded else ()
        return self._replace(options=(*self.compile_options, *option))


class Model(NamedTuple):
    """A model in one sharding that a bundle was built for, and its problems.

    ``top_k`` is the number of experts of a token, fused shared experts included: T tokens give at most T * top_k rows.
    """

    name: str
    tp: int
    ep: int
    top_k: int
    dtype: DType
    problems: tuple[Problem, ...]


class Bundle(NamedTuple):
    """A whole bundle in memory. The builder writes it, ``aot verify`` reads it.

    ``cubins[i]`` are the bytes of ``variants[i]``. ``min_driver`` is the least CUDA driver version, in
    cuDriverGetVersion's numbers: 12080 is 12.8.
    """

    target: Target
    min_driver: int
    producer: Producer
    kernels: tuple[Kernel, ...]
    gpus: tuple[Gpu, ...]
    variants: tuple[Variant, ...]
    cubins: tuple[bytes, ...]
    choices: Mapping[Problem, tuple[Choice, ...]]
    models: tuple[Model, ...]
