"""The preamble field by field, and msgpack that is no form of ours."""

from __future__ import annotations

import struct
from pathlib import Path

import golden_bundles
import msgpack
import pytest

from pretuned.artifacts import codec
from pretuned.artifacts.errors import BundleCorrupt
from pretuned.artifacts.limits import MAX_FILE_BYTES, MAX_INDEX_BYTES, MAX_NAME_CHARS
from pretuned.artifacts.wire import PREAMBLE_BYTES, Malformed, begins_with, pack, parse, read_preamble, unpack

SMALL = codec.encode(golden_bundles.small())


def preamble(at: int = 0, form: str = "", *values: int) -> bytes:
    """Return a golden bundle's preamble with these values packed in at a place."""
    head = bytearray(SMALL[:PREAMBLE_BYTES])
    struct.pack_into(f">{form}", head, at, *values)
    return bytes(head)


def test_a_preamble() -> None:
    parsed = read_preamble(preamble(), len(SMALL), "b")
    assert (parsed.file_bytes, parsed.index_bytes) == (len(SMALL), len(SMALL) - 16 - 5 - PREAMBLE_BYTES)
    assert parsed.cubins_at == len(SMALL) - 16
    assert parsed.digest == SMALL[31:63]
    assert read_preamble(preamble(16, "Q", MAX_FILE_BYTES), MAX_FILE_BYTES, "b").file_bytes == MAX_FILE_BYTES
    most = preamble(16, "QBI", MAX_INDEX_BYTES + 68, 0xCE, MAX_INDEX_BYTES)
    assert read_preamble(most, MAX_INDEX_BYTES + 68, "b").index_bytes == MAX_INDEX_BYTES


@pytest.mark.parametrize(
    ("head", "size", "why"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d", 130, "it is a Git LFS pointer, not the bundle"),
        (preamble(0, "B", 0x94), len(SMALL), "it is no bundle: it begins with "),
        (preamble(9, "B", 0x20), len(SMALL), "it is no bundle: it begins with "),
        (preamble(10, "B", 0xCD), len(SMALL), "it is no bundle: it begins with "),
        (preamble(15, "B", 0xCE), len(SMALL), "the preamble's msgpack headers are not those of a bundle"),
        (preamble(24, "B", 0xCF), len(SMALL), "the preamble's msgpack headers are not those of a bundle"),
        (preamble(29, "B", 0xC5), len(SMALL), "the preamble's msgpack headers are not those of a bundle"),
        (preamble(30, "B", 0x21), len(SMALL), "the preamble's msgpack headers are not those of a bundle"),
        (preamble(16, "Q", 5), len(SMALL), f"file is {len(SMALL)} bytes, header says 5"),
        (
            preamble(16, "Q", MAX_FILE_BYTES + 1),
            MAX_FILE_BYTES + 1,
            f"file is {MAX_FILE_BYTES + 1} bytes, the limit is",
        ),
        (preamble(25, "I", MAX_INDEX_BYTES + 1), len(SMALL), f"index is {MAX_INDEX_BYTES + 1} bytes, the limit is"),
        (preamble(25, "I", len(SMALL) - 67), len(SMALL), f"header says an index of {len(SMALL) - 67}"),
        (SMALL[:62], len(SMALL), "the preamble alone says 63"),
    ],
)
def test_a_preamble_that_is_refused(head: bytes, size: int, why: str) -> None:
    with pytest.raises(BundleCorrupt) as caught:
        read_preamble(head, size, "here")
    assert str(caught.value).startswith("bundle 'here': ")
    assert why in str(caught.value)


def test_an_index_may_end_where_the_cubins_header_begins() -> None:
    """The smallest file that there could be: its index is refused later, and its sizes are not."""
    index = len(SMALL) - PREAMBLE_BYTES - 5
    assert read_preamble(preamble(25, "I", index), len(SMALL), "b").cubins_at == len(SMALL)


@pytest.mark.parametrize(
    "value", [0, 1, 127, 128, 2**16, -1, "a", b"a", [], [1, [2]], {"a": 1}, None, True, 1.5, "x" * 200]
)
def test_what_pack_writes_is_what_unpack_reads(value: object) -> None:
    assert unpack(pack(value), max_items=64) == value
    assert pack(value) == msgpack.packb(value)


