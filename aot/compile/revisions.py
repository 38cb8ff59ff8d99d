"""The digest of a kernel's source: a test compares each with what the kernel's entry says (``Entry.sha256``)."""

from __future__ import annotations

import ast
import hashlib
from pathlib import Path

from ...kernels.contract.registry import ENTRIES

KERNELS = Path(__file__).resolve().parents[2] / "kernels"


def sources(kernel: str) -> tuple[Path, ...]:
    """The files that a kernel is compiled from: its home, and what that imports of this layer, ascending."""
    found: set[Path] = set()
    ahead = [KERNELS.joinpath(*ENTRIES[kernel].home.split(".")).with_suffix(".py")]
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
