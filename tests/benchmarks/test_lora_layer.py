"""The benchmark of a layer with attention and PEFT's adapters runs at a tiny size, and its ways compute the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import warm

RUN = Path(__file__).parents[2] / "benchmarks" / "run.py"


@pytest.mark.slow
@pytest.mark.parametrize("model", ["qwen3-30b", "gpt-oss-20b"])
def test_its_ways_agree(model: str) -> None:
    pytest.importorskip("peft", minversion="0.21")
    command = [RUN, "lora_layer", "--json", "-", "--model", model, "--sizes", "4,64,32,2"]
    done = warm.run([*command, "--tokens", "40", "--rounds", "1"])
    assert done.returncode == 0, done.stderr
    (cell,) = json.loads(done.stdout)["cells"]
    assert set(cell["ms"]) == {"frozen", "ours", "whole", "grouped_mm"}
    assert all(0 < difference < 3e-2 for difference in cell["difference_from_whole"].values())
    assert "not its adapter alone" not in done.stderr
