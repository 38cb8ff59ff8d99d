"""aot verify."""

from __future__ import annotations

import click

from ...artifacts.bundle_file import members
from ...artifacts.errors import BundleError
from ...artifacts.limits import printable
from ...artifacts.signature import Keys, read_key
from ..bundle.verify import verify as verify_bundle
from .exits import INPUT, OK
from .options import as_json, bundle_files, print_json
from .table import echo


@click.command()
@click.argument("bundles", nargs=-1, required=True, type=click.Path(), metavar="BUNDLE...")
@click.option("--sha256", metavar="HEX", help="The sha256 that the file must have. For one file.")
@click.option(
    "--key",
    "keys",
    multiple=True,
    metavar="PUBLIC.pem",
    help="Require a signature by this Ed25519 key. Repeatable: by one of them.",
)
@as_json
def verify(bundles: tuple[str, ...], sha256: str | None, keys: tuple[str, ...], as_json: bool) -> int:
    """Verify bundles: permissions, digests, every record, and that each cubin is code for its GPU.

    BUNDLE is a file, or a directory of bundles. A file can hold several: FILE.msgpack.xz#sm80 names one of them.

    \b
    Examples:
      aot verify bundles
      aot verify bundles/*.msgpack
      aot verify bundles/pretuned-sm90.msgpack --sha256 $(cat pinned.txt)
      aot verify bundles/*.msgpack --key release.pem
    """
    bundles = bundle_files(bundles, packed=True)
    if sha256 and len(bundles) > 1:
        raise click.UsageError(f"--sha256 pins one file, {len(bundles)} are given")
    trusted = Keys(f"--key {' --key '.join(keys)}", tuple(map(read_key, keys))) if keys else None
    results: list[dict[str, object]] = []
    for path in bundles:
        try:
            results += [verify_bundle(member, sha256, trusted).to_dict() for member in members(path, sha256=sha256)]
        except BundleError as error:
            results.append({"path": path, "ok": False, "error": str(error), "kind": type(error).__name__})
    if as_json:
        print_json(results)
    else:
        for result in results:
            if result["ok"]:
                path = printable(str(result["path"]))
                signed = f", signed by {printable(str(result['signed_by']))}" if trusted else ""
                counts = f"{result['variants']} variants, {result['choices']} choices"
                echo(f"ok  {path}  {result['target']}, {counts}{signed}")
            else:
                echo(f"error: {result['error']}", err=True)
    return OK if all(result["ok"] for result in results) else INPUT
