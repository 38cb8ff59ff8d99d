"""Host times of two checkouts, by two processes in lock step.

    python benchmarks/run.py host_trees --old ../old --seconds 240 --out host-trees.json
    python benchmarks/run.py host_trees --old ../old --without-gpu --pairs 8
    python benchmarks/run.py host_trees --table host-trees.json

A process of each checkout is up, on the same cores. They run a batch of a call each in turn: old, new, new, old, and so
on; one waits while the other runs. Other load on the machine slows two adjacent batches alike. After
``--batches`` of every call both end, and another pair starts, with another memory layout and hash seed, until
``--pairs`` are done or ``--seconds`` would not do for one more. Each process is ``benchmarks/run.py host --serve`` of
this checkout on the runtime of one of the two.

``ratio`` is the median of new to old over all adjacent batches. The table also has the middle 90 % of bootstrap draws
of pairs of processes, the least and the greatest ratio of a pair, and the ratios of the medians and of the fastest
batches. torch's calls are equal in both trees: their ratios are the noise. The last lines are geometric means of our
calls and of torch's. Before that the benchmark prints what one call launches in each tree, and torch's operators in it.
It ends with 1 if a ratio of ours is above ``--most``. ``--without-gpu`` compares the Python part of the calls, with the
emulated GPU of each checkout's own tests (host_python.py).
"""

from __future__ import annotations

import argparse
import json
import lzma
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.speed import host_ratios, host_turns, host_work
from benchmarks.speed.host_turns import START_S, Process, Turn

ROOT = Path(__file__).resolve().parents[2]
PAIRS = 8


def linked(checkout: Path, folder: Path) -> Path:
    """Make a folder for the path in which ``pretuned`` is this checkout."""
    for layer in ("artifacts", "kernels", "runtime", "aot", "runtime/integrations"):
        link = folder / "pretuned" / Path(layer).name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(checkout.resolve() / layer)
    (folder / "pretuned" / "__init__.py").touch()  # else Python would prefer an installed pretuned
    return folder


class Trees:
    """The two checkouts, and how to start a measured process of each."""

    def __init__(self, old: Path, folder: Path, pinned: list[int], without_gpu: bool) -> None:
        self.checkouts = {"old": old.resolve(), "new": ROOT}
        self.paths = {tree: linked(checkout, folder / tree) for tree, checkout in self.checkouts.items()}
        self.pinned, self.without_gpu = pinned, without_gpu
        for checkout in self.checkouts.values():
            wanted = checkout / ("tests/support/emulated_driver.py" if without_gpu else "runtime/__init__.py")
            if not wanted.exists():
                raise host_turns.Ended(f"{checkout} has no {wanted.relative_to(checkout)}: give a whole checkout")

    def process(self, tree: str, what: str, seed: int) -> Process:
        command = [str(ROOT / "benchmarks/run.py"), "host_python" if self.without_gpu else "host", "--serve", what]
        if self.without_gpu:
            command += ["--support", str(self.checkouts[tree] / "tests/support")]
        return Process(tree, command, self.paths[tree], seed, self.pinned)

    def work(self) -> dict[str, host_work.Work]:
        """Return the work of each call in both trees."""
        with host_turns.running(lambda tree: self.process(tree, "work", 1)) as two:
            return {tree: process.answer(START_S) for tree, process in two.items()}

    def pair(self, seed: int, batches: int, only: list[str] | None) -> tuple[dict[str, Any], list[Turn]]:
        """Start a process of each tree; return their heads and their batches."""
        with host_turns.running(lambda tree: self.process(tree, "batches", seed)) as two:
            ready = {tree: process.answer(START_S) for tree, process in two.items()}
            for tree, process in ready.items():
                runtime = Path(process["about"].pop("runtime")).resolve()
                if runtime.parents[1] != self.checkouts[tree]:
                    raise host_turns.Ended(f"the process of the {tree} tree took {runtime}, not {self.checkouts[tree]}")
            calls = [name for name in ready["new"]["calls"] if not only or name in only]
            return ready["new"]["about"], host_turns.pair(two, calls, batches)


