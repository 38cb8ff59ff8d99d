"""What a bundle holds: what can ship of the compiled, measured and held against what runs today, and chosen."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ...artifacts.errors import CompileError, InputError
from ...artifacts.files.publish import publish
from ...artifacts.format import codec
from ...artifacts.records.bundle import Bundle, Variant
from ...artifacts.records.target import LocalGpu
from ...kernels.contract.spec import Spec
from ...kernels.cost.resources import rejection
from ...kernels.hardware.arch import Arch, arch_of
from ...kernels.rowops import RowOpSpec
from ..choose.bundle import Ships, assembled, choose_from, evidence_for, shipping
from ..choose.candidates import Candidates
from ..choose.choices import Chosen
from ..choose.held_against import HeldAgainst, timed_before
from ..choose.incumbents import Incumbents
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
    low_rank_specs,
    named,
    optional,
    pass_specs,
    serves,
    specs,
)
from ..plan.plan import BuildPlan
from ..process.scratch import scratch_folder
from ..tune.tuner import Entrants, Outcome
from .options import BuildOptions, Observers
from .summary import Dropped

Reject = Callable[[Variant, Arch], str | None]


@dataclass(frozen=True, slots=True)
class Shippable:
    """What can ship, what can't, and of each family the reasons."""

    candidates: Candidates
    dropped: tuple[Dropped, ...] = ()
    reasons: Mapping[Family, Sequence[str]] = field(default_factory=dict)

    def demand_every_family(self, plan: BuildPlan, candidates: Candidates | None = None) -> None:
        """CompileError with the reasons, if a problem of the plan has no variant, in ``candidates`` or what is here."""
        every = candidates or self.candidates
        able: dict[Family, list[Variant]] = {}
        for one in every.every:
            able.setdefault(Family.of(one.variant), []).append(one.variant)
        for family, members in families(plan.problems).items():
            variants = able.get(family, ())
            lacking = [one for one in members if not any(serves(variant, one) for variant in variants)]
            if lacking and not optional(family):
                where = f" for E={max(one.E for one in lacking)}" if variants else ""
                listed = "\n".join(f"  {reason}" for reason in _shared(self.reasons.get(family, ()))[:5])
                raise CompileError(
                    f"sm_{every.target.sm}: not one variant of {named(lacking)} can be used{where}. What went wrong:\n"
                    f"{listed}"
                )


def _shared(reasons: Sequence[str]) -> list[str]:
    """``variant: reason``; a reason that several variants have, once."""
    variants: dict[str, list[str]] = {}
    for one in reasons:
        variant, colon, reason = one.partition(": ")
        variants.setdefault(colon + reason, []).append(variant)
    return [f"{first}{f' and {len(more)} more' if more else ''}{reason}" for reason, (first, *more) in variants.items()]


@dataclass(frozen=True, slots=True)
class Picked:
    """A bundle that was chosen, what was measured for it, and what it was held against."""

    bundle: Bundle
    chosen: Chosen
    outcome: Outcome | None = None
    held_against: HeldAgainst | None = None


def usable(
    plan: BuildPlan,
    sm: int,
    space: Pool,
    results: Sequence[CompileResult],
    reject: Reject = rejection,
    *,
    low_rank: bool = False,
) -> Shippable:
    """What can ship of what was compiled (``to_compile``), and all that can not, each with its reason."""
    found: dict[Spec | RowOpSpec, Compiled] = {}
    dropped: list[Dropped] = []
    reasons: dict[Family, dict[str, None]] = {}
    wanted, beside = specs(plan.problems, sm, space), pass_specs(plan.problems, sm, space)
    wanted += low_rank_specs(plan.problems, sm, space) if low_rank else ()
    groups: list[tuple[Spec | RowOpSpec, ...]] = [*by_code(wanted, sm), *((spec,) for spec in beside)]
    for result, group in zip(results, groups, strict=True):
        code, reason, kind = result.compiled, result.reason, "failed"
        if code is not None:
            reason, kind = reject(code.variant, arch_of(sm)) or "", "pruned"
            if not reason:
                found |= {spec: code.relabelled(spec) for spec in group}
                continue
        dropped.append(Dropped(result.job.spec, kind, reason))
        for spec in group:
            reasons.setdefault(Family.of(spec), {})[reason] = None
    compiled = tuple(found[spec] for spec in (*wanted, *beside) if spec in found)
    told = {family: tuple(some) for family, some in reasons.items()}
    return Shippable(Candidates.made_here(sm, compiled), tuple(dropped), told)


