"""Which files this process holds open."""

from __future__ import annotations

import gc
from pathlib import Path


def open_files() -> set[Path]:
    """Its descriptors. What another test dropped, and only the collector closes, is closed first."""
    gc.collect()
    return set(Path("/proc/self/fd").iterdir())


def left_open(before: set[Path]) -> set[Path]:
    """Those that are open now, and were not ``before``. (A bundle of another test may rest meanwhile.)"""
    return open_files() - before
