"""What a cubin's ELF file says: that it is CUDA code, for which capability, and what parameters a kernel takes."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from ..limits import MAX_NAME_CHARS
from ..records.target import Target

EM_CUDA = 190
_HEADER = struct.Struct("<4sBBBBB7xHHIQQQI")  # the fixed head of an ELF64 file, up to e_flags
_TABLE = struct.Struct("<Q10xHHH")  # of the same head, from e_shoff on: e_shoff, e_shentsize, e_shnum, e_shstrndx
_TABLE_AT = 40
_SECTION = struct.Struct("<I20xQQ24x")  # of a section's header: its name, offset and size
_CLASS_64 = 2
_LITTLE_ENDIAN = 1

# How e_flags holds the capability, seen in the output of ptxas 12.8 and 13.1:
# ABI version 7 (toolkits 12, below sm_100): sm in bits 0-7, bit 11 set for sm_90a;
# ABI version 8 (sm_100 and later, and all of toolkit 13): sm in bits 8-15; ptxas 12.8 sets bit 3 for an
# "a" target and ptxas 13.1 does not, so it says nothing there.
_ABI_OLD = 7
_ABI_NEW = 8
_OLD_ARCH_SPECIFIC = 1 << 11

# Section .nv.info.KERNEL, as cuobjdump -elf tells it, of ptxas 12.8, 13.1 and 13.5 alike: attributes of (form, kind,
# 16 bits), where form 4 is followed by as many bytes as the 16 bits say. Those of kind 0x17 are (index, ordinal,
# offset, bits) of one parameter each, and its size is what stands from bit 18 on.
_INFO = b".nv.info."
_ATTRIBUTE = struct.Struct("<BBH")
_SIZED = 4
_PARAMETER = 0x17
_PARAMETER_INFO = struct.Struct("<IHHI")
_SIZE_SHIFT = 18
# Two more, of (x, y, z) threads of a block, in a kernel's own section (EIATTR_REQNTID), and of (symbol, registers of a
# thread) in the section of all kernels, .nv.info (EIATTR_REGCOUNT).
_ALL = b".nv.info"
_THREADS = {0x10: 12}
_REGISTERS = {0x2F: 8}
_MOST_CHARS = 300  # of a reason


class UnknownAbi(ValueError):
    """A CUDA ELF file of a later toolkit, which says its capability in a way that nobody here knows."""


class CubinHeader(NamedTuple):
    """``arch_specific`` is None where the header does not tell."""

    sm: int
    arch_specific: bool | None


def read_header(cubin: bytes) -> CubinHeader:
    """The capability that a cubin was assembled for.

    Raises
    ------
    ValueError
        saying what is not that of a CUDA ELF file; UnknownAbi for a later toolkit's.
    """
    if len(cubin) < _HEADER.size:
        raise ValueError(f"{len(cubin)} bytes, an ELF header alone has {_HEADER.size}")
    magic, bits, endian, _version, _osabi, abi, _type, machine, _, _, _, _, flags = _HEADER.unpack_from(cubin)
    if magic != b"\x7fELF" or bits != _CLASS_64 or endian != _LITTLE_ENDIAN:
        raise ValueError(f"it begins with {cubin[:6].hex()}, not as a 64-bit little-endian ELF file")
    if machine != EM_CUDA:
        raise ValueError(f"ELF machine {machine}, wanted {EM_CUDA} (CUDA)")
    if abi == _ABI_OLD:
        return CubinHeader(flags & 0xFF, bool(flags & _OLD_ARCH_SPECIFIC))
    if abi == _ABI_NEW:
        return CubinHeader(flags >> 8 & 0xFF, None)
    raise UnknownAbi(f"CUDA ELF ABI version {abi}, this version reads {_ABI_OLD} and {_ABI_NEW}")


def mismatch(cubin: bytes, target: Target, *, later_abi: bool = False) -> str | None:
    """Why ``cubin`` is no code for ``target``, or None; also for a later toolkit's where ``later_abi`` allows it."""
    try:
        header = read_header(cubin)
    except ValueError as error:
        if later_abi and isinstance(error, UnknownAbi):
            return None
        return f"no cubin: {error}"
    if header.sm != target.sm or header.arch_specific not in (None, target.arch_specific):
        suffix = "a" if header.arch_specific else ""
        return f"code for sm_{header.sm}{suffix}, the bundle says {target}"
    return None


