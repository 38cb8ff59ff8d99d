"""A folder for the compilers' temporary files that no ending leaves behind, not even kill -9."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "pretuned-build-"


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A new folder in the system's temporary directory, gone afterwards; those of killed runs go too.

    It is flocked while its owner lives, so that a later run knows a stale one. A signal that comes while it is made
    waits until it would be removed.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
    try:
        folder, fd = _new()
    except BaseException:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        raise
    try:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        _sweep(folder.parent)
        yield folder
    finally:
        remove_tree(folder)
        os.close(fd)


def _new() -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
        try:
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:  # another run took it for stale before it was locked
            continue
        fcntl.flock(fd, fcntl.LOCK_EX)
        if folder.exists():
            return folder, fd
        os.close(fd)


def remove_tree(folder: Path) -> None:
    """Remove the folder and all in it; what can't be removed, or is gone, is left to the next run."""
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
