"""What the cost model estimates over what was timed, by config, relative to 16 x 64 x 256: plain cells of a journal.

python benchmarks/relative_trial.py JOURNAL CANDIDATES      # prints JSON
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import geometric_mean

from pretuned.aot.evidence import Evidence
from pretuned.aot.journal import read_journal
from pretuned.aot.variants import Family
from pretuned.artifacts.store import open_bundle
from pretuned.artifacts.types import Op
from pretuned.kernels.calibration import CONSTANTS
from pretuned.kernels.chips import chip_of
from pretuned.kernels.config import Config
from pretuned.kernels.cost import Resources, estimate_us

BESIDE = "16x64x256 w4 s3 g8 tma"
BANDS = (8, 32, 128, 256)  # rows in all, up to


def main() -> None:
    contents = read_journal(Path(sys.argv[1]))
    chip = chip_of(contents.header.gpu, contents.header.sm)
    without = CONSTANTS._replace(hopper=CONSTANTS.hopper._replace(short_reads=1.0))
    known = {}
    with open_bundle(Path(sys.argv[2])) as bundle:
        for one in bundle.variants():
            if isinstance(one.op, Op) and one.alignment == 16:
                known[Family.of(one), one.cubin_sha256] = Resources.of(one)
    found = defaultdict(list)
    for (problem, M), cell in Evidence.of(contents).cells.items():
        if problem.fusion or problem.op is Op.DW or M > BANDS[-1]:
            continue
        ratio = {}
        for sha, ns in cell.times_ns.items():
            resources = known.get((Family.of(problem), sha))
            if resources is not None:
                ratio[str(Config.from_pairs(resources.config.pairs()))] = (
                    estimate_us(problem, M, resources, chip, without) * 1e3 / ns
                )
        for config, one in ratio.items():
            if BESIDE in ratio:
                band = next(most for most in BANDS if most >= M)
                found[problem.op.value, band, config].append(one / ratio[BESIDE])
    print(json.dumps({"command": " ".join(sys.argv), "gpu": contents.header.gpu.name, "cells": [
        {"op": op, "rows_to": band, "config": config, "cells": len(some), "relative": round(geometric_mean(some), 3)}
        for (op, band, config), some in sorted(found.items()) if len(some) >= 15
    ]}, indent=0))  # fmt: skip


if __name__ == "__main__":
    main()
