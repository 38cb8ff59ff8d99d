"""Ed25519 signatures of bundles, in FILE.sig next to the bundle, and the public keys that check them.

FORMAT.md has the bytes. Anybody may write a signature's file; a key's file is trusted by the same rules as a bundle's,
because a key lets code in.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import os
import re
import stat

from . import trust
from .errors import BundleError, BundleUntrusted, InputError
from .limits import MAX_KEYS
from .publishing import at_once
from .tuples import NamedTuple

SUFFIX = ".sig"
KEY_SUFFIXES = (".pem", ".pub")
MAGIC = b"pretuned sign 1\n"
_SIGNED = b"pretuned bundle signature 1\0"  # before the digest: no signature of anything else fits a bundle
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
    """Keys, one of which must have signed a bundle.

    ``wanted_by`` names the setting that demands it. ``faults`` are messages about unusable files in the directory.
    """

    wanted_by: str
    keys: tuple[Key, ...]
    faults: tuple[str, ...] = ()


def message(digest: bytes) -> bytes:
    """Return the bytes that a signature signs: a fixed prefix and the bundle's ``digest``."""
    return _SIGNED + digest


def encode(public: bytes, signature: bytes) -> bytes:
    """Return the bytes of a signature file."""
    return MAGIC + public + signature


def key_id(public: bytes) -> str:
    """Return 16 hex digits that name a key: the first of ``openssl pkey -pubin -outform DER | sha256sum``."""
    return hashlib.sha256(_DER + public).hexdigest()[:16]


def read_keys(directory: str, wanted_by: str) -> Keys:
    """Read the keys of a directory, NAME.pem and NAME.pub. Raises nothing: ``faults`` lists unusable files."""
    try:
        files = os.listdir(directory)  # noqa: PTH208
        names = sorted(name for name in files if name.endswith(KEY_SUFFIXES) and not name.startswith("."))
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
    """Read a public Ed25519 key: PEM as openssl writes it, or the line that ssh-keygen writes.

    Raises
    ------
    InputError
        if the file holds no public Ed25519 key.
    BundleUntrusted, BundleUnreadable
        if others can write the file, or it can't be read.
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
        raise InputError(
            f"key {path!r}: it holds a private key, which belongs on the machine that signs alone. "
            "Put its public one there: openssl pkey -in PRIVATE.pem -pubout, or ssh-keygen's .pub"
        )
    raise InputError(
        f"key {path!r}: it holds no public Ed25519 key, as `openssl pkey -pubout` (BEGIN PUBLIC KEY) and ssh-keygen "
        "(ssh-ed25519 ...) write them"
    )


def check(path: str, digest: bytes, keys: Keys) -> Key:
    """Return the key that signed the bundle at ``path``. ``digest`` is the opened file's, not read again.

    Raises
    ------
    BundleUntrusted
        if none of ``keys`` signed it, or the package cryptography, which checks signatures, is missing.
    """
    file = path + SUFFIX
    if not keys.keys:
        why = f": {keys.faults[0]}" if keys.faults else ""
        raise BundleUntrusted(f"bundle {path!r}: {keys.wanted_by} wants it signed, and has no key to check with{why}")
    content = read(path)
    if content is None:
        raise _refused(path, f"it has no signature {file!r}", keys)
    public, signature = content
    key = next((key for key in keys.keys if key.public == public), None)
    if key is None:
        raise _refused(path, f"its signature {file!r} is by another key, {key_id(public)}", keys)
    if not _verified(path, public, message(digest), signature, keys.wanted_by):
        raise _refused(path, f"its signature {file!r}, by {key.name}, is not of this content", keys)
    return key


def _verified(path: str, public: bytes, signed: bytes, signature: bytes, wanted_by: str) -> bool:
    try:
        from cryptography.exceptions import InvalidSignature  # here, because most processes check no signature
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    except ImportError as error:
        raise BundleUntrusted(
            f"bundle {path!r}: {wanted_by} wants it signed, and the package cryptography, which checks signatures, is "
            f'missing or fails ({error}). Run: pip install "pretuned[keys]"'
        ) from error
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, signed)
    except (InvalidSignature, ValueError):  # ValueError: this version of cryptography refuses the key
        return False
    return True


def read(path: str) -> tuple[bytes, bytes] | None:
    """Read the signature file of the bundle at ``path``: (public key, signature), unchecked; None if it is missing.

    Raises
    ------
    BundleUntrusted
        if the file is no signature, or can't be read.
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


def _refused(path: str, what: str, keys: Keys) -> BundleUntrusted:
    names = ", ".join(f"{key.name} ({key_id(key.public)})" for key in keys.keys)
    return BundleUntrusted(
        f"bundle {path!r}: {what}. {keys.wanted_by} wants one by {names}: aot sign BUNDLE --key PRIVATE.pem makes it"
    )


def _content(path: str, most: int, trusted: str = "") -> bytes | None:
    """Read a regular file; None if it has more than ``most`` bytes or is another kind of file.

    ``trusted``, the file's name in errors: check its owner and mode, and follow no link.
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
    """Return the 32 bytes of a public key's file, b"" if it is no such file."""
    for form, begin in ((_PEM_FORM, _DER), (_SSH_FORM, _SSH)):
        match = form.fullmatch(data)
        if match is None:
            continue
        try:
            raw = base64.b64decode(b"".join(match[1].split()), validate=True)
        except binascii.Error:
            return b""
        return raw[len(begin) :] if raw.startswith(begin) and len(raw) == len(begin) + 32 else b""
    return b""
