"""QuACK's configurations: their text form, and the fastest for each product (quack-configs.jsonl in this folder).

``128x192pp12d`` is a tile of 128 rows and 192 columns, pingpong (``co``: cooperative), a cluster of 1 x 2 blocks, and
dynamic scheduling; ``k32`` at the end is a tile of 32 along the reduction in place of QuACK's own 64.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

TABLE = Path(__file__).with_name("quack-configs.jsonl")
NOTATION = re.compile(r"(\d+)x(\d+)(pp|co)([124])([124])(d?)(?:k(\d+))?")

Cell = tuple[str, str, str, int]  # model, GEMM, op, tokens


@dataclass(frozen=True, slots=True)
class Config:
    """A configuration, with the names of QuACK's ``GemmConfig``; ``tile_k`` None is QuACK's default."""

    tile_m: int
    tile_n: int
    pingpong: bool
    cluster_m: int
    cluster_n: int
    dynamic: bool = False
    tile_k: int | None = None

    @classmethod
    def parse(cls, text: str) -> Config:
        """Parse a configuration's text. Raises ValueError if it can't be parsed."""
        match = NOTATION.fullmatch(text)
        if match is None:
            raise ValueError(f"{text!r} is no configuration of QuACK: wanted one like 128x192pp12, 128x256co11dk32")
        tile_m, tile_n, kind, cluster_m, cluster_n, dynamic, tile_k = match.groups()
        return cls(
            int(tile_m),
            int(tile_n),
            kind == "pp",
            int(cluster_m),
            int(cluster_n),
            dynamic == "d",
            int(tile_k) if tile_k else None,
        )

    def __str__(self) -> str:
        return (
            f"{self.tile_m}x{self.tile_n}{'pp' if self.pingpong else 'co'}{self.cluster_m}{self.cluster_n}"
            f"{'d' if self.dynamic else ''}{f'k{self.tile_k}' if self.tile_k else ''}"
        )


def read(path: Path = TABLE) -> dict[Cell, Config]:
    """The fastest configuration of each cell. Raises ValueError with the line that can't be read."""
    best: dict[Cell, Config] = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            row = json.loads(line)
            cell = (row["model"], row["gemm"], row["op"], row["tokens"])
            config = Config.parse(row["config"])
        except (ValueError, KeyError) as error:
            raise ValueError(f"{path}:{number}: {error}") from error
        if cell in best:
            raise ValueError(f"{path}:{number}: {' '.join(map(str, cell))} a second time")
        best[cell] = config
    return best


def usual(best: dict[Cell, Config], op: str, count: int) -> list[Config]:
    """The configurations that were most often the fastest for an op, in that order; ties in order of appearance."""
    return [config for config, _ in Counter(c for cell, c in best.items() if cell[2] == op).most_common(count)]


def to_try(best: dict[Cell, Config], cell: Cell, more: int) -> list[Config]:
    """A cell's fastest configuration and ``more`` of its op's usual ones; three more usual ones if none is recorded."""
    best_here = [best[cell]] if cell in best else []
    others = [config for config in usual(best, cell[2], more + 3) if config not in best_here]
    return best_here + others[: more if best_here else more + 3]
