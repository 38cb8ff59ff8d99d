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


_ROWS = ("forward.py", "tiles.py"), "d3969394564b31d8a8d3f12de2eaded6319202ff622c22adc71bb1914ae26891"
_WEIGHT = ("grad_weight.py", "tiles.py"), "b8519d57c3403d921a7efc718b1f4472aaf75550ce910d4736fc76a23899b07d"
_SPECIALIZED = ("specialized.py",), "807c876a37351b312fd88bc3348c0bc0c0e60d86a0528e43580ba6918309f2f4"
_ACTIVATION = ("activation.py",), "38d6b985b690579c2d2438d77a37aa3b19d42c5b69df2701013a90a267e37c10"
_COMBINE = ("combine.py",), "b6df3acaf195d338888ec639a35be55732c8bfc53e7b4dd3b7aac32d723decb9"
REVISIONS = {
    "activation": Revision(1, *_ACTIVATION),
    "activation_grad": Revision(1, *_ACTIVATION),
    "combine": Revision(1, *_COMBINE),
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
