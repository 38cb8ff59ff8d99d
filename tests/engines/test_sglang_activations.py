"""Experts of SGLang's own model classes, tiny but with the published models' activations, on pretuned.

Each is filled so that the limits act, and compared with a loop over tokens and experts that calls SGLang's functions.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import sglang_layer
import torch
from sglang_layer import ask, lines, load, start, wanted

pytestmark = pytest.mark.filterwarnings("default")
E, T = 4, 9

registry, logged = sglang_layer.registry, sglang_layer.logged


class Model(NamedTuple):
    """``make(module, config, quant_config)`` makes the block of a model whose ``experts`` are tested.

    ``changes`` are those of SGLang's config of a runner whose numbers were ignored.
    """

    module: str
    config: dict[str, Any]
    make: Callable[[Any, Any, Any], Any]
    logged: str
    changes: dict[str, Any]
    quantised: str | None = None


_MOE = {
    "hidden_size": 128,
    "moe_intermediate_size": 128,
    "hidden_act": "silu",
    "n_routed_experts": E,
    "num_experts_per_tok": 2,
    "n_shared_experts": None,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "vocab_size": 64,
    "num_hidden_layers": 2,
}
_GLM = _MOE | {"swiglu_limit": 10.0, "architectures": ["Glm5NextForCausalLM"], "model_type": "glm5_next"}
_V4 = _MOE | {
    "swiglu_limit": 10.0,
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "scoring_func": "sqrtsoftplus",
    "num_hash_layers": 0,
}
_STEP = {
    "hidden_size": 128,
    "moe_intermediate_size": 128,
    "moe_num_experts": E,
    "moe_top_k": 2,
    "need_fp32_gate": True,
    "moe_router_scaling_factor": 3.0,
    "use_moe_router_bias": True,
    "swiglu_limits": [0.0, 0.0, 7.0],
}
_MINIMAX = {
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_local_experts": E,
    "num_experts_per_tok": 2,
    "n_shared_experts": None,
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "routed_scaling_factor": 2.0,
    "hidden_act": "swigluoai",
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
_KIMI = _MOE | {
    "hidden_size": 192,
    "routed_expert_hidden_size": 128,
    "hidden_act": "situ",
    "num_experts": E,
    "num_experts_per_token": 2,
    "num_shared_experts": 0,
    "moe_renormalize": True,
    "use_grouped_topk": True,
    "num_expert_group": 1,
    "moe_router_activation_func": "sigmoid",
    "latent_moe_use_norm": True,
    "rms_norm_eps": 1e-5,
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "first_k_dense_replace": 0,
}
_NEMOTRON = _MOE | {
    "moe_intermediate_size": 192,
    "mlp_hidden_act": "relu2",
    "mlp_bias": False,
    "n_shared_experts": 1,
    "moe_shared_expert_intermediate_size": 64,
    "moe_latent_size": None,
}


def _deepseek(module: Any, config: Any, quant: Any, **kwargs: bool) -> Any:
    return module.DeepseekV2MoE(config, 1, quant, "model.layers.1.mlp", **kwargs)


def _kimi(module: Any, config: Any, quant: Any) -> Any:
    return module.KimiK3MoE(config, quant, "model.layers.1.block_sparse_moe", layer_idx=1)


def _step(layer: int) -> Callable[[Any, Any, Any], Any]:
    return lambda module, config, quant: module.Step3p5MoEMLP(config, layer, quant, f"model.layers.{layer}.moe")


MODELS = {
    "GLM-5.3-Flash": Model("deepseek_v2", _GLM, _deepseek, "bf16 swiglu(limit=10)", {"swiglu_limit": None}),
    "GLM-5.3-Flash in fp8": Model(
        "deepseek_v2", _GLM, _deepseek, "fp8_block swiglu(limit=10)", {"swiglu_limit": None}, "fp8_block"
    ),
    "DeepSeek-V4": Model(
        "deepseek_v2",
        _V4,
        lambda *args: _deepseek(*args, is_deepseek_v4=True),
        "bf16 swiglu(limit=10)",
        {"swiglu_limit": None},
    ),
    "Step-3.7": Model("step3p5", _STEP, _step(2), "bf16 swiglustep(limit=7)", {"gemm1_clamp_limit": None}),
    "Step-3.7, first layers": Model("step3p5", _STEP, _step(1), "bf16 silu", {"gemm1_clamp_limit": 7.0}),
    "MiniMax-M3": Model(
        "minimax_m3",
        _MINIMAX,
        lambda module, config, quant: module.MiniMaxM3MoE(config, 1, quant),
        "bf16 swiglu_oai",
        {"gemm1_clamp_limit": 1e30},
    ),
    "Kimi-K3": Model("kimi_k3", _KIMI, _kimi, "bf16 situ(beta=4, linear_beta=25)", {"gemm1_clamp_limit": None}),
    "Kimi-K3 in mxfp4": Model(
        "kimi_k3", _KIMI, _kimi, "mxfp4 situ(beta=4, linear_beta=25)", {"gemm1_clamp_limit": None}, "mxfp4"
    ),
    "Nemotron-3-Nano": Model(
        "nemotron_h",
        _NEMOTRON,
        lambda module, config, quant: module.NemotronHMoE(config, 1, quant),
        "bf16 relu2",
        {"activation": "silu"},
    ),
    "Nemotron-3-Super": Model(
        "nemotron_h",
        _NEMOTRON | {"moe_latent_size": 64},
        lambda module, config, quant: module.NemotronHMoE(config, 1, quant),
        "bf16 relu2",
        {"activation": "silu"},
    ),
}


@pytest.fixture
def bfloat16() -> Iterator[None]:
    """torch's default dtype, as while a model is loaded."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(before)


