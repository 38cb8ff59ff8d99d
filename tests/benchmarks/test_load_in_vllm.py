"""vLLM's load with the plug-in and without: what is written, and which times count. (On a CPU vLLM loads neither.)"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import ModuleType
from typing import Any

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


def test_the_best_of_both_processes_of_a_side_counts(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    told = iter([(0.5, 0.4), (0.9, 0.3), (0.6, 0.2), (0.7, 0.5)])
    sides = []

    def child(words: list[str], seconds: float, environ: dict[str, str]) -> str:
        sides.append(environ["PRETUNED_VLLM"])
        first, later = next(told)
        report = {"seconds": {"dummy": {"first": first, "later": later}}, "experts": ["X"]}
        Path(words[words.index("--json") + 1]).write_text(json.dumps(report))
        return ""

    monkeypatch.setattr(tool, "child", child)
    given = argparse.Namespace(layers=2, vllm=None, packages=None)
    run: dict[str, Any] = tool.of_model(given, "gpt-oss-20b", Path("files"), 1.0)
    assert sides == ["0", "1"] * 2
    assert run["without"] == {"dummy": {"first": 0.5, "later": 0.2}}
    assert run["with"] == {"dummy": {"first": 0.7, "later": 0.3}}
