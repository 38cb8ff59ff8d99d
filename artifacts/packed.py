"""Bundles compressed with xz to a tenth of their size: the candidate kernels ship this way.

A file may hold several bundles, each for another capability, because similar GPUs' bundles have most bytes in common.
``FILE.msgpack.xz#sm103`` names the bundle for sm_103 wherever a bundle's path is expected.
"""

from __future__ import annotations

import lzma
from collections.abc import Iterator

from .errors import BundleCorrupt, BundleUnreadable, TargetMismatch
from .format import GLANCED_BYTES, glance
from .limits import MAX_FILE_BYTES
from .wire import MAGIC as BUNDLE
from .wire import PREAMBLE_BYTES, corrupt, read_preamble

SUFFIX = ".msgpack.xz"
MAGIC = b"\xfd7zXZ\x00"  # the first bytes of xz files
_PIECE_BYTES = 1 << 20
_HEAD_BYTES = 4096  # the first bytes of a packed file: enough to unpack a bundle's preamble
_MEMORY_BYTES = 256 << 20  # for xz's own window, at most
# pb=4: a cubin's instruction has 16 bytes, and a byte's meaning depends on its place among them. 4 to 5 % smaller.
# The window of 64 MiB covers the bundles before; a reader touches only the part that it has unpacked.
_FILTERS = ({"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 2, "lp": 2, "pb": 4},)


def split(path: str) -> tuple[str, int | None]:
    """Split FILE.msgpack.xz#sm103 into the file and 103; (path, None) for any other path."""
    file, _, sm = path.rpartition("#sm")
    named = file.endswith(SUFFIX) and len(sm) <= 4 and sm.isascii() and sm.isdigit()
    return (file, int(sm)) if named else (path, None)


def is_packed(path: str) -> bool:
    """Return whether a path names a packed file or a bundle in a packed file."""
    return split(path)[0].endswith(SUFFIX)


def pack(*bundles: bytes) -> bytes:
    """Compress bundles into one xz stream. Equal bundles give equal bytes."""
    return lzma.compress(b"".join(bundles), filters=_FILTERS)


def unpack(data: bytes, where: str, sm: int | None = None) -> Iterator[bytes]:
    """Yield the bytes of a packed file's only bundle, or of its bundle for ``sm``, in pieces.

    The bundle's header limits how many bytes are unpacked: a few bytes of xz can stand for any number. After the
    wanted bundle only the beginning of the next one is read.

    Raises
    ------
    BundleCorrupt, BundleTooNew, BundleTooOld
    BundleUnreadable
        if the file holds several bundles and ``sm`` is None.
    TargetMismatch
        if the file holds no bundle for ``sm``.
    """
    capabilities: list[str] = []
    taken = False
    for capability, pieces in _bundles(data, where):
        capabilities.append(f"sm_{capability}")
        if taken and sm is None:
            named = f"{where}#{capabilities[0].replace('_', '')}"
            raise BundleUnreadable(f"bundle {where!r}: the file holds several: name one, as in {named!r}")
        if taken:
            return
        if sm in (None, capability):
            yield from pieces
            taken = True
    if not taken:
        raise TargetMismatch(f"bundle {where!r}: the file holds none for sm_{sm}, but for {', '.join(capabilities)}")


def is_copy(path: str, packed: str) -> bool:
    """Return whether ``path`` is the first bundle in ``packed``, by its digest; False if either can't be read."""
    try:
        with open(path, "rb") as plain, open(packed, "rb") as file:  # noqa: PTH123 - a path may be any text
            stream = _Stream(file.read(_HEAD_BYTES), packed)
            return plain.read(PREAMBLE_BYTES) == stream.read(PREAMBLE_BYTES)
    except (OSError, BundleCorrupt):
        return False


def capabilities(data: bytes, where: str) -> tuple[int, ...]:
    """Return the capability of each bundle in a packed file, e.g. (100, 103). The whole file is unpacked and checked.

    Raises
    ------
    BundleCorrupt, BundleTooNew, BundleTooOld
    """
    return tuple(capability for capability, _ in _bundles(data, where))


def _bundles(data: bytes, where: str) -> Iterator[tuple[int, Iterator[bytes]]]:
    """Yield each bundle's capability and an iterator over its bytes; bytes that the caller leaves are skipped.

    All bundles together are limited to the size of one bundle, so skipping is never more work than unpacking one.
    """
    stream = _Stream(data, where)
    seen: set[int] = set()
    total = 0
    head = stream.read(PREAMBLE_BYTES)
    while True:
        size = read_preamble(head, None, where).file_bytes
        total += size
        if total > MAX_FILE_BYTES:
            raise corrupt(where, f"its bundles are {total} bytes or more together, the limit is {MAX_FILE_BYTES}")
        begin = head + stream.read(min(GLANCED_BYTES, size - PREAMBLE_BYTES))
        if len(begin) < min(PREAMBLE_BYTES + GLANCED_BYTES, size):
            raise stream.cut(len(begin), size)
        target = glance(begin[PREAMBLE_BYTES:])
        if target is None:
            raise corrupt(where, "its index does not begin with a capability")
        if target.sm in seen:
            raise corrupt(where, f"two of its bundles are for sm_{target.sm}")
        seen.add(target.sm)
        pieces = stream.pieces(begin, size)
        yield target.sm, pieces
        for _ in pieces:
            pass
        head = stream.read(PREAMBLE_BYTES)
        if not head.startswith(BUNDLE):
            if head:
                raise corrupt(where, f"it unpacks to more than the {size} bytes that its header says")
            stream.demand_end()
            return


class _Stream:
    """An xz stream, unpacked from its beginning to its end."""

    def __init__(self, data: bytes, where: str) -> None:
        self._reader = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MEMORY_BYTES)
        self._data, self._where = data, where

    def read(self, count: int) -> bytes:
        """The next ``count`` bytes; fewer if the stream ends or is cut off."""
        if self._reader.eof:
            return b""
        try:
            data, self._data = self._data, b""  # the decompressor keeps input that it has not used
            return self._reader.decompress(data, max_length=count)
        except (lzma.LZMAError, EOFError, MemoryError) as error:
            raise corrupt(self._where, f"it can't be unpacked: {error}") from None

    def pieces(self, begin: bytes, size: int) -> Iterator[bytes]:
        """Yield ``begin``, which was read before, and the bytes after it: ``size`` bytes in all."""
        left = size - len(begin)
        yield begin
        while left:
            piece = self.read(min(left, _PIECE_BYTES))
            if not piece:
                raise self.cut(size - left, size)
            left -= len(piece)
            yield piece

    def cut(self, unpacked: int, size: int) -> BundleCorrupt:
        """The error for a bundle of ``size`` bytes that ends after ``unpacked``."""
        what = f"file is {unpacked} bytes, header says {size}" if self._reader.eof else "it is cut off"
        return corrupt(self._where, what)

    def demand_end(self) -> None:
        """Raise BundleCorrupt unless the stream ends here and nothing follows it in the file."""
        if not self._reader.eof or self._reader.unused_data:
            raise corrupt(self._where, "it is cut off, or something follows it")
