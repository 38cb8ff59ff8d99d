"""Helpers of benchmarks inside an engine: finding one, and processes that end in their time."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    from benchmarks.peers import engines

    return engines


def test_an_engine_goes_before_what_is_installed_and_its_packages_behind(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "path", ["installed"])
    monkeypatch.setenv("PYTHONPATH", "mine")
    tool.find([tmp_path / "engine"], tmp_path / "packages")
    assert sys.path == [str(tmp_path / "engine"), "installed", str(tmp_path / "packages")]
    assert os.environ["PYTHONPATH"].split(os.pathsep) == [sys.path[0], "mine", sys.path[2]]


def test_a_library_that_was_cut_answers_no(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    tool.stand_in("cut_off", "cut_off.interface")
    module = importlib.import_module("cut_off.interface")
    assert module.is_version_supported(3) is False
    assert not hasattr(module, "__wrapped__")


@pytest.mark.slow
def test_a_process_ends_in_its_time_with_all_that_it_started(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run = tmp_path / "run.py"
    run.write_text(
        "import os, subprocess, sys, time\n"
        "if sys.argv[1] == 'well': sys.exit(0)\n"
        "if sys.argv[1] == 'badly': sys.exit(3)\n"
        "other = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "open(os.environ['TOLD'], 'w').write(str(other.pid))\n"
        "time.sleep(60)\n"
    )
    pid_file = tmp_path / "pid"
    monkeypatch.setattr(tool, "RUN", run)
    assert tool.child(["well"], 30) == ""
    assert tool.child(["badly"], 30) == "its process ended with 3"
    begun = time.monotonic()
    assert tool.child(["never"], 2, {"TOLD": str(pid_file)}).startswith("it took over ")
    assert time.monotonic() - begun < 20
    other = Path(f"/proc/{pid_file.read_text()}/stat")
    state = ""
    while time.monotonic() - begun < 20 and state not in ("gone", "Z", "X"):  # it was killed, and needs a core to end
        try:
            state = other.read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            state = "gone"
        time.sleep(0.01)
    assert state in ("gone", "Z", "X")


def test_it_leaves_without_waiting_for_threads(tool: ModuleType) -> None:
    lines = "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start(); print('said'); "
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            lines + f"import sys; sys.path.insert(0, {str(Path(tool.__file__).parent)!r}); "
            "import engines; engines.leave(5)",
        ],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stdout) == (5, "said\n")
