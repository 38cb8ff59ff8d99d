"""The bits of one layer in training, in transformers and in vLLM, in the batch-invariant mode, on a real GPU.

PRETUNED_TEST_VLLM=FOLDER python -m pytest -q tests/gpu/test_training_equals_serving.py

FOLDER is as tests/support/vllm_on_gpu.py says.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import vllm_on_gpu

from pretuned.runtime import batch_invariant, hooks, moe_mlp

pytestmark, layers = vllm_on_gpu.marks, vllm_on_gpu.layers
TOKENS = (1, 5, 64, 1024)


@pytest.mark.parametrize("kind", ["bf16", "fp8", "v4-flash"])
def test_training_and_serving_give_the_same_bits(layers: Any, kind: str) -> None:
    """``moe_mlp`` with a gradient of x, transformers' experts likewise (bf16), and vLLM's layer, of equal tokens."""
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context

    spec = layers.KINDS[kind]
    layer, config = layers.make_layer(kind, spec, "auto", "cuda", max(TOKENS))
    assert "Pretuned" in layers.experts_of(layer), layers.experts_of(layer)
    direct = layers.Direct(spec, "cuda")
    gate_up, down = direct.weights
    experts = transformers_experts(spec, gate_up, down) if kind == "bf16" else None
    rows: dict[str, torch.Tensor] = {}
    for T in TOKENS:
        drawn = layers.routing(spec, max(TOKENS), "cuda")
        inputs = type(drawn)(*(tensor[:T].contiguous() for tensor in drawn))
        with batch_invariant(), set_current_vllm_config(config), set_forward_context(None, config):
            served = layers.call_of(layer, inputs, False)().clone()
            x = inputs.x.clone().requires_grad_()
            trained = moe_mlp(x, gate_up, down, inputs.ids, inputs.weights, direct.activation)
            assert trained.requires_grad
            assert torch.equal(served, trained.detach()), T
            if experts is not None:
                x = inputs.x.clone().requires_grad_()
                assert torch.equal(served, experts(x, inputs.ids.long(), inputs.weights).detach()), T
        for name, y in {"vllm": served, "training": trained.detach()}.items():
            assert torch.equal(y[:1], rows.setdefault(name, y[:1].clone())), (name, T)


def test_without_the_mode_the_bits_differ(layers: Any) -> None:
    """The test above would notice it: silu in the epilogue doesn't round h, and a gradient's forward has none."""
    spec = layers.KINDS["bf16"]
    gate_up, down = layers.Direct(spec, "cuda").weights
    inputs = layers.routing(spec, 8192, "cuda")
    with hooks.within(None):
        served = moe_mlp(inputs.x, gate_up, down, inputs.ids, inputs.weights)
        trained = moe_mlp(inputs.x.clone().requires_grad_(), gate_up, down, inputs.ids, inputs.weights)
    assert not torch.equal(served, trained.detach())


def transformers_experts(spec: Any, gate_up: torch.Tensor, down: torch.Tensor) -> torch.nn.Module:
    """transformers' experts of Qwen3-MoE with these weights, run by pretuned."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    from pretuned.integrations.transformers import register

    register()
    config = transformers.AutoConfig.for_model(
        "qwen3_moe",
        num_experts=spec.E,
        hidden_size=spec.H,
        moe_intermediate_size=spec.I,
        num_experts_per_tok=spec.top_k,
        experts_implementation="pretuned",
    )
    config._experts_implementation = "pretuned"
    with torch.device("cuda"):
        experts: torch.nn.Module = Qwen3MoeExperts(config).bfloat16()
    experts.gate_up_proj.data.copy_(gate_up)
    experts.down_proj.data.copy_(down)
    return experts.requires_grad_(False)
