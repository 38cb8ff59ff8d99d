"""Read a cubin's ELF file: capability, parameters, threads and registers of its kernel.

``aot verify`` and the builder compare these facts with the variant's record. The runtime doesn't: it trusts a cubin
whose digest is the record's.
"""

from __future__ import annotations

import struct

from .limits import MAX_NAME_CHARS
from .records import Target
from .tuples import NamedTuple

EM_CUDA = 190
_HEADER = struct.Struct("<4sBBBBB7xHHIQQQI6xHHH")  # an ELF64 file header: e_shoff, e_flags, e_shentsize, e_shnum, ...
_SECTION = struct.Struct("<I20xQQ24x")  # a section header's name, offset and size
_CLASS_64 = 2
_LITTLE_ENDIAN = 1

# The capability in e_flags, by the output of ptxas 12.8 and 13.1:
# ABI version 7 (toolkits 12, below sm_100): sm in bits 0-7, bit 11 set for sm_90a.
# ABI version 8 (sm_100 and later, and all of toolkit 13): sm in bits 8-15. ptxas 12.8 sets bit 3 for an
# "a" target, ptxas 13.1 does not, so the bit is ignored.
_ABI_OLD = 7
_ABI_NEW = 8
_OLD_ARCH_SPECIFIC = 1 << 11

# Sections .nv.info (all kernels) and .nv.info.KERNEL, from cuobjdump -elf of ptxas 12.8, 13.1 and 13.5: a list of
# attributes (form, kind, 16 bits). After form 4 come as many bytes as the 16 bits count.
_INFO = b".nv.info"
_ATTRIBUTE = struct.Struct("<BBH")
_SIZED = 4
_PARAMETER = 0x17, struct.Struct("<IHHI")  # index, ordinal, offset, bits: the size from bit 18 on
_THREADS = 0x10, struct.Struct("<III")  # threads of a block in x, y and z (EIATTR_REQNTID)
_REGISTERS = 0x2F, struct.Struct("<II")  # symbol, registers of a thread (EIATTR_REGCOUNT): in .nv.info
_SIZE_SHIFT = 18
_MOST_CHARS = 300  # of an error text


class KernelInfo(NamedTuple):
    """Facts of a cubin's only kernel. ``parameters`` are sizes in bytes; ``arch_specific`` is None if not recorded."""

    sm: int
    arch_specific: bool | None
    entry: str
    parameters: tuple[int, ...]
    threads: tuple[int, int, int]
    registers: int


def read(cubin: bytes) -> KernelInfo:
    """Read the facts of a cubin's kernel.

    Raises
    ------
    ValueError
        if ``cubin`` is not a cubin with exactly one kernel; the message says why.
    """
    if len(cubin) < _HEADER.size:
        raise ValueError(f"{len(cubin)} bytes, an ELF header has {_HEADER.size}")
    magic, bits, endian, _, _, abi, _, machine, _, _, _, table, flags, *sections = _HEADER.unpack_from(cubin)
    if magic != b"\x7fELF" or bits != _CLASS_64 or endian != _LITTLE_ENDIAN:
        raise ValueError(f"it begins with {cubin[:6].hex()}, not as a 64-bit little-endian ELF file")
    if machine != EM_CUDA:
        raise ValueError(f"ELF machine {machine}, wanted {EM_CUDA} (CUDA)")
    if abi not in (_ABI_OLD, _ABI_NEW):
        raise ValueError(f"CUDA ELF ABI version {abi}, this version reads {_ABI_OLD} and {_ABI_NEW}")
    sm, arch_specific = (
        (flags & 0xFF, bool(flags & _OLD_ARCH_SPECIFIC)) if abi == _ABI_OLD else (flags >> 8 & 0xFF, None)
    )
    shared, entry, kernel = _info_sections(cubin, table, *sections)
    parameters = {
        ordinal: (offset, bits >> _SIZE_SHIFT) for _, ordinal, offset, bits in _attributes(cubin, kernel, _PARAMETER)
    }
    used = 0
    for ordinal in range(len(parameters)):
        offset, size = parameters.get(ordinal, (-1, 0))
        if offset < used:
            raise ValueError(f"kernel {entry!r} has no parameter {ordinal} of its own, and {len(parameters)} in all")
        used = offset + size
    threads, registers = _attributes(cubin, kernel, _THREADS), _attributes(cubin, shared, _REGISTERS)
    if len(threads) != 1 or len(registers) != 1:
        raise ValueError(
            f"it says {len(threads)} times how many threads kernel {entry!r} has, and {len(registers)} "
            "times how many registers"
        )
    x, y, z = threads[0]
    sizes = tuple(parameters[ordinal][1] for ordinal in range(len(parameters)))
    return KernelInfo(sm, arch_specific, entry, sizes, (x, y, z), registers[0][1])


