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
from .options import as_json, print_json


@click.command()
@click.argument("bundles", nargs=-1, required=True, type=click.Path())
@click.option("--key", required=True, metavar="PRIVATE.pem", type=click.Path(),
              help="An Ed25519 key, as openssl or ssh-keygen make it. A password is asked for.")  # fmt: skip
@as_json
def sign(bundles: tuple[str, ...], key: str, as_json: bool) -> None:
    """Sign bundles: each is checked whole, and gets BUNDLE.sig beside it.

    Of a file that holds several each gets its own, as in FILE.msgpack.xz#sm80.sig.

    With PRETUNED_TRUSTED_KEYS=DIR the runtime uses bundles alone that a public key in DIR has signed. A key is made
    with openssl genpkey -algorithm ed25519 -out private.pem, its public one with
    openssl pkey -in private.pem -pubout -out release.pem.

    \b
    Examples:
      aot sign bundles/*.msgpack --key private.pem
      aot verify bundles/*.msgpack --key release.pem
    """
    wanted = [one for path in bundles for one in members(path)]
    for path in wanted:
        check_signable(path)
    private = private_key(key, lambda: _password(key))
    notes = [f"others can read {key}: chmod 600 {key}"] if seen_by_others(key) else []
    signed = [sign_bundle(path, private) for path in wanted]
    if as_json:
        print_json({"signed": [one.to_dict() for one in signed], "notes": notes})
        return
    tell(notes)
    for one in signed:
        same = " (unchanged)" if one.unchanged else ""
        echo(f"{printable(one.signature)}{same}: by key {one.key}")


def _password(key: str) -> str:
    if not sys.stdin.isatty():
        raise InputError(f"key '{key}': it has a password, and there is no terminal to ask for it")
    return str(click.prompt(f"Password of {key}", hide_input=True, err=True))
