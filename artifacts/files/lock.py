"""The lock of a directory that pretuned itself writes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import HostError, LockBusy
from .publish import make_folder, too_many_open

if TYPE_CHECKING:
    import filelock

LOCK_NAME = ".pretuned.lock"


@contextlib.contextmanager
def lock(directory: str | os.PathLike[str], timeout_s: float, *, required: bool = False) -> Iterator[bool]:
    """Hold the lock of a directory that pretuned itself writes; yields whether it is held.

    Makes the directory. Waits ``timeout_s`` seconds at most (0: not at all), then goes on without it, as it does on
    a read-only file system: readers need no lock, files are immutable and renamed into place.

    Raises
    ------
    HostError
        where it is not got and ``required`` is true: LockBusy, where another process holds it.
    """
    import filelock  # here, as it brings asyncio and sqlite3 along, and most processes never lock anything

    path = Path(directory) / LOCK_NAME
    make_lock_file(path)
    held = filelock.FileLock(path, timeout=timeout_s)
    failed: HostError | None = None
    try:
        held.acquire()
    except filelock.Timeout:
        failed = LockBusy(f"can't lock {str(path)!r}: another process held it for {timeout_s} s")
    except (OSError, NotImplementedError) as error:
        why = getattr(error, "strerror", None) or str(error)
        needed = too_many_open(error) or "The directory must be writable and have room, and its file system have locks"
        failed = HostError(f"can't lock {str(path)!r}: {why}. {needed}")
    if failed is not None and required:
        raise failed
    try:
        yield failed is None
    finally:
        try:
            release(held, path)
        except HostError:
            if required:
                raise


def release(held: filelock.BaseFileLock, path: Path) -> None:
    """Let a lock go.

    Raises
    ------
    HostError
        where the file system refuses, as NFS does without its lock server: whoever waits for it may wait long.
    """
    try:
        held.release()
    except OSError as error:
        raise HostError(
            f"can't unlock {str(path)!r}: {error.strerror or error}. What was done under the lock is done; "
            "the file system must have locks"
        ) from error


def make_lock_file(path: Path) -> None:
    """Make a lock's file and its directory, where they are missing: not everybody's to write, whatever the umask.

    Where that fails, so will the lock, which says why.
    """
    with contextlib.suppress(OSError):
        make_folder(path.parent)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o664))


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
