"""aot models."""

from __future__ import annotations

import click

from ..models.catalogue import catalogue
from .echo import echo
from .options import as_json, print_json
from .table import table


@click.command()
@click.argument("text", required=False)
@as_json
def models(text: str | None, as_json: bool) -> None:
    """List the models that are known by name, or those whose name contains TEXT.

    Any other model is given by its config.json, its directory, or shape:E=..,H=..,I=..,k=..

    \b
    Examples:
      aot models
      aot models qwen3
      aot models --json
    """
    wanted = (text or "").lower()
    found = [one for one in catalogue().values() if any(wanted in name.lower() for name in (one.id, *one.aliases))]
    if as_json:
        print_json(
            [
                {
                    "id": one.id,
                    "E": one.layer.E,
                    "k": one.layer.k,
                    "H": one.layer.H,
                    "I": one.layer.I,
                    "shared_width": one.layer.shared_width,
                    "gated": one.layer.gated,
                    "zero_experts": one.layer.zero_experts,
                    "layouts": [layout.value for layout in one.layer.layouts],
                    "activation": one.layer.activation and one.layer.activation._asdict(),
                    "weights": one.weights,
                    "source": one.source,
                    "where": one.where,
                    "aliases": dict(one.aliases),
                    "note": one.layer.note,
                }
                for one in found
            ]
        )
        return
    if not found:
        raise click.UsageError(f"no known model has '{text}' in its name; aot models lists them all")
    rows = []
    for one in found:
        layer = one.layer
        gated = "gated" if layer.gated else "plain"
        layouts = ",".join(one.value for one in layer.layouts)
        rows.append(
            (
                one.id,
                layer.E,
                layer.k,
                layer.H,
                layer.I,
                layer.shared_width or "-",
                gated,
                layer.activation or "?",
                layouts,
                ",".join(one.formats) or "?",
                one.source,
                layer.note,
            )
        )
    head = ("model", "E", "k", "H", "I", "shared", "experts", "activation", "w", "published in", "source", "note")
    echo(table(head, rows, "<>>>>>"))
    if aliases := [(alias, one.id, format_ or "?") for one in found for alias, format_ in one.aliases.items()]:
        echo(f"\n{table(('also known', 'of the shape of', 'published in'), aliases)}")
