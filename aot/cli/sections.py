"""A command whose --help lists its options in sections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click


class Sectioned(click.Command):
    """A command whose help has sections: heading -> names of its options; other options come last."""

    def __init__(self, *args: Any, sections: Mapping[str, Sequence[str]], **named: Any) -> None:
        super().__init__(*args, **named)
        self._sections = sections

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Like click's, with a list for each section."""
        rows = {option.name: row for option in self.get_params(ctx) if (row := option.get_help_record(ctx)) is not None}
        for title, names in self._sections.items():
            with formatter.section(title):
                formatter.write_dl([rows.pop(name) for name in names if name in rows])
        if rows:
            with formatter.section("Other options"):
                formatter.write_dl(list(rows.values()))
