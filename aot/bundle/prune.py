"""A bundle cut down to what some models need, and to the fallbacks on which their ops run any other shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ...artifacts.errors import InputError
from ...artifacts.records.bundle import Bundle, Choice
from ...artifacts.records.problem import Op, Problem
from ..plan.families import Family, Pool, pass_specs, ships_unchosen
from ..plan.plan import BuildPlan, planned_on
from .assemble import BundleChoice, Provenance, VariantTable, assemble, united


@dataclass(frozen=True, slots=True)
class Pruned:
    """The smaller bundle. ``missing`` are the cells of the plan that the bundle does not have."""

    bundle: Bundle
    missing: Mapping[Problem, tuple[int, ...]]


def prune(bundle: Bundle, plan: BuildPlan, where: str) -> Pruned:
    """Keep the problems and buckets of ``plan``, what their choices use, and the fallbacks and passes of their ops.

    That is what a build for the plan alone would hold, with this bundle's choices; of its models only the plan's
    are told.

    Raises
    ------
    InputError
        if the bundle has not one of the plan's problems.
    """
    wanted = planned_on(plan, (bundle.target.sm,)).buckets
    codes = VariantTable([bundle])
    claims: dict[Problem, list[BundleChoice]] = {}
    missing: dict[Problem, tuple[int, ...]] = {}
    for problem, buckets in plan.buckets.items():
        kept = [codes.claim(bundle, choice) for choice in _choices(bundle, problem) if choice.bucket in buckets]
        if kept:
            claims[problem] = kept
        lacking = tuple(bucket for bucket in buckets if bucket not in {one.bucket for one in kept})
        if problem in wanted and lacking:
            missing[problem] = lacking
    if not claims:
        raise InputError(
            f"bundle {where!r} has a choice for none of the {len(wanted)} problems of these models; it was "
            f"built for {_built_for(bundle, plan)}. aot build makes what is missing"
        )
    passes = pass_specs(claims, bundle.target.sm, Pool())
    families = {Family.of(problem) for problem in claims} | {Family.of(one) for one in passes}
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
    """The bundle's choices for a product, by whatever name it has them."""
    names = (one for one in (problem, problem.transposed) if one is not None)
    return next((bundle.choices[one] for one in names if one in bundle.choices), ())


def _built_for(bundle: Bundle, plan: BuildPlan) -> str:
    """The bundle's models by name; of those that the plan names too, what tells them from the plan's."""
    names = {model.name for model in plan.models}
    same = [model for model in bundle.models if model.name in names]
    if not same:
        return ", ".join(sorted({model.name for model in bundle.models})) or "no model"
    told = []
    for model in same:
        ops = ", ".join(op.value for op in Op if any(problem.op is op for problem in model.problems))
        buckets = [one.bucket for problem in model.problems for one in bundle.choices.get(problem, ())]
        rows = f", M near {min(buckets)}..{max(buckets)}" if buckets else ""
        told.append(f"{model.name} tp={model.tp} ep={model.ep} {model.dtype.value} ({ops}{rows})")
    return "; ".join(told)
