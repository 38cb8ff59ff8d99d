"""A bundle pressed with xz, as candidates ship: many variants of few kernels, a tenth of their bytes."""

from __future__ import annotations

import lzma

from ..format.wire import PREAMBLE_BYTES, corrupt, read_preamble

SUFFIX = ".msgpack.xz"
MAGIC = b"\xfd7zXZ\x00"  # what xz files begin with
_MEMORY_BYTES = 256 << 20  # for xz's own window, at most
# An instruction of a cubin has 16 bytes: what a byte may be hangs on which of them it is. 4 to 5 % smaller.
_FILTERS = ({"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 2, "lp": 2, "pb": 4},)


def pack(data: bytes) -> bytes:
    """The bytes of a bundle, pressed: the same ones for the same ones."""
    return lzma.compress(data, filters=_FILTERS)


def unpack(data: bytes, where: str) -> bytes:
    """The bytes that were pressed, as many as the bundle's header says: a few bytes of xz may be any number of others.

    Raises
    ------
    BundleCorrupt, BundleTooNew, BundleTooOld
    """
    reader = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MEMORY_BYTES)
    try:
        head = reader.decompress(data, max_length=PREAMBLE_BYTES)
        size = read_preamble(head, None, where).file_bytes
        found = head + reader.decompress(b"", max_length=size - len(head) + 1)
    except (lzma.LZMAError, EOFError, MemoryError) as error:
        raise corrupt(where, f"it can't be unpacked: {error}") from None
    if len(found) > size:
        raise corrupt(where, f"it unpacks to more than the {size} bytes that its header says")
    if not reader.eof or reader.unused_data:
        raise corrupt(where, "it is cut off, or something follows it")
    return found
