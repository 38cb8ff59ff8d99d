"""PEFT's adapters on the experts of a layer at its true size, on a real GPU: PEFT's own results, by code of pretuned's.

python -m pytest -q tests/gpu/test_peft.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pretuned.integrations.transformers import register
from pretuned.runtime import reload
from pretuned.runtime.dispatch import snapshot

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore"),  # transformers' and PEFT's own
]
LAYERS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "hidden_size": 2048, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    },
    "gpt_oss": {
        "hidden_size": 2880, "num_local_experts": 32, "num_experts_per_tok": 4, "intermediate_size": 2880,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    },
}  # fmt: skip


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
        names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
        how = {"r": 16, "lora_alpha": 32, "init_lora_weights": False, "target_modules": [], "target_parameters": names}
        model = peft.get_peft_model(model, peft.LoraConfig(**how))
    ids = torch.randint(0, 256, (2, T // 2), device="cuda")

    def run(experts: str) -> dict[str, torch.Tensor]:
        model.get_base_model().set_experts_implementation(experts)
        model.zero_grad()
        logits = model(input_ids=ids).logits
        logits.float().square().mean().backward()
        grads = {name: one.grad for name, one in model.named_parameters() if one.grad is not None}
        return {"logits": logits.detach(), **grads}

    reload()
    wanted = run("grouped_mm")
    for _ in range(2):  # the second by its plan
        found = run("pretuned")
        assert set(found) == set(wanted)
        assert len(found) == 5
        for name, one in wanted.items():
            assert float((found[name].float() - one.float()).norm() / one.float().norm()) < 2e-2, name
    assert "is read as its parametrization" not in caplog.text
    ran = {key[1]: ready for key, ready in snapshot.snapshot().launchers.items() if key[0] == "low rank"}
    assert set(ran) == {"forward", "dX"}
    assert all(ran.values())
