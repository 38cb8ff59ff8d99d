"""Publishing: the same bytes stay alone, links are replaced, and where it can't."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pretuned.artifacts.errors import HostError
from pretuned.artifacts.files.publish import publish


def test_publish(tmp_path):
    path = tmp_path / "b.msgpack"
    old = os.umask(0o077)
    try:
        publish(path, b"one")
        publish(path, b"two")
    finally:
        os.umask(old)
    assert path.read_bytes() == b"two"
    assert path.stat().st_mode & 0o7777 == 0o644
    assert [p.name for p in tmp_path.iterdir()] == ["b.msgpack"]


def test_publish_leaves_the_same_bytes_alone(tmp_path):
    path = tmp_path / "b.msgpack"
    assert publish(path, b"same")
    before = path.stat()
    assert not publish(path, b"same")
    after = path.stat()  # (but for when it was read)
    assert (after.st_ino, after.st_mtime_ns, after.st_ctime_ns) == (
        before.st_ino,
        before.st_mtime_ns,
        before.st_ctime_ns,
    )
    path.chmod(0o600)
    assert publish(path, b"same")
    assert path.stat().st_mode & 0o7777 == 0o644
    publish(path, b"sane")
    assert path.read_bytes() == b"sane"


def test_publish_replaces_a_link_and_not_its_target(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_bytes(b"old")
    target.chmod(0o644)
    link.symlink_to(target)
    assert publish(link, b"old")
    assert not link.is_symlink()
    link.unlink()
    link.symlink_to(target)
    assert publish(link, b"new")
    assert target.read_bytes() == b"old"
    assert not link.is_symlink()
    assert link.read_bytes() == b"new"


def test_publish_an_empty_file(tmp_path):
    publish(tmp_path / "empty", b"")
    assert (tmp_path / "empty").read_bytes() == b""


def test_publish_over_a_directory_costs_no_descriptor(tmp_path):
    (tmp_path / "folder").mkdir()
    before = sorted(Path("/proc/self/fd").iterdir())
    for _ in range(3):
        with pytest.raises(HostError, match="Is a directory"):
            publish(tmp_path / "folder", b"x")
    assert sorted(Path("/proc/self/fd").iterdir()) == before


@pytest.mark.parametrize("where", ["missing/b", "file/b", "folder", "nul\0", "n" * 256])
def test_publish_where_it_can_not(tmp_path, where):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "in").write_bytes(b"")
    with pytest.raises(HostError, match=r"can't write .* must exist") as caught:
        publish(tmp_path / where, b"x")
    assert "\n" not in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]
