"""Tensors as checkpoints name and pack them, packed here as each format's own documents say, one number at a time."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pretuned.artifacts.errors import InputError
from pretuned.runtime import ExpertWeights

E, I, H = 2, 128, 256  # noqa: E741
# ruff: noqa: E501
LAYER = "model.layers.3.mlp.experts"
FP8 = torch.float8_e4m3fn
BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}


def stock(name: str) -> Any:
    return importlib.import_module(f"transformers.integrations.{name}")


def randint(high: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.int32)


def e4m3(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(FP8)


def words(nibbles: torch.Tensor, places: tuple[int, ...] = tuple(range(8))) -> torch.Tensor:
    """[R, 8n] of 0 to 15 in int32 words [R, n]: the i-th lowest nibble is column ``places[i]`` of its eight."""
    out = []
    for row in nibbles.tolist():
        found = [sum(row[first + place] << 4 * i for i, place in enumerate(places)) for first in range(0, len(row), 8)]
        out.append([one - (1 << 32) if one >= 1 << 31 else one for one in found])
    return torch.tensor(out, dtype=torch.int32)


def each(make: Callable[[int, int, int], dict[str, torch.Tensor]], layer: str = LAYER) -> dict[str, torch.Tensor]:
    """The tensors of all experts' three matrices; ``make(N, K, seed)`` has those of one."""
    found = {f"{layer.rsplit('.', 1)[0]}.gate.weight": torch.ones(E, H),
             f"{layer.rsplit('.', 1)[0]}.shared_experts.up_proj.weight": torch.ones(2, 2)}  # fmt: skip
    for e in range(E):
        for i, (name, N, K) in enumerate((("gate_proj", I, H), ("up_proj", I, H), ("down_proj", H, I))):
            found |= {f"{layer}.{e}.{name}.{suffix}": one for suffix, one in make(N, K, 10 * e + i).items()}
    return found


def whole(one: Callable[[int, int, int], torch.Tensor], part: str) -> torch.Tensor:
    """What ``each`` stands for, [E, N, K]; ``one(N, K, seed)`` is one matrix."""
    if part == "down":
        return torch.stack([one(H, I, 10 * e + 2) for e in range(E)])
    return torch.stack([torch.cat([one(I, H, 10 * e), one(I, H, 10 * e + 1)]) for e in range(E)])


def check(tensors: dict[str, torch.Tensor], config: dict[str, Any], format: str,
          want: Callable[[int, int, int], torch.Tensor]) -> None:  # fmt: skip
    for part in ("gate_up", "down"):
        found = ExpertWeights.from_tensors(tensors, config, part)
        assert found.format == format
        torch.testing.assert_close(found.dequantize(torch.float32), whole(want, part), rtol=1e-6, atol=0)


