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


_ROWS = ("forward.py", "tiles.py"), "ca19664f5ecce7237ba3f3e25a919f89473197209ad97e2f31036f1bbd4f6dfa"
_WEIGHT = ("grad_weight.py", "tiles.py"), "aff5e914ee818a809efa93f817fa3401ce2bc94e93fcda3c20b419a674fb1e41"
_SPECIALIZED = ("specialized.py",), "df9ecf7c596c3261085640693ff3a916325a9930d1de954601ad32bf03ad2326"
REVISIONS = {
    "rows": Revision(1, *_ROWS),
    "rows_specialized": Revision(1, *_SPECIALIZED),
    "weight": Revision(1, *_WEIGHT),
    "weight_specialized": Revision(1, *_SPECIALIZED),
}


def source_sha256(kernel: str) -> str:
    """The digest, in hex, of the kernel's source text as it is on disk now."""
    digest = hashlib.sha256()
    for name in REVISIONS[kernel].sources:
        text = (HERE / name).read_bytes()
        digest.update(f"{name} {len(text)}\n".encode() + text)
    return digest.hexdigest()
