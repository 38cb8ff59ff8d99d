"""A command whose --help lists its options in sections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click


class Sectioned(click.Command):
    """``sections``: heading -> the names of its options; those that none names come last."""

    def __init__(self, *given: Any, sections: Mapping[str, Sequence[str]], **named: Any) -> None:
        super().__init__(*given, **named)
        self._sections = sections

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """As click's, a list for each section."""
        rows = {one.name: row for one in self.get_params(ctx) if (row := one.get_help_record(ctx)) is not None}
        for title, names in self._sections.items():
            with formatter.section(title):
                formatter.write_dl([rows.pop(name) for name in names if name in rows])
        if rows:
            with formatter.section("Other options"):
                formatter.write_dl(list(rows.values()))