def test_deepseek_v3() -> None:
    def scale(N: int, K: int, seed: int) -> torch.Tensor:
        return 1 + torch.arange(-(-N // 128) * -(-K // 128)).view(-(-N // 128), -1) + seed * 0.5

    tensors = each(lambda N, K, seed: {"weight": e4m3(N, K, seed=seed), "weight_scale_inv": scale(N, K, seed)})
    check(tensors, BLOCKS, "fp8_block", lambda N, K, seed: stock("finegrained_fp8")._dequantize_fp8_weight(
        e4m3(N, K, seed=seed), scale(N, K, seed), [128, 128], torch.float32))  # fmt: skip
    found = ExpertWeights.from_tensors(tensors, {"quantization_config": BLOCKS}, "down", quantize_x=False)
    assert found.format == "fp8_block_a16"


def test_fp8_blocks_stacked_and_with_scales_of_fewer_bits() -> None:
    codes, scale = e4m3(E, 2 * I, H), torch.tensor([[[1.0, 2.0], [4.0, 0.5]]] * E)
    for given in (scale.bfloat16(), scale.to(torch.float8_e8m0fnu)):
        found = ExpertWeights.from_tensors(
            {"experts.gate_up_proj": codes, "experts.gate_up_proj_scale_inv": given}, BLOCKS
        )
        assert torch.equal(found.scale, scale)
        assert found.codes.data_ptr() == codes.data_ptr()
    short = ExpertWeights.from_tensors({"weight": codes, "weight_scale_inv": scale}, BLOCKS)
    assert torch.equal(short.dequantize(), found.dequantize())


def test_deepseek_v4() -> None:
    def make(N: int, K: int, seed: int) -> dict[str, torch.Tensor]:
        packed = randint(256, N, K // 2, seed=seed).to(torch.uint8).view(torch.int8)
        return {
            "weight": packed,
            "scale": randint(20, N, K // 32, seed=seed).add(118).to(torch.uint8).view(torch.float8_e8m0fnu),
        }

    def want(N: int, K: int, seed: int) -> torch.Tensor:
        one = make(N, K, seed)
        unpacked = stock("finegrained_fp8").Fp8Dequantize(None)._unpack_fp4(one["weight"])
        return unpacked * one["scale"].float().repeat_interleave(32, 1)

    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    tensors = {name.replace("mlp", "ffn").replace(old, new): one for name, one in each(make).items()
               for old, new in names.items() if old in name}  # fmt: skip
    check(tensors, {"expert_dtype": "fp4", **BLOCKS, "scale_fmt": "ue8m0"}, "mxfp4", want)
    check(tensors, {"expert_dtype": "fp4", "quantization_config": BLOCKS}, "mxfp4", want)


def test_gpt_oss_is_not_copied() -> None:
    blocks, scales = randint(256, E, 2 * I, 3, 16).to(torch.uint8), randint(20, E, 2 * I, 3).add(118).to(torch.uint8)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    found = ExpertWeights.from_tensors(
        {f"{name}_blocks": blocks, f"{name}_scales": scales, f"{name}_bias": torch.zeros(E, 2 * I)},
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
    )
    assert (found.format, found.shape) == ("mxfp4", (E, 2 * I, 96))
    assert (found.codes.data_ptr(), found.scale.data_ptr()) == (blocks.data_ptr(), scales.data_ptr())
    theirs = stock("mxfp4")._convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
    assert torch.equal(found.dequantize(torch.float32), theirs)


def compressed(format: str, weights: dict[str, Any], activations: Any = None, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}, **more}


INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}


def spread(scale: torch.Tensor, K: int) -> torch.Tensor:
    return scale.float().repeat_interleave(K // scale.shape[1], 1)


def int4_scale(N: int, groups: int, seed: int) -> torch.Tensor:
    return (randint(50, N, groups, seed=seed + 100) + 1).bfloat16() / 64


@pytest.mark.parametrize("zero", [False, True])
def test_kimi_k2_thinking(zero: bool) -> None:
    def make(N: int, K: int, seed: int) -> dict[str, torch.Tensor]:
        found = {"weight_packed": words(randint(16, N, K, seed=seed)), "weight_shape": torch.tensor([N, K]),
                 "weight_scale": int4_scale(N, K // 32, seed)}  # fmt: skip
        if zero:  # packed along N
            found["weight_zero_point"] = words(randint(16, N, K // 32, seed=seed + 50).T).T.contiguous()
        return found

    def want(N: int, K: int, seed: int) -> torch.Tensor:
        shift = spread(randint(16, N, K // 32, seed=seed + 50), K) if zero else 8
        return (randint(16, N, K, seed=seed) - shift) * spread(int4_scale(N, K // 32, seed), K)

    check(each(make), compressed("pack-quantized", INT4), "int4_g32" + "_zp" * zero, want)


def test_one_int4_scale_a_row_is_one_for_each_group() -> None:
    def make(N: int, K: int, seed: int) -> dict[str, torch.Tensor]:
        return {"weight_packed": words(randint(16, N, K, seed=seed)), "weight_scale": int4_scale(N, 1, seed)}

    config = compressed("pack-quantized", INT4 | {"strategy": "channel"})
    found = ExpertWeights.from_tensors(each(make), config, "gate_up")
    assert found.format == "int4_g128"
    want = whole(lambda N, K, seed: (randint(16, N, K, seed=seed) - 8) * int4_scale(N, 1, seed).float(), "gate_up")
    assert torch.equal(found.dequantize(torch.float32), want)


@pytest.mark.parametrize("newer", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
def test_gptq(symmetric: bool, newer: bool) -> None:
    def zeros(N: int, K: int, seed: int) -> torch.Tensor:
        return torch.full((K // 64, N), 8) if symmetric else randint(16, K // 64, N, seed=seed + 50)

    def make(N: int, K: int, seed: int) -> dict[str, torch.Tensor]:
        stored = zeros(N, K, seed) if newer else zeros(N, K, seed) - 1 & 15
        return {"qweight": words(randint(16, N, K, seed=seed)).T.contiguous(), "qzeros": words(stored),
                "scales": int4_scale(N, K // 64, seed).half().T.contiguous(), "g_idx": torch.arange(K) // 64}  # fmt: skip

    def want(N: int, K: int, seed: int) -> torch.Tensor:
        return (randint(16, N, K, seed=seed) - spread(zeros(N, K, seed).T, K)) * spread(int4_scale(N, K // 64, seed), K)

    config = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": symmetric}
    config |= {"checkpoint_format": "gptq_v2"} if newer else {}
    check(each(make), config, "int4_g64" + "_zp" * (not symmetric), want)
    check(each(make), config | {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq"},
          "int4_g64" + "_zp" * (not symmetric), want)  # fmt: skip
    mixed = each(make) | {f"{LAYER}.0.down_proj.g_idx": torch.arange(I).flip(0) // 64}
    with pytest.raises(InputError, match=r"g_idx of .* is of another order"):
        ExpertWeights.from_tensors(mixed, config, "down")


def test_awq() -> None:
    places = (0, 2, 4, 6, 1, 3, 5, 7)

    def make(N: int, K: int, seed: int) -> dict[str, torch.Tensor]:
        return {"qweight": words(randint(16, N, K, seed=seed).T, places), "scales": int4_scale(N, K // 128, seed).T,
                "qzeros": words(randint(16, K // 128, N, seed=seed + 50), places)}  # fmt: skip

    def want(N: int, K: int, seed: int) -> torch.Tensor:
        zero = spread(randint(16, K // 128, N, seed=seed + 50).T, K)
        return (randint(16, N, K, seed=seed) - zero) * spread(int4_scale(N, K // 128, seed), K)

    config = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
    found = ExpertWeights.from_tensors(each(make), config, "gate_up")
    assert found.format == "int4_g128_zp"
    assert torch.equal(found.dequantize(torch.float32), whole(want, "gate_up"))
    with pytest.raises(InputError, match="awq of version 'gemv', wanted 'gemm'"):
        ExpertWeights.from_tensors(each(make), config | {"version": "gemv"}, "down")


def test_kimi_k3() -> None:
    def make(N: int, K: int, seed: int) -> dict[str, torch.Tensor]:
        return {"weight_packed": randint(256, N, K // 2, seed=seed).to(torch.uint8),
                "weight_scale": randint(20, N, K // 32, seed=seed).add(118).to(torch.uint8)}  # fmt: skip

    def want(N: int, K: int, seed: int) -> torch.Tensor:
        one = make(N, K, seed)
        blocks, scales = one["weight_packed"].view(1, N, K // 32, 16), one["weight_scale"][None]
        return stock("mxfp4")._convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)[0].T

    weights = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
    check(each(make), compressed("mxfp4-pack-quantized", weights), "mxfp4", want)


@pytest.mark.parametrize("inverse", [False, True])
def test_nvfp4(inverse: bool) -> None:
    def scale(N: int, K: int, seed: int) -> torch.Tensor:
        return e4m3(N, K // 16, seed=seed).float().abs().add(0.5).to(FP8)

    def make(N: int, K: int, seed: int) -> dict[str, torch.Tensor]:
        packed = randint(256, N, K // 2, seed=seed).to(torch.uint8)
        outer = 0.25 if K == H else 0.125
        if inverse:
            return {"weight_packed": packed, "weight_scale": scale(N, K, seed),
                    "weight_global_scale": torch.tensor([1 / outer]), "input_global_scale": torch.tensor([1.0])}  # fmt: skip
        return {"weight": packed, "weight_scale": scale(N, K, seed), "weight_scale_2": torch.tensor(outer),
                "input_scale": torch.tensor(1.0)}  # fmt: skip

    def want(N: int, K: int, seed: int) -> torch.Tensor:
        packed = randint(256, N, K // 2, seed=seed).to(torch.uint8)
        unpacked = stock("finegrained_fp8").Fp8Dequantize(None)._unpack_fp4(packed)
        return unpacked * scale(N, K, seed).float().repeat_interleave(16, 1) * (0.25 if K == H else 0.125)

    if inverse:
        weights = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
        check(each(make), compressed("nvfp4-pack-quantized", weights), "nvfp4", want)
        return
    check(each(make), {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4", want)
    check(each(make), {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}, "nvfp4", want)
    uneven = each(make) | {f"{LAYER}.1.up_proj.weight_scale_2": torch.tensor(3.0)}
    with pytest.raises(InputError, match="the global scales of gate and up is two, wanted one for both"):
        ExpertWeights.from_tensors(uneven, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "gate_up")


CHANNEL = {"num_bits": 8, "type": "float", "strategy": "channel"}
DYNAMIC = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}


@pytest.mark.parametrize(
    ("config", "rows", "format"),
    [
        (compressed("float-quantized", CHANNEL, DYNAMIC), True, "fp8_channel"),
        (compressed("float-quantized", CHANNEL), True, "fp8_channel_a16"),
        (compressed("float-quantized", CHANNEL | {"strategy": "tensor"}, DYNAMIC), False, "fp8_channel"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, False, "fp8_channel"),
        ({"quant_method": "fbgemm_fp8"}, True, "fp8_channel"),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, False, "fp8_channel"),
    ],
)
def test_fp8_a_row_and_a_tensor(config: dict[str, Any], rows: bool, format: str) -> None:
    def scale(N: int, seed: int) -> torch.Tensor:
        return torch.arange(1, N + 1).view(N, 1) / 64 if rows else torch.tensor(0.5 + seed)

    tensors = each(lambda N, K, seed: {"weight": e4m3(N, K, seed=seed), "weight_scale": scale(N, seed)})
    check(tensors, config, format, lambda N, K, seed: e4m3(N, K, seed=seed).float() * scale(N, seed))


def test_of_several_groups_the_one_whose_target_names_the_experts() -> None:
    tensors = each(lambda N, K, seed: {"weight": e4m3(N, K, seed=seed), "weight_scale": torch.ones(N, 1)})
    config = compressed("float-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"})
    config["config_groups"]["group_1"] = {"targets": ["re:.*experts.*down_proj.*"], "weights": CHANNEL}
    assert ExpertWeights.from_tensors(tensors, config, "down").format == "fp8_channel_a16"
    with pytest.raises(InputError, match=r"compressed-tensors' float-quantized with weights of .'int', 8, 'channel'."):
        ExpertWeights.from_tensors(tensors, config, "gate_up")


def _fp8(**change: Any) -> dict[str, torch.Tensor]:
    found = each(lambda N, K, seed: {"weight": e4m3(N, K), "weight_scale_inv": torch.ones(N // 128, K // 128)})
    return {name: one for name, one in (found | change).items() if one is not None}


@pytest.mark.parametrize(
    ("tensors", "config", "part", "told"),
    [
        (_fp8(), BLOCKS, None, "the tensors is of both products, wanted part='gate_up' or part='down'"),
        (_fp8(), BLOCKS, "up", "part is 'up', wanted 'gate_up', 'down' or None"),
        (_fp8(), {"quant_method": "bitsandbytes"}, "down", "quant_method is 'bitsandbytes', wanted fp8, mxfp4,"),
        (_fp8(), {"quant_method": "modelopt", "quant_algo": "MXFP8"}, "down", "modelopt's MXFP8, wanted NVFP4, W4A16_NVFP4"),
        (_fp8(), None, "down", "quantization_config is a NoneType"),
        (_fp8(), BLOCKS | {"weight_block_size": [64, 64]}, "down", r"weight_block_size is \[64, 64\], wanted \[128, 128\]"),
        (_fp8(), {"quant_method": "gptq", "bits": 8}, "down", "gptq of 8 bits, wanted 4 bits"),
        (_fp8(), {"quant_method": "gptq", "bits": 4}, "down", "wanted 'scales' among it|wanted 'qweight' among it"),
        (_fp8(**{f"{LAYER}.1.down_proj.weight_scale_inv": None}), BLOCKS, "down", "1.down_proj.weight' is .'weight'., wanted"),
        (_fp8(**{f"{LAYER}.1.down_proj.weight": torch.ones(H, I)}), BLOCKS, "down", "is torch.float32, wanted torch.float8"),
        (_fp8(**{f"{LAYER}.1.down_proj.weight": e4m3(H, 64)}), BLOCKS, "down", "expert 1 of those given is torch.float8_e4m3fn .256, 64."),
        (_fp8(**{f"{LAYER}.3.down_proj.weight": e4m3(H, I)}), BLOCKS, "down", r"of experts \[0, 1, 3\]"),
        (_fp8(**{f"{LAYER}.1.up_proj.weight": None, f"{LAYER}.1.up_proj.weight_scale_inv": None}), BLOCKS, "gate_up", "the projections of expert 1 is 'gate_proj', wanted"),
        (_fp8(**{"model.layers.4.mlp.experts.1.down_proj.weight": e4m3(H, I)}), BLOCKS, "down", "of 2 layers"),
        ({"model.norm.weight": torch.ones(2)}, BLOCKS, None, "the tensors is model.norm.weight ..., wanted experts' weights"),
        (each(lambda N, K, seed: {"weight": e4m3(100, K), "weight_scale_inv": torch.ones(1, K // 128)}), BLOCKS, "gate_up", "gate is of 100 rows, wanted a multiple of 128"),
        (_fp8(), compressed("int-quantized", {"num_bits": 8, "type": "int"}), "down", "compressed-tensors' int-quantized"),
        (_fp8(), {"quant_method": "compressed-tensors"}, "down", "of 0 config_groups, wanted one whose targets name"),
    ],
)  # fmt: skip
def test_what_can_not_be_read_is_told(
    tensors: dict[str, torch.Tensor], config: Any, part: str | None, told: str
) -> None:
    with pytest.raises(InputError, match=told) as error:
        ExpertWeights.from_tensors(tensors, config, part)
    assert str(error.value).startswith("ExpertWeights.from_tensors: ")
