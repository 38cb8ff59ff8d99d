"""The result of a comparison: cells, ratios, and the lines and rows of its report."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

OURS = "pretuned"


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