def quant_config(format: str | None) -> Any:
    from sglang.srt.layers.quantization.fp8 import Fp8Config
    from sglang.srt.layers.quantization.mxfp4 import Mxfp4Config

    if format == "fp8_block":
        return Fp8Config(is_checkpoint_fp8_serialized=True, activation_scheme="dynamic", weight_block_size=[128, 128])
    return None if format is None else Mxfp4Config(is_checkpoint_mxfp4_serialized=True)


def filled(experts: Any, which: str, format: str | None) -> torch.Tensor:
    """Fill a product's parameters; return the weights that they stand for."""
    from pretuned.runtime import ExpertWeights

    codes = getattr(experts, f"{which}_weight").data
    K = codes.shape[2] * (2 if format == "mxfp4" else 1)
    w = torch.randn(*codes.shape[:2], K, dtype=torch.float32) * (12 if which == "w13" else 1) * K**-0.5
    if format is None:
        codes.copy_(w)
        return codes.float()
    weights = ExpertWeights.quantize(w.bfloat16(), format)
    codes.copy_(weights.codes.view(codes.dtype))
    getattr(experts, f"{which}_weight_scale{'_inv' if format == 'fp8_block' else ''}").data.copy_(weights.scale)
    return weights.dequantize(torch.float32)


@pytest.mark.usefixtures("bfloat16")
@pytest.mark.parametrize("name", MODELS)
def test_a_model_s_experts_compute_the_model_s_activation(
    name: str, monkeypatch: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture
) -> None:
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    start()
    load(monkeypatch, PRETUNED_SGLANG="1")
    model = MODELS[name]
    module = importlib.import_module(f"sglang.srt.models.{model.module}")
    experts = model.make(module, SimpleNamespace(**model.config), quant_config(model.quantised)).experts
    how = experts.moe_runner_config
    sizes = f"E={E} H={how.hidden_size} I={how.intermediate_size_per_partition} k=2"
    assert lines(logged) == [f"pretuned: runs the MoE layers of {sizes} {model.logged}"]
    torch.manual_seed(0)
    plain = SimpleNamespace(**{f"{which}_weight": filled(experts, which, model.quantised) for which in ("w13", "w2")})
    x = torch.randn(T, how.hidden_size)
    weights, ids = torch.rand(T, 2, dtype=torch.float32), torch.stack([torch.randperm(E)[:2] for _ in range(T)]).int()
    if model.quantised:
        experts.quant_method.process_weights_after_loading(experts)
        out = ask(experts, x, weights, ids)
    else:  # a whole layer on the CPU goes past its runner
        dispatched = StandardDispatchOutput(x.clone(), None, StandardTopKOutput(weights, ids, torch.empty(0)))
        out = experts.quant_method.forward_cuda(experts, dispatched).hidden_states
    twin, ignored = (
        wanted(plain, act, x.float(), weights, ids) for act in (how, dataclasses.replace(how, **model.changes))
    )
    largest = float(twin.abs().max())
    assert float((out - twin).abs().max()) / largest < (0.08 if model.quantised == "fp8_block" else 0.02)
    assert float((out - ignored).abs().max()) / largest > 0.15
