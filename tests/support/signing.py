"""Keys and signatures for tests, as openssl and ``aot sign`` make them."""

from __future__ import annotations

from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from pretuned.artifacts.packed import is_packed, split, unpack
from pretuned.artifacts.publishing import publish
from pretuned.artifacts.signature import SUFFIX, encode, message

PRIVATE = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
STRANGER = Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33)))


def public_pem(private: Ed25519PrivateKey = PRIVATE) -> bytes:
    """The public key's file."""
    return private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def keys(folder: Path, *privates: Ed25519PrivateKey) -> Path:
    """A directory of public keys, 0.pem and so on."""
    folder.mkdir(exist_ok=True)
    for i, private in enumerate(privates or (PRIVATE,)):
        (folder / f"{i}.pem").write_bytes(public_pem(private))
    return folder


def signature(path: Path, private: Ed25519PrivateKey = PRIVATE) -> bytes:
    """The bytes of a signature of the bundle at ``path``, which may be one of several in a file."""
    file, sm = split(str(path))
    data = Path(file).read_bytes()
    whole = b"".join(unpack(data, file, sm)) if is_packed(file) else data
    return encode(private.public_key().public_bytes_raw(), private.sign(message(whole[31:63])))


def sign(path: Path, private: Ed25519PrivateKey = PRIVATE) -> Path:
    """Put a signature beside a bundle; returns the bundle's path."""
    publish(f"{path}{SUFFIX}", signature(path, private))
    return path
