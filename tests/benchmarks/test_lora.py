"""The benchmark of LoRA runs at a tiny size, and its ways compute the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import warm

RUN = Path(__file__).parents[2] / "benchmarks" / "run.py"


@pytest.mark.slow
@pytest.mark.parametrize("weights", [None, "mxfp4"])
def test_its_ways_agree(weights: str | None) -> None:
    command = [RUN, "lora", "--json", "-", "--sizes", "4,64,32,2", "--tokens", "40", "--rounds", "1"]
    command += [] if weights is None else ["--weights", weights]
    done = warm.run(command)
    assert done.returncode == 0, done.stderr
    (cell,) = json.loads(done.stdout)["cells"]
    also = {"codes", "dequantised"} if weights else set()
    assert set(cell["ms"]) == {"frozen", "ours", "torch", "whole"} | also
    assert all(0 < difference < 3e-2 for difference in cell["difference_from_torch"].values())
