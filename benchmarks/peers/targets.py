"""Compare quantised products with their targets against other libraries, and with the limits that the files show.

    python benchmarks/run.py targets

Of quantised-peers-h100.jsonl and fp8-peers-h100.jsonl, which beside_quantised measured: every cell's time of ours and
of the fastest other library, and its bytes: those of w's experts that have rows, with their scales, of x as the product
reads it and of y.

Up to 1,024 tokens the *bound* is a product that reads at the highest rate of any cell of the two files up to 128
tokens, whoever ran it, and beside that takes the least of any cell of its format and tokens. At 8,192 tokens the
arithmetic bounds: there the same products in bf16 stand beside, and one dense product of torch of as many FLOPs, of
kernels-h100.json (a run of its own, on another day).
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from pretuned.aot.measure.inputs import routed_rows
from pretuned.artifacts.records import PRECISIONS

from ..model.tables import ROOT
from .beside_quantised import peer_of
from .products import INT4, MODELS

RESULTS = ROOT / "benchmarks" / "results"
FILES = ("quantised-peers-h100.jsonl", "fp8-peers-h100.jsonl")
TOKENS = (1, 16, 128, 1024, 8192)
TARGETS = {  # two thirds of the way from the best library's time to the bound by bytes and arithmetic
    "fp8 blocks": (1.08, 1.04, 1.04, 1.11, 1.14),
    "mxfp4": (1.22, 1.19, 1.23, 1.40, 1.25),
    "int4": (1.06, 1.10, 1.20, 1.26, 1.04),
}
READS = 128  # tokens up to which memory is the bound


class Cell(NamedTuple):
    """One measured product of a model at a number of tokens."""

    format: str
    model: str
    gemm: str
    tokens: int
    us: float
    best_us: float
    bytes: int
    flops: float

    @property
    def kind(self) -> str:
        """The cell's row in the table of targets."""
        return "int4" if self.format in INT4 else "fp8 blocks" if self.format == "fp8_block" else self.format


def bytes_of(format: str, sizes: tuple[int, int, int], tokens: int, top_k: int) -> tuple[int, int]:
    """Return the bytes that a product of w [E, N, K] reads and writes; fp8 blocks read x as codes with scales."""
    E, N, K = sizes
    M, active = tokens * top_k, int((routed_rows(E, top_k, tokens) > 0).sum())
    x_bytes = M * (K + K // 32 if format == "fp8_block" else 2 * K)
    return active * PRECISIONS[format].w_bytes(N, K) + x_bytes, 2 * M * N


def cell_of(row: dict[str, Any]) -> Cell:
    """The cell of a line of a file."""
    N, K, T, top_k = (*(row[name] for name in ("N", "K", "tokens")), MODELS[row["format"]][row["model"]][3])
    moved = sum(bytes_of(row["format"], (row["E"], N, K), T, top_k))
    others = [us for name, us in row["us"].items() if peer_of(name) is not None]
    us = row["us"].get("ours, of codes", row["us"]["ours"])
    return Cell(row["format"], row["model"], row["gemm"], T, us, min(others), moved, 2.0 * T * top_k * N * K)


def read(folder: Path = RESULTS) -> list[Cell]:
    """All cells of both files."""
    lines = [line for name in FILES for line in (folder / name).read_text().splitlines()]
    return [cell_of(json.loads(line)) for line in lines]


def mean(cells: list[Cell], of: Callable[[Cell], float]) -> float:
    return statistics.geometric_mean(map(of, cells))


class Limits:
    """The cells of all files, and the figures that compare them."""

    def __init__(self, cells: list[Cell], dense: dict[tuple[str, str], dict[str, float]] | None = None) -> None:
        self.cells, self._dense = cells, dense or {}

    @cached_property
    def rate(self) -> float:
        """Bytes a microsecond of the cell that reads fastest, up to ``READS`` tokens."""
        return max(cell.bytes / min(cell.us, cell.best_us) for cell in self.cells if cell.tokens <= READS)

    def column(self, kind: str, tokens: int) -> list[Cell]:
        """The cells of a row of the targets at a number of tokens."""
        return [cell for cell in self.cells if (cell.kind, cell.tokens) == (kind, tokens)]

    def beside_us(self, column: list[Cell]) -> float:
        """The least of (a cell's time minus the time of its bytes), over our times and the best libraries'."""
        return min(min(cell.us, cell.best_us) - cell.bytes / self.rate for cell in column)

    def spread(self, column: list[Cell]) -> str:
        """The least and the most of (time minus the time of the bytes), for ours and for the best libraries."""
        rests = [
            [us - cell.bytes / self.rate for cell in column for us in (cell.us, cell.best_us)][i::2] for i in (0, 1)
        ]
        return "; ".join(f"{min(times):.0f} to {max(times):.0f}" for times in rests)

    def bound_us(self, column: list[Cell]) -> Callable[[Cell], float]:
        """Return the function that computes the bound's time in us for a cell of the column."""
        beside = self.beside_us(column)
        return lambda cell: beside + cell.bytes / self.rate

    def beside_bf16(self, column: list[Cell], what: str) -> str:
        """The mean of ``what`` in kernels-h100.json over our time, for products in both files; empty without any."""
        there = [cell for cell in column if (cell.model, cell.gemm) in self._dense]
        if not there:
            return ""
        return f"{mean(there, lambda cell: self._dense[cell.model, cell.gemm][what] / cell.us):.2f}"

    def rows(self) -> Iterator[str]:
        """Yield the table's lines, a line for each kind and number of tokens."""
        for kind, targets in TARGETS.items():
            for tokens, target in zip(TOKENS, targets, strict=True):
                column = self.column(kind, tokens)
                ahead = mean(column, lambda cell: cell.best_us / cell.us)
                said = [f"{kind}, {tokens:,}", f"{target:.2f}", f"{ahead:.2f}"]
                said.append("yes" if round(ahead, 2) >= target else "no")
                said.append(f"{mean(column, lambda cell: cell.bytes / cell.us) / 1e6:.2f}")
                said.append(f"{mean(column, lambda cell: cell.flops / cell.us) / 1e6:,.0f}")
                if tokens < TOKENS[-1]:
                    to = self.bound_us(column)
                    said.append(f"{mean(column, lambda cell, to=to: cell.best_us / to(cell)):.2f}")
                    said.append(f"{mean(column, lambda cell, to=to: to(cell) / cell.us):.2f}")
                else:
                    said += ["", ""]
                said.append(self.spread(column) if tokens <= READS else "")
                bf16 = tokens == TOKENS[-1]
                said += [self.beside_bf16(column, field) if bf16 else "" for field in ("us", "dense_same_flops_us")]
                yield "| " + " | ".join(said) + " |"


def in_bf16(folder: Path = RESULTS) -> dict[tuple[str, str], dict[str, float]]:
    """The forward cells of kernels-h100.json at 8,192 tokens, by model and product."""
    cells = json.loads((folder / "kernels-h100.json").read_text())["cells"]
    return {
        (cell["model"], cell["gemm"]): cell for cell in cells if (cell["op"], cell["tokens"]) == ("forward", TOKENS[-1])
    }


def main(args: list[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.parse_args(args)
    limits = Limits(read(), in_bf16())
    rows = list(limits.rows())
    fastest = f"the cell that reads fastest: {limits.rate / 1e6:.2f} TB/s"
    print("\n".join(["| format, tokens | target |", *rows, fastest]))
    return 0
