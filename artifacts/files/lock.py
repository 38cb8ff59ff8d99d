"""Locks among processes, by filelock: of a directory that pretuned itself writes, or of a file's own lock file."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import HostError, LockBusy
from .publish import make_folder, too_many_open

if TYPE_CHECKING:
    import filelock

LOCK_NAME = ".pretuned.lock"
# What flock says on a file system without locks: Lustre mounted noflock and some FUSE, and NFS without its lock server.
_NONE_THERE = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)

_log = logging.getLogger(__name__)
_told: set[Path] = set()  # directories of the cache about which something was logged


@contextlib.contextmanager
def lock(directory: str | os.PathLike[str], timeout_s: float, *, required: bool = False) -> Iterator[bool]:
    """Hold the lock of a directory that pretuned itself writes; yields whether it is held.

    Makes the directory. Waits ``timeout_s`` seconds at most (0: not at all), then goes on without it, as it does on
    a read-only file system and on one without locks: readers need no lock, files are immutable and renamed into place.

    Raises
    ------
    HostError
        if ``required`` is true and it can't be locked, though the file system has locks: LockBusy if another process
        holds it.
    """
    path, held = Path(directory) / LOCK_NAME, None
    try:
        held = take(path, timeout_s)
    except LockBusy:
        if required:
            raise
    except OSError as error:
        if required:
            needed = too_many_open(error) or "The directory must be writable and have room"
            raise HostError(f"can't lock {str(path)!r}: {error.strerror or error}. {needed}") from error
    try:
        yield held is not None
    finally:
        try:
            release(held, path)
        except HostError:
            if required:
                raise


def take(path: Path, timeout_s: float) -> filelock.BaseFileLock | None:
    """Lock a file, which is made if it is missing; the lock to ``release``, or None on a file system without locks.

    Raises
    ------
    LockBusy
        if another process held it for ``timeout_s`` seconds.
    OSError
        if its directory or the file can't be made, opened or locked.
    """
    try:
        import fcntl  # noqa: F401 - without it filelock takes soft locks
    except ImportError:  # no POSIX
        return None
    import filelock  # here, as it brings asyncio and sqlite3 along, and most processes never lock anything

    make_folder(path.parent)
    # Not everybody's to write, whatever the umask. No soft lock where flock is missing: it waits until the lock file
    # vanishes, and ours stays.
    held = filelock.FileLock(path, timeout_s, mode=0o664, thread_local=False, fallback_to_soft=False)
    try:
        held.acquire()
    except filelock.Timeout:
        raise LockBusy(f"can't lock {str(path)!r}: another process held it for {timeout_s} s") from None
    except OSError as error:
        if has_none(error):
            return None
        raise
    return held


def release(held: filelock.BaseFileLock | None, path: Path) -> None:
    """Let a lock go that ``take`` took. A child of ``fork`` does not hold on to it.

    Raises
    ------
    HostError
        where the file system refuses, as NFS does without its lock server: whoever waits for it may wait long.
    """
    if held is None:
        return
    try:
        held.release()
    except OSError as error:
        raise HostError(
            f"can't unlock {str(path)!r}: {error.strerror or error}. What was done under the lock is done; "
            "the file system must have locks"
        ) from error


def check_cache(folder: Path) -> None:
    """Look whether this process may keep files in a directory of the user's cache, which need not be there yet.

    Raises
    ------
    HostError
        if ``cache_fault`` finds a reason. It is logged, too, once a directory.
    """
    if fault := cache_fault(folder):
        if folder not in _told:
            _told.add(folder)
            _log.warning("pretuned: %s", fault)
        raise HostError(fault)


def cache_fault(folder: Path) -> str:
    """Why nothing is to be kept in a directory of the user's cache, and what to do; "" where all is well.

    Root that runs with a user's HOME (sudo does that in places) would leave files there which the user can't write.
    """
    me = os.geteuid() if hasattr(os, "geteuid") else -1
    owners: list[tuple[Path, int]] = []  # upwards, up to the first that is this user's own
    for one in (folder / LOCK_NAME, folder, *folder.parents):
        with contextlib.suppress(OSError):
            owners.append((one, os.lstat(one).st_uid))
            if owners[-1][1] == me:
                break
    if not owners or owners[0][1] == me:
        return ""
    first, owner = owners[0]
    if me == 0:
        return (
            f"'{first}' belongs to user {owner} and this process runs as root: nothing is kept in '{folder}'. "
            "Run it as that user, or with a HOME (XDG_CACHE_HOME) of root's: sudo -H"
        )
    top, owner = owners[-2] if owners[-1][1] == me else owners[-1]
    if owners[-1][1] == me and owner == 0 and not os.access(first, os.W_OK, effective_ids=True):
        return (
            f"'{top}' in your cache belongs to root, maybe as sudo ran with your HOME: nothing can be kept in "
            f"'{folder}'. Run: sudo chown -R {me} {shlex.quote(str(top))}"
        )
    return ""


def has_none(error: OSError) -> bool:
    """Whether flock's error says that the file system has no locks."""
    return error.errno in _NONE_THERE


def no_locks(path: Path) -> str:
    """A note for the user: what to mind where ``path`` is on a file system without locks."""
    return f"the file system of '{path}' has no locks: don't let two processes write it at once"


@contextlib.contextmanager
def reading(directory: str | os.PathLike[str], timeout_s: float) -> Iterator[None]:
    """Read a directory that pretuned itself writes while nobody does, or after waiting ``timeout_s`` seconds.

    Writes nothing. Readers share the lock; where it can't be had, reading goes on without it.
    """
    with contextlib.ExitStack() as stack:
        try:
            fd = _share(os.path.join(directory, LOCK_NAME))  # noqa: PTH118 - a process's first call waits for this
            stack.callback(os.close, fd)
        except BlockingIOError:
            stack.enter_context(lock(directory, timeout_s))
        except (OSError, ImportError):  # nobody ever locked it, or locks don't work here
            pass
        yield


def _share(path: str) -> int:
    """Take the lock that filelock takes, for reading, without waiting; closing what is returned lets it go."""
    import fcntl  # here, so that importing this needs no POSIX

    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BaseException:
        os.close(fd)
        raise
    return fd
