"""aot sign."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ...artifacts.bundle_file import members, open_bundle
from ...artifacts.errors import HostError, InputError
from ...artifacts.limits import printable
from ...artifacts.packed import is_packed
from ...artifacts.publishing import publish
from ...artifacts.signature import SUFFIX, encode, key_id, message
from ..bundle.verify import sound_one
from ..process.output import check_signature
from .options import as_json, bundle_files, print_json
from .table import echo, tell

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

_GROUP_AND_OTHERS = 0o077
_MOST_KEY_BYTES = 1 << 16


@click.command()
@click.argument("bundles", nargs=-1, required=True, type=click.Path(), metavar="BUNDLE...")
@click.option(
    "--key",
    required=True,
    metavar="PRIVATE.pem",
    type=click.Path(),
    help="An Ed25519 key of openssl or ssh-keygen. Its password is asked for.",
)
@as_json
def sign(bundles: tuple[str, ...], key: str, as_json: bool) -> None:
    """Sign bundles: verify each and write BUNDLE.sig next to it.

    BUNDLE is a file, or a directory of bundles. If PRETUNED_TRUSTED_KEYS=DIR is set, the runtime uses only bundles that
    were signed with a key whose public part is in DIR.

    \b
    Examples:
      openssl genpkey -algorithm ed25519 -out private.pem          # makes a key
      openssl pkey -in private.pem -pubout -out release.pem        # its public part
      aot sign bundles --key private.pem
      aot verify bundles/*.msgpack --key release.pem
    """
    wanted = [member for path in bundle_files(bundles, packed=True) for member in members(path)]
    for path in wanted:
        check_signable(path)
    private = private_key(key, lambda: _password(key))
    notes = [f"others can read {key}: chmod 600 {key}"] if seen_by_others(key) else []
    signed = [sign_bundle(path, private) for path in wanted]
    if as_json:
        print_json({"signed": [signature.to_dict() for signature in signed], "notes": notes})
        return
    tell(notes)
    for signature in signed:
        same = " (unchanged)" if signature.unchanged else ""
        echo(f"{printable(signature.signature)}{same}: by key {signature.key}")


def _password(key: str) -> str:
    if not sys.stdin.isatty():
        raise InputError(f"key '{key}': it has a password, and there is no terminal to ask for it")
    return str(click.prompt(f"Password of {key}", hide_input=True, err=True))


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


def sign_bundle(path: str, key: Ed25519PrivateKey) -> Signed:
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
