"""Which variants are worth measuring in a cell: the cost model's first ones, and what won nearby.

On sweeps of an H200 the model's first two and the winner of a near cell, 3 of about 30 candidates, lose 0.5 %
(geometric mean) to the best of all, where the model alone loses 1.0 % (docs/use/tuning.md).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

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

    _found: dict[tuple[Op, DType], dict[tuple[Problem, int], ConfigPairs]] = field(default_factory=dict)

    def add(self, problem: Problem, bucket: int, config: ConfigPairs) -> None:
        """``config`` was the fastest one in this cell."""
        self._found.setdefault((problem.op, problem.dtype), {})[problem, bucket] = config

    def of(self, problem: Problem, bucket: int) -> ConfigPairs | None:
        """The fastest config of this cell, if it was measured."""
        return self._found.get((problem.op, problem.dtype), {}).get((problem, bucket))

    def near(self, problem: Problem, bucket: int) -> list[ConfigPairs]:
        """The winners of the nearest cells of this op and dtype, each once: what won most often first, then nearest."""
        here = self._found.get((problem.op, problem.dtype), {})
        ordered = sorted(here, key=lambda cell: (_distance(cell, (problem, bucket)), cell[0].sort_key, cell[1]))
        return [config for config, _ in Counter(here[cell] for cell in ordered[:_NEAREST]).most_common()]

    def transposed(self, problem: Problem, bucket: int) -> ConfigPairs | None:
        """The winner of the same product and bucket with its rows moved another way, if one was measured.

        None for a plain product: it has more configs than the forms that move rows, which follow it. What won there
        says little of the others, and where the plain one alone is measured anew, nothing would be left to compare.
        """
        if problem.fusion is Fusion.NONE:
            return None
        for fusion in (one for one in FORMS if one is not problem.fusion):
            config = self.of(replace(problem, fusion=fusion), bucket)
            if config is not None:
                return config
        return None


def _distance(a: tuple[Problem, int], b: tuple[Problem, int]) -> float:
    """In doublings of the rows an expert gets."""
    (one, M), (other, rows) = a, b
    E, N, K = (abs(math.log2(x / y)) for x, y in ((one.E, other.E), (one.N, other.N), (one.K, other.K)))
    far = abs(math.log2(M / one.E) - math.log2(rows / other.E))
    if E or N or K:
        return far + _OTHER_SHAPE + _SIZE * (E + N + K)
    return far + (0.0 if one == other else _OTHER_FORM)


def contenders(
    ranked: Sequence[ConfigPairs], near: Sequence[ConfigPairs], twin: ConfigPairs | None, share: float = SHARE,
    elsewhere: Sequence[ConfigPairs] = (),
) -> list[ConfigPairs]:  # fmt: skip
    """The configs to measure, the modelled choice first: about ``share`` of ``ranked``, but at least two or three.

    ``ranked`` are all candidates of the cell, the model's best first; ``near`` and ``twin`` are what ``Winners.near``
    and ``Winners.transposed`` say. Where the same product was measured in another form, its winner is tried beside the
    first
    ones of the model. A larger share than usual is filled up by the model's order. ``elsewhere`` is what another GPU's
    bundle runs in this cell: it goes before all but the model's first, and four are tried at least.
    """
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
