"""Locks among processes: writers alone, readers together."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from descriptors import open_files

from pretuned.artifacts.errors import HostError
from pretuned.artifacts.locking import cache_fault, check_cache, lock, no_locks, reading, release, take


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
    message = (
        r"^can't lock '/proc/self/nothing/\.pretuned\.lock': No such file or directory\. The directory must be writable"
    )
    with pytest.raises(HostError, match=message), lock("/proc/self/nothing", 0, required=True):
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
    (fd,) = (link for link in Path("/proc/self/fd").iterdir() if link.is_symlink() and link.readlink() == path)
    os.close(int(fd.name))
    with pytest.raises(HostError, match=rf"can't unlock '{path}': .*must have locks"):
        release(held, path)


@pytest.mark.parametrize("required", [False, True])
def test_a_reader_goes_on_where_its_lock_can_not_be_let_go(tmp_path, monkeypatch, required):
    """On NFS whose lock server has gone a reader keeps what it read, and a writer reports an error."""

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


@pytest.mark.parametrize("umask", [0, 0o022, 0o077])
def test_a_locks_file_is_its_group_s_to_lock_and_nobody_elses_to_write(tmp_path, umask):
    old = os.umask(umask)
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


def test_a_lock_is_flock_s_as_in_every_version(tmp_path):
    with lock(tmp_path, 0), (tmp_path / ".pretuned.lock").open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with (tmp_path / ".pretuned.lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with lock(tmp_path, 0) as held:
            assert not held


def test_a_lock_follows_no_link_and_waits_for_no_fifo(tmp_path):
    for name in ("link", "fifo"):
        (tmp_path / name).mkdir()
    (tmp_path / "link" / ".pretuned.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(HostError, match=r"can't lock .*link"), lock(tmp_path / "link", 0, required=True):
        pass
    assert not (tmp_path / "elsewhere").exists()
    os.mkfifo(tmp_path / "fifo" / ".pretuned.lock")
    begin = time.perf_counter()
    with lock(tmp_path / "fifo", 0):  # (versions of filelock differ in whether it can be locked)
        assert time.perf_counter() - begin < 10


def test_another_thread_lets_go_of_a_lock(tmp_path):
    path = tmp_path / ".pretuned.lock"
    held = take(path, 0)
    thread = threading.Thread(target=release, args=(held, path))
    thread.start()
    thread.join()
    with lock(tmp_path, 0) as again:
        assert again


def test_a_child_of_fork_that_lets_go_leaves_its_parent_the_lock(tmp_path):
    path = tmp_path / ".pretuned.lock"
    held = take(path, 0)
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            release(held, path)
        os._exit(0)
    os.waitpid(child, 0)
    with lock(tmp_path, 0) as again:
        assert not again
    release(held, path)


AS_USER = 34567
NOTES = """
import filelock, logging, os, sys  # filelock as root: the user may not be able to read root's Python
from small_bundles import ON_A100, SPECS, variant
from pretuned.aot.compile.cache import CompileCache, default_dir
from pretuned.runtime import self_test_results

logging.basicConfig(level=logging.WARNING, format="%(message)s")
os.setgid(int(sys.argv[1]))
os.setuid(int(sys.argv[1]))
for name in (b"one", b"two"):
    self_test_results.note(variant(SPECS[0], name), ON_A100, self_test_results.result_of_today(True))
cache = CompileCache(default_dir())
cache.put(SPECS[0], 80, None)
print(cache.trouble)
"""


@pytest.fixture
def home(tmp_path):
    """A user's home, and what a process that is or is not root's says which keeps something there."""
    if os.geteuid():
        pytest.skip("needs root to be two users")
    for parent in (tmp_path, *tmp_path.parents):  # pytest's own are 0700
        if parent.stat().st_uid == 0 and not parent.stat().st_mode & 0o001:
            parent.chmod(0o711)
    home = tmp_path / "home"
    home.mkdir()
    os.chown(home, AS_USER, AS_USER)
    return home


def kept_by(user, home):
    support = Path(__file__).parents[1] / "support"
    environment = {**os.environ, "HOME": str(home), "PYTHONPATH": str(support)}
    environment.pop("XDG_CACHE_HOME", None)
    command = [sys.executable, "-c", NOTES, str(user)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return done.stdout.strip(), [line for line in done.stderr.splitlines() if line.startswith("pretuned: ")]


@pytest.mark.slow
def test_root_with_a_users_home_leaves_nothing_there(home):
    """``sudo`` that keeps HOME must not create root's files there: the user could not write them any more."""
    trouble, (line,) = kept_by(0, home)
    assert list(home.iterdir()) == []
    assert line == (
        f"pretuned: '{home}' belongs to user {AS_USER} and this process runs as root: nothing is kept in "
        f"'{home}/.cache/pretuned'. Run it as that user, or with a HOME (XDG_CACHE_HOME) of root's: sudo -H"
    )
    assert trouble == line.removeprefix("pretuned: ").replace("/pretuned'", "/pretuned/compiled'")


