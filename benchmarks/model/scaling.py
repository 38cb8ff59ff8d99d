"""How the tuner scales: the same cells on one GPU, on all of this machine's, and on a Dask cluster of one worker a GPU.

    aot compile --models benchmarks/model/scaling-models.txt --sm 90 -o candidates.msgpack
    python benchmarks/run.py scaling --candidates candidates.msgpack --out benchmarks/results/scaling-h200.json

``efficiency`` is one GPU's seconds over N times those of N GPUs; ``seconds`` are of the measuring, the making of the
weights included, as the tuner counts them, and ``start_s`` what comes before: processes, torch, CUDA contexts, which
``efficiency_with_start`` counts too. The report shows how GPUs disturb each other's times, as the ratio of the
modelled choices' times, cell by cell. The Dask legs start a scheduler and workers on loopback, each worker with one
GPU in CUDA_VISIBLE_DEVICES: once through the tuner's own call, once through ``aot measure --executor dask://...``.
It exits 1 where a leg's ``efficiency`` is below 0.9, and has written its figures then too.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import provenance
from pretuned.aot.journal.file import read_journal
from pretuned.aot.journal.records import Measured
from pretuned.aot.models.load import load_models
from pretuned.aot.plan.plan import plan
from pretuned.aot.process.gpus import gpu_count
from pretuned.aot.tune.tuner import Outcome, tune_problems
from pretuned.artifacts.bundle_file import open_bundle
from pretuned.artifacts.records import Op, Problem

MODELS = Path(__file__).with_name("scaling-models.txt")
GOAL = 0.9
_START_S = 120.0

Cells = Mapping[Problem, Sequence[int]]
Leg = Callable[[Path], Mapping[str, object]]  # returns Outcome.to_dict()


def here(cells: Cells, candidates: Path, gpus: Sequence[int]) -> Leg:
    """Run on GPUs of this machine, with a worker process each."""

    def leg(journal: Path) -> Mapping[str, object]:
        return summary(tune_problems(cells, candidates, journal, budget_s=None, gpus=gpus))

    return leg


def there(cells: Cells, candidates: Path, executor: str, count: int) -> Leg:
    """Run on a Dask cluster, once all ``count`` workers have joined."""
    from pretuned.aot.executors.dask import dask_gpus

    def leg(journal: Path) -> Mapping[str, object]:
        with dask_gpus(executor, candidates) as gpus:
            executors = list(gpus.joined())
            end = time.monotonic() + _START_S
            while len(executors) < count and time.monotonic() < end:
                time.sleep(0.1)
                executors += gpus.joined()
            return summary(
                tune_problems(cells, candidates, journal, budget_s=None, executors=executors, joined=gpus.joined)
            )

    return leg


def command(models: Path, candidates: Path, executor: str) -> Leg:
    """Run the same measurement on the cluster, by the command line."""

    def leg(journal: Path) -> Mapping[str, object]:
        words = [
            sys.executable,
            "-m",
            "pretuned.aot",
            "measure",
            candidates,
            "--models",
            models,
            "--journal",
            journal,
            "--executor",
            executor,
            "--budget",
            "none",
            "--json",
        ]
        done = subprocess.run(list(map(str, words)), stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            sys.exit(f"aot measure --executor {executor} ended with {done.returncode}")
        outcome: dict[str, object] = json.loads(done.stdout)
        return outcome

    return leg


def summary(outcome: Outcome) -> Mapping[str, object]:
    """Return the figures of ``aot measure --json`` with seconds that are not rounded."""
    return {**outcome.to_dict(), "seconds": outcome.seconds}


@contextlib.contextmanager
def cluster(count: int, sm: int, folder: Path) -> Iterator[str]:
    """Start a scheduler and a worker for each GPU; yields the name that ``--executor`` takes."""
    address_file, log = folder / "scheduler.json", folder / "dask.log"
    processes: list[subprocess.Popen[bytes]] = []

    def begin(*words: object, **environment: str) -> None:
        with log.open("ab") as sink:
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "dask", *map(str, words)],
                    stdout=sink,
                    stderr=sink,
                    env={**os.environ, **environment},
                )
            )

    try:
        begin("scheduler", "--host", "127.0.0.1", "--port", 0, "--no-dashboard", "--scheduler-file", address_file)
        end, address = time.monotonic() + _START_S, ""
        while not address:
            if processes[0].poll() is not None or time.monotonic() > end:
                sys.exit(f"the Dask scheduler does not start:\n{log.read_text()[-2000:]}")
            with contextlib.suppress(OSError, ValueError):
                address = json.loads(address_file.read_text())["address"]
            time.sleep(0.1)
        for i in range(count):
            begin(
                "worker",
                address,
                "--host",
                "127.0.0.1",
                "--nthreads",
                1,
                "--no-dashboard",
                "--resources",
                f"sm{sm}=1",
                "--local-directory",
                folder,
                CUDA_VISIBLE_DEVICES=str(i),
            )
        yield address.replace("tcp:", "dask:")
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.wait()


def timed(leg: Leg, journal: Path, gpus: int) -> dict[str, Any]:
    """Run a leg, and return its figures with the seconds that it took."""
    begun = time.monotonic()
    done: Mapping[str, Any] = leg(journal)
    wall_s = time.monotonic() - begun
    measuring_s = done["seconds"] - done["look_seconds"]  # only the command has a second measurement pass
    row = {
        "gpus": gpus,
        "cells": done["measured"],
        "measurements": done["measurements"],
        "failures": len(done["failed"]),
        "unfinished": done["left"] + done["unable"],
        "seconds": round(measuring_s, 2),
        "start_s": round(wall_s - done["seconds"], 2),
    }
    print(json.dumps(row), flush=True)
    return row


def judged(legs: Mapping[str, dict[str, Any]]) -> None:
    """Add to each leg its share of the ideal speed: one GPU's time over the leg's time times its GPUs."""
    alone = legs["one"]
    for row in legs.values():
        both = {"efficiency": 0.0, "efficiency_with_start": 1.0}
        for name, start in both.items():
            ideal, taken = (run["seconds"] + start * run["start_s"] for run in (alone, row))
            row[name] = round(ideal / (row["gpus"] * taken), 3)


def modelled_ns(journal: Path) -> dict[object, int]:
    """The modelled choice's time in each cell."""
    return {
        (record.problem, record.bucket, record.modelled): next(
            t.time_ns for t in record.timings if t.variant == record.modelled
        )
        for record in read_journal(journal).records
        if isinstance(record, Measured)
    }


