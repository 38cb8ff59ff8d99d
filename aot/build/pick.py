"""Choose the contents of a bundle: prune the compiled variants, measure, compare with the baseline, choose."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...artifacts import codec
from ...artifacts.errors import CompileError, InputError
from ...artifacts.publishing import publish
from ...artifacts.records import Bundle, LocalGpu, Variant
from ...kernels.arch import Arch, arch_of
from ...kernels.cost import rejection
from ...kernels.rowops import RowOpSpec
from ...kernels.spec import Spec
from ..choose.bundle import Ships, assembled, choose_from, evidence_for, shipping
from ..choose.candidates import Candidates
from ..choose.choices import Chosen
from ..choose.incumbents import BaselineComparison, Incumbents, timed_before
from ..compile.pool import CompileResult
from ..compile.triton import Compiled
from ..journal.file import read_journal
from ..journal.timings import Timings, cell_of
from ..plan.families import (
    CONFIG_LIMIT,
    Family,
    Pool,
    by_code,
    families,
    named,
    optional,
    row_kernel_specs,
    serves,
    specs,
    unmeasured_specs,
)
from ..plan.plan import BuildPlan
from ..process.child import scratch_folder
from ..tune.tuner import Entrants, Outcome
from .options import BuildOptions, Dropped, Observers

Reject = Callable[[Variant, Arch], str | None]


@dataclass(frozen=True, slots=True)
class Shippable:
    """The variants that can ship, those that can't, and the reasons by family."""

    candidates: Candidates
    dropped: tuple[Dropped, ...] = ()
    reasons: Mapping[Family, Sequence[str]] = field(default_factory=dict)

    def demand_every_family(self, plan: BuildPlan, candidates: Candidates | None = None) -> None:
        """Raise CompileError with the reasons if a problem has no variant in ``candidates`` (default: the pool's)."""
        pool = candidates or self.candidates
        able: dict[Family, list[Variant]] = {}
        for code in pool.all_variants:
            able.setdefault(Family.of(code.variant), []).append(code.variant)
        for family, members in families(plan.problems).items():
            variants = able.get(family, ())
            lacking = [member for member in members if not any(serves(variant, member) for variant in variants)]
            if lacking and not optional(family):
                where = f" for E={max(member.E for member in lacking)}" if variants else ""
                listed = "\n".join(f"  {reason}" for reason in _shared(self.reasons.get(family, ()))[:5])
                raise CompileError(
                    f"sm_{pool.target.sm}: not one variant of {named(lacking)} can be used{where}. What went wrong:\n"
                    f"{listed}"
                )


def _shared(reasons: Sequence[str]) -> list[str]:
    """``variant: reason`` lines, each reason once with the number of variants that share it."""
    variants: dict[str, list[str]] = {}
    for text in reasons:
        variant, colon, reason = text.partition(": ")
        variants.setdefault(colon + reason, []).append(variant)
    return [f"{first}{f' and {len(more)} more' if more else ''}{reason}" for reason, (first, *more) in variants.items()]


@dataclass(frozen=True, slots=True)
class Picked:
    """A chosen bundle, the measuring that led to it, and its comparison with the baseline."""

    bundle: Bundle
    chosen: Chosen
    outcome: Outcome | None = None
    comparison: BaselineComparison | None = None


def usable(
    plan: BuildPlan,
    sm: int,
    space: Pool,
    results: Sequence[CompileResult],
    reject: Reject = rejection,
    *,
    low_rank: bool = False,
) -> Shippable:
    """Split the compiled variants (``to_compile``) into those that can ship and those that can't, with reasons."""
    by_spec: dict[Spec | RowOpSpec, Compiled] = {}
    dropped: list[Dropped] = []
    reasons: dict[Family, dict[str, None]] = {}
    wanted, beside = specs(plan.problems, sm, space), row_kernel_specs(plan.problems, sm, space)
    wanted += unmeasured_specs(plan.problems, sm, space, low_rank=low_rank)
    groups: list[tuple[Spec | RowOpSpec, ...]] = [*by_code(wanted, sm), *((spec,) for spec in beside)]
    for result, group in zip(results, groups, strict=True):
        code, reason, kind = result.compiled, result.reason, "failed"
        if code is not None:
            reason, kind = reject(code.variant, arch_of(sm)) or "", "pruned"
            if not reason:
                by_spec |= {spec: code.relabelled(spec) for spec in group}
                continue
        dropped.append(Dropped(result.job.spec, kind, reason))
        for spec in group:
            reasons.setdefault(Family.of(spec), {})[reason] = None
    compiled = tuple(by_spec[spec] for spec in (*wanted, *beside) if spec in by_spec)
    reason_lists = {family: tuple(some) for family, some in reasons.items()}
    return Shippable(Candidates.made_here(sm, compiled), tuple(dropped), reason_lists)


