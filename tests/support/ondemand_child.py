"""A user's program that compiles on demand, for seconds, or measures, for a minute: ``... compile|measure``."""

from __future__ import annotations

import sys

from pretuned.aot.demand.tuner import measure_in_child
from pretuned.aot.demand.worker import compile_in_child
from pretuned.aot.plan.plan import BuildPlan
from pretuned.artifacts.records import PLAIN_DTYPES, DType, Op, Problem

if __name__ == "__main__":
    if sys.argv[1] == "compile":
        compile_in_child(Problem(Op.DX, DType.FP16, 8, 256, 128), 90)  # of fp16 no candidates ship
    else:
        problems = [Problem(op, dtype, 8, 256, 128) for op in Op for dtype in DType if dtype in PLAIN_DTYPES]
        measure_in_child(BuildPlan(dict.fromkeys(problems, (1, 64, 4096)), ()), 90, 0)
