"""Print a verb's output; file names and file contents never reach a terminal unescaped."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path

import click

from ...artifacts.limits import printable


def echo(text: str = "", *, err: bool = False) -> None:
    """Print ``text`` line by line; characters that are not printable are escaped."""
    click.echo("\n".join(map(printable, text.split("\n"))), err=err)


def tell(notes: Iterable[str]) -> None:
    """Print notes for the user on stderr, a line each."""
    for note in notes:
        tell_one(note)


def tell_one(note: str) -> None:
    """Print one note on stderr."""
    click.echo(f"note: {printable(note)}", err=True)


def quoted(path: Path) -> str:
    """Quote a path for a shell, in one line."""
    return printable(shlex.quote(str(path)))
