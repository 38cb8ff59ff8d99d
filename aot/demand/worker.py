"""Compile variants on demand for one shape: a few, which the cost model picks before they are compiled.

``compile_in_child`` is the compiler behind ``pretuned.runtime.allow_jit``: Triton in a child process, with the compile
cache.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ...artifacts import codec
from ...artifacts.bundle_file import open_bundle
from ...artifacts.errors import CompileError, HostError
from ...artifacts.format import pack_problem, read_problem
from ...artifacts.publishing import publish
from ...artifacts.records import DType, Model, Op, Problem, buckets_between
from ...kernels.arch import arch_of
from ...kernels.chips import chip_for
from ...kernels.cost import Resources, rejection
from ...kernels.cost_model import Ranker
from ...kernels.entry import ALIGNMENT_BYTES
from ...kernels.registry import threads
from ...kernels.search import fallbacks, shared_bytes_at_least
from ...kernels.spec import MAX_EXPERTS, Config, Spec
from ..choose.bundle import assembled, measured_bundle
from ..choose.candidates import Candidates
from ..choose.choices import choose, choose_among_all
from ..choose.incumbents import Carried, Incumbents
from ..choose.subset import select
from ..compile.cache import CompileCache
from ..compile.pool import CompileJob, compile_all
from ..compile.shipped import Shipped
from ..compile.triton import Compiled
from ..executors.local import begun
from ..journal.file import read_journal
from ..plan.families import Family, Pool, by_code, compilable, serves
from ..plan.plan import BuildPlan
from ..process import child
from ..tune.tuner import Entrants, tune_problems

_JIT_CONFIGS = 6  # the best 4 are 1.0 % slower than all (docs/inside/cost-model.md); 2 more, as some don't compile
_JIT_ROWS = 1 << 20
_CELL_CONFIGS = 8  # the tuner's candidates of one problem and bucket
SHARE = 0.5  # share of these candidates that is measured
_OVERHEAD_REGISTERS = 64  # in addition to a thread's share of the tile
_TIMEOUT_S = 300.0


def compile_kind(problem: str, sm: int, cache: str | None, answer: Path) -> None:
    """For ``child.call``: write a bundle with modelled choices that runs every problem of ``problem``'s kind."""
    wanted = _problem(problem)
    plan = BuildPlan({wanted: buckets_between(1, _JIT_ROWS)}, ())
    configs = _spread(wanted, plan.buckets[wanted], sm)
    candidates = Candidates.made_here(sm, compile_specs(_specs(wanted, configs, sm), sm, _cache(cache)))
    chosen = choose(plan, candidates.compiled, sm)
    answer.write_bytes(codec.encode(assembled(plan, candidates, chosen, None)))


def measure_cells(
    cells: Sequence[tuple[str, Sequence[int]]],
    models: Sequence[tuple[str, int, str, Sequence[str]]],
    sm: int,
    device: int,
    budget_s: float,
    cache: str | None,
    bundles: Sequence[str],
    answer: Path,
) -> None:
    """For ``child.call``: compile candidates for these cells, measure them and the baseline, and write a bundle.

    ``bundles`` are files next to ``answer`` that the caller tuned and has nowhere else. A problem that nothing can run
    is left out.

    Raises
    ------
    CompileError, HostError
        if nothing can be compiled, and no bundle has code.
    """
    wanted = {_problem(problem): tuple(buckets) for problem, buckets in cells}
    records = tuple(
        Model(name, 1, 1, top_k, DType(dtype), tuple(map(_problem, problems)))
        for name, top_k, dtype, problems in models
    )
    path, journal = answer.with_suffix(".candidates"), answer.with_suffix(".journal")
    with begun(device) as gpu:  # torch starts there while candidates are compiled here
        incumbents = Incumbents.on_search_path()
        for name in bundles:
            incumbents.snapshot.add(open_bundle(answer.with_name(name)))
        planned = BuildPlan(wanted, records)
        candidates = _candidates_beside(wanted, incumbents.codes(planned.problems, sm), sm, _cache(cache))
        planned = planned.without(_unserved(wanted, candidates.all_variants).keys())
        chosen = choose_among_all(planned, candidates.all_variants, sm)
        publish(path, codec.encode(assembled(planned, candidates, chosen, None)))
        if gpu is not None:
            with open_bundle(path) as bundle:
                gpu.measures(str(path), bundle.digest)
        runs = incumbents.on(planned.buckets)
        tune_problems(
            planned.buckets,
            path,
            journal,
            budget_s=budget_s,
            gpus=[device],
            executors=None if gpu is None else [gpu],
            with_torch=False,
            entrants=Entrants(SHARE, runs=runs, quick=True, around=incumbents.around),
        )
        answer.write_bytes(codec.encode(measured_bundle(planned, candidates, read_journal(journal), runs)))


def _candidates_beside(
    cells: Mapping[Problem, Sequence[int]], there: Sequence[Carried], sm: int, cache: CompileCache | None
) -> Candidates:
    """Compile candidates for these cells, and add the code that is there.

    If none of a problem's candidates compiles and nothing runs it yet, the model's next candidates are compiled.
    """
    compiled: tuple[Compiled, ...] = ()
    failure: CompileError | HostError | None = None
    lacking = dict(cells)
    tried: set[Spec] = set()
    for first in itertools.count(0, _CELL_CONFIGS):
        specs = [spec for spec in _specs_of(lacking, sm, first) if spec not in tried]
        if not specs:
            break
        tried.update(specs)
        try:
            compiled += compile_specs(specs, sm, cache)
        except HostError as error:
            failure = error
            break
        except CompileError as error:
            failure = failure or error
        lacking = _unserved(lacking, (*compiled, *(carried.code for carried in there)))
        if not lacking:
            break
    if compiled:
        return Candidates.made_here(sm, tuple(dict.fromkeys(compiled))).with_others(there)
    if not there and failure is not None:
        raise failure
    return Candidates.of_bundles(sm, there)


