"""aot inspect."""

from __future__ import annotations

import re
from typing import Any

import click

from ...artifacts.files.bundle_file import open_bundle
from ..bundle.inspect import contents
from .echo import echo
from .options import as_json, print_json
from .table import facts, size, table

_MODELS = 6  # named in the summary
_DIGITS = 12  # of a digest


@click.command()
@click.argument("bundle", type=click.Path())
@click.option("--models", is_flag=True, help="List the models that it was built for.")
@click.option("--variants", is_flag=True, help="List its kernels and variants.")
@click.option("--choices", is_flag=True, help="List the choice of every problem and bucket.")
@as_json
def inspect(bundle: str, models: bool, variants: bool, choices: bool, as_json: bool) -> None:
    """Show what a bundle holds: for which GPUs and models; its variants and choices where they are asked for.

    \b
    Examples:
      aot inspect bundles/pretuned-sm90.msgpack
      aot inspect bundles/pretuned-sm90.msgpack --models --variants
      aot inspect bundles/pretuned-sm90.msgpack --choices
      aot inspect bundles/pretuned-sm90.msgpack --json
    """
    with open_bundle(bundle) as opened:
        found = contents(opened, choices=choices)
    if as_json:
        print_json(found)
        return
    echo(facts(_summary(found)))
    wanted = {"models": models, "kernels": variants, "variants": variants, "choices": choices}
    for title in (name for name, asked in wanted.items() if asked):
        rows = found.get(title)
        if isinstance(rows, list) and rows:
            echo(f"\n{title}")
            echo(table(list(rows[0]), [[_shown(cell) for cell in row.values()] for row in rows]))


def _summary(found: dict[str, Any]) -> list[tuple[str, object]]:
    gpus = ", ".join(dict.fromkeys(one["name"] for one in found["gpus"]))
    models = list(dict.fromkeys(one["name"] for one in found["models"]))
    some = ", ".join(models[:_MODELS]) + (f" and {len(models) - _MODELS} more" if len(models) > _MODELS else "")
    told = (
        ("bundle", f"{found['path']}, {size(found['size_bytes'])}"),
        ("for", f"{found['target']}, driver {found['min_driver']} or later"),
        ("choices", f"{found['choice_count']} of {found['problems']} problems, "
                    + (f"measured on {gpus}" if gpus else "modelled: a cost model ranked, nothing was measured")),
        ("variants", f"{len(found['variants'])} of {len(found['kernels'])} kernels"),
        ("models", f"{len(models)}: {some}" if models else "none named"),
        ("made by", f"pretuned {found['pretuned']}, Triton {found['triton']}, ptxas {found['ptxas']}, "
                    f"launch ABI {found['launch_abi']}"),
        ("options", found["options"]),
        ("digest", f"{_shown(found['digest'])} (--json has it whole)"),
    )  # fmt: skip
    return [(name, value) for name, value in told if value]


def _shown(cell: object) -> object:
    """A cell of a table: of a digest its beginning."""
    if isinstance(cell, str) and re.fullmatch("[0-9a-f]{64}", cell):
        return cell[:_DIGITS]
    return "-" if cell is None else cell
