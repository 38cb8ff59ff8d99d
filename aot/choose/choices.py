"""Compiled variants -> the few that ship, and a choice for every problem and bucket.

By the times that were measured, where there are any, and by the cost model elsewhere. A variant that was not measured
in a cell counts there by the model's estimate, scaled as those that were measured say.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ...artifacts.errors import CompileError
from ...artifacts.limits import MAX_TIME_NS
from ...artifacts.records.bundle import Choice, Source
from ...artifacts.records.problem import Fusion, Layout, Problem
from ...kernels.contract.alignment import has_aligned_rows
from ...kernels.cost.model import Ranker, Resources
from ...kernels.hardware.chips import chip_for
from ..compile.triton import Compiled
from ..journal.timings import CellTimes, Timings, cell_of
from ..plan.families import CONFIG_LIMIT, Family, families, optional, serves, ships_unchosen
from ..plan.plan import BuildPlan
from .subset import Loss, select

# What an estimate is charged beside measured times: among equals the one that was measured ships.
UNMEASURED = 1.03
NOT_FASTER = 1.001  # what does not beat the modelled choice counts as this much slower, at least

ConfigPairs = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class _Cell:
    """A problem and bucket: (estimate in us, variant) best first; ``times_us`` of all, measured where it was."""

    problem: Problem
    bucket: int
    estimates: list[tuple[float, int]]
    times_us: dict[int, float]
    measured: CellTimes | None


Ranked = list[_Cell]


@dataclass(frozen=True, slots=True)
class Chosen:
    """What ships: ``choices`` point into ``variants``. ``losses`` tell what fewer variants cost."""

    variants: tuple[Compiled, ...]
    choices: Mapping[Problem, tuple[Choice, ...]]
    losses: tuple[Loss, ...]


def choose(
    plan: BuildPlan, compiled: Sequence[Compiled], sm: int, evidence: Timings | None = None, configs: int = CONFIG_LIMIT
) -> Chosen:
    """The variants to ship, of at most ``configs`` an op and dtype, and the best for each (problem, bucket).

    Fallbacks always ship: they are what any other N and K runs on; and so do passes. Forms that move rows ship fewer
    configs than the plain one, or the same. Choices point into ``evidence.gpus``. An optional problem that no variant
    serves has no choice.

    Raises
    ------
    CompileError
        if no variant serves a problem.
    """
    ranked = _all_ranked(plan, compiled, sm, evidence)
    ships = {i for i, one in enumerate(compiled) if ships_unchosen(one.variant)}
    losses: list[Loss] = []
    held: dict[Family, set[ConfigPairs]] = {}
    for group in _by_op(ranked):
        plain = replace(group[0], fusion=Fusion.NONE)
        served = _configs(group, ranked, compiled, configs, held.get(plain, set()))
        held.setdefault(plain, served)
        for family in group:
            table = _table(ranked[family])
            allowed = {i for i, one in enumerate(compiled) if one.variant.config in served}
            if table:
                losses.append(select(table, configs, allowed=allowed))
                ships.update(losses[-1].variants)
    return _chosen(plan, compiled, ranked, sorted(ships), tuple(losses), evidence)


def choose_among_all(plan: BuildPlan, compiled: Sequence[Compiled], sm: int) -> Chosen:
    """As ``choose``, but every variant ships: what measuring chooses among. The choices are modelled.

    Raises
    ------
    CompileError
        if no variant serves a problem.
    """
    return _chosen(plan, compiled, _all_ranked(plan, compiled, sm, None), range(len(compiled)), (), None)


def _chosen(
    plan: BuildPlan, compiled: Sequence[Compiled], ranked: Mapping[Family, Ranked], ships: Sequence[int],
    losses: tuple[Loss, ...], evidence: Timings | None,
) -> Chosen:  # fmt: skip
    place = {old: new for new, old in enumerate(ships)}
    served = {cell.problem for cell in itertools.chain.from_iterable(ranked.values())}
    choices: dict[Problem, list[Choice]] = {problem: [] for problem in plan.problems if problem in served}
    for cell in itertools.chain.from_iterable(ranked.values()):
        choice = _measured_choice(cell, place, compiled, evidence) or _modelled_choice(cell, place)
        choices[cell.problem].append(choice)
    return Chosen(
        tuple(compiled[i] for i in place),
        {problem: tuple(row) for problem, row in choices.items()},
        losses,
    )


def _modelled_choice(cell: _Cell, place: Mapping[int, int]) -> Choice:
    first, *rest = itertools.islice(((us, place[i]) for us, i in cell.estimates if i in place), 2)
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
    cell: _Cell, place: Mapping[int, int], compiled: Sequence[Compiled], evidence: Timings | None
) -> Choice | None:
    """The one of those that ship that ``CellTimes.best_of`` names.

    None where nothing was measured, or the modelled one was not and looks better even so. Where it was, and lost, it
    is not taken back for the sake of a third that was not measured.
    """
    if cell.measured is None or evidence is None:
        return None
    sha = {i: compiled[i].variant.cubin_sha256 for _, i in cell.estimates if i in place}
    times_ns = cell.measured.times_ns
    timed = sorted((times_ns[sha[i]], order, i) for order, i in enumerate(sha) if sha[i] in times_ns)
    if not timed:
        return None
    found, modelled = cell.measured.best_of([*sha.values()]), next(iter(sha))
    best = next(i for i, one in sha.items() if one == found)
    if sha[modelled] not in times_ns and cell.times_us[modelled] < cell.times_us[best]:
        return None
    second = next(((ns, i) for ns, _, i in timed if i != best), None)
    clock = evidence.clock(cell.problem, cell.bucket)
    return Choice(
        cell.bucket,
        place[best],
        Source.MEASURED,
        _brought(times_ns[sha[best]], clock),
        second and place[second[1]],
        second and _brought(second[0], clock),
        evidence.gpu_of(cell.measured),
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
) -> set[ConfigPairs]:
    """The aligned configs that serve all families of a group best, and their fallbacks', at most ``most``.

    What is built for w [E, K, N] beside the same shape of [E, N, K] decides nothing: it runs what serves the others.
    Where another group of the op and dtype ``held`` some before, both together are, or only those of them that
    it held, if each family is served by one of those.
    """
    fallbacks = {
        one.variant.config for one in compiled if one.variant.alignment == 1 and Family.of(one.variant) in group
    }
    numbers: dict[ConfigPairs, int] = {}
    table = {
        key: [(numbers.setdefault(compiled[i].variant.config, len(numbers)), us) for i, us in cell]
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


def _beside(problem: Problem, every: Container[Problem]) -> bool:
    """Whether the same shape is there with w as [E, N, K], too."""
    return problem.layout is Layout.KN and replace(problem, layout=Layout.NK) in every


def _variant_configs(ranked: Ranked, compiled: Sequence[Compiled]) -> set[ConfigPairs]:
    return {compiled[i].variant.config for cell in ranked for i in cell.times_us}


def _table(ranked: Ranked) -> dict[tuple[Problem, int], list[tuple[int, float]]]:
    """What there is to choose from: problems that aren't aligned have the fallbacks alone."""
    return {
        (cell.problem, cell.bucket): list(cell.times_us.items()) for cell in ranked if has_aligned_rows(cell.problem)
    }


