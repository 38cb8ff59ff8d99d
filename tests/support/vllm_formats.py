"""MoE layers of the vLLM on sys.path with weights in fp8 rows, nvfp4, mxfp4, mxfp8 and int4, with the plug-in.

    python vllm_formats.py            # a line of JSON for each format

A layer is made from vLLM's config of such a checkpoint and loaded by vLLM's loader. The line has the error of its
output beside experts that are multiplied one by one with the dequantised weights, and the lines that were logged.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import logging
import os
from types import SimpleNamespace
from typing import Any

if __name__ == "__main__":
    os.environ |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    os.environ |= {"TORCHDYNAMO_DISABLE": "1", "PRETUNED_VLLM": "1"}

import torch
from vllm_layers import Lines, register, start

E, H, I, T = 4, 128, 96, 5  # noqa: E741
_QUANTISATION = "vllm.model_executor.layers.quantization."
_COMPRESSED = "compressed_tensors.compressed_tensors_moe.compressed_tensors_moe"


def compressed(packing: str, weights: dict[str, Any], x: dict[str, Any] | None) -> dict[str, Any]:
    """The quantization_config of compressed-tensors."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": x, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": packing,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


_FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
_FP4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
_TOKENS = _FP8 | {"strategy": "token", "dynamic": True}
_MX = {"quant_method": "auto-round", "data_type": "mx_fp", "group_size": 32, "sym": True, "act_data_type": "mx_fp"}
_MX |= {"act_group_size": 32, "act_sym": True, "act_dynamic": True, "packing_format": "auto_round:llm_compressor"}
# By name: vLLM's name of the config, what it says, and the module and function that choose a backend.
KINDS: dict[str, tuple[str, dict[str, Any], str, str]] = {
    "fp8 rows": ("compressed-tensors", compressed("float-quantized", _FP8, _TOKENS), f"{_COMPRESSED}_w8a8_fp8", "fp8"),
    "modelopt fp8": ("modelopt", {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": []}, "modelopt", "fp8"),
    "nvfp4": (
        "compressed-tensors",
        compressed("nvfp4-pack-quantized", _FP4, None),
        f"{_COMPRESSED}_w4a4_nvfp4",
        "nvfp4",
    ),
    "gptq": (
        "gptq",
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False},
        "auto_gptq",
        "wna16",
    ),
    "gptq of AutoRound": (
        "inc",
        {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "data_type": "int"}
        | {"packing_format": "auto_round:auto_gptq", "block_name_to_quantize": "model.layers"},
        "auto_gptq",
        "wna16",
    ),
    "mxfp8 of AutoRound": ("inc", _MX | {"bits": 8, "act_bits": 8}, "inc.schemes.inc_mxfp8_moe", "mxfp8"),
    "mxfp4 of AutoRound": ("inc", _MX | {"bits": 4, "act_bits": 4}, "inc.schemes.inc_mxfp4_moe", "mxfp4"),
    "modelopt nvfp4": (
        "modelopt_fp4",
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": []},
        "modelopt",
        "nvfp4",
    ),
}


def layer_of(kind: str) -> Any:
    """A layer as a model makes it. vLLM's CPU has no backend for it: one is chosen for it, which never runs."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers import fused_moe
    from vllm.model_executor.layers.quantization import get_quantization_config

    config, said, module, chosen = KINDS[kind]
    backend = SimpleNamespace(value="Marlin", name="MARLIN")
    where = importlib.import_module(_QUANTISATION + module)
    setattr(where, f"select_{chosen}_moe_backend", lambda *_, **__: (backend, None))
    for name in ("is_global_sf_supported_for_nvfp4_backend", "check_moe_marlin_supports_layer"):
        if hasattr(where, name):
            setattr(where, name, lambda *_, **__: "check" in name)  # noqa: B023
    if kind == "gptq of AutoRound":  # vLLM chooses its method by the platform
        gpu = SimpleNamespace(is_cuda=lambda: True, is_cpu=lambda: False, is_xpu=lambda: False)
        for name in filter(is_there, ("inc.schemes.inc_wna16_scheme", "inc.schemes.inc_wna16_moe")):
            importlib.import_module(_QUANTISATION + name).current_platform = gpu  # type: ignore[attr-defined]
        utils = importlib.import_module(_QUANTISATION + "utils.marlin_utils")
        utils.check_moe_marlin_supports_layer = lambda *_, **__: True
    make = getattr(fused_moe, "FusedMoEFactory", None) or fused_moe.FusedMoE
    with set_current_vllm_config(VllmConfig()):
        built = make(
            num_experts=E,
            top_k=2,
            hidden_size=H,
            intermediate_size=I,
            params_dtype=torch.bfloat16,
            renormalize=True,
            quant_config=get_quantization_config(config).from_config(said),
            prefix="model.layers.0.mlp.experts",
        )
    return getattr(built, "routed_experts", built)


def matrix(kind: str, N: int, K: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A matrix's tensors by the last word of their names, and its values."""
    if kind.startswith("mxfp"):
        scale = torch.randint(120, 127, (N, K // 32), dtype=torch.uint8)
        factor = torch.exp2(scale.float() - 127).repeat_interleave(32, 1)
        if kind.startswith("mxfp8"):
            codes = torch.randn(N, K).to(torch.float8_e4m3fn)
            return {"weight": codes, "weight_scale": scale}, codes.float() * factor
        codes = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8)
        return {"weight_packed": codes, "weight_scale": scale}, e2m1(codes) * factor
    if "fp8" in kind:
        codes = torch.randn(N, K).to(torch.float8_e4m3fn)
        scale = torch.rand(N, 1) if kind == "fp8 rows" else torch.rand(())
        more = {} if kind == "fp8 rows" else {"input_scale": torch.tensor(0.5)}
        return {"weight": codes, "weight_scale": scale, **more}, codes.float() * scale
    if kind.startswith("gptq"):
        code, scale = torch.randint(0, 16, (N, K)), torch.rand(N, K // 32).bfloat16()
        words = (code.view(N, -1, 8) << 4 * torch.arange(8)).sum(-1)
        words = torch.where(words >= 1 << 31, words - (1 << 32), words).int().mT.contiguous()
        zeros = torch.full((K // 32, N // 8), 0x77777777, dtype=torch.int32)
        named = {
            "qweight": words,
            "scales": scale.mT.contiguous(),
            "qzeros": zeros,
            "g_idx": torch.arange(K).int() // 32,
        }
        return named, (code - 8) * scale.float().repeat_interleave(32, 1)
    codes, outer = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8), torch.tensor(0.125)
    scale = (torch.rand(N, K // 16) + 0.5).to(torch.float8_e4m3fn)
    w = e2m1(codes) * (scale.float() * outer).repeat_interleave(16, 1)
    if kind == "nvfp4":
        return {"weight_packed": codes, "weight_scale": scale, "weight_global_scale": 1 / outer[None]}, w
    return {"weight": codes, "weight_scale": scale, "weight_scale_2": outer, "input_scale": torch.tensor(0.5)}, w


def e2m1(codes: torch.Tensor) -> torch.Tensor:
    """The numbers of codes, two in a byte, the low four bits first."""
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(-2).int()
    return torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])[nibbles & 7] * (1 - 2 * (nibbles >> 3))


def is_there(module: str) -> bool:
    """Return True if this vLLM has the module."""
    try:
        return importlib.util.find_spec(_QUANTISATION + module) is not None
    except ModuleNotFoundError:  # nor the package that it is in
        return False


def error_of(kind: str) -> tuple[float, str]:
    """The layer's error, and the class of its method."""
    from vllm.config import VllmConfig, set_current_vllm_config

    torch.manual_seed(0)
    layer = layer_of(kind)
    whole: dict[tuple[int, str], torch.Tensor] = {}
    for e in range(E):
        for shard, N, K in (("w1", I, H), ("w3", I, H), ("w2", H, I)):
            tensors, whole[e, shard] = matrix(kind, N, K)
            for suffix, tensor in tensors.items():
                name = f"{'w2' if shard == 'w2' else 'w13'}_{suffix}"
                parameter = getattr(layer, name)
                parameter.weight_loader(parameter, tensor, f"experts.{name}", shard_id=shard, expert_id=e)
    with set_current_vllm_config(VllmConfig()):
        layer.quant_method.process_weights_after_loading(layer)
    method = layer.quant_method
    x, ids = torch.randn(T, H).bfloat16(), torch.stack([torch.randperm(E)[:2] for _ in range(T)]).int()
    weights = torch.rand(T, 2)
    extra: dict[str, Any] = {"shared_experts_input": None}
    if "shared_experts" in inspect.signature(method.apply).parameters:
        extra["shared_experts"] = None
    out = method.apply(layer=layer, x=x, topk_weights=weights, topk_ids=ids, **extra)
    wanted = torch.zeros(T, H)
    for t in range(T):
        for s in range(2):
            e = int(ids[t, s])
            a = torch.nn.functional.silu(whole[e, "w1"] @ x[t].float()) * (whole[e, "w3"] @ x[t].float())
            wanted[t] += weights[t, s] * (whole[e, "w2"] @ a)
    return float((out.float() - wanted).norm() / wanted.norm()), type(method).__name__


def main() -> None:
    """Print a line for each format."""
    import vllm

    torch.set_num_threads(1)
    register()
    start()
    log = logging.getLogger("vllm")
    log.setLevel(logging.INFO)
    for kind in KINDS:
        if not is_there(KINDS[kind][2]):  # GPTQ's before 0.26, and AutoRound's mxfp
            continue
        log_lines = Lines()
        log.addHandler(log_lines)
        error, method = error_of(kind)
        log.removeHandler(log_lines)
        lines = [line for line in log_lines.lines if "pretuned: " in line]
        said = {"model": kind, "vllm": vllm.__version__, "error": error, "method": method, "lines": lines}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)  # past what vLLM does at exit
