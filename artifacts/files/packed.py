"""A bundle pressed with xz, as candidates ship: many variants of few kernels, a tenth of their bytes."""

from __future__ import annotations

import lzma

from ..format.wire import corrupt
from ..limits import MAX_FILE_BYTES

SUFFIX = ".msgpack.xz"
MAGIC = b"\xfd7zXZ\x00"  # what xz files begin with
_MEMORY_BYTES = 256 << 20  # for xz's own window, at most
# An instruction of a cubin has 16 bytes: what a byte may be hangs on which of them it is. 4 to 5 % smaller.
_FILTERS = ({"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 2, "lp": 2, "pb": 4},)


def pack(data: bytes) -> bytes:
    """The bytes of a bundle, pressed: the same ones for the same ones."""
    return lzma.compress(data, filters=_FILTERS)


def unpack(data: bytes, where: str) -> bytes:
    """The bytes that were pressed, at most as many as a bundle may have; BundleCorrupt otherwise."""
    reader = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MEMORY_BYTES)
    try:
        found = reader.decompress(data, max_length=MAX_FILE_BYTES + 1)
    except (lzma.LZMAError, EOFError, MemoryError) as error:
        raise corrupt(where, f"it can't be unpacked: {error}") from None
    if len(found) > MAX_FILE_BYTES:
        raise corrupt(where, f"it unpacks to more than {MAX_FILE_BYTES} bytes")
    if not reader.eof or reader.unused_data:
        raise corrupt(where, "it is cut off, or something follows it")
    return found
