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


_ROWS = ("forward.py", "tiles.py"), "d343fc1e807e7673098c7c94f981801b9804837a59048aaaec3fb24e2f4203a7"
_WEIGHT = ("grad_weight.py", "tiles.py"), "5289352e9e120bbaafdb116e771d058157a41831f743331cf53de08daa524c66"
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
