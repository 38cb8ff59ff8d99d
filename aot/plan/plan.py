"""Shards -> the problems and buckets of one bundle: pure, the same for every capability."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from ...artifacts.records.bundle import Model
from ...artifacts.records.precision import DType
from ...artifacts.records.problem import Fusion, Layout, Op, Problem, buckets_between
from ...kernels.contract.activations import Activation
from ...kernels.contract.spec import MAX_EXPERTS, code_of
from ...kernels.contract.words import ALIGNMENT_BYTES, has_aligned_rows
from ...kernels.hardware.arch import arch_of
from ...kernels.hopper_w4a16 import prepares
from ..models.layer import LayerGemm, LayerShard
from .families import Family, Pool, has_candidates, optional

# What ``grouped_gemm`` can do beside the product of GEMM 1 and of GEMM 2 of a layer: GEMM 1 reads hidden states in
# token order, GEMM 2 writes them there, and what is gathered going forward is scattered coming back.
_MOVES = {Op.FORWARD: (Fusion.GATHER, Fusion.SCATTER), Op.DX: (Fusion.SCATTER, Fusion.GATHER)}


# Where silu in GEMM 1's epilogue is planned. Its tiles have 128 rows: where few of them are filled the plain product's
# small tiles win by more than the activation costs (Qwen3-30B at T=128, 8 rows an expert, 1.07 x on an H200; at T=1024,
# 64 rows, the epilogue wins), and below 1024 rows the activation is next to nothing.
_GATED_ROWS = 1024
_GATED_ROWS_PER_EXPERT = 16
_SILU = Activation("silu")  # what the epilogue computes; a limit is another activation
_GATED_DTYPES = (DType.BF16, DType.FP16)  # what specialised code multiplies


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """What to choose variants for.

    ``buckets`` is problem -> its buckets of M, ascending; the problems are in ``sort_key`` order and
    each is there once, whatever number of models share it. ``models`` has one entry a shard and dtype. ``shapes``,
    what it was made of, where it was: which capability has code for what decides, too (``planned_on``).
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
        """The number of (problem, bucket) pairs: the choices that a finished bundle holds."""
        return sum(len(buckets) for buckets in self.buckets.values())

    def without(self, problems: Collection[Problem]) -> BuildPlan:
        """The plan less these problems, for good: ``planned_on`` makes none of them again.

        And less the models, in a dtype, that no other problem is of.
        """
        models = (
            model._replace(problems=left)
            for model in self.models
            if (left := tuple(one for one in model.problems if one not in problems)) or not model.problems
        )
        buckets = {one: row for one, row in self.buckets.items() if one not in problems}
        return BuildPlan(MappingProxyType(buckets), tuple(models))


def plan(shapes: Iterable[LayerShard]) -> BuildPlan:
    """The distinct problems of ``shapes``, their buckets, and the models they serve.

    A shard has, for each of its dtypes, layouts and ops, a problem for each of its two GEMMs, and of the forward
    and dX one more for each, with the rows moved on the way. Its buckets are the powers of two that its
    M = tokens * k / ep falls in, from the least to the most tokens, the same for every op. Of a forward with a gate
    there is GEMM 1 with silu in its epilogue, too, in the larger buckets, unless the model has another activation.
    Of quantised weights there is what stands in for them, too: a capability has the one or the other (``planned_on``).
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
        MappingProxyType({one: tuple(sorted(buckets[one])) for one in sorted(buckets, key=lambda one: one.sort_key)}),
        tuple(
            Model(*key, problems=tuple(sorted(models[key], key=lambda one: one.sort_key)))
            for key in sorted(models, key=lambda key: (*key[:4], key[4].value))
        ),
        shapes,
    )


def problems_of(shape: LayerShard, dtype: DType) -> Iterator[Problem]:
    """What one shard computes in one dtype; ``spec.code_of`` says which forms of a call share a problem.

    dW of w [E, K, N] is dW of w [E, N, K] with x and dy, N and K exchanged, and is planned as that.
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
    """The forward and dX of codes as the checkpoint has them, and of those that are put in order: see ``planned_on``.

    For a forward of the latter rows are gathered beforehand, so it is as if nothing gathered them.
    """
    for op in (Op.FORWARD, Op.DX):
        for layout, gemms in ((Layout.NK, shape.gemms(dtype)), (Layout.STORED, shape.gemms())):
            for gemm, moves in zip(gemms, _MOVES[op], strict=True) if op in shape.ops else ():
                before = layout is Layout.NK and op is Op.FORWARD
                for fusion in (Fusion.NONE, Fusion.SCATTER if before else code_of(op, moves)):
                    yield Problem(op, dtype, gemm.E, gemm.N, gemm.K, layout, fusion)


