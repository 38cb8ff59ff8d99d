"""The directory that bundles are written to: created, checked before any work, and locked for one build at a time."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ...artifacts.errors import BundleError, HostError, InputError, LockBusy
from ...artifacts.files.lock import LOCK_NAME, lock, no_locks
from ...artifacts.files.publish import make_folder
from ...artifacts.files.trust import resolve

DEFAULT_NAME = "pretuned"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_LONGEST_WAIT_S = 24 * 3600.0


def file_name(name: str, sm: int) -> str:
    """``<name>-sm<NN>.msgpack``.

    Raises
    ------
    InputError
        if ``name`` could mean another directory, or is no name.
    """
    if not _NAME.fullmatch(name):
        raise InputError(
            f"--name {name!r} can't be part of a file's name: wanted 1 to 100 of A-Z a-z 0-9 . _ -, "
            "a letter or digit first"
        )
    return f"{name}-sm{sm}.msgpack"


def check_writable(directory: Path, option: str) -> None:
    """Create a directory if it is missing, and check that it can be written; errors name ``option``.

    Raises
    ------
    HostError
        if it can't be made or written.
    """
    try:
        make_folder(directory)
    except OSError as error:
        raise HostError(
            f"can't make the directory '{directory}': {error.strerror}. Name one that can be written with {option}"
        ) from error
    # access(2) knows read-only file systems too, and that root may write anywhere else.
    if not os.access(directory, os.W_OK | os.X_OK):
        read_only = os.statvfs(directory).f_flag & os.ST_RDONLY
        reason = os.strerror(errno.EROFS if read_only else errno.EACCES)
        raise HostError(
            f"can't write into '{directory}': {reason}. Make it writable, or name another one with {option}"
        )


@contextlib.contextmanager
def held(directory: Path, note: Callable[[str], None], option: str = "--out DIR") -> Iterator[None]:
    """Hold the directory, created if it is missing. If another build holds it, note that and wait.

    If the runtime would load nothing from it, that is noted too.

    Raises
    ------
    HostError
        if it can't be made, written or locked, before anything is compiled.
    """
    check_writable(directory, option)
    try:
        resolve(str(directory))
    except BundleError as error:
        note(f"the runtime refuses bundles in '{directory}': {error}")
    with locked(directory, note):
        yield


@contextlib.contextmanager
def locked(directory: Path, note: Callable[[str], None]) -> Iterator[None]:
    """Hold the lock of a directory. If another process holds it, note that and wait; note if there are no locks.

    Raises
    ------
    HostError
        if it can't be locked although its file system has locks.
    """
    with contextlib.ExitStack() as stack:
        try:
            got = stack.enter_context(lock(directory, 0.0, required=True))
        except LockBusy:
            note(f"another aot ({holder(directory / LOCK_NAME)}) works in '{directory}': waiting for it")
            got = stack.enter_context(lock(directory, _LONGEST_WAIT_S, required=True))
        if not got:
            note(no_locks(directory))
        yield


@contextlib.contextmanager
def replacing(path: Path, inputs: Iterable[str], note: Callable[[str], None]) -> Iterator[None]:
    """Hold the directory of a file that is also an input, so that concurrent runs don't lose each other's changes.

    Raises
    ------
    HostError
        as ``held``.
    """
    here = path.resolve()
    with held(path.parent, note) if any(Path(file).resolve() == here for file in inputs) else contextlib.nullcontext():
        yield


def holder(lock_file: Path) -> str:
    """The process that holds a lock file, from /proc/locks."""
    try:
        status = lock_file.stat()
        wanted = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
        for line in Path("/proc/locks").read_text().splitlines():
            fields = line.split()
            if wanted in fields and "->" not in fields:
                return f"process {fields[fields.index(wanted) - 1]}"
    except OSError:
        pass
    return "process unknown"
