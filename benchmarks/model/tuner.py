"""The tuner against an exhaustive search over the same space: what its choices lose, for how many measurements.

    aot compile --models benchmarks/model/tuner-models.txt --sm 90 -o candidates.msgpack
    python benchmarks/run.py tuner --candidates candidates.msgpack --out tuner.json
    cd benchmarks/results; python ../run.py tuner --sweeps sweep-h200-*-bf16.json --out tuner-sweeps.json
    python benchmarks/run.py tuner --journal benchmarks/results/catalogue-h200.journal.xz \
        --candidates candidates.msgpack --out benchmarks/results/tuner-catalogue.json

With ``--candidates``, on a GPU: both measure through the same worker, in the same way, first the tuner (10 % of the
candidates), then all of them. A cell's loss is what the tuner's choice takes over the best, both as the exhaustive
search timed them. That flatters the search: the best of some thirty noisy times is a lucky one.

With ``--sweeps``, on any machine: the tuner's choice of contenders (aot/tune/shortlist.py) on the times of an
earlier exhaustive run, in place of a GPU. Candidates that the sweep left out of a cell are not measured there.

With ``--journal``, on any machine: the tuner's choice on the times of a tuner's journal, with its candidates: on all
plain products, and on fused products if the journal times four candidates or all of them. A journal times only some
candidates of a cell, so a cell's best is the best of these.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks import provenance
from benchmarks.model import sweeps
from benchmarks.model.selection import listed
from pretuned.aot.journal.file import read_journal
from pretuned.aot.journal.records import Measured
from pretuned.aot.journal.timings import Timings
from pretuned.aot.plan.families import Family, ships_unchosen
from pretuned.aot.tune.shortlist import SHARE, ConfigPairs, Winners, contenders
from pretuned.aot.tune.tuner import Entrants, tune_problems
from pretuned.artifacts.bundle_file import open_bundle
from pretuned.artifacts.records import DType, Fusion, Op, Problem, Variant
from pretuned.kernels.chips import chip_of
from pretuned.kernels.cost import Resources
from pretuned.kernels.cost_model import Ranker
from pretuned.kernels.search import candidates

# (E, N, K): few and many experts, wide and narrow matrices.
SHAPES = {
    "qwen3-30b gate_up": (128, 1536, 2048),
    "qwen3-30b down": (128, 2048, 768),
    "qwen3-next down": (512, 2048, 512),
    "deepseek-v3 gate_up": (256, 4096, 7168),
    "mixtral-8x7b down": (8, 4096, 14336),
    "gpt-oss-20b gate_up": (32, 5760, 2880),
    "olmoe gate_up": (64, 2048, 2048),
}
PROBLEMS = (
    *((name, Op.FORWARD, Fusion.NONE) for name in SHAPES),
    ("qwen3-30b gate_up", Op.FORWARD, Fusion.GATHER),
    ("qwen3-30b down", Op.FORWARD, Fusion.SCATTER),
    ("qwen3-30b gate_up", Op.DX, Fusion.NONE),
    ("mixtral-8x7b down", Op.DX, Fusion.NONE),
    ("gpt-oss-20b gate_up", Op.DX, Fusion.NONE),
    ("olmoe gate_up", Op.DX, Fusion.NONE),
    ("qwen3-30b down", Op.DW, Fusion.NONE),
    ("mixtral-8x7b down", Op.DW, Fusion.NONE),
    ("gpt-oss-20b gate_up", Op.DW, Fusion.NONE),
    ("olmoe gate_up", Op.DW, Fusion.NONE),
)
FORMS = "forms"  # an op's name for a journal's products that move rows or end in silu
ENOUGH = 4  # least candidates with times for a fused cell to count: of fewer the tuner tries each
BUCKETS = {Op.FORWARD: (8, 128, 1024, 8192, 65536), Op.DX: (128, 8192, 65536), Op.DW: (1024, 8192, 65536)}


@dataclass(frozen=True)
class Cell:
    """One cell: the times of the tuner's choice and of the model's choice, over the fastest variant's time.

    The tuner ``measured`` so many of the ``possible`` variants, and ``repeated`` some to confirm its choice.
    """

    problem: str
    op: str
    M: int
    measured: int
    repeated: int
    possible: int
    tuned: float
    modelled: float


def on_gpu(bundle: Path, folder: Path) -> tuple[list[Cell], dict[str, object]]:
    """Run the tuner and the exhaustive search on this GPU; return the cells and facts about the run."""
    problems = {Problem(op, DType.BF16, *SHAPES[name], fusion=fusion): BUCKETS[op] for name, op, fusion in PROBLEMS}
    begun = time.monotonic()
    tuned = tune_problems(problems, bundle, folder / "tuner.journal", budget_s=None, with_torch=False)
    exhaustive = tune_problems(
        problems, bundle, folder / "all.journal", budget_s=None, with_torch=False, entrants=Entrants(share=1.0)
    )
    few, full = read_journal(folder / "tuner.journal"), read_journal(folder / "all.journal")
    chosen, times = Timings.of(few), Timings.of(full)
    records = {(record.problem, record.bucket): record for record in few.records if isinstance(record, Measured)}
    cells = []
    for key, record in records.items():
        all_times = times.cells[key].times_ns
        best = min(all_times.values())
        choice = chosen.cells[key].best_of([record.modelled, *chosen.cells[key].times_ns])
        assert choice is not None
        cells.append(
            Cell(
                str(record.problem),
                record.problem.op.value,
                record.bucket,
                len(record.timings),
                2 * (record.duel is not None),
                len(all_times),
                all_times[choice] / best,
                all_times[record.modelled] / best,
            )
        )
    facts = {
        "gpu": tuned.gpu.name,
        "driver": tuned.gpu.driver,
        "tuner_seconds": round(tuned.seconds, 1),
        "exhaustive_seconds": round(exhaustive.seconds, 1),
        "seconds": round(time.monotonic() - begun, 1),
        "failures": [failure.reason for failure in (*tuned.failures, *exhaustive.failures)],
    }
    return cells, facts


def on_sweeps(paths: list[Path]) -> list[Cell]:
    """Apply the tuner's shortlist to recorded times. An op's problems follow each other, with ascending rows."""
    cells_tuned = []
    for op in Op:
        cells = [cell for path in paths for cell in listed(sweeps.load(path), op)]
        winners = Winners()
        for cell in sorted(cells, key=lambda cell: (cell.problem.sort_key, cell.M)):
            ranker = Ranker(cell.variants, op, cell.problem.dtype, cell.chip)
            ranked = [cell.variants[i].config.pairs() for _, i in ranker.rank(cell.problem, cell.M)]
            times = {variant.config.pairs(): us for variant, us in zip(cell.variants, cell.times_us, strict=True)}
            possible = len(candidates(op, cell.problem.dtype, cell.chip.sm))
            cells_tuned.append(_tuned(winners, cell.problem, cell.M, ranked, times, possible, f"{cell.model} "))
    return cells_tuned


def on_journal(path: Path, bundle: Path) -> list[Cell]:
    """Return the cells of ``on_sweeps`` for times that a tuner has measured."""
    journal = read_journal(path)
    times_of = Timings.of(journal).cells
    chip = chip_of(journal.header.gpu, journal.header.sm)
    with open_bundle(bundle) as opened:
        all_variants = list(opened.variants())
    families: dict[Family, tuple[list[Variant], Ranker]] = {}
    for family in {Family.of(problem) for problem, _ in times_of}:
        able = [variant for variant in all_variants if not ships_unchosen(variant) and Family.of(variant) == family]
        ranker = Ranker([Resources.of(variant) for variant in able], family.gemm, family.dtype, chip)
        families[family] = able, ranker
    winners, cells_tuned = Winners(), []
    for problem, M in sorted(times_of, key=lambda cell: (cell[0].sort_key, cell[1])):
        able, ranker = families[Family.of(problem)]
        timed = times_of[problem, M].times_ns
        times = {variant.config: timed[variant.cubin_sha256] for variant in able if variant.cubin_sha256 in timed}
        ranked = [able[i].config for _, i in ranker.rank(problem, M) if able[i].config in times]
        cell = _tuned(winners, problem, M, ranked, times, len(able))
        if problem.fusion is Fusion.NONE or len(times) >= min(ENOUGH, len(able)):
            cells_tuned.append(cell)
    return cells_tuned


def _tuned(
    winners: Winners,
    problem: Problem,
    M: int,
    ranked: list[ConfigPairs],
    times: dict[ConfigPairs, float],
    possible: int,
    model: str = "",
) -> Cell:
    """Return the tuner's choice among the candidates of a cell, and add it to the winners."""
    twin = winners.other_fusion(problem, M)
    of_all = min(0.99, SHARE * possible / len(ranked))  # share of the whole space: variants without a time can't win
    share = SHARE if twin else of_all
    chosen = contenders(ranked, winners.near(problem, M), twin, share)
    fastest = min(chosen, key=lambda config: times[config])
    winners.add(problem, M, fastest)
    best = min(times.values())
    return Cell(
        f"{model}{problem}",
        FORMS if problem.fusion else problem.op.value,
        M,
        len(chosen),
        0,
        possible,
        times[fastest] / best,
        times[ranked[0]] / best,
    )


