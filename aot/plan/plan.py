"""Turn shards into the problems and buckets of one bundle, equal for every capability."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from ...artifacts.records import DType, Fusion, Layout, Model, Op, Problem, buckets_between
from ...kernels.activations import Activation
from ...kernels.arch import arch_of
from ...kernels.entry import ALIGNMENT_BYTES, has_aligned_rows
from ...kernels.hopper_w4a16 import can_be_prepared
from ...kernels.spec import MAX_EXPERTS, code_of
from ..models.layer import LayerGemm, LayerShard
from .families import Family, Pool, has_candidates, optional

# Row moves of GEMM 1 and GEMM 2: GEMM 1 reads hidden states in token order, GEMM 2 writes them in token order, and
# dX scatters what the forward gathers.
_MOVES = {Op.FORWARD: (Fusion.GATHER, Fusion.SCATTER), Op.DX: (Fusion.SCATTER, Fusion.GATHER)}


# Where silu in GEMM 1's epilogue is planned. Its tiles have 128 rows: with few rows an expert, the plain product's
# small tiles save more than the activation costs. Qwen3-30B on an H200: 1.07x at T=128 (8 rows an expert), while at
# T=1024 (64 rows) the epilogue wins.
_GATED_ROWS = 1024
_GATED_ROWS_PER_EXPERT = 16
_SILU = Activation("silu")  # the epilogue's activation; a limit is another activation
_GATED_DTYPES = (DType.BF16, DType.FP16)  # dtypes of the warp-specialised kernels


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """The problems to choose variants for.

    ``buckets`` maps each problem to its buckets of M, ascending. The problems are distinct and in ``sort_key`` order,
    however many models share them. ``models`` has one entry for each shard and dtype. ``shapes`` are the shards that
    the plan was made from: ``planned_on`` needs them to plan again for some capabilities.
    """

    buckets: Mapping[Problem, tuple[int, ...]]
    models: tuple[Model, ...]
    shapes: tuple[LayerShard, ...] = ()

    @property
    def problems(self) -> tuple[Problem, ...]:
        """The distinct problems, in their order."""
        return tuple(self.buckets)

    @property
    def choices(self) -> int:
        """The number of (problem, bucket) pairs, so of choices in a finished bundle."""
        return sum(len(buckets) for buckets in self.buckets.values())

    def without(self, problems: Collection[Problem]) -> BuildPlan:
        """The plan less these problems, and less each model and dtype of which nothing is left.

        It has no ``shapes``, so ``planned_on`` does not bring the problems back.
        """
        models = (
            model._replace(problems=left)
            for model in self.models
            if (left := tuple(problem for problem in model.problems if problem not in problems)) or not model.problems
        )
        buckets = {problem: row for problem, row in self.buckets.items() if problem not in problems}
        return BuildPlan(MappingProxyType(buckets), tuple(models))


def plan(shapes: Iterable[LayerShard]) -> BuildPlan:
    """Plan the distinct problems of ``shapes``, their buckets, and the models they serve.

    A shard has a problem for each of its two GEMMs, in each of its dtypes, layouts and ops. Forward and dX also have
    them with gathered or scattered rows. The buckets are the powers of two that M = tokens * k / ep reaches between the
    least and the most tokens, equal for every op. Gated models whose activation is silu also have GEMM 1 with silu in
    its epilogue, in the larger buckets. Quantised weights are planned in bf16 too (``shape.instead``):
    ``planned_on`` drops it for capabilities that have code for all their dtypes.
    """
    return _planned(tuple(shapes))


def _planned(shapes: tuple[LayerShard, ...]) -> BuildPlan:
    buckets: dict[Problem, set[int]] = {}
    models: dict[tuple[str, int, int, int, DType], set[Problem]] = {}
    for shape in shapes:
        wanted = buckets_between(*shape.rows)
        for dtype in dict.fromkeys((*shape.dtypes, *shape.instead)):
            problems = set(problems_of(shape, dtype))
            for problem in tuple(problems):
                pays = gated_buckets(problem, wanted) if optional(problem) else wanted
                if pays:
                    buckets.setdefault(problem, set()).update(pays)
                else:
                    problems.remove(problem)
            key = (shape.name, shape.tp, shape.ep, shape.experts_per_token, dtype)
            models.setdefault(key, set()).update(problems)
    return BuildPlan(
        MappingProxyType({problem: tuple(sorted(buckets[problem])) for problem in _sorted(buckets)}),
        tuple(
            Model(*key, problems=tuple(_sorted(models[key])))
            for key in sorted(models, key=lambda key: (*key[:4], key[4].value))
        ),
        shapes,
    )


def _sorted(problems: Iterable[Problem]) -> list[Problem]:
    return sorted(problems, key=lambda problem: problem.sort_key)


def problems_of(shape: LayerShard, dtype: DType) -> Iterator[Problem]:
    """Yield the problems of one shard in one dtype; calls that run the same code share a problem (``spec.code_of``).

    dW of w [E, K, N] is dW of w [E, N, K] with x and dy, N and K exchanged, and is planned so.
    """
    if dtype.quantised:
        yield from _quantised(shape, dtype)
        return
    for op in shape.ops:
        for layout in shape.layouts:
            moving = _MOVES.get(op, (Fusion.NONE, Fusion.NONE))
            padded = shape.padded_gemm()
            gemms = [*zip(shape.gemms(), moving, strict=True), *([(padded, moving[0])] if padded else [])]
            for gemm, moves in gemms:
                if op is Op.DW and layout is Layout.KN:
                    yield Problem(op, dtype, gemm.E, gemm.K, gemm.N)
                    continue
                for fusion in (Fusion.NONE, code_of(op, moves)):
                    yield Problem(op, dtype, gemm.E, gemm.N, gemm.K, layout, fusion)
            if op is Op.FORWARD and shape.gated and shape.activation in (None, _SILU):
                yield from _gated(shape.gemms()[0], dtype, layout)


def _quantised(shape: LayerShard, dtype: DType) -> Iterator[Problem]:
    """Yield the forward and dX in the checkpoint's layout and the prepared one; ``planned_on`` selects one.

    A forward of prepared weights has its rows gathered beforehand, so it is planned without a gather.
    """
    if shape.trains_in_fp8 and dtype is DType.FP8_BLOCK:
        for gemm in shape.gemms():
            for N, K in ((gemm.N, gemm.K), (gemm.K, gemm.N)):  # the forward, and dX by w transposed
                yield Problem(Op.FORWARD, dtype, gemm.E, N, K)
        if dtype.value not in shape.weights:
            return
    for op in (Op.FORWARD, Op.DX):
        for layout, gemms in ((Layout.NK, shape.gemms(dtype)), (Layout.STORED, shape.gemms())):
            for gemm, moves in zip(gemms, _MOVES[op], strict=True) if op in shape.ops else ():
                before = layout is Layout.NK and op is Op.FORWARD
                for fusion in (Fusion.NONE, Fusion.SCATTER if before else code_of(op, moves)):
                    yield Problem(op, dtype, gemm.E, gemm.N, gemm.K, layout, fusion)


def _gated(gemm: LayerGemm, dtype: DType, layout: Layout) -> Iterator[Problem]:
    """Yield GEMM 1 with silu in its epilogue, plain and with gathered rows, if there is code.

    The code needs rows of y that are multiples of 16 bytes. w [E, K, N] is left out: its models have other activations.
    """
    problem = Problem(Op.FORWARD, dtype, gemm.E, gemm.N, gemm.K, layout, Fusion.SILU)
    able = dtype in _GATED_DTYPES and layout is Layout.NK and gemm.E <= MAX_EXPERTS
    if able and has_aligned_rows(problem) and has_aligned_rows(problem._replace(N=gemm.N // 2)):
        yield problem
        yield problem._replace(fusion=Fusion.SILU | Fusion.GATHER)


def unaligned(shapes: Iterable[LayerShard]) -> Iterator[str]:
    """Yield a line for each shard whose weights have rows that are not multiples of 16 bytes.

    Only the fallback kernels, which assume no alignment, run there.
    """
    for shape in shapes:
        roles: dict[str, None] = {}
        for dtype in shape.dtypes:
            for gemm in shape.gemms(dtype):
                if not has_aligned_rows(Problem(Op.FORWARD, dtype, gemm.E, gemm.N, gemm.K)):
                    roles[f"{gemm.role} (N={gemm.N}, K={gemm.K})"] = None
        if not roles:
            continue
        whole = ALIGNMENT_BYTES // min(dtype.itemsize for dtype in shape.dtypes)
        degrees = [tp for tp in range(1, shape.tp) if shape.I % tp == 0 and (shape.I // tp) % whole == 0]
        better = f"tp={','.join(map(str, degrees))}" if degrees and shape.H % whole == 0 else "padded weights"
        yield (
            f"{shape}: rows of {' and '.join(roles)} are no multiples of {whole} elements (16 bytes): "
            f"only fallback kernels, which are slower, run them; {better} would have none"
        )


def gated_buckets(problem: Problem, buckets: Iterable[int]) -> tuple[int, ...]:
    """The buckets in which silu in the epilogue may pay."""
    least = max(_GATED_ROWS, _GATED_ROWS_PER_EXPERT * problem.E)
    return tuple(bucket for bucket in buckets if bucket >= least)


def planned_on(plan: BuildPlan, sms: Collection[int], pool: Pool | None = None) -> BuildPlan:
    """The plan for some capabilities.

    The plan has no replacements for weights that all these capabilities have code for, and no quantised weights or
    optional problems that none of them has code for.
    """
    space = pool or Pool()
    shapes = shapes_on(plan.shapes, sms, space)
    planned = _planned(shapes) if shapes else plan
    coded = _coded(space)
    of_padded = itertools.chain.from_iterable(itertools.starmap(problems_of, _padded(shapes)))
    replaced = {problem for problem in of_padded if problem.layout is Layout.STORED}
    idle = {
        problem
        for problem in planned.problems
        if (optional(problem) or problem.dtype.quantised) and not any(_runs(problem, sm, coded, replaced) for sm in sms)
    }
    return replace(planned.without(idle) if idle else planned, shapes=plan.shapes)


def _coded(space: Pool) -> Callable[[Family, int, int], bool]:
    """Return a cached function of (family, E, sm) that tells whether there is code: problems are many, families few."""
    return functools.cache(lambda family, E, sm: has_candidates(family, E, sm, space))


def _padded(shapes: Iterable[LayerShard]) -> Iterator[tuple[LayerShard, DType]]:
    """Yield each shard and format whose width I/tp is padded so that the weights can be prepared."""
    for shape in shapes:
        for dtype in dict.fromkeys((*shape.dtypes, *shape.instead)):
            if shape.padded_width(dtype) != shape.width:
                yield shape, dtype


def padded(shapes: Iterable[LayerShard], sms: Collection[int]) -> Iterator[str]:
    """Yield a line for each width to which quantised weights are padded."""
    coded = _coded(Pool())
    widths: dict[tuple[str, int, int], dict[str, None]] = {}
    for shape, dtype in _padded(shapes):
        forward = Family(Op.FORWARD, dtype, Layout.NK, Fusion.NONE)
        if any(coded(forward, shape.experts_per_rank, sm) for sm in sms):
            name = dtype.value.removesuffix("_a16")
            widths.setdefault((name, shape.width, shape.padded_width(dtype)), {})[f"{shape.name} tp={shape.tp}"] = None
    for (name, width, wide), shards in widths.items():
        yield (
            f"{', '.join(shards)}: planned with I/tp={width} padded to {wide} ({wide / width - 1:.1%} more memory), so "
            f"that {name} weights can be prepared: vLLM's plug-in pads them"
        )


def _runs(
    problem: Problem, sm: int, coded: Callable[[Family, int, int], bool], replaced: Collection[Problem] = ()
) -> bool:
    """True if a capability has code for an optional or quantised problem.

    If the forward can run prepared weights, all ops use them. ``replaced`` are problems in the checkpoint layout whose
    weights are padded and prepared instead.
    """
    if not coded(Family.of(problem), problem.E, sm):
        return False
    dtype = problem.dtype
    if not dtype.quantised:
        return True
    forward = Family(Op.FORWARD, dtype, Layout.NK, Fusion.NONE)
    able = problem in replaced or can_be_prepared(dtype, problem.N, problem.K)
    ordered = able and coded(forward, problem.E, sm)
    return ordered == (problem.layout is Layout.NK)


def shapes_on(shapes: Iterable[LayerShard], sms: Collection[int], pool: Pool | None = None) -> tuple[LayerShard, ...]:
    """The shards with ``dtypes`` replaced by those that these capabilities have code for."""
    coded = _coded(pool or Pool())

    def resolved(shape: LayerShard) -> LayerShard:
        wanted = {dtype: {(Family.of(p), p.E) for p in problems_of(shape, dtype)} for dtype in shape.dtypes}
        able = {sm: [dtype for dtype, forms in wanted.items() if any(coded(*form, sm) for form in forms)] for sm in sms}
        there = [dtype for dtype in shape.dtypes if any(dtype in row for row in able.values())]
        more = shape.instead if not all(able.values()) else ()
        return replace(shape, dtypes=(*there, *more), instead=())

    return tuple(resolved(shape) if shape.instead else shape for shape in shapes)


def _too_many(shape: LayerShard) -> bool:
    return shape.experts_per_rank > MAX_EXPERTS


def without_code(shapes: Iterable[LayerShard]) -> Iterator[str]:
    """Yield an error line for each shard of explicitly requested quantised weights that no capability can run."""
    for shape in (shape for shape in shapes if not shape.instead):
        codes = [dtype for dtype in shape.dtypes if dtype.quantised]
        if codes == [*shape.dtypes] and set(shape.ops) == {Op.DW}:
            yield f"{shape}: of quantised weights there is no dW: codes are frozen; wanted forward or dX among the ops"
        elif codes and _too_many(shape):
            splits = [ep for ep in range(1, shape.E + 1) if shape.E % ep == 0 and not _too_many(replace(shape, ep=ep))]
            yield (
                f"{shape}: {shape.experts_per_rank} experts a GPU, wanted at most {MAX_EXPERTS} of quantised weights; "
                + (f"ep={splits[0]} splits them over {splits[0]} GPUs, " if splits else "")
                + "weights=bf16 has kernels for any number"
            )


def built_of_codes(shapes: Iterable[LayerShard], sms: Collection[int]) -> Iterator[str]:
    """Yield a line on the shards that are built in their checkpoint's format without a request."""
    lacking: dict[tuple[str, str], dict[str, dict[str, None]]] = {}
    partly: dict[tuple[str, str, str], dict[str, None]] = {}
    for shape in (shape for shape in shapes if shape.instead):
        name, other = ",".join(shape.weights), ",".join(dtype.value for dtype in shape.instead)
        for sm in sms:
            here = planned_on(plan((replace(shape, instead=()),)), (sm,))
            ops = {problem.op for problem in here.problems}
            if not ops:
                wanted = f"{name} weights" + (f", {shape.experts_per_rank} experts a GPU," if _too_many(shape) else "")
                lacking.setdefault((wanted, other), {}).setdefault(str(arch_of(sm)), {})[shape.name] = None
            elif rest := [op for op in shape.ops if op not in ops]:
                without = " or ".join(op.value for op in rest)
                built = " and ".join(op.value for op in shape.ops if op in ops)
                partly.setdefault((name, built, without), {})[shape.name] = None
    for (name, built, without), models in partly.items():
        yield (
            f"{', '.join(models)}: built as published, with {name} weights, {built} only (no {without} kernel reads "
            f"them); weights=bf16 builds all in bf16, weights={name},bf16 builds both"
        )
    for (name, other), archs in lacking.items():
        models = dict.fromkeys(model for row in archs.values() for model in row)
        where = ", ".join(archs)
        yield f"no kernels of {name} for {where}: {other} is built there instead of {', '.join(models)}"
