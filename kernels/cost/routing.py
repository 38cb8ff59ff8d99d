"""What to expect of a routing that nobody has seen yet: active experts and ragged row tiles.

The cost model knows M, the rows in all, and E, never the counts by expert: they live on the GPU.
It assumes that the expert of rank r is chosen with p_r ~ r^-0.5 (a Zipf law). Against routings made
of normal logits with a popularity of 0.3 * log(rank), E from 8 to 512, that gives the active
experts within 14 % and the rows of the busiest expert within 30 % where rows are many.
"""

from __future__ import annotations

import math
from functools import lru_cache

from ...artifacts.tuples import NamedTuple

SKEW = 0.5
BLOCKS = (16, 32, 64, 128, 192, 256)


class ExpectedRows(NamedTuple):
    """M rows over E experts, in expectation.

    ``tiles[B]`` is sum_r E[ceil(rows_r / B)], B as in ``BLOCKS``. ``busiest`` is the rows of the first expert.
    """

    active: float
    busiest: float
    tiles: dict[int, float]


@lru_cache(maxsize=256)
def _classes(E: int) -> tuple[tuple[float, float], ...]:
    """(experts, share of one of them), ranks gathered into classes that grow by about 1.4."""
    shares = [rank**-SKEW for rank in range(1, E + 1)]
    total = math.fsum(shares)  # not sum: that of Python 3.12 on rounds in another way, and ranks are to choose alike
    classes, first = [], 0
    while first < E:
        last = min(E, max(first + 1, int(first * 1.4)))
        classes.append((float(last - first), math.fsum(shares[first:last]) / total / (last - first)))
        first = last
    return tuple(classes)


@lru_cache(maxsize=4096)
def expected_rows(E: int, M: int) -> ExpectedRows:
    """What M rows over E experts look like.

    active = sum_r 1 - (1 - p_r)^M. With the load u = M * p_r / B, the tiles of expert r are
    max(1 - (1 - p_r)^M, u + min(1, u) / 2): ceil(u) smoothed over the spread of u.
    """
    classes = _classes(E)
    active = 0.0
    tiles = dict.fromkeys(BLOCKS, 0.0)
    for experts, share in classes:
        used = 1.0 if share >= 1.0 else -math.expm1(M * math.log1p(-share))
        active += experts * used
        for block in BLOCKS:
            load = M * share / block
            load += 0.5 if load >= 1.0 else 0.5 * load
            tiles[block] += experts * (load if load > used else used)
    return ExpectedRows(active, M * classes[0][1], tiles)
