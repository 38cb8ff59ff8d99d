"""Choose the variants worth measuring in a cell: the first of the ranking, and the winners of nearby cells.

The ranking is the cost model's, blended with measured neighbours if a capability has some. docs/inside/cost-model.md
has the loss of the shortlist, ``python benchmarks/run.py unknown --shortlist JOURNAL`` prints it.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ...artifacts.records import DType, Fusion, Op, Problem

SHARE = 0.1  # share of a cell's candidates that is measured
FIRST = 2  # configs of the model's ranking
_LEAST = 3  # least number of configs with ``_MANY`` candidates or another fusion's winner; else FIRST
_MANY = 24
_NEAREST = 9  # cells whose winners are tried
_OTHER_FORM = 0.25  # distance to a cell of the same shape with another fusion
_OTHER_SHAPE = 0.5  # distance to another shape with as many rows per expert, in doublings of M ...
_SIZE = 0.2  # ... plus this for each doubling of E, N and K

FUSIONS = (Fusion.NONE, Fusion.GATHER, Fusion.SCATTER)  # in the order in which they are measured

ConfigPairs = tuple[tuple[str, int], ...]


@dataclass(slots=True)
class Winners:
    """The fastest configs of the cells measured so far; the fusions of one shape have cubins of their own."""

    _found: dict[tuple[Op, DType], dict[Problem, dict[int, ConfigPairs]]] = field(default_factory=dict)
    _last: tuple[Problem, list[tuple[float, float, Problem]]] | None = None

    def add(self, problem: Problem, bucket: int, config: ConfigPairs) -> None:
        """Record ``config`` as the fastest in this cell."""
        self._found.setdefault((problem.op, problem.dtype), {}).setdefault(problem, {})[bucket] = config

    def of(self, problem: Problem, bucket: int) -> ConfigPairs | None:
        """The fastest config of this cell, if it was measured."""
        return self._found.get((problem.op, problem.dtype), {}).get(problem, {}).get(bucket)

    def near(self, problem: Problem, bucket: int) -> list[ConfigPairs]:
        """The winners of the nearest cells of this op and dtype, each once: most frequent first, then nearest."""
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
        near = [cell for cell in far if cell[0] <= -least[0]]  # ties are sorted below
        near.sort(key=lambda cell: (cell[0], cell[2].sort_key, cell[1]))
        return [config for config, _ in Counter(here[other][M] for _, M, other in near[:_NEAREST]).most_common()]

    def _by_shape(self, problem: Problem, here: Iterable[Problem]) -> list[tuple[float, float, Problem]]:
        """(distance in shape and fusion, log2 of E, problem) of the other problems, nearest first.

        Cached for the next bucket.
        """
        others = tuple(here)
        if self._last is None or self._last[0] is not problem or len(self._last[1]) != len(others):
            others_apart = [(_apart(problem, other), math.log2(other.E), other) for other in others]
            self._last = problem, sorted(others_apart, key=lambda entry: entry[0])
        return self._last[1]

    def other_fusion(self, problem: Problem, bucket: int) -> ConfigPairs | None:
        """The winner of this product and bucket with another fusion of ``FUSIONS``, if it was measured.

        None for a plain product. It is measured first, and it has configs that the fusions don't have.
        """
        if problem.fusion is Fusion.NONE:
            return None
        for fusion in (other for other in FUSIONS if other is not problem.fusion):
            config = self.of(problem._replace(fusion=fusion), bucket)
            if config is not None:
                return config
        return None


def _apart(problem: Problem, other: Problem) -> float:
    """The part of a distance that is from shapes and fusions, not from rows an expert."""
    E, N, K = (abs(math.log2(x / y)) for x, y in ((problem.E, other.E), (problem.N, other.N), (problem.K, other.K)))
    if E or N or K:
        return _OTHER_SHAPE + _SIZE * (E + N + K)
    return 0.0 if problem == other else _OTHER_FORM


def contenders(
    ranked: Sequence[ConfigPairs],
    near: Sequence[ConfigPairs],
    twin: ConfigPairs | None,
    share: float = SHARE,
    elsewhere: Sequence[ConfigPairs] = (),
    running: Sequence[ConfigPairs] = (),
) -> list[ConfigPairs]:
    """The configs to measure, the modelled choice first: about ``share`` of ``ranked``, but at least two or three.

    Parameters
    ----------
    ranked
        All candidates of the cell, the cost model's best first.
    near, twin
        From ``Winners.near`` and ``Winners.other_fusion``. ``twin`` is tried after the cost model's best.
    share
        The share of ``ranked`` to measure. Above ``SHARE``, configs are added in the cost model's order.
    elsewhere
        Another GPU's choices, tried from the second place on. With them at least four configs are measured.
    running
        The baseline, which is measured anyway and does not count.
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
    """The configs to measure, without the baseline."""
    able = set(ranked)
    named = [config for config in elsewhere if config in able]
    if named and share < 1:
        most = max(_LEAST + 1, math.floor(share * len(ranked)))
        more = () if twin is None else (twin,)
        tried = (config for config in (ranked[0], *named, *more, *near, *ranked[1:]) if config in able)
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
