"""The digest of a kernel's source. A test compares each with the one in the kernel's entry (``Entry.sha256``).

python -m pretuned.aot.compile.revisions prints each kernel with its digest, and needs no torch and no Triton.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path

from ...artifacts.syntax import syntax_sha256
from ...kernels.entry import Entry, KernelEntry
from ...kernels.registry import ENTRIES

KERNELS = Path(__file__).resolve().parents[2] / "kernels"


def sources(kernel: str) -> tuple[Path, ...]:
    """The files that a kernel is compiled from: its home and its imports from the kernels layer, ascending."""
    return tuple(sorted(_texts(home_of(kernel))))


def home_of(kernel: str) -> Path:
    """The file that a kernel's function is in."""
    return KERNELS.joinpath(*ENTRIES[kernel].home.split(".")).with_suffix(".py")


def source_sha256(kernel: str) -> str:
    """The digest, in hex, of a kernel's source as it is on disk now."""
    return sha256_of(home_of(kernel))


def sha256_of(home: Path) -> str:
    """The digest, in hex, of a source file and its imports from the kernels layer.

    It is over the sorted digests of the syntax trees of ``sources``: comments and file names don't change it.
    """
    digests = sorted(_parsed(text)[1] for text in _texts(home).values())
    return hashlib.sha256(b"".join(digests)).hexdigest()


def main(entries: Mapping[str, Entry | KernelEntry] = ENTRIES) -> None:
    """Print each kernel and its digest, a line each, and mark those that differ from the entry's."""
    for name, entry in entries.items():
        now = source_sha256(name)
        print(name, now, *([] if now == entry.sha256 else [f"(the entry has {entry.sha256})"]))


def _texts(home: Path) -> dict[Path, bytes]:
    texts: dict[Path, bytes] = {}
    ahead = [home]
    while ahead:
        path = ahead.pop()
        if path in texts:
            continue
        texts[path] = path.read_bytes()
        for level, names in _parsed(texts[path])[0]:
            ahead.append(path.parents[level - 1].joinpath(*names).with_suffix(".py"))
    return texts


@functools.cache  # cached, because every variant's key needs it
def _parsed(text: bytes) -> tuple[tuple[tuple[int, tuple[str, ...]], ...], bytes]:
    """The imports of a source from its own layer, as (levels up, name), and the digest of its syntax tree."""
    imports = [
        (node.level, tuple(node.module.split(".")))
        for node in ast.parse(text).body
        if isinstance(node, ast.ImportFrom) and node.level and node.module
    ]
    return tuple(imports), syntax_sha256(text)


if __name__ == "__main__":
    main()
