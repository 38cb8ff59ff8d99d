"""From candidates and what a journal says of them to a bundle. Pure: the same of both give the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ...artifacts.errors import CompileError, InputError
from ...artifacts.records.bundle import Bundle
from ...artifacts.records.target import LocalGpu
from ..journal.file import Contents
from ..journal.timings import Timings
from ..plan.families import CONFIG_LIMIT, Family, families, named, optional
from ..plan.plan import BuildPlan
from .candidates import Candidates
from .choices import Chosen, choose
from .incumbents import Running, RunsOn

Ships = Callable[[Contents], Chosen]  # what would ship by a journal


def measured_bundle(
    plan: BuildPlan, candidates: Candidates, contents: Contents, runs: RunsOn | None = None
) -> Bundle:  # fmt: skip
    """The bundle of a plan: ``candidates``, and what a journal says of them. ``runs`` tells what runs today.

    Raises
    ------
    InputError
        if the journal is of another capability, or of other code.
    CompileError
        if no variant is left for a problem.
    """
    evidence = evidence_for(plan, candidates, contents)
    running = running_on(contents, runs)
    return assembled(plan, candidates, choose_from(plan, candidates, evidence, running=running), evidence, running)


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
    known = {one.variant.cubin_sha256 for one in candidates.every}
    timed = [sha for cell in evidence.cells.values() for sha in cell.times_ns]
    if timed and known.isdisjoint(timed):
        raise InputError(
            f"{where}: not one of its {len(set(timed))} variants is among the candidates: they were compiled by "
            "another Triton or pretuned. Name what was measured with --candidates FILE"
        )
    return evidence


def shipping(
    plan: BuildPlan, candidates: Candidates, configs: int = CONFIG_LIMIT, runs: RunsOn | None = None
) -> Ships:  # fmt: skip
    """What would ship of these candidates; ``runs`` tells what runs today."""

    def ships(contents: Contents) -> Chosen:
        evidence = Timings.of(contents)
        return choose_from(plan, candidates, evidence, configs, running_on(contents, runs))

    return ships


def running_on(contents: Contents, runs: RunsOn | None) -> Running | None:
    """What runs today on the GPU that a journal is of."""
    return None if runs is None else runs(LocalGpu(contents.header.sm, contents.header.gpu))


def choose_from(
    plan: BuildPlan, candidates: Candidates, evidence: Timings | None, configs: int = CONFIG_LIMIT,
    running: Running | None = None,
) -> Chosen:  # fmt: skip
    """What ships: a variant that failed on a GPU never does. ``running`` is what runs today, where it is known."""
    failed = evidence.failed if evidence else {}
    sound = [one for one in candidates.every if one.variant.cubin_sha256 not in failed]
    own = sum(one.variant.cubin_sha256 not in failed for one in candidates.compiled)
    there = {Family.of(one.variant) for one in sound}
    for family, members in families(plan.problems).items():
        if family not in there and not optional(family):
            listed = "\n".join(f"  {failure.reason}" for failure in list(failed.values())[:5])
            raise CompileError(
                f"{candidates.target}: not one variant of {named(members)} works on the GPU. What went wrong:\n{listed}"
            )
    return choose(plan, sound, candidates.target.sm, evidence, configs, own=own, running=running or {})


def assembled(
    plan: BuildPlan, candidates: Candidates, chosen: Chosen, evidence: Timings | None, running: Running | None = None
) -> Bundle:
    """The bundle of what was chosen, which says what it was held against."""
    used = sorted({choice.gpu for row in chosen.choices.values() for choice in row if choice.gpu is not None})
    gpus = tuple(evidence.gpus[gpu] for gpu in used) if evidence else ()
    choices = {
        problem: tuple(choice if choice.gpu is None else replace(choice, gpu=used.index(choice.gpu)) for choice in row)
        for problem, row in chosen.choices.items()
    }
    min_driver, producer, kernels = candidates.provenance_of(chosen.variants)
    before = {*(evidence.held_against if evidence else ()), *(one.bundle for one in (running or {}).values())}
    return Bundle(
        target=candidates.target,
        min_driver=min_driver,
        producer=producer.with_held_against(digest.hex() for digest in before),
        kernels=kernels,
        gpus=gpus,
        variants=tuple(one.variant for one in chosen.variants),
        cubins=tuple(one.cubin for one in chosen.variants),
        choices=choices,
        models=plan.without(plan.buckets.keys() - choices.keys()).models,
    )
