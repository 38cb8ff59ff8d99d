"""Choose the few compiled variants that ship, and one for every problem and bucket.

Measured times decide if there are any, else the cost model. A variant that was not measured in a cell counts there with
the model's estimate, scaled by the variants that were.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from ...artifacts.errors import CompileError
from ...artifacts.limits import MAX_TIME_NS
from ...artifacts.records import Choice, Fusion, Layout, Op, Problem, Source, Variant
from ...kernels.chips import Chip, chip_for
from ...kernels.cost import Resources
from ...kernels.cost_model import Ranker
from ...kernels.entry import has_aligned_rows
from ...runtime.dispatch.decide import torch_runs
from ...runtime.dispatch.neighbours import Neighbourhood, blended
from ...runtime.dispatch.snapshot import Rejected
from ..compile.triton import Compiled
from ..journal.timings import CellTimes, Timings, cell_of
from ..plan.families import CONFIG_LIMIT, Family, families, optional, serves, ships_unchosen
from ..plan.plan import BuildPlan
from .incumbents import Running, runs
from .subset import Loss, select

# Factor on estimates next to measured times: among equals the measured variant ships.
UNMEASURED = 1.03
NOT_FASTER = 1.001  # least factor on the time of a variant that does not beat the modelled choice

# Estimated time of the runtime's launches around torch's grouped_mm: three for the ends of the experts' rows, 2 us each
# at most; in dX three more, which zero the rows past them. benchmarks/speed/by_torch.py measures it.
AROUND_TORCH_NS = {Op.FORWARD: 5_000, Op.DX: 10_000}

ConfigPairs = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class _RankedCell:
    """A problem and bucket with its variants.

    ``estimates`` are (us, variant), best first. ``times_us`` is each variant's measured time, or its scaled estimate.
    ``incumbent`` is the baseline variant that ran here before.
    """

    problem: Problem
    bucket: int
    estimates: list[tuple[float, int]]
    times_us: dict[int, float]
    measured: CellTimes | None
    incumbent: int | None = None
    settled: bool = False  # the incumbent was not measured, so it stays


Ranked = list[_RankedCell]


@dataclass(frozen=True, slots=True)
class Chosen:
    """The variants that ship: ``choices`` have indices into ``variants``, ``losses`` the cost of shipping so few.

    ``taken`` choices, of ``taken_cells``, were measured and are taken over from installed bundles.
    """

    variants: tuple[Compiled, ...]
    choices: Mapping[Problem, tuple[Choice, ...]]
    losses: tuple[Loss, ...]
    taken: int = 0
    taken_cells: frozenset[tuple[Problem, int]] = frozenset()

    @property
    def named(self) -> set[int]:
        """The variants that a choice names, as its variant or its runner-up."""
        all_choices = itertools.chain.from_iterable(self.choices.values())
        return {i for choice in all_choices for i in (choice.variant, choice.runner_up) if i is not None}


def choose(
    plan: BuildPlan,
    compiled: Sequence[Compiled],
    sm: int,
    evidence: Timings | None = None,
    configs: int = CONFIG_LIMIT,
    *,
    own: int | None = None,
    running: Running = MappingProxyType({}),
    taken: Collection[int] = (),
    around: Neighbourhood | None = None,
) -> Chosen:
    """Choose the variants to ship, at most ``configs`` an op and dtype, and the best for each (problem, bucket).

    If nothing is measured, similar cells measured ``around`` improve the model's order. Fallbacks and row kernels
    always ship: any other N and K runs on them. Fusions that move rows and the plain product share the limit. Choices
    refer to ``evidence.gpus``. An optional problem that no variant serves has no choice.

    Never slower: a cell's baseline, from ``running`` or the evidence, stays if nothing that ships beats it by more than
    noise, or if it was not measured. Such variants ship beyond ``configs``. The first ``own`` variants are of this
    build; the others are of other bundles, and ship only if a choice names them. Variants in ``taken`` ship anyway, so
    choices may use them.

    Raises
    ------
    CompileError
        if no variant serves a problem.
    """
    ranked = _all_ranked(plan, compiled, sm, evidence, running, around)
    mine = compiled[:own]
    ships = {i for i, code in enumerate(mine) if ships_unchosen(code.variant)}
    unchosen = frozenset(ships)
    losses: list[Loss] = []
    configs_of: dict[Family, set[ConfigPairs]] = {}
    for group in _by_op(ranked):
        plain = replace(group[0], fusion=Fusion.NONE)
        served = _configs(group, ranked, compiled, configs, configs_of.get(plain, set()), len(mine))
        configs_of.setdefault(plain, served)
        for family in group:
            table = _table(ranked[family])
            allowed = {i for i, code in enumerate(compiled) if code.variant.config in served}
            if table:
                losses.append(select(table, configs, allowed=allowed))
                ships.update(losses[-1].variants)
    cells = list(itertools.chain.from_iterable(ranked.values()))
    if taken:
        ships |= set(taken)
        named = _chosen(plan, compiled, ranked, sorted(ships), (), evidence).named
        ships = {*unchosen, *taken, *(sorted(ships)[i] for i in named)}
    if any(cell.incumbent is not None for cell in cells):
        ships = _with_incumbents(cells, ships, compiled)
        named = _chosen(plan, compiled, ranked, sorted(ships), (), evidence).named
        ships = _with_incumbents(cells, {*unchosen, *taken, *(sorted(ships)[i] for i in named)}, compiled)
    return _chosen(plan, compiled, ranked, sorted(ships), tuple(losses), evidence)


def _with_incumbents(cells: Sequence[_RankedCell], ships: Iterable[int], compiled: Sequence[Compiled]) -> set[int]:
    """Add the baseline of each cell that nothing in the set beats."""
    joined = set(ships)
    before = -1
    while len(joined) != before:  # an added variant may be the fastest elsewhere too
        before = len(joined)
        staying = (_staying(cell, joined, compiled) for cell in cells)
        joined.update([variant for variant in staying if variant is not None])
    return joined


def _staying(cell: _RankedCell, ships: Container[int], compiled: Sequence[Compiled]) -> int | None:
    """The baseline of a cell, if it stays: it was not measured, or no variant in ``ships`` beats it."""
    if cell.incumbent is None:
        return None
    if cell.settled or cell.measured is None:
        return cell.incumbent
    incumbent = compiled[cell.incumbent].variant.cubin_sha256
    best = cell.measured.best_of([compiled[i].variant.cubin_sha256 for _, i in cell.estimates if i in ships])
    beaten = best is not None and cell.measured.improves(best, incumbent)
    return None if beaten else cell.incumbent


def choose_among_all(plan: BuildPlan, compiled: Sequence[Compiled], sm: int) -> Chosen:
    """Rank like ``choose``, but ship every variant, for measuring to choose among. The choices are modelled.

    Raises
    ------
    CompileError
        if no variant serves a problem.
    """
    ranked = _all_ranked(plan, compiled, sm, None, {})
    return _chosen(plan, compiled, ranked, range(len(compiled)), (), None)


def _chosen(
    plan: BuildPlan,
    compiled: Sequence[Compiled],
    ranked: Mapping[Family, Ranked],
    ships: Sequence[int],
    losses: tuple[Loss, ...],
    evidence: Timings | None,
) -> Chosen:
    place = {old: new for new, old in enumerate(ships)}
    served = {cell.problem for cell in itertools.chain.from_iterable(ranked.values())}
    choices: dict[Problem, list[Choice]] = {problem: [] for problem in plan.problems if problem in served}
    for cell in itertools.chain.from_iterable(ranked.values()):
        stays = _staying(cell, place, compiled)
        choice = _measured_choice(cell, place, compiled, evidence, stays) or _modelled_choice(cell, place, stays)
        choices[cell.problem].append(choice)
    return Chosen(tuple(compiled[i] for i in place), {problem: tuple(row) for problem, row in choices.items()}, losses)


def _modelled_choice(cell: _RankedCell, place: Mapping[int, int], stays: int | None) -> Choice:
    ordered = sorted(cell.estimates, key=lambda estimate: estimate[1] != stays)
    first, *rest = itertools.islice(((us, place[i]) for us, i in ordered if i in place), 2)
    second = rest[0] if rest else None
    return Choice(
        cell.bucket, first[1], Source.MODELLED, _ns(first[0]), second and second[1], second and _ns(second[0])
    )


def _measured_choice(
    cell: _RankedCell,
    place: Mapping[int, int],
    compiled: Sequence[Compiled],
    evidence: Timings | None,
    stays: int | None,
) -> Choice | None:
    """The fastest shipped variant of a cell, by ``CellTimes.best_of``; or the baseline, if it ``stays``.

    If torch's grouped_mm is faster than that by more than noise, the choice has torch's time, too.

    None if nothing was measured, or if the modelled choice was not measured and its estimate is still the best. A
    modelled choice that was measured and lost is not chosen, whatever an unmeasured third variant's estimate.
    """
    if cell.measured is None or evidence is None:
        return None
    sha = {i: compiled[i].variant.cubin_sha256 for _, i in cell.estimates if i in place}
    times_ns = cell.measured.times_ns
    timed = sorted((times_ns[sha[i]], order, i) for order, i in enumerate(sha) if sha[i] in times_ns)
    if not timed or (stays is not None and sha[stays] not in times_ns):
        return None
    fastest, modelled = cell.measured.best_of([*sha.values()]), next(iter(sha))
    best = stays if stays is not None else next(i for i, digest in sha.items() if digest == fastest)
    if cell.incumbent is None and sha[modelled] not in times_ns and cell.times_us[modelled] < cell.times_us[best]:
        return None
    second = next(((ns, i) for ns, _, i in timed if i != best), None)
    clock = evidence.clock(cell.problem, cell.bucket)
    more_ns = AROUND_TORCH_NS.get(cell.problem.canonical.op, 0)
    by_torch = torch_runs(cell.problem, evidence.sm) and cell.measured.torch_beats(sha[best], more_ns)
    return Choice(
        cell.bucket,
        place[best],
        Source.MEASURED,
        _brought(times_ns[sha[best]], clock),
        second and place[second[1]],
        second and _brought(second[0], clock),
        evidence.gpu_of(cell.measured),
        cell.measured.torch_ns if by_torch else None,
    )


def _by_op(members: Iterable[Family]) -> list[list[Family]]:
    """The families of each op and dtype; optional ones, of few configs, apart and last."""
    groups: dict[Family, list[Family]] = {}
    for family in sorted(members, key=optional):
        groups.setdefault(replace(family, fusion=family.fusion & Fusion.SILU), []).append(family)
    return list(groups.values())


def _configs(
    group: Sequence[Family],
    ranked: Mapping[Family, Ranked],
    compiled: Sequence[Compiled],
    most: int,
    held: set[ConfigPairs],
    own: int,
) -> set[ConfigPairs]:
    """The aligned configs that serve all families of a group best, and their fallbacks', at most ``most``.

    Problems with w [E, K, N] whose shape is also there as [E, N, K] have no say. If another group of the op and dtype
    ``held`` configs before, the limit is on both groups together, or only held configs are used if they serve each
    family.
    """
    variants = (code.variant for code in compiled[:own])
    fallbacks = {variant.config for variant in variants if variant.alignment == 1 and Family.of(variant) in group}
    numbers: dict[ConfigPairs, int] = {}
    table = {
        key: _least([(numbers.setdefault(compiled[i].variant.config, len(numbers)), us) for i, us in cell])
        for family in group
        for key, cell in _table(ranked[family]).items()
    }
    if not table:
        return fallbacks
    problems = {cell.problem for row in ranked.values() for cell in row}
    table = {key: row for key, row in table.items() if not _beside(key[0], problems)} or table

    def best(allowed: set[int] | None) -> set[ConfigPairs]:
        limit = max(1, most - len(fallbacks))
        return fallbacks | {names[i] for i in select(table, limit, allowed=allowed).variants}

    names = list(numbers)
    served = best(None)
    if held and len(held | served) > most and all(_variant_configs(ranked[key], compiled) & held for key in group):
        served = best({i for i, name in enumerate(names) if name in held})
    return served


def _least(times: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    """Of equal variants, keep the faster: a config may have been compiled here and elsewhere."""
    least: dict[int, float] = {}
    for number, us in times:
        if us <= least.get(number, us):
            least[number] = us
    return list(least.items())


def _beside(problem: Problem, problems: Container[Problem]) -> bool:
    """True if ``problems`` also has the problem with w as [E, N, K]."""
    return problem.layout is Layout.KN and problem._replace(layout=Layout.NK) in problems


def _variant_configs(ranked: Ranked, compiled: Sequence[Compiled]) -> set[ConfigPairs]:
    return {compiled[i].variant.config for cell in ranked for i in cell.times_us}


def _table(ranked: Ranked) -> dict[tuple[Problem, int], list[tuple[int, float]]]:
    """The times of each cell to choose from; unaligned problems and settled cells have none."""
    return {
        (cell.problem, cell.bucket): list(cell.times_us.items())
        for cell in ranked
        if has_aligned_rows(cell.problem) and not cell.settled
    }


def _all_ranked(
    plan: BuildPlan,
    compiled: Sequence[Compiled],
    sm: int,
    evidence: Timings | None,
    running: Running,
    around: Neighbourhood | None = None,
) -> dict[Family, Ranked]:
    return {
        family: _ranked(family, problems, plan, compiled, sm, evidence, running, around)
        for family, problems in families(plan.problems).items()
    }


def _ranked(
    family: Family,
    problems: Sequence[Problem],
    plan: BuildPlan,
    compiled: Sequence[Compiled],
    sm: int,
    evidence: Timings | None,
    running: Running,
    around: Neighbourhood | None,
) -> Ranked:
    """Each (problem, bucket) of a family with its variants."""
    rankers: dict[tuple[int, ...], Ranker] = {}
    akin = {i for i, code in enumerate(compiled) if Family.of(code.variant) == family}
    chip = (evidence and evidence.chip) or chip_for(sm)
    cells = []
    for problem in problems:
        before = {bucket: _before(problem, bucket, evidence, running) for bucket in plan.buckets[problem]}
        ran = set(itertools.chain.from_iterable(before.values()))
        able = tuple(
            i
            for i, code in enumerate(compiled)
            if (i in akin and serves(code.variant, problem)) or (ran and runs(code.variant, problem, ran))
        )
        if not able:
            if optional(problem):
                continue
            raise CompileError(f"sm_{sm}: no variant is left for {problem}")
        if able not in rankers:
            resources = [Resources.of(compiled[i].variant) for i in able]
            rankers[able] = Ranker(resources, family.gemm, family.dtype, chip)
        for bucket in plan.buckets[problem]:
            estimates = [(us, able[i]) for us, i in rankers[able].rank(problem.canonical, bucket)]
            estimates = with_neighbours(around, problem, bucket, chip, estimates, lambda i: compiled[i].variant)
            measured = evidence.cells.get(cell_of(problem, bucket)) if evidence else None
            place = {compiled[i].variant.cubin_sha256: i for _, i in reversed(estimates)}
            incumbent = next((place[sha] for sha in before[bucket] if sha in place), None)
            times_us = _times_us(estimates, measured, compiled, incumbent)
            settled = incumbent is not None and not (
                measured and compiled[incumbent].variant.cubin_sha256 in measured.times_ns
            )
            cells.append(_RankedCell(problem, bucket, estimates, times_us, measured, incumbent, settled))
    return cells


def with_neighbours(
    around: Neighbourhood | None,
    problem: Problem,
    bucket: int,
    chip: Chip,
    estimates: list[tuple[float, int]],
    variant: Callable[[int], Variant],
) -> list[tuple[float, int]]:
    """Blend the cost model's (estimate in us, variant) with cells measured around this one; the best comes first.

    The estimates stay as they are if nothing like the cell was measured, or if the bundle that has it is damaged.
    """
    near = None
    if around is not None:
        with contextlib.suppress(Rejected):
            near = around.near(problem, bucket, aligned=has_aligned_rows(problem))
    if around is None or near is None:
        return estimates
    numbers = {i: around.numbered(variant(i)) for _, i in estimates}
    return blended(near, problem, bucket, chip, estimates, numbers)


def _before(problem: Problem, bucket: int, evidence: Timings | None, running: Running) -> tuple[bytes, ...]:
    """The baselines of a cell: those not timed, then the fastest first; a choice has to beat the first."""
    now = running.get((problem, bucket))
    measured = evidence.cells.get(cell_of(problem, bucket)) if evidence else None
    times_ns = measured.times_ns if measured else {}
    shas = {*(measured.incumbents if measured else ()), *((now.variant,) if now else ())}
    return tuple(sorted(shas, key=lambda sha: (times_ns.get(sha, 0), sha)))


def _times_us(
    estimates: Sequence[tuple[float, int]],
    measured: CellTimes | None,
    compiled: Sequence[Compiled],
    incumbent: int | None,
) -> dict[int, float]:
    """The measured times, and the other estimates on their scale.

    If the model's first choice was measured, no estimate counts as faster than the fastest measured time: the model
    ranked it lower, and the scale of a few estimates is no evidence. No variant counts as faster than the ``incumbent``
    unless it beats it by more than noise.
    """
    if measured is None:
        return {i: us for us, i in estimates}
    times = {
        i: measured.times_ns[sha] / 1000
        for _, i in estimates
        if (sha := compiled[i].variant.cubin_sha256) in measured.times_ns
    }
    first = next((i for _, i in estimates if i in times), None)
    if first is not None:  # a variant that is not faster by more than noise gives no reason to ship it
        modelled = compiled[first].variant.cubin_sha256
        for i in times:
            if i != first and not measured.beats(compiled[i].variant.cubin_sha256, modelled):
                times[i] = max(times[i], times[first] * NOT_FASTER)
    ratios = [math.log(times[i] / us) for us, i in estimates if i in times and math.isfinite(us)]
    scale = UNMEASURED * math.exp(math.fsum(ratios) / len(ratios)) if ratios else 1.0
    least = UNMEASURED * min(times.values()) if first is not None and first == estimates[0][1] else 0.0
    if incumbent in times:
        held = compiled[incumbent].variant.cubin_sha256
        for i in times:
            if i != incumbent and not measured.improves(compiled[i].variant.cubin_sha256, held):
                times[i] = max(times[i], times[incumbent] * NOT_FASTER)
        least = max(least, UNMEASURED * times[incumbent])
    return {i: times.get(i, max(us * scale, least)) for us, i in estimates}


def _brought(ns: int, clock: float) -> int:
    return max(1, min(MAX_TIME_NS, round(ns * clock)))


def _ns(us: float) -> int:
    return max(1, round(min(us * 1000, MAX_TIME_NS)))
