"""Which variants are worth measuring in a cell: the first ones of the ranking, and what won nearby.

The ranking is the cost model's, blended with measured neighbours where a capability has some. docs/inside/cost-model.md
has what the shortlist loses, ``python benchmarks/run.py unknown --shortlist JOURNAL`` prints it.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ...artifacts.records.precision import DType
from ...artifacts.records.problem import Fusion, Op, Problem

SHARE = 0.1  # of the candidates of a cell
FIRST = 2  # of the model's ranking
_LEAST = 3  # measured where there are ``_MANY`` candidates, or another form's winner, else FIRST
_MANY = 24
_NEAREST = 9  # cells asked for what won there
_OTHER_FORM = 0.25  # the distance of the same shape with rows moved another way
_OTHER_SHAPE = 0.5  # of another shape with as many rows an expert: in doublings of M ...
_SIZE = 0.2  # ... and so much more for each doubling of E, N and K

FORMS = (Fusion.NONE, Fusion.GATHER, Fusion.SCATTER)  # in the order in which they are measured

ConfigPairs = tuple[tuple[str, int], ...]


@dataclass(slots=True)
class Winners:
    """What won in the cells measured so far, by config: forms of one shape have cubins of their own."""

    _found: dict[tuple[Op, DType], dict[Problem, dict[int, ConfigPairs]]] = field(default_factory=dict)
    _last: tuple[Problem, list[tuple[float, float, Problem]]] | None = None

    def add(self, problem: Problem, bucket: int, config: ConfigPairs) -> None:
        """``config`` was the fastest one in this cell."""
        self._found.setdefault((problem.op, problem.dtype), {}).setdefault(problem, {})[bucket] = config

    def of(self, problem: Problem, bucket: int) -> ConfigPairs | None:
        """The fastest config of this cell, if it was measured."""
        return self._found.get((problem.op, problem.dtype), {}).get(problem, {}).get(bucket)

    def near(self, problem: Problem, bucket: int) -> list[ConfigPairs]:
        """The winners of the nearest cells of this op and dtype, each once: what won most often first, then nearest."""
        here = self._found.get((problem.op, problem.dtype), {})
        rows = math.log2(bucket / problem.E)
        far: list[tuple[float, int, Problem]] = []
        least: list[float] = []  # the distances of the nearest, negative: a heap whose first is the farthest
        for apart, log2_E, other in self._by_shape(problem, here):
            if len(least) == _NEAREST and apart > -least[0]:
                break
            for M in here[other]:
                distance = abs(rows - (math.log2(M) - log2_E)) + apart
                far.append((distance, M, other))
                (heapq.heappush if len(least) < _NEAREST else heapq.heappushpop)(least, -distance)
        near = [one for one in far if one[0] <= -least[0]]  # which of those as far are asked is a rule, too
        near.sort(key=lambda one: (one[0], one[2].sort_key, one[1]))
        return [config for config, _ in Counter(here[one][M] for _, M, one in near[:_NEAREST]).most_common()]

    def _by_shape(self, problem: Problem, here: Iterable[Problem]) -> list[tuple[float, float, Problem]]:
        """(how far another problem's shape and form are, log2 of its E, it), the nearest first.

        Kept for the next bucket.
        """
        others = tuple(here)
        if self._last is None or self._last[0] is not problem or len(self._last[1]) != len(others):
            found = [(_apart(problem, one), math.log2(one.E), one) for one in others]
            self._last = problem, sorted(found, key=lambda one: one[0])
        return self._last[1]

    def transposed(self, problem: Problem, bucket: int) -> ConfigPairs | None:
        """The winner of the same product and bucket with its rows moved another way, if one was measured.

        None for a plain product: it has more configs than the forms that move rows, which follow it. What won there
        says little of the others, and where the plain one alone is measured anew, nothing would be left to compare.
        """
        if problem.fusion is Fusion.NONE:
            return None
        for fusion in (one for one in FORMS if one is not problem.fusion):
            config = self.of(problem._replace(fusion=fusion), bucket)
            if config is not None:
                return config
        return None


def _apart(one: Problem, other: Problem) -> float:
    """What a distance has for shapes and forms, beside the rows an expert gets."""
    E, N, K = (abs(math.log2(x / y)) for x, y in ((one.E, other.E), (one.N, other.N), (one.K, other.K)))
    if E or N or K:
        return _OTHER_SHAPE + _SIZE * (E + N + K)
    return 0.0 if one == other else _OTHER_FORM


def contenders(
    ranked: Sequence[ConfigPairs],
    near: Sequence[ConfigPairs],
    twin: ConfigPairs | None,
    share: float = SHARE,
    elsewhere: Sequence[ConfigPairs] = (),
    running: Sequence[ConfigPairs] = (),
) -> list[ConfigPairs]:
    """The configs to measure, the modelled choice first: about ``share`` of ``ranked``, but at least two or three.

    ``ranked`` are all candidates of the cell, the best first; ``near`` and ``twin`` are what ``Winners.near``
    and ``Winners.transposed`` say. Where the same product was measured in another form, its winner is tried beside the
    first
    ones of the model. A larger share than usual is filled up by the model's order. ``elsewhere`` is what another GPU's
    bundle runs in this cell: it goes before all but the model's first, and four are tried at least. ``running`` is what
    runs in this cell today. It is measured anyway, so the shortlist is of the others.
    """
    others = [config for config in ranked if config not in running]
    return [*(config for config in ranked[:1] if config in running), *_others(others, near, twin, share, elsewhere)]


def _others(
    ranked: Sequence[ConfigPairs],
    near: Sequence[ConfigPairs],
    twin: ConfigPairs | None,
    share: float,
    elsewhere: Sequence[ConfigPairs],
) -> list[ConfigPairs]:
    """The configs to measure, of those that do not run in the cell today."""
    able = set(ranked)
    known = [config for config in elsewhere if config in able]
    if known and share < 1:
        most = max(_LEAST + 1, math.floor(share * len(ranked)))
        more = () if twin is None else (twin,)
        tried = (config for config in (ranked[0], *known, *more, *near, *ranked[1:]) if config in able)
        return list(dict.fromkeys(tried))[:most]
    if twin in able and share < 1:
        return list(dict.fromkeys((ranked[0], twin, *ranked[1:])))[:_LEAST]
    most = max(_LEAST if len(ranked) >= _MANY else FIRST, math.floor(share * len(ranked)))
    chosen = list(ranked[:FIRST])
    for config in near if share <= SHARE else (*near, *ranked) if share < 1 else ranked:
        if len(chosen) >= most:
            break
        if config in able and config not in chosen:
            chosen.append(config)
    return chosen
