"""Compare two bundles: models, problems, choices, variants, sizes."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...artifacts.records import Bundle, Choice, Gpu, Model, Problem, Source, Variant, same_gpu
from ..plan.families import Family

Facts = dict[str, tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Side:
    """A choice with its variant, GPU and plan written out; ``runner_up`` is its identity and time.

    With ``torch`` torch's grouped_mm runs the cell, and ``time_ns`` is its time.
    """

    variant: Variant
    source: Source
    time_ns: int
    gpu: Gpu | None
    runner_up: tuple[object, ...] | None = None
    torch: bool = False
    plan: tuple[tuple[object, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Change:
    """A cell in both bundles that differs: measured on one GPU, or in each on a GPU that the other lacks."""

    problem: Problem
    bucket: int
    old: Side
    new: Side

    @property
    def what(self) -> tuple[str, ...]:
        """The parts that changed: variant, code, source, gpu, time, torch, runner-up or plan."""
        old, new = self.old, self.new
        parts = {
            "variant": identity(old.variant) != identity(new.variant),
            "code": identity(old.variant) == identity(new.variant) and old.variant != new.variant,
            "source": old.source is not new.source,
            "gpu": old.gpu != new.gpu,
            "time": old.time_ns != new.time_ns,
            "torch": old.torch != new.torch,
            "runner-up": old.runner_up != new.runner_up,
            "plan": old.plan != new.plan,
        }
        return tuple(name for name, differs in parts.items() if differs)


@dataclass(frozen=True, slots=True)
class Changes:
    """All differences between ``old`` and ``new``; every field is empty if there are none.

    ``recompiled`` variants have equal configs and fusions on both sides, and other code. ``choices_added`` and
    ``choices_removed`` count choices, of problems in both bundles, without a counterpart on the other side.
    """

    facts: Facts
    models_added: tuple[Model, ...]
    models_removed: tuple[Model, ...]
    models_changed: tuple[tuple[Model, Model], ...]
    problems_added: tuple[Problem, ...]
    problems_removed: tuple[Problem, ...]
    choices_added: int
    choices_removed: int
    choices: tuple[Change, ...]
    variants_added: tuple[Variant, ...]
    variants_removed: tuple[Variant, ...]
    recompiled: tuple[tuple[Variant, Variant], ...]
    cubins_added: tuple[int, int]
    cubins_removed: tuple[int, int]

    @property
    def differ(self) -> bool:
        """True if there is any difference."""
        return any(
            (
                self.facts,
                self.models_added,
                self.models_removed,
                self.models_changed,
                self.problems_added,
                self.problems_removed,
                self.choices_added,
                self.choices_removed,
                self.choices,
                self.variants_added,
                self.variants_removed,
                self.recompiled,
            )
        )


def identity(variant: Variant) -> tuple[object, ...]:
    """Everything that identifies a variant, except its compiled code."""
    return (variant.kernel, Family.of(variant), variant.alignment, variant.max_experts, variant.config)


def diff(old: Bundle, new: Bundle) -> Changes:
    """The changes from ``old`` to ``new``. Variants are equal if every field is, whatever their numbers."""
    models_old, models_new = _models(old), _models(new)
    before, after = dict.fromkeys(old.variants), dict.fromkeys(new.variants)
    removed = [variant for variant in before if variant not in after]
    added = [variant for variant in after if variant not in before]
    recompiled, gone, come = _paired(removed, added)
    cubins_old = dict(zip((variant.cubin_sha256 for variant in old.variants), old.cubins, strict=True))
    cubins_new = dict(zip((variant.cubin_sha256 for variant in new.variants), new.cubins, strict=True))
    both = [problem for problem in old.choices if problem in new.choices]
    pairs = {problem: _beside(old, old.choices[problem], new, new.choices[problem]) for problem in both}
    alike = sum(map(len, pairs.values()))
    return Changes(
        facts=_facts(old, new),
        models_added=tuple(model for key, model in models_new.items() if key not in models_old),
        models_removed=tuple(model for key, model in models_old.items() if key not in models_new),
        models_changed=tuple(
            (model, models_new[key])
            for key, model in models_old.items()
            if key in models_new
            and (model.top_k, set(model.problems)) != (models_new[key].top_k, set(models_new[key].problems))
        ),
        problems_added=tuple(problem for problem in new.choices if problem not in old.choices),
        problems_removed=tuple(problem for problem in old.choices if problem not in new.choices),
        choices_added=sum(len(new.choices[problem]) for problem in both) - alike,
        choices_removed=sum(len(old.choices[problem]) for problem in both) - alike,
        choices=tuple(
            Change(problem, now.bucket, *sides)
            for problem, row in pairs.items()
            for was, now in row
            if (sides := (_side(old, was), _side(new, now)))[0] != sides[1]
        ),
        variants_added=tuple(come),
        variants_removed=tuple(gone),
        recompiled=tuple(recompiled),
        cubins_added=_count(cubins_new, cubins_old),
        cubins_removed=_count(cubins_old, cubins_new),
    )


def time_ratio(changes: Sequence[Change]) -> float:
    """The geometric mean of new over old times."""
    return statistics.geometric_mean(change.new.time_ns / change.old.time_ns for change in changes)


def _beside(old: Bundle, before: Sequence[Choice], new: Bundle, after: Sequence[Choice]) -> list[tuple[Choice, Choice]]:
    """Pair the choices of one problem in the two bundles, in the order of ``new``.

    In a bucket, choices of the same GPU are paired first. The others, modelled or of other GPUs, are paired in order.
    """
    waiting: dict[int, list[Choice]] = {}
    for was in before:
        waiting.setdefault(was.bucket, []).append(was)
    pairs: dict[Choice, Choice] = {}
    for whatever_gpu in (False, True):
        for choice in (choice for choice in after if choice not in pairs):
            gpu, there = choice.measured_on(new.gpus), waiting.get(choice.bucket, [])
            like = (was for was in there if whatever_gpu or same_gpu(was.measured_on(old.gpus), gpu))
            partner = next(like, None)
            if partner is not None:
                there.remove(partner)
                pairs[choice] = partner
    return [(pairs[choice], choice) for choice in after if choice in pairs]


def _side(bundle: Bundle, choice: Choice) -> Side:
    return Side(
        bundle.variants[choice.variant],
        choice.source,
        choice.torch_ns or choice.time_ns,
        choice.measured_on(bundle.gpus),
        _runner_up(bundle, choice),
        choice.torch_ns is not None,
        tuple(
            (*row[:3], None if row.variant is None else identity(bundle.variants[row.variant])) for row in choice.plan
        ),
    )


def _runner_up(bundle: Bundle, choice: Choice) -> tuple[object, ...] | None:
    if choice.runner_up is None:
        return None
    return (*identity(bundle.variants[choice.runner_up]), choice.runner_up_ns)


def _models(bundle: Bundle) -> dict[tuple[object, ...], Model]:
    by_key: dict[tuple[object, ...], Model] = {}
    for model in bundle.models:  # a merged bundle may have two models that differ only in k
        key = (model.name, model.tp, model.ep, model.dtype)
        by_key[(*key, model.top_k) if key in by_key else key] = model
    return by_key


def _paired(
    removed: list[Variant], added: list[Variant]
) -> tuple[list[tuple[Variant, Variant]], list[Variant], list[Variant]]:
    """(recompiled, only old, only new): pair the variants of equal identity, in their bundles' order."""
    waiting: dict[tuple[object, ...], list[Variant]] = {}
    for variant in removed:
        waiting.setdefault(identity(variant), []).append(variant)
    pairs, come = [], []
    for variant in added:
        partners = waiting.get(identity(variant))
        if partners:
            pairs.append((partners.pop(0), variant))
        else:
            come.append(variant)
    gone = {id(variant) for rest in waiting.values() for variant in rest}
    return pairs, [variant for variant in removed if id(variant) in gone], come


def _count(these: Mapping[bytes, bytes], those: Mapping[bytes, bytes]) -> tuple[int, int]:
    """(cubins, bytes) in ``these`` and not in ``those``."""
    cubins = [cubin for digest, cubin in these.items() if digest not in those]
    return len(cubins), sum(map(len, cubins))


def _facts(old: Bundle, new: Bundle) -> Facts:
    def facts_of(bundle: Bundle) -> dict[str, str]:
        return {
            "target": str(bundle.target),
            "min_driver": str(bundle.min_driver),
            "pretuned": bundle.producer.pretuned,
            "triton": bundle.producer.triton,
            "ptxas": bundle.producer.ptxas,
            "options": " ".join(bundle.producer.compile_options),
            "compared_with": " ".join(bundle.producer.held_against),
            "kernels": ", ".join(
                f"{kernel.name} {kernel.revision} {kernel.source_sha256.hex()[:12]}" for kernel in bundle.kernels
            ),
            "gpus": ", ".join(f"{gpu.name} (driver {gpu.driver})" for gpu in bundle.gpus),
        }

    before, after = facts_of(old), facts_of(new)
    return {name: (before[name], after[name]) for name in before if before[name] != after[name]}
