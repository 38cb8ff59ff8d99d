"""Cut a bundle down to the problems of some models, and to the fallbacks that run any other shape of their ops."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...artifacts.errors import InputError
from ...artifacts.records.bundle import Bundle, Choice
from ...artifacts.records.problem import Op, Problem
from ..plan.families import Family, Pool, row_kernel_specs, ships_unchosen
from ..plan.plan import BuildPlan, planned_on
from .assemble import BundleChoice, Provenance, VariantTable, assemble, united


@dataclass(frozen=True, slots=True)
class Pruned:
    """The smaller bundle. ``missing`` are the cells of the plan that the bundle does not have."""

    bundle: Bundle
    missing: Mapping[Problem, tuple[int, ...]]


def prune(bundle: Bundle, plan: BuildPlan, where: str) -> Pruned:
    """Keep the problems and buckets of ``plan``, the variants chosen for them, and fallbacks and row kernels.

    The result is what a build for the plan alone would hold, with this bundle's choices. Its models are the plan's.

    Raises
    ------
    InputError
        if the bundle has none of the plan's problems.
    """
    wanted = planned_on(plan, (bundle.target.sm,)).buckets
    codes = VariantTable([bundle])
    claims: dict[Problem, list[BundleChoice]] = {}
    missing: dict[Problem, tuple[int, ...]] = {}
    for problem, buckets in plan.buckets.items():
        claimed = [codes.claim(bundle, choice) for choice in _choices(bundle, problem) if choice.bucket in buckets]
        if claimed:
            claims[problem] = claimed
        lacking = tuple(bucket for bucket in buckets if bucket not in {choice.bucket for choice in claimed})
        if problem in wanted and lacking:
            missing[problem] = lacking
    if not claims:
        raise InputError(
            f"bundle {where!r} has a choice for none of the {len(wanted)} problems of these models; it was "
            f"built for {_built_for(bundle, plan)}. aot build makes what is missing"
        )
    passes = row_kernel_specs(claims, bundle.target.sm, Pool())
    families = {Family.of(problem) for problem in claims} | {Family.of(spec) for spec in passes}
    models = [
        model._replace(problems=tuple(problem for problem in model.problems if problem in claims))
        for model in plan.models
    ]
    making = Provenance(
        bundle.target,
        bundle.min_driver,
        bundle.producer,
        bundle.kernels,
        united(model for model in models if model.problems),
    )
    fallbacks = [
        place
        for place, code in enumerate(codes.codes)
        if ships_unchosen(code.variant) and Family.of(code.variant) in families
    ]
    return Pruned(assemble(making, codes, claims, fallbacks), missing)


def _choices(bundle: Bundle, problem: Problem) -> tuple[Choice, ...]:
    """The bundle's choices for a product, under either of its names."""
    names = (name for name in (problem, problem.transposed) if name is not None)
    return next((bundle.choices[name] for name in names if name in bundle.choices), ())


def _built_for(bundle: Bundle, plan: BuildPlan) -> str:
    """The bundle's models by name; those that the plan names too have their sharding, ops and rows."""
    names = {model.name for model in plan.models}
    same = [model for model in bundle.models if model.name in names]
    if not same:
        return ", ".join(sorted({model.name for model in bundle.models})) or "no model"
    lines = []
    for model in same:
        ops = ", ".join(op.value for op in Op if any(problem.op is op for problem in model.problems))
        buckets = [choice.bucket for problem in model.problems for choice in bundle.choices.get(problem, ())]
        rows = f", M near {min(buckets)}..{max(buckets)}" if buckets else ""
        lines.append(f"{model.name} tp={model.tp} ep={model.ep} {model.dtype.value} ({ops}{rows})")
    return "; ".join(lines)
