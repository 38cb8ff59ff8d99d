"""The shipped bundles decide as they did when the runtime compared their times, on a sample of problems."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.start import decisions

SAMPLE = Path(__file__).parents[2] / "benchmarks/results/decisions-sample.json.xz"


@pytest.mark.slow
def test_the_decisions_of_a_sample_are_those_of_its_file() -> None:
    reference = decisions.read(SAMPLE)
    answers = [answer for cell in reference.values() for answer in cell.values()]
    assert len(answers) > 5000
    assert sum(answer is not None for answer in answers) > 1000
    names = {key.partition(" | ")[0] for key in reference}
    decided = decisions.dump(decisions.gpus(all_chips=False), only=names)
    cells = {key: decided.get(key, {}) for key in reference}
    assert decisions.differences(cells, reference) == []


def test_a_decision_that_differs_is_reported() -> None:
    before = {"a | 64 | H100 | aligned": {"kernel": "x:1", "silu k=1 checks=0": None}}
    assert decisions.differences(before, before) == []
    after = {"a | 64 | H100 | aligned": {"kernel": "x:1", "silu k=1 checks=0": "x:7"}}
    assert decisions.differences(after, before) == [
        "a | 64 | H100 | aligned: silu k=1 checks=0: None before, x:7 now",
    ]
    assert len(decisions.differences({}, before)) == 2
