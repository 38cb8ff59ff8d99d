"""POSIX ACLs as the kernel has them, and what is none that is known. Those that let others write: tests/attacks."""

from __future__ import annotations

import errno
import os
import struct

import pytest

from pretuned.artifacts.errors import BundleUnreadable
from pretuned.artifacts.files import trust
from pretuned.artifacts.files.trust import AclWriters, acl_writers

NAME = "system.posix_acl_access"


def entries(*rows: tuple[int, int, int]) -> bytes:
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *row) for row in rows)


def test_a_file_without_one(tmp_path):
    (tmp_path / "file").touch()
    assert acl_writers(str(tmp_path / "file")) is None


def test_who_may_write(tmp_path):
    """The owner, user 4242 (rwx), the file's group (r), group 77 (rw), a mask, others."""
    path = tmp_path / "file"
    path.touch()
    none = 2**32 - 1
    rows = [(1, 6, none), (2, 7, 4242), (4, 4, none), (8, 6, 77), (16, 7, none), (32, 4, none)]
    os.setxattr(path, NAME, entries(*rows))
    assert acl_writers(str(path)) == AclWriters(frozenset({4242}), frozenset({77}), False)
    with path.open() as file:
        assert acl_writers(file.fileno()) == acl_writers(str(path))
    rows[4] = (16, 4, none)  # the mask takes it away from all of them
    os.setxattr(path, NAME, entries(*rows))
    assert acl_writers(str(path)) == AclWriters(frozenset(), frozenset(), False)


def test_the_files_own_group_may_write(tmp_path):
    """As the mode alone can't say it, whose group bits are then the mask."""
    path = tmp_path / "file"
    path.touch()
    none = 2**32 - 1
    rows = [(1, 6, none), (2, 4, 4242), (4, 6, none), (16, 6, none), (32, 4, none)]
    os.setxattr(path, NAME, entries(*rows))
    assert acl_writers(str(path)) == AclWriters(frozenset(), frozenset(), True)
    rows[3] = (16, 4, none)
    os.setxattr(path, NAME, entries(*rows))
    assert acl_writers(str(path)) == AclWriters(frozenset(), frozenset(), False)


@pytest.mark.parametrize("value", [b"", b"\1\0\0\0", struct.pack("<I", 3) + bytes(8), entries((1, 6, 0)) + b"x"])
def test_what_is_none(value, monkeypatch):
    """(The kernel makes no such ones; a file system in user space may.)"""
    monkeypatch.setattr(os, "getxattr", lambda file, name: value)
    with pytest.raises(OSError, match="of no known form"):
        acl_writers("/")


def test_one_that_can_not_be_read_is_not_taken_for_none(tmp_path, monkeypatch):
    def refused(file, name):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    path = tmp_path / "file"
    path.touch()
    path.chmod(0o664)  # without group-write it is not asked for
    monkeypatch.setattr(os, "getxattr", refused)
    with pytest.raises(OSError, match="Input/output error"):
        acl_writers(str(path))
    with pytest.raises(BundleUnreadable, match="can't be read: Input/output error"):
        trust.check(str(path), path.stat(), str(path))


def test_where_there_are_no_extended_attributes(monkeypatch):
    monkeypatch.delattr(os, "getxattr")
    assert acl_writers("/") is None
