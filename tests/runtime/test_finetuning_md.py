"""The examples of docs/runtime/finetuning.md, and examples/finetune_lora.py, run as they stand on small models."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_quantised
import torch

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "runtime" / "finetuning.md"
pytestmark = [pytest.mark.filterwarnings("ignore")]  # transformers' and PEFT's own


@pytest.fixture
def keeps_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp8 stays fp8 without the GPU that transformers asks for; loaders are transformers' own afterwards."""
    auto = pytest.importorskip("transformers.quantizers.auto")
    fp8 = pytest.importorskip("transformers.quantizers.quantizer_finegrained_fp8")
    monkeypatch.setattr(fp8.FineGrainedFP8HfQuantizer, "validate_environment", lambda self, *_, **__: None)
    for name in ("mxfp4", "compressed-tensors"):
        monkeypatch.setitem(auto.AUTO_QUANTIZER_MAPPING, name, auto.AUTO_QUANTIZER_MAPPING[name])


@pytest.mark.slow
@pytest.mark.usefixtures("keeps_codes")
def test_the_examples_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    transformers = pytest.importorskip("transformers", minversion="5.8")
    pytest.importorskip("peft", minversion="0.21")
    config = transformers.AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=97,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=24,
        intermediate_size=48,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "Qwen" / "Qwen3-30B-A3B")
    tiny_quantised.fp8(tmp_path / "fp8").quantised.rename(tmp_path / "Qwen" / "Qwen3-30B-A3B-FP8")
    (tmp_path / "openai").mkdir()
    tiny_quantised.mxfp4(tmp_path / "mxfp4").quantised.rename(tmp_path / "openai" / "gpt-oss-20b")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 5
    saved = iter(("adapter", "adapter-fp8", "adapter-mxfp4"))
    codes = iter((torch.bfloat16, torch.float8_e4m3fn, torch.uint8))
    names: dict[str, Any] = {"__name__": "example"}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)  # our own page
        if "model" in names and "first" not in names:
            grads = {name for name, parameter in names["model"].named_parameters() if parameter.grad is not None}
            assert any("experts" in name for name in grads)
            assert all("lora_" in name for name in grads)
            assert (tmp_path / next(saved) / "adapter_model.safetensors").exists()
            kind = next(codes)
            assert {
                parameter.dtype
                for name, parameter in names["model"].named_parameters()
                if "down_proj" in name and "bias" not in name and "scale" not in name
            } == {kind}
        else:
            assert all(names[name].B.grad.any() for name in ("first", "second"))
    assert "not its adapter alone" not in caplog.text


@pytest.mark.slow
def test_the_example_learns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft", minversion="0.21")
    out = tmp_path / "adapter"
    options = ["--tiny", "--steps", "12", "--batch", "2", "--length", "32", "--rank", "4", "--rate", "2e-2"]
    monkeypatch.setattr(sys, "argv", ["finetune_lora.py", *options, "--out", str(out)])
    losses = runpy.run_path(str(ROOT / "examples" / "finetune_lora.py"))["main"]()
    assert losses[-1] < losses[0] - 0.05
    assert all(torch.isfinite(torch.tensor(losses)))
    assert (out / "adapter_config.json").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("keeps_codes")
@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
def test_the_example_learns_beside_quantised_experts(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers", minversion="5.23")
    pytest.importorskip("peft", minversion="0.21")
    model, text, out = getattr(tiny_quantised, kind)(tmp_path).quantised, tmp_path / "a.txt", tmp_path / "adapter"
    text.write_text("abcdefgh" * 64)
    options = ["--model", str(model), "--text", str(text), "--steps", "12", "--batch", "2", "--length", "32"]
    options += ["--rank", "4", "--rate", "2e-2", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["finetune_lora.py", *options])
    losses = runpy.run_path(str(ROOT / "examples" / "finetune_lora.py"))["main"]()
    assert losses[-1] < losses[0] - 0.05
    assert (out / "adapter_config.json").exists()
