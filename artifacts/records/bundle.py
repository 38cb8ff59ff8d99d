"""What a bundle holds: variants, the choices among them, and what they were made of and for."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence

from ..tuples import NamedTuple
from .precision import DType
from .problem import Fusion, Layout, Op, Problem, RowOp
from .target import Gpu, Target

_HELD_AGAINST = "held_against="
_HELD_DIGITS = 16
_MOST_HELD = 10  # a text has at most 200 characters


class Source(enum.Enum):
    """Where a choice comes from. A modelled choice is never called tuned."""

    MEASURED = "measured"
    MODELLED = "modelled"


class TensorMap(NamedTuple):
    """How the host encodes one TMA descriptor argument (CUDA driver API, cuTensorMapEncodeTiled).

    ``box`` is in elements, outermost dimension first, as in the kernel's source;
    ``element`` and ``swizzle`` are values of CUtensorMapDataType and CUtensorMapSwizzle.
    """

    argument: str
    element: int
    box: tuple[int, ...]
    swizzle: int


class Variant(NamedTuple):
    """One cubin, and all that is needed to choose, load and launch it.

    It is agnostic of shape: N, K, E, M and the strides are arguments. ``alignment`` is what the
    kernel assumes, in bytes, of every pointer, row stride and row length (16, or 1 for nothing);
    ``max_experts`` is the largest E. ``arguments`` are (name, kind) in the kernel's order, kind one
    of ``ptr i32 i64 desc2 desc3 desc4 desc5``; the launch ABI number ``abi`` fixes what the names mean.
    That of a ``RowOp`` is named by no choice: it runs whatever its dtype and alignment fit.
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
    """How a call can run a cell other than by the choice's variant alone; the value is what a bundle stores."""

    ROWS_FIRST = 0  # a row kernel gathers the rows of x, then a variant without a gather multiplies them
    ROWS_FIRST_BY_INDEX = 1  # likewise, for calls that also scatter, weigh or add a bias: the variant stores by index
    FUSED_SILU = 2  # a variant with silu in its epilogue runs the product and the activation
    QUANTISED_X = 3  # x is quantised, and a variant multiplies codes by codes

    def problems(self, problem: Problem) -> tuple[Problem, ...]:
        """The problems whose variants run ``problem`` this way; () if none can."""
        bare = problem._replace(fusion=problem.fusion & ~Fusion.GATHER, top_k=0)
        if self is Way.QUANTISED_X:
            dtype = problem.dtype.with_x_quantised
            return () if dtype is None else (problem._replace(dtype=dtype),)
        if self is Way.FUSED_SILU:
            names = [one for one in (problem, problem.transposed) if one is not None and one.op is Op.FORWARD]
            kept = {Fusion.NONE: (Fusion.NONE,), Fusion.GATHER: (Fusion.GATHER, Fusion.NONE)}.get(problem.fusion, ())
            return tuple(one._replace(fusion=left | Fusion.SILU, top_k=0) for one in names for left in kept)
        if problem.fusion != Fusion.GATHER:
            return ()
        return (bare,) if self is Way.ROWS_FIRST else (bare._replace(fusion=Fusion.SCATTER),)


class PlanRow(NamedTuple):
    """A line of a choice's plan: from ``top_k`` on, the calls of a way run ``variant``; None: the choice's own.

    ``top_k`` sorted rows read each row of x; it is 0 for rows that no row kernel can gather. With ``checks`` the row is
    for calls whose index has to be brought into range first. A way without such rows has the others for all calls.
    """

    way: Way
    checks: bool
    top_k: int
    variant: int | None

    def __str__(self) -> str:
        runs = "the choice's own" if self.variant is None else self.variant
        return f"{self.way.name.lower()} from top_k {self.top_k}{' with a check' * self.checks}: variant {runs}"


