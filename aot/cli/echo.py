"""What the verbs print: names of files and what files hold never reach a terminal raw."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path

import click

from ...artifacts.names import printable


def echo(text: str = "", *, err: bool = False) -> None:
    """``text`` on stdout or stderr, line by line; what is no printable character is escaped."""
    click.echo("\n".join(map(printable, text.split("\n"))), err=err)


def tell(notes: Iterable[str]) -> None:
    """What the user should know, a line each, on stderr."""
    for note in notes:
        tell_one(note)


def tell_one(note: str) -> None:
    """One of them."""
    click.echo(f"note: {printable(note)}", err=True)


def quoted(path: Path) -> str:
    """A path for a shell, in a line."""
    return printable(shlex.quote(str(path)))
