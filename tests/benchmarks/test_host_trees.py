"""Two checkouts in lock step: this one twice, on the made-up GPU, and files of earlier runs."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
CALLS = ["call", "torch_mm"]


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "benchmarks" / "run.py", "host_trees", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.nightly  # processes of two trees
def test_this_checkout_beside_itself(tmp_path: Path) -> None:
    out = tmp_path / "new" / "times.json"
    how = ("--without-gpu", "--seconds", 0.1, "--batches", 3, "--most", 100, "--only", *CALLS)
    done = run("--old", ROOT, *how, "--out", out)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert list(report["work"]) == ["old", "new"]
    assert report["work"]["old"] == report["work"]["new"]
    assert report["work"]["new"]["layer"]["launches"] > 1
    assert (report["unit"], report["batches"]) == ("us", 3)
    assert set(report["environment"]) == {"python", "torch"}
    [pair] = report["pairs"]  # as the seconds don't do for another
    assert pair["hash_seed"] == 1
    for tree in ("old", "new"):
        assert list(pair[tree]) == list(report["ratios"]) == CALLS
        assert all(len(batches) == 3 and min(batches) > 0 for batches in pair[tree].values())
    again = run("--table", out, "--most", 100)
    assert again.returncode == 0
    assert done.stdout.endswith(again.stdout)
    assert [line.split()[0] for line in again.stdout.splitlines()[1:3]] == CALLS


@pytest.mark.nightly
def test_a_call_that_is_none_is_reported() -> None:
    done = run("--old", ROOT, "--without-gpu", "--only", "cal")
    assert done.returncode == 1
    assert done.stderr.startswith("no such call: cal; wanted of call, ")


def test_what_is_no_checkout_is_reported(tmp_path: Path) -> None:
    done = run("--old", tmp_path, "--without-gpu")
    assert done.returncode == 1
    assert done.stderr == f"{tmp_path} has no tests/support/emulated_driver.py: give a whole checkout\n"


def test_a_file_of_whole_processes_in_turn_is_read() -> None:
    """The ratio of medians that its commit told."""
    table = run("--table", RESULTS / "host-python.json", "--most", 2).stdout
    assert [line.split()[-2] for line in table.splitlines() if line.startswith("ours")] == ["0.904"]


def test_a_file_without_its_batches_is_reported() -> None:
    done = run("--table", RESULTS / "host-trees-h100.json")
    assert done.returncode == 1
    assert done.stderr.endswith("host-trees-h100.json has no batches any more, but its ratios as they were told\n")


def test_no_call_that_was_measured_takes_over_3_percent_more_than_before_the_replay() -> None:
    report = json.loads((RESULTS / "host-trees-h100.json").read_text())
    ratios = report["ratios"]
    assert len(ratios) == 17
    for name, ratio in ratios.items():
        assert ratio["low"] <= ratio["ratio"] <= ratio["high"] < 1.03, name
    mine = [ratio["ratio"] for name, ratio in ratios.items() if not name.startswith("torch")]
    assert statistics.geometric_mean(mine) < 0.97
    assert all(
        work["launches"] == report["work"]["old"][name]["launches"] for name, work in report["work"]["new"].items()
    )


def test_a_checkout_is_first_on_the_path(tmp_path: Path) -> None:
    from benchmarks.speed.host_trees import linked

    path = linked(ROOT, tmp_path)
    code = "import pretuned.artifacts, pathlib; print(pathlib.Path(pretuned.artifacts.__file__).parent)"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(path)}, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(path / "pretuned" / "artifacts")
