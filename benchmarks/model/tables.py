"""Write the tables of two pages anew from the results of fits.

    python benchmarks/run.py tables            # print them
    python benchmarks/run.py tables --write    # put them into the documents

The results: fit-h200-bf16.json and select-h200-bf16.json (fit_cost.py), unknown-h100.journal.xz and unknown-cost.json
(unknown.py).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.model import unknown
from pretuned.aot.journal.file import read_journal
from pretuned.artifacts.bundle_file import open_bundle

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
COST_MODEL, ON_DEMAND = ROOT / "docs/inside/cost-model.md", ROOT / "docs/use/tuning-on-demand.md"
OPS = ("forward", "dX", "dW")


def percent(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %"


def tables() -> Iterator[tuple[Path, str, list[str]]]:
    """Yield each table: (document, the beginning of its first line in the document, the lines below its rule)."""
    fit, cost = _read("fit-h200-bf16.json"), _read("unknown-cost.json")
    select = _read("select-h200-bf16.json")["select"]
    yield (
        COST_MODEL,
        "| | fitted: mean |",
        [
            f"| {name} | {percent(row['mean_loss'])} | {percent(row['max_loss'])} "
            f"| {row['estimate_over_measured']:.2f} | {percent(fit['models left out'][name]['mean_loss'])} "
            f"| {percent(fit['models left out'][name]['max_loss'])} |"
            for name, row in fit["fitted"].items()
            if name in OPS  # the file has each model and number of tokens, too
        ],
    )
    limits = [row["at_most"] for row in select[OPS[0]]["sets"]]
    yield (
        COST_MODEL,
        "| at most |",
        [
            f"| {limit} |"
            + "".join(
                f" {row['chosen']}: {percent(row['mean_loss'], 2)} ({percent(row['max_loss'])}) |"
                for row in (select[op]["sets"][i] for op in OPS)
            )
            for i, limit in enumerate(limits)
            if limit <= 8  # larger limits change little
        ],
    )
    yield COST_MODEL, "| | candidates measured |", [_modelled(op, select[op]) for op in OPS]
    with open_bundle(unknown.BUNDLE) as bundle:
        judged = list(unknown.judged(bundle, read_journal(RESULTS / "unknown-h100.journal.xz")))
    yield (
        COST_MODEL,
        "| chosen by | mean |",
        [
            f"| {name} | {percent(mean, 2)} | {percent(high)} | {percent(worst, 0)} | "
            + " | ".join("" if loss is None else percent(loss, 2) for loss in by_tokens)
            + " |"
            for name, (mean, high, worst), by_tokens in unknown.rows(judged)
            if name == "all, cost model" or name.endswith("neighbours too")
        ],
    )
    ranges = {
        key: f"{min(times):,.0f} to {max(times):,.0f}"
        for key in ("once_median_us", "once_p99_us", "another_median_us")
        if (times := [row[key] for row in cost["cost"].values()])
    }
    yield (
        ON_DEMAND,
        "| what the host does, in us |",
        [
            f"| decide for the first M of a shape, by op | {ranges['once_median_us']} | {ranges['once_p99_us']} |",
            f"| decide for another M | {ranges['another_median_us']} | |",
            f"| look a decision up | {max(row['table_us'] for row in cost['cost'].values()):.1f} | |",
        ],
    )


def _modelled(op: str, of: dict[str, Any]) -> str:
    best, picked = of["modelled"]["best"], of["modelled"]["picked"]
    return (
        f"| {op} | {of['of_them_measured']} of {of['candidates']} | {of['modelled']['chosen']} "
        f"| {percent(best['mean_loss'], 2)} ({percent(best['max_loss'])}) "
        f"| {percent(picked['mean_loss'], 2)} ({percent(picked['max_loss'])}) |"
    )


def _read(name: str) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return read


def put(text: str, head: str, rows: list[str]) -> str:
    """Return the document with these rows in the table that begins with ``head``."""
    lines = text.splitlines()
    heads = [i for i, line in enumerate(lines) if line.startswith(head)]
    if len(heads) != 1:
        sys.exit(f"{len(heads)} tables begin with {head!r}, wanted one")
    first = end = heads[0] + 2
    while end < len(lines) and lines[end].startswith("|"):
        end += 1
    return "\n".join([*lines[:first], *rows, *lines[end:]]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the tables into the documents")
    args = parser.parse_args()
    for path, head, rows in tables():
        print("\n".join([f"\n{path.relative_to(ROOT)}: {head}", *rows]))
        if args.write:
            path.write_text(put(path.read_text(), head, rows))
