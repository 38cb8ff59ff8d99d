"""Functions that a child process may run instead of its work."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from pretuned.artifacts.errors import CompileError, InputError


def refuse(answer: Path) -> None:
    raise InputError("not this")


def fail(answer: Path) -> None:
    raise CompileError("no code")


def trip(answer: Path) -> None:
    1 / 0  # noqa: B018


def abort(answer: Path) -> None:
    os.abort()


def leave(answer: Path) -> None:
    sys.exit(3)


def hang(answer: Path) -> None:
    time.sleep(60)
