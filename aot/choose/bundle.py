"""From candidates and what a journal says of them to a bundle. Pure: the same of both give the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ...artifacts.errors import CompileError, InputError
from ...artifacts.records.bundle import Bundle
from ..journal.file import Contents
from ..journal.timings import Timings
from ..plan.families import CONFIG_LIMIT, Family, families, named, optional
from ..plan.plan import BuildPlan
from .candidates import Candidates
from .choices import Chosen, choose

Ships = Callable[[Contents], Chosen]  # what would ship by a journal


def measured_bundle(plan: BuildPlan, candidates: Candidates, contents: Contents) -> Bundle:
    """The bundle of a plan: ``candidates``, and what a journal says of them.

    Raises
    ------
    InputError
        if the journal is of another capability, or of other code.
    CompileError
        if no variant is left for a problem.
    """
    evidence = evidence_for(plan, candidates, contents)
    return assembled(plan, candidates, choose_from(plan, candidates, evidence), evidence)


def evidence_for(plan: BuildPlan, candidates: Candidates, contents: Contents, where: str = "the journal") -> Timings:
    """A journal's evidence, if it is about these candidates.

    Raises
    ------
    InputError
        if it is not.
    """
    evidence = Timings.of(contents)
    if not candidates.target.runs_on(evidence.sm):
        raise InputError(f"{where}: measured on sm_{evidence.sm}, the candidates are for {candidates.target}")
    known = {one.variant.cubin_sha256 for one in candidates.compiled}
    timed = [sha for cell in evidence.cells.values() for sha in cell.times_ns]
    if timed and known.isdisjoint(timed):
        raise InputError(
            f"{where}: not one of its {len(set(timed))} variants is among the candidates: they were compiled by "
            "another Triton or pretuned. Name what was measured with --candidates FILE"
        )
    return evidence


def shipping(plan: BuildPlan, candidates: Candidates, configs: int = CONFIG_LIMIT) -> Ships:
    """What would ship of these candidates."""
    return lambda contents: choose_from(plan, candidates, Timings.of(contents), configs)


def choose_from(
    plan: BuildPlan, candidates: Candidates, evidence: Timings | None, configs: int = CONFIG_LIMIT
) -> Chosen:
    """What ships: a variant that failed on a GPU never does."""
    failed = evidence.failed if evidence else {}
    sound = [one for one in candidates.compiled if one.variant.cubin_sha256 not in failed]
    there = {Family.of(one.variant) for one in sound}
    for family, members in families(plan.problems).items():
        if family not in there and not optional(family):
            listed = "\n".join(f"  {failure.reason}" for failure in list(failed.values())[:5])
            raise CompileError(
                f"{candidates.target}: not one variant of {named(members)} works on the GPU. What went wrong:\n{listed}"
            )
    return choose(plan, sound, candidates.target.sm, evidence, configs)


def assembled(plan: BuildPlan, candidates: Candidates, chosen: Chosen, evidence: Timings | None) -> Bundle:
    """The bundle of what was chosen."""
    used = sorted({choice.gpu for row in chosen.choices.values() for choice in row if choice.gpu is not None})
    gpus = tuple(evidence.gpus[gpu] for gpu in used) if evidence else ()
    choices = {
        problem: tuple(choice if choice.gpu is None else replace(choice, gpu=used.index(choice.gpu)) for choice in row)
        for problem, row in chosen.choices.items()
    }
    return Bundle(
        target=candidates.target,
        min_driver=candidates.min_driver,
        producer=candidates.producer,
        kernels=candidates.kernels_of(chosen.variants),
        gpus=gpus,
        variants=tuple(one.variant for one in chosen.variants),
        cubins=tuple(one.cubin for one in chosen.variants),
        choices=choices,
        models=plan.without(plan.buckets.keys() - choices.keys()).models,
    )
