"""Heuristics worth the name? Shapes left out of the tuning, run by the cost model over what the others' tuning ships.

    python benchmarks/run.py heuristics benchmarks/results/sweep-h200-*-bf16.json --steps 4000 --out FILE
    python benchmarks/run.py heuristics h200.journal --candidates candidates.msgpack --models catalogue --out FILE
    python benchmarks/run.py heuristics --cost bundles/pretuned-sm90.msgpack --out FILE

Two thirds of the models are tuned: the at most 16 configs of each op that ship are selected by their measured times.
The other third runs by heuristics: the cost model chooses among what ships, and never sees their times; with
``--steps`` its constants, too, are fitted anew to the tuned models alone. Each cell is judged by its own tuned choice,
the fastest of all variants measured there, and by torch grouped_mm. Three folds, each model left out once.

A journal must be an exhaustive one; ``--models`` tells which of its cells belong to which model. ``--cost`` times what
a decision costs on this machine's CPU: the first of a shape, and from the table.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.method import MODELS
from benchmarks.model import fitting
from benchmarks.model.sweeps import Cell, Rankings, load
from pretuned.aot.choose.subset import select
from pretuned.aot.plan.families import CONFIG_LIMIT
from pretuned.artifacts.files.bundle_file import open_bundle
from pretuned.artifacts.records.precision import DType
from pretuned.artifacts.records.problem import Fusion, Layout, Op, Problem, bucket_of
from pretuned.artifacts.records.target import Gpu
from pretuned.kernels.cost.constants import CONSTANTS, Constants
from pretuned.kernels.cost.model import Resources
from pretuned.kernels.hardware.chips import chip_of

PEERS = Path(__file__).parents[1] / "peers" / "h200.jsonl"
FOLDS = 3
MEAN_GOAL, WORST_GOAL, TORCH_GOAL, ONCE_GOAL_US, TABLE_GOAL_US = 0.05, 0.20, 0.03, 200.0, 1.0


@dataclasses.dataclass(frozen=True, slots=True)
class Judged:
    """One cell of a model left out: the pick of those variants that ship and were measured there.

    ``skipped`` says that the model likes one better that was not; ``picked_us`` is None where none was.
    """

    cell: Cell
    picked: str
    picked_us: float | None
    skipped: bool
    tuned_us: float
    torch_us: float | None


def shipped(cells: Sequence[Cell]) -> set[Resources]:
    """The variants of one op that tuning on these cells ships, by their measured times."""
    variants = sorted({variant for cell in cells for variant in cell.variants}, key=lambda one: one.config)
    number = {variant: i for i, variant in enumerate(variants)}
    table = {
        (cell.problem, cell.M): [(number[v], us) for v, us in zip(cell.variants, cell.times_us, strict=True)]
        for cell in cells
    }
    return {variants[i] for i in select(table, CONFIG_LIMIT).variants}


def fitted(cells: Sequence[Cell], steps: int) -> Constants:
    """The cost model's constants of these cells; those in force without steps."""
    return fitting.fit(cells, fitting.PRIOR, steps) if steps else CONSTANTS


def left_out(cells: Sequence[Cell], torch_us: Mapping[Cell, float], steps: int) -> list[Judged]:
    """Every cell, judged with its model left out."""
    models = list(dict.fromkeys(cell.model for cell in cells))
    found = []
    for fold in range(FOLDS):
        out = models[fold::FOLDS]
        tuned = [cell for cell in cells if cell.model not in out]
        rankings = Rankings(fitted(tuned, steps))
        for op in Op:
            ships = shipped(some) if (some := [cell for cell in tuned if cell.problem.op is op]) else set()
            for cell in cells:
                if cell.model in out and cell.problem.op is op and ships:
                    found.append(judge(cell, ships, rankings, torch_us.get(cell)))
        print(f"left out: {', '.join(out)}", flush=True)
    return found


def judge(cell: Cell, ships: set[Resources], rankings: Rankings, torch_us: float | None) -> Judged:
    """What the cost model picks of ``ships``, beside the fastest variant of the cell."""
    able = tuple(sorted(ships, key=lambda one: one.config))
    there = dict(zip(cell.variants, cell.times_us, strict=True))
    ranked = [able[i] for _, i in rankings.of(dataclasses.replace(cell, variants=able, times_us=(0.0,) * len(able)))]
    pick = next((one for one in ranked if one in there), ranked[0])
    return Judged(cell, str(pick.config), there.get(pick), pick is not ranked[0], min(cell.times_us), torch_us)


