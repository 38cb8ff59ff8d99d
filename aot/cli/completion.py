"""Shell completion of --models, --sm, --gpu, and of commands after ``aot help``."""

from __future__ import annotations

import click
from click.shell_completion import CompletionItem

from ..models.catalogue import catalogue
from ..plan.targets import known_names


def verbs(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """The verbs of the program."""
    group = ctx.find_root().command
    names = group.list_commands(ctx) if isinstance(group, click.Group) else []
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


def models(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Ids and aliases of the catalogue that begin with the incomplete word, in any case, and files."""
    ids = (name for entry in catalogue().values() for name in (entry.id, *entry.aliases))
    begun = [name for name in ids if name.lower().startswith(incomplete.lower())]
    # The file item first: bash drops the items before it.
    return [CompletionItem(incomplete, type="file"), *map(CompletionItem, begun)]


def capabilities(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the last of a list of capabilities, by number or GPU name."""
    before, comma, last = incomplete.rpartition(",")
    return [CompletionItem(f"{before}{comma}{name}") for name in known_names() if name.startswith(last.lower())]


def gpus(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """GPU names and capabilities."""
    return [CompletionItem(name) for name in known_names() if name.startswith(incomplete.lower())]
