"""Fits the cost model's constants of one generation of GPU to measured sweeps, and judges them on models left out.

    python benchmarks/fit_cost.py benchmarks/results/sweep-*.json
    python benchmarks/fit_cost.py benchmarks/results/sweep-*.json --write --out benchmarks/results/fit-h200.json
    python benchmarks/fit_cost.py benchmarks/results/sweep-*.json --steps 0       # judge what is there

A cell is one problem at one M, with the time of every variant. The loss of a cell is what the model's first
choice takes over the fastest variant. A seeded random search lowers the mean log loss (softened: a step
function can't be searched), plus a little of the estimates' own error, of losses above 5 % and of the way from
where the search began: what the data doesn't tell stays as it was. ``--write`` puts the constants into
kernels/calibration.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import random
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pretuned.artifacts.types import DType, Op, Problem
from pretuned.kernels.calibration import CONSTANTS, Constants, Family
from pretuned.kernels.chips import Chip, chip_named
from pretuned.kernels.config import Config
from pretuned.kernels.cost import Ranker, Resources

CALIBRATION = Path(__file__).parent.parent / "kernels" / "calibration.py"
BEGIN, END = "# fitted: begin\n", "# fitted: end\n"

# What is searched: (field, index in it or None, least, most, spread as a factor).
FITTED: tuple[tuple[str, int | None, float, float, float], ...] = (
    ("cold_ns", None, 100.0, 8000.0, 1.5),
    ("start_ns", None, 300.0, 6000.0, 1.5),
    ("store_ns", None, 100.0, 3000.0, 2.0),
    ("sustained", None, 0.70, 0.86, 1.05),
    ("l2_bytes_per_clock", None, 30.0, 64.0, 1.2),
    *(("rows", i, 0.1, 1.2, 1.2) for i in range(5)),
    *(("columns", i, 0.1, 1.0, 1.2) for i in range(4)),
    ("wgmma_columns", 2, 0.1, 1.0, 1.2),
    ("wgmma_columns", 3, 0.1, 1.0, 1.2),
    ("one_cta", 4, 0.4, 1.0, 1.2),
    ("memory_share", None, 0.85, 0.96, 1.03),
    ("latency_ns", None, 400.0, 1600.0, 1.3),
    ("tma_latency_ns", None, 400.0, 1600.0, 1.3),
    ("held_stages", None, 0.05, 1.0, 2.0),
    ("chain_norm", None, 1.5, 64.0, 2.0),
    ("pointer_step_ns", None, 5.0, 300.0, 2.0),
    ("tma_step_ns", None, 2.0, 200.0, 2.0),
    ("persistent_exposed", None, 0.05, 1.0, 1.5),
    ("tail_static", None, 0.02, 1.0, 1.5),
    ("tail_dynamic", None, 0.02, 1.0, 1.5),
    ("flight_norm", None, 1.0, 16.0, 1.5),
    ("lockstep", None, 0.02, 4.0, 2.0),
    ("l2_usable", None, 0.1, 0.9, 1.4),
    ("norm", None, 2.0, 12.0, 1.4),
)
SHARED = ("cold_ns", "start_ns", "store_ns")  # of every generation: the others are this generation's alone

# Where every search begins, never the last fit: with it, a model left out would still be in the constants.
PRIOR = (Constants(cold_ns=3000.0, start_ns=1500.0, store_ns=300.0), Family(
    0.79, 50.0, (0.3, 0.42, 1.0, 1.0, 0.87), (0.3, 0.44, 0.75, 0.97, 1.0), {1: 0.25, 2: 0.4, 4: 0.9, 8: 1.0, 16: 1.0},
    wgmma_columns=(0.2, 0.35, 0.65, 0.95, 1.0), memory_share=0.935, latency_ns=1000.0, tma_latency_ns=1000.0,
    held_stages=0.5, chain_norm=7.0, flight_norm=4.0, norm=4.0,
))  # fmt: skip

SHARPNESS = 0.01  # two estimates this far apart (in log) count as clearly ranked
ERROR_WEIGHT, EXCESS_WEIGHT, PRIOR_WEIGHT = 0.08, 1.0, 0.0004
HEAT = 0.001
EXCESS = 0.05


@dataclass(frozen=True, slots=True)
class Cell:
    """One problem at one M: ``times_us[i]`` is the time of ``variants[i]``."""

    model: str
    tokens: int
    problem: Problem
    M: int
    chip: Chip
    variants: tuple[Resources, ...]
    times_us: tuple[float, ...]


def load(path: Path) -> list[Cell]:
    """The cells of a sweep (benchmarks/variants.py)."""
    sweep = json.loads(path.read_text())
    chip = chip_named(sweep["gpu"])
    if chip is None:
        raise SystemExit(f"{path}: measured on '{sweep['gpu']}', which kernels/chips.py doesn't know; add it there")
    chip = chip.with_sm_count(sweep["sm_count"])
    variants = {
        number: Resources(
            Config.from_pairs(tuple(sorted(row["config"].items()))),
            row["threads"], row["shared_bytes"], row["registers"], row["alignment"],
        )
        for number, row in sweep["variants"].items()
    }  # fmt: skip
    cells = []
    for row in sweep["cells"]:
        problem = Problem(
            Op(sweep.get("op", "forward")), DType(sweep.get("dtype", "bf16")), row["E"], row["N"], row["K"]
        )
        # Unaligned fallbacks never compete with the others.
        times = {number: us for number, us in row["us"].items() if variants[number].alignment == 16}
        cells.append(Cell(row["model"], row["tokens"], problem, row["M"], chip,
                          tuple(variants[number] for number in times), tuple(times.values())))  # fmt: skip
    return cells


def values_of(constants: Constants, sm: int) -> list[float]:
    found = []
    for name, index, *_ in FITTED:
        value = getattr(constants if name in SHARED else constants.family(sm), name)
        found.append(float(value if index is None else value[index]))
    return found


def with_values(constants: Constants, sm: int, values: Sequence[float]) -> Constants:
    shared: dict[str, float] = {}
    family = constants.family(sm)
    changed: dict[str, object] = {}
    for (name, index, *_), value in zip(FITTED, values, strict=True):
        if name in SHARED:
            shared[name] = value
        elif index is None:
            changed[name] = value
        else:
            row = changed.get(name, getattr(family, name))
            changed[name] = (
                {**row, index: value} if isinstance(row, dict) else (*row[:index], value, *row[index + 1 :])  # type: ignore[index]
            )
    owner = next(f.name for f in dataclasses.fields(constants) if getattr(constants, f.name) is family)
    return dataclasses.replace(constants, **shared, **{owner: dataclasses.replace(family, **changed)})  # type: ignore[arg-type]


class Rankings:
    """The estimates of every cell under some constants; the variants of equal sets are prepared once."""

    def __init__(self, constants: Constants) -> None:
        self._constants = constants
        self._rankers: dict[object, Ranker] = {}

    def of(self, cell: Cell) -> list[tuple[float, int]]:
        key = (cell.variants, cell.problem.op, cell.problem.dtype, cell.chip)
        if key not in self._rankers:
            self._rankers[key] = Ranker(cell.variants, cell.problem.op, cell.problem.dtype, cell.chip, self._constants)
        return self._rankers[key].rank(cell.problem, cell.M)


def objective(cells: Iterable[Cell], constants: Constants) -> float:
    rankings, total, count = Rankings(constants), 0.0, 0
    for cell in cells:
        ranked = rankings.of(cell)
        best_us, first_us = min(cell.times_us), ranked[0][0]
        weights = losses = errors = near = 0.0
        for estimate_us, i in ranked:
            loss = math.log(cell.times_us[i] / best_us)
            weight = (estimate_us / first_us) ** (-1.0 / SHARPNESS)
            weights += weight
            losses += weight * (loss + EXCESS_WEIGHT * max(0.0, loss - EXCESS))
            if loss < 0.6:  # what is slower still never matters
                near += 1.0
                errors += abs(math.log(estimate_us / cell.times_us[i]))
        total += losses / weights + ERROR_WEIGHT * errors / near
        count += 1
    return total / count


def fit(cells: Sequence[Cell], begun: Constants, steps: int, seed: int = 0) -> Constants:
    """A random search: ``steps`` changes of one to three constants, each kept where it helps (annealed)."""
    rng = random.Random(seed)
    sm = cells[0].chip.sm
    prior = values_of(begun, sm)

    def judged(values: Sequence[float]) -> float:
        away = sum((math.log(v / p) / math.log(f)) ** 2 for v, p, (*_, f) in zip(values, prior, FITTED, strict=True))
        return objective(cells, with_values(begun, sm, values)) + PRIOR_WEIGHT * away / len(FITTED) * 10

    prior = [min(high, max(low, v)) for v, (_, _, low, high, _) in zip(prior, FITTED, strict=True)]
    best = at = list(prior)
    best_score = at_score = judged(prior)
    for step in range(steps):
        left = 1.0 - step / steps
        values = list(at)
        for i in rng.sample(range(len(FITTED)), rng.choice((1, 1, 2, 3))):
            _, _, low, high, factor = FITTED[i]
            values[i] = min(high, max(low, values[i] * factor ** rng.gauss(0.0, 0.6 * left + 0.05)))
        score = judged(values)
        if score < at_score + HEAT * max(0.0, left - 0.2) * rng.expovariate(1.0):  # at first also a little worse
            at, at_score = values, score
        if score < best_score:
            best, best_score = values, score
        elif left < 0.2 and at_score > best_score:
            at, at_score = best, best_score
    return with_values(begun, sm, [float(f"{value:.3g}") for value in best])


def judge(cells: Sequence[Cell], constants: Constants) -> dict[str, dict[str, float]]:
    """The loss of the first choice and the scale of its estimate: of all cells, of each T and each model."""
    rankings = Rankings(constants)
    groups: dict[str, list[tuple[float, float]]] = {}
    for cell in cells:
        estimate_us, first = rankings.of(cell)[0]
        found = math.log(cell.times_us[first] / min(cell.times_us)), math.log(estimate_us / cell.times_us[first])
        for name in ("all", f"T={cell.tokens}", cell.model):
            groups.setdefault(name, []).append(found)
    order = sorted(groups, key=lambda n: (n != "all", not n.startswith("T="), int(n[2:]) if n[:2] == "T=" else 0))
    return {
        name: {
            "cells": len(groups[name]),
            "mean_loss": round(math.expm1(sum(loss for loss, _ in groups[name]) / len(groups[name])), 4),
            "max_loss": round(math.expm1(max(loss for loss, _ in groups[name])), 4),
            "estimate_over_measured": round(math.exp(sum(e for _, e in groups[name]) / len(groups[name])), 3),
        }
        for name in order
    }


def show(title: str, table: dict[str, dict[str, float]]) -> None:
    print(f"\n{title}\n{'':14}{'cells':>6}{'mean loss':>11}{'max loss':>10}{'est/measured':>14}")
    for name, row in table.items():
        print(f"{name:14}{row['cells']:6}{row['mean_loss']:11.2%}{row['max_loss']:10.1%}"
              f"{row['estimate_over_measured']:14.2f}")  # fmt: skip


def cross_validate(
    cells: Sequence[Cell], begun: Constants, steps: int, seed: int, folds: int = 3
) -> dict[str, dict[str, float]]:
    """Every model judged by constants fitted on models of other folds only."""
    models = list(dict.fromkeys(cell.model for cell in cells))
    found = []
    for fold in range(folds):
        left_out = models[fold::folds]
        constants = fit([cell for cell in cells if cell.model not in left_out], begun, steps, seed)
        table = judge([cell for cell in cells if cell.model in left_out], constants)
        show(f"left out: {', '.join(left_out)}", table)
        found.append(table)
    merged: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(name for table in found for name in table):
        rows = [table[name] for table in found if name in table]
        count = sum(row["cells"] for row in rows)

        def mean(field: str, rows: list[dict[str, float]] = rows, count: float = count) -> float:
            return math.exp(sum(row["cells"] * math.log(row[field] + (field == "mean_loss")) for row in rows) / count)

        merged[name] = {
            "cells": count,
            "mean_loss": round(mean("mean_loss") - 1, 4),
            "max_loss": max(row["max_loss"] for row in rows),
            "estimate_over_measured": round(mean("estimate_over_measured"), 3),
        }
    return merged


def source(constants: Constants, sm: int, told: str) -> str:
    """The fitted block of kernels/calibration.py."""
    family: Family = constants.family(sm)
    rows = [f"    {field.name}={getattr(family, field.name)!r}," for field in dataclasses.fields(family)]
    shared = [f"_{name.upper()} = {getattr(constants, name)!r}" for name in SHARED]
    return "\n".join([told, "_HOPPER = Family(", *rows, ")", *shared]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", nargs="+", type=Path)
    parser.add_argument("--steps", type=int, default=4000, help="steps of the search; 0 only judges")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-cross", action="store_true", help="don't fit again with models left out")
    parser.add_argument("--write", action="store_true", help="put the constants into kernels/calibration.py")
    parser.add_argument("--out", type=Path, help="write the tables as JSON")
    args = parser.parse_args()

    begun = time.time()
    cells = [cell for path in args.sweeps for cell in load(path)]
    sms = sorted({cell.chip.sm for cell in cells})
    if sms != [90]:
        raise SystemExit(f"the sweeps are of sm {sms}, wanted 90 alone: one generation is fitted at a time")
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in args.sweeps)).hexdigest()[:16]
    prior = dataclasses.replace(PRIOR[0], hopper=PRIOR[1])
    tables = {"as it is": judge(cells, CONSTANTS)}
    show(f"{len(cells)} cells, as the constants are", tables["as it is"])
    fitted = fit(cells, prior, args.steps, args.seed) if args.steps else CONSTANTS
    if args.steps:
        tables["fitted"] = judge(cells, fitted)
        show("fitted", tables["fitted"])
    command = " ".join(["benchmarks/fit_cost.py", *map(str, sys.argv[1:])])
    told = [f"# Fitted to sweeps with the sha256 {digest} by python", "# " + command.replace(" --", "\n#   --", 1)]
    block = source(fitted, 90, "\n".join(told))
    print("\n" + block, flush=True)
    if args.write:
        text = CALIBRATION.read_text()
        head, rest = text.split(BEGIN)
        CALIBRATION.write_text(head + BEGIN + block + END + rest.split(END)[1])
    if args.steps and not args.no_cross:
        tables["models left out"] = cross_validate(cells, prior, args.steps, args.seed)
        show("every model judged by constants that never saw it", tables["models left out"])
    if args.out:
        result = {"command": command, "seconds": round(time.time() - begun, 1), "sweeps_sha256": digest, **tables,
                  "constants": dict(zip(("/".join(map(str, (n, i))) if i is not None else n for n, i, *_ in FITTED),
                                        values_of(fitted, 90), strict=True))}  # fmt: skip
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