class Choice(NamedTuple):
    """(problem, bucket, GPU) -> variant. ``bucket`` is a power of two, for the M that are nearest to it.

    ``time_ns`` is the median measured on ``gpu`` (an index into the bundle's GPUs), of some forms brought to the plain
    product's clock, or the cost model's estimate where ``source`` is modelled (``gpu`` is then None). A bundle may have
    a choice of each of its GPUs for one problem and bucket. ``torch_ns`` is the time of torch's grouped_mm, if that was
    measured and is faster than the variant by more than noise: torch then runs the cell on this GPU. ``plan`` is the
    rest of the decision, ascending: what runs instead of the variant, for which calls.
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
        """The one order of a problem's choices, which tells them apart: by bucket, then the modelled one, then GPUs."""
        return (self.bucket, -1 if self.gpu is None else self.gpu)

    def measured_on(self, gpus: Sequence[Gpu]) -> Gpu | None:
        """The one of the bundle's GPUs that it was measured on; None of a modelled one."""
        return None if self.gpu is None else gpus[self.gpu]

    def variants(self) -> list[int]:
        """Every variant that the choice names: its own, its runner-up, those of its plan."""
        named = (self.variant, self.runner_up, *(row.variant for row in self.plan))
        return [index for index in named if index is not None]


def planned(plan: Sequence[PlanRow], way: Way, top_k: int, *, checks: bool) -> int | None:
    """The variant that a plan has for a call of a way; None if the choice's own variant runs it."""
    rows = [row for row in plan if row.way is way]
    if checks and any(row.checks for row in rows):
        rows = [row for row in rows if row.checks]
    else:
        rows = [row for row in rows if not row.checks]
    return next((row.variant for row in reversed(rows) if row.top_k <= top_k), None)


class Timed(NamedTuple):
    """A measured choice as its record has it: variants and the GPU are indices, ``source`` is 1."""

    log2_bucket: int
    variant: int
    source: int
    time_ns: int
    runner_up: int | None
    runner_up_ns: int | None
    gpu: int


class Kernel(NamedTuple):
    """A kernel whose variants a bundle holds: its revision and the sha256 of its source text."""

    name: str
    revision: int
    source_sha256: bytes


class Producer(NamedTuple):
    """What made a bundle: versions, and the compile options that every variant shares.

    One option is none of the compiler's: ``held_against=`` and the first digits of the digests of the bundles that ran
    before, on the GPU where this one was measured, or whose measured choices it took over. Such a bundle has a say in
    the cells of its measured choices alone.
    """

    pretuned: str
    triton: str
    ptxas: str
    options: tuple[str, ...]

    @property
    def compile_options(self) -> tuple[str, ...]:
        """The compiler's."""
        return tuple(one for one in self.options if not one.startswith(_HELD_AGAINST))

    @property
    def held_against(self) -> tuple[str, ...]:
        """The bundles that ran before, ascending."""
        found = (one.removeprefix(_HELD_AGAINST) for one in self.options if one.startswith(_HELD_AGAINST))
        return tuple(sorted(digits for one in found for digits in one.split(",")))

    def with_held_against(self, digests: Iterable[str]) -> Producer:
        """The same, held against these bundles; of very many the first are told."""
        kept = sorted({digest[:_HELD_DIGITS] for digest in digests})[:_MOST_HELD]
        told = (f"{_HELD_AGAINST}{','.join(kept)}",) if kept else ()
        return self._replace(options=(*self.compile_options, *told))


class Model(NamedTuple):
    """A model (one sharding of it) that a bundle was built for, and its problems.

    ``top_k`` experts see each token, shared ones that are fused included: T tokens make at most T * top_k rows.
    """

    name: str
    tp: int
    ep: int
    top_k: int
    dtype: DType
    problems: tuple[Problem, ...]


class Bundle(NamedTuple):
    """A whole bundle in memory: what the builder writes and ``verify`` reads.

    ``cubins[i]`` are the bytes of ``variants[i]``. ``min_driver`` is the least CUDA driver
    version, as cuDriverGetVersion counts (12080 is 12.8).
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
