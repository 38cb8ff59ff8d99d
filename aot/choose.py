"""Compiled variants -> the few that ship, and a choice for every problem and bucket, by the cost model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..artifacts.errors import CompileError
from ..artifacts.types import Choice, Problem, Source
from ..kernels.chips import chip_for
from ..kernels.cost import Ranker, Resources
from .compile import Compiled
from .plan import Plan
from .select import Loss, select
from .variants import Family, families, serves

CONFIG_LIMIT = 16  # of a family, fallbacks included


@dataclass(frozen=True, slots=True)
class Chosen:
    """What ships: ``choices`` point into ``variants``. ``losses`` tell what fewer variants cost."""

    variants: tuple[Compiled, ...]
    choices: Mapping[Problem, tuple[Choice, ...]]
    losses: tuple[Loss, ...]


def choose(plan: Plan, compiled: Sequence[Compiled], sm: int) -> Chosen:
    """The variants to ship, at most 16 a family, and the modelled best of them for each (problem, bucket).

    Fallbacks always ship: they are what any other N and K runs on.

    Raises
    ------
    CompileError
        if no variant serves a problem.
    """
    times = {
        (problem, bucket): ranked
        for family, problems in families(plan.problems).items()
        for problem, bucket, ranked in _ranked(family, problems, plan, compiled, sm)
    }
    kept = [i for i, one in enumerate(compiled) if one.variant.alignment == 1]
    fallbacks: dict[Family, int] = {}
    for i in kept:
        family = Family.of(compiled[i].variant)
        fallbacks[family] = fallbacks.get(family, 0) + 1
    room = CONFIG_LIMIT - max(fallbacks.values(), default=0)
    table = {key: [(i, us) for us, i in ranked if i not in kept] for key, ranked in times.items()}
    selection = select({key: cell for key, cell in table.items() if cell}, limit=room)
    ships = sorted({*kept, *selection.variants})
    place = {old: new for new, old in enumerate(ships)}
    choices: dict[Problem, list[Choice]] = {problem: [] for problem in plan.problems}
    for (problem, bucket), ranked in times.items():
        first, *rest = [(us, place[i]) for us, i in ranked if i in place]
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
        tuple(compiled[i] for i in ships),
        {problem: tuple(row) for problem, row in choices.items()},
        selection.losses,
    )


def _ranked(
    family: Family, problems: Sequence[Problem], plan: Plan, compiled: Sequence[Compiled], sm: int
) -> list[tuple[Problem, int, list[tuple[float, int]]]]:
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
