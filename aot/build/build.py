"""The builder: a plan and capabilities in, published bundles out. No torch, and no GPU but where it measures."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from ...artifacts.errors import CompileError, InputError
from ...artifacts.files.publish import publish
from ...artifacts.format import codec
from ...artifacts.records.bundle import Bundle, Source
from ...artifacts.records.problem import Problem
from ...kernels.contract.rowops import RowOpSpec
from ...kernels.contract.spec import Spec
from ...kernels.hardware.arch import arch_of
from ..choose.bundle import Ships, assembled, choose_from, evidence_for, shipping
from ..choose.candidates import Candidates, read_candidates
from ..choose.choices import Chosen, choose_among_all
from ..compile.cache import CompileCache
from ..compile.pool import TIMEOUT_S, Compile, CompileJob, CompileResult, compile_all
from ..compile.toolchain import toolchain
from ..compile.triton import Compiled, compile_variant
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
    pass_specs,
    rejection,
    specs,
    to_compile,
)
from ..plan.plan import BuildPlan, planned_on
from ..plan.targets import target_of
from ..process.output_dir import DEFAULT_NAME, check_writable, file_name, held
from ..process.output_file import check_out
from ..process.scratch import scratch_folder
from ..tune.tuner import Outcome, TuneObservers, tune_problems
from .summary import BuildReport, Built, Dropped


class Tune(Protocol):
    """Measures cells of ``candidates`` into ``journal``: ``tune_problems``, but for how. None where it can't."""

    def __call__(
        self, problems: Mapping[Problem, Sequence[int]], candidates: Path, journal: Path, ships: Ships,
        observers: TuneObservers,
    ) -> Outcome | None: ...  # fmt: skip


def tune_now(
    problems: Mapping[Problem, Sequence[int]], candidates: Path, journal: Path, ships: Ships, observers: TuneObservers
) -> Outcome:
    """On this machine's GPUs, as long as is usual."""
    return tune_problems(problems, candidates, journal, ships=ships, observers=observers)


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """How to build. ``workers`` None means one a core; ``cache`` None keeps nothing.

    Capabilities in ``measure`` are measured, by ``tune``. ``journal`` takes what is measured, or has what was;
    None is ``<name>-sm<NN>.journal`` beside the bundle, where it is there or one is measured. ``modelled`` uses none.
    """

    out: Path
    name: str = DEFAULT_NAME
    workers: int | None = None
    cache: CompileCache | None = None
    space: Pool = field(default_factory=Pool)
    timeout_s: float = TIMEOUT_S
    compile_one: Compile = compile_variant
    journal: Path | None = None
    measure: Container[int] = ()
    modelled: bool = False
    configs: int = CONFIG_LIMIT  # of an op and dtype, at most
    tune: Tune = tune_now


@dataclass(frozen=True, slots=True)
class Observers:
    """Whom to tell while it goes on: the number of variants, each as it is ready, and remarks."""

    on_start: Callable[[int], None] = lambda total: None
    on_result: Callable[[CompileResult], None] = lambda result: None
    on_note: Callable[[str], None] = lambda note: None
    tune: TuneObservers = field(default_factory=TuneObservers)


def build(
    plan: BuildPlan, sms: Sequence[int], options: BuildOptions, observers: Observers | None = None
) -> BuildReport:
    """Compile, prune, rank, measure where asked to, select, and publish ``<name>-sm<NN>.msgpack`` for each capability.

    The same plan, Triton, pretuned and journal give the same bytes, whatever the number of workers, the
    machine or the order of the models. Two builds never work in one directory at once.

    Raises
    ------
    InputError
        if the name or a capability can't be used, or there is nothing to build.
    HostError
        if the directory can't be written, or the machine stops the compiler or the measuring.
    CompileError
        if an op, dtype and form is left without any variant; the message has the reasons.
    KeyboardInterrupt
        with a message that says how much is compiled or measured, and kept.
    """
    watch = observers or Observers()
    begun = time.monotonic()
    paths = {sm: options.out / file_name(options.name, sm) for sm in sms}
    for sm in sms:
        target_of(sm)
        _check_journal(sm, options)
    toolchain()
    with held(options.out, watch.on_note):
        for path in paths.values():
            check_out(path)
        results = _compile(plan, sms, options, watch)
        plans = {sm: planned_on(plan, (sm,), options.space) for sm in sms}
        made = {sm: _usable(plans[sm], sm, options.space, results[sm]) for sm in sms}
        chosen = {}
        for sm, (candidates, dropped) in made.items():  # all of them before anything is written
            evidence, outcome = _measure(plans[sm], sm, candidates, options, watch)
            picked = choose_from(plans[sm], candidates, evidence, options.configs)
            chosen[sm] = candidates, dropped, outcome, evidence, picked
        built = []
        for sm, (candidates, dropped, outcome, evidence, picked) in chosen.items():
            bundle = assembled(plans[sm], candidates, picked, evidence)
            built.append(_publish(paths[sm], bundle, picked, dropped, _counts(results[sm]), outcome, begun))
    return BuildReport(tuple(built), _trouble(options), time.monotonic() - begun)