def disturbance(alone: Path, together: Path) -> dict[str, float]:
    """The times of equal variants in equal cells, over the times on one GPU alone."""
    first, second = modelled_ns(alone), modelled_ns(together)
    ratios = sorted(math.log(second[key] / first[key]) for key in first.keys() & second.keys())
    tenth = len(ratios) // 10
    return {
        "cells": len(ratios),
        "median": round(math.exp(statistics.median(ratios)), 4),
        "p10": round(math.exp(ratios[tenth]), 4),
        "p90": round(math.exp(ratios[-1 - tenth]), 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidates", type=Path, required=True)
    parser.add_argument("--models", type=Path, default=MODELS)
    parser.add_argument("--rows", type=int, nargs="+", help="the buckets of M to measure, if not all of the models'")
    parser.add_argument("--gpus", type=int, default=None, help="how many; the default is all")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    planned = plan(load_models([str(args.models)], tuple(Op)).shapes).buckets
    cells = {
        problem: [M for M in buckets if args.rows is None or M in args.rows] for problem, buckets in planned.items()
    }
    with open_bundle(args.candidates) as bundle:
        sm = bundle.target.sm
    count = args.gpus or gpu_count()
    if count < 2:
        sys.exit(f"this takes several GPUs; this machine shows {count}")
    legs: dict[str, dict[str, Any]] = {}
    times: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        both = {"all": range(count), "one": range(1)}
        for leg, gpus in both.items():
            legs[leg] = timed(here(cells, args.candidates, gpus), folder / f"{leg}.journal", len(gpus))
        times["all"] = disturbance(folder / "one.journal", folder / "all.journal")
        if importlib.util.find_spec("distributed"):
            with cluster(count, sm, folder) as executor:
                legs["dask"] = timed(there(cells, args.candidates, executor, count), folder / "dask.journal", count)
                if args.rows is None:  # the command line measures all of the models' rows
                    by_command = command(args.models, args.candidates, executor)
                    legs["command"] = timed(by_command, folder / "command.journal", count)
            times["dask"] = disturbance(folder / "one.journal", folder / "dask.journal")
        else:
            print("distributed is not installed: no Dask legs")
        gpu = read_journal(folder / "one.journal").header.gpu
    judged(legs)
    report = {
        **provenance.about(),
        "gpu": gpu.name,
        "rows": args.rows,
        "problems": len(cells),
        "legs": legs,
        "times_over_one_gpus": times,
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report["legs"], indent=1), json.dumps(times))
    worst = min(row["efficiency"] for row in legs.values())
    sys.exit(0 if worst >= GOAL else f"an efficiency of {worst:.1%}, wanted {GOAL:.0%}")