def fault(
    cubin: bytes, target: Target, entry: str, parameters: tuple[int, ...], threads: int, registers: int
) -> str | None:
    """Compare a cubin with its record: return the first difference as a text, None if there is none.

    ``parameters`` are sizes in bytes.
    """
    try:
        info = read(cubin)
    except ValueError as error:
        return f"no cubin: {error}"[:_MOST_CHARS]
    if info.sm != target.sm or info.arch_specific not in (None, target.arch_specific):
        return f"code for sm_{info.sm}{'a' if info.arch_specific else ''}, the bundle says {target}"
    if info.entry != entry:
        return f"it has no kernel {entry!r}, but {info.entry!r}"
    if len(info.parameters) != len(parameters):
        return f"kernel {entry!r} takes {len(info.parameters)} parameters, its record says {len(parameters)}"
    for i, (size, wanted) in enumerate(zip(info.parameters, parameters, strict=True)):
        if size != wanted:
            return f"parameter {i} of kernel {entry!r} takes {size} bytes, its record says {wanted}"
    if info.threads != (threads, 1, 1):
        return f"kernel {entry!r} is compiled for {info.threads} threads, its record says {threads}"
    if info.registers != registers:
        return f"kernel {entry!r} takes {info.registers} registers a thread, its record says {registers}"
    return None


def _attributes(cubin: bytes, section: tuple[int, int], wanted: tuple[int, struct.Struct]) -> list[tuple[int, ...]]:
    """Return the values of a section's attributes of one kind."""
    (at, end), (wanted_kind, value) = section, wanted
    values = []
    while at + _ATTRIBUTE.size <= end:
        form, kind, count = _ATTRIBUTE.unpack_from(cubin, at)
        at += _ATTRIBUTE.size
        if form != _SIZED:
            continue
        if at + count > end:
            raise ValueError("what it says of its kernel ends in the middle")
        if (kind, count) == (wanted_kind, value.size):
            values.append(value.unpack_from(cubin, at))
        at += count
    return values


def _info_sections(
    cubin: bytes, table: int, header_bytes: int, count: int, names_of: int
) -> tuple[tuple[int, int], str, tuple[int, int]]:
    """Return (begin, end) of .nv.info in the file, the kernel's name, and (begin, end) of .nv.info.KERNEL."""
    if header_bytes != _SECTION.size or names_of >= count or table + count * header_bytes > len(cubin):
        raise ValueError(f"its {count} sections, listed at byte {table}, are not within its {len(cubin)} bytes")
    headers = list(_SECTION.iter_unpack(cubin[table : table + count * header_bytes]))
    _, names, _ = headers[names_of]
    sections = {}
    for name, offset, size in headers:
        if cubin.startswith(_INFO, names + name):
            text = cubin[names + name + len(_INFO) : names + name + len(_INFO) + MAX_NAME_CHARS + 2].partition(b"\0")[0]
            if offset + size > len(cubin):
                raise ValueError(f"its section {_INFO + text!r} ends at byte {offset + size} of {len(cubin)}")
            sections[text] = offset, offset + size
    kernels = [text for text in sections if text.startswith(b".")]
    if b"" not in sections or len(kernels) != 1:
        raise ValueError(f"it says something of {len(kernels)} kernels, wanted one, and of all kernels together")
    return sections[b""], kernels[0][1:].decode("utf-8", "replace"), sections[kernels[0]]
