"""The revision of every kernel, and the sha256 of the source it stands for.

From the first release on a kernel's revision goes up whenever its source changes; until then only where a launcher has
to know. Bundles record it. When they are merged a later revision beats an earlier one, and one revision of two sources
is refused. A test compares the digests with the files.
"""

from __future__ import annotations

import ast
import hashlib
from dataclasses import dataclass
from pathlib import Path

KERNELS = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Revision:
    """A kernel's revision, the module that has its function (below ``kernels``), and its source's digest."""

    revision: int
    home: str
    sha256: str


_ROWS = "gemm.portable.rows", "719bb5be4ed8421cfe610c3b980b181ac488923cc665814b63c639a40b2451dd"
_WEIGHT = "gemm.portable.weight", "0e308bea1a0319c7c2ca0c549775ed46302972f10e9cf0eed5dae47bf10fecc2"
_ROWS_SPECIALIZED = "gemm.hopper.rows", "1ff6bffaeabdbe2db453cb4af63d955e8034b759da22470f1f371c7a6f05ad27"
_ROWS_FITTED = "gemm.hopper.ragged", "57a620f8d7ea1c8248a846705f246d724b516c5f78c39123f2367f8562f1629e"
_WEIGHT_SPECIALIZED = "gemm.hopper.weight", "5e7dc7867d31e403c94722f575d5435ba514f5e490286136270c12b4c659299e"
_ACTIVATION = "rowops.activation", "c8b191fe1223c717d809b2b9a16944b84891b4709c184014ef6a8129686ada0d"
_CLEAR = "rowops.zero_rows", "3594864ecf9116758b1d7caabf263b2ead22471711e153264cf77cbacacccf51"
_SORT = "rowops.sort", "045fe45dc82ef106e078d6057bb809ad873e03c0d5626ab7d9c797525a2fb29e"
_GATHER_COMBINE = "rowops.gather_combine", "2d2d8851bc4f1ad48045863d8c0bae3d6ac7b60bc90184762954bd415b20ee7a"
REVISIONS = {
    "activation": Revision(2, *_ACTIVATION),
    "activation_grad": Revision(3, *_ACTIVATION),
    "clear": Revision(1, *_CLEAR),
    "combine": Revision(2, *_GATHER_COMBINE),
    "gather": Revision(2, *_GATHER_COMBINE),
    "rows": Revision(2, *_ROWS),
    "rows_fitted": Revision(2, *_ROWS_FITTED),
    "rows_specialized": Revision(2, *_ROWS_SPECIALIZED),
    "sort_slots": Revision(2, *_SORT),
    "weight": Revision(1, *_WEIGHT),
    "weight_specialized": Revision(1, *_WEIGHT_SPECIALIZED),
}


# The first revision whose code does all that today's launchers ask of it, where that is not the first.
LAUNCHED_SINCE = {
    "activation": 2, "activation_grad": 3, "combine": 2, "gather": 2, "rows": 2, "rows_fitted": 2,
    "rows_specialized": 2, "sort_slots": 2,
}  # fmt: skip


def sources(kernel: str) -> tuple[Path, ...]:
    """The files that a kernel is compiled from: its home, and what that imports of this layer, ascending."""
    found: set[Path] = set()
    ahead = [KERNELS.joinpath(*REVISIONS[kernel].home.split(".")).with_suffix(".py")]
    while ahead:
        path = ahead.pop()
        if path in found:
            continue
        found.add(path)
        for node in ast.parse(path.read_bytes()).body:
            if isinstance(node, ast.ImportFrom) and node.level and node.module:
                ahead.append(path.parents[node.level - 1].joinpath(*node.module.split(".")).with_suffix(".py"))
    return tuple(sorted(found))


def source_sha256(kernel: str) -> str:
    """The digest, in hex, of a kernel's source as it is on disk now.

    It is of the texts of ``sources``, less their import lines, in no order: a file that is moved changes nothing.
    """
    texts = sorted(hashlib.sha256(_without_imports(path)).digest() for path in sources(kernel))
    return hashlib.sha256(b"".join(texts)).hexdigest()


def _without_imports(path: Path) -> bytes:
    text = path.read_bytes()
    lines = text.splitlines(keepends=True)
    for node in ast.parse(text).body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            lines[node.lineno - 1 : node.end_lineno] = [b""] * ((node.end_lineno or node.lineno) - node.lineno + 1)
    return b"".join(lines)
