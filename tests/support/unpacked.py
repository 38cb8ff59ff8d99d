"""The shipped bundles, unpacked and read once for the tests of a process: each read takes half a second."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from pretuned.artifacts import bundle_file, format, packed

BUNDLES = Path(__file__).resolve().parents[2] / "artifacts" / "bundles"
_MOST = 3  # unpacked bundles, of up to 51 MB each


def _ships(where: str) -> bool:
    return os.path.realpath(os.path.dirname(packed.split(where)[0])) == str(BUNDLES)  # noqa: PTH120 - plain text


def kept(patch: pytest.MonkeyPatch) -> None:
    """Have the candidates that ship unpacked once, each shipped index and each record read once.

    A shipped index is known by its path and header, which has its digest; a record by its bytes.
    """
    read_index = bundle_file.BundleFile._read_index
    indices: dict[tuple[str, bytes], format.Index] = {}

    def index_of(bundle: bundle_file.BundleFile, fd: int, sha256: str | None) -> format.Index:
        if sha256 is not None or not _ships(bundle.path):
            return read_index(bundle, fd, sha256)
        key = bundle.path, bundle._head
        if key not in indices:
            indices[key] = read_index(bundle, fd, sha256)
        return indices[key]

    in_memory = bundle_file._open_pieces
    unpacked: dict[str, bundle_file._Descriptor] = {}

    def remembered(pieces: Iterable[bytes], where: str) -> bundle_file.BundleFile:
        if not _ships(where):
            return in_memory(pieces, where)
        name = os.path.basename(where)  # noqa: PTH119
        if name not in unpacked:
            held = in_memory(pieces, where)._held
            assert held is not None
            unpacked[name] = held
            if len(unpacked) > _MOST:
                del unpacked[next(iter(unpacked))]
        return bundle_file.BundleFile(bundle_file._Descriptor(os.dup(unpacked[name].fd)), where, None)

    patch.setattr(bundle_file.BundleFile, "_read_index", index_of)
    patch.setattr(bundle_file, "_open_pieces", remembered)
    patch.setattr(format, "read_variant", functools.lru_cache(maxsize=8192)(format.read_variant))
    patch.setattr(format, "read_choices", functools.lru_cache(maxsize=8192)(format.read_choices))
