"""Processes that tune the same thing: exactly one does, round after round. Locks, files and the runtime are real."""

from __future__ import annotations

import multiprocessing
import os
import sys
import traceback
from pathlib import Path

import pytest

from pretuned.runtime import reload
from pretuned.runtime.dispatch import snapshot

pytestmark = pytest.mark.slow

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))


def tune(home: Path, rounds: int, barrier: object, number: int) -> None:
    """One process: asks for a new layer in each round, and writes down what it got."""
    import fakemeasure

    from pretuned.aot.demand import api

    os.environ.update(HOME=str(home), PRETUNED_BUNDLES="")
    os.environ.pop("XDG_CACHE_HOME", None)
    try:
        reload()
        got = []
        for turn in range(rounds):
            key = api.key_for(fakemeasure.ON_H200, 8 + turn, 256, 128, 2, "bf16", 64)
            asked = fakemeasure.on_demand(home / f"round{turn}", 0.01)
            barrier.wait()  # type: ignore[attr-defined]
            got.append(str(asked.configs(key, 0, force=False)))
        (home / f"process{number}").write_text("\n".join(got))
    except BaseException:
        traceback.print_exc()
        barrier.abort()  # type: ignore[attr-defined]
        raise


def race(home: Path, processes: int, rounds: int) -> list[str]:
    """Return the faults of a race: each round must be tuned once, and all processes get the same."""
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(processes)
    workers = [context.Process(target=tune, args=(home, rounds, barrier, i)) for i in range(processes)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    wrong = [f"process {i} ended with {worker.exitcode}" for i, worker in enumerate(workers) if worker.exitcode]
    for turn in range(rounds):
        tuned = (home / f"round{turn}").read_text().splitlines() if (home / f"round{turn}").exists() else []
        if len(tuned) != 1:
            wrong.append(f"round {turn} was tuned {len(tuned)} times")
    answers = {path.read_text() for path in home.glob("process*")}
    if len(answers) != 1 or "Config" not in next(iter(answers)):
        wrong.append(f"{len(answers)} different answers")
    return wrong


def test_each_round_is_tuned_once(tmp_path: Path) -> None:
    snapshot.forget_made()
    assert race(tmp_path, 8, 5) == []
