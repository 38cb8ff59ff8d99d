"""The charts of a report, as SVG to stand inline in HTML: matplotlib draws, nothing is loaded from elsewhere."""

from __future__ import annotations

import contextlib
import io
import math
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from ...artifacts.errors import HostError
from ...artifacts.records.problem import Fusion, Op
from ..plan.families import fused
from .cells import Cell, State, WeightCells

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {Op.FORWARD: "#0072b2", Op.DX: "#d55e00", Op.DW: "#009e73"}  # told apart by the colour-blind too
_GREY = "#8b949e"
_INK = "#1f2328"
_STYLES = {Fusion.NONE: "-", Fusion.GATHER: ":", Fusion.SCATTER: "--"}
_STYLE = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "pretuned",  # the same ids for the same drawing
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": _GREY,
    "axes.labelcolor": _INK,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.color": "#e6e8eb",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "text.color": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "path.simplify": False,
}
_ID = re.compile(r'(\bid="|href="#|url\(#)')


def form(cell: Cell) -> str:
    """Op and form, as legends and tables say it."""
    one = cell.problem
    return f"{one.op.value} {fused(one.fusion)}".rstrip()


def check_available() -> None:
    """Raise HostError, with what to install, where matplotlib is missing."""
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise HostError('a report needs matplotlib: pip install "pretuned[report]"')


@contextlib.contextmanager
def drawn_with() -> Iterator[Callable[[float, float], Figure]]:
    """Makes figures of a width and height in inches, in the report's style."""
    with _style():
        yield _figure


