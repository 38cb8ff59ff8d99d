"""Compiled variants -> the few that ship, and a choice for every problem and bucket.

By the times that were measured, where there are any, and by the cost model elsewhere. A variant that was not measured
in a cell counts there by the model's estimate, scaled as those that were measured say.
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
from ...artifacts.records.bundle import Choice, Source, Variant
from ...artifacts.records.problem import Fusion, Layout, Op, Problem
from ...kernels.contract.words import has_aligned_rows
from ...kernels.cost.resources import Resources
from ...kernels.cost_model import Ranker
from ...kernels.hardware.chips import Chip, chip_for
from ...runtime.dispatch.neighbours import Neighbourhood, blended
from ...runtime.dispatch.ranking import torch_runs
from ...runtime.dispatch.snapshot import Rejected
from ..compile.triton import Compiled
from ..journal.timings import CellTimes, Timings, cell_of
from ..plan.families import CONFIG_LIMIT, Family, families, optional, serves, ships_unchosen
from ..plan.plan import BuildPlan
from .incumbents import Running, runs
from .subset import Loss, select

# What an estimate is charged beside measured times: among equals the one that was measured ships.
UNMEASURED = 1.03
NOT_FASTER = 1.001  # what does not beat the modelled choice counts as this much slower, at least

# What the runtime launches around torch's grouped_mm takes: three launches for where each expert's rows end (2 us each
# at most), and as many for the zeros past them, which dX has. A guess: benchmarks/speed/by_torch.py times it.
AROUND_TORCH_NS = {Op.FORWARD: 5_000, Op.DX: 10_000}

ConfigPairs = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class _RankedCell:
    """A problem and bucket: (estimate in us, variant) best first; ``times_us`` of all, measured where it was.

    ``incumbent`` is the variant that ran here before.
    """

    problem: Problem
    bucket: int
    estimates: list[tuple[float, int]]
    times_us: dict[int, float]
    measured: CellTimes | None
    incumbent: int | None = None
    settled: bool = False  # the incumbent stays, as it was not measured


Ranked = list[_RankedCell]


@dataclass(frozen=True, slots=True)
class Chosen:
    """What ships: ``choices`` point into ``variants``. ``losses`` tell what fewer variants cost.

    ``taken`` choices, of ``taken_cells``, were measured and are taken over from installed bundles.
    """

    variants: tuple[Compiled, ...]
    choices: Mapping[Problem, tuple[Choice, ...]]
    losses: tuple[Loss, ...]
    taken: int = 0
    taken_cells: frozenset[tuple[Problem, int]] = frozenset()

    @property
    def named(self) -> set[int]:
        """The variants that a choice names, or has as its runner-up."""
        every = itertools.chain.from_iterable(self.choices.values())
        return {i for one in every for i in (one.variant, one.runner_up) if i is not None}


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
    """The variants to ship, of at most ``configs`` an op and dtype, and the best for each (problem, bucket).

    Where nothing is measured, ``around`` says what was measured in like cells elsewhere, and the model's order changes.
    Fallbacks always ship: they are what any other N and K runs on; and so do passes. Forms that move rows ship fewer
    configs than the plain one, or the same. Choices point into ``evidence.gpus``. An optional problem that no variant
    serves has no choice.

    Never slower: what ran in a cell before, by ``running`` or by the evidence, stays where nothing that ships beats it
    by more than noise, and where it was not measured. Such variants ship beyond ``configs``. The first ``own`` variants
    are of this build; what follows is of other bundles, and ships only where a choice names it. Those of ``taken`` ship
    anyway, so what is chosen is chosen among them, too.

    Raises
    ------
    CompileError
        if no variant serves a problem.
    """
    ranked = _all_ranked(plan, compiled, sm, evidence, running, around)
    mine = compiled[:own]
    ships = {i for i, one in enumerate(mine) if ships_unchosen(one.variant)}
    unchosen = frozenset(ships)
    losses: list[Loss] = []
    held: dict[Family, set[ConfigPairs]] = {}
    for group in _by_op(ranked):
        plain = replace(group[0], fusion=Fusion.NONE)
        served = _configs(group, ranked, compiled, configs, held.get(plain, set()), len(mine))
        held.setdefault(plain, served)
        for family in group:
            table = _table(ranked[family])
            allowed = {i for i, one in enumerate(compiled) if one.variant.config in served}
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
    """What ships, and what ran before wherever nothing of all that takes its place."""
    found = set(ships)
    before = -1
    while len(found) != before:  # one that joins may be the fastest elsewhere, too, and beat nobody by more than noise
        before = len(found)
        staying = (_staying(cell, found, compiled) for cell in cells)
        found.update([one for one in staying if one is not None])
    return found


def _staying(cell: _RankedCell, ships: Container[int], compiled: Sequence[Compiled]) -> int | None:
    """What ran in a cell before, where it stays: it was not measured, or is beaten by none that ships."""
    if cell.incumbent is None:
        return None
    if cell.settled or cell.measured is None:
        return cell.incumbent
    incumbent = compiled[cell.incumbent].variant.cubin_sha256
    best = cell.measured.best_of([compiled[i].variant.cubin_sha256 for _, i in cell.estimates if i in ships])
    beaten = best is not None and cell.measured.improves(best, incumbent)
    return None if beaten else cell.incumbent


def choose_among_all(plan: BuildPlan, compiled: Sequence[Compiled], sm: int) -> Chosen:
    """As ``choose``, but every variant ships: what measuring chooses among. The choices are modelled.

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
    return Chosen(
        tuple(compiled[i] for i in place),
        {problem: tuple(row) for problem, row in choices.items()},
        losses,
    )


