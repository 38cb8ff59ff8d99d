"""The shipped bundles, unpacked and read once for the tests of a process: each read takes half a second."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pretuned.artifacts import format, packed

BUNDLES = Path(__file__).resolve().parents[2] / "artifacts" / "bundles"


def kept(patch: pytest.MonkeyPatch) -> None:
    """Have the candidates that ship unpacked once, and each record read once: by the bytes, which say all."""
    unpack = packed.unpack
    unpacked_once = functools.lru_cache(maxsize=3)(lambda data, where, sm: tuple(unpack(data, where, sm)))

    def remembered(data: bytes, where: str, sm: int | None = None) -> Iterator[bytes]:
        ships = os.path.realpath(os.path.dirname(packed.split(where)[0])) == str(BUNDLES)  # noqa: PTH120 - plain text
        yield from unpacked_once(data, where, sm) if ships else unpack(data, where, sm)

    patch.setattr(packed, "unpack", remembered)
    patch.setattr(format, "read_variant", functools.lru_cache(maxsize=8192)(format.read_variant))
    patch.setattr(format, "read_choices", functools.lru_cache(maxsize=8192)(format.read_choices))