class Charts:
    """Draws charts; every one gets ids of its own, as all stand in one page."""

    def __init__(self) -> None:
        self._drawn = 0

    def gemm(self, gemm: WeightCells) -> str:
        """A GEMM: the fraction of the roofline by rows, and beside it the search where there was one."""
        searched = [cell for cell in gemm.cells if len(cell.candidates) > 1]
        with _style():
            figure = _figure(9.6 if searched else 6.4, 2.7)
            panels = figure.subplots(1, 2 if searched else 1, squeeze=False, width_ratios=[3, 2] if searched else None)[
                0
            ]
            _roofline_lines(panels[0], gemm.cells)
            if searched:
                _search_by_rows(panels[1], searched)
            return self._svg(figure, f"Fraction of the roofline by rows, {gemm.title}")

    def roofline(self, cells: Sequence[Cell]) -> str:
        """All cells that have a time: fraction of the roofline by rows, a dot each, the median of each op as a line."""
        with _style():
            figure = _figure(9.6, 3.2)
            axes = figure.subplots()
            known = [cell for cell in cells if cell.state is not State.MISSING]
            for op, colour in COLOURS.items():
                mine = [cell for cell in known if cell.problem.op is op]
                if not mine:
                    continue
                axes.scatter(
                    [cell.bucket * _aside(op) for cell in mine], [100 * cell.fraction for cell in mine],
                    s=7, color=colour, alpha=0.35, linewidths=0,
                )  # fmt: skip
                buckets = sorted({cell.bucket for cell in mine})
                medians = [
                    statistics.median(100 * cell.fraction for cell in mine if cell.bucket == bucket)
                    for bucket in buckets
                ]
                axes.plot(buckets, medians, color=colour, linewidth=1.8, label=f"{op.value}, median")
            _rows_axis(axes, [cell.bucket for cell in known])
            _percent_axis(axes, known)
            axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
            return self._svg(figure, "Fraction of the roofline by rows, all cells")

    def model(self, cells: Sequence[Cell]) -> str:
        """Modelled against measured times, every measured candidate a dot."""
        pairs = [
            (cell.problem.op, one.time_us, one.model_us)
            for cell in cells
            for one in cell.candidates
            if one.model_us is not None
        ]
        pairs += [
            (cell.problem.op, cell.time_us, cell.model_us)
            for cell in cells
            if cell.model_ratio is not None and cell.model_us is not None and not cell.candidates
        ]
        if not pairs:
            return ""
        with _style():
            figure = _figure(4.7, 3.6)
            axes = figure.subplots()
            low = min(min(time, model) for _, time, model in pairs) / 1.2
            high = max(max(time, model) for _, time, model in pairs) * 1.2
            axes.plot([low, high], [low, high], color=_GREY, linewidth=0.8)
            axes.fill_between(
                [low, high], [low / 1.2, high / 1.2], [low * 1.2, high * 1.2], color="#eef0f2", linewidth=0
            )
            for op, colour in COLOURS.items():
                mine = [(time, model) for one, time, model in pairs if one is op]
                if mine:
                    axes.scatter(
                        [time for time, _ in mine], [model for _, model in mine], s=6, color=colour, alpha=0.4,
                        linewidths=0, label=op.value,
                    )  # fmt: skip
            axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), xlabel="measured, us",
                     ylabel="modelled, us")  # fmt: skip
            axes.legend(loc="upper left", markerscale=2)
            return self._svg(figure, "Modelled against measured times")

    def search(self, cells: Sequence[Cell]) -> str:
        """What the search found: each candidate's measured time over the cell's best, by the model's rank."""
        ranked: dict[int, list[float]] = {}
        for cell in cells:
            order = sorted(
                (one for one in cell.candidates if one.model_us is not None), key=lambda one: one.model_us or 0.0
            )
            if len(order) > 1:
                best = min(one.time_us for one in cell.candidates)
                for rank, one in enumerate(order, 1):
                    ranked.setdefault(rank, []).append(one.time_us / best)
        if not ranked:
            return ""
        with _style():
            figure = _figure(4.7, 3.6)
            axes = figure.subplots()
            for rank, ratios in sorted(ranked.items()):
                spread = [rank + 0.3 * math.sin(2.4 * i) for i in range(len(ratios))]
                axes.scatter(spread, ratios, s=6, color=COLOURS[Op.FORWARD], alpha=0.35, linewidths=0)
                axes.plot([rank - 0.4, rank + 0.4], [statistics.median(ratios)] * 2, color=_INK, linewidth=1.6)
            axes.set(xlabel="rank by the cost model, of those measured", ylabel="time / fastest of the cell")
            _ratio_axis(axes, [ratio for ratios in ranked.values() for ratio in ratios])
            axes.set_xticks(sorted(ranked)[:: max(1, len(ranked) // 12)])
            return self._svg(figure, "The search: candidates by the cost model's rank")

    def torch(self, cells: Sequence[Cell]) -> str:
        """How many times faster than torch's grouped_mm, by rows."""
        known = [(cell, ratio) for cell in cells if (ratio := cell.against_torch) is not None]
        if not known:
            return ""
        with _style():
            figure = _figure(9.6, 2.7)
            axes = figure.subplots()
            axes.axhline(1.0, color=_INK, linewidth=0.8)
            for op, colour in COLOURS.items():
                mine = [(cell.bucket * _aside(op), ratio) for cell, ratio in known if cell.problem.op is op]
                if mine:
                    axes.scatter(
                        [x for x, _ in mine], [ratio for _, ratio in mine], s=9, color=colour, alpha=0.5,
                        linewidths=0, label=op.value,
                    )  # fmt: skip
            _rows_axis(axes, [cell.bucket for cell, _ in known])
            axes.set_ylabel("times faster than torch")
            _ratio_axis(axes, [ratio for _, ratio in known])
            axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), markerscale=2)
            return self._svg(figure, "Against torch grouped_mm, by rows")

    def _svg(self, figure: Figure, label: str) -> str:
        """The figure as an SVG element whose ids are told apart from any other chart's."""
        self._drawn += 1
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
        svg = text.getvalue()
        svg = svg[svg.index("<svg") :].rstrip()
        svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.DOTALL)
        svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
        svg = re.sub(r"\n\s*", "\n", svg)
        svg = _ID.sub(rf"\g<1>c{self._drawn}-", svg)
        (width,) = re.findall(r'width="([\d.]+)pt"', svg[: svg.index(">")])
        opening = (
            rf'<svg viewBox="\1" role="img" aria-label="{label}" style="width:{float(width):.0f}pt;max-width:100%" '
            'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">'
        )
        return re.sub(r'^<svg [^>]*?viewBox="([^"]*)"[^>]*>', opening, svg)


