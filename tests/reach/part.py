"""Which part of the product the tests reach whole, by which of them, and the lines that are left out and why."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

# Where code is let in, chosen and handed to the driver: all of it runs without a GPU.
PART = (
    "artifacts",
    "runtime/dispatch",
    "runtime/driver",
    "runtime/hooks.py",
    "runtime/settings.py",
    "runtime/self_test_results.py",
)

# The tests of these.
TESTS = (
    "tests/artifacts",
    "tests/attacks/test_bombs.py",
    "tests/attacks/test_descriptors.py",
    "tests/attacks/test_launchable.py",
    "tests/attacks/test_places.py",
    "tests/attacks/test_umask.py",
    "tests/faults",
    "tests/runtime/dispatch",
    "tests/runtime/driver",
    "tests/runtime/launch/test_driver_calls.py",
    "tests/runtime/launch/test_gather.py",
    "tests/runtime/launch/test_row_limits.py",
    "tests/runtime/launch/test_rowops.py",
    "tests/runtime/test_fork.py",
    "tests/runtime/test_settings.py",
    "tests/runtime/test_self_test_results.py",
)

# (file, the line as it stands there): why no test reaches it, or one of its ways on.
LEFT_OUT: dict[tuple[str, str], str] = {}


def keep(out: Path, what: str, figures: dict[str, Any]) -> None:
    """Put figures into a JSON file, under what they are of, beside the others there."""
    kept = json.loads(out.read_text()) if out.exists() else {}
    command = f"python -m tests.reach {' '.join(sys.argv[1:])}".strip()
    kept[what] = {**kept.get(what, {}), "date": time.strftime("%Y-%m-%d"), "command": command, **figures}
    out.write_text(json.dumps(kept, indent=2) + "\n")
