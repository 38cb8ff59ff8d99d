"""The directory and the files that a command writes.

The directory of bundles is created, checked before any work, and locked for one build at a time. A file that the user
named is never written over a file of another kind.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ...artifacts import codec, packed, signature
from ...artifacts.errors import BundleError, HostError, InputError, LockBusy
from ...artifacts.locking import LOCK_NAME, lock, no_locks
from ...artifacts.publishing import make_folder, publish, too_many_open
from ...artifacts.records import Bundle
from ...artifacts.trust import resolve
from ...artifacts.wire import MAGIC

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
    # access(2) also reports read-only file systems, and allows root everything else.
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


_PAGE = b"<!doctype html>"
_ZIP = b"PK"
_IMAGES = {"png": b"\x89PNG", "svg": b"<?xml"}


@dataclass(frozen=True, slots=True)
class Written:
    """A bundle on disk; ``unchanged`` if the file had these bytes before and was left alone."""

    path: Path
    size_bytes: int
    unchanged: bool


def is_bundle(path: Path) -> bool:
    """True if a file begins like a bundle, or can't be read: opening it then says why."""
    try:
        return _begin(path, len(MAGIC)) == MAGIC
    except OSError:
        return True


def check_out(path: Path) -> None:
    """Refuse a path that can't take a bundle, before any work.

    Raises
    ------
    InputError
        if the file is something other than a bundle.
    HostError
        if its directory is not there, or the file can't be read.
    """
    if packed.split(path.name)[1] is not None:
        raise InputError(f"'{path}' names one bundle of several in a file, and can't be written alone. Name a file")
    if path.name.endswith(packed.SUFFIX):
        _check(path, packed.MAGIC, "bundle that is compressed with xz")
    else:
        _check(path, MAGIC, "bundle")


def check_page(path: Path) -> None:
    """``check_out`` for an HTML page."""
    _check(path, _PAGE, "HTML page")


def check_wheel(path: Path) -> None:
    """``check_out`` for a wheel."""
    _check(path, _ZIP, "wheel")


def check_signature(path: Path) -> None:
    """``check_out`` for a bundle's signature: gpg's signatures have the same name."""
    _check(path, signature.MAGIC, "signature of aot sign", "Take it away")


def check_image(path: Path, kind: str) -> None:
    """``check_out`` for an image of ``kind`` png or svg."""
    _check(path, _IMAGES[kind], f"{kind} image")


def write_bundle(path: Path, bundle: Bundle) -> Written:
    """Publish ``bundle``; readers see the old file or the new one.

    Raises
    ------
    InputError, HostError
        as ``check_out``; HostError also if the system refuses.
    BundleCorrupt
        if the bundle passes a limit of the format.
    """
    check_out(path)
    data = codec.encode(bundle, str(path))
    return Written(path, len(data), unchanged=not publish(path, data))


def write_page(path: Path, text: str) -> int:
    """Publish an HTML page; returns its size in bytes.

    Raises
    ------
    InputError, HostError
        as ``write_bundle``.
    """
    check_page(path)
    data = text.encode()
    publish(path, data)
    return len(data)


def _check(path: Path, begins: bytes, what: str, instead: str = "Name another file") -> None:
    if not path.parent.is_dir():
        raise HostError(f"can't write '{path}': '{path.parent}' is no directory. Make it, or name another file with -o")
    try:
        begin = _begin(path, len(begins))
    except FileNotFoundError:
        return
    except IsADirectoryError:
        raise InputError(f"'{path}' is a directory, wanted a file's name") from None
    except OSError as error:
        needed = too_many_open(error) or "It must be readable: only a file of this kind is replaced. Or take it away"
        raise HostError(f"can't read '{path}', which is to be replaced: {error.strerror}. {needed}") from error
    if begin != begins:
        raise InputError(f"'{path}' is there and is no {what}: it is not overwritten. {instead}")


def without_waiting(path: str, flags: int) -> int:
    """An ``opener`` for ``open`` that does not wait for a FIFO's writer."""
    return os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)


def _begin(path: Path, count: int) -> bytes:
    """The first bytes of a regular file; empty for other kinds."""
    with open(path, "rb", opener=without_waiting) as file:
        return file.read(count) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else b""
