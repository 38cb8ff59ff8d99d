"""The result of a comparison: cells, ratios, the lines and rows of its report, and a plot of the ratios."""

from __future__ import annotations

import io
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ...artifacts.errors import HostError

OURS = "pretuned"
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


@dataclass(frozen=True, slots=True)
class ComparedCell:
    """One product and number of tokens. ``us``: median microseconds by library, with pretuned; ``error`` likewise.

    ``left_out``: installed libraries without a time, with the reason. ``runs``: the kernel that pretuned selected.
    """

    model: str
    tp: int
    ep: int
    gemm: str
    op: str
    tokens: int
    M: int
    E: int
    N: int
    K: int
    runs: str
    us: dict[str, float]
    error: dict[str, float]
    left_out: dict[str, str]

    @property
    def where(self) -> str:
        """The cell in words."""
        return f"{self.gemm} {self.op} at {self.tokens} tokens"

    @property
    def tflops(self) -> float | None:
        """2 M N K over pretuned's time, in 1e12/s."""
        return 2e-6 * self.M * self.N * self.K / self.us[OURS] if OURS in self.us else None

    def ratio(self, library: str) -> float | None:
        """A library's time over pretuned's: above 1 pretuned is faster. None if either has no time."""
        if library not in self.us or OURS not in self.us:
            return None
        return self.us[library] / self.us[OURS]


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of a run. ``versions``: of the installed libraries; ``absent``: why the others could not be tried."""

    device: str
    versions: dict[str, str]
    absent: dict[str, str]
    cells: tuple[ComparedCell, ...]
    seconds: float

    @property
    def libraries(self) -> list[str]:
        """The libraries with a time in some cell."""
        return [name for name in self.versions if any(name in cell.us for cell in self.cells)]

    @property
    def wrong(self) -> list[ComparedCell]:
        """The cells in which pretuned's result is wrong."""
        return [cell for cell in self.cells if OURS not in cell.us]

    def headlines(self) -> Iterator[str]:
        """Yield a line for each library: how many times as fast pretuned is."""
        for name in self.libraries:
            ratios = [(ratio, cell) for cell in self.cells if (ratio := cell.ratio(name)) is not None]
            if not ratios:
                continue
            mean = statistics.geometric_mean(ratio for ratio, _ in ratios)
            least, most = (choose(ratios, key=lambda pair: pair[0]) for choose in (min, max))
            yield (
                f"{mean:.2f} x {name} over {_cells(len(ratios))}: least {least[0]:.2f} ({least[1].where}), "
                f"most {most[0]:.2f} ({most[1].where})"
            )

    def omissions(self) -> Iterator[str]:
        """Yield the libraries that were left out, with cells and reasons."""
        counts = Counter((name, why) for cell in self.cells for name, why in cell.left_out.items())
        for (name, why), count in counts.items():
            yield f"{name} in {_cells(count)} of {len(self.cells)}: {why}"
        for name, why in self.absent.items():
            yield f"{name}: {why}"

    def to_dict(self) -> dict[str, Any]:
        """The comparison as plain values for JSON: libraries are keys, ``_`` in place of blanks."""
        cells = [
            {
                **asdict(cell),
                "us": _keyed(cell.us),
                "error": _keyed(cell.error),
                "left_out": _keyed(cell.left_out),
                "tflops": cell.tflops,
                "ratio": _keyed({name: cell.ratio(name) for name in self.libraries}),
            }
            for cell in self.cells
        ]
        return {
            "device": self.device,
            "seconds": round(self.seconds, 1),
            "versions": _keyed(self.versions),
            "absent": _keyed(self.absent),
            "headlines": list(self.headlines()),
            "left_out": list(self.omissions()),
            "cells": cells,
        }


def _keyed(by_library: Mapping[str, Any]) -> dict[str, Any]:
    return {name.replace(" ", "_"): value for name, value in by_library.items()}


def _cells(count: int) -> str:
    return f"{count} cell{'' if count == 1 else 's'}"


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
