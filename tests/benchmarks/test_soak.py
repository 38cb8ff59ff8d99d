"""Memory growth as the soak test defines it, by the counts of a real run. No GPU is needed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[1] / "gpu"
sys.path.append(str(HERE))
import soak  # noqa: E402

TENTHS = json.loads((HERE.parents[1] / "benchmarks/results/soak-h100.json").read_text())["held after each tenth"]


def test_what_goes_up_and_down_is_no_growth():
    assert soak.grown(TENTHS) == {"descriptors": 0, "host": 3.2, "gpu": -22.0}


@pytest.mark.parametrize(("name", "each"), [("descriptors", 2), ("host", 10.0), ("gpu", 6.0)])
def test_what_is_never_given_back_is_growth(name, each):
    """Of the least that each fails by: in ten tenths so much a tenth, beside all that goes up and down."""
    leaks = [{**tenth, name: tenth[name] + each * i} for i, tenth in enumerate(TENTHS)]
    assert soak.grown(leaks)[name] > {**soak.MOST_MIB, "descriptors": soak.MOST_DESCRIPTORS}[name]
