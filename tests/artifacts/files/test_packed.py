"""Bundles pressed with xz: the same content, and nothing but an error of the tree where they are damaged."""

from __future__ import annotations

import hashlib
import lzma
from pathlib import Path

import made
import pytest

from pretuned.artifacts.errors import BundleCorrupt, BundleUntrusted
from pretuned.artifacts.files import packed
from pretuned.artifacts.files.bundle_file import open_bundle
from pretuned.artifacts.format.codec import encode

SHIPPED = Path(__file__).parents[3] / "artifacts" / "bundles" / "catalogue-sm80.msgpack"


@pytest.fixture
def data() -> bytes:
    return encode(made.bundle({made.PROBLEM: [made.modelled(64, 0)]}))


def test_a_packed_bundle_is_the_bundle(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "one.msgpack.xz"
    path.write_bytes(packed.pack(data))
    with open_bundle(path) as bundle:
        assert encode(bundle.load()) == data
        assert bundle.path == str(path)
    pin = hashlib.sha256(path.read_bytes()).hexdigest()
    with open_bundle(path, sha256=pin) as bundle:
        assert bundle.size_bytes == len(data)
    with pytest.raises(BundleUntrusted, match="the pin says"):
        open_bundle(path, sha256="0" * 64)


@pytest.mark.parametrize("damage", ["cut", "appended", "flipped", "other", "empty", "inside"])
def test_what_is_damaged_is_refused(tmp_path: Path, data: bytes, damage: str) -> None:
    whole = packed.pack(data)
    changed = {
        "cut": whole[:-20],
        "appended": whole + b"\0\0\0\0more",
        "flipped": whole[:40] + bytes([whole[40] ^ 1]) + whole[41:],
        "other": data,
        "empty": b"",
        "inside": packed.pack(data[:-1]),
    }
    path = tmp_path / "one.msgpack.xz"
    path.write_bytes(changed[damage])
    with pytest.raises(BundleCorrupt, match=r"one\.msgpack\.xz"):
        open_bundle(path)


def test_it_unpacks_to_what_its_header_says(data: bytes) -> None:
    assert packed.unpack(lzma.compress(data), "it") == data
    with pytest.raises(BundleCorrupt, match=f"more than the {len(data)} bytes that its header says"):
        packed.unpack(lzma.compress(data + b"\0"), "it")
    for short in (b"", data[:62]):
        with pytest.raises(BundleCorrupt, match=f"file is {len(short)} bytes, the preamble alone says 63"):
            packed.unpack(lzma.compress(short), "it")


def test_one_that_ends_before_its_header_says(tmp_path: Path, data: bytes) -> None:
    for count in (63, 64, len(data) - 1):
        (tmp_path / "one.msgpack.xz").write_bytes(lzma.compress(data[:count]))
        with pytest.raises(BundleCorrupt, match=f"file is {count} bytes, header says {len(data)}|end of stream"):
            open_bundle(tmp_path / "one.msgpack.xz")


def test_others_can_not_write_it(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "one.msgpack.xz"
    path.write_bytes(packed.pack(data))
    path.chmod(0o666)
    with pytest.raises(BundleUntrusted, match="everybody can write it"):
        open_bundle(path)


def test_code_is_pressed_harder_than_xz_does_unasked() -> None:
    code = SHIPPED.read_bytes()[-400_000:]  # cubins lie behind the index
    assert len(packed.pack(code)) < 0.97 * len(lzma.compress(code, preset=9 | lzma.PRESET_EXTREME))
    assert packed.pack(code) == packed.pack(code)
    whole = SHIPPED.read_bytes()
    assert packed.unpack(packed.pack(whole), "it") == whole
