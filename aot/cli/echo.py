"""What the verbs print: names of files and what files hold never reach a terminal raw."""

from __future__ import annotations

import click

from ...artifacts.names import printable


def echo(text: str = "", *, err: bool = False) -> None:
    """``text`` on stdout or stderr, line by line; what is no printable character is escaped."""
    click.echo("\n".join(map(printable, text.split("\n"))), err=err)
