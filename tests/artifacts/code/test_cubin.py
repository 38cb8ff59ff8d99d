"""What a cubin says of itself, read from ELF files made here: whole, cut in the middle, and of other kinds."""

from __future__ import annotations

import struct

import pytest

from pretuned.artifacts.code import cubin
from pretuned.artifacts.code.cubin import UnknownAbi, mismatch, other_limits, other_parameters, parameters, read_header
from pretuned.artifacts.limits import MAX_NAME_CHARS
from pretuned.artifacts.records.target import Target

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


def test_what_it_is_for() -> None:
    assert read_header(header()) == (90, True)
    assert read_header(header(flags=90)) == (90, False)
    assert read_header(header(abi=8, flags=100 << 8 | 8)) == (100, None)
    assert mismatch(header(), SM_90A) is None
    assert mismatch(header(flags=90), SM_90A) == "code for sm_90, the bundle says sm_90a"
    assert mismatch(header(), Target(100, True)) == "code for sm_90a, the bundle says sm_100a"
    assert mismatch(header(abi=8, flags=90 << 8), SM_90A) is None


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "0 bytes, an ELF header alone has 52"),
        (header()[:51], "51 bytes, an ELF header alone has 52"),
        (b"\x7fELG" + header()[4:], "it begins with 7f454c470201, not as"),
        (b"\x7fELF\1" + header()[5:], "it begins with 7f454c460101, not as"),
        (b"\x7fELF\2\2" + header()[6:], "it begins with 7f454c460202, not as"),
        (header(machine=62), "ELF machine 62, wanted 190"),
        (header(abi=9), "CUDA ELF ABI version 9, this version reads 7 and 8"),
    ],
)
def test_what_is_no_code_here(data: bytes, why: str) -> None:
    assert f"no cubin: {why}" in str(mismatch(data, SM_90A))
    later = mismatch(data, SM_90A, later_abi=True)
    assert later is None if "ABI" in why else later is not None


def test_the_parameters_of_a_kernel() -> None:
    data = elf(REGISTERS_40, TWO)
    assert parameters(data, "k") == (8, 4)
    assert other_parameters(data, "k", (8, 4)) is None
    assert other_parameters(data, "k", (8, 8)) == "parameter 1 of kernel 'k' takes 4 bytes, its record says 8"
    assert other_parameters(data, "k", (8,)) == "kernel 'k' takes 2 parameters, its record says 1"
    assert other_parameters(data, "j", (8,)) == "it has no kernel 'j', but k"
    assert other_parameters(elf(REGISTERS_40), "j", (8,)) == "it has no kernel 'j', but none at all"


def test_the_limits_of_a_kernel() -> None:
    data = elf(REGISTERS_40, TWO)
    assert other_limits(data, "k", 128, 40) is None
    assert other_limits(data, "k", 64, 40) == "kernel 'k' is compiled for (128, 1, 1) threads, its record says 64"
    assert other_limits(data, "k", 128, 41) == "kernel 'k' takes 40 registers a thread, its record says 41"
    assert other_limits(data, "j", 1, 1) is None
    assert other_limits(elf(REGISTERS_40, TWO, info("j", parameter(0, 0, 8))), "k", 128, 41) is None  # whose are they?


@pytest.mark.parametrize("data", [elf(info("k")), elf(info("k", UNSIZED)), header(), header(abi=9)])
def test_code_that_does_not_say(data: bytes) -> None:
    assert parameters(data, "k") is None
    assert other_parameters(data, "k", (8,)) is None
    assert other_limits(data, "k", 1, 1) is None


@pytest.mark.parametrize("cut", range(1, 12))
def test_an_attribute_that_ends_beyond_its_section(cut: int) -> None:
    data = elf(info("k", parameter(0, 0, 8)[:-cut]))
    assert other_parameters(data, "k", (8,)) == "what it says of kernel 'k' ends in the middle"
    assert other_limits(data, "k", 1, 1) == "what it says of itself ends in the middle"


@pytest.mark.parametrize("rows", [[(0, 0, 8), (1, 4, 4)], [(0, 0, 8), (2, 8, 4)], [(1, 0, 8)]])
def test_parameters_that_lie_on_each_other_or_are_missing(rows: list[tuple[int, int, int]]) -> None:
    told = other_parameters(elf(info("k", *(parameter(*row) for row in rows))), "k", (8, 4))
    assert told is not None
    assert f"has no parameter {1 if len(rows) == 2 else 0} of its own, and {len(rows)} in all" in told


def test_tables_beyond_the_file() -> None:
    data = elf(TWO)
    assert "sections, told at byte 64, are not within" in str(other_parameters(data[:150], "k", (8,)))
    assert "ends at byte" in str(other_parameters(data[:-1], "k", (8,)))
    many = elf(*(info(f"{i}{'n' * (MAX_NAME_CHARS - 1)}") for i in range(4)))
    assert len(str(other_parameters(many, "k", (8,)))) == cubin._MOST_CHARS


def test_a_name_that_no_record_can_have_is_passed_over() -> None:
    longest = "n" * MAX_NAME_CHARS
    assert longest in str(other_parameters(elf(info(longest)), "k", (8,)))
    assert "but none at all" in str(other_parameters(elf(info(longest + "n")), "k", (8,)))


def test_what_a_later_toolkit_says() -> None:
    with pytest.raises(UnknownAbi):
        read_header(header(abi=9))
