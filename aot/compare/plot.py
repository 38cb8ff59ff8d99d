"""The plot of a comparison: every cell's ratio to each library, by op and tokens."""

from __future__ import annotations

import io
from importlib.util import find_spec
from pathlib import Path

from ...artifacts.errors import HostError
from .result import Comparison

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")  # distinct for colour-blind readers too


_STYLE = {
    "svg.hashsalt": "pretuned",  # the same ids for the same drawing
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.color": "#e6e8eb",
    "axes.axisbelow": True,
    "legend.frameon": False,
}


def check_available() -> None:
    """Raise HostError, with what to install, if matplotlib is missing."""
    if find_spec("matplotlib") is None:
        raise HostError('--plot needs matplotlib: pip install "pretuned[plot]"')


def plot(comparison: Comparison, kind: str) -> bytes:
    """An image of ``kind`` (png or svg) with a point for each ratio: above 1 pretuned is faster."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):  # type: ignore[arg-type]  # it knows its keys only as literals
        keys = list(dict.fromkeys((cell.op, cell.tokens) for cell in comparison.cells))
        keys.sort(key=lambda key: (("forward", "dX", "dW").index(key[0]), key[1]))
        figure = Figure(figsize=(max(6.0, 1.0 * len(keys) + 3), 3.6), layout="constrained")
        axes = figure.subplots()
        axes.axhline(1.0, color="#1f2328", linewidth=0.8)
        names = comparison.libraries
        for i, name in enumerate(names):
            points = [
                (keys.index((cell.op, cell.tokens)) + (i - (len(names) - 1) / 2) * 0.8 / len(names), ratio)
                for cell in comparison.cells
                if (ratio := cell.ratio(name)) is not None
            ]
            axes.scatter(
                [x for x, _ in points],
                [y for _, y in points],
                s=18,
                alpha=0.75,
                linewidths=0,
                color=COLOURS[i % len(COLOURS)],
                label=name,
            )
        axes.set_xticks(range(len(keys)), [f"{op}\n{tokens}" for op, tokens in keys])
        axes.set(xlabel="op, tokens", ylabel="times as fast", yscale="log")
        ratios = _ratios(comparison)
        low, high = min([1.0, *ratios]) / 1.3, max([1.5, *ratios]) * 1.3
        ticks = [tick for tick in (0.25, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20) if low <= tick <= high]
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set_title(f"pretuned compared with other libraries, bf16, {comparison.device}: above 1 pretuned is faster")
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        out = io.BytesIO()
        figure.savefig(out, format=kind, dpi=120, metadata={"Date": None} if kind == "svg" else {"Software": None})
        return out.getvalue()


def kind_of(path: Path) -> str | None:
    """png or svg by the file's name, or None."""
    return path.suffix[1:].lower() if path.suffix.lower() in (".png", ".svg") else None


def _ratios(comparison: Comparison) -> list[float]:
    ratios = (cell.ratio(name) for cell in comparison.cells for name in comparison.libraries)
    return [ratio for ratio in ratios if ratio is not None]