@pytest.mark.parametrize("value", [(1, 2), {1, 2}, Path("a"), 1 << 64])
def test_what_pack_does_not_write(value: object) -> None:
    with pytest.raises((TypeError, OverflowError)):
        pack(value)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x01\x01",
        b"\x92\x01",  # nothing, no type, two values, one of two
        b"\xcd\x00\x01",
        b"\xd9\x01a",
        b"\xdc\x00\x01\x01",
        b"\xc5\x00\x01a",  # longer than need be
        b"\x82\xa1a\x01\xa1a\x01",  # a key twice
        b"\x81\x90\x01",
        b"\x81\x01\x01",  # keys that are no text
        b"\xd4\x01a",
        b"\xa2\xff\xff",  # an extension, no UTF-8
        b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\x91" * 2000 + b"\x90",
    ],
)
def test_what_unpack_refuses(data: bytes) -> None:
    with pytest.raises(Malformed, match=r"^not canonical msgpack: "):
        unpack(data, max_items=4)


def test_a_msgpack_that_packs_less_deep_than_it_unpacks(monkeypatch: pytest.MonkeyPatch) -> None:
    class Shallow:
        def __init__(self, **_: object) -> None: ...

        def pack(self, _: object) -> bytes:
            raise ValueError("recursion limit exceeded")

    deep = b"\x91" * 400 + b"\x90"
    assert pack(unpack(deep, max_items=1)) == deep
    monkeypatch.setattr(msgpack, "Packer", Shallow)
    with pytest.raises(Malformed, match="not canonical msgpack: ValueError: recursion limit exceeded"):
        unpack(deep, max_items=1)


def test_limits_of_what_is_parsed() -> None:
    for size, kind in ((5, [1] * 5), (65, {str(i): 1 for i in range(65)}), (201, "x" * 201), (65, b"x" * 65)):
        with pytest.raises(Malformed):
            parse(msgpack.packb(kind), max_items=4)
        assert len(kind) == size
    assert parse(msgpack.packb([1] * 4), max_items=4) == [1] * 4
    assert parse(msgpack.packb(b"x" * 65), max_items=4, max_bin_bytes=65) == b"x" * 65
    assert len(parse(msgpack.packb({str(i): 1 for i in range(65)}), max_items=4, max_pairs=65)) == 65  # type: ignore[arg-type]


def test_the_first_fields_of_a_map() -> None:
    data = msgpack.packb({"a": 1, "b": [2, 3], "c": 4})
    assert begins_with(data, ("a", "b"), max_items=2) == [1, [2, 3]]
    assert begins_with(data[:-1], ("a", "b"), max_items=2) == [1, [2, 3]]
    assert begins_with(data, ("a", "b", "c"), max_items=2) == [1, [2, 3], 4]
    for names, most, cut in (
        (("b",), 2, 0),
        (("a", "c"), 2, 0),
        (("a", "b", "c", "d"), 2, 0),
        (("a", "b"), 1, 0),
        (("a", "b", "c"), 2, 1),
    ):
        assert begins_with(data[: len(data) - cut], names, max_items=most) is None
    assert begins_with(b"", ("a",), max_items=1) is None
    assert begins_with(b"\x90", ("a",), max_items=1) is None
    assert begins_with(msgpack.packb({"a": {"b": 1}}), ("a",), max_items=1) == [{"b": 1}]
    assert begins_with(msgpack.packb({"a": {1: 1}}), ("a",), max_items=1) is None
    assert begins_with(msgpack.packb({"a": b"x" * 64}), ("a",), max_items=1) == [b"x" * 64]
    assert begins_with(msgpack.packb({"a": b"x" * 65}), ("a",), max_items=1) is None


def test_a_glance_has_limits_too():
    def glanced(value: object) -> object:
        return begins_with(msgpack.packb({"a": value}), ["a"], max_items=8)

    assert glanced([0] * 8) == [[0] * 8]
    assert glanced([0] * 9) is None
    most = {f"k{i}": 0 for i in range(64)}
    assert glanced(most) == [most]
    assert glanced(most | {"one more": 0}) is None
    assert glanced(bytes(64)) == [bytes(64)]
    assert glanced(bytes(65)) is None
    assert glanced("x" * MAX_NAME_CHARS) == ["x" * MAX_NAME_CHARS]
    assert glanced("x" * (MAX_NAME_CHARS + 1)) is None
    assert glanced(msgpack.ExtType(1, b"")) in (None, [msgpack.ExtType(1, b"")])
    assert glanced(msgpack.ExtType(1, b"x")) is None
