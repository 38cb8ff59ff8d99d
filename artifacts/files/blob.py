"""One digest-checked file of bytes, for caches: damaged, untrusted or missing are all just 'not there'."""

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
    """Publish ``payload`` with its digest.

    Raises
    ------
    HostError
        where the system refuses; the old file stays.
    """
    publish(path, _MAGIC + hashlib.sha256(payload).digest() + payload)


def read_checked(path: str | os.PathLike[str]) -> bytes | None:
    """The payload of ``path``, or None if it is missing, damaged, too large, or in a place that others can write."""
    try:
        return read_or_say(path)
    except (OSError, BundleError):
        return None


def read_or_say(path: str | os.PathLike[str]) -> bytes | None:
    """The payload of ``path``, or None if it is damaged or too large.

    Raises
    ------
    BundleUntrusted
        where others can write it.
    OSError
        where it can't be read; BundleUnreadable is one.
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
