"""Bundles pressed with xz, as candidates ship: many variants of few kernels, a tenth of their bytes.

One stream may hold several, each for another capability: those for like GPUs have most bytes in common.
``FILE.msgpack.xz#sm103`` names one of them wherever a bundle's path is wanted.
"""

from __future__ import annotations

import lzma
from collections.abc import Iterator

from ..errors import BundleCorrupt, BundleUnreadable, TargetMismatch
from ..format.index import GLANCED_BYTES, glance
from ..format.wire import MAGIC as BUNDLE
from ..format.wire import PREAMBLE_BYTES, corrupt, read_preamble
from ..limits import MAX_FILE_BYTES

SUFFIX = ".msgpack.xz"
MAGIC = b"\xfd7zXZ\x00"  # what xz files begin with
_PIECE_BYTES = 1 << 20
_HEAD_BYTES = 4096  # of a packed file: what a bundle's preamble is unpacked from
_MEMORY_BYTES = 256 << 20  # for xz's own window, at most
# An instruction of a cubin has 16 bytes: what a byte may be hangs on which of them it is. 4 to 5 % smaller. The window
# (64 MiB, of which a reader touches what it has unpacked) reaches over the bundles before.
_FILTERS = ({"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 2, "lp": 2, "pb": 4},)


def split(path: str) -> tuple[str, int | None]:
    """The file that a bundle's path names, and the capability where it names one of several bundles in it."""
    file, _, sm = path.rpartition("#sm")
    named = file.endswith(SUFFIX) and len(sm) <= 4 and sm.isascii() and sm.isdigit()
    return (file, int(sm)) if named else (path, None)


def is_packed(path: str) -> bool:
    """Whether a path names such a file, or a bundle in one."""
    return split(path)[0].endswith(SUFFIX)


def pack(*bundles: bytes) -> bytes:
    """The bytes of bundles, pressed into one stream: the same ones for the same ones."""
    return lzma.compress(b"".join(bundles), filters=_FILTERS)


def unpack(data: bytes, where: str, sm: int | None = None) -> Iterator[bytes]:
    """The bytes of the one bundle that was pressed, or of that for ``sm``, in pieces; those before it are skipped.

    They are as many as the bundle's header says: a few bytes of xz may be any number of others. What comes after
    the wanted bundle is looked at only as far as to see that it is another, or the end.

    Raises
    ------
    BundleCorrupt, BundleTooNew, BundleTooOld
    BundleUnreadable
        where there are several, and ``sm`` is None.
    TargetMismatch
        where there is none for ``sm``.
    """
    there: list[str] = []
    taken = False
    for found, pieces in _bundles(data, where):
        there.append(f"sm_{found}")
        if taken and sm is None:
            named = f"{where}#{there[0].replace('_', '')}"
            raise BundleUnreadable(f"bundle {where!r}: the file holds several: name one, as in {named!r}")
        if taken:
            return
        if sm in (None, found):
            yield from pieces
            taken = True
    if not taken:
        raise TargetMismatch(f"bundle {where!r}: the file holds none for sm_{sm}, but for {', '.join(there)}")


def is_copy(path: str, packed: str) -> bool:
    """Whether ``path`` is the one bundle that ``packed`` unpacks to, by its digest; False if either can't be read."""
    try:
        with open(path, "rb") as plain, open(packed, "rb") as file:  # noqa: PTH123 - a path may be any text
            stream = _Stream(file.read(_HEAD_BYTES), packed)
            return plain.read(PREAMBLE_BYTES) == stream.read(PREAMBLE_BYTES)
    except (OSError, BundleCorrupt):
        return False


def capabilities(data: bytes, where: str) -> tuple[int, ...]:
    """For which capability each bundle is; all is unpacked, and so the end is checked.

    Raises
    ------
    BundleCorrupt, BundleTooNew, BundleTooOld
    """
    return tuple(found for found, _ in _bundles(data, where))


def _bundles(data: bytes, where: str) -> Iterator[tuple[int, Iterator[bytes]]]:
    """Each bundle's capability, as its index begins, and its bytes; those that nobody took are skipped.

    Together they are no more than the limit of one file: skipping takes no more work than unpacking one bundle may.
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
    """What xz unpacks to, read in turn."""

    def __init__(self, data: bytes, where: str) -> None:
        self._reader = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_MEMORY_BYTES)
        self._data, self._where = data, where

    def read(self, count: int) -> bytes:
        """So many bytes; fewer where it ends or is cut off."""
        if self._reader.eof:
            return b""
        try:
            data, self._data = self._data, b""  # the reader keeps what it has not come to
            return self._reader.decompress(data, max_length=count)
        except (lzma.LZMAError, EOFError, MemoryError) as error:
            raise corrupt(self._where, f"it can't be unpacked: {error}") from None

    def pieces(self, begin: bytes, size: int) -> Iterator[bytes]:
        """``begin``, which was read before, and what follows: ``size`` bytes in all."""
        left = size - len(begin)
        yield begin
        while left:
            piece = self.read(min(left, _PIECE_BYTES))
            if not piece:
                raise self.cut(size - left, size)
            left -= len(piece)
            yield piece

    def cut(self, found: int, size: int) -> BundleCorrupt:
        """The error for a bundle that ends before its header says."""
        what = f"file is {found} bytes, header says {size}" if self._reader.eof else "it is cut off"
        return corrupt(self._where, what)

    def demand_end(self) -> None:
        """All was read, and nothing follows what xz says is all."""
        if not self._reader.eof or self._reader.unused_data:
            raise corrupt(self._where, "it is cut off, or something follows it")
