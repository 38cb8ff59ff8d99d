"""Every format ever released reads, for ever; every other number gets a word on what to do."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import pytest

from pretuned.artifacts import limits
from pretuned.artifacts.errors import BundleCorrupt, BundleTooNew, BundleTooOld
from pretuned.artifacts.files.bundle_file import open_bundle
from pretuned.artifacts.format import codec, wire

FOLDER = Path(__file__).parents[1] / "golden"
# Add to this list, never change it: a released format reads for ever.
RELEASED = {
    "format1-edges.msgpack": "3834146b465ef71c5a81722585189f90f5b794c9554b65d9ccdb71c77734d41a",
    "format1-gpus.msgpack": "399b8b9003ed39109276dd9178a41cbdbbefdfa3e564288d0ba84d517a1696d1",
    "format1-medium.msgpack": "7b9ce1dc5d150529e6b8446146bae41656e4300c5cea8956e5498df4b3c4028a",
    "format1-small.msgpack": "cb5876af0af4bcaa0166892d5d803ed96ae7ec5ad9d63cc81d767e5d88662b1c",
}


def test_no_golden_file_is_unlisted():
    assert sorted(path.name for path in FOLDER.glob("*.msgpack")) == sorted(RELEASED)


@pytest.mark.parametrize("name", RELEASED)
def test_released_formats_read(name):
    data = (FOLDER / name).read_bytes()
    assert hashlib.sha256(data).hexdigest() == RELEASED[name], "a golden file was changed"
    bundle = codec.decode(data, name)
    assert bundle.target
    if name.startswith(f"format{limits.FORMAT}-"):
        assert codec.encode(bundle) == data


@pytest.mark.parametrize(
    ("version", "error", "message"),
    [
        (2, BundleTooNew, "format 2, this version reads 1. Upgrade pretuned"),
        (3, BundleTooNew, "format 3, this version reads 1. Upgrade pretuned"),
        (2**32 - 1, BundleTooNew, "format 4294967295, this version reads 1"),
        (0, BundleCorrupt, "format 0, which never was"),
    ],
)
def test_other_versions(tmp_path, version, error, message):
    data = bytearray((FOLDER / "format1-small.msgpack").read_bytes())
    struct.pack_into(">I", data, 11, version)
    data += b"whatever a later format has"
    path = tmp_path / "b.msgpack"
    path.write_bytes(data)
    for read in (lambda: open_bundle(path), lambda: codec.decode(bytes(data), str(path))):
        with pytest.raises(error) as caught:
            read()
        assert message in str(caught.value)
        assert str(path) in str(caught.value)


def test_a_format_that_is_no_longer_read(monkeypatch):
    monkeypatch.setattr(wire, "FORMAT", 5)
    monkeypatch.setattr(wire, "OLDEST_FORMAT", 3)
    data = (FOLDER / "format1-small.msgpack").read_bytes()
    with pytest.raises(BundleTooOld, match=r"format 1, this version reads 3-5. Rebuild"):
        codec.decode(data, "old.msgpack")
