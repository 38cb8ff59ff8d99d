"""Fits the cost model's constants of one generation of GPU to measured sweeps, and judges them on models left out.

    python benchmarks/run.py fit_cost benchmarks/results/sweep-*.json
    python benchmarks/run.py fit_cost benchmarks/results/sweep-*.json --write \\
        --out benchmarks/results/fit-h200-bf16.json
    python benchmarks/run.py fit_cost benchmarks/results/sweep-*.json --steps 0       # judge what is there
    python benchmarks/run.py fit_cost benchmarks/results/sweep-*.json --select        # how few variants are enough

Several sweeps of several ops are fitted together (benchmarks/model/fitting.py: forward and dX run the same kernel
and share their constants). ``--write`` puts the constants into kernels/cost.py. The same command gives the
same constants.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.model import selection
from benchmarks.model.fitting import FITTED, FITTED_DW, PRIOR, SHARED, fit, values_of
from benchmarks.model.sweeps import Cell, Table, judge, load, merged, show
from pretuned.artifacts.records import Op
from pretuned.kernels.cost import CONSTANTS, Constants, Specialized, WeightGrad

CALIBRATION = Path(__file__).parents[2] / "kernels" / "cost.py"
BEGIN, END = "# fitted: begin\n", "# fitted: end\n"


def cross_validate(cells: Sequence[Cell], begun: Constants, steps: int, seed: int, folds: int = 3) -> Table:
    """Judge each model by constants that were fitted without it."""
    models = list(dict.fromkeys(cell.model for cell in cells))
    tables = []
    for fold in range(folds):
        left_out = models[fold::folds]
        constants = fit([cell for cell in cells if cell.model not in left_out], begun, steps, seed)
        tables.append(judge([cell for cell in cells if cell.model in left_out], constants))
        show(f"left out: {', '.join(left_out)}", tables[-1])
    return merged(tables)


def source(constants: Constants, sm: int, comment: str) -> str:
    """The fitted block of kernels/cost.py as source text."""
    rows = []
    family = constants.family(sm)
    for name, value in family._asdict().items():
        if isinstance(value, WeightGrad | Specialized):
            inner = (f"        {inner}={held!r}," for inner, held in value._asdict().items())
            rows += [f"    {name}={type(value).__name__}(", *inner, "    ),"]
        else:
            rows.append(f"    {name}={value!r},")
    shared = [f"_{name.upper()} = {getattr(constants, name)!r}" for name in SHARED]
    return "\n".join([comment, "_HOPPER = ConstantsFamily(", *rows, ")", *shared]) + "\n"


def select(cells: Sequence[Cell], constants: Constants) -> dict[str, dict[str, object]]:
    summaries = {}
    for op in Op:
        if any(cell.problem.op is op for cell in cells):
            summaries[op.value] = selection.summary(cells, op, constants)
            selection.show(op, summaries[op.value])
    return summaries


def with_held(fitted: Constants) -> Constants:
    """Return the fitted constants; constants that no sweep measures keep their values from journals and trials."""
    own, special = CONSTANTS.hopper, fitted.hopper.specialized
    special = special._replace(dealt_memory=own.specialized.dealt_memory)
    return fitted._replace(hopper=fitted.hopper._replace(short_reads=own.short_reads, specialized=special))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", nargs="+", type=Path)
    parser.add_argument("--steps", type=int, default=4000, help="steps of the search; 0 only judges")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-cross", action="store_true", help="don't fit again with models left out")
    parser.add_argument("--write", action="store_true", help="put the constants into kernels/cost.py")
    parser.add_argument("--select", action="store_true", help="only show how few variants are enough; fits nothing")
    parser.add_argument("--out", type=Path, help="write the tables as JSON")
    args = parser.parse_args()

    begun = time.time()
    cells = [cell for path in args.sweeps for cell in load(path)]
    sms = sorted({cell.chip.sm for cell in cells})
    if sms != [90]:
        raise SystemExit(f"the sweeps are of sm {sms}, wanted 90 alone: one generation is fitted at a time")
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in args.sweeps)).hexdigest()[:16]
    command = " ".join(["benchmarks/run.py fit_cost", *map(str, sys.argv[1:])])
    tables: dict[str, object]
    if args.select:
        tables = {"select": select(cells, CONSTANTS)}
    else:
        tables = {} if args.steps else {"as it is": judge(cells, CONSTANTS)}
        show(f"{len(cells)} cells, as the constants are", judge(cells, CONSTANTS))
        fitted = fit(cells, PRIOR, args.steps, args.seed) if args.steps else CONSTANTS
        if args.steps:
            tables["fitted"] = judge(cells, fitted)
            show("fitted", judge(cells, fitted))
        fitted = with_held(fitted)
        words = [f"# Fitted to sweeps with the sha256 {digest} by python", *_wrapped(command)]
        block = source(fitted, 90, "\n".join(words))
        print("\n" + block, flush=True)
        if args.write:
            head, rest = CALIBRATION.read_text().split(BEGIN)
            CALIBRATION.write_text(head + BEGIN + block + END + rest.split(END)[1])
        if args.steps and not args.no_cross:
            left_out = cross_validate(cells, PRIOR, args.steps, args.seed)
            tables["models left out"] = left_out
            show("every model judged by constants that never saw it", left_out)
        ranges = (*FITTED, *FITTED_DW)
        tables["constants"] = dict(zip((name for name, *_ in ranges), values_of(fitted, 90, ranges), strict=True))
    if args.out:
        result = {"command": command, "seconds": round(time.time() - begun, 1), "sweeps_sha256": digest, **tables}
        args.out.write_text(json.dumps(result, indent=1) + "\n")


def _wrapped(command: str) -> list[str]:
    """The command as comment lines, one word a line."""
    program, *words = command.split(" ")
    lines = ["# " + program]
    for word in words:
        if word.startswith("--") or not lines[-1].split()[-1].startswith("--"):
            lines.append("#   " + word)
        else:
            lines[-1] += " " + word
    return lines
