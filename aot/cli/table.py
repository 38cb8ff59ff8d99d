"""Plain aligned columns: the same in a terminal, a pipe and a log."""

from __future__ import annotations

from collections.abc import Sequence

from ...artifacts.names import printable


def table(head: Sequence[str], rows: Sequence[Sequence[object]], right: str = "") -> str:
    """The rows below their heads; the columns that ``right`` marks with ``>`` are right-aligned."""
    cells = [list(head), *([printable(str(cell)) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    sides = right.ljust(len(head), "<")
    lines = ["  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True))
             for row in cells]  # fmt: skip
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(line.rstrip() for line in lines)


def size(count_bytes: int) -> str:
    """Bytes as people read them."""
    if count_bytes < 1 << 20:
        return f"{count_bytes / 1024:.0f} KiB"
    return f"{count_bytes / (1 << 20):.2f} MiB"


def duration(seconds: float) -> str:
    """Seconds as people read them."""
    if seconds < 100:
        return f"{seconds:.1f} s"
    return f"{int(seconds) // 60} min {int(seconds) % 60} s"
