"""From candidates and what a journal says of them to a bundle. Pure: the same of both give the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from ...artifacts.errors import CompileError, InputError
from ...artifacts.records.bundle import Bundle, Choice
from ...artifacts.records.problem import Problem
from ...artifacts.records.target import Gpu, LocalGpu
from ...kernels.plans import with_plans
from ...runtime.dispatch.neighbours import Neighbourhood
from ..compile.triton import Compiled
from ..journal.file import Contents
from ..journal.timings import Timings, cell_of
from ..plan.families import CONFIG_LIMIT, Family, families, named, optional
from ..plan.plan import BuildPlan
from .candidates import Candidates, SameCode
from .choices import Chosen, choose
from .incumbents import Running, RunsOn, TakenOver

Ships = Callable[[Contents], Chosen]  # what would ship by a journal


def measured_bundle(plan: BuildPlan, candidates: Candidates, contents: Contents, runs: RunsOn | None = None) -> Bundle:
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


def shipping(plan: BuildPlan, candidates: Candidates, configs: int = CONFIG_LIMIT, runs: RunsOn | None = None) -> Ships:
    """What would ship of these candidates; ``runs`` tells what runs today."""

    def ships(contents: Contents) -> Chosen:
        evidence = Timings.of(contents)
        return choose_from(plan, candidates, evidence, configs, running_on(contents, runs))

    return ships


def running_on(contents: Contents, runs: RunsOn | None) -> Running | None:
    """What runs today on the GPU that a journal is of."""
    return None if runs is None else runs(LocalGpu(contents.header.sm, contents.header.gpu))


def choose_from(
    plan: BuildPlan,
    candidates: Candidates,
    evidence: Timings | None,
    configs: int = CONFIG_LIMIT,
    running: Running | None = None,
    taken: TakenOver | None = None,
    around: Neighbourhood | None = None,
) -> Chosen:
    """What ships: a variant that failed on a GPU never does. ``running`` is what runs today, where it is known.

    The choices of ``taken`` are taken over as they are, where ``evidence`` has none of the same GPU for the cell. What
    is modelled is modelled for the other cells alone, by what was measured ``around`` them, too.
    """
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
    sm, ran = candidates.target.sm, running or {}
    rows = _taken_rows(plan, sound, evidence, taken) if taken else {}
    if not rows:
        return choose(plan, sound, sm, evidence, configs, own=own, running=ran, around=around)
    ships = {i for row in rows.values() for one in row for i in (one.variant, one.runner_up) if i is not None}
    chosen = choose(
        _left(plan, rows, evidence), sound, sm, evidence, configs, own=own, running=ran, taken=ships, around=around
    )
    return _joined(plan, sound, chosen, rows, _gpus(evidence, taken))


def _gpus(evidence: Timings | None, taken: TakenOver | None) -> tuple[Gpu, ...]:
    """Return the GPUs that choices point into: the evidence's, then those of choices taken over."""
    return tuple(dict.fromkeys((*(evidence.gpus if evidence else ()), *(taken.bundle.gpus if taken else ()))))


def _taken_rows(
    plan: BuildPlan, sound: Sequence[Compiled], evidence: Timings | None, taken: TakenOver
) -> dict[Problem, list[Choice]]:
    """The choices to take over, which point into ``sound`` and ``_gpus``."""
    code, gpus, bundle = SameCode(sound), _gpus(evidence, taken), taken.bundle
    place = [code.place(one) for one in bundle.variants]
    gpu_at = [gpus.index(one) for one in bundle.gpus]
    rows: dict[Problem, list[Choice]] = {}
    for problem in plan.problems:
        for one in bundle.choices.get(problem, ()):
            first, gpu = place[one.variant], one.gpu
            second = None if one.runner_up is None else place[one.runner_up]
            if first is not None and gpu is not None:
                second_ns = None if second is None else one.runner_up_ns
                moved = one._replace(variant=first, runner_up=second, runner_up_ns=second_ns, gpu=gpu_at[gpu], plan=())
                rows.setdefault(problem, []).append(moved)
    return rows


def _left(plan: BuildPlan, rows: Mapping[Problem, Sequence[Choice]], evidence: Timings | None) -> BuildPlan:
    """Return the plan without the cells taken over that the evidence has no times of."""
    left: dict[Problem, tuple[int, ...]] = {}
    for problem, buckets in plan.buckets.items():
        there = {one.bucket for one in rows.get(problem, ())}
        kept = tuple(
            bucket
            for bucket in buckets
            if bucket not in there or (evidence is not None and cell_of(problem, bucket) in evidence.cells)
        )
        if kept:
            left[problem] = kept
    return replace(plan, buckets=MappingProxyType(left))


def _joined(
    plan: BuildPlan,
    sound: Sequence[Compiled],
    chosen: Chosen,
    rows: Mapping[Problem, Sequence[Choice]],
    gpus: Sequence[Gpu],
) -> Chosen:
    """Join new choices and those taken over: measured goes before modelled, and each GPU keeps its own."""
    at = {id(one): i for i, one in enumerate(chosen.variants)}
    choices: dict[Problem, tuple[Choice, ...]] = {}
    cells: set[tuple[Problem, int]] = set()
    taken = 0
    for problem in plan.problems:
        own = chosen.choices.get(problem, ())
        measured = [(one.bucket, gpus[one.gpu]) for one in own if one.gpu is not None]
        over = [
            one._replace(
                variant=at[id(sound[one.variant])],
                runner_up=None if one.runner_up is None else at[id(sound[one.runner_up])],
            )
            for one in rows.get(problem, ())
            if not any(bucket == one.bucket and gpu.is_like(gpus[one.gpu or 0]) for bucket, gpu in measured)
        ]
        there = {one.bucket for one in over}
        row = [one for one in own if one.gpu is not None or one.bucket not in there]
        cells.update((problem, bucket) for bucket in there)
        taken += len(over)
        if row or over:
            choices[problem] = tuple(sorted((*row, *over), key=lambda one: one.sort_key))
    return replace(chosen, choices=choices, taken=taken, taken_cells=frozenset(cells))


def assembled(
    plan: BuildPlan,
    candidates: Candidates,
    chosen: Chosen,
    evidence: Timings | None,
    running: Running | None = None,
    taken: TakenOver | None = None,
    around: Neighbourhood | None = None,
) -> Bundle:
    """Return the bundle of what was chosen, with the digests of the bundles that it was compared with.

    If its choices were modelled by what was measured ``around`` them, those bundles are named, too: the
    runtime then models for the GPU that is there, and ignores choices that were modelled for another.
    """
    used = sorted({choice.gpu for row in chosen.choices.values() for choice in row if choice.gpu is not None})
    every = _gpus(evidence, taken)
    gpus = tuple(every[gpu] for gpu in used)
    choices = {
        problem: tuple(choice if choice.gpu is None else choice._replace(gpu=used.index(choice.gpu)) for choice in row)
        for problem, row in chosen.choices.items()
    }
    min_driver, producer, kernels = candidates.provenance_of(chosen.variants)
    before = {*(evidence.held_against if evidence else ()), *(one.bundle for one in (running or {}).values())}
    before |= taken.sources if taken and chosen.taken else frozenset()
    before |= around.sources if around else frozenset()
    return with_plans(
        Bundle(
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
    )