def summary(cells: list[Cell]) -> dict[str, object]:
    """Geometric means of the losses, and the share of variants that were measured."""
    return {
        "cells": len(cells),
        "problems": len({cell.problem for cell in cells}),
        "measurements": sum(cell.measured for cell in cells),
        "exhaustive": sum(cell.possible for cell in cells),
        "repeated": sum(cell.repeated for cell in cells),
        "share": round(sum(cell.measured for cell in cells) / sum(cell.possible for cell in cells), 4),
        "tuned": _loss([cell.tuned for cell in cells]),
        "modelled": _loss([cell.modelled for cell in cells]),
    }


def _loss(ratios: list[float]) -> dict[str, float]:
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return {"mean_loss": round(mean - 1, 4), "max_loss": round(max(ratios) - 1, 4)}


def show(name: str, row: Mapping[str, object]) -> None:
    tuned, modelled = row["tuned"], row["modelled"]
    assert isinstance(tuned, dict)
    assert isinstance(modelled, dict)
    print(
        f"{name:8} {row['problems']:3} problems {row['cells']:4} cells: {row['share']:6.1%} of the measurements "
        f"and {row['repeated']} repeated, "
        f"loss {tuned['mean_loss']:6.2%} (most {tuned['max_loss']:.1%}); "
        f"the model alone {modelled['mean_loss']:6.2%} ({modelled['max_loss']:.1%})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    recorded = parser.add_mutually_exclusive_group()
    recorded.add_argument("--sweeps", type=Path, nargs="+")
    recorded.add_argument("--journal", type=Path)
    parser.add_argument("--candidates", type=Path, help="to measure, or those of --journal")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--journals", type=Path, help="keep both journals in this folder")
    args = parser.parse_args()
    facts: dict[str, object] = {}
    if bool(args.sweeps) == bool(args.candidates):
        parser.error("wanted --sweeps, or --candidates")
    if args.journal:
        cells = on_journal(args.journal, args.candidates)
        facts["times"] = f"recorded: {args.journal.name}"
    elif args.sweeps:
        cells = on_sweeps(args.sweeps)
        facts["times"] = "recorded: " + ", ".join(path.name for path in args.sweeps)
    else:
        with tempfile.TemporaryDirectory() as folder:
            cells, facts = on_gpu(args.candidates, args.journals or Path(folder))
        facts["times"] = "measured now"
    rows = {"all": summary([cell for cell in cells if cell.op != FORMS])}
    for name in (*(op.value for op in Op), FORMS):
        some = [cell for cell in cells if cell.op == name]
        if some:
            rows[name] = summary(some)
    for name, row in rows.items():
        show(name, row)
    report = {**provenance.about(), **facts, "summary": rows}
    if not args.journal:  # a journal has all ops
        report["cells"] = [vars(cell) for cell in cells]
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    within = rows["all"]["tuned"]["mean_loss"] <= 0.02 and rows["all"]["share"] <= 0.1  # type: ignore[index,operator]
    sys.exit(0 if within else "beyond 2 % of loss or 10 % of the measurements")