def torch_times(cells: Iterable[Cell], sweeps: Iterable[Path] = (), path: Path = PEERS) -> dict[Cell, float]:
    """torch grouped_mm of the sweeps' cells: of the same run where it was timed there, else of another on an H200."""
    gemms = {
        (name, n, k): gemm
        for name, _, H, width, _ in MODELS
        for gemm, n, k in (("gate_up", 2 * width, H), ("down", H, width))
    }
    times = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        times[row["model"], row["gemm"], row["op"], row["tokens"]] = row["us"].get("torch_grouped_mm")
    for sweep in (json.loads(one.read_text()) for one in sweeps):
        for row in sweep["cells"]:
            if row.get("torch_us"):
                times[row["model"], row["gemm"], sweep["op"], row["tokens"]] = row["torch_us"]
    found = {}
    for cell in cells:
        gemm = gemms[cell.model, cell.problem.N, cell.problem.K]
        us = times.get((cell.model, gemm, cell.problem.op.value, cell.tokens))
        if us is not None:
            found[cell] = us
    return found


def journal_cells(path: Path, candidates: Path, models: Sequence[str]) -> tuple[list[Cell], dict[Cell, float]]:
    """The cells of a journal, each under the first model that has its problem, and torch's times at the same clock."""
    from pretuned.aot.journal.file import read_journal
    from pretuned.aot.journal.timings import Timings
    from pretuned.aot.models.load import load_models
    from pretuned.aot.plan.families import Family
    from pretuned.aot.plan.plan import plan

    contents = read_journal(path)
    chip = chip_of(contents.header.gpu, contents.header.sm)
    with open_bundle(candidates) as bundle:
        known = {(Family.of(one), one.cubin_sha256): Resources.of(one)
                 for one in bundle.variants() if one.alignment == 16}  # fmt: skip
    planned = plan(load_models(models).shapes).models
    owner = {problem: model for model in reversed(planned) for problem in model.problems}
    cells, torch_us = [], {}
    for (problem, bucket), times in Timings.of(contents).cells.items():
        if problem not in owner or problem.fusion:
            continue
        timed = {known[key]: ns / 1e3 for sha, ns in times.times_ns.items()
                 if (key := (Family.of(problem), sha)) in known}  # fmt: skip
        if timed:
            model = owner[problem]
            tokens = max(1, bucket // model.top_k)
            cell = Cell(model.name, tokens, problem, bucket, chip, tuple(timed), tuple(timed.values()))
            cells.append(cell)
            if times.torch_ns is not None:
                torch_us[cell] = times.torch_ns / 1e3
    return cells, torch_us


def summary(judged: Sequence[Judged]) -> dict[str, dict[str, Any]]:
    """By op, and by op and tokens: the loss to the own tuned choice, the speed against torch."""
    groups: dict[str, list[Judged]] = {"all": list(judged)}
    for one in judged:
        op = one.cell.problem.op.value
        for name in (op, f"{op} T={one.cell.tokens}"):
            groups.setdefault(name, []).append(one)
    return {name: _row(group) for name, group in groups.items()}


def _row(group: Sequence[Judged]) -> dict[str, Any]:
    timed = [one for one in group if one.picked_us is not None]
    losses = [math.log((one.picked_us or 0.0) / one.tuned_us) for one in timed]
    beside = [math.log((one.picked_us or 0.0) / one.torch_us) for one in timed if one.torch_us]
    own = [math.log(one.tuned_us / one.torch_us) for one in timed if one.torch_us]
    return {
        "cells": len(group),
        "none_measured": len(group) - len(timed),
        "first_pick_not_measured": sum(one.skipped for one in group),
        "mean_loss": round(math.expm1(statistics.fmean(losses)), 4) if losses else None,
        "worst_loss": round(math.expm1(max(losses)), 4) if losses else None,
        "over_20_percent": sum(loss > math.log1p(WORST_GOAL) for loss in losses),
        "speed_over_torch": round(math.exp(-statistics.fmean(beside)), 3) if beside else None,
        "slower_than_torch_by_over_3_percent": sum(one > math.log1p(TORCH_GOAL) for one in beside),
        "of_them_with_the_tuned_choice_too": sum(
            one > math.log1p(TORCH_GOAL) and best > math.log1p(TORCH_GOAL)
            for one, best in zip(beside, own, strict=True)
        ),
        "compared_with_torch": len(beside),
    }


def show(table: Mapping[str, Mapping[str, Any]]) -> None:
    print(f"\n{'':18}{'cells':>6}{'mean loss':>11}{'worst':>8}{'> 20 %':>8}{'x torch':>9}{'behind it':>11}"
          f"{'own too':>9}{'skipped':>9}")  # fmt: skip
    for name, row in table.items():
        shown = (row[key] for key in ("mean_loss", "worst_loss", "speed_over_torch"))
        mean, worst, speed = (math.nan if value is None else value for value in shown)
        print(f"{name:18}{row['cells']:6}{mean:11.2%}{worst:8.1%}{row['over_20_percent']:8}"
              f"{speed:9.2f}{row['slower_than_torch_by_over_3_percent']:11}"
              f"{row['of_them_with_the_tuned_choice_too']:9}{row['first_pick_not_measured']:9}")  # fmt: skip


def cost(path: Path, shapes: int = 400, again: int = 200_000) -> dict[str, dict[str, float]]:
    """The host time of ``decide`` for shapes that no bundle was built for, by op and form: us."""
    from pretuned.artifacts.records.target import LocalGpu
    from pretuned.runtime.dispatch.decide import Decision, decide
    from pretuned.runtime.dispatch.places import Kind, Place
    from pretuned.runtime.dispatch.snapshot import Snapshot

    local = LocalGpu(90, Gpu("NVIDIA H200", 132, 143771, 13000))
    found = {}
    kinds = [(Op.FORWARD, form) for form in (Fusion.NONE, Fusion.GATHER, Fusion.SCATTER)]
    for op, form in [*kinds, (Op.DX, Fusion.NONE), (Op.DW, Fusion.NONE)]:
        snapshot = Snapshot([Place(Kind.NAMED, path)])
        once = []
        for i in range(shapes):
            problem = Problem(op, DType.BF16, 16 + i % 500, 1024 + 16 * i, 2048 + 8 * i, Layout.NK, form)
            begun = time.perf_counter()
            decided = decide(snapshot, problem, bucket_of(1 << i % 17), local)
            once.append(1e6 * (time.perf_counter() - begun))
            if not isinstance(decided, Decision):
                sys.exit(f"{path}: nothing there can run {problem}")
        begun = time.perf_counter()
        for _ in range(again):
            decide(snapshot, problem, 4096, local)
        table_us = 1e6 * (time.perf_counter() - begun) / again
        variants = sum(variant.alignment == 16 for _, variant in
                       snapshot.variants(snapshot.view(local, installed=True).usable[0].bundle, problem))  # fmt: skip
        name = f"{op.value} {'+'.join(str(one.name).lower() for one in form) or 'plain'}"
        ranked = sorted(once[1:])
        found[name] = {
            "variants": variants,
            "first_of_all_us": round(once[0], 1),
            "once_median_us": round(ranked[len(ranked) // 2], 1),
            "once_p99_us": round(ranked[len(ranked) * 99 // 100], 1),
            "table_us": round(table_us, 3),
        }
        print(f"{name:18}" + "".join(f"  {key} {value}" for key, value in found[name].items()), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measured", nargs="*", type=Path, help="sweeps (.json) of several ops, or one journal")
    parser.add_argument("--candidates", type=Path, help="the candidates that a journal is about")
    parser.add_argument("--models", action="append", help="as aot takes it: whose problems a journal has")
    parser.add_argument("--steps", type=int, default=0, help="fit the constants of each fold anew in so many steps")
    parser.add_argument("--cost", type=Path, metavar="BUNDLE", help="time decisions over this bundle on the CPU")
    parser.add_argument("--out", type=Path, help="write the tables as JSON")
    args = parser.parse_args()
    if bool(args.measured) == bool(args.cost):
        parser.error("name sweeps or a journal, or --cost BUNDLE")
    begun = time.time()
    report: dict[str, Any] = {
        "command": " ".join(["benchmarks/run.py heuristics", *sys.argv[1:]]), "python": platform.python_version(),
        "processor": _processor(),
    }  # fmt: skip
    if args.cost:
        report["cost"] = cost(args.cost)
        missed = [name for name, row in report["cost"].items()
                  if row["once_median_us"] > ONCE_GOAL_US or row["table_us"] > TABLE_GOAL_US]  # fmt: skip
        report["goals"] = {"once_us": ONCE_GOAL_US, "table_us": TABLE_GOAL_US, "missed": missed}
    else:
        if args.candidates:
            cells, torch_us = journal_cells(args.measured[0], args.candidates, args.models or ["catalogue"])
        else:
            cells = [cell for path in args.measured for cell in load(path)]
            if len({(cell.model, cell.problem, cell.M) for cell in cells}) < len(cells):
                parser.error("two sweeps have the same cell")
            torch_us = torch_times(cells, args.measured)
        judged = left_out(cells, torch_us, args.steps)
        table = summary(judged)
        show(table)
        whole = table["all"]
        report |= {
            "models": sorted({cell.model for cell in cells}), "steps": args.steps, "summary": table,
            "goals": {
                "mean_loss": MEAN_GOAL, "worst_loss": WORST_GOAL,
                "reached": whole["mean_loss"] <= MEAN_GOAL and whole["worst_loss"] <= WORST_GOAL,
                "never_behind_torch": whole["slower_than_torch_by_over_3_percent"] == 0,
            },
            "cells": [
                {
                    "model": one.cell.model,
                    "tokens": one.cell.tokens,
                    "problem": str(one.cell.problem),
                    "M": one.cell.M,
                    "picked": one.picked,
                    "picked_us": one.picked_us,
                    "first_pick_not_measured": one.skipped,
                    "tuned_us": one.tuned_us,
                    "torch_us": one.torch_us,
                }
                for one in judged
            ],
        }  # fmt: skip
    report["seconds"] = round(time.time() - begun, 1)
    print(f"\ngoals: {report['goals']}")
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
