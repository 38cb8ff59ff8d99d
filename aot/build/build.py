"""Build bundles from a plan and capabilities. Needs no torch, and a GPU only to measure."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from ...artifacts import codec
from ...artifacts.errors import HostError, InputError
from ...artifacts.packed import SUFFIX, pack, split
from ...artifacts.publishing import publish
from ...artifacts.records import Bundle, Problem, Source
from ...kernels.rowops import RowOpSpec
from ...kernels.spec import Spec
from ..choose.bundle import assembled
from ..choose.candidates import Candidates, read_candidates
from ..choose.choices import choose_among_all
from ..compile.cache import CompileCache
from ..compile.pool import CompileJob, CompileResult, compile_all
from ..compile.shipped import Shipped
from ..compile.toolchain import toolchain
from ..compile.triton import Compiled
from ..journal.file import read_journal
from ..plan.families import Pool, to_compile
from ..plan.plan import BuildPlan, planned_on
from ..plan.targets import target_of
from ..process.output import check_out, check_writable, file_name, held
from .options import BuildOptions, BuildReport, Built, Dropped, ModelCells, Observers
from .pick import Picked, Shippable, picked, usable


def build(
    plan: BuildPlan, sms: Sequence[int], options: BuildOptions, observers: Observers | None = None
) -> BuildReport:
    """Compile, prune, rank, measure if asked, select, and publish ``<name>-sm<NN>.msgpack`` for each capability.

    Equal plans, Triton, pretuned, installed bundles and journals give equal bytes, whatever the number of workers, the
    machine or the order of the models. Two builds never work in one directory at once.

    Measured candidates are compared with the kernels that the runtime would select from all other bundles. If nothing
    is faster, the new bundle names those kernels too (``choose.incumbents``). If nothing is measured, the measured
    choices of installed bundles are taken over, and only the rest is modelled.

    Raises
    ------
    InputError
        if the name or a capability can't be used, or there is nothing to build.
    HostError
        if the directory can't be written, or the machine stops the compiler or the measuring.
    CompileError
        if an op, dtype and fusion is left without any variant; the message has the reasons.
    KeyboardInterrupt
        with a message that says how much is compiled or measured, and kept.
    """
    watch = observers or Observers()
    begun = time.monotonic()
    paths = {sm: options.out / file_name(options.name, sm) for sm in sms}
    for sm in sms:
        target_of(sm)
        _check_journal(sm, options)
    shipped = _shipped(sms, options, watch)
    with held(options.out, watch.on_note):
        for path in paths.values():
            check_out(path)
        plans = {sm: planned_on(plan, (sm,), options.space) for sm in sms}
        results = _compile(plans, options, watch, shipped)
        by_sm = {sm: usable(plans[sm], sm, options.space, results[sm]) for sm in sms}
        for sm, shippable in by_sm.items():
            if sm not in options.measure:
                shippable.demand_every_family(plans[sm])
        chosen = {sm: picked(plans[sm], paths[sm], shippable, options, watch) for sm, shippable in by_sm.items()}
        built: list[Built] = []
        for sm, pick in chosen.items():  # everything is chosen before anything is written
            built += _publish(paths[sm], [_Filled(pick, by_sm[sm].dropped, _counts(results[sm]))], begun)
    return BuildReport(tuple(built), _trouble(options), time.monotonic() - begun)


def build_measured(
    plan: BuildPlan, path: Path, options: BuildOptions, observers: Observers | None = None
) -> BuildReport:
    """Build one bundle from candidates that ``aot compile`` made: no Triton is needed, nothing is compiled.

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
    if final.exists() and final.samefile(split(str(path))[0]):
        raise InputError(
            f"'{path}' has the candidates, and the bundle would take its place: name another --out or --name"
        )
    _check_journal(candidates.target.sm, options)
    with held(options.out, watch.on_note):
        check_out(final)
        pick = picked(plan, final, Shippable(candidates), options, watch)
        built = _publish(final, [_Filled(pick, (), (0, _cubins(candidates), 0))], begun)
    return BuildReport(built, (), time.monotonic() - begun)


