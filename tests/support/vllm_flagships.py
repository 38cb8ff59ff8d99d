"""MoE blocks of vLLM's own model classes, tiny but with the published models' activation settings, on the CPU.

    python vllm_flagships.py            # a line of JSON for each model that the vLLM on sys.path has

A block is made by the model's class from the model's config, its experts are filled so that the activation's limits
are reached, and run by the method that the layer has. ``twin`` computes the same experts one by one, with the weights
dequantised and with vLLM's own class for the activation.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

if __name__ == "__main__":
    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    os.environ |= {"TORCHDYNAMO_DISABLE": "1", "PRETUNED_VLLM": "1"}

import pytest
import torch

E, TOP_K, TOKENS = 4, 2, 16


class Flagship(NamedTuple):
    """A published model, made small. ``block(config, vllm_config)`` makes the module that has its experts.

    ``modules`` has the class, the first one that this vLLM has. ``act`` is vLLM's class for the activation and its
    arguments by the config, ``without`` the one that a layer would have whose numbers were ignored.
    """

    modules: tuple[str, ...]
    config: dict[str, Any]
    block: Callable[[Any, Any, Any, Any], Any]
    act: Callable[[Any], tuple[str, tuple[Any, ...]]]
    without: tuple[str, tuple[Any, ...]] = ("SiluAndMul", ())
    quantised: str | None = None
    logged: str = ""
    compressed: str | None = None  # by compressed-tensors, with tokens in bf16 or fp8


def _deepseek(module: Any, config: Any, quant: Any, vllm_config: Any) -> Any:
    vllm_config.quant_config = quant
    takes = inspect.signature(module.DeepseekV4MoE).parameters
    extra = {"num_hash_layers": config.num_hash_layers} if "num_hash_layers" in takes else {}
    return module.DeepseekV4MoE(vllm_config, prefix="model.layers.1.ffn", **extra)


def _kimi(module: Any, config: Any, quant: Any, vllm_config: Any) -> Any:
    return module.KimiMoE(
        config, vllm_config, quant_config=quant, prefix="model.layers.1.block_sparse_moe", layer_idx=1
    )


def _glm(module: Any, config: Any, quant: Any, vllm_config: Any) -> Any:
    return module.Glm5NextMoE(config, vllm_config.parallel_config, quant_config=quant, prefix="model.layers.1.mlp")


def _hy(module: Any, config: Any, quant: Any, vllm_config: Any) -> Any:
    return module.HYV4MoEFused(config, quant_config=quant, prefix="model.layers.1.mlp")


def _step(layer: int) -> Callable[[Any, Any, Any, Any], Any]:
    def block(module: Any, config: Any, quant: Any, vllm_config: Any) -> Any:
        vllm_config.quant_config = quant
        vllm_config.model_config.hf_config = getattr(module, "Step3p5Config", SimpleNamespace)(**_STEP)
        return module.FusedMoEBlock(vllm_config, prefix=f"model.layers.{layer}.moe")

    return block


def _minimax(module: Any, config: Any, quant: Any, vllm_config: Any) -> Any:
    return module.MiniMaxM3MoE(config, 1, quant_config=quant, prefix="model.layers.1.block_sparse_moe")


def _nemotron(module: Any, config: Any, quant: Any, vllm_config: Any) -> Any:
    parallel = vllm_config.parallel_config
    return module.NemotronHMoE(config, quant_config=quant, parallel_config=parallel, prefix="model.layers.1.mixer")


def _clamped(config: Any) -> tuple[str, tuple[Any, ...]]:
    return "SiluAndMulWithClamp", (config.swiglu_limit,)


_MODELS = "vllm.model_executor.models."
_COMMON = {"hidden_size": 128, "moe_intermediate_size": 128, "hidden_act": "silu", "vocab_size": 64}
_DEEPSEEK = _COMMON | {
    "n_routed_experts": E,
    "num_experts_per_tok": TOP_K,
    "n_shared_experts": None,
    "norm_topk_prob": True,
    "scoring_func": "sqrtsoftplus",
    "topk_method": "noaux_tc",
    "num_hash_layers": 0,
    "mlp_layer_types": [],
    "swiglu_limit": 10.0,
    "routed_scaling_factor": 1.5,
    "expert_dtype": "fp4",
    "rms_norm_eps": 1e-6,
}
_STEP = {
    "hidden_size": 128,
    "moe_intermediate_size": 128,
    "moe_num_experts": E,
    "moe_top_k": TOP_K,
    "share_expert_dim": 128,
    "norm_expert_weight": True,
    "use_moe_router_bias": True,
    "need_fp32_gate": True,
    "moe_router_scaling_factor": 3.0,
    "moe_router_activation": "sigmoid",
    "swiglu_limits": [0.0, 0.0, 7.0],
    "swiglu_limits_shared": [0.0, 0.0, 16.0],
    "hidden_act": "silu",
}
_NEMOTRON = {
    "hidden_size": 128,
    "moe_intermediate_size": 192,
    "n_routed_experts": E,
    "num_experts_per_tok": TOP_K,
    "n_shared_experts": 1,
    "moe_shared_expert_intermediate_size": 128,
    "mlp_hidden_act": "relu2",
    "mlp_bias": False,
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.5,
    "moe_latent_size": None,
}
_KIMI = Flagship(
    ("vllm.models.kimi_k3.nvidia.model",),
    {
        "hidden_size": 192,
        "routed_expert_hidden_size": 128,
        "moe_intermediate_size": 128,
        "hidden_act": "situ",
        "num_experts": E,
        "num_experts_per_token": TOP_K,
        "num_shared_experts": 1,
        "moe_renormalize": True,
        "routed_scaling_factor": 2.5,
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "moe_router_activation_func": "sigmoid",
        "latent_moe_use_norm": True,
        "rms_norm_eps": 1e-5,
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "topk_method": "noaux_tc",
    },
    _kimi,
    lambda config: ("SituAndMul", (config.activation_situ_beta, config.activation_situ_linear_beta)),
    without=("SituAndMul", (4.0, None)),
    quantised="mxfp4",
    logged="mxfp4 situ(beta=4, linear_beta=25)",
)
FLAGSHIPS = {
    "DeepSeek-V4-Flash": Flagship(
        ("vllm.models.deepseek_v4.cpu.model", "vllm.models.deepseek_v4.nvidia.model", _MODELS + "deepseek_v4"),
        _DEEPSEEK,
        _deepseek,
        _clamped,
        quantised="mxfp4",
        logged="mxfp4 swiglu(limit=10)",
    ),
    "DeepSeek-V4-Pro": Flagship(
        ("vllm.models.deepseek_v4.nvidia.model", _MODELS + "deepseek_v4"),
        _DEEPSEEK | {"hidden_size": 192, "routed_scaling_factor": 2.5},
        _deepseek,
        _clamped,
        quantised="mxfp4",
        logged="mxfp4 swiglu(limit=10)",
    ),
    "Kimi-K3": _KIMI,
    "Kimi-K3, compressed-tensors": _KIMI._replace(compressed="bf16"),
    "Kimi-K3, compressed-tensors with fp8 tokens": _KIMI._replace(compressed="fp8"),
    "GLM-5.3-Flash": Flagship(
        ("vllm.models.glm5next.common.model",),
        _DEEPSEEK | {"scoring_func": "sigmoid", "n_group": 1, "topk_group": 1},
        _glm,
        _clamped,
        quantised="fp8_block",
        logged="fp8_block swiglu(limit=10)",
    ),
    "Hy4": Flagship(
        ("vllm.models.hy_v4.nvidia.moe",),
        {
            "hidden_size": 128,
            "expert_hidden_dim": 128,
            "num_experts": E,
            "num_experts_per_tok": TOP_K,
            "num_shared_experts": 1,
            "hidden_act": "silu",
            "route_norm": True,
            "router_scaling_factor": 2.827,
            "swiglu_limit": 10.0,
        },
        _hy,
        _clamped,
        logged="bf16 swiglu(limit=10)",
    ),
    "Step-3.7": Flagship(
        (_MODELS + "step3p5",),
        _STEP,
        _step(2),
        lambda config: ("SwigluStepAndMul", (config.swiglu_limits[2],)),
        logged="bf16 swiglustep(limit=7)",
    ),
    "Step-3.7, first layers": Flagship(
        (_MODELS + "step3p5",),
        _STEP,
        _step(1),
        lambda _: ("SiluAndMul", ()),
        without=("SwigluStepAndMul", (7.0,)),
        logged="bf16 silu",
    ),
    "MiniMax-M3": Flagship(
        ("vllm.models.minimax_m3.nvidia.model",),
        {
            "hidden_size": 128,
            "intermediate_size": 128,
            "num_local_experts": E,
            "num_experts_per_tok": TOP_K,
            "n_shared_experts": 1,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "routed_scaling_factor": 2.0,
            "hidden_act": "swigluoai",
            "swiglu_alpha": 1.702,
            "swiglu_beta": 1.0,
            "swiglu_limit": 7.0,
        },
        _minimax,
        lambda config: ("SiluAndMulWithClamp", (config.swiglu_limit, config.swiglu_alpha, config.swiglu_beta)),
        without=("SiluAndMulWithClamp", (1e30, 1.702, 1.0)),
        logged="bf16 swiglu_oai",
    ),
    "Nemotron-3-Nano": Flagship(
        (_MODELS + "nemotron_h",),
        _NEMOTRON,
        _nemotron,
        lambda _: ("ReLUSquaredActivation", ()),
        without=("ReLU", ()),
        logged="bf16 relu2",
    ),
    "Nemotron-3-Super": Flagship(
        (_MODELS + "nemotron_h",),
        _NEMOTRON | {"moe_latent_size": 64, "n_group": 1},
        _nemotron,
        lambda _: ("ReLUSquaredActivation", ()),
        without=("ReLU", ()),
        logged="bf16 relu2",
    ),
}


class Made(NamedTuple):
    """A model's layer of experts, and its weights as plain numbers."""

    routed: Any
    config: Any
    w13: torch.Tensor
    w2: torch.Tensor


