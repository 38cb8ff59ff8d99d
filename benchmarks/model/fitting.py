"""A seeded, annealed random search for the cost model's constants of one generation of GPU.

It lowers the mean log loss (softened: a step function can't be searched), plus a little of the estimates' own
error, of losses above 5 % and of the distance from the start: constants that the data doesn't determine stay.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.model.sweeps import Cell
from benchmarks.model.vectors import Part, parts
from pretuned.artifacts.records import Op
from pretuned.kernels.cost import Constants, ConstantsFamily, WeightGrad

# What is searched: (constant, least, most, spread as a factor). ``a.b`` is a field of a field, ``a/2`` an entry.
FITTED: tuple[tuple[str, float, float, float], ...] = (
    ("cold_ns", 100.0, 8000.0, 1.5),
    ("start_ns", 300.0, 6000.0, 1.5),
    ("store_ns", 100.0, 3000.0, 2.0),
    ("sustained", 0.70, 0.86, 1.05),
    ("l2_bytes_per_clock", 30.0, 64.0, 1.2),
    *((f"rows/{i}", 0.1, 1.2, 1.2) for i in range(5)),
    *((f"columns/{i}", 0.1, 1.0, 1.2) for i in range(4)),
    ("wgmma_columns/2", 0.1, 1.0, 1.2),
    ("wgmma_columns/3", 0.1, 1.0, 1.2),
    ("one_cta/4", 0.4, 1.0, 1.2),
    ("memory_share", 0.85, 0.96, 1.03),
    ("latency_ns", 400.0, 1600.0, 1.3),
    ("tma_latency_ns", 400.0, 1600.0, 1.3),
    ("held_stages", 0.05, 1.0, 2.0),
    ("chain_norm", 1.5, 64.0, 2.0),
    ("pointer_step_ns", 5.0, 300.0, 2.0),
    ("tma_step_ns", 2.0, 200.0, 2.0),
    ("persistent_exposed", 0.05, 1.0, 1.5),
    ("tail_static", 0.02, 1.0, 1.5),
    ("tail_dynamic", 0.02, 1.0, 1.5),
    ("flight_norm", 1.0, 16.0, 1.5),
    ("lockstep", 0.02, 4.0, 2.0),
    ("l2_usable", 0.1, 0.9, 1.4),
    ("norm", 2.0, 12.0, 1.4),
    ("step_norm", 1.5, 64.0, 1.5),
    ("specialized.rate", 0.9, 1.3, 1.1),
    ("specialized.norm", 2.0, 12.0, 1.4),
    ("specialized.exposed", 0.02, 1.0, 1.5),
    ("specialized.start_ns", 50.0, 5000.0, 2.0),
    ("specialized.turns_rate", 0.9, 1.4, 1.1),
    ("specialized.turns_exposed", 0.01, 1.0, 1.5),
    ("specialized.turns_waste", 0.05, 2.0, 1.5),
)
FITTED_DW: tuple[tuple[str, float, float, float], ...] = (
    ("write_share", 0.5, 0.95, 1.1),
    ("weight.step_ns", 1.0, 200.0, 2.0),
    ("weight.issue_ns", 0.5, 100.0, 2.0),
    ("weight.load_share", 0.4, 1.0, 1.2),
    ("weight.row_bytes", 1.0, 128.0, 2.0),
    ("weight.store_bytes_per_clock", 6.0, 64.0, 1.5),
    ("weight.exposed", 0.2, 1.0, 1.3),
    ("weight.norm", 1.5, 8.0, 1.4),
    ("specialized.weight_rate", 0.9, 1.4, 1.1),
    ("specialized.weight_exposed", 0.02, 1.0, 1.5),
    ("specialized.turns_weight_rate", 0.9, 1.6, 1.1),
)
SHARED = ("cold_ns", "start_ns", "store_ns")  # shared by all generations; each generation has its own other constants

# Start of every search. The last fit can't be the start, because it has seen the model that is left out.
_FAMILY = ConstantsFamily(
    0.79,
    50.0,
    (0.3, 0.42, 1.0, 1.0, 0.87),
    (0.3, 0.44, 0.75, 0.97, 1.0),
    {1: 0.25, 2: 0.4, 4: 0.9, 8: 1.0, 16: 1.0},
    wgmma_columns=(0.2, 0.35, 0.65, 0.95, 1.0),
    memory_share=0.935,
    latency_ns=1000.0,
    tma_latency_ns=1000.0,
    held_stages=0.5,
    chain_norm=7.0,
    flight_norm=4.0,
    norm=4.0,
    step_norm=4.0,
    write_share=0.7,
    weight=WeightGrad(),
)
PRIOR = Constants(cold_ns=3000.0, start_ns=1500.0, store_ns=300.0, hopper=_FAMILY)

SHARPNESS = 0.01  # two estimates this far apart (in log) count as clearly ranked
EXCESS_WEIGHT, PRIOR_WEIGHT = 1.0, 0.004
ERROR_WEIGHT, ERROR_WEIGHT_DW = 0.3, 1.0  # dW's first choices lose almost nothing, so its errors count more
HEAT = 0.001
EXCESS = 0.05
NEAR = 0.3  # log ratio to the cell's best from which on slower variants count the same

Ranges = Sequence[tuple[str, float, float, float]]


def _get(owner: Any, name: str) -> float:
    name, _, index = name.partition("/")
    for part in name.split("."):
        owner = getattr(owner, part)
    return float(owner[int(index)] if index else owner)


def _put(owner: Any, name: str, value: float) -> Any:
    head, _, rest = name.partition(".")
    if rest:
        return owner._replace(**{head: _put(getattr(owner, head), rest, value)})
    head, _, index = name.partition("/")
    held = getattr(owner, head)
    if isinstance(held, dict):
        value = {**held, int(index): value}  # type: ignore[assignment]
    elif index:
        value = (*held[: int(index)], value, *held[int(index) + 1 :])  # type: ignore[assignment]
    return owner._replace(**{head: value})


def values_of(constants: Constants, sm: int, ranges: Ranges) -> list[float]:
    return [_get(constants if name in SHARED else constants.family(sm), name) for name, *_ in ranges]


def with_values(constants: Constants, sm: int, ranges: Ranges, values: Sequence[float]) -> Constants:
    family = constants.family(sm)
    owner = next(name for name in constants._fields if getattr(constants, name) is family)
    for (name, *_), value in zip(ranges, values, strict=True):
        if name in SHARED:
            constants = constants._replace(**{name: value})  # type: ignore[arg-type]
        else:
            family = _put(family, name, value)
    return constants._replace(**{owner: family})  # type: ignore[arg-type]


def objective(packed: Sequence[Part], constants: Constants, error_weight: float = ERROR_WEIGHT) -> float:
    """Return the loss of the constants: time lost by the first choices, plus the weighted error of the estimates."""
    total, count = 0.0, 0
    for part in packed:
        log_us = np.log(part.estimates_us(constants))
        behind = log_us - np.minimum.reduceat(log_us, part.starts)[part.cell_of]
        weight = np.exp(behind / -SHARPNESS)
        losses = weight * (part.loss + EXCESS_WEIGHT * np.maximum(0.0, part.loss - EXCESS))
        near = part.loss < NEAR
        errors = np.where(near, np.abs(log_us - part.log_us), 0.0)
        summed, starts = np.add.reduceat, part.starts
        total += float(np.sum(summed(losses, starts) / summed(weight, starts)))
        total += error_weight * float(np.sum(summed(errors, starts) / summed(near.astype(float), starts)))
        count += len(part.cells)
    return total / count


def search(
    cells: Sequence[Cell],
    begun: Constants,
    ranges: Ranges,
    steps: int,
    seed: int = 0,
    error_weight: float = ERROR_WEIGHT,
) -> Constants:
    """Change one to three constants, ``steps`` times; keep changes that help, and at first also slightly worse ones."""
    rng = random.Random(seed)
    sm, packed = cells[0].chip.sm, parts(cells)
    prior = [min(high, max(low, v)) for v, (_, low, high, _) in zip(values_of(begun, sm, ranges), ranges, strict=True)]

    def judged(values: Sequence[float]) -> float:
        away = sum((math.log(v / p) / math.log(f)) ** 2 for v, p, (*_, f) in zip(values, prior, ranges, strict=True))
        moved = with_values(begun, sm, ranges, values)
        return objective(packed, moved, error_weight) + PRIOR_WEIGHT * away / len(FITTED)

    best = at = list(prior)
    best_score = at_score = judged(prior)
    for step in range(steps):
        left = 1.0 - step / steps
        values = list(at)
        for i in rng.sample(range(len(ranges)), rng.choice((1, 1, 2, 3))):
            _, low, high, factor = ranges[i]
            values[i] = min(high, max(low, values[i] * factor ** rng.gauss(0.0, 0.6 * left + 0.05)))
        score = judged(values)
        if score < at_score + HEAT * max(0.0, left - 0.2) * rng.expovariate(1.0):
            at, at_score = values, score
        if score < best_score:
            best, best_score = values, score
        elif left < 0.2 and at_score > best_score:
            at, at_score = best, best_score
    return with_values(begun, sm, ranges, [float(f"{value:.3g}") for value in best])


def fit(cells: Sequence[Cell], begun: Constants, steps: int, seed: int = 0) -> Constants:
    """Fit the constants of the row kernels to forward and dX, then, with these held, dW's own constants to dW."""
    rows = [cell for cell in cells if cell.problem.op is not Op.DW]
    weights = [cell for cell in cells if cell.problem.op is Op.DW]
    if rows:
        begun = search(rows, begun, FITTED, steps, seed)
    if weights:
        begun = search(weights, begun, FITTED_DW, steps // 2, seed, ERROR_WEIGHT_DW)
    return begun