def build_measured(
    plan: BuildPlan, path: Path, options: BuildOptions, observers: Observers | None = None
) -> BuildReport:
    """As ``build``, of candidates that were compiled before (``aot compile``): no Triton, nothing is compiled.

    Raises
    ------
    BundleError
        if the candidates can't be read.
    InputError, HostError, CompileError
        as ``build`` does.
    """
    watch = observers or Observers()
    begun = time.monotonic()
    candidates = read_candidates(path, plan)
    plan = planned_on(plan, (candidates.target.sm,), options.space)
    final = options.out / file_name(options.name, candidates.target.sm)
    if final.exists() and final.samefile(path):
        raise InputError(
            f"'{path}' has the candidates, and the bundle would take its place: name another --out or --name"
        )
    _check_journal(candidates.target.sm, options)
    with held(options.out, watch.on_note):
        check_out(final)
        evidence, outcome = _measure(plan, candidates.target.sm, candidates, options, watch, path)
        picked = choose_from(plan, candidates, evidence, options.configs)
        bundle = assembled(plan, candidates, picked, evidence)
        built = _publish(final, bundle, picked, (), (0, len(candidates.compiled)), outcome, begun)
    return BuildReport((built,), (), time.monotonic() - begun)


def compile_candidates(
    plan: BuildPlan, sm: int, path: Path, options: BuildOptions, observers: Observers | None = None
) -> BuildReport:
    """Every variant that compiles and fits, into one bundle at ``path``: for ``aot measure``. The choices are modelled.

    Raises
    ------
    InputError, HostError, CompileError, KeyboardInterrupt
        as ``build`` does.
    """
    watch = observers or Observers()
    begun = time.monotonic()
    target_of(sm)
    toolchain()
    check_writable(path.parent, "-o")
    check_out(path)
    plan = planned_on(plan, (sm,), options.space)
    results = _compile(plan, (sm,), options, watch)[sm]
    candidates, dropped = _usable(plan, sm, options.space, results)
    chosen = choose_among_all(plan, candidates.compiled, sm)
    bundle = assembled(plan, candidates, chosen, None)
    built = _publish(path, bundle, chosen, dropped, _counts(results), None, begun)
    return BuildReport((built,), _trouble(options), time.monotonic() - begun)


def _trouble(options: BuildOptions) -> tuple[str, ...]:
    """What the user should know of the compile cache."""
    return (options.cache.trouble,) if options.cache and options.cache.trouble else ()


def _measure(
    plan: BuildPlan, sm: int, candidates: Candidates, options: BuildOptions, watch: Observers, path: Path | None = None
) -> tuple[Timings | None, Outcome | None]:
    """What is known of the candidates: measured now, or in a journal named."""
    outcome = None
    journal = options.journal or options.out / f"{options.name}-sm{sm}.journal"
    if sm in options.measure:
        with contextlib.ExitStack() as stack:
            if path is None:
                path = stack.enter_context(scratch_folder()) / f"candidates-sm{sm}.msgpack"
                every = choose_among_all(plan, candidates.compiled, sm)
                publish(path, codec.encode(assembled(plan, candidates, every, None)))
            ships = shipping(plan, candidates, options.configs)
            outcome = options.tune(plan.buckets, path, journal, ships, watch.tune)
    if options.modelled or not (outcome or options.journal or journal.exists()):
        return None, None
    try:
        contents = read_journal(journal)
        if contents.damaged:
            watch.on_note(f"note: journal '{journal}': {contents.damaged} damaged records are left out")
        evidence = evidence_for(plan, candidates, contents, f"journal '{journal}'")
    except InputError as error:
        if outcome or options.journal:
            raise
        watch.on_note(f"note: not used: {error}")  # nobody named it: it is of another build in this directory
        return None, None
    wanted = {cell_of(problem, bucket) for problem, buckets in plan.buckets.items() for bucket in buckets}
    if options.journal and evidence.cells and wanted.isdisjoint(evidence.cells):
        watch.on_note(
            f"note: journal '{journal}': none of the {len(evidence.cells)} cells measured there is of these models: "
            "all is modelled"
        )
    return evidence, outcome


