"""Put a file in place whole or not at all: temp file, fsync, rename, fsync of the directory."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import stat
from collections.abc import Iterator
from pathlib import Path

from ..errors import HostError

_TEMP = r"\.pretuned-[0-9a-f]{16}\.tmp"
_MODE = 0o644
_TOO_MANY = (errno.EMFILE, errno.ENFILE)


def publish(path: str | os.PathLike[str], data: bytes) -> bool:
    """Make ``path`` hold ``data``. Readers see the old file or the new one; it is durable when this returns.

    Returns whether it wrote: a file that holds these bytes already is left alone, a link is replaced. Temp files of
    publishers that died are removed.

    Raises
    ------
    HostError
        where the system refuses; ``path`` is as it was, and no temp file is left.
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
    """Make a directory and those above it, where they are missing, that nobody but their owner can write.

    Whatever the umask: nothing would be loaded from what others can write.

    Raises
    ------
    OSError
        where one can't be made, or is no directory.
    """
    folder = Path(path)
    missing = [*itertools.takewhile(lambda one: not one.is_dir(), (folder, *folder.parents))]
    for one in reversed(missing):
        one.mkdir(mode=0o755, exist_ok=True)


def too_many_open(error: BaseException) -> str:
    """What is needed where too many files are open; nothing for any other reason."""
    return "More open files must be allowed: ulimit -n" if getattr(error, "errno", None) in _TOO_MANY else ""


def at_once(path: str, flags: int) -> int:
    """An ``opener``: follows no link, waits for no FIFO; of a directory ``open`` says what it is, and closes it."""
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
    """A new file, flocked while its publisher lives: one that can be locked is stale."""
    while True:
        temp = folder / f".pretuned-{os.urandom(8).hex()}.tmp"
        fd = os.open(temp, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            try:
                mine = _lock(fd, temp)
            except OSError:  # a file system without flock: no one else can take it for stale either
                mine = True
            if not mine:  # another publisher took it for stale before it was locked
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
    """Lock ``fd`` without waiting; false if another has it, or ``temp`` is another file by now."""
    import fcntl  # here, so that reading types needs no POSIX

    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(fd), os.lstat(temp))
    except (BlockingIOError, FileNotFoundError):
        return False


def _remove_stale(folder: Path) -> None:
    for entry in os.listdir(folder):  # noqa: PTH208 - names are enough
        if re.fullmatch(_TEMP, entry):
            with contextlib.suppress(OSError):  # it is tidying: the next publish tries again
                _remove_if_stale(folder / entry)


def _remove_if_stale(temp: Path) -> None:
    fd = os.open(temp, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if _lock(fd, temp):
            temp.unlink()
    finally:
        os.close(fd)
