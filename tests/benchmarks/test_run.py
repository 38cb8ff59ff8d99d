"""benchmarks/run.py: it lists every benchmark there is, and runs one."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RUN = BENCHMARKS / "run.py"


def test_every_module_with_a_main_is_listed_with_what_it_needs() -> None:
    module = runpy.run_path(str(RUN))
    listed = {(benchmark.folder, benchmark.name) for benchmark in module["BENCHMARKS"]}
    there = {
        (path.parent.name, path.stem)
        for folder in module["FOLDERS"]
        for path in (BENCHMARKS / folder).glob("*.py")
        if "\ndef main(" in path.read_text()
    }
    assert listed == there
    assert len(listed) == len(module["BENCHMARKS"])
    assert all(benchmark.question and benchmark.needs for benchmark in module["BENCHMARKS"])
    for name in ("kernels", "beside_quack", "shipped"):
        assert f"  {name} " in module["listing"]()


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, RUN, *arguments], capture_output=True, text=True, check=False)


def test_it_runs_one_by_its_name() -> None:
    done = run("kinds", "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("usage: run.py kinds ")


def test_another_name_is_reported() -> None:
    done = run("kernel")
    assert done.returncode == 1
    assert done.stderr.startswith("'kernel' is no benchmark: wanted one of again, batch_invariant")
