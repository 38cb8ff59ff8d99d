"""Publishing: the same bytes stay alone, links are replaced, and where it can't."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from pathlib import Path

import pytest
from descriptors import open_files

from pretuned.artifacts import publishing as module
from pretuned.artifacts.errors import HostError
from pretuned.artifacts.publishing import make_folder, publish, too_many_open


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
    before = open_files()
    for _ in range(3):
        with pytest.raises(HostError, match="Is a directory"):
            publish(tmp_path / "folder", b"x")
    assert open_files() == before


@pytest.mark.parametrize("where", ["missing/b", "file/b", "folder", "nul\0", "n" * 256])
def test_publish_where_it_can_not(tmp_path, where):
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "in").write_bytes(b"")
    with pytest.raises(HostError, match=r"can't write .* must exist") as caught:
        publish(tmp_path / where, b"x")
    assert "\n" not in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "folder"]


def left_by_a_dead_one(folder: Path) -> Path:
    path = folder / ".pretuned-0123456789abcdef.tmp"
    path.write_bytes(b"half")
    return path


def test_what_a_dead_publisher_left_is_removed_and_a_living_ones_is_not(tmp_path):
    stale, link = left_by_a_dead_one(tmp_path), tmp_path / ".pretuned-fedcba9876543210.tmp"
    link.symlink_to(stale)  # nobody of us makes one: it is left alone, as its target would be
    os.mkfifo(tmp_path / ".pretuned-2222222222222222.tmp")  # nothing is waited for
    (tmp_path / ".pretuned-0000000000000000.tmp").mkdir()
    others = [tmp_path / name for name in (".pretuned-0.tmp", "x.tmp", ".pretuned-0123456789abcdef.tmp.gz")]
    for other in others:
        other.touch()
    with stale.open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        publish(tmp_path / "b", b"one")
        assert stale.exists()
    before = open_files()
    publish(tmp_path / "b", b"two")
    assert not stale.exists()
    assert link.is_symlink()
    assert all(other.exists() for other in others)
    assert open_files() == before


def test_another_that_takes_a_new_file_for_stale_before_it_is_locked_does_no_harm(tmp_path, monkeypatch):
    removed: list[Path] = []

    def flock(fd: int, how: int, real=fcntl.flock) -> None:
        if not removed:
            removed.append(Path(f"/proc/self/fd/{fd}").readlink())
            module._remove_if_stale(removed[0])  # the other one
        real(fd, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    before = open_files()
    assert publish(tmp_path / "b", b"one")
    assert (tmp_path / "b").read_bytes() == b"one"
    assert [p.name for p in tmp_path.iterdir()] == ["b"]
    assert not removed[0].exists()
    assert open_files() == before


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    """Nobody can take a file for stale there: it is published all the same, and what others left stays."""

    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    stale = left_by_a_dead_one(tmp_path)
    monkeypatch.setattr(fcntl, "flock", flock)
    assert publish(tmp_path / "b", b"one")
    assert (tmp_path / "b").read_bytes() == b"one"
    assert stale.exists()


def test_a_folder_is_made_with_those_above_it(tmp_path):
    make_folder(tmp_path / "a" / "b" / "c")
    assert (tmp_path / "a" / "b" / "c").is_dir()
    make_folder(tmp_path / "a" / "b" / "c")
    make_folder("")
    make_folder("/")
    with pytest.raises(ValueError, match="null byte"):
        make_folder("\0")


def test_the_file_is_on_the_disk_before_its_name_and_its_name_before_publish_returns(tmp_path, monkeypatch):
    messages: list[str] = []

    def fsync(fd: int, real=os.fsync) -> None:
        messages.append("folder" if Path(f"/proc/self/fd/{fd}").is_dir() else "file")
        real(fd)

    def rename(source: Path, other: Path, real=os.rename) -> None:
        messages.append("rename")
        real(source, other)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    publish(tmp_path / "b", b"one")
    publish(tmp_path / "b", b"one")
    assert messages == ["file", "rename", "folder", "folder"]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE])
def test_what_is_needed_where_too_many_files_are_open(number):
    assert too_many_open(OSError(number, "")) == "More open files must be allowed: ulimit -n"
    for other in (OSError(errno.ENOSPC, ""), ValueError(), OSError()):
        assert too_many_open(other) == ""


def test_what_the_system_refused_is_reported_in_its_words(tmp_path):
    with pytest.raises(HostError, match=r"b' \(4 bytes\): No such file or directory\. The directory '.*no' must exist"):
        publish(tmp_path / "no" / "b", b"data")
    with pytest.raises(HostError, match="embedded null byte"):
        publish(f"{tmp_path}/a\0b/c", b"data")


AT_THE_SAME_TIME = """
import os, sys
from pretuned.artifacts.publishing import make_folder
def first(event, arguments):
    if event == "os.mkdir" and not os.path.isdir(arguments[0]) and len(made) < 2:
        made.append(arguments[0])
        os.mkdir(arguments[0])  # another process, a moment before
made = []
sys.addaudithook(first)
make_folder(sys.argv[1])
print(len(made), os.path.isdir(sys.argv[1]))
"""


def test_a_folder_that_another_makes_at_the_same_time(tmp_path):
    command = [sys.executable, "-c", AT_THE_SAME_TIME, str(tmp_path / "a" / "b")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stderr, done.stdout) == ("", "2 True\n")
