"""Bundles by hand, past the codec: valid digests around whatever index an attacker likes."""

from __future__ import annotations

import hashlib
import struct
from typing import Any

import msgpack

from pretuned.artifacts.limits import FORMAT


def parts(data: bytes) -> tuple[dict[str, Any], bytes]:
    """The index as plain values, and the cubins."""
    (index_bytes,) = struct.unpack_from(">I", data, 25)
    index: dict[str, Any] = msgpack.unpackb(data[63 : 63 + index_bytes])
    return index, data[63 + index_bytes + 5 :]


def seal(index: bytes, cubins: bytes = b"", version: int = FORMAT) -> bytes:
    """A file of this index and these cubins whose preamble is right."""
    size = 63 + len(index) + 5 + len(cubins)
    head = struct.pack(">10sBIBQBI2s", b"\x95\xa8pretuned", 0xCE, version, 0xCF, size, 0xCE, len(index), b"\xc4\x20")
    return head + hashlib.sha256(head + index).digest() + index + struct.pack(">BI", 0xC6, len(cubins)) + cubins


def reseal(data: bytes) -> bytes:
    """``data`` with its digest made right, where it is long enough to have one."""
    if len(data) < 68:
        return data
    (index_bytes,) = struct.unpack_from(">I", data, 25)
    digest = hashlib.sha256(data[:31] + data[63 : 63 + index_bytes]).digest()
    return data[:31] + digest + data[63:]


def changed(data: bytes, **fields: Any) -> bytes:
    """The bundle with these fields of the index replaced by plain values, sealed again."""
    index, cubins = parts(data)
    return seal(msgpack.packb({**index, **fields}), cubins)


def changed_variant(data: bytes, **fields: Any) -> bytes:
    """The bundle with these fields of its first variant replaced."""
    index, _ = parts(data)
    first, *rest = index["variants"]
    return changed(data, variants=[msgpack.packb({**msgpack.unpackb(first), **fields}), *rest])