def times(turns: list[Turn]) -> host_ratios.Pair:
    """Microseconds by tree and call."""
    pair: host_ratios.Pair = {tree: defaultdict(list) for tree in host_turns.TREES}
    for tree, call, batch in turns:
        pair[tree][call].append(round(batch.us, 3))
    return pair


def measured(args: argparse.Namespace) -> dict[str, Any]:
    """Run pairs of processes until there are enough or the time is up; the report is written after each pair."""
    began, longest = time.monotonic(), 0.0
    pinned = host_turns.cores(args.cores)
    report: dict[str, Any] = {
        "command": " ".join(["python", *sys.argv]),
        "unit": "us",
        "batches": args.batches,
        "cores": pinned,
    }
    with tempfile.TemporaryDirectory() as folder:
        trees = Trees(args.old, Path(folder), pinned, args.without_gpu)
        report["work"] = trees.work()
        unknown = sorted(set(args.only or ()) - set(report["work"]["new"]))
        if unknown:
            wanted = ", ".join(report["work"]["new"])
            raise host_turns.Ended(f"no such call: {', '.join(unknown)}; wanted of {wanted}")
        host_work.show(report["work"])
        report["pairs"] = []
        most_pairs = args.pairs or (sys.maxsize if args.seconds else PAIRS)
        while len(report["pairs"]) < most_pairs:
            start = time.monotonic()
            if report["pairs"] and args.seconds and start - began + longest > args.seconds:
                break
            seed = len(report["pairs"]) + 1
            report["environment"], turns = trees.pair(seed, args.batches, args.only)
            report["pairs"].append({"hash_seed": seed, **times(turns)})
            longest = max(longest, time.monotonic() - start)
            print(f"pair {seed}: {time.monotonic() - start:.0f} s", file=sys.stderr)
            written(report, args.out)
    return report


def written(report: dict[str, Any], out: Path | None) -> None:
    if out:
        report["ratios"] = {name: row.as_dict() for name, row in host_ratios.rows(report["pairs"]).items()}
        out.parent.mkdir(parents=True, exist_ok=True)
        lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in report.items()]
        out.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def read(path: Path) -> list[host_ratios.Pair]:
    """The pairs of an earlier file, compressed or not; old files have one time for each call and process."""
    with lzma.open(path, "rt") if path.suffix == ".xz" else path.open() as file:
        report = json.load(file)
    if "pairs" in report:
        return report["pairs"]  # type: ignore[no-any-return]
    if "ratios" in report:
        raise host_turns.Ended(f"{path} has no batches any more, but its ratios as they were told")
    return [
        {tree: {name: [us] for name, us in times.items()} for tree, times in (("old", old), ("new", new))}
        for old, new in zip(report["old"], report["new"], strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--old", type=Path, help="the checkout to compare with")
    what.add_argument("--table", type=Path, metavar="FILE", help="print the table of an earlier --out")
    parser.add_argument("--without-gpu", action="store_true", help="what Python takes, by the tests' made-up GPU")
    parser.add_argument("--pairs", type=int, help=f"of processes ({PAIRS}, or with --seconds as many as do)")
    parser.add_argument("--seconds", type=float, help="begin no pair that would end after so many; one is always run")
    parser.add_argument("--batches", type=int, default=100, help="of each call, by each process (100)")
    parser.add_argument("--only", nargs="+", metavar="CALL", help="these calls alone, by their names in the table")
    parser.add_argument("--cores", type=int, default=2, help="how many cores both are kept on; 0: any (2)")
    parser.add_argument("--most", type=float, default=1.03, help="the highest ratio that passes (1.03)")
    parser.add_argument("--out", type=Path, help="the JSON file to write, after each pair anew")
    args = parser.parse_args()
    try:
        pairs = read(args.table) if args.table else measured(args)["pairs"]
    except host_turns.Ended as error:
        sys.exit(str(error))
    slower = host_ratios.show(pairs, args.most)
    if slower:
        sys.exit(f"slower by more than {args.most}: {', '.join(slower)}")
