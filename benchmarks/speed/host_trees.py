"""Host times of two checkouts, in processes that take turns.

    python benchmarks/run.py host_trees --old ../old --rounds 5 --out host-trees.json

Each process is ``benchmarks/run.py host`` of this checkout on the runtime of one of the two. A figure is the ratio of
the new one's to the old one's, of the medians over the rounds and of the least. It ends with 1 where a ratio of medians
is above ``--most``.
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


def measured(path: Path, out: Path) -> dict[str, float]:
    """The medians of one process."""
    command = [sys.executable, str(ROOT / "benchmarks/run.py"), "host", "--out", str(out)]
    places = os.pathsep.join(filter(None, (str(path), os.environ.get("PYTHONPATH"))))
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": places})
    return {name: one["median"] for name, one in json.loads(out.read_text())["calls"].items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, required=True, help="the checkout to compare with")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--most", type=float, default=1.03, help="the highest ratio of medians that passes")
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    args = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {"old": [], "new": []}
    with tempfile.TemporaryDirectory() as folder:
        paths = {name: linked(tree, Path(folder) / name) for name, tree in (("old", args.old), ("new", ROOT))}
        for turn in range(args.rounds):
            for name in ("old", "new") if turn % 2 == 0 else ("new", "old"):
                found[name].append(measured(paths[name], Path(folder) / "times.json"))
    slower = []
    for name in found["new"][0]:
        old, new = ([one[name] for one in found[tree]] for tree in ("old", "new"))
        ratio = statistics.median(new) / statistics.median(old)
        print(f"{name:42} {statistics.median(old):8.2f} {statistics.median(new):8.2f} us  {ratio:.3f}  "
              f"of the least {min(new) / min(old):.3f}")  # fmt: skip
        slower += [name] if ratio > args.most and not name.startswith("torch") else []
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"unit": "us", **found}, indent=1) + "\n")
    if slower:
        sys.exit(f"slower by more than {args.most}: {', '.join(slower)}")
