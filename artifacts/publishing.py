"""Replace a file atomically: temp file, fsync, rename, fsync of the directory. Read and write digest-checked files."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from . import trust
from .errors import BundleError, HostError
from .limits import MAX_BLOB_BYTES

_TEMP = r"\.pretuned-[0-9a-f]{16}\.tmp"
_MODE = 0o644
_TOO_MANY = (errno.EMFILE, errno.ENFILE)


def publish(path: str | os.PathLike[str], data: bytes) -> bool:
    """Write ``data`` to ``path`` atomically: readers see the old file or the new one. Durable when this returns.

    Returns False, without writing, if the file holds these bytes already. A link is replaced by a file. Temp files of
    processes that died are removed.

    Raises
    ------
    HostError
        if the system refuses; ``path`` is unchanged, and no temp file is left.
    """
    final = Path(path)
    try:
        folder = os.open(final.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            writes = not _holds(final, data)
            if writes:
                _remove_stale(final.parent)
                _replace(final, data)
            os.fsync(folder)
            return writes
        finally:
            os.close(folder)
    except (OSError, ValueError) as error:
        raise _refused(final, len(data), error) from error


def make_folder(path: str | os.PathLike[str]) -> None:
    """Make a directory and its missing parents with mode 0755, whatever the umask.

    The runtime loads no code from a directory that others can write.

    Raises
    ------
    OSError
        if a directory can't be made, or its path is another kind of file.
    """
    folder = Path(path)
    missing = [*itertools.takewhile(lambda directory: not directory.is_dir(), (folder, *folder.parents))]
    for directory in reversed(missing):
        directory.mkdir(mode=0o755, exist_ok=True)


def too_many_open(error: BaseException) -> str:
    """Return advice if the error means too many open files, else ""."""
    return "More open files must be allowed: ulimit -n" if getattr(error, "errno", None) in _TOO_MANY else ""


def at_once(path: str, flags: int) -> int:
    """``open``'s ``opener`` that follows no link and waits for no FIFO."""
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)


def _refused(final: Path, size: int, error: OSError | ValueError) -> HostError:
    reason = getattr(error, "strerror", None) or str(error)
    needed = f"The directory {str(final.parent)!r} must exist, be writable and have {size} bytes free"
    refused = HostError(f"can't write {str(final)!r} ({size} bytes): {reason}. {too_many_open(error) or needed}.")
    refused.errno = getattr(error, "errno", None)
    return refused


def _holds(final: Path, data: bytes) -> bool:
    try:
        file = open(final, "rb", opener=at_once)  # noqa: SIM115 - closed below
    except OSError:
        return False
    with file:
        status = os.fstat(file.fileno())
        same_form = stat.S_ISREG(status.st_mode) and stat.S_IMODE(status.st_mode) == _MODE
        return same_form and status.st_size == len(data) and file.read() == data


def _replace(final: Path, data: bytes) -> None:
    with _temp_file(final.parent) as (fd, temp):
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.fchmod(fd, _MODE)
        os.fsync(fd)
        os.rename(temp, final)  # noqa: PTH104 - Path.rename is the same call, this one is what the tests trace


@contextlib.contextmanager
def _temp_file(folder: Path) -> Iterator[tuple[int, Path]]:
    """Make a temp file that its process holds locked: a temp file that can be locked is stale."""
    while True:
        temp = folder / f".pretuned-{os.urandom(8).hex()}.tmp"
        fd = os.open(temp, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            try:
                mine = _lock(fd, temp)
            except OSError:  # a file system without flock: no other process can find it stale either
                mine = True
            if not mine:  # another process found it stale before it was locked
                continue
            try:
                yield fd, temp
            except BaseException:
                with contextlib.suppress(OSError):
                    temp.unlink()
                raise
            return
        finally:
            os.close(fd)


def _lock(fd: int, temp: Path) -> bool:
    """Lock ``fd`` without waiting; False if another process holds the lock, or ``temp`` is another file by now."""
    import fcntl  # here, so that reading types needs no POSIX

    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(fd), os.lstat(temp))
    except (BlockingIOError, FileNotFoundError):
        return False


def _remove_stale(folder: Path) -> None:
    for entry in os.listdir(folder):  # noqa: PTH208 - names are enough
        if re.fullmatch(_TEMP, entry):
            with contextlib.suppress(OSError):  # the next publish tries again
                _remove_if_stale(folder / entry)


def _remove_if_stale(temp: Path) -> None:
    fd = os.open(temp, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if _lock(fd, temp):
            temp.unlink()
    finally:
        os.close(fd)


_MAGIC = b"pretuned blob 1\n"
_HEAD_BYTES = len(_MAGIC) + 32


def write_checked(path: str | os.PathLike[str], payload: bytes) -> None:
    """Write a file that holds ``payload`` and its digest.

    Raises
    ------
    HostError
        if the system refuses; the old file stays.
    """
    publish(path, _MAGIC + hashlib.sha256(payload).digest() + payload)


def read_checked(path: str | os.PathLike[str]) -> bytes | None:
    """Return the payload of ``path``, None if the file is missing, damaged, too large, or writable by others."""
    try:
        return read_or_say(path)
    except (OSError, BundleError):
        return None


def read_or_say(path: str | os.PathLike[str]) -> bytes | None:
    """Return the payload of ``path``, None if the file is damaged or too large.

    Raises
    ------
    BundleUntrusted
        if others can write the file.
    OSError
        if the file can't be read; BundleUnreadable is a subclass.
    """
    real = trust.resolve(os.fspath(path), "file")
    with open(real, "rb", opener=at_once) as file:
        status = os.fstat(file.fileno())
        trust.check(real, status, real, file.fileno(), "file")
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_BLOB_BYTES + _HEAD_BYTES:
            return None
        data = file.read(status.st_size + 1)
    payload = data[_HEAD_BYTES:]
    return payload if data[:_HEAD_BYTES] == _MAGIC + hashlib.sha256(payload).digest() else None
