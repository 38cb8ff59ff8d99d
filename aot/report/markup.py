"""Numbers and tables as the page has them."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from .cells import Cell, State


def percent(fraction: float | None) -> str:
    """A fraction in percent, without the sign."""
    return "" if fraction is None else f"{100 * fraction:.0f}" if fraction >= 0.1 else f"{100 * fraction:.1f}"


def times(ratio: float | None) -> str:
    """How many times."""
    return "" if ratio is None else f"{ratio:.2f} x"


def median(values: Iterable[float]) -> float | None:
    """The median, None of nothing."""
    found = list(values)
    return statistics.median(found) if found else None


def mean(values: Iterable[float | None]) -> float | None:
    """The geometric mean of those that are known, None of nothing."""
    known = [value for value in values if value is not None]
    return statistics.geometric_mean(known) if known else None


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int] = ()) -> str:
    """A table of markup; the columns in ``numbers`` are right-aligned."""
    right = set(numbers)

    def line(tag: str, cells: Sequence[str]) -> str:
        return (
            "<tr>"
            + "".join(f"<{tag}{' class=n' if i in right else ''}>{cell}</{tag}>" for i, cell in enumerate(cells))
            + "</tr>"
        )

    top = f"<thead>{line('th', head)}</thead>" if head else ""
    return f"<table>{top}<tbody>{''.join(line('td', row) for row in rows)}</tbody></table>"


def counts(cells: Iterable[Cell]) -> dict[State, int]:
    """How many cells are in each state."""
    found = Counter(cell.state for cell in cells)
    return {state: found[state] for state in State}


def told(found: Mapping[State, int]) -> str:
    """The counts in words, e.g. ``34 measured, 2 missing``."""
    return ", ".join(f"{count} {state.value}" for state, count in found.items() if count)


def dot(state: State) -> str:
    """A state with its colour."""
    return f'<span class="dot {state.value}"></span>{state.value}'


def strip(cells: Sequence[Cell]) -> str:
    """The states as one bar, and in words."""
    if not cells:
        return ""
    found = counts(cells)
    inner = "".join(
        f'<i class="{state.value}" style="width:{100 * count / len(cells):.1f}%"></i>'
        for state, count in found.items()
        if count
    )
    return f'<span class="strip" title="{told(found)}">{inner}</span><br><span class="soft">{told(found)}</span>'