def _unserved(cells: Mapping[Problem, Sequence[int]], codes: Sequence[Compiled]) -> dict[Problem, Sequence[int]]:
    """The cells of problems that none of ``codes`` runs."""
    return {problem: row for problem, row in cells.items() if not any(serves(code.variant, problem) for code in codes)}


def _specs_of(cells: Mapping[Problem, Sequence[int]], sm: int, first: int = 0) -> dict[Spec, None]:
    """The variants for these cells: from place ``first`` the best by the cost model, and the fallbacks."""
    specs: dict[Spec, None] = {}
    for problem, buckets in cells.items():
        ranked = [_ranked(problem, bucket, sm) for bucket in buckets]
        picked = dict.fromkeys(config for row in ranked for _, config in row[first : first + _CELL_CONFIGS])
        specs.update(dict.fromkeys(_specs(problem, picked, sm)))
    return specs


def compile_specs(specs: Iterable[Spec], sm: int, cache: CompileCache | None) -> tuple[Compiled, ...]:
    """The usable variants among ``specs``, shipped or compiled now, in their order.

    Raises
    ------
    CompileError
        with the reasons, if there is none.
    HostError
        if Triton is missing, or the machine stops the compiler.
    """
    specs = list(specs)
    if not specs:
        raise CompileError(
            f"sm_{sm}: no kernel is for such a problem (of quantised weights, {MAX_EXPERTS} experts at most)"
        )
    groups = by_code(specs, sm)
    results = compile_all(
        [CompileJob(group[0], sm) for group in groups], cache=cache, shipped=Shipped.in_packages(sm).get
    )
    usable: dict[Spec, Compiled] = {}
    reasons: dict[str, None] = {}
    for result, group in zip(results, groups, strict=True):
        code, reason = result.compiled, result.reason
        if code is not None:
            reason = rejection(code.variant, arch_of(sm)) or ""
            if not reason:
                usable |= {spec: code.relabelled(spec) for spec in group}
                continue
        reasons[reason] = None
    if not usable:
        raise CompileError(f"sm_{sm}: not one variant can be used: {'; '.join(list(reasons)[:3])}")
    return tuple(usable[spec] for spec in specs if spec in usable)


def plain(problem: Problem) -> str:
    """A problem as text, for a child's arguments."""
    return pack_problem(problem).hex()


def _problem(text: str) -> Problem:
    return read_problem(bytes.fromhex(text))


def _cache(directory: str | None) -> CompileCache | None:
    return None if directory is None else CompileCache(Path(directory))


def _specs(problem: Problem, aligned: Iterable[Config], sm: int) -> list[Spec]:
    """The aligned variants of these configs, and the fallbacks."""
    family = Family(problem.op, problem.dtype, problem.layout, problem.fusion)  # as called, not ``canonical``
    return compilable(family, aligned, fallbacks(problem.op, problem.dtype, sm), [problem.E])


def _spread(problem: Problem, buckets: Sequence[int], sm: int) -> list[Config]:
    """The few configs that serve all buckets best."""
    configs = _candidates(problem, sm)
    number = {config: i for i, config in enumerate(configs)}
    table = {
        (problem, bucket): [(number[config], us) for us, config in _ranked(problem, bucket, sm)] for bucket in buckets
    }
    return [configs[i] for i in select(table, _JIT_CONFIGS).variants]


def _ranked(problem: Problem, bucket: int, sm: int) -> list[tuple[float, Config]]:
    """(estimate in us, config) of every candidate, best first; its resources are guessed before it is compiled."""
    configs = _candidates(problem, sm)
    resources = [_likely(problem, config, sm) for config in configs]
    named = problem.canonical
    ranked = Ranker(resources, named.op, problem.dtype, chip_for(sm)).rank(named, bucket)
    return [(us, configs[i]) for us, i in ranked if math.isfinite(us)]


def _candidates(problem: Problem, sm: int) -> list[Config]:
    """The configs that a build would compile for the problem, as shipped candidates have them."""
    return list(Pool().candidates(Family.of(problem), sm, (problem.op,)))


def _likely(problem: Problem, config: Config, sm: int) -> Resources:
    width = threads(Spec(problem.op, problem.dtype, config))
    tile = config.block_n * config.block_k if problem.op is Op.DW else config.block_m * config.block_n
    registers = min(arch_of(sm).limits.registers_per_thread, _OVERHEAD_REGISTERS + tile // width)
    shared = shared_bytes_at_least(problem.op, problem.dtype, config, sm)
    return Resources(config, width, shared, registers, ALIGNMENT_BYTES)


def compile_in_child(problem: Problem, sm: int) -> bytes:
    """Compile a bundle whose variants run every problem of this kind; see ``pretuned.runtime.dispatch.compiled``.

    With PRETUNED_DISABLE_AUTOTUNE=1 nothing is written to the user's cache.

    Raises
    ------
    CompileError
        if nothing compiles.
    HostError
        if Triton is missing, or the machine can't run it.
    """
    from ...runtime.settings import settings
    from ..compile.cache import default_dir
    from ..plan.targets import SUPPORTED

    if sm not in SUPPORTED:
        raise HostError(f"Triton compiles for sm_{', sm_'.join(map(str, SUPPORTED))}, not for sm_{sm}")
    cache = None if settings().disable_autotune else default_dir()
    arguments = {"problem": plain(problem), "sm": sm, "cache": None if cache is None else str(cache)}
    return child.call(compile_kind, arguments, timeout_s=_TIMEOUT_S, who="the compiler")
