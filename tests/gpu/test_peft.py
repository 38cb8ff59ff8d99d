"""PEFT's adapters on the experts of a layer at its true size, on a real GPU: PEFT's own results, by code of pretuned's.

python -m pytest -q tests/gpu/test_peft.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_quantised
import torch

from pretuned.integrations.transformers import register
from pretuned.integrations.transformers.packed import keep_mxfp4
from pretuned.integrations.transformers.quantised import quantised
from pretuned.runtime import reload
from pretuned.runtime.dispatch import snapshot

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore"),  # transformers' and PEFT's own
]
LAYERS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "hidden_size": 2048,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
    },
    "gpt_oss": {
        "hidden_size": 2880,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
    },
}
DEVICE = "cuda"
QUANTISED = {"mxfp4": "gpt_oss", "fp8": "qwen3_moe"}
NAMES = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def step(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Logits and the adapters' gradients."""
    model.zero_grad()
    logits = model(input_ids=ids).logits
    logits.float().square().mean().backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return {"logits": logits.detach(), **grads}


def near(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert set(got) == set(wanted)
    assert len(got) == 5
    for name, tensor in wanted.items():
        assert float((got[name].float() - tensor.float()).norm() / tensor.float().norm()) < 2e-2, name


@pytest.mark.parametrize("T", [96, 2048])
@pytest.mark.parametrize("kind", LAYERS)
def test_logits_and_gradients_are_peft_s_own(kind: str, T: int, caplog: pytest.LogCaptureFixture) -> None:
    """Qwen3-30B-A3B's layer and gpt-oss-20b's; the router has the same input in both, so no token goes elsewhere."""
    peft, transformers = pytest.importorskip("peft", minversion="0.21"), pytest.importorskip("transformers", "5.8")
    register()
    config = transformers.AutoConfig.for_model(
        kind, vocab_size=256, num_hidden_layers=1, pad_token_id=0, **LAYERS[kind]
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        how = {"r": 16, "lora_alpha": 32, "init_lora_weights": False, "target_modules": [], "target_parameters": NAMES}
        model = peft.get_peft_model(model, peft.LoraConfig(**how))
    ids = torch.randint(0, 256, (2, T // 2), device="cuda")

    def run(experts: str) -> dict[str, torch.Tensor]:
        model.get_base_model().set_experts_implementation(experts)
        return step(model, ids)

    reload()
    wanted = run("grouped_mm")
    for _ in range(2):  # the second by its plan
        got = run("pretuned")
        near(got, wanted)
    assert "not its adapter alone" not in caplog.text
    ran = {key[1]: ready for key, ready in snapshot.snapshot().launchers.items() if key[0] == "low rank"}
    assert set(ran) == {"forward", "dX"}
    assert all(ran.values())


@pytest.mark.parametrize("format", QUANTISED)
def test_adapters_on_quantised_experts_are_those_of_the_dequantised_model(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """gpt-oss-20b's layer in mxfp4, Qwen3-30B-A3B's in fp8 blocks: codes stay codes, and PEFT's results stay PEFT's."""
    peft, transformers = pytest.importorskip("peft", minversion="0.21"), pytest.importorskip("transformers", "5.23")
    from transformers.quantizers import auto
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    register()
    monkeypatch.setitem(auto.AUTO_QUANTIZER_MAPPING, "mxfp4", auto.AUTO_QUANTIZER_MAPPING["mxfp4"])
    keep_mxfp4()
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda self, *_, **__: None)
    with torch.device(DEVICE):  # drawn there: on a processor a layer's weights take half a minute
        pair = getattr(tiny_quantised, format)(tmp_path, num_hidden_layers=1, **LAYERS[QUANTISED[format]])

    def run(place: Path, experts: str) -> dict[str, torch.Tensor]:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            place, experts_implementation=experts, dtype=torch.bfloat16, device_map=DEVICE
        )
        kept = [
            quantised(module, "gate_up_proj") is not None
            for module in model.modules()
            if "is_transposed" in vars(module)
        ]
        assert kept == [experts == "pretuned"]
        how = {"r": 16, "lora_alpha": 32, "target_modules": [], "target_parameters": NAMES}
        model = peft.get_peft_model(model, peft.LoraConfig(**how))
        generator = torch.Generator(DEVICE).manual_seed(1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator, device=DEVICE))
        ids = torch.randint(0, 256, (2, 512), generator=torch.Generator().manual_seed(2)).to(DEVICE)
        step(model, ids)
        return step(model, ids)  # by its plan

    reload()
    wanted = run(pair.twin, "grouped_mm")
    got = run(pair.quantised, "pretuned")
    near(got, wanted)
