"""What a cubin's ELF header says: that it is CUDA code, and for which capability."""

from __future__ import annotations

import struct
from typing import NamedTuple

from .types import Target

EM_CUDA = 190
_HEADER = struct.Struct("<4sBBBBB7xHHIQQQI")  # the fixed head of an ELF64 file, up to e_flags
_CLASS_64 = 2
_LITTLE_ENDIAN = 1

# How e_flags holds the capability, seen in the output of ptxas 12.8 and 13.1:
# ABI version 7 (toolkits 12, below sm_100): sm in bits 0-7, bit 11 set for sm_90a;
# ABI version 8 (sm_100 and later, and all of toolkit 13): sm in bits 8-15; ptxas 12.8 sets bit 3 for an
# "a" target and ptxas 13.1 does not, so it says nothing there.
_ABI_OLD = 7
_ABI_NEW = 8
_OLD_ARCH_SPECIFIC = 1 << 11


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
