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


_ROWS = ("forward.py", "tiles.py"), "456234c640b4838b8affd437acfe882b4d82283c7d4b2e97a861d4eb0db04aa4"
_WEIGHT = ("grad_weight.py", "tiles.py"), "b8519d57c3403d921a7efc718b1f4472aaf75550ce910d4736fc76a23899b07d"
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
