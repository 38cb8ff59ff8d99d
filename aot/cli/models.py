"""aot models."""

from __future__ import annotations

import click

from ..models.catalogue import catalogue
from .options import as_json, print_json
from .table import echo, table


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
    listed = catalogue().values()
    entries = [entry for entry in listed if any(wanted in name.lower() for name in (entry.id, *entry.aliases))]
    if as_json:
        print_json(
            [
                {
                    "id": entry.id,
                    "E": entry.layer.E,
                    "k": entry.layer.k,
                    "H": entry.layer.H,
                    "I": entry.layer.I,
                    "shared_width": entry.layer.shared_width,
                    "gated": entry.layer.gated,
                    "zero_experts": entry.layer.zero_experts,
                    "layouts": [layout.value for layout in entry.layer.layouts],
                    "activation": entry.layer.activation and entry.layer.activation._asdict(),
                    "weights": entry.weights,
                    "source": entry.source,
                    "where": entry.where,
                    "aliases": dict(entry.aliases),
                    "note": entry.layer.note,
                }
                for entry in entries
            ]
        )
        return
    if not entries:
        raise click.UsageError(f"no known model has '{text}' in its name; aot models lists them all")
    rows = []
    for entry in entries:
        layer = entry.layer
        gated = "gated" if layer.gated else "plain"
        layouts = ",".join(layout.value for layout in layer.layouts)
        rows.append(
            (
                entry.id,
                layer.E,
                layer.k,
                layer.H,
                layer.I,
                layer.shared_width or "-",
                gated,
                layer.activation or "?",
                layouts,
                ",".join(entry.formats) or "?",
                entry.source,
                layer.note,
            )
        )
    head = ("model", "E", "k", "H", "I", "shared", "experts", "activation", "w", "published in", "source", "note")
    echo(table(head, rows, "<>>>>>"))
    if aliases := [(alias, entry.id, format_ or "?") for entry in entries for alias, format_ in entry.aliases.items()]:
        echo(f"\n{table(('also known', 'of the shape of', 'published in'), aliases)}")
