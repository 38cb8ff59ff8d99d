"""aot sign."""

from __future__ import annotations

import sys

import click

from ...artifacts.errors import InputError
from ...artifacts.files.bundle_file import members
from ...artifacts.names import printable
from ..bundle.sign import check_signable, private_key, seen_by_others
from ..bundle.sign import sign as sign_bundle
from .echo import echo, tell
from .options import as_json, bundle_files, print_json


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
