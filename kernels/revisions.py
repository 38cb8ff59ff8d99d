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


_ROWS = ("forward.py", "tiles.py"), "ee1a0a59cbc40b821c6250aac8bd67b5c3b62d1ca8d72fd8b6b993c4ba4cf1e7"
_WEIGHT = ("grad_weight.py", "tiles.py"), "2112fa780c43bf28b0916f6b69297adf71aa46d545eca71240792dd61e420032"
REVISIONS = {
    "rows_pointer": Revision(1, *_ROWS),
    "rows_tma": Revision(1, *_ROWS),
    "weight_pointer": Revision(1, *_WEIGHT),
    "weight_tma": Revision(1, *_WEIGHT),
}


def source_sha256(kernel: str) -> str:
    """The digest, in hex, of the kernel's source text as it is on disk now."""
    digest = hashlib.sha256()
    for name in REVISIONS[kernel].sources:
        text = (HERE / name).read_bytes()
        digest.update(f"{name} {len(text)}\n".encode() + text)
    return digest.hexdigest()
