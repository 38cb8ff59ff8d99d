"""The builder: a plan and capabilities in, published bundles out. No GPU, no torch."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ..artifacts import codec
from ..artifacts.errors import CompileError
from ..artifacts.store import publish
from ..artifacts.types import Bundle, Kernel, Producer
from ..kernels.abi import Spec
from ..kernels.chips import limits
from ..kernels.revisions import REVISIONS, source_sha256
from .capabilities import target_of
from .choose import Chosen, choose
from .compile import OPTIONS, Compiled, compile_variant, min_driver
from .compilecache import CompileCache
from .outdir import DEFAULT_NAME, file_name, held
from .plan import Plan
from .summary import Built, Dropped, Report
from .toolchain import toolchain
from .variants import Family, Space, by_code, families, rejection, relabelled, specs
from .workers import TIMEOUT_S, Compile, Job, Result, compile_all


@dataclass(frozen=True, slots=True)
class Options:
    """How to build. ``workers`` None means one a core; ``cache`` None keeps nothing."""

    out: Path
    name: str = DEFAULT_NAME
    workers: int | None = None
    cache: CompileCache | None = None
    space: Space = field(default_factory=Space)
    timeout_s: float = TIMEOUT_S
    compile_one: Compile = compile_variant


@dataclass(frozen=True, slots=True)
class Observers:
    """Whom to tell while it goes on: the number of variants, each as it is ready, and remarks."""

    on_start: Callable[[int], None] = lambda total: None
    on_result: Callable[[Result], None] = lambda result: None
    on_note: Callable[[str], None] = lambda note: None


def build(plan: Plan, sms: Sequence[int], options: Options, observers: Observers | None = None) -> Report:
    """Compile, prune, rank, select, and publish ``<name>-sm<NN>.msgpack`` for each capability.

    The same plan, Triton and pretuned give the same bytes, whatever the number of workers, the
    machine or the order of the models. Two builds never work in one directory at once.

    Raises
    ------
    InputError
        if the name or a capability can't be used, or there is nothing to build.
    HostError
        if the directory can't be written, or the machine stops the compiler.
    CompileError
        if an op and dtype is left without any variant; the message has the reasons.
    KeyboardInterrupt
        with a message that says how much is compiled and kept.
    """
    watch = observers or Observers()
    begun = time.monotonic()
    paths = {sm: options.out / file_name(options.name, sm) for sm in sms}
    targets = {sm: target_of(sm) for sm in sms}
    tools = toolchain()
    with held(options.out, watch.on_note):
        results = _compile(plan, sms, options, watch)
        built = []
        chosen_by_sm = {sm: _choose(plan, sm, options.space, results[sm]) for sm in sms}  # before anything is written
        for sm, (chosen, dropped) in chosen_by_sm.items():
            producer = Producer(importlib.metadata.version("pretuned"), tools.triton, tools.ptxas_for(sm), OPTIONS)
            data = codec.encode(
                Bundle(
                    target=targets[sm],
                    min_driver=min_driver(sm, producer.ptxas),
                    producer=producer,
                    kernels=_kernels(chosen.variants),
                    gpus=(),
                    variants=tuple(one.variant for one in chosen.variants),
                    cubins=tuple(one.cubin for one in chosen.variants),
                    choices=chosen.choices,
                    models=plan.models,
                )
            )
            same = _holds(paths[sm], data)
            publish(paths[sm], data)
            built.append(_built(plan, sm, paths[sm], data, chosen, dropped, results[sm], same, begun))
    notes = [options.cache.trouble] if options.cache and options.cache.trouble else []
    return Report(tuple(built), tuple(notes), time.monotonic() - begun)


def _compile(plan: Plan, sms: Sequence[int], options: Options, watch: Observers) -> dict[int, list[Result]]:
    """Every cubin of every capability, all in one queue."""
    jobs = [Job(group[0], sm) for sm in sms for group in by_code(specs(plan.problems, sm, options.space))]
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


def _interrupted(jobs: Sequence[Job], cache: CompileCache | None) -> str:
    if cache is None:
        return "interrupted: without a compile cache nothing is kept"
    kept = sum(cache.has(job.spec, job.sm) for job in jobs)
    return f"interrupted: {kept} of {len(jobs)} variants are compiled and kept; run the same command to go on"


def _choose(plan: Plan, sm: int, space: Space, results: Sequence[Result]) -> tuple[Chosen, tuple[Dropped, ...]]:
    """What ships, and all that does not, each with its reason."""
    usable: dict[Spec, Compiled] = {}
    dropped: list[Dropped] = []
    reasons: dict[Family, dict[str, None]] = {}
    wanted = specs(plan.problems, sm, space)
    for result, group in zip(results, by_code(wanted), strict=True):
        code, reason, kind = result.compiled, result.reason, "failed"
        if code is not None:
            reason, kind = rejection(code.variant, limits(sm)) or "", "pruned"
            if not reason:
                usable |= {spec: Compiled(relabelled(code.variant, spec), code.cubin) for spec in group}
                continue
        dropped.append(Dropped(result.job.spec, kind, reason))
        for spec in group:
            reasons.setdefault(Family.of(spec), {})[reason] = None
    able = {Family.of(spec) for spec in usable}
    for family in families(plan.problems):
        if family not in able:
            listed = "\n".join(f"  {reason}" for reason in list(reasons.get(family, {}))[:5])
            raise CompileError(f"sm_{sm}: not one variant of {family} can be used. What went wrong:\n{listed}")
    return choose(plan, [usable[spec] for spec in wanted if spec in usable], sm), tuple(dropped)


def _kernels(variants: Sequence[Compiled]) -> tuple[Kernel, ...]:
    names = sorted({one.variant.kernel for one in variants})
    return tuple(Kernel(name, REVISIONS[name].revision, bytes.fromhex(source_sha256(name))) for name in names)


def _holds(path: Path, data: bytes) -> bool:
    try:
        return path.stat().st_size == len(data) and path.read_bytes() == data
    except OSError:
        return False


def _built(
    plan: Plan,
    sm: int,
    path: Path,
    data: bytes,
    chosen: Chosen,
    dropped: tuple[Dropped, ...],
    results: Sequence[Result],
    unchanged: bool,
    begun: float,
) -> Built:
    worst = max((loss.max_loss for loss in chosen.losses), default=0.0)
    return Built(
        path=path,
        target=target_of(sm),
        models=len({model.name for model in plan.models}),
        shards=len(plan.models),
        problems=len(plan.problems),
        choices=plan.choices,
        variants=len(chosen.variants),
        compiled=sum(result.compiled is not None and not result.cached for result in results),
        cached=sum(result.cached for result in results),
        dropped=dropped,
        worst_loss=worst,
        size_bytes=len(data),
        unchanged=unchanged,
        seconds=time.monotonic() - begun,
    )
