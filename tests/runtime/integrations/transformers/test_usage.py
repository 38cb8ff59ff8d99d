"""One line a model says which experts pretuned runs, or that it runs none."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from tiny_adapters import loaded
from tiny_quantised import Pair

from pretuned.artifacts.errors import InputError
from pretuned.runtime import reload

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]  # transformers' own warnings
LINES = {
    "Qwen3-MoE": "runs the experts of 2 layers of Qwen3MoeForCausalLM: E=8 H=64 I=32 bf16 silu",
    "DeepSeek-V3": "runs the experts of 1 layer of DeepseekV3ForCausalLM: E=8 H=64 I=32 bf16 silu",
    "gpt-oss": "runs the experts of 2 layers of GptOssForCausalLM: E=8 H=64 I=64 bf16 swiglu_oai",
    "Llama-4": "experts_implementation='pretuned' changes nothing in Llama4ForCausalLM: transformers hands no experts",
    "fp8": "runs the experts of 2 layers of Qwen3MoeForCausalLM: E=8 H=128 I=128 fp8_block_a16 silu",
    "int4": "runs the experts of 2 layers of Qwen3MoeForCausalLM: E=8 H=128 I=128 int4_g32 silu",
    "mxfp4": "runs the experts of 2 layers of GptOssForCausalLM: E=8 H=64 I=64 mxfp4 swiglu_oai",
}


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.INFO, "pretuned.integrations.transformers")

    def used() -> list[str]:
        said = [
            f"{record.levelname} {record.getMessage()}" for record in caplog.records if record.name.endswith(".usage")
        ]
        caplog.clear()
        return said

    return used


@pytest.mark.parametrize("name", LINES)
def test_a_model_says_once_what_runs(checkpoints: dict[str, Pair], lines: Any, name: str, tmp_path: Path) -> None:
    place = checkpoints[name].quantised if name in checkpoints else tiny_models.save(name, tmp_path)
    model = loaded(place, "pretuned", torch.bfloat16)
    (line,) = lines()
    assert line.startswith(f"{'WARNING' if name == 'Llama-4' else 'INFO'} pretuned: {LINES[name]}")
    model.train()
    model.eval()
    assert lines() == []


def test_a_model_that_changes_over_says_it_then(peft: Any, lines: Any, tmp_path: Path) -> None:
    for name in ("Qwen3-MoE", "Llama-4"):
        model = loaded(tiny_models.save(name, tmp_path / name), "eager", torch.bfloat16)
        model.train()
        assert lines() == []
        model.set_experts_implementation("pretuned")
        (line,) = lines()
        assert LINES[name] in line
        model.set_experts_implementation("eager")
        assert lines() == []


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PRETUNED_STRICT", "1")
    reload()
    yield
    monkeypatch.undo()
    reload()


def test_strict_refuses_a_model_that_takes_the_name_and_runs_without(peft: Any, strict: None, tmp_path: Path) -> None:
    place = tiny_models.save("Llama-4", tmp_path)
    with pytest.raises(InputError, match="changes nothing in Llama4ForCausalLM"):
        loaded(place)
    loaded(place, "eager")


def test_experts_that_can_t_run_are_reported_with_the_reason(checkpoints: dict[str, Pair], lines: Any) -> None:
    model = loaded(checkpoints["fp8"].quantised, "eager")
    experts = model.model.layers[0].mlp.experts
    experts.down_proj_scale_inv = torch.nn.Parameter(torch.ones(8, 2, 2), requires_grad=False)
    model.set_experts_implementation("pretuned")
    whose = "experts of 1 layer of Qwen3MoeForCausalLM"
    first, second = sorted(lines())
    assert first == f"INFO pretuned: runs the {whose}: E=8 H=128 I=128 fp8_block_a16 silu"
    assert second.startswith(f"WARNING pretuned: leaves the {whose} to their own code: ")


def test_offloaded_experts_are_described_by_their_class(peft: Any, lines: Any) -> None:
    import transformers

    config = transformers.AutoConfig.for_model(tiny_models.MODELS["Qwen3-MoE"][0], num_hidden_layers=1)
    config._experts_implementation = "pretuned"
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.eval()
    assert lines() == ["INFO pretuned: runs the experts of 1 layer of Qwen3MoeForCausalLM: Qwen3MoeExperts"]
