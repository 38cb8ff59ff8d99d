"""Which code runs on which GPUs."""

from __future__ import annotations

import pytest

from pretuned.artifacts.records import Target


@pytest.mark.parametrize(
    ("target", "runs", "does_not"),
    [
        (Target(90, True), (90,), (89, 91, 100)),
        (Target(80, False), (80, 86, 89), (79, 87, 90)),
        (Target(86, False), (86, 89), (80, 87, 90)),
        (Target(87, False), (87,), (80, 86, 89)),  # Tegra's alone
        (Target(120, False), (120, 121), (100, 119, 130)),
        (Target(120, True), (120,), (121,)),
    ],
    ids=str,
)
def test_where_code_runs(target: Target, runs: tuple[int, ...], does_not: tuple[int, ...]) -> None:
    assert all(target.runs_on(sm) for sm in runs)
    assert not any(target.runs_on(sm) for sm in does_not)