def picked(plan: BuildPlan, path: Path, there: Shippable, options: BuildOptions, watch: Observers) -> Picked:
    """Choose the bundle that goes to ``path``, measuring first if asked to and possible.

    If it is measured now, kernels of the bundles that the runtime finds take part. If a journal has the times, the
    kernels that took part then do. If nothing is measured, the measured choices of installed bundles are taken over,
    and the rest is modelled with the help of similar problems in those bundles.

    Raises
    ------
    CompileError
        if a family is left without any variant.
    """
    sm, candidates = there.candidates.target.sm, there.candidates
    journal = options.journal or options.out / f"{options.name}-sm{sm}.journal"
    outcome = running = None
    if sm in options.measure:
        incumbents = options.incumbents(path)
        all_candidates = candidates.with_others(incumbents.codes(plan.problems, sm))
        there.demand_every_family(plan, all_candidates)
        with published_candidates(plan, all_candidates, incumbents, options.configs) as (file, ships, entrants):
            outcome = options.tune(plan.buckets, file, journal, ships, entrants, watch.tune)
        if outcome is None:
            there.demand_every_family(plan)
        else:
            candidates, running = all_candidates, incumbents.running(plan.buckets, LocalGpu(outcome.sm, outcome.gpu))
    evidence = None
    if not options.modelled and (outcome or options.journal or journal.exists()):
        candidates, evidence = _from_journal(plan, path, candidates, journal, outcome, options, watch)
    taken = around = None
    if outcome is None and options.take_over:
        incumbents = options.incumbents(path)
        taken = incumbents.measured(plan.buckets, sm)
        around = incumbents.neighbourhood(sm) if evidence is None else None
        candidates = candidates.with_codes(taken.codes) if taken else candidates
    chosen = choose_from(plan, candidates, evidence, options.configs, running, taken, around)
    bundle = assembled(plan, candidates, chosen, evidence, running, taken, around)
    return Picked(bundle, chosen, outcome, BaselineComparison.of(bundle, evidence, running))


@contextlib.contextmanager
def published_candidates(
    plan: BuildPlan, all_candidates: Candidates, incumbents: Incumbents, configs: int = CONFIG_LIMIT
) -> Iterator[tuple[Path, Ships, Entrants]]:
    """Yield a file of all candidates, a function that lists the variants to ship, and the bundles that take part."""
    sm, runs = all_candidates.target.sm, incumbents.on(plan.buckets)
    with scratch_folder() as scratch:
        file = scratch / f"candidates-sm{sm}.msgpack"
        publish(file, codec.encode(assembled(plan, all_candidates, Chosen(all_candidates.all_variants, {}, ()), None)))
        yield file, shipping(plan, all_candidates, configs, runs), Entrants(runs=runs, around=incumbents.around)


@contextlib.contextmanager
def with_installed(plan: BuildPlan, candidates: Candidates) -> Iterator[tuple[Path, Ships, Entrants]]:
    """``published_candidates`` for candidates compiled before, and all bundles that the runtime finds."""
    incumbents = Incumbents.on_search_path()
    all_candidates = candidates.with_others(incumbents.codes(plan.problems, candidates.target.sm))
    with published_candidates(plan, all_candidates, incumbents) as prepared:
        yield prepared


def _from_journal(
    plan: BuildPlan,
    path: Path,
    candidates: Candidates,
    journal: Path,
    outcome: Outcome | None,
    options: BuildOptions,
    watch: Observers,
) -> tuple[Candidates, Timings | None]:
    """Read a journal: the times, and the candidates with the baseline kernels that were timed with them."""
    try:
        contents = read_journal(journal)
        if contents.damaged:
            watch.on_note(f"note: journal '{journal}': {contents.damaged} damaged records are left out")
        before = frozenset() if outcome else timed_before(contents)
        used = candidates
        if before:
            used = candidates.with_others(options.incumbents(path).codes(plan.problems, candidates.target.sm)).only(
                before
            )
        evidence = evidence_for(plan, used, contents, f"journal '{journal}'")
    except InputError as error:
        if outcome or options.journal:
            raise
        watch.on_note(f"note: not used: {error}")  # a journal of another build in this directory
        return candidates, None
    wanted = {cell_of(problem, bucket) for problem, buckets in plan.buckets.items() for bucket in buckets}
    if options.journal and evidence.cells and wanted.isdisjoint(evidence.cells):
        watch.on_note(
            f"note: journal '{journal}': none of the {len(evidence.cells)} cells measured there is of these models: "
            "all is modelled"
        )
    return used, evidence
