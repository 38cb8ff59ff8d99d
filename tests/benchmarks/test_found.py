"""The time until a first choice is made, of real processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

RUN = Path(__file__).parents[2] / "benchmarks" / "run.py"


@pytest.mark.nightly
def test_each_way_to_find_a_bundle_is_timed(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    done = subprocess.run(
        [sys.executable, RUN, "found", "--runs", "1", "--out", out], capture_output=True, text=True, check=True
    )
    report = json.loads(out.read_text())
    for way in ("file", "directory", "installed", "modelled"):
        assert 0 < report[way]["least"] <= report[way]["ms"]
        assert f"{way} " in done.stdout
