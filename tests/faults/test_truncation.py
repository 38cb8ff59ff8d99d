"""Every prefix, bytes appended, every flipped bit: of the golden bundles, with both readers."""

from __future__ import annotations

from pathlib import Path

import pytest

from pretuned.artifacts import codec
from pretuned.artifacts.bundle_file import open_bundle
from pretuned.artifacts.errors import BundleCorrupt, BundleError, BundleTooNew

GOLDEN = {path.stem: path for path in sorted((Path(__file__).parents[1] / "golden").glob("*.msgpack"))}


def lazily(path: Path) -> None:
    """Open, and load every cubin."""
    with open_bundle(path) as file:
        for i in range(file.variant_count):
            file.cubin(i)


@pytest.mark.parametrize("name", GOLDEN)
def test_every_prefix(tmp_path, name):
    data = GOLDEN[name].read_bytes()
    path = tmp_path / "b.msgpack"
    for size in range(len(data) - 1, -1, -1):
        message = f"file is {size} bytes, " + (
            f"header says {len(data)}" if size >= 63 else "the preamble alone says 63"
        )
        with pytest.raises(BundleCorrupt) as strict:
            codec.decode(data[:size], "b")
        assert message in str(strict.value)
        if size % 7 == 0 or size < 70:
            path.write_bytes(data[:size])
            with pytest.raises(BundleCorrupt) as lazy:
                open_bundle(path)
            assert message in str(lazy.value)


@pytest.mark.parametrize("name", GOLDEN)
@pytest.mark.parametrize("more", [b"\0", b"\xc0", bytes(4096)])
def test_bytes_appended(tmp_path, name, more):
    data = GOLDEN[name].read_bytes()
    path = tmp_path / "b.msgpack"
    path.write_bytes(data + more)
    for read in (lambda: open_bundle(path), lambda: codec.decode(data + more, "b")):
        with pytest.raises(BundleCorrupt, match=f"file is {len(data) + len(more)} bytes, header says {len(data)}"):
            read()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["format2-small", "format2-edges"])
def test_every_flipped_bit(tmp_path, name):
    data = bytearray(GOLDEN[name].read_bytes())
    assert len(data) < 4096
    path = tmp_path / "b.msgpack"
    path.write_bytes(data)
    lazily(path)
    with path.open("r+b", buffering=0) as file:
        for at in range(len(data)):
            for bit in range(8):
                file.seek(at)
                file.write(bytes((data[at] ^ 1 << bit,)))
                expected: type[BundleError] = BundleCorrupt
                if 11 <= at < 15 and (at, bit) != (14, 1):  # the version field; 2 ^ 2 is 0, which never was
                    expected = BundleTooNew
                with pytest.raises(expected):
                    lazily(path)
            file.seek(at)
            file.write(bytes((data[at],)))
    lazily(path)
