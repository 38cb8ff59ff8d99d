"""The long fault runs, from the repository's root: ``python -m tests.faults --long [--minutes 60] [--out x.json]``.

Mutations of the golden bundles, as they are and with the digest made right, on every core until the time is over; then
64 processes x 8 threads x 100 rounds that load one bundle, and 32 processes x 50 rounds that tune one layer. Prints,
and writes, what was run and found.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import random
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]
sys.path += [str(HERE), str(HERE.parent / "support")]

import mutate  # noqa: E402
import test_processes  # noqa: E402
import test_tuning  # noqa: E402

CHUNK = 2000


def fuzz(seed: int, until: float) -> dict[str, int]:
    """Counts of inputs and of accepted ones; a differing input that is accepted, or any other error, is raised."""
    counts = {"mutations": 0, "accepted": 0, "sealed": 0, "canonical": 0}
    paths = sorted((HERE.parent / "golden").glob("*.msgpack"))
    turn = 0
    while time.monotonic() < until:
        data = paths[turn % len(paths)].read_bytes()
        rng = random.Random(f"{seed} {turn}")
        counts["accepted"] += mutate.run(filter(data.__ne__, mutate.flips(data, rng)), CHUNK, mutate.accepted)
        counts["mutations"] += CHUNK
        counts["canonical"] += mutate.run(mutate.sealed(data, rng), CHUNK, mutate.accepted)
        counts["sealed"] += CHUNK
        turn += 1
    return counts


def main() -> int:
    """0 if nothing was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--long", action="store_true", required=True, help="yes, take long")
    parser.add_argument("--minutes", type=float, default=60.0, help="of fuzzing")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=64, help="that load one bundle at the same time")
    parser.add_argument("--tuners", type=int, default=32, help="processes that tune one layer at the same time")
    parser.add_argument("--rounds", type=int, default=50, help="of tuning")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    until = time.monotonic() + 60 * options.minutes
    with multiprocessing.get_context("fork").Pool(cores) as pool:
        found = pool.starmap(fuzz, [(options.seed * cores + i, until) for i in range(cores)])
    totals = {key: sum(counts[key] for counts in found) for key in found[0]}
    with tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic()
        statuses = test_processes.race(Path(folder), options.processes, 8, 100)
        race_s = round(time.monotonic() - begin, 1)
    with tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic()
        tuning = test_tuning.race(Path(folder), options.tuners, options.rounds)
        tuning_s = round(time.monotonic() - begin, 1)
    results = {
        "command": sys.argv[1:],
        "python": platform.python_version(),
        "cores": cores,
        **totals,
        "race": {"processes": options.processes, "threads": 8, "rounds": 100, "seconds": race_s},
        "race_failures": sum(status != 0 for status in statuses),
        "tuning": {"processes": options.tuners, "rounds": options.rounds, "seconds": tuning_s, "wrong": tuning},
    }
    print(json.dumps(results, indent=2))
    if options.out:
        options.out.write_text(json.dumps(results, indent=2) + "\n")
    return 1 if totals["accepted"] or results["race_failures"] or tuning else 0


if __name__ == "__main__":
    sys.exit(main())