@pytest.mark.slow
@pytest.mark.parametrize("what", [".cache/pretuned", ".cache/pretuned/.pretuned.lock", ".cache"])
def test_what_root_left_in_a_users_cache_is_reported_with_the_fix(what, home):
    broken, overlay = home / what, home / ".cache" / "pretuned"
    overlay.mkdir(parents=True)
    (overlay / ".pretuned.lock").touch()
    for path in (overlay.parent, overlay, overlay / ".pretuned.lock"):
        if not path.is_relative_to(broken):
            os.chown(path, AS_USER, AS_USER)
    _, lines = kept_by(AS_USER, home)
    (line,) = (line for line in lines if "belongs to root" in line)
    fix = line.partition(" Run: sudo ")[2]
    assert fix == f"chown -R {AS_USER} {broken}"
    assert not list(overlay.glob("*.results"))
    subprocess.run(fix, shell=True, check=True)
    _, lines = kept_by(AS_USER, home)
    assert lines == []
    (file,) = overlay.glob("*.results")
    assert file.stat().st_uid == AS_USER


@contextlib.contextmanager
def effective(user):
    os.seteuid(user)
    try:
        yield
    finally:
        os.seteuid(0)


def test_whose_cache_it_is(home, caplog):
    overlay = home / ".cache" / "pretuned"
    for _ in range(2):
        with pytest.raises(HostError, match=f"'{home}' belongs to user {AS_USER} and this process runs as root"):
            check_cache(overlay)
    assert len(caplog.records) == 1
    with effective(AS_USER):
        assert cache_fault(overlay) == ""
        assert cache_fault(Path("/.cache/pretuned")) == ""  # nothing there is this user's
        check_cache(overlay)
    overlay.mkdir(parents=True)
    with effective(AS_USER):
        assert cache_fault(overlay).endswith(f"Run: sudo chown -R {AS_USER} {home / '.cache'}")
    overlay.parent.chmod(0o777)
    overlay.chmod(0o777)  # it is root's, and the user may write there
    with effective(AS_USER):
        assert cache_fault(overlay) == ""


@pytest.mark.parametrize(
    ("number", "goes_on"),
    [
        (errno.ENOSYS, True),
        (errno.EOPNOTSUPP, True),
        (errno.ENOLCK, True),
        (errno.EIO, False),
        (errno.ESTALE, False),
    ],
)
def test_a_lock_that_the_file_system_refuses(tmp_path, monkeypatch, number, goes_on):
    """(``tests/faults/test_locks.py`` has the system refuse it.)"""

    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    before = open_files()
    with lock(tmp_path, 0) as held:
        assert not held
    refused = pytest.raises(HostError, match=f"can't lock .*: {os.strerror(number)}")
    with contextlib.nullcontext() if goes_on else refused, lock(tmp_path, 0, required=True) as held:
        assert not held
    assert open_files() == before
    assert str(tmp_path) in no_locks(tmp_path)


def test_a_lock_file_that_is_removed_while_it_is_locked(tmp_path, monkeypatch):
    real, seen = fcntl.flock, []

    def removed(fd, how):
        real(fd, how)
        if not seen:
            seen.append(fd)
            (tmp_path / ".pretuned.lock").unlink()

    monkeypatch.setattr(fcntl, "flock", removed)
    with lock(tmp_path, 5) as held:
        assert held
        assert (tmp_path / ".pretuned.lock").exists()


def test_a_system_without_flock_has_no_locks(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with lock(tmp_path, 0, required=True) as held, reading(tmp_path, 0):
        assert not held
    assert list(tmp_path.iterdir()) == []


def test_where_the_user_may_write_nothing_is_said(tmp_path):
    """A cache of one's own, one in a place of root's, and one that is yet to be made."""
    assert cache_fault(tmp_path) == ""
    assert cache_fault(tmp_path / "is" / "made") == ""
    assert cache_fault(Path("/.cache/pretuned")) == ""
