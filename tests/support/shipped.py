"""The bundles that ship, decoded whole once for the tests of a process."""

from __future__ import annotations

import functools
from pathlib import Path

from pretuned.artifacts.bundle_file import open_bundle
from pretuned.artifacts.records import Bundle

BUNDLES = Path(__file__).resolve().parents[2] / "artifacts" / "bundles"


@functools.lru_cache(maxsize=1)
def whole(name: str) -> Bundle:
    """The bundle ``name`` with all of its choices: a second of work, and read by one test after another."""
    with open_bundle(BUNDLES / f"{name}.msgpack") as file:
        return file.load()
