"""Small files with a digest of their own."""

from __future__ import annotations

import hashlib
import os

import pytest
from descriptors import open_files

from pretuned.artifacts.errors import BundleUntrusted
from pretuned.artifacts.limits import MAX_BLOB_BYTES
from pretuned.artifacts.publishing import read_checked, read_or_say, write_checked


def test_blob(tmp_path):
    path = tmp_path / "blob"
    assert read_checked(path) is None
    for payload in (b"", b"x", os.urandom(10000)):
        write_checked(path, payload)
        assert read_checked(path) == payload
    data = path.read_bytes()
    for broken in (b"", data[:-1], data[:47], data + b"x", b"P" + data[1:], data[:20] + b"\0" + data[21:]):
        path.write_bytes(broken)
        assert read_checked(path) is None
    path.write_bytes(data)
    assert read_checked(path) == payload
    path.chmod(0o666)
    assert read_checked(path) is None


def test_blob_that_is_no_file(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    assert read_checked(tmp_path / "fifo") is None
    assert read_checked(tmp_path) is None
    write_checked(tmp_path / "giant", b"x")
    os.truncate(tmp_path / "giant", 1 << 40)
    assert read_checked(tmp_path / "giant") is None
    for name, real in (("loop", "loop"), ("device", "/dev/zero")):
        (tmp_path / name).symlink_to(real)
        assert read_checked(tmp_path / name) is None


def test_a_directory_costs_no_descriptor(tmp_path):
    before = open_files()
    for _ in range(3):
        assert read_checked(tmp_path) is None
    assert open_files() == before


@pytest.mark.slow
def test_the_largest_payload(tmp_path):
    write_checked(tmp_path / "b", b"x")
    magic = (tmp_path / "b").read_bytes()[: -1 - hashlib.sha256().digest_size]
    for size, fits in ((MAX_BLOB_BYTES, True), (MAX_BLOB_BYTES + 1, False)):
        head = magic + hashlib.sha256(bytes(size)).digest()
        (tmp_path / "b").write_bytes(head)
        os.truncate(tmp_path / "b", len(head) + size)
        payload = read_checked(tmp_path / "b")
        assert (payload is not None) is fits
        assert payload is None or len(payload) == size


def test_what_others_may_write_by_the_time_it_is_open_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "blob"
    write_checked(path, b"x")

    def opened(name: str, *how: int, real=os.open, **more: int) -> int:
        if name == str(path):  # once its place was checked
            path.chmod(0o666)
        return real(name, *how, **more)

    monkeypatch.setattr(os, "open", opened)
    with pytest.raises(BundleUntrusted, match="everybody can write it"):
        read_or_say(path)
