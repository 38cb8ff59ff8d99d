"""Read the sweeps of benchmarks/model/variants.py, and compare the cost model with them.

A cell is one problem at one M, with the time of every variant. The loss of a cell is what the model's first
choice takes over the fastest variant.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pretuned.artifacts.records import DType, Op, Problem
from pretuned.kernels.chips import Chip, chip_named
from pretuned.kernels.cost import Constants, Resources
from pretuned.kernels.cost_model import Ranker
from pretuned.kernels.search import candidates
from pretuned.kernels.spec import Config

Table = dict[str, dict[str, float]]


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
    """The cells of a sweep's file, which benchmarks/model/variants.py writes."""
    sweep = json.loads(path.read_text())
    chip = chip_named(sweep["gpu"])
    if chip is None:
        raise SystemExit(f"{path}: measured on '{sweep['gpu']}', which kernels/chips.py doesn't know; add it there")
    chip = chip.with_sm_count(sweep["sm_count"])
    variants = {
        number: Resources(
            Config.from_pairs(tuple(sorted(row["config"].items()))),
            row["threads"],
            row["shared_bytes"],
            row["registers"],
            row["alignment"],
        )
        for number, row in sweep["variants"].items()
    }
    op, dtype = Op(sweep.get("op", "forward")), DType(sweep.get("dtype", "bf16"))
    # Unaligned fallbacks and configs that are not candidates any more don't compete.
    listed = candidates(op, dtype, chip.sm)
    competing = {number for number, variant in variants.items() if variant.alignment == 16 and variant.config in listed}
    cells = []
    for row in sweep["cells"]:
        problem = Problem(op, dtype, row["E"], row["N"], row["K"])
        times = {number: us for number, us in row["us"].items() if number in competing}
        cells.append(
            Cell(
                row["model"],
                row["tokens"],
                problem,
                row["M"],
                chip,
                tuple(variants[number] for number in times),
                tuple(times.values()),
            )
        )
    return cells


class Rankings:
    """The estimates of every cell for given constants; each set of variants is prepared once."""

    def __init__(self, constants: Constants) -> None:
        self._constants = constants
        self._rankers: dict[object, Ranker] = {}

    def of(self, cell: Cell) -> list[tuple[float, int]]:
        key = (cell.variants, cell.problem.op, cell.problem.dtype, cell.chip)
        if key not in self._rankers:
            self._rankers[key] = Ranker(cell.variants, cell.problem.op, cell.problem.dtype, cell.chip, self._constants)
        return self._rankers[key].rank(cell.problem, cell.M)


def judge(cells: Sequence[Cell], constants: Constants) -> Table:
    """The loss of the first choice and the scale of its estimate: by op, and by T and model of each op."""
    rankings = Rankings(constants)
    groups: dict[str, list[tuple[float, float]]] = {}
    for cell in cells:
        estimate_us, first = rankings.of(cell)[0]
        errors = math.log(cell.times_us[first] / min(cell.times_us)), math.log(estimate_us / cell.times_us[first])
        op = cell.problem.op.value
        for name in (op, f"{op} T={cell.tokens}", f"{op} {cell.model}"):
            groups.setdefault(name, []).append(errors)
    return {
        name: {
            "cells": len(groups[name]),
            "mean_loss": round(math.expm1(sum(loss for loss, _ in groups[name]) / len(groups[name])), 4),
            "max_loss": round(math.expm1(max(loss for loss, _ in groups[name])), 4),
            "estimate_over_measured": round(math.exp(sum(e for _, e in groups[name]) / len(groups[name])), 3),
        }
        for name in sorted(groups, key=_order)
    }


def _order(name: str) -> tuple[int, int, int, str]:
    """Return the sort key of a cell's name: op, number of tokens, model."""
    op, _, rest = name.partition(" ")
    tokens = int(rest[2:]) if rest.startswith("T=") else 0
    return [op.value for op in Op].index(op), bool(rest) + (not tokens), tokens, rest


def merged(tables: Iterable[Table]) -> Table:
    """Tables of disjoint cells, joined into one."""
    tables = list(tables)
    result: Table = {}
    for name in sorted({name for table in tables for name in table}, key=_order):
        rows = [table[name] for table in tables if name in table]
        count = sum(row["cells"] for row in rows)

        def mean(field: str, rows: list[dict[str, float]] = rows, count: float = count) -> float:
            return math.exp(sum(row["cells"] * math.log(row[field] + (field == "mean_loss")) for row in rows) / count)

        result[name] = {
            "cells": count,
            "mean_loss": round(mean("mean_loss") - 1, 4),
            "max_loss": max(row["max_loss"] for row in rows),
            "estimate_over_measured": round(mean("estimate_over_measured"), 3),
        }
    return result


def show(title: str, table: Table) -> None:
    print(f"\n{title}\n{'':22}{'cells':>6}{'mean loss':>11}{'max loss':>10}{'est/measured':>14}")
    for name, row in table.items():
        print(
            f"{name:22}{row['cells']:6}{row['mean_loss']:11.2%}{row['max_loss']:10.1%}"
            f"{row['estimate_over_measured']:14.2f}"
        )
