"""The digest of a kernel's source: a test compares each with what the kernel's entry says (``Entry.sha256``)."""

from __future__ import annotations

import ast
import functools
import hashlib
from pathlib import Path

from ...kernels.contract.registry import ENTRIES

KERNELS = Path(__file__).resolve().parents[2] / "kernels"


def sources(kernel: str) -> tuple[Path, ...]:
    """The files that a kernel is compiled from: its home, and what that imports of this layer, ascending."""
    return tuple(sorted(_texts(kernel)))


def source_sha256(kernel: str) -> str:
    """The digest, in hex, of a kernel's source as it is on disk now.

    It is of the texts of ``sources``, less their import lines, in no order: a file that is moved changes nothing.
    """
    digests = sorted(_parsed(text)[1] for text in _texts(kernel).values())
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _texts(kernel: str) -> dict[Path, bytes]:
    found: dict[Path, bytes] = {}
    ahead = [KERNELS.joinpath(*ENTRIES[kernel].home.split(".")).with_suffix(".py")]
    while ahead:
        path = ahead.pop()
        if path in found:
            continue
        found[path] = path.read_bytes()
        for level, names in _parsed(found[path])[0]:
            ahead.append(path.parents[level - 1].joinpath(*names).with_suffix(".py"))
    return found


@functools.cache  # every variant's key asks for it
def _parsed(text: bytes) -> tuple[tuple[tuple[int, tuple[str, ...]], ...], bytes]:
    """What a text imports of its own layer, as levels up and names, and the digest of the rest of its lines."""
    imports, lines = [], text.splitlines(keepends=True)
    for node in ast.parse(text).body:
        if isinstance(node, ast.ImportFrom) and node.level and node.module:
            imports.append((node.level, tuple(node.module.split("."))))
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            lines[node.lineno - 1 : node.end_lineno] = [b""] * ((node.end_lineno or node.lineno) - node.lineno + 1)
    return tuple(imports), hashlib.sha256(b"".join(lines)).digest()
