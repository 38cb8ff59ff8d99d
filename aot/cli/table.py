"""Plain aligned columns, equal in a terminal, a pipe and a log; wrapped if the width is known.

Not rich.table: it takes 0.7 ms a row, and aot inspect --choices of a shipped bundle prints 130,000.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
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


_LEAST = 16  # columns: no text is wrapped to less


def columns() -> int | None:
    """The width of the output: COLUMNS or the terminal's; None without either."""
    text = os.environ.get("COLUMNS", "")
    if not (text.isdigit() and int(text)) and not sys.stdout.isatty():
        return None
    return max(shutil.get_terminal_size().columns, 20)


def table(head: Sequence[str], rows: Sequence[Sequence[object]], right: str = "") -> str:
    """The rows below their heads; the columns that ``right`` marks with ``>`` are right-aligned.

    If they are wider than ``columns``, texts are wrapped; if that is not enough, each row becomes a list.
    """
    cells = [list(head), *([printable(str(cell)) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    sides = right.ljust(len(head), "<")
    room = columns()
    if room is not None and not _shrunk(widths, sides, room):
        return "\n\n".join(facts(tuple(zip(head, row, strict=True))) for row in cells[1:])
    lines = [line for row in cells for line in _wrapped(row, widths, sides)]
    rule = next(len(_wrapped(row, widths, sides)) for row in cells)
    lines.insert(rule, "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)


def facts(pairs: Sequence[tuple[str, object]]) -> str:
    """Names and values, a line each, the values wrapped to ``columns``."""
    room, width = columns(), max(len(name) for name, _ in pairs)
    lines = []
    for name, value in pairs:
        first, *rest = _pieces(printable(str(value)), None if room is None else max(room - width - 2, _LEAST))
        lines += [f"{name:<{width}}  {first}".rstrip(), *(f"{'':<{width}}  {line}" for line in rest)]
    return "\n".join(lines)


def next_steps(*steps: tuple[str, str]) -> str:
    """Format (purpose, command) steps, a line each; if they are too wide, commands are on lines of their own.

    A command wider than that is continued on further lines, broken before options.
    """
    room, width = columns(), max(len(label) for label, _ in steps)
    lines = [f"  {label:<{width}}  {command}" for label, command in steps]
    if room is not None and max(map(len, lines)) > room:
        lines = [line for label, command in steps for line in (f"  {label}:", *_broken(command, room))]
    return "\n".join(("Next:", *lines))


def _broken(command: str, room: int) -> Iterator[str]:
    """Break a command into lines that a shell reads as one."""
    line = "   "
    for part in re.split(r" (?=--|-[a-zA-Z] |# |[a-z]+://)", command):
        if line.strip() and len(line) + len(part) + 3 > room:
            yield f"{line} \\" if not part.startswith("#") else line
            line = "      "
        line += f" {part}"
    yield line


def paragraph(text: str) -> str:
    """A text, wrapped to ``columns``."""
    return "\n".join(_pieces(printable(text), columns()))


def _shrunk(widths: list[int], sides: str, room: int) -> bool:
    """Narrow the widest texts until the row fits; False if it can't."""
    while (over := sum(widths) + 2 * (len(widths) - 1) - room) > 0:
        texts = [i for i, side in enumerate(sides) if side == "<" and widths[i] > _LEAST]
        if not texts:
            return False
        widest = max(texts, key=lambda i: widths[i])
        widths[widest] -= min(over, max(widths[widest] // 8, 1), widths[widest] - _LEAST)
    return True


def _wrapped(row: Sequence[str], widths: Sequence[int], sides: str) -> list[str]:
    pieces = [_pieces(cell, width) for cell, width in zip(row, widths, strict=True)]
    deep = max(map(len, pieces))
    return [
        "  ".join(
            f"{(cell[i] if i < len(cell) else ''):{side}{width}}"
            for cell, side, width in zip(pieces, sides, widths, strict=True)
        )
        for i in range(deep)
    ]


def _pieces(text: str, width: int | None) -> list[str]:
    if width is None or len(text) <= width:
        return [text]
    return textwrap.wrap(text, width, break_on_hyphens=False) or [""]


def size(count_bytes: int) -> str:
    """A size in KiB or MiB."""
    if count_bytes < 1 << 20:
        return f"{count_bytes / 1024:.0f} KiB"
    return f"{count_bytes / (1 << 20):.2f} MiB"


def duration(seconds: float) -> str:
    """A duration in seconds or minutes."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{int(seconds) // 60} min {int(seconds) % 60} s"
