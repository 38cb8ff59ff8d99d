"""What a result file says about its run: command, date, commit, bundles, card, driver, torch."""

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
    """The head of a report; a value is None if this machine does not have it. A GPU gets a context of this process.

    ``bundles`` is ``pretuned.runtime.fingerprint()``: the digest of the usable bundles and the GPU.
    """
    import torch  # some processes time these imports

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
    """This process's, as a shell takes it."""
    return " ".join(["python", sys.argv[0], *map(shlex.quote, sys.argv[1:])])


def commit(root: Path = ROOT) -> str | None:
    """The checkout's commit, with ``+changes`` if tracked files differ from it.

    A tree that is no checkout has the one that BENCHMARK_COMMIT names.
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
