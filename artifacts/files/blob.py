"""Cache files that begin with a digest of their content. A damaged, untrusted or missing file reads as None."""

from __future__ import annotations

import hashlib
import os
import stat

from ..errors import BundleError
from ..limits import MAX_BLOB_BYTES
from . import trust
from .publish import at_once, publish

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