def compile_candidates(
    plan: BuildPlan,
    sms: Sequence[int],
    path: Path,
    options: BuildOptions,
    observers: Observers | None = None,
    *,
    keep_pruned: bool = False,
    low_rank: bool = False,
) -> BuildReport:
    """Compile every variant that fits into one bundle at ``path``, with modelled choices, for ``aot measure``.

    Several capabilities give a bundle each, all in one file, whose path must end with .msgpack.xz. Such a file is
    compressed (``artifacts.packed``).

    Everything is compiled here, shipped candidates are not used. ``keep_pruned`` adds the variants that take too many
    resources, so that builds with the file need not compile them to learn that. ``low_rank`` adds variants with a
    low-rank part. No choice names either kind.

    Raises
    ------
    InputError, HostError, CompileError, KeyboardInterrupt
        as ``build`` does.
    """
    watch = observers or Observers()
    begun = time.monotonic()
    for sm in sms:
        target_of(sm)
    if len(sms) > 1 and not path.name.endswith(SUFFIX):
        raise InputError(f"'{path}': several capabilities need a compressed file: name it -o FILE{SUFFIX}")
    toolchain()
    check_writable(path.parent, "-o")
    check_out(path)
    plans = {sm: planned_on(plan, (sm,), options.space) for sm in sorted(sms)}
    results = _compile(plans, options, watch, dict.fromkeys(plans, Shipped()), low_rank=low_rank)
    filled = [_every(sm_plan, sm, results[sm], options.space, keep_pruned, low_rank) for sm, sm_plan in plans.items()]
    return BuildReport(_publish(path, filled, begun), _trouble(options), time.monotonic() - begun)


class _Filled(NamedTuple):
    """The contents of a file for one capability; ``counts`` are numbers of cubins (compiled now, cached, shipped)."""

    picked: Picked
    dropped: tuple[Dropped, ...]
    counts: tuple[int, int, int]


def _every(
    plan: BuildPlan, sm: int, results: Sequence[CompileResult], space: Pool, keep_pruned: bool, low_rank: bool
) -> _Filled:
    """All candidates for a capability, with modelled choices."""
    shippable = usable(plan, sm, space, results, low_rank=low_rank)
    shippable.demand_every_family(plan)
    chosen = choose_among_all(plan, shippable.candidates.compiled, sm)
    listed = shippable.candidates
    if keep_pruned:
        listed = usable(plan, sm, space, results, lambda variant, arch: None, low_rank=low_rank).candidates
    able = set(chosen.variants)
    chosen = replace(chosen, variants=(*chosen.variants, *(code for code in listed.compiled if code not in able)))
    return _Filled(Picked(assembled(plan, listed, chosen, None), chosen), shippable.dropped, _counts(results))


def _trouble(options: BuildOptions) -> tuple[str, ...]:
    """Notes for the user on the compile cache."""
    return (options.cache.trouble,) if options.cache and options.cache.trouble else ()


def _check_journal(sm: int, options: BuildOptions) -> None:
    """Raise InputError if a journal that is only read is missing or of another capability."""
    if options.journal is None or sm in options.measure:
        return
    measured_on, target = read_journal(options.journal).header.sm, target_of(sm)
    if not target.runs_on(measured_on):
        raise InputError(f"journal '{options.journal}': measured on sm_{measured_on}, the candidates are for {target}")


