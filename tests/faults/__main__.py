"""The long fault runs, from the repository's root: ``python -m tests.faults --long [--rows R1,R11] [--out x.json]``.

Each row of docs/inside/reliability.md that has a long run, as long as it is told. What was run and found is printed,
and added to what the file already has: a list of runs for each row.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import platform
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]
sys.path += [str(HERE), str(HERE.parent / "support"), str(HERE.parent / "attacks")]

import golden_bundles  # noqa: E402
import mutate  # noqa: E402
import test_cold_build  # noqa: E402
import test_lifetime  # noqa: E402
import test_msgpack  # noqa: E402
import test_processes  # noqa: E402
import test_publish  # noqa: E402
import test_swap  # noqa: E402
import test_tuning  # noqa: E402

from pretuned.artifacts import codec  # noqa: E402

SLICE_S = {"mutations": 0.5, "sealed": 5.0}  # of CPU, a bundle in turn; sealed ones take ten times as long
AGAIN = 16  # of the sealed inputs that are accepted one in so many is encoded by all of ``encode``


def fuzz(seed: str, wanted: int, until: float) -> dict[str, float]:
    """Counts of inputs and of accepted ones; a differing input that is accepted, or any other error, is raised.

    Until there are ``wanted`` of each kind, or it is ``until``. ``slowest_cpu_s`` of one input, and ``grown_mib``: what
    the process grew by, so no input took more.
    """
    counts: dict[str, float] = dict.fromkeys(("mutations", "accepted", "sealed", "canonical", "slowest_cpu_s"), 0)
    golden = [path.read_bytes() for path in sorted((HERE.parent / "golden").glob("*.msgpack"))]
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def some(kind: str, accepted: str, inputs: Iterator[bytes]) -> None:
        """One slice, in chunks whose time is looked at afterwards."""
        end = time.thread_time() + SLICE_S[kind]
        while (begin := time.thread_time()) < end and counts[kind] < wanted and time.monotonic() < until:
            for data in itertools.islice(inputs, int(min(100, wanted - counts[kind]))):
                result = mutate.accepted(data, whole=counts[accepted] % AGAIN == 0)
                now = time.thread_time()
                counts["slowest_cpu_s"] = max(counts["slowest_cpu_s"], now - begin)
                begin = now
                counts[accepted] += result
                counts[kind] += 1

    turn = 0
    while min(counts["mutations"], counts["sealed"]) < wanted and time.monotonic() < until:
        data = golden[turn % len(golden)]
        rng = random.Random(f"{seed} {turn}")
        some("mutations", "accepted", filter(data.__ne__, mutate.flips(data, rng)))
        some("sealed", "canonical", mutate.sealed(data, rng))
        turn += 1
    counts["grown_mib"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib) / 1024
    return counts


def mutations(options: argparse.Namespace) -> dict[str, Any]:
    """R1 and R2: random mutations of the golden bundles, as they are and with the digest made right.

    Each bundle has as much time as another, so of small ones there are more inputs.
    """
    until, cores = time.monotonic() + 60 * options.minutes, options.cores
    with multiprocessing.get_context("fork").Pool(cores) as pool:
        # (Each seed has inputs of its own, on however many cores.)
        shares = [(f"{options.seed} {i}", -(-options.inputs // cores), until) for i in range(cores)]
        results = pool.starmap(fuzz, shares)
    worst = {key: round(max(counts[key] for counts in results), 4) for key in ("slowest_cpu_s", "grown_mib")}
    sums = {
        key: sum(int(counts[key]) for counts in results) for key in ("mutations", "accepted", "sealed", "canonical")
    }
    wrong = bool(sums["accepted"]) or worst["slowest_cpu_s"] > 1 or worst["grown_mib"] > 64
    return {"seed": options.seed, **sums, **worst, "wrong": int(wrong)}


def race(options: argparse.Namespace) -> dict[str, Any]:
    """R9: processes of 8 threads that each load one bundle 100 times."""
    with tempfile.TemporaryDirectory() as folder:
        statuses = test_processes.race(Path(folder), options.processes, 8, 100)
    failures = sum(status != 0 for status in statuses)
    return {"processes": options.processes, "threads": 8, "rounds": 100, "wrong": failures}


def tuning(options: argparse.Namespace) -> dict[str, Any]:
    """R10: processes that tune one layer at the same time, round after round."""
    with tempfile.TemporaryDirectory() as folder:
        wrong = test_tuning.race(Path(folder), options.tuners, options.rounds)
    return {"processes": options.tuners, "rounds": options.rounds, "wrong": len(wrong), "what": wrong}


def cold_build(options: argparse.Namespace) -> dict[str, Any]:
    """R5: a build of three models killed before each call of its cold phase, and after the last; and then run again.

    (After one call is before the next.)
    """
    with tempfile.TemporaryDirectory() as folder:
        cold = test_cold_build.Cold(Path(folder))
        kills = [*((call, "kill") for call in cold.calls), (cold.calls[-1], "after")]
        what = [(call, how, cold.killed(call, how)) for call, how in kills]
    wrong = [str(outcome) for outcome in what if outcome[2]]
    return {"calls": len(cold.calls), "kills": len(what), "wrong": len(wrong), "what": wrong}


def failing_build(options: argparse.Namespace) -> dict[str, Any]:
    """R6: each call of the same build fails with each of its errors, in an order of chance, until the time is over."""
    until = time.monotonic() + 60 * options.minutes
    with tempfile.TemporaryDirectory() as folder:
        cold = test_cold_build.Cold(Path(folder))
        points = [(call, error) for call in cold.calls for error in test_cold_build.ERRORS[call.name]]
        random.Random(options.seed).shuffle(points)
        what = [(*point, cold.failed(*point)) for point in points[options.first :] if time.monotonic() < until]
    wrong = [str(outcome) for outcome in what if outcome[2]]
    counts = {"calls": len(cold.calls), "errors": len(points), "first": options.first, "done": len(what)}
    return {**counts, "wrong": len(wrong), "what": wrong}


def republished(options: argparse.Namespace) -> dict[str, Any]:
    """R11: loads of the smallest golden bundle while a longer one takes its place all the time, and it that one's."""
    small = golden_bundles.small()
    longer = small._replace(models=(*small.models, small.models[0]._replace(tp=2)))
    datas = codec.encode(small), codec.encode(longer)
    with tempfile.TemporaryDirectory() as folder:
        done = test_publish.under_load(Path(folder), datas, options.loads, options.minutes, options.readers)
    return {**done, "wrong": done["failed"]}


