"""Whether somebody else uses a GPU: what nvidia-smi says, where it is there."""

from __future__ import annotations

import shutil
import subprocess

from .native import bus_id

_BUSY_PERCENT = 30
_BUSY_MIB = 4096
_TIMEOUT_S = 10.0


def busy(device: int) -> list[str]:
    """Why times on ``cuda:device`` may scatter; nothing where it is idle, or nobody can tell.

    To be asked before this process does anything there.
    """
    tool, bus = shutil.which("nvidia-smi"), bus_id(device)
    if tool is None or not bus:
        return []
    query = "--query-gpu=utilization.gpu,memory.used"
    try:
        done = subprocess.run(
            [tool, f"--id={bus}", query, "--format=csv,noheader,nounits"], capture_output=True, text=True,
            timeout=_TIMEOUT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return []
    return told(done.stdout) if done.returncode == 0 else []


def told(line: str) -> list[str]:
    """The notes that ``utilization, MiB used`` of nvidia-smi is worth."""
    parts = [part.strip() for part in line.split(",")]
    if len(parts) != 2 or not all(part.isdigit() for part in parts):
        return []
    percent, mib = map(int, parts)
    if percent < _BUSY_PERCENT and mib < _BUSY_MIB:
        return []
    return [f"it is in use ({percent} % busy, {mib} MiB taken by others): times will scatter, choices may be wrong"]
