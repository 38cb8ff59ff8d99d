"""Locks between processes, by filelock: of a directory that pretuned writes, or of a single lock file."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import HostError, LockBusy
from .publishing import make_folder, too_many_open

if TYPE_CHECKING:
    import filelock

LOCK_NAME = ".pretuned.lock"
# flock's errors on a file system without locks: Lustre mounted noflock, some FUSE, NFS without its lock server.
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)

_log = logging.getLogger(__name__)
_logged: set[Path] = set()  # directories of the cache with a warning in the log


@contextlib.contextmanager
def lock(directory: str | os.PathLike[str], timeout_s: float, *, required: bool = False) -> Iterator[bool]:
    """Hold the lock of a directory that pretuned writes; yields whether it is held.

    The directory is made if it is missing. After ``timeout_s`` seconds (0: at once), on a read-only file system and on
    a file system without locks the body runs without the lock. That is safe for readers: files are immutable and
    renamed into place.

    Raises
    ------
    HostError
        if ``required`` is true and the directory can't be locked, though the file system has locks. LockBusy if
        another process holds the lock.
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
    """Lock a file, making it if it is missing. Returns the lock for ``release``, None on a file system without locks.

    Raises
    ------
    LockBusy
        if another process held the lock for ``timeout_s`` seconds.
    OSError
        if the file or its directory can't be made, opened or locked.
    """
    try:
        import fcntl  # noqa: F401 - without it filelock takes soft locks
    except ImportError:  # no POSIX
        return None
    import filelock  # here, because it imports asyncio and sqlite3, and most processes never lock anything

    make_folder(path.parent)
    # mode: others can't write it, whatever the umask. No soft lock if flock is missing: a soft lock waits until the
    # lock file vanishes, and ours stays.
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
    """Release the lock that ``take`` returned, also for forked children. None is ignored.

    Raises
    ------
    HostError
        if the file system refuses, e.g. NFS without its lock server: other processes may then wait long.
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
    """Check that this process may keep files in a directory of the user's cache. The directory may be missing.

    Raises
    ------
    HostError
        if ``cache_fault`` returns a reason. The reason is also logged, once for each directory.
    """
    if fault := cache_fault(folder):
        if folder not in _logged:
            _logged.add(folder)
            _log.warning("pretuned: %s", fault)
        raise HostError(fault)


def cache_fault(folder: Path) -> str:
    """Return why this process should not write a cache directory, and what to do; "" if it may write.

    Root running with a user's HOME (some sudo set-ups do that) would leave files that the user can't change.
    """
    me = os.geteuid() if hasattr(os, "geteuid") else -1
    owners: list[tuple[Path, int]] = []  # upwards, up to the first that is this user's own
    for path in (folder / LOCK_NAME, folder, *folder.parents):
        with contextlib.suppress(OSError):
            owners.append((path, os.lstat(path).st_uid))
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
    """Return whether flock's error means that the file system has no locks."""
    return error.errno in _NO_LOCKS


def no_locks(path: Path) -> str:
    """Return a warning for the user of a file on a file system without locks."""
    return f"the file system of '{path}' has no locks: don't let two processes write it at once"


@contextlib.contextmanager
def reading(directory: str | os.PathLike[str], timeout_s: float) -> Iterator[None]:
    """Hold a directory's lock for reading; writers have ``timeout_s`` seconds to finish. Nothing is written.

    Readers share the lock. If the lock can't be taken, the body runs without it.
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
    """Take filelock's lock for reading, without waiting. Closing the returned descriptor releases the lock."""
    import fcntl  # here, so that importing this needs no POSIX

    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BaseException:
        os.close(fd)
        raise
    return fd