def malicious(options: argparse.Namespace) -> dict[str, Any]:
    """R16: the CPU seconds and MiB that the worst of the malformed inputs cost."""
    with tempfile.TemporaryDirectory() as folder:
        results = test_msgpack.measured(Path(folder))
    names = {f"{i}.msgpack": name for i, name in enumerate(test_msgpack.ATTACKS)}
    costs = {names[file]: list(by.values()) for file, by in results.items() if file in names}
    large = {name: costs.pop(name) for name in test_msgpack.SLOWER}
    worst = {
        "cpu_s": max(s for by in costs.values() for _, s, _ in by),
        "mib": round(max(mib for by in costs.values() for _, _, mib in by), 1),
    }
    wellformed = {name: round(max(s for _, s, _ in by), 3) for name, by in large.items()}
    return {
        "inputs": len(costs),
        "worst": worst,
        "well_formed_8_MB_cpu_s": wellformed,
        "wrong": int(worst["cpu_s"] > 0.1 or worst["mib"] > 64),
    }


def swaps(options: argparse.Namespace) -> dict[str, Any]:
    """R19: loads of a file that is swapped all the time: by rename and in place, by its place and by a pin."""
    counts = {}
    for in_place in (False, True):
        for pin in (None, test_swap.PINS[0]):
            with tempfile.TemporaryDirectory() as folder:
                loaded, refused = test_swap.swapped(Path(folder) / "b.msgpack", in_place, pin, 10_000)
            counts[f"{'in place' if in_place else 'renamed'}, by {'pin' if pin else 'place'}"] = [loaded, refused]
    return {"rounds": 10_000, "loaded_and_refused": counts, "wrong": 0}


def lifetime(options: argparse.Namespace) -> dict[str, Any]:
    """R22: 10,000 times opened, read and closed."""
    with tempfile.TemporaryDirectory() as folder:
        grown = test_lifetime.cycles(Path(folder), 10_000)
    return {"rounds": 10_000, "grown": grown, "wrong": int(grown["descriptors"] > 0 or grown["KiB"] > 2048)}


RUNS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "R1": mutations,
    "R5": cold_build,
    "R6": failing_build,
    "R9": race,
    "R10": tuning,
    "R11": republished,
    "R16": malicious,
    "R19": swaps,
    "R22": lifetime,
}


def _cpu_s() -> float:
    """Return the CPU seconds of this process and of the children that it waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def main() -> int:
    """0 if nothing was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--long", action="store_true", required=True, help="yes, take long")
    parser.add_argument("--rows", default=",".join(RUNS), help=f"of {', '.join(RUNS)}; R1 has R2 with it")
    parser.add_argument("--minutes", type=float, default=60.0, help="of R1, R6 and R11, at most")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="of R6: so many of the seed's order are left out")
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)), help="that fuzz")
    parser.add_argument("--inputs", type=int, default=100_000_000, help="of R1, and as many of R2")
    parser.add_argument("--processes", type=int, default=64, help="that load one bundle at the same time")
    parser.add_argument("--tuners", type=int, default=32, help="processes that tune one layer at the same time")
    parser.add_argument("--rounds", type=int, default=50, help="of tuning")
    parser.add_argument("--loads", type=int, default=10_000_000, help="while a bundle is published anew")
    parser.add_argument("--readers", type=int, default=3, help="processes that load it")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    options = parser.parse_args()
    results = {}
    for row in options.rows.split(","):
        begin, cpu = time.monotonic(), _cpu_s()
        result = RUNS[row](options)
        results[row] = {
            "date": time.strftime("%Y-%m-%d"),
            "command": f"python -m tests.faults {' '.join(sys.argv[1:])}",
            "python": platform.python_version(),
            "cores": options.cores,
            "seconds": round(time.monotonic() - begin, 1),
            "cpu_s": round(_cpu_s() - cpu, 1),
            **result,
        }
        print(json.dumps({row: results[row]}, indent=2), flush=True)
    if options.out:
        kept = json.loads(options.out.read_text()) if options.out.exists() else {}
        for row, result in results.items():
            kept.setdefault(row, []).append(result)
        options.out.write_text(
            json.dumps(dict(sorted(kept.items(), key=lambda item: int(item[0][1:]))), indent=2) + "\n"
        )
    return 1 if any(result["wrong"] for result in results.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