def parameters(cubin: bytes, entry: str) -> tuple[int, ...] | None:
    """The size in bytes of each parameter that kernel ``entry`` takes; None where the code does not say.

    (It has no section table, or a later toolkit's way of telling.)

    Raises
    ------
    ValueError
        where there is no kernel of this name, or what is said of it contradicts itself.
    """
    sections = _kernels(cubin)
    if sections is None:
        return None
    place = sections.get(entry)
    if place is None:
        raise ValueError(
            f"it has no kernel {entry!r}, but {', '.join(sorted(filter(None, sections))) or 'none at all'}"[
                :_MOST_CHARS
            ]
        )
    found: dict[int, tuple[int, int]] = {}
    at, end = place
    while at + _ATTRIBUTE.size <= end:
        form, kind, count = _ATTRIBUTE.unpack_from(cubin, at)
        at += _ATTRIBUTE.size
        if form != _SIZED:
            continue
        if at + count > end:
            raise ValueError(f"what it says of kernel {entry!r} ends in the middle")
        if kind == _PARAMETER and count == _PARAMETER_INFO.size:
            _, ordinal, offset, bits = _PARAMETER_INFO.unpack_from(cubin, at)
            found[ordinal] = (offset, bits >> _SIZE_SHIFT)
        at += count
    if not found:
        return None
    used = 0
    for ordinal in range(len(found)):
        offset, size = found.get(ordinal, (-1, 0))
        if offset < used:
            raise ValueError(f"kernel {entry!r} has no parameter {ordinal} of its own, and {len(found)} in all")
        used = offset + size
    return tuple(found[ordinal][1] for ordinal in range(len(found)))


def other_parameters(cubin: bytes, entry: str, wanted: tuple[int, ...]) -> str | None:
    """Why kernel ``entry`` does not take parameters of these sizes in bytes, or None; also where the code doesn't say.

    The driver copies as many bytes as the code says from each address that a launch gives it: of another kernel's
    arguments it would read past the end.
    """
    try:
        found = parameters(cubin, entry)
    except ValueError as error:
        return str(error)
    if found is None or found == wanted:
        return None
    if len(found) != len(wanted):
        return f"kernel {entry!r} takes {len(found)} parameters, its record says {len(wanted)}"
    first = next(i for i, (got, want) in enumerate(zip(found, wanted, strict=True)) if got != want)
    return f"parameter {first} of kernel {entry!r} takes {found[first]} bytes, its record says {wanted[first]}"


def other_limits(cubin: bytes, entry: str, threads: int, registers: int) -> str | None:
    """Why kernel ``entry`` is not compiled for such a block of threads, or takes other registers; or None.

    Also None where the code doesn't say. A launch of fewer threads would leave out parts of every tile.
    """
    try:
        sections = _kernels(cubin)
        if not sections or entry not in sections:
            return None
        for _, value in _attributes(cubin, sections[entry], _THREADS):
            block = struct.unpack("<III", value)
            if block != (threads, 1, 1):
                return f"kernel {entry!r} is compiled for {block} threads, its record says {threads}"
        counts = [value for _, value in _attributes(cubin, sections.get("", (0, 0)), _REGISTERS)]
    except ValueError as error:
        return str(error)
    if len(counts) == 1 and len(sections) == 2 and (found := struct.unpack("<II", counts[0])[1]) != registers:
        return f"kernel {entry!r} takes {found} registers a thread, its record says {registers}"
    return None


def _attributes(cubin: bytes, place: tuple[int, int], wanted: Mapping[int, int]) -> Iterator[tuple[int, bytes]]:
    """(kind, value) of the attributes of the wanted kinds, which have so many bytes.

    Raises
    ------
    ValueError
        where one ends beyond its section.
    """
    at, end = place
    while at + _ATTRIBUTE.size <= end:
        form, kind, count = _ATTRIBUTE.unpack_from(cubin, at)
        at += _ATTRIBUTE.size
        if form != _SIZED:
            continue
        if at + count > end:
            raise ValueError("what it says of itself ends in the middle")
        if wanted.get(kind) == count:
            yield kind, cubin[at : at + count]
        at += count


def _kernels(cubin: bytes) -> dict[str, tuple[int, int]] | None:
    """Where in the file it is told of each kernel, by name: from, to. None where nothing here can find that.

    Of all kernels together under the name "".
    """
    try:
        read_header(cubin)
    except UnknownAbi:
        return None
    table = 0
    if len(cubin) >= _TABLE_AT + _TABLE.size:
        table, header_bytes, count, names_of = _TABLE.unpack_from(cubin, _TABLE_AT)
    if not table:
        return None
    if header_bytes != _SECTION.size or names_of >= count or table + count * header_bytes > len(cubin):
        raise ValueError(f"its {count} sections, told at byte {table}, are not within its {len(cubin)} bytes")
    headers = list(_SECTION.iter_unpack(cubin[table : table + count * header_bytes]))
    _, names, _ = headers[names_of]
    found = {}
    for name, offset, size in headers:
        if cubin.startswith(_ALL + b"\0", names + name) and offset + size <= len(cubin):
            found[""] = (offset, offset + size)
        elif cubin.startswith(_INFO, names + name):
            begin = names + name + len(_INFO)
            end = cubin.find(b"\0", begin, begin + MAX_NAME_CHARS + 1)
            if end < 0:  # no record may name it
                continue
            entry = cubin[begin:end].decode("utf-8", "replace")
            if offset + size > len(cubin):
                raise ValueError(f"what it says of kernel {entry!r} ends at byte {offset + size} of {len(cubin)}")
            found[entry] = (offset, offset + size)
    return found
