"""The estimates of products of codes with a scale a row, beside what was measured."""

from __future__ import annotations

import math
from pathlib import Path

from pretuned.aot.journal.file import read_journal
from pretuned.aot.journal.records import Measured
from pretuned.artifacts.records import DType, Op
from pretuned.kernels.chips import chip_named
from pretuned.kernels.cost import Resources
from pretuned.kernels.cost_model import estimate_us
from pretuned.kernels.search import candidates, shared_bytes_at_least

JOURNAL = Path(__file__).parents[3] / "benchmarks/results/fp8-channel-h100.journal.xz"
H100 = chip_named("NVIDIA H100 80GB HBM3")
POOL = [
    Resources(config, 384, shared_bytes_at_least(Op.FORWARD, DType.FP8_CHANNEL, config, 90), 168)
    for config in candidates(Op.FORWARD, DType.FP8_CHANNEL, 90)
]


def test_within_an_eighth_of_what_was_measured_in_the_mean() -> None:
    """Of all rows. The constants were fitted to an earlier run, of eight of these sizes and 1 to 8,192 tokens."""
    assert H100 is not None
    off = []
    for record in read_journal(JOURNAL).records:
        if isinstance(record, Measured) and record.problem.dtype is DType.FP8_CHANNEL:
            best = min(timing.time_ns for timing in record.timings) / 1e3
            modelled = min(estimate_us(record.problem, record.bucket, config, H100) for config in POOL)
            off.append(math.log(modelled / best))
    print(math.sqrt(sum(error * error for error in off) / len(off)))
    assert len(off) == 782
    assert math.sqrt(sum(error * error for error in off) / len(off)) < 0.125
