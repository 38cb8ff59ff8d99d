"""Locks among processes: writers alone, readers together."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import time

import pytest
from descriptors import open_files

from pretuned.artifacts.errors import HostError
from pretuned.artifacts.files.lock import lock, reading, release, take


def test_lock(tmp_path):
    with lock(tmp_path, 0) as held:
        assert held
        begin = time.perf_counter()
        with lock(tmp_path, 0.2) as again:
            assert not again
        assert 0.2 <= time.perf_counter() - begin < 10
        with pytest.raises(HostError, match="another process held it for 0 s"), lock(tmp_path, 0, required=True):
            pass
    with lock(tmp_path, 0, required=True) as held:
        assert held


def test_lock_passes_an_error_on_and_lets_go(tmp_path):
    with pytest.raises(KeyError) as caught, lock(tmp_path, 0):
        raise KeyError
    with lock(tmp_path, 0) as held:
        assert held
    assert caught.value.__traceback__  # which has all of the first one's frames


def test_lock_where_there_is_no_directory(tmp_path):
    with lock(tmp_path / "is" / "made", 0) as held:
        assert held
    with lock("/proc/self/nothing", 0) as held:
        assert not held
    told = (
        r"^can't lock '/proc/self/nothing/\.pretuned\.lock': No such file or directory\. The directory must be writable"
    )
    with pytest.raises(HostError, match=told), lock("/proc/self/nothing", 0, required=True):
        pass


def test_reading_waits_for_a_writer_and_shares_with_readers(tmp_path):
    with reading(tmp_path, 0.2), reading(tmp_path / "missing", 0.2):
        assert list(tmp_path.iterdir()) == []  # it writes nothing
    with lock(tmp_path, 0) as held:
        assert held
        begin = time.perf_counter()
        with reading(tmp_path, 0.2):
            assert 0.2 <= time.perf_counter() - begin < 10
    begin = time.perf_counter()
    with reading(tmp_path, 20), reading(tmp_path, 20):
        assert time.perf_counter() - begin < 10
        with lock(tmp_path, 0) as held:
            assert not held
    with lock(tmp_path, 0) as held:
        assert held


def test_reading_follows_no_link_and_lets_go_after_an_error(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / ".pretuned.lock").symlink_to(elsewhere)
    with reading(tmp_path, 0):
        pass
    assert not elsewhere.exists()
    elsewhere.touch()
    with elsewhere.open() as file, reading(tmp_path, 0):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody else has locked it
    (tmp_path / ".pretuned.lock").unlink()
    with lock(tmp_path, 0):
        pass
    with pytest.raises(KeyError), reading(tmp_path, 0):
        raise KeyError
    with lock(tmp_path, 0) as held:
        assert held


def test_a_lock_that_can_not_be_let_go_names_its_file(tmp_path):
    path = tmp_path / ".pretuned.lock"
    held = take(path, 0)
    os.close(held)
    with pytest.raises(HostError, match=rf"can't unlock '{path}': .*must have locks"):
        release(held, path)


@pytest.mark.parametrize("required", [False, True])
def test_a_reader_goes_on_where_its_lock_can_not_be_let_go(tmp_path, monkeypatch, required):
    """As on NFS whose lock server has gone: what was read is read; a writer says it."""

    real = fcntl.flock

    def refuse(fd, how):
        if how == fcntl.LOCK_UN:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        real(fd, how)

    read = []
    with contextlib.ExitStack() as stack:
        if required:
            stack.enter_context(pytest.raises(HostError, match=r"can't unlock '.*': No locks available"))
        with lock(tmp_path, 0, required=required) as held:
            assert held
            monkeypatch.setattr(fcntl, "flock", refuse)
            read.append("all")
    assert read == ["all"]
    monkeypatch.undo()


def test_what_is_wrong_where_it_can_not_be_locked_and_what_is_needed():
    needed = "The directory must be writable and have room"
    with pytest.raises(HostError, match=needed), lock("/proc/self/nothing", 0, required=True):
        pass


def test_a_locks_file_is_its_group_s_to_lock_and_nobody_elses_to_write(tmp_path):
    old = os.umask(0)
    try:
        with lock(tmp_path / "a", 0):
            assert (tmp_path / "a" / ".pretuned.lock").stat().st_mode & 0o7777 == 0o664
    finally:
        os.umask(old)


def test_a_reader_that_has_to_wait_leaves_no_descriptor(tmp_path):
    with lock(tmp_path, 0) as held:
        assert held
        before = open_files()
        with reading(tmp_path, 0):
            pass
        assert open_files() == before


def test_a_lock_file_that_is_removed_guards_nothing(tmp_path):
    """Whoever waits for it takes the new one, as everybody does."""
    with lock(tmp_path, 0) as held:
        assert held
        (tmp_path / ".pretuned.lock").unlink()
        with lock(tmp_path, 0) as again:
            assert again
            with lock(tmp_path, 0) as third:
                assert not third


def test_a_child_of_fork_does_not_hold_on_to_a_lock(tmp_path):
    with lock(tmp_path, 0):
        child = os.fork()
        if not child:
            time.sleep(30)
            os._exit(0)
    with lock(tmp_path, 0) as held:
        assert held
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)


def test_filelock_takes_the_same_lock(tmp_path):
    """An older pretuned used it."""
    filelock = pytest.importorskip("filelock")
    with lock(tmp_path, 0), pytest.raises(filelock.Timeout):
        filelock.FileLock(tmp_path / ".pretuned.lock").acquire(timeout=0)
    with filelock.FileLock(tmp_path / ".pretuned.lock"), lock(tmp_path, 0) as held:
        assert not held