def _style() -> AbstractContextManager[None]:
    import matplotlib as mpl

    return mpl.rc_context(_STYLE)  # type: ignore[arg-type]  # it knows its keys only as literals


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _roofline_lines(axes: Axes, cells: Sequence[Cell]) -> None:
    """A line for each op and form; measured cells filled, modelled ones hollow; torch in the op's colour, thin."""
    known = [cell for cell in cells if cell.state is not State.MISSING]
    for name in dict.fromkeys(map(form, known)):
        mine = [cell for cell in known if form(cell) == name]
        problem = mine[0].problem
        colour = COLOURS[problem.op]
        style = _STYLES.get(problem.fusion, "-.")
        axes.plot([cell.bucket for cell in mine], [100 * cell.fraction for cell in mine], style, color=colour,
                  linewidth=1.2, label=name)  # fmt: skip
        for state, face in ((State.MEASURED, colour), (State.MODELLED, "white")):
            some = [cell for cell in mine if cell.state is state]
            axes.plot([cell.bucket for cell in some], [100 * cell.fraction for cell in some], "o", color=colour,
                      markerfacecolor=face, markersize=3.4, markeredgewidth=0.9)  # fmt: skip
        timed = [
            (cell.bucket, 100 * cell.roofline.least_us / cell.torch_us)
            for cell in mine
            if cell.torch_us and cell.state is State.MEASURED  # else the roofline may be another GPU's
        ]
        if timed:
            axes.plot(*zip(*timed, strict=True), color=colour, linewidth=0.7, marker="x", markersize=3.5, alpha=0.7,
                      label=f"torch, {name}")  # fmt: skip
    _rows_axis(axes, [cell.bucket for cell in known])
    _percent_axis(axes, known)
    if known:
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=2.6)


def _search_by_rows(axes: Axes, cells: Sequence[Cell]) -> None:
    """Every measured candidate, over the fastest of its cell; the choice is ringed."""
    ratios = []
    for cell in cells:
        best = min(one.time_us for one in cell.candidates)
        mine = [one.time_us / best for one in cell.candidates]
        ratios += mine
        x = cell.bucket * _aside(cell.problem.op)
        axes.scatter([x] * len(mine), mine, s=8, color=COLOURS[cell.problem.op], alpha=0.55, linewidths=0)
        picked = [one.time_us / best for one in cell.candidates if one.config == cell.config]
        axes.scatter([x] * len(picked), picked, s=22, facecolors="none", edgecolors=_INK, linewidths=0.6)
    axes.set_title("search: candidates, the choice ringed")
    _rows_axis(axes, [cell.bucket for cell in cells], 6)
    axes.set_ylabel("time / fastest")
    _ratio_axis(axes, ratios)


def _rows_axis(axes: Axes, buckets: Sequence[int], most: int = 10) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xlabel("rows M (near)")
    if not buckets:
        return
    low, high = min(buckets).bit_length() - 1, max(buckets).bit_length() - 1
    step = -(-(high - low + 1) // most)
    ticks = [1 << power for power in range(low, high + 1, step)]
    axes.set_xticks(ticks, [_short(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlim(2.0 ** (low - 0.5), 2.0 ** (high + 0.5))


def _percent_axis(axes: Axes, cells: Sequence[Cell]) -> None:
    most = max((100 * cell.fraction for cell in cells), default=100.0)
    axes.set_ylim(0, max(100.0, 1.05 * most))
    axes.set_ylabel("% of the roofline")


def _ratio_axis(axes: Axes, ratios: Sequence[float]) -> None:
    """A logarithmic axis of ratios, with plain numbers."""
    low, high = min([1.0, *ratios]), max([1.2, *ratios])
    ticks = [
        tick for tick in (0.25, 0.5, 0.7, 0.8, 0.9, 1, 1.1, 1.2, 1.5, 2, 3, 5, 10) if low / 1.06 <= tick <= high * 1.06
    ]
    axes.set_yscale("log")
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(low / 1.06, high * 1.06)


def _aside(op: Op) -> float:
    """Ops stand side by side at one bucket."""
    return {Op.FORWARD: 0.88, Op.DX: 1.0, Op.DW: 1.14}[op]


def _short(M: int) -> str:
    for unit, letter in ((1 << 20, "M"), (1 << 10, "k")):
        if unit <= M:
            return f"{M // unit}{letter}"
    return str(M)
