"""The heuristics on models left out: on the committed sweeps, with the constants as they are."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import ModuleType

import pytest

from pretuned.aot.journal.file import Header, open_journal
from pretuned.aot.journal.records import Measured, Timing
from pretuned.aot.models.load import load_models
from pretuned.aot.plan.families import Family
from pretuned.aot.plan.plan import plan
from pretuned.artifacts.format import codec
from pretuned.artifacts.records.problem import Op
from pretuned.kernels.contract.config import Config, Loads

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
JOBS = Path(__file__).parents[1] / "support"
MODELS = ["Qwen/Qwen3-30B-A3B tokens=16..64", "allenai/OLMoE-1B-7B-0924 tokens=16..64", "shape:E=8,H=512,I=256,k=2"]
RESULTS = BENCHMARKS / "results"


@pytest.fixture
def tool() -> ModuleType:
    from benchmarks.model import heuristics

    return heuristics


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


def test_a_journal_will_do(tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real journal, of made-up times: the first of two variants takes 10 us, the other 8."""
    monkeypatch.syspath_prepend(str(JOBS))
    import fakemeasure

    planned = plan(load_models(MODELS).shapes)
    slow, quick = Config(64, 128, 64, 4, 4, loads=Loads.TMA), Config(128, 128, 64, 8, 3, loads=Loads.TMA)
    both = [fakemeasure.bundle(planned, config=config, modelled=True) for config in (slow, quick)]
    candidates = dataclasses.replace(
        both[0],
        variants=both[0].variants + both[1].variants,
        cubins=both[0].cubins + both[1].cubins,
    )
    (tmp_path / "candidates.msgpack").write_bytes(codec.encode(candidates))
    with open_journal(tmp_path / "journal", Header(90, fakemeasure.H200, candidates.kernels)) as journal:
        for problem, buckets in planned.buckets.items():
            able = [one for one in candidates.variants if Family.of(one) == Family.of(problem) and one.alignment == 16]
            timings = tuple(
                Timing(one.cubin_sha256, (us * 1000, us * 1000), 0.01, 10, 1e-3)
                for one, us in zip(able, (10, 8), strict=True)
            )
            journal.append(
                Measured(problem, bucket, able[0].cubin_sha256, timings, None, (9000, 9000), 1.0, 13000)
                for bucket in buckets
            )
    cells, torch_us = tool.journal_cells(tmp_path / "journal", tmp_path / "candidates.msgpack", MODELS)
    assert {cell.model for cell in cells} == {model.name for model in planned.models}
    assert all(sorted(cell.times_us) == [8.0, 10.0] and torch_us[cell] == 9.0 for cell in cells)
    row = tool.summary(tool.left_out(cells, torch_us, 0))["all"]
    assert row["cells"] == row["compared_with_torch"] == len(cells)
    assert row["mean_loss"] == row["slower_than_torch_by_over_3_percent"] == 0  # only what was quick ships
