"""Processes in lock step: their order, that one runs at a time, and what is told of one that dies."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.speed import host_turns
from benchmarks.speed.host_turns import Ended, Process

RUN = Path(__file__).parents[2] / "benchmarks" / "run.py"
SERVED = f"""
import os, runpy, sys
runpy.run_path({str(RUN)!r})["package"]()
from benchmarks.speed import host_turns
to = host_turns.answers()
def shout():
    print("not an answer")
def fail():
    if failing:
        raise ValueError("it is too late")
failing = False
calls = {{"sum": (lambda: sum(range(1000)), 20), "shout": (shout, 1), "fail": (fail, 1)}}
about = {{"seed": hash("a"), "cores": sorted(os.sched_getaffinity(0)), "path": sys.path}}
def settle():
    global failing
    failing = True
host_turns.serve(calls, settle, about, to)
"""


@pytest.fixture
def started(tmp_path: Path) -> Callable[..., Process]:
    def start(tree: str, script: str = SERVED, seed: int = 3, pinned: list[int] | None = None) -> Process:
        return Process(tree, ["-c", script], tmp_path / tree, seed, pinned or [])

    return start


def test_batches_are_old_new_new_old_and_one_at_a_time(started: Callable[..., Process]) -> None:
    with host_turns.running(started) as two:
        for process in two.values():
            process.answer()
        turns = host_turns.pair(two, ["sum", "shout"], 3)
    trees = ["old", "new", "new", "old", "old", "new"]
    assert [(turn.tree, turn.call) for turn in turns] == [(tree, call) for call in ("sum", "shout") for tree in trees]
    spans = [time for turn in turns for time in (turn.batch.began, turn.batch.ended)]
    assert spans == sorted(spans)
    assert all(turn.batch.us > 0 for turn in turns)


def test_calls_take_turns_and_trees_begin_equally_often(
    started: Callable[..., Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_turns, "VISIT", 1)
    with host_turns.running(started) as two:
        for process in two.values():
            process.answer()
        turns = host_turns.pair(two, ["sum", "shout"], 2)
    assert [(turn.call, turn.tree) for turn in turns] == [
        ("sum", "old"),
        ("sum", "new"),
        ("shout", "old"),
        ("shout", "new"),
        ("sum", "new"),
        ("sum", "old"),
        ("shout", "new"),
        ("shout", "old"),
    ]


def test_both_of_a_pair_have_its_hash_seed_its_cores_and_their_own_path(
    started: Callable[..., Process], tmp_path: Path
) -> None:
    pinned = host_turns.cores(1)
    with host_turns.running(lambda tree: started(tree, pinned=pinned)) as two:
        old, new = (process.answer()["about"] for process in two.values())
    assert old["seed"] == new["seed"]
    assert old["cores"] == new["cores"] == pinned
    assert str(tmp_path / "old") in old["path"]
    assert str(tmp_path / "new") in new["path"]
    with host_turns.running(lambda tree: started(tree, seed=4), ("old",)) as processes:
        assert processes["old"].answer()["about"]["seed"] != old["seed"]


def test_cores_are_of_those_allowed() -> None:
    allowed = sorted(os.sched_getaffinity(0))
    assert host_turns.cores(0) == []
    assert host_turns.cores(1) == allowed[-1:]
    assert host_turns.cores(10**6) == allowed


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("import sys; sys.exit('no such module')", "ended with 1. Its stderr ends with\n  no such module"),
        ("import time; time.sleep(60)", "gave no answer in 0.5 s"),
        ("import os; os.kill(os.getpid(), 9)", "ended with -9"),
    ],
)
def test_one_that_does_not_start_is_reported(started: Callable[..., Process], script: str, message: str) -> None:
    seconds = 0.5 if "sleep" in script else 60
    with host_turns.running(lambda tree: started(tree, script), ("old",)) as processes, pytest.raises(Ended) as error:
        processes["old"].answer(seconds)
    assert f"the process of the old tree {message}" in str(error.value)


def test_one_that_dies_in_a_batch_is_reported_with_the_end_of_its_stderr(started: Callable[..., Process]) -> None:
    with host_turns.running(started) as two:
        for process in two.values():
            process.answer()
        with pytest.raises(Ended, match=r"(?s)the process of the old tree ended with 1\..*ValueError: it is too late$"):
            host_turns.pair(two, ["fail"], 1)
        with pytest.raises(Ended):
            two["old"].batch("sum")
        assert two["new"].batch("sum").us > 0


def test_nothing_is_left_when_who_asks_dies() -> None:
    parent = f"""
import os, runpy, sys
from pathlib import Path
runpy.run_path({str(RUN)!r})["package"]()
from benchmarks.speed.host_turns import Process
two = [Process(tree, ["-c", {SERVED!r}], Path(tree), 1, []) for tree in ("old", "new")]
for one in two:
    one.answer()
print(*(one._process.pid for one in two), flush=True)
os.kill(os.getpid(), 9)
"""
    done = subprocess.run([sys.executable, "-c", parent], capture_output=True, text=True, check=False)
    assert done.returncode == -9, done.stderr
    left = {int(pid) for pid in done.stdout.split()}
    assert len(left) == 2
    until = time.monotonic() + 30
    while left and time.monotonic() < until:
        left = {pid for pid in left if running(pid)}
        time.sleep(0.05)
    assert not left


def running(pid: int) -> bool:
    """Return True if a process runs, and does not only wait to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