def _modelled_choice(cell: _RankedCell, place: Mapping[int, int], stays: int | None) -> Choice:
    ordered = sorted(cell.estimates, key=lambda one: one[1] != stays)
    first, *rest = itertools.islice(((us, place[i]) for us, i in ordered if i in place), 2)
    second = rest[0] if rest else None
    return Choice(
        cell.bucket,
        first[1],
        Source.MODELLED,
        _ns(first[0]),
        second and second[1],
        second and _ns(second[0]),
    )


def _measured_choice(
    cell: _RankedCell,
    place: Mapping[int, int],
    compiled: Sequence[Compiled],
    evidence: Timings | None,
    stays: int | None,
) -> Choice | None:
    """The one of those that ship that ``CellTimes.best_of`` names; or what ran before, where it ``stays``.

    If torch's grouped_mm is faster than that by more than noise, the choice has torch's time, too.

    None where nothing was measured, or the modelled one was not and looks better even so. Where it was, and lost, it
    is not taken back for the sake of a third that was not measured.
    """
    if cell.measured is None or evidence is None:
        return None
    sha = {i: compiled[i].variant.cubin_sha256 for _, i in cell.estimates if i in place}
    times_ns = cell.measured.times_ns
    timed = sorted((times_ns[sha[i]], order, i) for order, i in enumerate(sha) if sha[i] in times_ns)
    if not timed or (stays is not None and sha[stays] not in times_ns):
        return None
    found, modelled = cell.measured.best_of([*sha.values()]), next(iter(sha))
    best = stays if stays is not None else next(i for i, one in sha.items() if one == found)
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
    """The families of each op and dtype; optional ones, of few configs, apart, and last."""
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

    What is built for w [E, K, N] beside the same shape of [E, N, K] decides nothing: it runs what serves the others.
    Where another group of the op and dtype ``held`` some before, both together are, or only those of them that
    it held, if each family is served by one of those.
    """
    fallbacks = {
        one.variant.config for one in compiled[:own] if one.variant.alignment == 1 and Family.of(one.variant) in group
    }
    numbers: dict[ConfigPairs, int] = {}
    table = {
        key: _least([(numbers.setdefault(compiled[i].variant.config, len(numbers)), us) for i, us in cell])
        for family in group
        for key, cell in _table(ranked[family]).items()
    }
    if not table:
        return fallbacks
    every = {cell.problem for row in ranked.values() for cell in row}
    table = {key: row for key, row in table.items() if not _beside(key[0], every)} or table

    def best(allowed: set[int] | None) -> set[ConfigPairs]:
        limit = max(1, most - len(fallbacks))
        return fallbacks | {names[i] for i in select(table, limit, allowed=allowed).variants}

    names = list(numbers)
    found = best(None)
    if held and len(held | found) > most and all(_variant_configs(ranked[one], compiled) & held for one in group):
        found = best({i for i, name in enumerate(names) if name in held})
    return found


def _least(times: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    """Of what is there twice the faster one: a config may have been compiled here and elsewhere."""
    found: dict[int, float] = {}
    for one, us in times:
        if us <= found.get(one, us):
            found[one] = us
    return list(found.items())


def _beside(problem: Problem, every: Container[Problem]) -> bool:
    """Whether the same shape is there with w as [E, N, K], too."""
    return problem.layout is Layout.KN and problem._replace(layout=Layout.NK) in every


def _variant_configs(ranked: Ranked, compiled: Sequence[Compiled]) -> set[ConfigPairs]:
    return {compiled[i].variant.config for cell in ranked for i in cell.times_us}


def _table(ranked: Ranked) -> dict[tuple[Problem, int], list[tuple[int, float]]]:
    """What there is to choose from: problems that aren't aligned have the fallbacks alone, and where what ran before
    was not measured nothing is chosen."""
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
    akin = {i for i, one in enumerate(compiled) if Family.of(one.variant) == family}
    chip = (evidence and evidence.chip) or chip_for(sm)
    found = []
    for problem in problems:
        before = {bucket: _before(problem, bucket, evidence, running) for bucket in plan.buckets[problem]}
        ran = set(itertools.chain.from_iterable(before.values()))
        able = tuple(
            i
            for i, one in enumerate(compiled)
            if (i in akin and serves(one.variant, problem)) or (ran and runs(one.variant, problem, ran))
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
            found.append(_RankedCell(problem, bucket, estimates, times_us, measured, incumbent, settled))
    return found


def with_neighbours(
    around: Neighbourhood | None,
    problem: Problem,
    bucket: int,
    chip: Chip,
    estimates: list[tuple[float, int]],
    variant: Callable[[int], Variant],
) -> list[tuple[float, int]]:
    """Blend the cost model's (estimate in us, variant) with what was measured around a cell; the best comes first.

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
    """What ran in a cell before, what a choice has to beat first: what was not timed, then the fastest."""
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
    """The times measured, and the other estimates on their scale.

    Where the model's first was measured, none of the others counts as faster than the fastest that was: it was passed
    over by the same model, and the scale of a few estimates is no evidence. Nor does what would not take the place of
    the ``incumbent`` count as faster than that.
    """
    if measured is None:
        return {i: us for us, i in estimates}
    known = {
        i: measured.times_ns[sha] / 1000
        for _, i in estimates
        if (sha := compiled[i].variant.cubin_sha256) in measured.times_ns
    }
    first = next((i for _, i in estimates if i in known), None)
    if first is not None:  # what is not faster by more than noise is no reason to ship it
        modelled = compiled[first].variant.cubin_sha256
        for i in known:
            if i != first and not measured.beats(compiled[i].variant.cubin_sha256, modelled):
                known[i] = max(known[i], known[first] * NOT_FASTER)
    ratios = [math.log(known[i] / us) for us, i in estimates if i in known and math.isfinite(us)]
    scale = UNMEASURED * math.exp(math.fsum(ratios) / len(ratios)) if ratios else 1.0
    least = UNMEASURED * min(known.values()) if first is not None and first == estimates[0][1] else 0.0
    if incumbent in known:
        held = compiled[incumbent].variant.cubin_sha256
        for i in known:
            if i != incumbent and not measured.improves(compiled[i].variant.cubin_sha256, held):
                known[i] = max(known[i], known[incumbent] * NOT_FASTER)
        least = max(least, UNMEASURED * known[incumbent])
    return {i: known.get(i, max(us * scale, least)) for us, i in estimates}


def _brought(ns: int, clock: float) -> int:
    return max(1, min(MAX_TIME_NS, round(ns * clock)))


def _ns(us: float) -> int:
    return max(1, round(min(us * 1000, MAX_TIME_NS)))
