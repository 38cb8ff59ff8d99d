"""The signature beside a bundle's file: who vouches for its content. FORMAT.md has the bytes.

A signature proves itself, so it may lie anywhere. A key lets code in, so its place is checked as a bundle's is.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
import stat

from ..errors import BundleError, BundleUntrusted, InputError
from ..limits import MAX_KEYS
from ..tuples import NamedTuple
from . import trust
from .publish import at_once

SUFFIX = ".sig"
KEY_SUFFIXES = (".pem", ".pub")
MAGIC = b"pretuned sign 1\n"
_SIGNED = b"pretuned bundle signature 1\0"  # before the digest: a key that signs other things, too, signs no bundle
_FILE_BYTES = len(MAGIC) + 32 + 64
_MAX_KEY_BYTES = 8192
_DER = bytes.fromhex("302a300506032b6570032100")  # before the 32 bytes of a SubjectPublicKeyInfo (RFC 8410)
_SSH = b"\0\0\0\x0bssh-ed25519\0\0\0\x20"
_PEM_FORM = re.compile(rb"\s*-----BEGIN PUBLIC KEY-----\s([A-Za-z0-9+/=\s]+)-----END PUBLIC KEY-----\s*")
_SSH_FORM = re.compile(rb"\s*ssh-ed25519 +([A-Za-z0-9+/=]+)(?: [^\r\n]*)?\s*")


class Key(NamedTuple):
    """A public key, and the name of its file."""

    name: str
    public: bytes


class Keys(NamedTuple):
    """The keys of which one must have signed. ``wanted_by`` names who wants it, ``faults`` are of other files there."""

    wanted_by: str
    keys: tuple[Key, ...]
    faults: tuple[str, ...] = ()


def message(digest: bytes) -> bytes:
    """What is signed: a bundle's ``digest`` behind words that say what it is."""
    return _SIGNED + digest


def encode(public: bytes, signature: bytes) -> bytes:
    """The bytes of a signature's file."""
    return MAGIC + public + signature


def key_id(public: bytes) -> str:
    """16 hex digits that stand for a key, as ``openssl pkey -pubin -outform DER | sha256sum`` begins."""
    return hashlib.sha256(_DER + public).hexdigest()[:16]


def read_keys(directory: str, wanted_by: str) -> Keys:
    """The keys of a directory, NAME.pem and NAME.pub. Nothing is raised: a file that can't be used is a fault."""
    try:
        names = sorted(name for name in os.listdir(directory) if _is_key_file(name))  # noqa: PTH208
    except (OSError, ValueError) as error:
        return Keys(wanted_by, (), (f"{directory!r} can't be listed: {getattr(error, 'strerror', None) or error}",))
    keys: list[Key] = []
    faults: list[str] = []
    for name in names[:MAX_KEYS]:
        try:
            keys.append(read_key(os.path.join(directory, name)))  # noqa: PTH118
        except (BundleError, InputError) as error:
            faults.append(str(error))
    if len(names) > MAX_KEYS:
        faults.append(f"{directory!r} holds {len(names)} keys: the first {MAX_KEYS} by name are read")
    if not names:
        faults.append(f"{directory!r} holds no key: wanted public Ed25519 keys, NAME.pem or NAME.pub")
    return Keys(wanted_by, tuple(keys), tuple(faults))


def read_key(path: str) -> Key:
    """The public Ed25519 key of a file: PEM as openssl writes it, or ssh-keygen's one line.

    Raises
    ------
    InputError
        where it holds none.
    BundleUntrusted, BundleUnreadable
        for its place, as for a bundle.
    """
    real = trust.resolve(path, "key")
    try:
        data = _content(real, _MAX_KEY_BYTES, trusted=path)
    except OSError as error:
        if isinstance(error, BundleError):
            raise
        raise trust.unreadable(path, error, "key") from error
    public = b"" if data is None else _public(data)
    if public:
        return Key(os.path.basename(path), public)  # noqa: PTH119
    if data is not None and b"PRIVATE KEY" in data:
        told = "a private key, which belongs on the machine that signs alone. Put its public one there: "
        raise InputError(f"key {path!r}: it holds {told}openssl pkey -in PRIVATE.pem -pubout, or ssh-keygen's .pub")
    raise InputError(
        f"key {path!r}: it holds no public Ed25519 key, as `openssl pkey -pubout` (BEGIN PUBLIC KEY) and ssh-keygen "
        "(ssh-ed25519 ...) write them"
    )