def _compile(
    plans: Mapping[int, BuildPlan],
    options: BuildOptions,
    watch: Observers,
    shipped: Mapping[int, Shipped],
    *,
    low_rank: bool = False,
) -> dict[int, list[CompileResult]]:
    """Compile every cubin of every capability, in one queue."""

    def ready(spec: Spec | RowOpSpec, sm: int) -> Compiled | None:
        return shipped[sm].get(spec, sm)

    jobs = [
        CompileJob(spec, sm)
        for sm, plan in plans.items()
        for spec in to_compile(plan.problems, sm, options.space, low_rank=low_rank)
    ]
    watch.on_start(len(jobs))
    try:
        results = compile_all(
            jobs,
            workers=options.workers,
            cache=options.cache,
            on_result=watch.on_result,
            timeout_s=options.timeout_s,
            compile_one=options.compile_one,
            shipped=ready,
        )
    except KeyboardInterrupt:
        raise KeyboardInterrupt(_interrupted(jobs, options.cache)) from None
    return {sm: [result for result in results if result.job.sm == sm] for sm in plans}


def _shipped(sms: Sequence[int], options: BuildOptions, watch: Observers) -> dict[int, Shipped]:
    """The shipped candidates of each capability; HostError if some has none and nothing compiles here."""
    by_sm = {sm: options.shipped(sm) for sm in sms}
    try:
        toolchain()
    except HostError as error:
        if not all(by_sm.values()):
            raise
        watch.on_note(f"note: the build uses kernels that ship compiled, and nothing is compiled: {error}")
    for text in dict.fromkeys(text for bundles in by_sm.values() for text in bundles.trouble):
        watch.on_note(f"note: not used: {text}")
    return by_sm


def _interrupted(jobs: Sequence[CompileJob], cache: CompileCache | None) -> str:
    if cache is None:
        return "interrupted: without a compile cache nothing is kept"
    kept = sum(cache.has(job.spec, job.sm) for job in jobs)
    return f"interrupted: {kept} of {len(jobs)} variants are compiled and kept; run the same command to go on"


def _cubins(candidates: Candidates) -> int:
    """The number of distinct cubins; several variants may share one."""
    return len({code.variant.cubin_sha256 for code in candidates.compiled})


def _counts(results: Sequence[CompileResult]) -> tuple[int, int, int]:
    """(compiled now, cached, shipped)."""
    cached, shipped = sum(result.cached for result in results), sum(result.shipped for result in results)
    return sum(result.compiled is not None for result in results) - cached - shipped, cached, shipped


def _publish(path: Path, parts: Sequence[_Filled], begun: float) -> tuple[Built, ...]:
    """Publish these bundles as one file; only a packed file can hold several."""
    bundles = [codec.encode(filled.picked.bundle) for filled in parts]
    data = pack(*bundles) if path.name.endswith(SUFFIX) else b"".join(bundles)
    written = publish(path, data)
    return tuple(_built(path, filled, len(data), written, begun) for filled in parts)


def _by_model(bundle: Bundle, taken: Collection[tuple[Problem, int]]) -> tuple[ModelCells, ...]:
    """The cells of each model, all its shards together, in the order of their names."""
    by_model: dict[str, dict[tuple[Problem, int], bool]] = {}
    for model in bundle.models:
        cells = by_model.setdefault(model.name, {})
        for problem in model.problems:
            for choice in bundle.choices.get(problem, ()):
                cells[problem, choice.bucket] = choice.source is Source.MEASURED
    return tuple(
        ModelCells(name, len(cells), sum(cell in taken for cell in cells), sum(cells.values()))
        for name, cells in by_model.items()
    )


def _built(path: Path, filled: _Filled, size_bytes: int, written: bool, begun: float) -> Built:
    bundle, chosen = filled.picked.bundle, filled.picked.chosen
    compiled, cached, shipped = filled.counts
    measured = sum(choice.source is Source.MEASURED for row in bundle.choices.values() for choice in row)
    return Built(
        taken_over=chosen.taken,
        by_model=_by_model(bundle, chosen.taken_cells),
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
        shipped=shipped,
        dropped=filled.dropped,
        worst_loss=max((loss.max_loss for loss in chosen.losses), default=0.0),
        size_bytes=size_bytes,
        unchanged=not written,
        seconds=time.monotonic() - begun,
        tuned=filled.picked.outcome,
        comparison=filled.picked.comparison,
    )
