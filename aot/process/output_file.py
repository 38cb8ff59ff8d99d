"""What is written to a path that the user named, and never over a file that is something else."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from ...artifacts.errors import HostError, InputError
from ...artifacts.files import packed, signature
from ...artifacts.files.publish import publish, too_many_open
from ...artifacts.format import codec
from ...artifacts.format.wire import MAGIC
from ...artifacts.records.bundle import Bundle

_PAGE = b"<!doctype html>"
_ZIP = b"PK"
_IMAGES = {"png": b"\x89PNG", "svg": b"<?xml"}


@dataclass(frozen=True, slots=True)
class Written:
    """A bundle on disk; ``unchanged`` if the file held these very bytes before and was left alone."""

    path: Path
    size_bytes: int
    unchanged: bool


def is_bundle(path: Path) -> bool:
    """Whether a file begins as a bundle does. One that can't be read is taken for one: opening it says why."""
    try:
        return _begin(path, len(MAGIC)) == MAGIC
    except OSError:
        return True


def check_out(path: Path) -> None:
    """Refuse a path that can't take a bundle, before any work.

    Raises
    ------
    InputError
        if there is something else than a bundle.
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
    """As ``check_out``, for an HTML page."""
    _check(path, _PAGE, "HTML page")


def check_wheel(path: Path) -> None:
    """As ``check_out``, for a wheel."""
    _check(path, _ZIP, "wheel")


def check_signature(path: Path) -> None:
    """As ``check_out``, for what is signed beside a bundle: gpg names its own so, too."""
    _check(path, signature.MAGIC, "signature of aot sign", "Take it away")


def check_image(path: Path, kind: str) -> None:
    """As ``check_out``, for an image of ``kind`` png or svg."""
    _check(path, _IMAGES[kind], f"{kind} image")


def write_bundle(path: Path, bundle: Bundle) -> Written:
    """Publish ``bundle``: readers see the old file or the new one.

    Raises
    ------
    InputError, HostError
        as ``check_out``; HostError also where the system refuses.
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
    """An ``opener`` for ``open``: a FIFO that nobody writes to is opened at once, and not waited for."""
    return os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)


def _begin(path: Path, count: int) -> bytes:
    """The first bytes of a file; none of what is no regular file."""
    with open(path, "rb", opener=without_waiting) as file:
        return file.read(count) if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else b""
