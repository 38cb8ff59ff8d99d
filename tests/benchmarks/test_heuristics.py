"""The heuristics on models left out: on the committed sweeps, with the constants as they are."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from pretuned.artifacts.types import Op

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
RESULTS = BENCHMARKS / "results"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script, whose neighbours it imports as a script does."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import heuristics

    yield heuristics
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCHMARKS)):
            del sys.modules[name]


def test_every_model_is_left_out_once_and_within_the_goals(tool: ModuleType) -> None:
    cells = tool.load(RESULTS / "sweep-h200-dW-bf16.json")
    judged = tool.left_out(cells, tool.torch_times(cells), 0)
    assert sorted(str(one.cell) for one in judged) == sorted(map(str, cells))
    row = tool.summary(judged)["all"]
    assert 0 <= row["mean_loss"] < tool.MEAN_GOAL
    assert 0 <= row["worst_loss"] < tool.WORST_GOAL
    assert row["compared_with_torch"] == sum(cell.tokens >= 1024 for cell in cells)


def test_what_is_picked_was_shipped_for_the_other_models_alone(tool: ModuleType) -> None:
    cells = [cell for cell in tool.load(RESULTS / "sweep-h200-forward-bf16.json") if cell.tokens in (16, 8192)]
    models = list(dict.fromkeys(cell.model for cell in cells))
    judged = tool.left_out(cells, {}, 0)
    for fold in range(tool.FOLDS):
        out = models[fold :: tool.FOLDS]
        ships = tool.shipped([cell for cell in cells if cell.model not in out])
        assert len(ships) <= tool.CONFIG_LIMIT
        assert {one.picked for one in judged if one.cell.model in out} <= {str(one.config) for one in ships}
    assert all(one.picked_us is None or one.picked_us >= one.tuned_us for one in judged)


def test_the_recorded_result_is_of_these_sweeps(tool: ModuleType) -> None:
    recorded = json.loads((RESULTS / "heuristics-h200-bf16.json").read_text())
    cells = {
        (cell.model, cell.tokens, str(cell.problem), min(cell.times_us))
        for op in Op
        for cell in tool.load(RESULTS / f"sweep-h200-{op.value}-bf16.json")
    }
    assert {(c["model"], c["tokens"], c["problem"], c["tuned_us"]) for c in recorded["cells"]} == cells
    assert recorded["goals"]["reached"]
    assert recorded["summary"]["all"]["cells"] == len(cells)
