"""The lowest layer of the format: the preamble, msgpack under limits, and checks of plain values.

A failed check names the field, its value and the values that are allowed.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgpack

from .errors import BundleCorrupt, BundleTooNew, BundleTooOld
from .limits import FORMAT, MAX_FILE_BYTES, MAX_INDEX_BYTES, MAX_NAME_CHARS, OLDEST_FORMAT, is_identifier
from .tuples import NamedTuple

V = TypeVar("V")

# fixarray 5 | fixstr "pretuned" | uint32 format | uint64 file bytes | uint32 index bytes | bin8 sha256
_PREAMBLE = struct.Struct(">10sBIBQBI2s32s")
MAGIC = b"\x95\xa8pretuned"
_LFS_POINTER = b"version https://git-lfs"
PREAMBLE_BYTES = _PREAMBLE.size
DIGESTED_BYTES = PREAMBLE_BYTES - 32  # the digest covers the preamble up to itself, then the index
BLOB_HEADER_BYTES = 5  # bin32: 0xc6 and a uint32


class Malformed(ValueError):
    """A part of a bundle breaks the format. The caller adds the file's name and raises BundleCorrupt."""


def corrupt(where: str, what: str) -> BundleCorrupt:
    """Return the error for a bundle that breaks the format."""
    return BundleCorrupt(f"bundle {where!r}: {what}. Copy it again, or rebuild it with `aot build`.")


class Preamble(NamedTuple):
    """The first 63 bytes of a bundle, checked against the file's size."""

    file_bytes: int
    index_bytes: int
    digest: bytes

    @property
    def cubins_at(self) -> int:
        """Offset of the first cubin in the file, in bytes."""
        return PREAMBLE_BYTES + self.index_bytes + BLOB_HEADER_BYTES


def pack_preamble(file_bytes: int, index: bytes) -> bytes:
    """Return the preamble of a file of ``file_bytes`` bytes with this index."""
    head = _PREAMBLE.pack(MAGIC, 0xCE, FORMAT, 0xCF, file_bytes, 0xCE, len(index), b"\xc4\x20", b"")[:DIGESTED_BYTES]
    return head + _digest(head, index)


def read_preamble(head: bytes, file_bytes: int | None, where: str) -> Preamble:
    """Check the preamble of a file that is ``file_bytes`` bytes long; None takes the length from the preamble.

    The digest is checked by ``check_index``, which has the index.

    Raises
    ------
    BundleCorrupt, BundleTooNew, BundleTooOld
    """
    if head.startswith(_LFS_POINTER):
        raise corrupt(where, "it is a Git LFS pointer, not the bundle itself. Get that with: git lfs pull")
    if len(head) < PREAMBLE_BYTES:
        raise corrupt(where, f"file is {len(head)} bytes, the preamble alone says {PREAMBLE_BYTES}")
    magic, t1, version, t2, said_bytes, t3, index_bytes, t4, digest = _PREAMBLE.unpack_from(head)
    if magic != MAGIC or t1 != 0xCE:
        raise corrupt(where, f"it is no bundle: it begins with {head[:11]!r}, wanted {MAGIC!r} and a format")
    if version > FORMAT:
        raise BundleTooNew(
            f"bundle {where!r}: format {version}, this version reads {_formats()}. "
            "Upgrade pretuned, or rebuild with `aot build`."
        )
    if version == 0:
        raise corrupt(where, f"format 0, which never was; this version reads {_formats()}")
    if version < OLDEST_FORMAT:
        raise BundleTooOld(
            f"bundle {where!r}: format {version}, this version reads {_formats()}. Build it again with `aot build`."
        )
    if (t2, t3, t4) != (0xCF, 0xCE, b"\xc4\x20"):
        raise corrupt(where, "the preamble's msgpack headers are not those of a bundle")
    if file_bytes is None:
        file_bytes = said_bytes
    if said_bytes != file_bytes:
        raise corrupt(where, f"file is {file_bytes} bytes, header says {said_bytes}")
    if file_bytes > MAX_FILE_BYTES:
        raise corrupt(where, f"file is {file_bytes} bytes, the limit is {MAX_FILE_BYTES}")
    if index_bytes > MAX_INDEX_BYTES:
        raise corrupt(where, f"index is {index_bytes} bytes, the limit is {MAX_INDEX_BYTES}")
    if PREAMBLE_BYTES + index_bytes + BLOB_HEADER_BYTES > file_bytes:
        raise corrupt(where, f"file is {file_bytes} bytes, header says an index of {index_bytes}")
    return Preamble(file_bytes, index_bytes, digest)


def check_index(head: bytes, preamble: Preamble, index: bytes, where: str) -> None:
    """Raise BundleCorrupt unless the preamble's digest is that of the preamble and ``index``."""
    got = _digest(head[:DIGESTED_BYTES], index)
    if got != preamble.digest:
        raise corrupt(where, f"header and index have sha256 {got.hex()}, header says {preamble.digest.hex()}")


def check_cubin(cubin: bytes, i: int, sha256: bytes, where: str) -> bytes:
    """Return ``cubin`` if its digest is ``sha256``.

    Raises
    ------
    BundleCorrupt
    """
    got = hashlib.sha256(cubin).digest()
    if got != sha256:
        raise corrupt(where, f"cubin {i} has sha256 {got.hex()}, its variant says {sha256.hex()}")
    return cubin


