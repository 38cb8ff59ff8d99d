"""aot inspect."""

from __future__ import annotations

import click

from ...artifacts.files.bundle_file import open_bundle
from ...artifacts.names import printable
from ..bundle.inspect import contents
from .echo import echo
from .options import as_json, print_json
from .table import size, table


@click.command()
@click.argument("bundle", type=click.Path())
@click.option("--choices", is_flag=True, help="Show the choice of every problem and bucket too.")
@as_json
def inspect(bundle: str, choices: bool, as_json: bool) -> None:
    """Show what a bundle holds: for which GPUs and models, its kernels, variants and choices.

    \b
    Examples:
      aot inspect bundles/pretuned-sm90.msgpack
      aot inspect bundles/pretuned-sm90.msgpack --choices
      aot inspect bundles/pretuned-sm90.msgpack --json
    """
    with open_bundle(bundle) as opened:
        found = contents(opened, choices=choices)
    if as_json:
        print_json(found)
        return
    facts = {name: value for name, value in found.items() if not isinstance(value, list)}
    width = max(map(len, facts))
    for name, value in facts.items():
        shown = size(value) if name == "size_bytes" and isinstance(value, int) else value
        echo(f"{name.replace('_bytes', ''):<{width}}  {printable(str(shown))}")
    for title in ("kernels", "gpus", "models", "variants", "choices"):
        rows = found.get(title)
        if isinstance(rows, list) and rows:
            echo(f"\n{title}")
            echo(table(list(rows[0]), [["-" if cell is None else cell for cell in row.values()] for row in rows]))
