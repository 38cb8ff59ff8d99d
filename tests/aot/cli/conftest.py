"""The command line run in this process, or as a user's process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from pretuned.aot.cli.main import run


@dataclass(frozen=True)
class Ended:
    """The output, errors and exit code of a command that has ended."""

    code: int
    out: str
    err: str


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The empty working directory of the commands; the user's cache is in it too."""
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return work


@pytest.fixture
def aot(here: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """``aot`` with these arguments, in this process."""

    def command(*arguments: object) -> Ended:
        code = run([str(argument) for argument in arguments])
        output = capsys.readouterr()
        return Ended(code, output.out, output.err)

    return command


@pytest.fixture
def aot_process(here: Path) -> Callable[..., Ended]:
    """``python -m pretuned.aot`` with these arguments; ``before`` are words to put in front."""

    def command(*arguments: object, before: tuple[str, ...] = (), **environment: str) -> Ended:
        done = subprocess.run(
            [*before, sys.executable, "-m", "pretuned.aot", *map(str, arguments)],
            cwd=here,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        return Ended(done.returncode, done.stdout, done.stderr)

    return command
