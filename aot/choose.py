"""Compiled variants -> the few that ship, and a choice for every problem and bucket, by the cost model."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..artifacts.errors import CompileError
from ..artifacts.types import Choice, Fusion, Problem, Source
from ..kernels.chips import chip_for
from ..kernels.cost import Ranker, Resources
from .compile import Compiled
from .plan import Plan
from .select import Loss, select_among
from .variants import Family, families, is_aligned, serves

CONFIG_LIMIT = 16  # of an op, dtype and layout, in all their families, fallbacks included

Ranked = list[tuple[Problem, int, list[tuple[float, int]]]]
Knobs = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Chosen:
    """What ships: ``choices`` point into ``variants``. ``losses`` tell what fewer variants cost."""

    variants: tuple[Compiled, ...]
    choices: Mapping[Problem, tuple[Choice, ...]]
    losses: tuple[Loss, ...]


def choose(plan: Plan, compiled: Sequence[Compiled], sm: int) -> Chosen:
    """The variants to ship, of at most 16 configs an op and dtype, and the best for each (problem, bucket).

    Fallbacks always ship: they are what any other N and K runs on. Forms that move rows ship fewer
    configs than the plain one, or the same.

    Raises
    ------
    CompileError
        if no variant serves a problem.
    """
    ranked = {
        family: _ranked(family, problems, plan, compiled, sm) for family, problems in families(plan.problems).items()
    }
    ships = {i for i, one in enumerate(compiled) if one.variant.alignment == 1}
    losses: list[Loss] = []
    for group in _by_op(ranked):
        configs = _configs(group, ranked, compiled)
        for family in group:
            table = _table(ranked[family])
            allowed = {i for i, one in enumerate(compiled) if one.variant.config in configs}
            if table:
                losses.append(select_among(table, CONFIG_LIMIT, allowed=allowed))
                ships.update(losses[-1].variants)
    place = {old: new for new, old in enumerate(sorted(ships))}
    choices: dict[Problem, list[Choice]] = {problem: [] for problem in plan.problems}
    for problem, bucket, times in itertools.chain.from_iterable(ranked.values()):
        first, *rest = itertools.islice(((us, place[i]) for us, i in times if i in place), 2)
        second = rest[0] if rest else None
        choices[problem].append(
            Choice(
                bucket,
                first[1],
                Source.MODELLED,
                _ns(first[0]),
                second and second[1],
                second and _ns(second[0]),
            )
        )
    return Chosen(
        tuple(compiled[i] for i in place),
        {problem: tuple(row) for problem, row in choices.items()},
        tuple(losses),
    )


def _by_op(members: Iterable[Family]) -> list[list[Family]]:
    """The families of each op, dtype and layout."""
    groups: dict[Family, list[Family]] = {}
    for family in members:
        groups.setdefault(replace(family, fusion=Fusion.NONE), []).append(family)
    return list(groups.values())


def _configs(group: Sequence[Family], ranked: Mapping[Family, Ranked], compiled: Sequence[Compiled]) -> set[Knobs]:
    """The aligned configs that serve all families of a group best, together with the fallbacks at most 16."""
    fallbacks = {
        one.variant.config for one in compiled if one.variant.alignment == 1 and Family.of(one.variant) in group
    }
    numbers: dict[Knobs, int] = {}
    table = {
        key: [(numbers.setdefault(compiled[i].variant.config, len(numbers)), us) for i, us in cell]
        for family in group
        for key, cell in _table(ranked[family]).items()
    }
    if not table:
        return set()
    names = list(numbers)
    return {names[i] for i in select_among(table, max(1, CONFIG_LIMIT - len(fallbacks))).variants}


def _table(ranked: Ranked) -> dict[tuple[Problem, int], list[tuple[int, float]]]:
    """What there is to choose from: problems that aren't aligned have the fallbacks alone."""
    return {(problem, bucket): [(i, us) for us, i in times] for problem, bucket, times in ranked if is_aligned(problem)}


def _ranked(family: Family, problems: Sequence[Problem], plan: Plan, compiled: Sequence[Compiled], sm: int) -> Ranked:
    """Each (problem, bucket) of a family with its (estimate in us, variant) pairs, best first."""
    rankers: dict[tuple[int, ...], Ranker] = {}
    found = []
    for problem in problems:
        able = tuple(i for i, one in enumerate(compiled) if serves(one.variant, problem))
        if not able:
            raise CompileError(f"sm_{sm}: no variant is left for {problem}")
        if able not in rankers:
            resources = [Resources.of(compiled[i].variant) for i in able]
            rankers[able] = Ranker(resources, family.op, family.dtype, chip_for(sm))
        for bucket in plan.buckets[problem]:
            found.append((problem, bucket, [(us, able[i]) for us, i in rankers[able].rank(problem, bucket)]))
    return found


def _ns(us: float) -> int:
    return max(1, round(us * 1000))
