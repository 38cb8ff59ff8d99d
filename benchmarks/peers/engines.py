"""What benchmarks inside an engine share: to import one that is unpacked, and processes that end in their time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import types
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

RUN = Path(__file__).parents[1] / "run.py"
GRACE = 10.0  # seconds to end by itself, once asked


def find(folders: list[Path], packages: Path | None) -> None:
    """Make an engine importable: its folders first, what it imports last, so that what is installed goes before.

    Its child processes find the same.
    """
    first, last = [str(one.resolve()) for one in folders], [] if packages is None else [str(packages.resolve())]
    sys.path[:0] = first
    sys.path += last
    # Before what is installed, in a child: PYTHONPATH has no place behind it.
    os.environ["PYTHONPATH"] = os.pathsep.join([*first, *filter(None, [os.environ.get("PYTHONPATH")]), *last])


def stand_in(*names: str) -> None:
    """Modules of that name whose every function answers False: of a library that was cut, what is never run."""
    for name in names:
        absent = types.ModuleType(name)
        absent.__path__ = []  # type: ignore[attr-defined]
        absent.__getattr__ = lambda one: (lambda *_, **__: False) if not one.startswith("__") else _none(one)  # type: ignore[method-assign]
        sys.modules[name] = absent


def _none(name: str) -> NoReturn:
    raise AttributeError(name)


def child(words: list[str], seconds: float, environ: Mapping[str, str] | None = None) -> str:
    """Run a benchmark in a process of its own; how it ended, in words: empty if well.

    After ``seconds`` it is ended, with all that it has started.
    """
    begun = time.monotonic()
    process = subprocess.Popen([sys.executable, str(RUN), *words], start_new_session=True,
                               env={**os.environ, **(environ or {})})  # fmt: skip
    try:
        code = process.wait(max(seconds, 0.0))
    except subprocess.TimeoutExpired:
        _end(process)
        return f"it took over {time.monotonic() - begun:.0f} s and was ended"
    finally:
        _end(process)
    return f"its process ended with {code}" if code else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and what it has started."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(GRACE)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def leave(code: int) -> NoReturn:
    """End this process at once: an engine may leave threads that its end would wait for, of NCCL's group of one."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
