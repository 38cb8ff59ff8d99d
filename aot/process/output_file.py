"""Write to a path that the user named, never over a file of another kind."""

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
