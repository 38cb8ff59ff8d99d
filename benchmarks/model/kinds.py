"""Compare the fastest warp-specialised kernel with the fastest other kernel in each cell of a sweep.

    python benchmarks/run.py kinds benchmarks/results/sweep-h200-*-bf16.json

Geometric means by op and tokens, above 1 is faster; both kinds were timed in the same run.
"""

from __future__ import annotations

import argparse
import math
from collections import defaultdict
from pathlib import Path

from benchmarks.model.sweeps import load


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sweeps", nargs="+", type=Path)
    gains: dict[tuple[str, int], list[float]] = defaultdict(list)
    for path in parser.parse_args().sweeps:
        for cell in load(path):
            best = {False: math.inf, True: math.inf}
            for resources, us in zip(cell.variants, cell.times_us, strict=True):
                kind = resources.config.schedule.warp_specialized
                best[kind] = min(best[kind], us)
            if math.isfinite(best[False] + best[True]):
                gains[cell.problem.op.value, cell.tokens].append(math.log(best[False] / best[True]))
    for (op, tokens), logs in sorted(gains.items()):
        print(f"{op:8} T={tokens:<5} x {math.exp(sum(logs) / len(logs)):.2f}   ({len(logs)} cells)")
