"""Sign a bundle: check its file whole, and publish a signature next to it, which the runtime can be set to require."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...artifacts.errors import HostError, InputError
from ...artifacts.files.bundle_file import open_bundle
from ...artifacts.files.packed import is_packed
from ...artifacts.files.publish import publish
from ...artifacts.files.signature import SUFFIX, encode, key_id, message
from ..process.output_file import check_signature
from .verify import sound_one

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_GROUP_AND_OTHERS = 0o077
_MOST_KEY_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Signed:
    """A signature on disk; ``unchanged`` if the file held it before."""

    path: str
    signature: str
    key: str
    unchanged: bool

    def to_dict(self) -> dict[str, object]:
        """The signature as plain values for JSON."""
        return {"path": self.path, "signature": self.signature, "key": self.key, "unchanged": self.unchanged}


def sign(path: str, key: Ed25519PrivateKey) -> Signed:
    """Check all of a bundle, and publish PATH.sig; readers see an old signature or this one.

    Raises
    ------
    InputError
        as ``check_signable``.
    BundleError
        if it is no sound bundle.
    HostError
        if the system refuses.
    """
    check_signable(path)
    with open_bundle(path) as opened:
        sound_one(opened, pruned=is_packed(path))
        digest = opened.digest
    public = key.public_key().public_bytes_raw()
    wrote = publish(path + SUFFIX, encode(public, key.sign(message(digest))))
    return Signed(path, path + SUFFIX, key_id(public), not wrote)


def check_signable(path: str) -> None:
    """Refuse a bundle if another file has the name of its signature.

    Raises
    ------
    InputError, HostError
    """
    signature = Path(path + SUFFIX)
    if os.path.lexists(signature):  # if the directory is missing, the error of the bundle says more
        check_signature(signature)


def private_key(path: str, password: Callable[[], str]) -> Ed25519PrivateKey:
    """Read a private key from a file, PEM as openssl or ssh-keygen write it; ``password`` is called if it is encrypted.

    Raises
    ------
    InputError
        if it holds no Ed25519 key, or the password is wrong.
    HostError
        if it can't be read, or the package cryptography is missing.
    """
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_ssh_private_key
    except ModuleNotFoundError as error:
        raise HostError(f'signing needs {error.name}, which is not installed: pip install "pretuned[sign]"') from error

    try:
        with Path(path).open("rb") as file:  # a pipe, too: <(pass show key)
            data = file.read(_MOST_KEY_BYTES + 1)
    except OSError as error:
        raise HostError(f"key '{path}': can't be read: {error.strerror}") from error
    if len(data) > _MOST_KEY_BYTES:
        raise InputError(f"key '{path}': it holds no private key: it is over {_MOST_KEY_BYTES} bytes")
    load = load_ssh_private_key if b"BEGIN OPENSSH PRIVATE KEY" in data else load_pem_private_key
    encrypted = False
    try:
        try:
            key = load(data, None)
        except TypeError:
            encrypted = True
            key = load(data, password().encode())
    except (TypeError, ValueError, UnsupportedAlgorithm) as error:
        # what a wrong password makes of a key looks like a damaged one, in one of some 256 tries
        why = "the password is wrong, or the file is damaged: " if encrypted else ""
        raise InputError(
            f"key '{path}': no private key can be had of it: {why}{str(error).splitlines()[0]}. "
            "Wanted one as `openssl genpkey -algorithm ed25519` or `ssh-keygen -t ed25519` writes it"
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise InputError(f"key '{path}': it is a {type(key).__name__.lstrip('_')}, wanted one of Ed25519")
    return key


def seen_by_others(path: str) -> bool:
    """True if others than its owner can read a private key's file."""
    return bool(Path(path).stat().st_mode & _GROUP_AND_OTHERS)
