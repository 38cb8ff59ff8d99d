"""Turn candidates and a journal into a bundle. Equal inputs give equal bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from ...artifacts.errors import CompileError, InputError
from ...artifacts.records import Bundle, Choice, Gpu, LocalGpu, Problem
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

Ships = Callable[[Contents], Chosen]  # what a bundle built from this journal would ship


def measured_bundle(plan: BuildPlan, candidates: Candidates, contents: Contents, runs: RunsOn | None = None) -> Bundle:
    """The bundle of a plan from ``candidates`` and a journal. ``runs`` returns the baseline of a GPU.

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
    """The times in a journal, if they are of these candidates.

    Raises
    ------
    InputError
        if they are not.
    """
    evidence = Timings.of(contents)
    if not candidates.target.runs_on(evidence.sm):
        raise InputError(f"{where}: measured on sm_{evidence.sm}, the candidates are for {candidates.target}")
    available = {code.variant.cubin_sha256 for code in candidates.all_variants}
    timed = [sha for cell in evidence.cells.values() for sha in cell.times_ns]
    if timed and available.isdisjoint(timed):
        raise InputError(
            f"{where}: not one of its {len(set(timed))} variants is among the candidates: they were compiled by "
            "another Triton or pretuned. Name what was measured with --candidates FILE"
        )
    return evidence


def shipping(plan: BuildPlan, candidates: Candidates, configs: int = CONFIG_LIMIT, runs: RunsOn | None = None) -> Ships:
    """Return a function from a journal to what would ship of these candidates; ``runs`` returns the baseline."""

    def ships(contents: Contents) -> Chosen:
        evidence = Timings.of(contents)
        return choose_from(plan, candidates, evidence, configs, running_on(contents, runs))

    return ships


def running_on(contents: Contents, runs: RunsOn | None) -> Running | None:
    """The baseline on the GPU that a journal is of."""
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
    """Choose the variants to ship. A variant that failed on a GPU never ships.

    ``running`` is the baseline, the kernels that run today. The choices of ``taken`` are taken over unchanged, except
    in cells where ``evidence`` has times of the same GPU. Only the other cells are modelled, with the help of cells
    measured ``around`` them.
    """
    failed = evidence.failed if evidence else {}
    sound = [code for code in candidates.all_variants if code.variant.cubin_sha256 not in failed]
    own = sum(code.variant.cubin_sha256 not in failed for code in candidates.compiled)
    there = {Family.of(code.variant) for code in sound}
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
    ships = {i for row in rows.values() for choice in row for i in (choice.variant, choice.runner_up) if i is not None}
    chosen = choose(
        _left(plan, rows, evidence), sound, sm, evidence, configs, own=own, running=ran, taken=ships, around=around
    )
    return _joined(plan, sound, chosen, rows, _gpus(evidence, taken))


def _gpus(evidence: Timings | None, taken: TakenOver | None) -> tuple[Gpu, ...]:
    """The GPUs that choices refer to: the evidence's, then those of choices taken over."""
    return tuple(dict.fromkeys((*(evidence.gpus if evidence else ()), *(taken.bundle.gpus if taken else ()))))


def _taken_rows(
    plan: BuildPlan, sound: Sequence[Compiled], evidence: Timings | None, taken: TakenOver
) -> dict[Problem, list[Choice]]:
    """The choices to take over, with their variants and GPUs as indices into ``sound`` and ``_gpus``."""
    code, gpus, bundle = SameCode(sound), _gpus(evidence, taken), taken.bundle
    place = [code.place(variant) for variant in bundle.variants]
    gpu_at = [gpus.index(gpu) for gpu in bundle.gpus]
    rows: dict[Problem, list[Choice]] = {}
    for problem in plan.problems:
        for choice in bundle.choices.get(problem, ()):
            first, gpu = place[choice.variant], choice.gpu
            second = None if choice.runner_up is None else place[choice.runner_up]
            if first is not None and gpu is not None:
                second_ns = None if second is None else choice.runner_up_ns
                moved = choice._replace(
                    variant=first, runner_up=second, runner_up_ns=second_ns, gpu=gpu_at[gpu], plan=()
                )
                rows.setdefault(problem, []).append(moved)
    return rows


def _left(plan: BuildPlan, rows: Mapping[Problem, Sequence[Choice]], evidence: Timings | None) -> BuildPlan:
    """The plan without cells that are taken over and have no times in the evidence."""
    left: dict[Problem, tuple[int, ...]] = {}
    for problem, buckets in plan.buckets.items():
        there = {choice.bucket for choice in rows.get(problem, ())}
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
    """Join new choices with those taken over: measured before modelled, and each GPU keeps its own."""
    at = {id(code): i for i, code in enumerate(chosen.variants)}
    choices: dict[Problem, tuple[Choice, ...]] = {}
    cells: set[tuple[Problem, int]] = set()
    taken = 0
    for problem in plan.problems:
        own = chosen.choices.get(problem, ())
        measured = [(choice.bucket, gpus[choice.gpu]) for choice in own if choice.gpu is not None]
        over = [
            choice._replace(
                variant=at[id(sound[choice.variant])],
                runner_up=None if choice.runner_up is None else at[id(sound[choice.runner_up])],
            )
            for choice in rows.get(problem, ())
            if not any(bucket == choice.bucket and gpu.is_like(gpus[choice.gpu or 0]) for bucket, gpu in measured)
        ]
        there = {choice.bucket for choice in over}
        row = [choice for choice in own if choice.gpu is not None or choice.bucket not in there]
        cells.update((problem, bucket) for bucket in there)
        taken += len(over)
        if row or over:
            choices[problem] = tuple(sorted((*row, *over), key=lambda choice: choice.sort_key))
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
    """The bundle of the chosen variants, with the digests of the bundles that it was compared with.

    If choices were modelled with the help of cells measured ``around`` them, those bundles are named too: the runtime
    then models for its own GPU, and ignores choices that were modelled for another.
    """
    used = sorted({choice.gpu for row in chosen.choices.values() for choice in row if choice.gpu is not None})
    all_gpus = _gpus(evidence, taken)
    gpus = tuple(all_gpus[gpu] for gpu in used)
    choices = {
        problem: tuple(choice if choice.gpu is None else choice._replace(gpu=used.index(choice.gpu)) for choice in row)
        for problem, row in chosen.choices.items()
    }
    min_driver, producer, kernels = candidates.provenance_of(chosen.variants)
    before = {incumbent.bundle for incumbent in (running or {}).values()}
    before |= {*evidence.held_against} if evidence else set()
    before |= taken.sources if taken and chosen.taken else frozenset()
    before |= around.sources if around else frozenset()
    return with_plans(
        Bundle(
            target=candidates.target,
            min_driver=min_driver,
            producer=producer.with_held_against(digest.hex() for digest in before),
            kernels=kernels,
            gpus=gpus,
            variants=tuple(code.variant for code in chosen.variants),
            cubins=tuple(code.cubin for code in chosen.variants),
            choices=choices,
            models=plan.without(plan.buckets.keys() - choices.keys()).models,
        )
    )
