"""vLLM's load with the plug-in and without: what is written, whose turn it is, and which times count."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    from benchmarks.peers import load_in_vllm

    return load_in_vllm


@pytest.mark.parametrize("model", ["gpt-oss-20b", "qwen3-30b-fp8"])
def test_a_checkpoint_has_every_expert_of_its_config(tool: ModuleType, model: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    sizes = {"hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 128}
    config = tool.config_of(model, 2, num_experts=3, num_local_experts=3, **sizes)
    size = tool.write(tmp_path / "files", config, 0, "cpu")
    assert json.loads((tmp_path / "files" / "config.json").read_text()) == config
    files = sorted((tmp_path / "files").glob("*.safetensors"))
    assert sum(file.stat().st_size for file in files) == size
    named = [load_file(file) for file in files]
    assert [len(tensors) for tensors in named] == [6 if model == "gpt-oss-20b" else 2 * 3 * 3] * 2
    assert all(name.startswith(f"model.layers.{i}.mlp.experts.") for i in range(2) for name in named[i])
    assert not any(tensor.float().isnan().any() for tensor in named[1].values())


def test_sides_take_turns_after_a_first_load_of_each(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRETUNED_VLLM", "")
    monkeypatch.setattr(gc, "collect", lambda: 0)  # all that the tests before have left takes half a second each time
    for turns in (3, 4):
        ran: list[tuple[str, str]] = []
        tool.in_turns(turns, lambda side, ran=ran: ran.append((side, os.environ["PRETUNED_VLLM"])))
        assert [ran.count(turn) for turn in (("without", "0"), ("with", "1"))] == [1 + turns] * 2
        assert "".join(switch for _, switch in ran).startswith("01011001")


def test_a_summary_leaves_the_first_load_out(tool: ModuleType) -> None:
    times = {"without": {"weights": [900.0, 10.0, 12.0, 11.0]}, "with": {"weights": [800.0, 22.0, 20.0, 24.0]}}
    ended = {"without": {"whole": [1.0]}, "with": {"whole": [1.0, 2.0, 3.0]}}  # vLLM stopped it
    report = {"model": "m", "ms": {"safetensors": times, "reload": ended}, "experts": {"with": ["X"]}}
    lines = list(tool.summary(report))
    assert len(lines) == 2
    assert "without     11.0" in lines[0]
    assert "with     22.0" in lines[0]
    assert lines[0].endswith("2.000")


def test_phases_are_timed_whole(tool: ModuleType) -> None:
    times: list[float] = []
    assert tool.timed(divmod, times)(7, 2) == (3, 1)
    assert len(times) == 1
    assert times[0] >= 0