def _check_journal(sm: int, options: BuildOptions) -> None:
    """A journal that is named, and only read: there, and of this capability? Before anything is compiled or written."""
    if options.journal is None or sm in options.measure:
        return
    measured_on, target = read_journal(options.journal).header.sm, target_of(sm)
    if not target.runs_on(measured_on):
        raise InputError(f"journal '{options.journal}': measured on sm_{measured_on}, the candidates are for {target}")


def _compile(
    plan: BuildPlan, sms: Sequence[int], options: BuildOptions, watch: Observers
) -> dict[int, list[CompileResult]]:
    """Every cubin of every capability, all in one queue."""
    jobs = [CompileJob(spec, sm) for sm in sms for spec in to_compile(plan.problems, sm, options.space)]
    watch.on_start(len(jobs))
    try:
        results = compile_all(
            jobs,
            workers=options.workers,
            cache=options.cache,
            on_result=watch.on_result,
            timeout_s=options.timeout_s,
            compile_one=options.compile_one,
        )
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_interrupted(jobs, options.cache)) from None
    return {sm: [result for result in results if result.job.sm == sm] for sm in sms}


def _interrupted(jobs: Sequence[CompileJob], cache: CompileCache | None) -> str:
    if cache is None:
        return "interrupted: without a compile cache nothing is kept"
    kept = sum(cache.has(job.spec, job.sm) for job in jobs)
    return f"interrupted: {kept} of {len(jobs)} variants are compiled and kept; run the same command to go on"


def _usable(
    plan: BuildPlan, sm: int, space: Pool, results: Sequence[CompileResult]
) -> tuple[Candidates, tuple[Dropped, ...]]:
    """What can ship, and all that can not, each with its reason."""
    usable: dict[Spec | RowOpSpec, Compiled] = {}
    dropped: list[Dropped] = []
    reasons: dict[Family, dict[str, None]] = {}
    wanted, beside = specs(plan.problems, sm, space), pass_specs(plan.problems)
    groups: list[tuple[Spec | RowOpSpec, ...]] = [*by_code(wanted, sm), *((spec,) for spec in beside)]
    for result, group in zip(results, groups, strict=True):
        code, reason, kind = result.compiled, result.reason, "failed"
        if code is not None:
            reason, kind = rejection(code.variant, arch_of(sm)) or "", "pruned"
            if not reason:
                usable |= {spec: code.relabelled(spec) for spec in group}
                continue
        dropped.append(Dropped(result.job.spec, kind, reason))
        for spec in group:
            reasons.setdefault(Family.of(spec), {})[reason] = None
    able = {Family.of(spec) for spec in usable}
    for family, members in families(plan.problems).items():
        if family not in able and not optional(family):
            listed = "\n".join(f"  {reason}" for reason in list(reasons.get(family, {}))[:5])
            raise CompileError(f"sm_{sm}: not one variant of {named(members)} can be used. What went wrong:\n{listed}")
    compiled = tuple(usable[spec] for spec in (*wanted, *beside) if spec in usable)
    return Candidates.made_here(sm, compiled), tuple(dropped)


def _counts(results: Sequence[CompileResult]) -> tuple[int, int]:
    """(compiled now, cached)."""
    cached = sum(result.cached for result in results)
    return sum(result.compiled is not None for result in results) - cached, cached


def _publish(
    path: Path,
    bundle: Bundle,
    chosen: Chosen,
    dropped: tuple[Dropped, ...],
    counts: tuple[int, int],
    outcome: Outcome | None,
    begun: float,
) -> Built:
    data = codec.encode(bundle)
    written = publish(path, data)
    compiled, cached = counts
    measured = sum(one.source is Source.MEASURED for row in bundle.choices.values() for one in row)
    return Built(
        path=path,
        target=bundle.target,
        models=len({model.name for model in bundle.models}),
        shards=len(bundle.models),
        problems=len(bundle.choices),
        choices=sum(map(len, bundle.choices.values())),
        measured=measured,
        gpus=bundle.gpus,
        variants=len(chosen.variants),
        compiled=compiled,
        cached=cached,
        dropped=dropped,
        worst_loss=max((loss.max_loss for loss in chosen.losses), default=0.0),
        size_bytes=len(data),
        unchanged=not written,
        seconds=time.monotonic() - begun,
        tuned=outcome,
    )
