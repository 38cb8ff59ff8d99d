"""Cuts the CUDA code in an extension module down to one capability's for transport, and restores the module afterwards.

A module's section ``.nv_fatbin`` has a container for each source file, and a container an element for each capability:
machine code or PTX, compressed with zstd, which xz can't compress further. ``cut`` leaves out the elements that this
capability does not run and returns the others decompressed, for xz to compress together; ``whole`` compresses them
again and puts them back. The rest of the file is as it was, so the loader finds every container.
"""

from __future__ import annotations

import ctypes
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

_MAGIC = 0xBA55ED50
_CONTAINER = struct.Struct("<IHHQ")  # magic, version, size of this header, size of the elements
_ELEMENT = struct.Struct("<HHIQI")  # kind, version, size of this header, size (padded to 8), compressed size
_PTX, _CUBIN = 1, 2
_ZSTD = 0x8000
_AS_IT_IS = 0x100  # flag of a kind in a cut file: the payload is as in the original file
_LEVELS = (3, 9, 19, 22)
_SECTION = b".nv_fatbin\0"


class Element(NamedTuple):
    """Code for one capability: its header, and its payload, as stored in the file or decompressed by ``cut``."""

    kind: int
    header: bytes
    payload: bytes

    @property
    def arch(self) -> int:
        """The compute capability as a number: 90 is 9.0."""
        return _number(self.header, "<I", 28)

    @property
    def is_pressed(self) -> bool:
        """True if the payload is compressed with zstd in the file."""
        return bool(_number(self.header, "<Q", 40) & _ZSTD)

    @property
    def size(self) -> int:
        """Bytes of the code, decompressed."""
        return _number(self.header, "<Q", 56)

    def header_bytes(self) -> bytes:
        """The header, with its kind replaced by ``kind``."""
        return struct.pack("<H", self.kind) + self.header[2:]

    def unpressed(self, zstd: Zstd) -> Element:
        """Return the element with its payload decompressed."""
        return self._replace(payload=zstd.unpress(self.payload, self.size)) if self.is_pressed else self

    def laid(self, zstd: Zstd, level: int) -> bytes:
        """The header and payload, as bytes of a container."""
        payload = self.payload
        if self.is_pressed and not self.kind & _AS_IT_IS:
            payload = zstd.press(payload, level)
        header = bytearray(self._replace(kind=self.kind & ~_AS_IT_IS).header_bytes())
        padded = -(-len(payload) // 8) * 8
        struct.pack_into("<QI", header, 8, padded, len(payload) if self.is_pressed else 0)
        return bytes(header) + payload.ljust(padded, b"\0")


def _number(header: bytes, form: str, offset: int) -> int:
    values: tuple[int, ...] = struct.unpack_from(form, header, offset)
    return values[0]


class Zstd:
    """libzstd of this machine, or the one in ``path``."""

    def __init__(self, path: Path | None = None) -> None:
        self._lib = ctypes.CDLL(str(path or "libzstd.so.1"))
        for name in ("ZSTD_compress", "ZSTD_decompress", "ZSTD_compressBound"):
            getattr(self._lib, name).restype = ctypes.c_size_t

    def press(self, data: bytes, level: int) -> bytes:
        """``data`` compressed as one zstd frame."""
        room = self._lib.ZSTD_compressBound(ctypes.c_size_t(len(data)))
        out = ctypes.create_string_buffer(room)
        size = ctypes.c_size_t
        pressed = self._done(self._lib.ZSTD_compress(out, size(room), data, size(len(data)), level))
        return out.raw[:pressed]

    def unpress(self, data: bytes, size: int) -> bytes:
        """The ``size`` decompressed bytes of a zstd frame."""
        out = ctypes.create_string_buffer(size)
        self._done(self._lib.ZSTD_decompress(out, ctypes.c_size_t(size), data, ctypes.c_size_t(len(data))))
        return out.raw

    def _done(self, code: int) -> int:
        if self._lib.ZSTD_isError(ctypes.c_size_t(code)):
            raise ValueError(f"zstd: error {code - 2**64}")
        return code


def section(data: bytes | bytearray) -> range:
    """The range of an ELF file's CUDA code; empty if it has none."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("no ELF file of 64 bits, least byte first")
    (table,) = struct.unpack_from("<Q", data, 40)
    size, count, names = struct.unpack_from("<HHH", data, 58)
    rows = [struct.unpack_from("<IIQQQQ", data, table + size * i) for i in range(count)]
    for name, _, _, _, offset, length in rows:
        if data.startswith(_SECTION, rows[names][4] + name):
            return range(offset, offset + length)
    return range(0)


def containers(data: bytes | bytearray) -> Iterator[range]:
    """Yield the range of each container's elements."""
    where = section(data)
    at, magic = where.start, struct.pack("<I", _MAGIC)
    while (at := data.find(magic, at, where.stop)) >= 0:
        _, _, header, size = _CONTAINER.unpack_from(data, at)
        yield range(at + header, at + header + size)
        at += header + size


def elements(data: bytes | bytearray, where: range) -> list[Element]:
    """All elements of a container."""
    elements, at = [], where.start
    while at < where.stop:
        kind, _, header, size, pressed = _ELEMENT.unpack_from(data, at)
        start = at + header
        elements.append(Element(kind, bytes(data[at:start]), bytes(data[start : start + (pressed or size)])))
        at = start + size
    return elements


def wanted(elements: list[Element], sm: int) -> list[Element]:
    """Return the elements that a GPU of capability ``sm`` runs: machine code, else the newest PTX for it."""
    own = [element for element in elements if element.kind == _CUBIN and element.arch == sm]
    older = [element for element in elements if element.kind == _PTX and element.arch <= sm]
    return own or sorted(older, key=lambda element: element.arch)[-1:]


def cut(data: bytes, sm: int, zstd: Zstd, without: re.Pattern[bytes] | None = None) -> tuple[bytes, bytes]:
    """The file with the headers of the remaining elements but without their code, and their code, concatenated.

    Code with a name that matches ``without`` is left out: CUDA then reports that it has no kernel image.
    """
    out, code = bytearray(data), bytearray()
    for where in containers(data):
        stay = wanted(elements(data, where), sm)
        plain = [element.unpressed(zstd) for element in stay]
        if without is not None and any(without.search(element.payload) for element in plain):
            stay = plain = []
        if _laid(plain, len(where), zstd) is None:
            plain = [element._replace(kind=element.kind | _AS_IT_IS) for element in stay]
        code += b"".join(element.payload for element in plain)
        out[where.start : where.stop] = b"".join(element.header_bytes() for element in plain).ljust(len(where), b"\0")
    return bytes(out), bytes(code)


def whole(data: bytes, code: bytes, zstd: Zstd) -> bytes:
    """The original file without the elements left out, from the results of ``cut``."""
    out, taken = bytearray(data), 0
    for where in containers(data):
        stay, at = [], where.start
        while at < where.stop and (head := _ELEMENT.unpack_from(data, at))[0]:
            kind, _, size, padded, pressed = head
            element = Element(kind, data[at : at + size], b"")
            length = element.size if element.is_pressed and not kind & _AS_IT_IS else pressed or padded
            stay.append(element._replace(payload=code[taken : taken + length]))
            taken, at = taken + length, at + size
        laid = _laid(stay, len(where), zstd)
        if laid is None or taken > len(code):
            raise ValueError(f"{len(code)} bytes of code are none that were cut from this file by this libzstd")
        struct.pack_into("<Q", out, where.start - 8, len(laid))
        out[where.start : where.stop] = laid.ljust(len(where), b"\0")
    return bytes(out)


def _laid(stay: list[Element], room: int, zstd: Zstd) -> bytes | None:
    """The elements as bytes of a container, at the first compression level that fits ``room``; None if none fits."""
    for level in _LEVELS:
        code = b"".join(element.laid(zstd, level) for element in stay)
        if len(code) <= room:
            return code
    return None
