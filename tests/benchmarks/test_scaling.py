"""The report of benchmarks/model/scaling.py on two runs."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from pretuned.aot.journal.file import Header, open_journal
from pretuned.aot.journal.records import Measured, Timing
from pretuned.artifacts.records import DType, Gpu, Op, Problem

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def scaling() -> ModuleType:
    from benchmarks.model import scaling

    return scaling


def write(path: Path, scale: float, buckets: int) -> None:
    problem = Problem(Op.FORWARD, DType.BF16, 8, 256, 128)
    with open_journal(path, Header(90, Gpu("NVIDIA H200", 132, 143771, 13000), ())) as journal:
        for i in range(buckets):
            timings = tuple(
                Timing(bytes([k]) * 32, (round(10_000 * scale) * (1 + k),) * 2, 0.001, 20, 0.001) for k in (1, 0)
            )
            journal.append([Measured(problem, 1 << i, bytes(32), timings, None, None, 1.0, 13000)])


def test_side_by_side_the_same_variants_of_the_same_cells_are_compared(scaling, tmp_path: Path) -> None:
    write(tmp_path / "one", 1.0, 12)
    write(tmp_path / "all", 1.02, 10)
    disturbed = scaling.disturbance(tmp_path / "one", tmp_path / "all")
    assert disturbed == {"cells": 10, "median": 1.02, "p10": 1.02, "p90": 1.02}


def test_the_start_counts_where_it_is_asked_for(scaling) -> None:
    legs = {"one": {"gpus": 1, "seconds": 40.0, "start_s": 4.0}, "all": {"gpus": 4, "seconds": 10.0, "start_s": 12.0}}
    scaling.judged(legs)
    assert [legs[leg]["efficiency"] for leg in ("one", "all")] == [1.0, 1.0]
    assert [legs[leg]["efficiency_with_start"] for leg in ("one", "all")] == [1.0, 0.5]


def test_the_results_are_of_the_same_cells_everywhere() -> None:
    report = json.loads((BENCHMARKS / "results" / "scaling-h200.json").read_text())
    legs = report["legs"]
    assert {"all", "one", "dask"} <= set(legs)
    for row in legs.values():
        assert (row["cells"], row["failures"], row["unfinished"]) == (legs["one"]["cells"], 0, 0)
        ideal_s = legs["one"]["seconds"] / row["gpus"]
        assert row["efficiency"] == pytest.approx(ideal_s / row["seconds"], abs=1e-3)