def _gated(gemm: LayerGemm, dtype: DType, layout: Layout) -> Iterator[Problem]:
    """GEMM 1 with silu in its epilogue as ``moe_mlp`` runs it, rows gathered on load or before, if there is code.

    Code needs whole 16 bytes a row of y too. w [E, K, N] is of models with other activations.
    """
    problem = Problem(Op.FORWARD, dtype, gemm.E, gemm.N, gemm.K, layout, Fusion.SILU)
    able = dtype in _GATED_DTYPES and layout is Layout.NK and gemm.E <= MAX_EXPERTS
    if able and has_aligned_rows(problem) and has_aligned_rows(problem._replace(N=gemm.N // 2)):
        yield problem
        yield problem._replace(fusion=Fusion.SILU | Fusion.GATHER)


def unaligned(shapes: Iterable[LayerShard]) -> Iterator[str]:
    """What to tell of shards whose weights have rows that are no multiples of 16 bytes: a line each.

    Only the fallback kernels, which assume nothing of a row, run there.
    """
    for shape in shapes:
        found: dict[str, None] = {}
        for dtype in shape.dtypes:
            for gemm in shape.gemms(dtype):
                if not has_aligned_rows(Problem(Op.FORWARD, dtype, gemm.E, gemm.N, gemm.K)):
                    found[f"{gemm.role} (N={gemm.N}, K={gemm.K})"] = None
        if not found:
            continue
        whole = ALIGNMENT_BYTES // min(dtype.itemsize for dtype in shape.dtypes)
        degrees = [tp for tp in range(1, shape.tp) if shape.I % tp == 0 and (shape.I // tp) % whole == 0]
        better = f"tp={','.join(map(str, degrees))}" if degrees and shape.H % whole == 0 else "padded weights"
        yield (
            f"{shape}: rows of {' and '.join(found)} are no multiples of {whole} elements (16 bytes): "
            f"only fallback kernels, which are slower, run them; {better} would have none"
        )


def gated_buckets(problem: Problem, buckets: Iterable[int]) -> tuple[int, ...]:
    """Those of ``buckets`` in which silu in the epilogue may pay."""
    least = max(_GATED_ROWS, _GATED_ROWS_PER_EXPERT * problem.E)
    return tuple(bucket for bucket in buckets if bucket >= least)


def planned_on(plan: BuildPlan, sms: Collection[int], pool: Pool | None = None) -> BuildPlan:
    """The plan of some capabilities.

    It is less what stands in for weights that all of them have code for, less the weights that none has code for, and
    less the optional problems that none has code for.
    """
    space = pool or Pool()
    shapes = shapes_on(plan.shapes, sms, space)
    made = _planned(shapes) if shapes else plan
    coded = _coded(space)
    replaced = {
        one for shape, dtype in _padded(shapes) for one in problems_of(shape, dtype) if one.layout is Layout.STORED
    }
    idle = {
        one
        for one in made.problems
        if (optional(one) or one.dtype.quantised) and not any(_runs(one, sm, coded, replaced) for sm in sms)
    }
    return replace(made.without(idle) if idle else made, shapes=plan.shapes)


def _coded(space: Pool) -> Callable[[Family, int, int], bool]:
    """Of (family, E, sm) whether there is code: problems are many, and their families few."""
    return functools.cache(lambda family, E, sm: has_candidates(family, E, sm, space))


def _padded(shapes: Iterable[LayerShard]) -> Iterator[tuple[LayerShard, DType]]:
    """The shards, and the formats, in which the width I/tp is padded so that the weights can be prepared."""
    for shape in shapes:
        for dtype in dict.fromkeys((*shape.dtypes, *shape.instead)):
            if shape.padded_width(dtype) != shape.width:
                yield shape, dtype


def padded(shapes: Iterable[LayerShard], sms: Collection[int]) -> Iterator[str]:
    """What to report of shards whose quantised weights are planned in a padded width: a line for each width."""
    coded = _coded(Pool())
    found: dict[tuple[str, int, int], dict[str, None]] = {}
    for shape, dtype in _padded(shapes):
        forward = Family(Op.FORWARD, dtype, Layout.NK, Fusion.NONE)
        if any(coded(forward, shape.experts_per_rank, sm) for sm in sms):
            name = dtype.value.removesuffix("_a16")
            found.setdefault((name, shape.width, shape.padded_width(dtype)), {})[f"{shape.name} tp={shape.tp}"] = None
    for (name, width, wide), shards in found.items():
        yield (
            f"{', '.join(shards)}: planned with I/tp={width} padded to {wide} ({wide / width - 1:.1%} more memory), so "
            f"that {name} weights can be prepared: vLLM's plug-in pads them"
        )


def _runs(
    problem: Problem, sm: int, coded: Callable[[Family, int, int], bool], replaced: Collection[Problem] = ()
) -> bool:
    """Whether a capability has code for an optional problem. Codes are put in order for the forward that wants it.

    ``replaced``: problems of codes as they are stored whose weights are padded and put in order instead.
    """
    if not coded(Family.of(problem), problem.E, sm):
        return False
    dtype = problem.dtype
    if not dtype.quantised:
        return True
    forward = Family(Op.FORWARD, dtype, Layout.NK, Fusion.NONE)
    able = problem in replaced or prepares(dtype, problem.N, problem.K)
    ordered = able and coded(forward, problem.E, sm)
    return ordered == (problem.layout is Layout.NK)


def shapes_on(shapes: Iterable[LayerShard], sms: Collection[int], pool: Pool | None = None) -> tuple[LayerShard, ...]:
    """The shards with what is built of them on these capabilities, told from what each has code for."""
    coded = _coded(pool or Pool())

    def resolved(shape: LayerShard) -> LayerShard:
        wanted = {dtype: {(Family.of(one), one.E) for one in problems_of(shape, dtype)} for dtype in shape.dtypes}
        able = {sm: [dtype for dtype, forms in wanted.items() if any(coded(*one, sm) for one in forms)] for sm in sms}
        there = [dtype for dtype in shape.dtypes if any(dtype in row for row in able.values())]
        more = shape.instead if not all(able.values()) else ()
        return replace(shape, dtypes=(*there, *more), instead=())

    return tuple(resolved(shape) if shape.instead else shape for shape in shapes)


def _too_many(shape: LayerShard) -> bool:
    return shape.experts_per_rank > MAX_EXPERTS


def without_code(shapes: Iterable[LayerShard]) -> Iterator[str]:
    """What is wrong with shards of codes that were asked for and that no capability has code for: a line each."""
    for shape in (one for one in shapes if not one.instead):
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
    """What to tell of the shards that are built in their checkpoint's format unasked: a line each."""
    lacking: dict[tuple[str, str], dict[str, dict[str, None]]] = {}
    partly: dict[tuple[str, str, str], dict[str, None]] = {}
    for shape in (one for one in shapes if one.instead):
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
