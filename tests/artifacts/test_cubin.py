"""Facts that a cubin holds, read from ELF files built here: whole, cut in the middle, and of other kinds."""

from __future__ import annotations

import struct

import pytest

from pretuned.artifacts.cubin import fault, read
from pretuned.artifacts.limits import MAX_NAME_CHARS
from pretuned.artifacts.records import Target

SM_90A = Target(90, True)


def header(abi: int = 7, flags: int = 90 | 1 << 11, machine: int = 190, sections: int = 0, count: int = 0) -> bytes:
    head = struct.pack("<4sBBBBB7xHHIQQQI", b"\x7fELF", 2, 1, 1, 51, abi, 2, machine, 1, 0, 0, sections, flags)
    return head + struct.pack("<HHHHHH", 64, 56, 0, 64, count, 0)


def elf(*sections: tuple[str, bytes]) -> bytes:
    """A file of these sections, behind that of their names."""
    names = b"\0.shstrtab\0" + b"".join(name.encode() + b"\0" for name, _ in sections)
    bodies = [(".shstrtab", names), *sections]
    table = len(header())
    at = table + 64 * len(bodies)
    rows = b""
    for name, body in bodies:
        rows += struct.pack("<I20xQQ24x", names.index(name.encode() + b"\0"), at, len(body))
        at += len(body)
    return header(sections=table, count=len(bodies)) + rows + b"".join(body for _, body in bodies)


def parameter(ordinal: int, offset: int, size: int) -> bytes:
    return struct.pack("<BBH", 4, 0x17, 12) + struct.pack("<IHHI", 0, ordinal, offset, size << 18)


def info(kernel: str, *attributes: bytes) -> tuple[str, bytes]:
    return f".nv.info.{kernel}", b"".join(attributes)


THREADS_128 = struct.pack("<BBHIII", 4, 0x10, 12, 128, 1, 1)
UNSIZED = struct.pack("<BBH", 3, 0x19, 24)
REGISTERS_40 = (".nv.info", struct.pack("<BBHII", 4, 0x2F, 8, 1, 40))
TWO = info("k", UNSIZED, parameter(1, 8, 4), THREADS_128, parameter(0, 0, 8))


WHOLE = elf(REGISTERS_40, TWO)


def notes_of(
    data: bytes, entry: str = "k", sizes: tuple[int, ...] = (8, 4), threads: int = 128, registers: int = 40
) -> str:
    return str(fault(data, SM_90A, entry, sizes, threads, registers))


def with_flags(abi: int, flags: int) -> bytes:
    return WHOLE[:8] + bytes([abi]) + WHOLE[9:48] + struct.pack("<I", flags) + WHOLE[52:]


def test_what_a_file_says() -> None:
    assert read(WHOLE) == (90, True, "k", (8, 4), (128, 1, 1), 40)
    assert fault(WHOLE, SM_90A, "k", (8, 4), 128, 40) is None
    assert notes_of(WHOLE, "j") == "it has no kernel 'j', but 'k'"
    assert notes_of(WHOLE, sizes=(8,)) == "kernel 'k' takes 2 parameters, its record says 1"
    assert notes_of(WHOLE, sizes=(8, 8)) == "parameter 1 of kernel 'k' takes 4 bytes, its record says 8"
    assert notes_of(WHOLE, threads=64) == "kernel 'k' is compiled for (128, 1, 1) threads, its record says 64"
    assert notes_of(WHOLE, registers=41) == "kernel 'k' takes 40 registers a thread, its record says 41"


def test_what_it_is_for() -> None:
    assert read(with_flags(7, 90))[:2] == (90, False)
    assert read(with_flags(8, 100 << 8 | 8))[:2] == (100, None)
    assert notes_of(with_flags(7, 90)) == "code for sm_90, the bundle says sm_90a"
    assert notes_of(with_flags(8, 100 << 8)) == "code for sm_100, the bundle says sm_90a"
    assert fault(with_flags(8, 90 << 8), SM_90A, "k", (8, 4), 128, 40) is None
    assert fault(WHOLE, Target(100, True), "k", (8, 4), 128, 40) == "code for sm_90a, the bundle says sm_100a"


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "0 bytes, an ELF header has 64"),
        (header()[:63], "63 bytes, an ELF header has 64"),
        (b"\x7fELG" + header()[4:], "it begins with 7f454c470201, not as"),
        (b"\x7fELF\1" + header()[5:], "it begins with 7f454c460101, not as"),
        (b"\x7fELF\2\2" + header()[6:], "it begins with 7f454c460202, not as"),
        (header(machine=62), "ELF machine 62, wanted 190"),
        (header(abi=9), "CUDA ELF ABI version 9, this version reads 7 and 8"),
        (header(), "its 0 sections, listed at byte 0, are not within its 64 bytes"),
        (WHOLE[:150], "sections, listed at byte 64, are not within its 150 bytes"),
        (WHOLE[:40] + bytes(8) + WHOLE[48:], "it says something of 0 kernels, wanted one"),  # no table of sections
        (WHOLE[:-1], "ends at byte"),
        (elf(REGISTERS_40), "it says something of 0 kernels, wanted one"),
        (elf(TWO), "it says something of 1 kernels, wanted one, and of all kernels together"),
        (elf(REGISTERS_40, TWO, info("j", parameter(0, 0, 8))), "it says something of 2 kernels"),
        (elf(REGISTERS_40, info("k", parameter(0, 0, 8))), "it says 0 times how many threads kernel 'k' has, and 1"),
        (elf((".nv.info", UNSIZED), TWO), "it says 1 times how many threads kernel 'k' has, and 0"),
        (elf(REGISTERS_40, info("n" * 2 * MAX_NAME_CHARS, THREADS_128)), "it has no kernel 'k', but 'nnn"),
    ],
)
def test_what_is_no_code_here(data: bytes, why: str) -> None:
    """Nothing that can't be read is taken to be right."""
    assert why in notes_of(data)


@pytest.mark.parametrize("cut", range(1, 12))
def test_an_attribute_that_ends_beyond_its_section(cut: int) -> None:
    assert "what it says of its kernel ends in the middle" in notes_of(
        elf(REGISTERS_40, info("k", parameter(0, 0, 8)[:-cut]))
    )


@pytest.mark.parametrize("rows", [[(0, 0, 8), (1, 4, 4)], [(0, 0, 8), (2, 8, 4)], [(1, 0, 8)]])
def test_parameters_that_lie_on_each_other_or_are_missing(rows: list[tuple[int, int, int]]) -> None:
    data = elf(REGISTERS_40, info("k", THREADS_128, *(parameter(*row) for row in rows)))
    assert f"has no parameter {1 if len(rows) == 2 else 0} of its own, and {len(rows)} in all" in notes_of(data)
