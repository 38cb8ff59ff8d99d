"""The revision of every kernel, and the sha256 of the source it stands for.

From the first release on a kernel's revision goes up whenever its source changes; until then only where a launcher has
to know. Bundles record it. When they are merged a later revision beats an earlier one, and one revision of two sources
is refused. A test compares the digests with the files.
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


_ROWS = (
    ("forward.py", "clear.py", "find.py", "tiles.py"),
    "fb37eafebbdbeadda89212bcb7d6f52e58c437639fcbf19323d0dc08b1611157",
)
_WEIGHT = ("grad_weight.py", "tiles.py"), "3165b0857f49e230828295571e18649fa27d1756353e20c061c570693e0be54d"
_SPECIALIZED = ("fragments.py", "pipeline.py", "turns.py", "warpgroups.py")
_ROWS_SPECIALIZED = (
    ("specialized.py", "gathering.py", "unnamed.py", *_SPECIALIZED),
    "9220c2784fee9acf5de3046c5f4cac0a0bc63b4c2dd6c4068f806c5333895a11",
)
_ROWS_FITTED = (
    ("fitted.py", "unnamed.py", *_SPECIALIZED),
    "de8964ac845eeea4ab87d4b1cfaeee119e7471c556a5d8ebf3df623c906fe614",
)
_WEIGHT_SPECIALIZED = (
    ("specialized_weight.py", *_SPECIALIZED),
    "053b3ab3c2432f2b259dd6c58c6872b1f6e188111cd0ee8d6ec1cfefce74ebcf",
)
_ACTIVATION = ("activation.py",), "61bc54f8278e18bd8c6d4e1d400c7385e6913a16059d067ac759a7cb00bb5685"
_CLEAR = ("clear.py", "tiles.py"), "14f86666b55c13b24e90e122cb083df1c2cb93bcc9a55866b0025c5f8ef63f6e"
_SLOTS = ("slots.py",), "0f5663f33380be6903a5bfded8732fcd83fc159813d376211aa358d3737a7567"
_TOKENS = ("tokens.py",), "460d0f2693494eb5ba1557e791ae8056c6f1e1e7a662e33ab41109da87d82843"
REVISIONS = {
    "activation": Revision(2, *_ACTIVATION),
    "activation_grad": Revision(3, *_ACTIVATION),
    "clear": Revision(1, *_CLEAR),
    "combine": Revision(2, *_TOKENS),
    "gather": Revision(2, *_TOKENS),
    "rows": Revision(2, *_ROWS),
    "rows_fitted": Revision(2, *_ROWS_FITTED),
    "rows_specialized": Revision(2, *_ROWS_SPECIALIZED),
    "sort_slots": Revision(2, *_SLOTS),
    "weight": Revision(1, *_WEIGHT),
    "weight_specialized": Revision(1, *_WEIGHT_SPECIALIZED),
}


# The first revision whose code does all that today's launchers ask of it, where that is not the first.
LAUNCHED_SINCE = {
    "activation": 2, "activation_grad": 3, "combine": 2, "gather": 2, "rows": 2, "rows_fitted": 2,
    "rows_specialized": 2, "sort_slots": 2,
}  # fmt: skip


def source_sha256(kernel: str) -> str:
    """The digest, in hex, of the kernel's source text as it is on disk now."""
    digest = hashlib.sha256()
    for name in REVISIONS[kernel].sources:
        text = (HERE / name).read_bytes()
        digest.update(f"{name} {len(text)}\n".encode() + text)
    return digest.hexdigest()
