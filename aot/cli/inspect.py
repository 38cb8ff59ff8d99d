"""aot inspect."""

from __future__ import annotations

import os
import re
from typing import Any

import click

from ...artifacts.files.bundle_file import open_bundle
from ..bundle.inspect import contents
from .echo import echo
from .options import as_json, bundle_files, print_json
from .table import facts, size, table

_MODELS = 6  # named in the summary
_DIGITS = 12  # of a digest


@click.command()
@click.argument("bundles", nargs=-1, required=True, type=click.Path(), metavar="BUNDLE...")
@click.option("--models", is_flag=True, help="List the models that it was built for.")
@click.option("--variants", is_flag=True, help="List its kernels and variants.")
@click.option("--choices", is_flag=True, help="List the choice of every problem and bucket.")
@as_json
def inspect(bundles: tuple[str, ...], models: bool, variants: bool, choices: bool, as_json: bool) -> None:
    """Show what bundles hold: GPUs and models; on request every variant and choice.

    BUNDLE is a file, or a directory of bundles.

    \b
    Examples:
      aot inspect bundles
      aot inspect bundles/pretuned-sm90.msgpack
      aot inspect bundles/pretuned-sm90.msgpack --models --variants
      aot inspect bundles/pretuned-sm90.msgpack --choices
      aot inspect bundles/pretuned-sm90.msgpack --json
    """
    found = []
    for path in bundle_files(bundles):
        with open_bundle(path) as opened:
            found.append(contents(opened, choices=choices))
    if as_json:
        several = len(bundles) > 1 or os.path.isdir(bundles[0])  # noqa: PTH112 - Path.is_dir raises for some paths
        print_json(found if several else found[0])
        return
    wanted = {"models": models, "kernels": variants, "variants": variants, "choices": choices}
    for place, one in enumerate(found):
        echo(("\n" if place else "") + facts(_summary(one)))
        for title in (name for name, asked in wanted.items() if asked):
            rows = one.get(title)
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
        (
            "choices",
            f"{found['choice_count']} of {found['problems']} problems, "
            + (f"measured on {gpus}" if gpus else "modelled: a cost model ranked, nothing was measured"),
        ),
        ("variants", f"{len(found['variants'])} of {len(found['kernels'])} kernels"),
        ("models", f"{len(models)}: {some}" if models else "none named"),
        (
            "built by",
            f"pretuned {found['pretuned']}, Triton {found['triton']}, ptxas {found['ptxas']}, "
            f"launch ABI {found['launch_abi']}",
        ),
        ("options", found["options"]),
        ("compared", f"with {len(found['compared_with'])} other bundles" if found["compared_with"] else ""),
        ("digest", f"{_shown(found['digest'])} (--json has it whole)"),
    )
    return [(name, value) for name, value in told if value]


def _shown(cell: object) -> object:
    """A cell of a table: of a digest its beginning, of a list its items."""
    if isinstance(cell, str) and re.fullmatch("[0-9a-f]{64}", cell):
        return cell[:_DIGITS]
    if isinstance(cell, list):
        return "; ".join(cell) or "-"
    return "-" if cell is None else cell
