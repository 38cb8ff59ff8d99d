"""Split cells between tuners that run at once, each with its own GPUs and journal.

One process can schedule a few GPUs. For more, or for machines that share nothing, each tuner gets a part:
``aot measure --part 1/8``. Journals of parts are merged like any others.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from ...artifacts.errors import InputError
from ...artifacts.records.problem import Op, Problem
from .space import weight_key

# Rough seconds of a cell on any GPU: parts need only be about equal.
_EACH_S = 0.03
_LAUNCHES = 40
_FLOPS = 6e14
_BYTES = 2.5e12


def part_of(problems: Mapping[Problem, Sequence[int]], number: int, count: int) -> dict[Problem, tuple[int, ...]]:
    """The problems and buckets of part ``number`` (from 1) of ``count``, split by weights, which take time to make.

    The parts are disjoint, cover all cells, are about equal in work, and do not depend on the caller.

    Raises
    ------
    InputError
        if there are fewer weights than parts.
    """
    weights: dict[tuple[object, ...], dict[Problem, tuple[int, ...]]] = {}
    for problem, buckets in problems.items():
        weights.setdefault(weight_key(problem.canonical), {})[problem] = tuple(buckets)
    if len(weights) < count:
        raise InputError(
            f"--part {number}/{count}: the models have {len(weights)} weights; wanted at most so many parts"
        )
    work = {key: math.fsum(_seconds(members)) for key, members in weights.items()}
    parts: list[list[tuple[object, ...]]] = [[] for _ in range(count)]
    loads = [0.0] * count
    for key in sorted(weights, key=lambda key: (-work[key], min(problem.sort_key for problem in weights[key]))):
        least = loads.index(min(loads))
        parts[least].append(key)
        loads[least] += work[key]
    mine = {problem: buckets for key in parts[number - 1] for problem, buckets in weights[key].items()}
    return {problem: mine[problem] for problem in problems if problem in mine}


def _seconds(members: Mapping[Problem, Sequence[int]]) -> Iterable[float]:
    measured: dict[Problem, set[int]] = {}
    for problem, buckets in members.items():  # a product of two names is measured once
        measured.setdefault(problem.canonical, set()).update(buckets)
    for problem, rows in measured.items():
        matrix, w_bytes = problem.N * problem.K, problem.dtype.precision.w_bytes(problem.N, problem.K)
        row_bytes = (problem.N + problem.K) * problem.dtype.itemsize
        for M in rows:
            moved = (problem.E if problem.op is Op.DW else min(problem.E, M)) * w_bytes + M * row_bytes
            yield _EACH_S + _LAUNCHES * max(2 * M * matrix / _FLOPS, moved / _BYTES)
