"""The interpreter with less to do gives what Triton's own does."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import warm

WORKER = Path(__file__).parents[1] / "support" / "interpret_scans.py"


@pytest.mark.slow
def test_reductions_and_scans_are_those_of_triton() -> None:
    done = warm.run([WORKER], env=os.environ | {"TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(done.stdout)
    assert results["ours"]
    assert results["quick"] == results["own"]
    assert len({tuple(row) for row in results["own"]}) == 4
    assert all(any(row) for row in results["own"])
