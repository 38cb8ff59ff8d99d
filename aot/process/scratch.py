"""A folder for the compilers' temporary files that is always removed, even after kill -9."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ...artifacts.errors import HostError
from ...artifacts.locking import has_none

_PREFIX = "pretuned-build-"


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Yield a new folder in the system's temporary directory, removed afterwards, with those of killed runs.

    Its owner holds a lock on it, so that later runs recognise stale folders. It is named before it is made, so that an
    interrupt leaves nothing behind. Names never repeat: a run that took one for stale may still remove it.
    """
    folder, fd = _named(), -1
    try:
        while True:
            folder.mkdir(mode=0o700)
            if (fd := _locked(folder)) >= 0:
                break
            folder = _named()
        _sweep(folder.parent)
        yield folder
    finally:
        remove_tree(folder)
        if fd >= 0:
            os.close(fd)


def _named() -> Path:
    return Path(tempfile.gettempdir(), f"{_PREFIX}{secrets.token_hex(8)}")


def _locked(folder: Path) -> int:
    """Lock the folder and return its descriptor; -1 if another run has removed it as stale."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return -1
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
    except OSError as error:
        if not has_none(error):
            os.close(fd)
            raise HostError(f"can't lock '{folder}': {error.strerror}. Name another folder with TMPDIR") from error
        return fd  # this file system has no locks, so no other run removes it as stale
    if folder.exists():
        return fd
    os.close(fd)
    return -1


def remove_tree(folder: Path) -> None:
    """Remove the folder and its contents; whatever can't be removed is left to the next run."""
    shutil.rmtree(folder, ignore_errors=True)


def _sweep(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if os.fstat(fd).st_uid == os.geteuid():
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove_tree(folder)
            finally:
                os.close(fd)
