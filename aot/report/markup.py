"""Format numbers and tables for the page."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from .cells import Cell, State


def percent(fraction: float | None) -> str:
    """A fraction in percent, without the sign."""
    return "" if fraction is None else f"{100 * fraction:.0f}" if fraction >= 0.1 else f"{100 * fraction:.1f}"


def times(ratio: float | None) -> str:
    """A ratio, e.g. ``1.07 x``."""
    return "" if ratio is None else f"{ratio:.2f} x"


def median(values: Iterable[float]) -> float | None:
    """The median; None if there are no values."""
    numbers = list(values)
    return statistics.median(numbers) if numbers else None


def mean(values: Iterable[float | None]) -> float | None:
    """The geometric mean of the values that are not None; None if there are none."""
    ratios = [value for value in values if value is not None]
    return statistics.geometric_mean(ratios) if ratios else None


def table(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Iterable[int] = ()) -> str:
    """An HTML table; the columns in ``numbers`` are right-aligned."""
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
    """The number of cells in each state."""
    by_state = Counter(cell.state for cell in cells)
    return {state: by_state[state] for state in State}


def count_text(numbers: Mapping[State, int]) -> str:
    """The counts in words, e.g. ``34 measured, 2 missing``."""
    return ", ".join(f"{count} {state.value}" for state, count in numbers.items() if count)


def dot(state: State) -> str:
    """A state with its coloured dot."""
    return f'<span class="dot {state.value}"></span>{state.value}'


def strip(cells: Sequence[Cell]) -> str:
    """The states as one bar, and in words."""
    if not cells:
        return ""
    by_state = counts(cells)
    inner = "".join(
        f'<i class="{state.value}" style="width:{100 * count / len(cells):.1f}%"></i>'
        for state, count in by_state.items()
        if count
    )
    text = count_text(by_state)
    return f'<span class="strip" title="{text}">{inner}</span><br><span class="soft">{text}</span>'
