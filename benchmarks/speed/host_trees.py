"""Host times of two checkouts, in processes that take turns.

    python benchmarks/run.py host_trees --old ../old --rounds 8 --out host-trees.json
    python benchmarks/run.py host_trees --table host-trees.json
    python benchmarks/run.py host_trees --old ../old --without-gpu

Each process is ``benchmarks/run.py host`` of this checkout on the runtime of one of the two. Figures are ratios of the
new one's times to the old one's: of the medians over the rounds, of the least, and the median of the rounds' own.
torch's calls are the same code in both, so their ratios tell the host's noise; the last two lines are geometric means
of ours and of torch's. It ends with 1 where a ratio of medians of ours is above ``--most``. ``--without-gpu`` compares
what Python takes of them (host_python.py), of which each process gives its least.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def linked(checkout: Path, folder: Path) -> Path:
    """A folder to put on the path, in which ``pretuned`` is this checkout."""
    for layer in ("artifacts", "kernels", "runtime", "aot", "runtime/integrations"):
        link = folder / "pretuned" / Path(layer).name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(checkout.resolve() / layer)
    return folder


def measured(path: Path, out: Path, without_gpu_of: Path | None = None) -> dict[str, float]:
    """The medians of one process; without a GPU the least that Python takes, of a checkout."""
    command = [sys.executable, str(ROOT / "benchmarks/run.py"), "host", "--out", str(out)]
    if without_gpu_of is not None:
        command[2:3] = ["host_python", "--support", str(without_gpu_of / "tests/support")]
    places = os.pathsep.join(filter(None, (str(path), os.environ.get("PYTHONPATH"))))
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": places})
    figure = "median" if without_gpu_of is None else "least"
    return {name: one[figure] for name, one in json.loads(out.read_text())["calls"].items()}


Ratios = tuple[float, float, float]


def rows(found: dict[str, list[dict[str, float]]]) -> dict[str, tuple[float, float, Ratios]]:
    """Of each call the medians of old and new, and new to old: of medians, of the least, the median of each round's."""
    calls = {}
    for name in found["new"][0]:
        old, new = ([one[name] for one in found[tree]] for tree in ("old", "new"))
        turns = statistics.median(b / a for a, b in zip(old, new, strict=True))
        medians = statistics.median(old), statistics.median(new)
        calls[name] = *medians, (medians[1] / medians[0], min(new) / min(old), turns)
    return calls


def mean(calls: dict[str, tuple[float, float, Ratios]], torchs: bool) -> Ratios:
    """Geometric means of the ratios of our calls, or of torch's."""
    ratios = [one for name, (_, _, one) in calls.items() if name.startswith("torch") == torchs]
    medians, least, turns = map(statistics.geometric_mean, zip(*ratios, strict=True))
    return medians, least, turns


def told(found: dict[str, list[dict[str, float]]], most: float) -> list[str]:
    """Print the table; which of ours are above ``most``."""
    calls = rows(found)
    print(f"{'call':42} {'old':>8} {'new':>8} us  medians   least  by round")
    for name, (old, new, ratios) in calls.items():
        print(f"{name:42} {old:8.2f} {new:8.2f}    " + "  ".join(f"{one:7.3f}" for one in ratios))
    for name, torchs in (("ours", False), ("torch, the same code in both", True)):
        if not any(one.startswith("torch") == torchs for one in calls):
            continue
        print(f"{name:42} {'':20} " + "  ".join(f"{one:7.3f}" for one in mean(calls, torchs)))
    return [name for name, (*_, (medians, *_)) in calls.items() if medians > most and not name.startswith("torch")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--old", type=Path, help="the checkout to compare with")
    what.add_argument("--table", type=Path, metavar="FILE", help="print the table of an earlier --out")
    parser.add_argument("--without-gpu", action="store_true", help="what Python takes, by the tests' made-up GPU")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--most", type=float, default=1.03, help="the highest ratio of medians that passes")
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    args = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {"old": [], "new": []}
    if args.table:
        found = json.loads(args.table.read_text())
    else:
        with tempfile.TemporaryDirectory() as folder:
            trees = {"old": args.old.resolve(), "new": ROOT}
            paths = {name: linked(tree, Path(folder) / name) for name, tree in trees.items()}
            for turn in range(args.rounds):
                for name in ("old", "new") if turn % 2 == 0 else ("new", "old"):
                    of = trees[name] if args.without_gpu else None
                    found[name].append(measured(paths[name], Path(folder) / "times.json", of))
    slower = told(found, args.most)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"unit": "us", "old": found["old"], "new": found["new"]}, indent=1) + "\n")
    if slower:
        sys.exit(f"slower by more than {args.most}: {', '.join(slower)}")