def picked(plan: BuildPlan, path: Path, there: Shippable, options: BuildOptions, watch: Observers) -> Picked:
    """The bundle that goes to ``path``: measured where that is asked for and can be, and chosen.

    Where it is measured now, what the runtime finds takes part. Where a journal tells of it, that which did then.
    Where nothing is measured now, the measured choices of installed bundles are taken over, and the rest is modelled,
    by what those bundles have of like problems, too.

    Raises
    ------
    CompileError
        if a family is left without any variant.
    """
    sm, candidates = there.candidates.target.sm, there.candidates
    journal = options.journal or options.out / f"{options.name}-sm{sm}.journal"
    outcome = running = None
    if sm in options.measure:
        found = options.found(path)
        every = candidates.beside(found.codes(plan.problems, sm))
        there.demand_every_family(plan, every)
        with beside(plan, every, found, options.configs) as (file, ships, entrants):
            outcome = options.tune(plan.buckets, file, journal, ships, entrants, watch.tune)
        if outcome is None:
            there.demand_every_family(plan)
        else:
            candidates, running = every, found.running(plan.buckets, LocalGpu(outcome.sm, outcome.gpu))
    evidence = None
    if not options.modelled and (outcome or options.journal or journal.exists()):
        candidates, evidence = _known(plan, path, candidates, journal, outcome, options, watch)
    taken = around = None
    if outcome is None and options.take_over:
        found = options.found(path)
        taken, around = found.measured(plan.buckets, sm), found.neighbourhood(sm) if evidence is None else None
        candidates = candidates.with_codes(taken.codes) if taken else candidates
    chosen = choose_from(plan, candidates, evidence, options.configs, running, taken, around)
    bundle = assembled(plan, candidates, chosen, evidence, running, taken, around)
    return Picked(bundle, chosen, outcome, HeldAgainst.of(bundle, evidence, running))


@contextlib.contextmanager
def beside(
    plan: BuildPlan, every: Candidates, found: Incumbents, configs: int = CONFIG_LIMIT
) -> Iterator[tuple[Path, Ships, Entrants]]:
    """Yield one file of all candidates, without choices; what would ship; and the bundles that take part."""
    sm, runs = every.target.sm, found.on(plan.buckets)
    with scratch_folder() as scratch:
        file = scratch / f"candidates-sm{sm}.msgpack"
        publish(file, codec.encode(assembled(plan, every, Chosen(every.every, {}, ()), None)))
        yield file, shipping(plan, every, configs, runs), Entrants(runs=runs, around=found.around)


@contextlib.contextmanager
def with_what_is_there(plan: BuildPlan, candidates: Candidates) -> Iterator[tuple[Path, Ships, Entrants]]:
    """``beside``, of candidates that were compiled before and all that the runtime finds."""
    found = Incumbents.found()
    every = candidates.beside(found.codes(plan.problems, candidates.target.sm))
    with beside(plan, every, found) as given:
        yield given


def _known(
    plan: BuildPlan,
    path: Path,
    candidates: Candidates,
    journal: Path,
    outcome: Outcome | None,
    options: BuildOptions,
    watch: Observers,
) -> tuple[Candidates, Timings | None]:
    """What a journal says, of these candidates and, where nothing is measured now, of what took part beside them."""
    try:
        contents = read_journal(journal)
        if contents.damaged:
            watch.on_note(f"note: journal '{journal}': {contents.damaged} damaged records are left out")
        before = frozenset() if outcome else timed_before(contents)
        every = candidates
        if before:
            every = candidates.beside(options.found(path).codes(plan.problems, candidates.target.sm)).only(before)
        evidence = evidence_for(plan, every, contents, f"journal '{journal}'")
    except InputError as error:
        if outcome or options.journal:
            raise
        watch.on_note(f"note: not used: {error}")  # nobody named it: it is of another build in this directory
        return candidates, None
    wanted = {cell_of(problem, bucket) for problem, buckets in plan.buckets.items() for bucket in buckets}
    if options.journal and evidence.cells and wanted.isdisjoint(evidence.cells):
        watch.on_note(
            f"note: journal '{journal}': none of the {len(evidence.cells)} cells measured there is of these models: "
            "all is modelled"
        )
    return every, evidence
