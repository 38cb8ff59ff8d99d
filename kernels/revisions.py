"""The revision of every kernel, and the sha256 of the source it stands for.

A kernel's revision goes up whenever its source changes: bundles record it, and a later revision
beats an earlier one when bundles are merged. A test compares the digest with the files.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class Revision:
    """A kernel's revision, its sources (files of this folder) and their digest."""

    revision: int
    sources: tuple[str, ...]
    sha256: str


_ROWS = ("forward.py", "tiles.py"), "e6de2ccc8cf4d8dfb542acefc477b0068d763fd6ee936f5897b12a3551c68e7e"
_WEIGHT = ("grad_weight.py", "tiles.py"), "31f24957c1f52148fb81f3200701fe2678f4d9e6aaf4f700d4936338f543c4dd"
REVISIONS = {
    "rows": Revision(1, *_ROWS),
    "weight": Revision(1, *_WEIGHT),
}


def source_sha256(kernel: str) -> str:
    """The digest, in hex, of the kernel's source text as it is on disk now."""
    digest = hashlib.sha256()
    for name in REVISIONS[kernel].sources:
        text = (HERE / name).read_bytes()
        digest.update(f"{name} {len(text)}\n".encode() + text)
    return digest.hexdigest()