def blob_header(cubins_bytes: int) -> bytes:
    """Return the msgpack header of the cubins: always a bin32."""
    return struct.pack(">BI", 0xC6, cubins_bytes)


def pack(value: object, size_bytes: int = 4096) -> bytes:
    """Canonical msgpack: shortest integers and lengths, maps in the order given, str and bin apart."""
    # the packer's default buffer of 1 MiB costs more than packing a small record
    packed: bytes = msgpack.Packer(use_bin_type=True, strict_types=True, buf_size=size_bytes + 64).pack(value)
    return packed


def parse(data: bytes, *, max_items: int, max_pairs: int = 64, max_bin_bytes: int = 64) -> object:
    """Parse one msgpack object under limits: list, dict, str, bytes, int, bool, None or float.

    Raises
    ------
    Malformed
    """
    try:
        return msgpack.unpackb(
            data,
            raw=False,
            use_list=True,
            strict_map_key=True,
            max_array_len=max_items,
            max_map_len=max_pairs,
            max_str_len=MAX_NAME_CHARS,
            max_bin_len=max_bin_bytes,
            max_ext_len=0,
        )
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise _not_msgpack(error) from None


def begins_with(data: bytes, names: Sequence[str], *, max_items: int) -> list[object] | None:
    """Parse the first fields of the map that ``data`` begins with; None unless they have these names."""
    reader = msgpack.Unpacker(
        max_buffer_size=max(1, len(data)),
        raw=False,
        strict_map_key=True,
        max_array_len=max_items,
        max_map_len=64,
        max_str_len=MAX_NAME_CHARS,
        max_bin_len=64,
        max_ext_len=0,
    )
    values = []
    try:
        reader.feed(data)
        if reader.read_map_header() < len(names):
            return None
        for name in names:
            if reader.unpack() != name:
                return None
            values.append(reader.unpack())
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException):
        return None
    return values


def unpack(data: bytes, *, max_items: int) -> object:
    """Parse one msgpack object, which must be canonical: no duplicate keys, no long forms.

    Raises
    ------
    Malformed
        for bytes that ``pack`` would not write.
    """
    value = parse(data, max_items=max_items)
    try:
        again = pack(value, len(data))
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise _not_msgpack(error) from None
    if again != data:
        raise Malformed("not canonical msgpack: it packs to other bytes")
    return value


def _not_msgpack(error: Exception) -> Malformed:
    return Malformed(f"not canonical msgpack: {type(error).__name__}: {str(error)[:120]}")


def _digest(head: bytes, index: bytes) -> bytes:
    digest = hashlib.sha256(head)
    digest.update(index)
    return digest.digest()


def _formats() -> str:
    return str(FORMAT) if OLDEST_FORMAT == FORMAT else f"{OLDEST_FORMAT}-{FORMAT}"


def integer(value: object, what: str, low: int, high: int) -> int:
    """Return ``value`` if it is an int, not a bool, from ``low`` to ``high``; else raise Malformed."""
    if type(value) is not int:
        raise Malformed(f"{what} is {shown(value)}, wanted an integer")
    if not low <= value <= high:
        raise Malformed(f"{what} is {value}, wanted {low} to {high}")
    return value


def items(value: object, what: str, low: int, high: int) -> list[object]:
    """Return ``value`` if it is a list of ``low`` to ``high`` items; else raise Malformed."""
    if type(value) is not list:
        raise Malformed(f"{what} is {shown(value)}, wanted an array")
    if not low <= len(value) <= high:
        raise Malformed(f"{what} has {len(value)} items, wanted {low} to {high}")
    return value


def fields(value: object, what: str, names: tuple[str, ...]) -> tuple[object, ...]:
    """Return the values of a map that has exactly these keys in this order; else raise Malformed."""
    if type(value) is not dict:
        raise Malformed(f"{what} is {shown(value)}, wanted a map")
    if tuple(value) != names:
        raise Malformed(f"{what} has the keys {shown(list(value))}, wanted {', '.join(names)}")
    return tuple(value.values())


def name(value: object, what: str, allowed: Callable[[str], bool] = is_identifier) -> str:
    """Return ``value`` if it is a str for which ``allowed`` is true; else raise Malformed."""
    if type(value) is not str or not allowed(value):
        raise Malformed(f"{what} is {shown(value)}, which is no allowed name")
    return value


def digest(value: object, what: str) -> bytes:
    """Return ``value`` if it is 32 bytes; else raise Malformed."""
    if type(value) is not bytes or len(value) != 32:
        raise Malformed(f"{what} is {shown(value)}, wanted the 32 bytes of a sha256")
    return value


def pick(value: object, what: str, table: Mapping[str, V]) -> V:
    """Return ``table[value]``; raise Malformed if ``value`` is not a key."""
    if type(value) is not str or value not in table:
        raise Malformed(f"{what} is {shown(value)}, wanted one of {', '.join(table)}")
    return table[value]


def shown(value: object) -> str:
    """Return ``repr(value)`` cut to 60 characters."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
