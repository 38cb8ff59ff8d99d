"""Variants compiled on demand, for one shape: a few, which the cost model picks before they are compiled."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from ...artifacts.errors import CompileError, HostError
from ...artifacts.files.bundle_file import open_bundle
from ...artifacts.files.publish import publish
from ...artifacts.format import codec
from ...artifacts.format.schema import pack_problem, read_problem
from ...artifacts.records.bundle import Model
from ...artifacts.records.precision import DType
from ...artifacts.records.problem import Op, Problem, buckets_between
from ...kernels.contract.config import Config
from ...kernels.contract.spec import MAX_EXPERTS, Spec
from ...kernels.contract.words import ALIGNMENT_BYTES
from ...kernels.cost.resources import Resources, rejection
from ...kernels.cost_model import Ranker
from ...kernels.hardware.arch import arch_of
from ...kernels.hardware.chips import chip_for
from ...kernels.registry import threads
from ...kernels.search import fallbacks, shared_bytes_at_least
from ..choose.bundle import assembled, measured_bundle
from ..choose.candidates import Candidates
from ..choose.choices import choose, choose_among_all
from ..choose.incumbents import Carried, Incumbents
from ..choose.subset import select
from ..compile.cache import CompileCache
from ..compile.pool import CompileJob, compile_all
from ..compile.shipped import Shipped
from ..compile.triton import Compiled
from ..executors.local import LocalExecutor, begun
from ..journal.file import read_journal
from ..plan.families import Family, Pool, by_code, compilable, serves
from ..plan.plan import BuildPlan
from ..tune.tuner import Entrants, tune_problems

_JIT_CONFIGS = 6  # 4 lose 1.0 % to all (docs/inside/cost-model.md); two more for those that don't compile
_JIT_ROWS = 1 << 20
_CELL_CONFIGS = 8  # of one problem and bucket: what the tuner takes its contenders from
SHARE = 0.5  # of those are measured: the shortlist is short
_OVERHEAD_REGISTERS = 64  # beside a thread's share of the tile


def compile_kind(problem: str, sm: int, cache: str | None, answer: Path) -> None:
    """For ``child.call``: write a bundle that runs every problem of ``problem``'s kind, its choices modelled."""
    wanted = _problem(problem)
    plan = BuildPlan({wanted: buckets_between(1, _JIT_ROWS)}, ())
    configs = _spread(wanted, plan.buckets[wanted], sm)
    made = Candidates.made_here(sm, compile_specs(_specs(wanted, configs, sm), sm, _cache(cache)))
    chosen = choose(plan, made.compiled, sm)
    answer.write_bytes(codec.encode(assembled(plan, made, chosen, None)))


def measure_cells(
    cells: Sequence[tuple[str, Sequence[int]]],
    models: Sequence[tuple[str, int, str, Sequence[str]]],
    sm: int,
    device: int,
    budget_s: float,
    cache: str | None,
    made: Sequence[str],
    answer: Path,
) -> None:
    """For ``child.call``: compile candidates for these cells, measure them beside all that the runtime finds, and
    write the bundle of what was found. ``made`` names files beside ``answer``: bundles that the caller made and has in
    no other place.

    A problem that nothing can run is left out.

    Raises
    ------
    CompileError, HostError
        if nothing can be compiled, and there is nothing else.
    """
    with begun(device) as gpu:
        _measure_cells(cells, models, sm, device, gpu, budget_s, cache, made, answer)


def _measure_cells(
    cells: Sequence[tuple[str, Sequence[int]]],
    models: Sequence[tuple[str, int, str, Sequence[str]]],
    sm: int,
    device: int,
    gpu: LocalExecutor | None,
    budget_s: float,
    cache: str | None,
    made: Sequence[str],
    answer: Path,
) -> None:
    wanted = {_problem(problem): tuple(buckets) for problem, buckets in cells}
    records = tuple(
        Model(name, 1, 1, top_k, DType(dtype), tuple(map(_problem, problems)))
        for name, top_k, dtype, problems in models
    )
    path, journal = answer.with_suffix(".candidates"), answer.with_suffix(".journal")
    found = Incumbents.found()
    for name in made:
        found.snapshot.add(open_bundle(answer.with_name(name)))
    planned = BuildPlan(wanted, records)
    candidates = _candidates_beside(wanted, found.codes(planned.problems, sm), sm, _cache(cache))
    able = [one.variant for one in candidates.every]
    planned = planned.without({one for one in wanted if not any(serves(variant, one) for variant in able)})
    every = choose_among_all(planned, candidates.every, sm)
    publish(path, codec.encode(assembled(planned, candidates, every, None)))
    if gpu is not None:
        with open_bundle(path) as bundle:
            gpu.measures(str(path), bundle.digest)
    runs = found.on(planned.buckets)
    tune_problems(
        planned.buckets,
        path,
        journal,
        budget_s=budget_s,
        gpus=[device],
        executors=None if gpu is None else [gpu],
        with_torch=False,
        entrants=Entrants(SHARE, runs=runs, quick=True, around=found.around),
    )
    answer.write_bytes(codec.encode(measured_bundle(planned, candidates, read_journal(journal), runs)))