def check(path: str, digest: bytes, keys: Keys) -> Key:
    """The key that signed a bundle's content, whose ``digest`` is of the file that is open.

    Raises
    ------
    BundleUntrusted
        where none of ``keys`` did, or the package cryptography, which checks it, is missing.
    """
    file = path + SUFFIX
    if not keys.keys:
        why = f": {keys.faults[0]}" if keys.faults else ""
        raise BundleUntrusted(f"bundle {path!r}: {keys.wanted_by} wants it signed, and has no key to check with{why}")
    found = read(path)
    if found is None:
        raise _refused(path, f"it has no signature {file!r}", keys)
    public, signature = found
    key = next((one for one in keys.keys if one.public == public), None)
    if key is None:
        raise _refused(path, f"its signature {file!r} is by another key, {key_id(public)}", keys)
    if not _verified(path, public, message(digest), signature, keys.wanted_by):
        raise _refused(path, f"its signature {file!r}, by {key.name}, is not of this content", keys)
    return key


def _verified(path: str, public: bytes, signed: bytes, signature: bytes, wanted_by: str) -> bool:
    try:
        from cryptography.exceptions import InvalidSignature  # here, as most processes check no signature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError as error:
        raise BundleUntrusted(
            f"bundle {path!r}: {wanted_by} wants it signed, and the package cryptography, which checks signatures, is "
            f'missing or fails ({error}). Run: pip install "pretuned[keys]"'
        ) from error
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, signed)
    except (InvalidSignature, ValueError):  # ValueError: the 32 bytes are no key to this version of it
        return False
    return True


def read(path: str) -> tuple[bytes, bytes] | None:
    """(public key, signature) beside the bundle at ``path``, not checked yet; None where there is no file.

    Raises
    ------
    BundleUntrusted
        where it is no signature, or can't be read.
    """
    try:
        data = _content(path + SUFFIX, _FILE_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        why = error.strerror or str(error)
        raise BundleUntrusted(f"bundle {path!r}: its signature {path + SUFFIX!r} can't be read: {why}") from error
    if data is None or len(data) != _FILE_BYTES or not data.startswith(MAGIC):
        raise BundleUntrusted(
            f"bundle {path!r}: {path + SUFFIX!r} is no signature, which has {_FILE_BYTES} bytes. Make one with aot sign"
        )
    return data[len(MAGIC) : -64], data[-64:]


def _is_key_file(name: str) -> bool:
    return name.endswith(KEY_SUFFIXES) and not name.startswith(".")


def _refused(path: str, what: str, keys: Keys) -> BundleUntrusted:
    names = ", ".join(f"{one.name} ({key_id(one.public)})" for one in keys.keys)
    return BundleUntrusted(
        f"bundle {path!r}: {what}. {keys.wanted_by} wants one by {names}: aot sign BUNDLE --key PRIVATE.pem makes it"
    )


def _content(path: str, most: int, trusted: str = "") -> bytes | None:
    """What a regular file holds; None for more than ``most`` bytes, or another kind of file.

    ``trusted``, its name in errors: its place must be, and ``path`` is no link.
    """
    with open(path, "rb", opener=at_once if trusted else _linked) as file:
        status = os.fstat(file.fileno())
        if trusted:
            trust.check(path, status, trusted, file.fileno(), "key")
        if not stat.S_ISREG(status.st_mode) or status.st_size > most:
            return None
        return file.read(most)


def _linked(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)


def _public(data: bytes) -> bytes:
    """The 32 bytes of a key's file, or none."""
    for form, begin in ((_PEM_FORM, _DER), (_SSH_FORM, _SSH)):
        found = form.fullmatch(data)
        if found is None:
            continue
        try:
            raw = base64.b64decode(b"".join(found[1].split()), validate=True)
        except binascii.Error:
            return b""
        return raw[len(begin) :] if raw.startswith(begin) and len(raw) == len(begin) + 32 else b""
    return b""
