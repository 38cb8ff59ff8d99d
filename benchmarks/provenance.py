"""The head of a result file: command, date, commit, bundles, GPU, driver and torch of the run."""

from __future__ import annotations

import datetime
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def about() -> dict[str, Any]:
    """Return the head of a report. A value is None if this machine does not have it. Makes a CUDA context.

    ``bundles`` is ``pretuned.runtime.fingerprint()``: the digest of the usable bundles and the GPU.
    """
    import torch  # here, as some processes time this import

    from pretuned.runtime import fingerprint

    return {
        "command": command(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit(),
        "bundles": fingerprint(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "driver": driver(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def command() -> str:
    """Return this process's command line, quoted for a shell."""
    return " ".join(["python", sys.argv[0], *map(shlex.quote, sys.argv[1:])])


def commit(root: Path = ROOT) -> str | None:
    """Return the checkout's commit, with ``+changes`` if tracked files differ from it.

    For a tree that is no checkout, return the variable BENCHMARK_COMMIT.
    """
    git = ["git", "-C", str(root)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        clean = subprocess.run([*git, "diff", "--quiet", "HEAD"], check=False).returncode == 0
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("BENCHMARK_COMMIT")
    return head.stdout.strip() + ("" if clean else "+changes")


def driver(file: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    """The version of the NVIDIA kernel driver, such as 580.159.04."""
    try:
        match = re.search(r"\b\d{3}\.\d+(?:\.\d+)?\b", file.read_text())
    except OSError:
        return None
    return match[0] if match else None