def _candidates_beside(
    cells: Mapping[Problem, Sequence[int]], there: Sequence[Carried], sm: int, cache: CompileCache | None
) -> Candidates:
    """What compiles for these cells, beside what is there.

    Where nothing of a problem's does, and nothing runs it yet, the model's next ones are compiled, until one does.
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
        able = [one.variant for one in (*compiled, *(one.code for one in there))]
        lacking = {one: row for one, row in lacking.items() if not any(serves(variant, one) for variant in able)}
        if not lacking:
            break
    if compiled:
        return Candidates.made_here(sm, tuple(dict.fromkeys(compiled))).beside(there)
    if not there and failure is not None:
        raise failure
    return Candidates.of_bundles(sm, there)


def _specs_of(cells: Mapping[Problem, Sequence[int]], sm: int, first: int = 0) -> dict[Spec, None]:
    """What is compiled for these problems and buckets: of each the best by the cost model from the ``first`` on, and
    the fallbacks."""
    specs: dict[Spec, None] = {}
    for problem, buckets in cells.items():
        ranked = [_ranked(problem, bucket, sm) for bucket in buckets]
        picked = dict.fromkeys(config for row in ranked for _, config in row[first : first + _CELL_CONFIGS])
        specs.update(dict.fromkeys(_specs(problem, picked, sm)))
    return specs


def compile_specs(specs: Iterable[Spec], sm: int, cache: CompileCache | None) -> tuple[Compiled, ...]:
    """What of it is there compiled, or compiles, and fits, in that order.

    Raises
    ------
    CompileError
        with the reasons, if nothing does.
    HostError
        if Triton is missing, or the machine stops the compiler.
    """
    specs = list(specs)
    if not specs:
        raise CompileError(
            f"sm_{sm}: no kernel is for such a problem (of quantised weights, {MAX_EXPERTS} experts at most)"
        )
    groups = by_code(specs, sm)
    results = compile_all([CompileJob(group[0], sm) for group in groups], cache=cache, shipped=Shipped.found(sm).get)
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
    family = Family(problem.op, problem.dtype, problem.layout, problem.fusion)  # by the name that it was asked by
    return compilable(family, aligned, fallbacks(problem.op, problem.dtype, sm), [problem.E])


def _spread(problem: Problem, buckets: Sequence[int], sm: int) -> list[Config]:
    """The few configs that serve all buckets best."""
    every = _candidates(problem, sm)
    number = {config: i for i, config in enumerate(every)}
    table = {
        (problem, bucket): [(number[config], us) for us, config in _ranked(problem, bucket, sm)] for bucket in buckets
    }
    return [every[i] for i in select(table, _JIT_CONFIGS).variants]


def _ranked(problem: Problem, bucket: int, sm: int) -> list[tuple[float, Config]]:
    """(estimate in us, config) of every candidate, best first, by what a compiled one is likely to take."""
    every = _candidates(problem, sm)
    resources = [_likely(problem, config, sm) for config in every]
    named = problem.canonical
    ranked = Ranker(resources, named.op, problem.dtype, chip_for(sm)).rank(named, bucket)
    return [(us, every[i]) for us, i in ranked if math.isfinite(us)]


def _candidates(problem: Problem, sm: int) -> list[Config]:
    """Those that a build would compile for the problem's form: what ships compiled."""
    return list(Pool().candidates(Family.of(problem), sm, (problem.op,)))


def _likely(problem: Problem, config: Config, sm: int) -> Resources:
    width = threads(Spec(problem.op, problem.dtype, config))
    tile = config.block_n * config.block_k if problem.op is Op.DW else config.block_m * config.block_n
    registers = min(arch_of(sm).limits.registers_per_thread, _OVERHEAD_REGISTERS + tile // width)
    shared = shared_bytes_at_least(problem.op, problem.dtype, config, sm)
    return Resources(config, width, shared, registers, ALIGNMENT_BYTES)
