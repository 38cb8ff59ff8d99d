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


_ROWS = ("forward.py", "tiles.py"), "ba293b5ccc6cb42a4a8807d10535c4fc9f1ef2a7f534dfca57ca2c9cc027ce04"
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
