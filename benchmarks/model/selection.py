"""How few variants are enough.

``aot/choose/subset.py`` on the times of a sweep, of the candidates that kernels/search.py lists.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from benchmarks.model.sweeps import Cell, Rankings
from pretuned.aot.choose.subset import MISSING, select
from pretuned.artifacts.records import Op
from pretuned.kernels.cost import Constants, Resources
from pretuned.kernels.search import candidates

LIMITS = (1, 2, 4, 6, 8, 12, 16)


def listed(cells: Sequence[Cell], op: Op) -> list[Cell]:
    """The cells of ``op``, cut down to the variants that the search space holds."""
    reduced = []
    for cell in cells:
        if cell.problem.op is op:
            space = set(candidates(op, cell.problem.dtype, cell.chip.sm))
            kept = [i for i, variant in enumerate(cell.variants) if variant.config in space]
            variants, times = tuple(cell.variants[i] for i in kept), tuple(cell.times_us[i] for i in kept)
            reduced.append(dataclasses.replace(cell, variants=variants, times_us=times))
    return reduced


def summary(cells: Sequence[Cell], op: Op, constants: Constants) -> dict[str, object]:
    """Return the losses of small sets of variants, chosen by measured times and by the cost model alone.

    A loss is over the best candidate measured in a cell. A variant that was not measured in a cell counts as
    ``MISSING`` times the slowest there.
    """
    cells = listed(cells, op)
    variants = sorted({v for cell in cells for v in cell.variants}, key=lambda v: v.config)
    number = {variant: i for i, variant in enumerate(variants)}
    keys = [(cell.problem, cell.M) for cell in cells]
    measured = {
        key: [(number[v], us) for v, us in zip(cell.variants, cell.times_us, strict=True)]
        for key, cell in zip(keys, cells, strict=True)
    }
    rankings = Rankings(constants)
    modelled = {
        key: [(number[cell.variants[i]], us) for us, i in rankings.of(cell)]
        for key, cell in zip(keys, cells, strict=True)
    }
    sets = []
    for limit in LIMITS:
        loss = select(measured, limit=limit)
        sets.append(
            {
                "at_most": limit,
                "chosen": len(loss.variants),
                "mean_loss": round(loss.mean_loss, 4),
                "max_loss": round(loss.max_loss, 4),
                "variants": _names(variants, loss.variants),
            }
        )
    chosen = select(modelled, limit=LIMITS[-1]).variants
    best, first = [], []
    for key in keys:
        times = dict(measured[key])
        slowest = max(times.values()) * MISSING
        best.append(math.log(min(times.get(v, slowest) for v in chosen) / min(times.values())))
        pick = min((us, v) for v, us in modelled[key] if v in chosen)[1]
        first.append(math.log(times[pick] / min(times.values())))
    return {
        "candidates": len(candidates(op, cells[0].problem.dtype, cells[0].chip.sm)),
        "of_them_measured": len(variants),
        "sets": sets,
        "modelled": {
            "chosen": len(chosen),
            "variants": _names(variants, chosen),
            "best": _loss(best),
            "picked": _loss(first),
        },
    }


def _names(variants: Sequence[Resources], chosen: Sequence[int]) -> list[str]:
    return [str(variants[i].config) for i in chosen]


def _loss(logs: Sequence[float]) -> dict[str, float]:
    return {"mean_loss": round(math.expm1(sum(logs) / len(logs)), 4), "max_loss": round(math.expm1(max(logs)), 4)}


def show(op: Op, report: dict[str, object]) -> None:
    print(
        f"\n{op.value}: {report['of_them_measured']} of {report['candidates']} candidates measured"
        f"\n{'at most':>8}{'chosen':>8}{'mean loss':>11}{'max loss':>10}"
    )
    sets: list[dict[str, float]] = report["sets"]  # type: ignore[assignment]
    for row in sets:
        print(f"{row['at_most']:8}{row['chosen']:8}{row['mean_loss']:11.2%}{row['max_loss']:10.1%}")
    four: list[str] = next(row["variants"] for row in sets if row["at_most"] == 4)  # type: ignore[misc]
    print("the four:", "; ".join(four))
    modelled: dict[str, dict[str, float]] = report["modelled"]  # type: ignore[assignment]
    best, picked = modelled["best"], modelled["picked"]
    print(
        f"the model's set: {modelled['chosen']}, its best within {best['mean_loss']:.2%} ({best['max_loss']:.1%}), "
        f"its pick within {picked['mean_loss']:.2%} ({picked['max_loss']:.1%})"
    )
