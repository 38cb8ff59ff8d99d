"""Small checkpoints with quantised experts, as models are published, each beside its twin in bfloat16.

All scales are powers of two, so the twin's weights are exactly what the codes say.
"""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tiny_models import save

from pretuned.runtime import ExpertWeights

_OTHERS = ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$"]


class Pair(NamedTuple):
    """Where the two checkpoints lie."""

    quantised: Path
    twin: Path


def fp8(folder: Path, seed: int = 0, **sizes: int) -> Pair:
    """Qwen3-MoE in fp8 with a scale for each 128 x 128, as Qwen3-*-FP8. ``sizes`` are others than a tiny model's."""
    config = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": _names_of_others(),
    }

    def encode(N: int, K: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        codes, scale = torch.randn(N, K).to(torch.float8_e4m3fn), 2.0 ** torch.randint(-4, -1, (N // 128, K // 128))
        w = ExpertWeights.fp8_block(codes[None], scale[None], quantize_x=False)
        return {"weight": codes, "weight_scale_inv": scale}, w.dequantize()[0]

    return _qwen3(folder, seed, config, encode, sizes)


def _compressed_tensors(packing: str, weights: dict[str, Any], x: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": x, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": packing,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": _OTHERS,
    }


def int4(folder: Path, seed: int = 0, *, actorder: str | None = None, **sizes: int) -> Pair:
    """Qwen3-MoE in int4 in groups of 32, as Kimi-K2-Thinking. ``sizes`` as of ``fp8``."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    weights["actorder"] = actorder
    config = _compressed_tensors("pack-quantized", weights)

    def encode(N: int, K: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        codes = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8)
        scale = (2.0 ** torch.randint(-6, -3, (N, K // 32))).bfloat16()
        w = ExpertWeights.int4(codes[None], scale[None])
        named = {"weight_packed": codes.view(torch.int32), "weight_scale": scale, "weight_shape": torch.tensor([N, K])}
        return named, w.dequantize()[0]

    return _qwen3(folder, seed, config, encode, sizes)


def awq(folder: Path, seed: int = 0) -> Pair:
    """Qwen3-MoE in AWQ's int4 in groups of 64, with every zero point."""
    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 64,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": ["lm_head", "self_attn", "mlp.gate"],
    }

    def encode(N: int, K: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        code, zero, scale = _zero_points(N, K, 64)
        named = {"qweight": awq_words(code.mT), "qzeros": awq_words(zero.mT), "scales": scale.mT.contiguous()}
        return named, _values(code, zero, scale, 64)

    return _qwen3(folder, seed, config, encode)


def gptq(folder: Path, seed: int = 0, *, sym: bool = True) -> Pair:
    """Qwen3-MoE in GPTQ's int4 in groups of 128, as Qwen3-30B-A3B-GPTQ-Int4; zero points are stored less one."""
    others = {rf"-:.*{name}.*": {} for name in ("self_attn", r"mlp\.gate$", "lm_head")}
    config = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "sym": sym,
        "desc_act": False,
        "dynamic": others,
        "lm_head": False,
        "checkpoint_format": "gptq",
    }

    def encode(N: int, K: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        code, zero, scale = _zero_points(N, K, 128)
        if sym:
            code, zero = torch.randint(0, 16, (N, K)), torch.full((N, K // 128), 8)
        named = {
            "qweight": words(code).mT.contiguous(),
            "qzeros": words(zero.mT - 1 & 15),
            "scales": scale.mT.contiguous(),
        }
        return named | ({"g_idx": (torch.arange(K) // 128).int()} if sym else {}), _values(code, zero, scale, 128)

    return _qwen3(folder, seed, config, encode)


def gptq_zero(folder: Path, seed: int = 0) -> Pair:
    """``gptq`` with zero points (sym false)."""
    return gptq(folder, seed, sym=False)


def int4_zero(folder: Path, seed: int = 0, **sizes: int) -> Pair:
    """Qwen3-MoE in int4 in groups of 32, with every zero point, of compressed-tensors; ``sizes`` as of ``fp8``."""
    weights = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}
    config = _compressed_tensors("pack-quantized", weights)

    def encode(N: int, K: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        code, zero, scale = _zero_points(N, K, 32)
        named = {
            "weight_packed": words(code),
            "weight_zero_point": words(zero.mT).mT.contiguous(),
            "weight_scale": scale,
            "weight_shape": torch.tensor([N, K]),
        }
        return named, _values(code, zero, scale, 32)

    return _qwen3(folder, seed, config, encode, sizes)


def _zero_points(N: int, K: int, group: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, and zero points and scales of groups: any codes near their zero point, every zero point."""
    zero = torch.randint(0, 16, (N, K // group))
    code = (zero.repeat_interleave(group, 1) + torch.randint(-6, 7, (N, K))).clamp(0, 15)
    return code, zero, (2.0 ** torch.randint(-6, -3, (N, K // group))).bfloat16()


def _values(code: torch.Tensor, zero: torch.Tensor, scale: torch.Tensor, group: int) -> torch.Tensor:
    each = (tensor.repeat_interleave(group, 1) for tensor in (zero, scale.double()))
    return ((code - next(each)) * next(each)).bfloat16()


def words(nibbles: torch.Tensor, order: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """[R, n] to int32 [R, n / 8]: the lowest nibble is number ``order[0]`` of eight."""
    parts = nibbles.reshape(nibbles.shape[0], -1, 8)[..., list(order)]
    words = (parts.to(torch.int64) << 4 * torch.arange(8)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def awq_words(nibbles: torch.Tensor) -> torch.Tensor:
    """Return words like ``words``, of eight columns in AWQ's order."""
    return words(nibbles, (0, 2, 4, 6, 1, 3, 5, 7))


def compressed(folder: Path, how: str, seed: int = 0, *, x: dict[str, Any] | None = None, **sizes: int) -> Pair:
    """Qwen3-MoE as compressed-tensors has it: ``mxfp4``, ``mxfp8``, ``nvfp4``, ``fp8_block``, _channel or _tensor.

    ``x`` is what its config says of activations: ``{"dynamic": False, ...}`` has scales of them in the checkpoint.
    """
    weights: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": how.removeprefix("fp8_")}
    packing = {"mxfp8": "mxfp8-quantized", "nvfp4": "nvfp4-pack-quantized"}.get(how, "float-quantized")
    packing = "mxfp4-pack-quantized" if how == "mxfp4" else packing
    if how.startswith("mxfp"):
        bits = int(how.removeprefix("mxfp"))
        weights |= {"num_bits": bits, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
    elif how == "nvfp4":
        weights |= {"num_bits": 4, "strategy": "tensor_group", "group_size": 16, "scale_dtype": "torch.float8_e4m3fn"}
    elif how == "fp8_block":
        weights["block_structure"] = [128, 128]
    config = _compressed_tensors(packing, weights, x)

    def encode(N: int, K: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        if how == "mxfp4":
            codes = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8)
            scale = torch.randint(121, 125, (N, K // 32), dtype=torch.uint8)
            w = ExpertWeights.mxfp4(codes[None], scale[None])
            return {"weight_packed": codes, "weight_scale": scale}, w.dequantize()[0]
        if how == "mxfp8":
            return _mxfp8_matrix(N, K)
        if how == "nvfp4":
            codes, scale, outer, w4 = _nvfp4(N, K)
            named = {"weight_packed": codes, "weight_scale": scale, "weight_global_scale": 1 / outer[None]}
            return named | ({} if x is None else {"input_global_scale": torch.tensor([3.0])}), w4
        if how == "fp8_tensor":
            named, w8 = _fp8_tensor(N, K)
            return named if x is None or x.get("dynamic") else named | {"input_scale": torch.tensor(0.25)}, w8
        codes = torch.randn(N, K).to(torch.float8_e4m3fn)
        if how == "fp8_block":
            scale = 2.0 ** torch.randint(-4, -1, (N // 128, K // 128))
            w = ExpertWeights.fp8_block(codes[None], scale[None], quantize_x=False)
        else:
            scale = 2.0 ** torch.randint(-4, -1, (N, 1))
            w = ExpertWeights.fp8_channel(codes[None], scale[None, :, 0], quantize_x=False)
        return {"weight": codes, "weight_scale": scale}, w.dequantize()[0]

    return _qwen3(folder, seed, config, encode, sizes)


def fp8_tensor(folder: Path, seed: int = 0, **sizes: int) -> Pair:
    """Qwen3-MoE in fp8 with a scale for each matrix, as ``fp8`` without blocks. ``sizes`` as of ``fp8``."""
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "modules_to_not_convert": _names_of_others()}
    return _qwen3(folder, seed, config, _fp8_tensor, sizes)


def modelopt(folder: Path, how: str, seed: int = 0, **sizes: int) -> Pair:
    """Qwen3-MoE as nvidia's modelopt has it: ``FP8`` or ``NVFP4``, both with static scales of x."""
    config = {"quant_method": "modelopt", "quant_algo": how, "ignore": _names_of_others(), "kv_cache_scheme": None}
    if how == "NVFP4":
        x = {"num_bits": 4, "type": "float", "dynamic": False, "group_size": 16}
        config |= {"group_size": 16, "config_groups": {"group_0": {"weights": x, "input_activations": x}}}

    def encode(N: int, K: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        x = {"input_scale": torch.tensor(0.25)}
        if how == "FP8":
            named, w = _fp8_tensor(N, K)
            return named | x, w
        codes, scale, outer, w = _nvfp4(N, K)
        return {"weight": codes, "weight_scale": scale, "weight_scale_2": outer} | x, w

    return _qwen3(folder, seed, config, encode, sizes)


def _names_of_others() -> list[str]:
    """Return the names of the tiny model's tensors that belong to no expert."""
    names = ("mlp.gate", *(f"self_attn.{p}_proj" for p in "qkvo"))
    return ["lm_head", *(f"model.layers.{i}.{name}" for i in range(2) for name in names)]


def _fp8_tensor(N: int, K: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    codes, scale = torch.randn(N, K).to(torch.float8_e4m3fn), 2.0 ** torch.randint(-4, -1, ())
    return {"weight": codes, "weight_scale": scale}, (codes.float() * scale).bfloat16()


def _nvfp4(N: int, K: int) -> tuple[torch.Tensor, ...]:
    """Codes, scales, the global scale that multiplies, and w. Gate and up have one, which follows from the sizes."""
    codes, outer = torch.randint(0, 256, (N, K // 2), dtype=torch.uint8), torch.tensor(0.25 if N == K else 0.125)
    scale = (2.0 ** torch.randint(-3, 1, (N, K // 16))).to(torch.float8_e4m3fn)
    return codes, scale, outer, ExpertWeights.nvfp4(codes[None], scale[None], outer[None]).dequantize()[0]


def mxfp8(folder: Path, seed: int = 0, **sizes: int) -> Pair:
    """Qwen3-MoE in mxfp8 with the config of MiniMax-M3-MXFP8. ``sizes`` as of ``fp8``."""
    config = {
        "quant_method": "mxfp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [1, 32],
        "scale_fmt": "ue8m0",
        "ignored_layers": ["lm_head", "*self_attn*", "*mlp.gate"],
    }
    return _qwen3(folder, seed, config, _mxfp8_matrix, sizes)


def _mxfp8_matrix(N: int, K: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    codes = torch.randn(N, K).to(torch.float8_e4m3fn)
    scale = torch.randint(121, 125, (N, K // 32), dtype=torch.uint8)
    w = ExpertWeights.mxfp8(codes[None], scale[None])
    return {"weight": codes, "weight_scale": scale}, w.dequantize()[0]


def mxfp4(folder: Path, seed: int = 0, **sizes: int) -> Pair:
    """gpt-oss as it is published: packed, gate and up in alternating rows, with biases. ``sizes`` as of ``fp8``."""
    from safetensors.torch import load_file, save_file

    given_sizes = {"num_local_experts": 8, "hidden_size": 64, "intermediate_size": 64} | sizes
    E, H, I = (given_sizes[name] for name in ("num_local_experts", "hidden_size", "intermediate_size"))  # noqa: E741
    pair = _pair("gpt-oss", folder, seed, given_sizes)
    twin_tensors = load_file(pair.twin / "model.safetensors")
    packed, plain = dict(twin_tensors), dict(twin_tensors)
    torch.manual_seed(seed)
    for name in [name for name in twin_tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        N, K = (2 * I, H) if name.endswith("gate_up_proj") else (H, I)
        codes = torch.randint(0, 256, (E, N, K // 32, 16), dtype=torch.uint8)
        least = 122 - round(math.log2(K / 64) / 2)  # results as large, whatever K is: those of gpt-oss are clamped at 7
        scale = torch.randint(least, least + 4, (E, N, K // 32), dtype=torch.uint8)
        del packed[name]
        packed |= {f"{name}_blocks": codes, f"{name}_scales": scale}
        plain[name] = ExpertWeights.mxfp4(codes, scale).dequantize().mT.contiguous()
    for to, tensors in zip(pair, (packed, plain), strict=True):
        save_file(tensors, to / "model.safetensors", {"format": "pt"})
    _say(pair.quantised, {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]})
    return pair


def _qwen3(folder: Path, seed: int, config: dict[str, Any], encode: Any, sizes: dict[str, int] | None = None) -> Pair:
    from safetensors.torch import load_file, save_file

    given_sizes = {"hidden_size": 128, "moe_intermediate_size": 128} | (sizes or {})
    pair = _pair("Qwen3-MoE", folder, seed, given_sizes)
    twin_tensors = load_file(pair.twin / "model.safetensors")
    packed, plain = dict(twin_tensors), dict(twin_tensors)
    torch.manual_seed(seed)
    for name in sorted(name for name in twin_tensors if ".experts." in name):
        named, w = encode(*twin_tensors[name].shape)
        del packed[name]
        packed |= {name.removesuffix("weight") + suffix: tensor for suffix, tensor in named.items()}
        plain[name] = w
    for to, tensors in zip(pair, (packed, plain), strict=True):
        save_file(tensors, to / "model.safetensors", {"format": "pt"})
    _say(pair.quantised, config)
    return pair


def _pair(name: str, folder: Path, seed: int, sizes: dict[str, int]) -> Pair:
    """The twin, and beside it all of its checkpoint but the weights."""
    twin = save(name, folder / "twin", seed, **sizes)
    rest = shutil.ignore_patterns("*.safetensors")
    return Pair(Path(shutil.copytree(twin, folder / "quantised", ignore=rest)), twin)


def _say(folder: Path, quantization: dict[str, Any]) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": quantization}))
