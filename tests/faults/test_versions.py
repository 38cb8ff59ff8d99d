"""Every format ever released reads, for ever; every other number gets a word on what to do."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import pytest

from pretuned.artifacts import codec, limits, wire
from pretuned.artifacts.bundle_file import open_bundle
from pretuned.artifacts.errors import BundleCorrupt, BundleTooNew, BundleTooOld

FOLDER = Path(__file__).parents[1] / "golden"
# Add to this list, never change it: a released format reads for ever. (Format 1 was never released.)
RELEASED = {
    "format2-edges.msgpack": "628af806ff1e26e03803597256c4d2aa213776ad68a192733f77c6780292d0ad",
    "format2-gpus.msgpack": "ab0df5dddd0074c49e335457d6b880d77a8b10bd7417ff1ad62f84251475130e",
    "format2-medium.msgpack": "8db8de927f9755e4ac61638f5b17f72698591d3dfd50199823d5d1768d05c854",
    "format2-plans.msgpack": "c23e5c1743d6434132cb1b2827a87568cf761f2ffc6d16045fb97668db434230",
    "format2-small.msgpack": "50e2007e81eb827573e5804367ea07833427e536acc084fb7bdef631b952a346",
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
        (1, BundleTooOld, "format 1, this version reads 2. Build it again with `aot build`"),
        (3, BundleTooNew, "format 3, this version reads 2. Upgrade pretuned"),
        (2**32 - 1, BundleTooNew, "format 4294967295, this version reads 2"),
        (0, BundleCorrupt, "format 0, which never was"),
    ],
)
def test_other_versions(tmp_path, version, error, message):
    data = bytearray((FOLDER / "format2-small.msgpack").read_bytes())
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
    data = (FOLDER / "format2-small.msgpack").read_bytes()
    with pytest.raises(BundleTooOld, match=r"format 2, this version reads 3-5. Build it again"):
        codec.decode(data, "old.msgpack")