class Result(NamedTuple):
    """The results of a layer and of its twin, with the limits of the activation and ``without``."""

    out: torch.Tensor
    twin: torch.Tensor
    without: torch.Tensor


def error_of(of: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest difference, over the largest number."""
    return float((of.float() - exact).abs().max() / exact.abs().max())


def module_of(flagship: Flagship) -> Any:
    """The module of a model's class; None if this vLLM does not have it."""
    import torchvision_absent

    torchvision_absent.stand_in()
    for name in flagship.modules:
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(name)
    return None


@contextlib.contextmanager
def chosen() -> Iterator[None]:
    """vLLM chooses backends as on a GPU. On the CPU it has none for most of these layers; none of them runs."""
    from vllm.model_executor.layers.fused_moe import config as moe_config
    from vllm.model_executor.layers.fused_moe import layer as moe_layer
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method
    from vllm.model_executor.layers.fused_moe.oracle import fp8 as fp8_oracle
    from vllm.model_executor.layers.fused_moe.oracle import mxfp4 as mxfp4_oracle
    from vllm.model_executor.layers.fused_moe.oracle import unquantized as unquantized_oracle
    from vllm.model_executor.layers.quantization import fp8, mxfp4

    def choice(oracle: Any, backends: Any, name: str) -> Callable[..., Any]:
        classes = oracle.backend_to_kernel_cls(backends[name])
        return lambda *_, **__: (backends[name], classes[0] if isinstance(classes, list) else classes)

    by_marlin = choice(mxfp4_oracle, mxfp4_oracle.Mxfp4MoeBackend, "MARLIN")
    choices: list[tuple[Any, str, Any]] = [
        (
            unquantized_fused_moe_method,
            "select_unquantized_moe_backend",
            choice(unquantized_oracle, unquantized_oracle.UnquantizedMoeBackend, "TRITON"),
        ),
        (fp8, "select_fp8_moe_backend", choice(fp8_oracle, fp8_oracle.Fp8MoeBackend, "TRITON")),
        (mxfp4, "select_mxfp4_moe_backend", by_marlin),
        (mxfp4, "select_deepseek_v4_mxfp4_moe_backend", by_marlin),
    ]
    # What refuses layers without a gate on the CPU, and the events of Kimi's second stream.
    choices += [(module, "current_platform", AsOnCuda()) for module in (moe_config, moe_layer)]
    choices += [(torch.cuda, "Event", SimpleNamespace)]
    with pytest.MonkeyPatch.context() as patch:
        for module, name, value in choices:
            if hasattr(module, name):
                patch.setattr(module, name, value)
        yield


class AsOnCuda:
    """vLLM's platform, which says that it is CUDA's kind."""

    def is_cuda_alike(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        from vllm.platforms import current_platform

        return getattr(current_platform, name)


def quant_config(flagship: Flagship, module: Any) -> Any:
    """vLLM's config of a checkpoint's weights, as the model's own class has it."""
    from vllm.model_executor.layers.quantization import get_quantization_config

    said = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    if flagship.quantised is None:
        return None
    if flagship.quantised == "fp8_block":
        return get_quantization_config("fp8").from_config(said)
    if "expert_dtype" in flagship.config:
        return get_quantization_config("deepseek_v4_fp8").from_config(said)
    if flagship.compressed is None:
        return get_quantization_config("mxfp4").from_config({"quant_method": "mxfp4"})
    weights = {
        "num_bits": 4,
        "type": "float",
        "symmetric": True,
        "strategy": "group",
        "group_size": 32,
        "scale_dtype": "torch.uint8",
    }
    tokens = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": tokens, "output_activations": None}
    if flagship.compressed == "bf16":
        group["input_activations"] = None
    others = ["re:.*shared_experts.*", "re:.*routed_expert_.*", "re:.*gate$"]
    return get_quantization_config("compressed-tensors").from_config(
        {
            "quant_method": "compressed-tensors",
            "format": "mxfp4-pack-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": others,
        }
    )


def build_flagship(flagship: Flagship, *, process: bool = True) -> Made:
    """The model's layer of experts, whose weights make h of a few times each limit.

    Without ``process`` they are as the checkpoint has them.
    """
    from vllm.config import VllmConfig, set_current_vllm_config

    module, config, vllm_config = module_of(flagship), SimpleNamespace(**flagship.config), VllmConfig()
    vllm_config.model_config = SimpleNamespace(hf_config=config, dtype=torch.bfloat16)
    with set_current_vllm_config(vllm_config), chosen(), dtype(torch.bfloat16):
        block = flagship.block(module, config, quant_config(flagship, module), vllm_config)
    routed = getattr(block.experts, "routed_experts", block.experts)
    torch.manual_seed(0)
    plain = [filled(routed, which, flagship.quantised) for which in ("w13", "w2")]
    if process:
        with set_current_vllm_config(vllm_config):
            routed.quant_method.process_weights_after_loading(routed)
    return Made(routed, config, *plain)


@contextlib.contextmanager
def dtype(of: torch.dtype) -> Iterator[None]:
    """torch's default dtype meanwhile, as while vLLM loads a model."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(of)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def filled(routed: Any, which: str, quantised: str | None) -> torch.Tensor:
    """Fill a product's parameters; return the weights that they stand for."""
    from pretuned.runtime import ExpertWeights

    parameters = {
        name.removeprefix(f"{which}_"): parameter.data
        for name, parameter in routed.named_parameters(recurse=False)
        if name.startswith(f"{which}_")
    }
    codes = parameters.get("weight", parameters.get("weight_packed"))
    scale = next((parameter for name, parameter in parameters.items() if "scale" in name), None)
    assert codes is not None
    K = codes.shape[2] * (2 if quantised == "mxfp4" else 1)
    size = 12 * K**-0.5 if which == "w13" else K**-0.5
    w = torch.randn(*codes.shape[:2], K, dtype=torch.float32) * size
    if quantised is None:
        codes.copy_(w)
        return codes.float()
    weights = ExpertWeights.quantize(w.bfloat16(), quantised)
    codes.copy_(weights.codes.view(codes.dtype))
    assert scale is not None
    scale.copy_(weights.scale)
    return weights.dequantize().float()


def function(name: str, arguments: tuple[Any, ...]) -> Callable[[torch.Tensor], torch.Tensor]:
    """One of vLLM's classes for an activation, in torch."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers import activation

    with set_current_vllm_config(VllmConfig()):
        module = getattr(activation, name, None) or getattr(torch.nn, name)
        act = module(*arguments)
    call: Callable[[torch.Tensor], torch.Tensor] = getattr(act, "forward_native", act)
    return call


def results(flagship: Flagship, layer: Made) -> Result:
    """The layer by its method, and by its twin, of the same tokens."""
    torch.manual_seed(1)
    H = layer.w2.shape[1]
    x, weights = torch.randn(TOKENS, H).bfloat16(), torch.rand(TOKENS, TOP_K)
    ids = torch.stack([torch.randperm(E)[:TOP_K] for _ in range(TOKENS)]).int()
    extra: dict[str, Any] = {"shared_experts_input": None}
    method = layer.routed.quant_method
    if "shared_experts" in inspect.signature(method.apply).parameters or not hasattr(method, "moe_quant_config"):
        extra["shared_experts"] = None
    out = method.apply(layer=layer.routed, x=x, topk_weights=weights, topk_ids=ids, **extra)
    twins = [twin(layer, function(*act), x, weights, ids) for act in (flagship.act(layer.config), flagship.without)]
    return Result(out, *twins)


def twin(
    layer: Made,
    act: Callable[[torch.Tensor], torch.Tensor],
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    round_to: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Each token's experts one by one, in float32 but for the rounding of h and a."""
    out = torch.zeros(len(x), layer.w2.shape[1])
    for t, s in torch.cartesian_prod(*map(torch.arange, ids.shape)).tolist():
        e = int(ids[t, s])
        h = (layer.w13[e] @ x[t].float()).to(round_to).float()
        out[t] += weights[t, s] * (layer.w2[e] @ act(h[None])[0].to(round_to).float())
    return out


def main() -> None:
    """Print a line for each model that this vLLM has, and that its modules can be imported of without a GPU."""
    import vllm
    from vllm_layers import Lines, register, start

    lines = Lines()
    start()
    register()
    logging.getLogger("vllm").addHandler(lines)
    logging.getLogger("vllm").setLevel(logging.INFO)
    for name, flagship in FLAGSHIPS.items():
        said: dict[str, Any] = {"model": name, "vllm": vllm.__version__}
        try:
            absent = module_of(flagship) is None
        except Exception as error:  # of what a module does on a GPU when it is imported
            absent, said["why"] = True, repr(error)
        if not absent:
            lines.lines.clear()
            getattr(vllm.logger._print_info_once, "cache_clear", lambda: None)()  # a line is told again
            layer = build_flagship(flagship)
            got = results(flagship, layer)
            messages = [line for line in lines.lines if "pretuned" in line and "is active" not in line]
            said |= {"error": error_of(got.out, got.twin), "without": error_of(got.out, got.without), "lines": messages}
        print(json.dumps(said | {"absent": absent}), flush=True)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # past what vLLM does at exit