def _all_ranked(
    plan: BuildPlan, compiled: Sequence[Compiled], sm: int, evidence: Timings | None
) -> dict[Family, Ranked]:
    return {
        family: _ranked(family, problems, plan, compiled, sm, evidence)
        for family, problems in families(plan.problems).items()
    }


def _ranked(
    family: Family, problems: Sequence[Problem], plan: BuildPlan, compiled: Sequence[Compiled], sm: int,
    evidence: Timings | None,
) -> Ranked:  # fmt: skip
    """Each (problem, bucket) of a family with its variants."""
    rankers: dict[tuple[int, ...], Ranker] = {}
    chip = (evidence and evidence.chip) or chip_for(sm)
    found = []
    for problem in problems:
        able = tuple(i for i, one in enumerate(compiled) if serves(one.variant, problem))
        if not able:
            if optional(problem):
                continue
            raise CompileError(f"sm_{sm}: no variant is left for {problem}")
        if able not in rankers:
            resources = [Resources.of(compiled[i].variant) for i in able]
            rankers[able] = Ranker(resources, family.gemm, family.dtype, chip)
        for bucket in plan.buckets[problem]:
            estimates = [(us, able[i]) for us, i in rankers[able].rank(problem.canonical, bucket)]
            measured = evidence.cells.get(cell_of(problem, bucket)) if evidence else None
            found.append(_Cell(problem, bucket, estimates, _times_us(estimates, measured, compiled), measured))
    return found


def _times_us(
    estimates: Sequence[tuple[float, int]], measured: CellTimes | None, compiled: Sequence[Compiled]
) -> dict[int, float]:
    """The times measured, and the other estimates on their scale.

    Where the model's first was measured, none of the others counts as faster than the fastest that was: it was passed
    over by the same model, and the scale of a few estimates is no evidence.
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
    return {i: known.get(i, max(us * scale, least)) for us, i in estimates}


def _brought(ns: int, clock: float) -> int:
    return max(1, min(MAX_TIME_NS, round(ns * clock)))


def _ns(us: float) -> int:
    return max(1, round(us * 1000))
