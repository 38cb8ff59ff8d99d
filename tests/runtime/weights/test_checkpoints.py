"""Tensors as checkpoints name and pack them, packed here as each format's own documents say."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from pretuned.artifacts.errors import InputError
from pretuned.runtime import ExpertWeights

E, I, H = 2, 128, 256  # noqa: E741
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
    taken = nibbles.long().reshape(len(nibbles), -1, 8)[..., list(places)]
    return (taken << 4 * torch.arange(8)).sum(-1).to(torch.int32)  # a word past 2^31 is a negative one


def each(make: Callable[[int, int, int], dict[str, torch.Tensor]], layer: str = LAYER) -> dict[str, torch.Tensor]:
    """The tensors of all experts' three matrices; ``make(N, K, seed)`` has those of one."""
    tensors = {
        f"{layer.rsplit('.', 1)[0]}.gate.weight": torch.ones(E, H),
        f"{layer.rsplit('.', 1)[0]}.shared_experts.up_proj.weight": torch.ones(2, 2),
    }
    for e in range(E):
        for i, (name, N, K) in enumerate((("gate_proj", I, H), ("up_proj", I, H), ("down_proj", H, I))):
            tensors |= {f"{layer}.{e}.{name}.{suffix}": tensor for suffix, tensor in make(N, K, 10 * e + i).items()}
    return tensors


def whole(maker: Callable[[int, int, int], torch.Tensor], part: str) -> torch.Tensor:
    """Return the matrix [E, N, K] of all experts; ``maker(N, K, seed)`` is one expert's."""
    if part == "down":
        return torch.stack([maker(H, I, 10 * e + 2) for e in range(E)])
    return torch.stack([torch.cat([maker(I, H, 10 * e), maker(I, H, 10 * e + 1)]) for e in range(E)])


def check(
    tensors: dict[str, torch.Tensor], config: dict[str, Any], format: str, want: Callable[[int, int, int], torch.Tensor]
) -> None:
    for part in ("gate_up", "down"):
        weights = ExpertWeights.from_tensors(tensors, config, part)
        assert weights.format == format
        torch.testing.assert_close(weights.dequantize(torch.float32), whole(want, part), rtol=1e-6, atol=0)


def test_deepseek_v3() -> None:
    def scale(N: int, K: int, seed: int) -> torch.Tensor:
        return 1 + torch.arange(-(-N // 128) * -(-K // 128)).view(-(-N // 128), -1) + seed * 0.5

    tensors = each(lambda N, K, seed: {"weight": e4m3(N, K, seed=seed), "weight_scale_inv": scale(N, K, seed)})
    check(
        tensors,
        BLOCKS,
        "fp8_block",
        lambda N, K, seed: stock("finegrained_fp8")._dequantize_fp8_weight(
            e4m3(N, K, seed=seed), scale(N, K, seed), [128, 128], torch.float32
        ),
    )
    weights = ExpertWeights.from_tensors(tensors, {"quantization_config": BLOCKS}, "down", quantize_x=False)
    assert weights.format == "fp8_block_a16"


def test_fp8_blocks_stacked_and_with_scales_of_fewer_bits() -> None:
    codes, scale = e4m3(E, 2 * I, H), torch.tensor([[[1.0, 2.0], [4.0, 0.5]]] * E)
    for stored in (scale.bfloat16(), scale.to(torch.float8_e8m0fnu)):
        weights = ExpertWeights.from_tensors(
            {"experts.gate_up_proj": codes, "experts.gate_up_proj_scale_inv": stored}, BLOCKS
        )
        assert torch.equal(weights.scale, scale)
        assert weights.codes.data_ptr() == codes.data_ptr()
    short = ExpertWeights.from_tensors({"weight": codes, "weight_scale_inv": scale}, BLOCKS)
    assert torch.equal(short.dequantize(), weights.dequantize())


def test_deepseek_v4() -> None:
    def make(N: int, K: int, seed: int) -> dict[str, torch.Tensor]:
        packed = randint(256, N, K // 2, seed=seed).to(torch.uint8).view(torch.int8)
        return {
            "weight": packed,
            "scale": randint(20, N, K // 32, seed=seed).add(118).to(torch.uint8).view(torch.float8_e8m0fnu),
        }

    def want(N: int, K: int, seed: int) -> torch.Tensor:
        stored = make(N, K, seed)
        unpacked = stock("finegrained_fp8").Fp8Dequantize(None)._unpack_fp4(stored["weight"])
        return unpacked * stored["scale"].float().repeat_interleave(32, 1)

    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    tensors = {
        name.replace("mlp", "ffn").replace(old, new): tensor
        for name, tensor in each(make).items()
        for old, new in names.items()
        if old in name
    }
    check(tensors, {"expert_dtype": "fp4", **BLOCKS, "scale_fmt": "ue8m0"}, "mxfp4", want)
    check(tensors, {"expert_dtype": "fp4", "quantization_config": BLOCKS}, "mxfp4", want)


def test_gpt_oss_is_not_copied() -> None:
    blocks, scales = randint(256, E, 2 * I, 3, 16).to(torch.uint8), randint(20, E, 2 * I, 3).add(118).to(torch.uint8)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    weights = ExpertWeights.from_tensors(
        {f"{name}_blocks": blocks, f"{name}_scales": scales, f"{name}_bias": torch.zeros(E, 2 * I)},
        {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]},
    )
    assert (weights.format, weights.shape) == ("mxfp4", (E, 2 * I, 96))
    assert (weights.codes.data_ptr(), weights.scale.data_ptr()) == (blocks.data_ptr(), scales.data_ptr())
    theirs = stock("mxfp4")._convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
    assert torch.equal(weights.dequantize(torch.float32), theirs)


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
        tensors = {
            "weight_packed": words(randint(16, N, K, seed=seed)),
            "weight_shape": torch.tensor([N, K]),
            "weight_scale": int4_scale(N, K // 32, seed),
        }
        if zero:  # packed along N
            tensors["weight_zero_point"] = words(randint(16, N, K // 32, seed=seed + 50).T).T.contiguous()
        return tensors

    def want(N: int, K: int, seed: int) -> torch.Tensor:
        shift = spread(randint(16, N, K // 32, seed=seed + 50), K) if zero else 8
        return (randint(16, N, K, seed=seed) - shift) * spread(int4_scale(N, K // 32, seed), K)

    config = compressed("pack-quantized", INT4 | {"symmetric": not zero})
    check(each(make), config, "int4_g32" + "_zp" * zero, want)
    check(each(make), {"text_config": {"quantization_config": config}}, "int4_g32" + "_zp" * zero, want)  # Kimi-K2.5


def test_one_int4_scale_a_row_is_one_for_each_group() -> None:
    def make(N: int, K: int, seed: int) -> dict[str, torch.Tensor]:
        return {"weight_packed": words(randint(16, N, K, seed=seed)), "weight_scale": int4_scale(N, 1, seed)}

    config = compressed("pack-quantized", INT4 | {"strategy": "channel"})
    weights = ExpertWeights.from_tensors(each(make), config, "gate_up")
    assert weights.format == "int4_g128"
    want = whole(lambda N, K, seed: (randint(16, N, K, seed=seed) - 8) * int4_scale(N, 1, seed).float(), "gate_up")
    assert torch.equal(weights.dequantize(torch.float32), want)


@pytest.mark.parametrize("newer", [False, True])
@pytest.mark.parametrize("symmetric", [False, True])
def test_gptq(symmetric: bool, newer: bool) -> None:
    def zeros(N: int, K: int, seed: int) -> torch.Tensor:
        return torch.full((K // 64, N), 8) if symmetric else randint(16, K // 64, N, seed=seed + 50)

    def make(N: int, K: int, seed: int) -> dict[str, torch.Tensor]:
        stored = zeros(N, K, seed) if newer else zeros(N, K, seed) - 1 & 15
        return {
            "qweight": words(randint(16, N, K, seed=seed)).T.contiguous(),
            "qzeros": words(stored),
            "scales": int4_scale(N, K // 64, seed).half().T.contiguous(),
            "g_idx": torch.arange(K) // 64,
        }

    def want(N: int, K: int, seed: int) -> torch.Tensor:
        return (randint(16, N, K, seed=seed) - spread(zeros(N, K, seed).T, K)) * spread(int4_scale(N, K // 64, seed), K)

    config = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": symmetric}
    config |= {"checkpoint_format": "gptq_v2"} if newer else {}
    check(each(make), config, "int4_g64" + "_zp" * (not symmetric), want)
    packing = "auto_round:gptqmodel" if newer else "auto_round:auto_gptq"
    check(
        each(make),
        config | {"quant_method": "auto-round", "packing_format": packing},
        "int4_g64" + "_zp" * (not symmetric),
        want,
    )
    mixed = each(make) | {f"{LAYER}.0.down_proj.g_idx": torch.arange(I).flip(0) // 64}
    with pytest.raises(InputError, match=r"g_idx of .* is of another order"):
        ExpertWeights.from_tensors(mixed, config, "down")


def gptq_matrix(N: int, K: int, seed: int) -> dict[str, torch.Tensor]:
    """int4 in groups of 64 whose zero points are 8: without qzeros and g_idx, which say what a test has them say."""
    return {
        "qweight": words(randint(16, N, K, seed=seed)).T.contiguous(),
        "scales": int4_scale(N, K // 64, seed).half().T.contiguous(),
    }


def gptq_values(N: int, K: int, seed: int) -> torch.Tensor:
    return (randint(16, N, K, seed=seed) - 8) * spread(int4_scale(N, K // 64, seed), K)


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": True}
QZEROS: dict[str, Callable[[int, int], torch.Tensor] | None] = {
    "7, as AutoGPTQ has it": lambda G, N: words(torch.full((G, N), 7)),
    "8, as vLLM's readers ignore it": lambda G, N: words(torch.full((G, N), 8)),
    "any, as AutoRound may leave it": lambda G, N: words(randint(16, G, N, seed=9)),
    "empty": lambda G, N: torch.empty(G, 0, dtype=torch.int32),
    "none": None,
}


@pytest.mark.parametrize("qzeros", QZEROS)
@pytest.mark.parametrize(
    "config",
    [
        GPTQ,
        GPTQ | {"checkpoint_format": "gptq"},
        GPTQ | {"checkpoint_format": "gptq_v2"},
        GPTQ | {"format": "gptq_v2"},
        *(
            GPTQ | {"quant_method": "auto-round", "packing_format": name}
            for name in ("auto_round:auto_gptq", "auto_round:gptqmodel", "auto_round")
        ),
    ],
)
def test_symmetric_gptq_never_reads_zero_points(qzeros: str, config: dict[str, Any]) -> None:
    stored = QZEROS[qzeros]

    def make(N: int, K: int, seed: int) -> dict[str, torch.Tensor]:
        return gptq_matrix(N, K, seed) | ({} if stored is None else {"qzeros": stored(K // 64, N)})

    check(each(make), config, "int4_g64", gptq_values)


G_IDX: dict[str, Callable[[int], torch.Tensor]] = {
    "natural": lambda K: torch.arange(K) // 64,
    "empty": lambda K: torch.empty(0, dtype=torch.int32),
    "zeros": lambda K: torch.zeros(K, dtype=torch.int32),
}


@pytest.mark.parametrize("g_idx", G_IDX)
def test_an_order_that_says_nothing_is_the_natural_one(g_idx: str) -> None:
    tensors = each(lambda N, K, seed: gptq_matrix(N, K, seed) | {"g_idx": G_IDX[g_idx](K).int()})
    check(tensors, GPTQ, "int4_g64", gptq_values)
    ordered = GPTQ | {"desc_act": True}
    if g_idx == "natural":
        check(tensors, ordered, "int4_g64", gptq_values)
        return
    wanted = "g_idx of .* is of another order" if g_idx == "zeros" else "wanted 'g_idx' among it"
    with pytest.raises(InputError, match=wanted):
        ExpertWeights.from_tensors(tensors, ordered, "down")


def test_one_group_has_one_order() -> None:
    def make(N: int, K: int, seed: int) -> dict[str, torch.Tensor]:
        return {
            "qweight": words(randint(16, N, K, seed=seed)).T.contiguous(),
            "scales": int4_scale(N, 1, seed).half().T.contiguous(),
        }

    def want(N: int, K: int, seed: int) -> torch.Tensor:
        return (randint(16, N, K, seed=seed) - 8) * int4_scale(N, 1, seed).float()

    check(each(make), GPTQ | {"group_size": -1, "desc_act": True}, "int4_g128", want)


def test_gptqmodel_takes_one_from_whole_words_of_zero_points() -> None:
    """A zero point of 0 borrows from the next: convert_gptq_v2_to_v1_format_module subtracts 0x11111111."""

    def zeros(N: int, K: int, seed: int) -> torch.Tensor:
        return randint(3, K // 64, N, seed=seed + 50)

    def make(N: int, K: int, seed: int) -> dict[str, torch.Tensor]:
        return gptq_matrix(N, K, seed) | {"qzeros": words(zeros(N, K, seed)) - 0x11111111}

    def want(N: int, K: int, seed: int) -> torch.Tensor:
        shift = spread(zeros(N, K, seed).T, K)
        return (randint(16, N, K, seed=seed) - shift) * spread(int4_scale(N, K // 64, seed), K)

    for quantizer in (
        "gptqmodel:7.7.0",
        ["transformers:5.23.0.dev0", "optimum:2.0.0.dev0", "another:1.0", "gptqmodel:4.0"],
    ):
        config = GPTQ | {"sym": False, "meta": {"quantizer": quantizer}}
        check(each(make), config, "int4_g64_zp", want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin', wanted 'gptq' or 'gptq_v2'"),
        ({"format": "gptq_p", "checkpoint_format": "gptq"}, "checkpoint_format is 'gptq_p'"),
        ({"is_marlin_format": True}, "checkpoint_format is 'gptq'"),
        ({"sym": "true"}, "the config's sym is true, wanted true or false"),
        ({"desc_act": 1}, "the config's desc_act is 1, wanted true or false"),
        ({"group_size": 32}, r"its scales, is of shape \[256, 2\], wanted \[256, 4\]"),
        ({"group_size": 128.0}, r"the config's group_size is 128.0, wanted a number of columns, or -1"),
        ({"group_size": 0}, r"the config's group_size is 0, wanted"),
        ({"quant_method": "auto-round", "data_type": "mx_fp"}, "data_type is 'mx_fp', wanted 'int'"),
        ({"quant_method": "auto-round", "act_bits": 8}, "act_bits is 8, wanted 16"),
        (
            {"quant_method": "auto-round", "packing_format": "auto_round:llm_compressor"},
            "packing_format is 'auto_round:llm",
        ),
        ({"quant_method": "auto-round", "rotation_config": {"hadamard": True}}, "rotated weights"),
    ],
)
def test_gptq_that_is_packed_in_another_way(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ExpertWeights.from_tensors(each(gptq_matrix), GPTQ | change, "down")


def test_awq() -> None:
    places = (0, 2, 4, 6, 1, 3, 5, 7)

    def make(N: int, K: int, seed: int) -> dict[str, torch.Tensor]:
        return {
            "qweight": words(randint(16, N, K, seed=seed).T, places),
            "scales": int4_scale(N, K // 128, seed).T,
            "qzeros": words(randint(16, K // 128, N, seed=seed + 50), places),
        }

    def want(N: int, K: int, seed: int) -> torch.Tensor:
        zero = spread(randint(16, K // 128, N, seed=seed + 50).T, K)
        return (randint(16, N, K, seed=seed) - zero) * spread(int4_scale(N, K // 128, seed), K)

    config = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": True}
    weights = ExpertWeights.from_tensors(each(make), config, "gate_up")
    assert weights.format == "int4_g128_zp"
    assert torch.equal(weights.dequantize(torch.float32), whole(want, "gate_up"))
    with pytest.raises(InputError, match="awq of version 'gemv', wanted 'gemm'"):
        ExpertWeights.from_tensors(each(make), config | {"version": "gemv"}, "down")
    with pytest.raises(InputError, match="awq of checkpoint_format 'gemv_fast', wanted 'gemm'"):
        ExpertWeights.from_tensors(each(make), config | {"checkpoint_format": "gemv_fast"}, "down")

    def symmetric(N: int, K: int, seed: int) -> torch.Tensor:
        return (randint(16, N, K, seed=seed) - 8) * spread(int4_scale(N, K // 128, seed), K)

    for change in (
        {"zero_point": False},
        {"sym": True},
        {"quant_method": "auto-round", "sym": True, "packing_format": "auto_round:auto_awq"},
    ):
        weights = ExpertWeights.from_tensors(each(make), config | change, "gate_up")
        assert weights.format == "int4_g128"
        assert torch.equal(weights.dequantize(torch.float32), whole(symmetric, "gate_up"))


def test_kimi_k3() -> None:
    def make(N: int, K: int, seed: int) -> dict[str, torch.Tensor]:
        return {
            "weight_packed": randint(256, N, K // 2, seed=seed).to(torch.uint8),
            "weight_scale": randint(20, N, K // 32, seed=seed).add(118).to(torch.uint8),
        }

    def want(N: int, K: int, seed: int) -> torch.Tensor:
        stored = make(N, K, seed)
        blocks, scales = stored["weight_packed"].view(1, N, K // 32, 16), stored["weight_scale"][None]
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
            return {
                "weight_packed": packed,
                "weight_scale": scale(N, K, seed),
                "weight_global_scale": torch.tensor([1 / outer]),
                "input_global_scale": torch.tensor([1.0]),
            }
        return {
            "weight": packed,
            "weight_scale": scale(N, K, seed),
            "weight_scale_2": torch.tensor(outer),
            "input_scale": torch.tensor(1.0),
        }

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


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("group", [32, 64, 128, 192, None])
def test_what_compressed_tensors_itself_packs(group: int | None, symmetric: bool) -> None:
    compressor = pytest.importorskip("compressed_tensors.compressors.pack_quantized.base")
    schemes = pytest.importorskip("compressed_tensors.quantization")
    args = schemes.QuantizationArgs(
        num_bits=4, type="int", strategy="group" if group else "channel", group_size=group, symmetric=symmetric
    )
    scheme = schemes.QuantizationScheme(targets=["Linear"], weights=args, format="pack-quantized")
    N, K = 72, 384
    tensors, wanted = {}, []
    for e in range(E):
        shape = (N, K // group if group else 1)
        zero = torch.zeros(shape) if symmetric else randint(16, *shape, seed=e) - 8
        stored = compressor.PackedQuantizationCompressor.compress(
            {
                "weight": torch.randn(N, K),
                "weight_scale": int4_scale(*shape, e),
                "weight_zero_point": zero.to(torch.int8),
            },
            scheme,
        )
        tensors |= {f"{LAYER}.{e}.down_proj.{suffix}": tensor for suffix, tensor in stored.items()}
        wanted.append(compressor.PackedQuantizationCompressor.decompress(stored, scheme)["weight"])
    config = {"quant_method": "compressed-tensors", "config_groups": {"group_0": scheme.model_dump()}}
    assert torch.equal(ExpertWeights.from_tensors(tensors, config, "down").dequantize(), torch.stack(wanted))


UE8M0 = torch.arange(118, 138)  # exponents of -9 to 10
INTEGERS = {
    "uint8": (torch.uint8, False),
    "int8": (torch.int8, False),
    "int16": (torch.int16, True),
    "int32": (torch.int32, True),
    "int64": (torch.int64, True),
}


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("name", INTEGERS)
def test_integers_beside_fp8_are_e8m0(name: str, by_row: bool) -> None:
    """Bytes can be nothing else; wider integers are if the config says ue8m0."""
    dtype, needs_word = INTEGERS[name]

    def codes(N: int, K: int, seed: int) -> torch.Tensor:
        shape = (N, 1) if by_row else (N // 128, K // 128)
        return UE8M0[randint(len(UE8M0), *shape, seed=seed)]

    def make(N: int, K: int, seed: int) -> dict[str, torch.Tensor]:
        stored = codes(N, K, seed).to(torch.uint8)
        return {
            "weight": e4m3(N, K, seed=seed),
            "weight_scale_inv": stored.view(torch.int8) if dtype is torch.int8 else stored.to(dtype),
        }

    def want(N: int, K: int, seed: int) -> torch.Tensor:
        factor = torch.exp2(codes(N, K, seed).float() - 127)
        times = (1, K) if by_row else (128, 128)
        return e4m3(N, K, seed=seed).float() * factor.repeat_interleave(times[0], 0).repeat_interleave(times[1], 1)

    config: dict[str, Any] = {"quant_method": "fp8"} if by_row else BLOCKS
    format = "fp8_channel" if by_row else "fp8_block"
    check(each(make), config | {"scale_fmt": "ue8m0"}, format, want)
    group = {
        "num_bits": 8,
        "type": "float",
        "strategy": "channel" if by_row else "block",
        "block_structure": [128, 128],
    }
    check(
        each(make),
        compressed("float-quantized", group | {"scale_dtype": "torch.float8_e8m0fnu"}, DYNAMIC),
        format,
        want,
    )
    if not needs_word:
        check(each(make), config, format, want)
        return
    with pytest.raises(InputError, match=rf"scale of fp8 codes is torch.{name}, wanted a floating-point type or e8m0"):
        ExpertWeights.from_tensors(each(make), config, "down")
    wide = each(lambda N, K, seed: make(N, K, seed) | {"weight_scale_inv": make(N, K, seed)["weight_scale_inv"] + 200})
    with pytest.raises(InputError, match=r"wanted an e8m0 byte in each, 0 to 255"):
        ExpertWeights.from_tensors(wide, config | {"scale_fmt": "ue8m0"}, "down")


def test_scales_of_rows_lie_as_rows() -> None:
    """Scales of rows may be strided: experts of [K, N] have theirs across."""
    codes = e4m3(E, 4, 8)
    for shape in ((E, 1, 4), (4, E), (1, E, 4), (E * 4,)):
        with pytest.raises(InputError, match=r"wanted a scale for each row, \[2, 4\], or each matrix"):
            ExpertWeights.from_tensors({"weight": codes, "weight_scale": torch.ones(shape)}, {"quant_method": "fp8"})


NESTED = [
    lambda config: {"quantization_config": config},
    lambda config: {"text_config": {"quantization_config": config}},
    lambda config: {"llm_config": {"compression_config": config}, "quantization_config": None},
    lambda config: {"thinker_config": {"vision_config": {}, "text_config": {"quantization_config": config}}},
    lambda config: {"thinker_config": {"quantization_config": config, "text_config": {}}},
]


@pytest.mark.parametrize("place", NESTED)
def test_a_composite_model_s_config(place: Callable[[Any], dict[str, Any]]) -> None:
    weights = ExpertWeights.from_tensors(
        each(gptq_matrix), {"model_type": "x", "vision_config": {}, **place(GPTQ)}, "down"
    )
    assert torch.equal(weights.dequantize(torch.float32), whole(gptq_values, "down"))


def test_deepseek_v4_s_word_for_its_experts_inside_a_composite_config() -> None:
    codes = randint(256, E, H, I // 2).to(torch.uint8)
    tensors = {"weight": codes, "scale": torch.full((E, H, I // 32), 127, dtype=torch.uint8)}
    for config in (
        {"quantization_config": BLOCKS, "text_config": {"expert_dtype": "fp4"}},
        {"text_config": {"quantization_config": BLOCKS, "expert_dtype": "fp4"}},
    ):
        assert ExpertWeights.from_tensors(tensors, config).format == "mxfp4"


def _int4_tensors(N: int, K: int, seed: int) -> dict[str, torch.Tensor]:
    return {
        "weight_packed": words(randint(16, N, K, seed=seed)),
        "weight_shape": torch.tensor([N, K]),
        "weight_scale": int4_scale(N, K // 32, seed),
    }


def _of(**shapes: tuple[torch.dtype, Callable[[int, int], tuple[int, ...]]]) -> Callable[..., dict[str, torch.Tensor]]:
    return lambda N, K, seed: {name: torch.ones(shape(N, K)).to(kind) for name, (kind, shape) in shapes.items()}


FP8_W, BYTES_W = (FP8, lambda N, K: (N, K)), (torch.uint8, lambda N, K: (N, K // 2))
GROUPS_32, GROUPS_16 = (torch.uint8, lambda N, K: (N, K // 32)), (FP8, lambda N, K: (N, K // 16))
ONE = (torch.float32, lambda N, K: (1,))
NVFP4_GROUP = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
MXFP4_GROUP = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
WITH_ZEROS = INT4 | {"symmetric": False}
# A config, its tensors but for those that the config says there are, and how the error names the one that is missing.
PROMISED: dict[str, tuple[Callable[..., dict[str, torch.Tensor]], dict[str, Any], str]] = {
    "gptq's sym false": (gptq_matrix, GPTQ | {"sym": False}, "'qzeros' among it"),
    "gptq without a word": (gptq_matrix, {**GPTQ, "sym": None}, "'qzeros' among it"),
    "gptq's desc_act": (gptq_matrix, GPTQ | {"desc_act": True}, "'g_idx' among it"),
    "auto-round's sym false": (gptq_matrix, GPTQ | {"quant_method": "auto-round", "sym": False}, "'qzeros' among it"),
    "awq's zero_point": (
        lambda N, K, seed: {"qweight": words(randint(16, K, N)), "scales": torch.ones(K // 128, N).half()},
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
        "'qzeros' among it",
    ),
    "compressed-tensors' symmetric false": (
        _int4_tensors,
        compressed("pack-quantized", WITH_ZEROS),
        "'weight_zero_point' among it",
    ),
    "and in one group a row": (
        lambda N, K, seed: _int4_tensors(N, K, seed) | {"weight_scale": int4_scale(N, 1, seed)},
        compressed("pack-quantized", WITH_ZEROS | {"strategy": "channel"}),
        "'weight_zero_point' among it",
    ),
    "compressed-tensors' actorder": (
        _int4_tensors,
        compressed("pack-quantized", INT4 | {"actorder": "group"}),
        "'weight_g_idx' among it",
    ),
    "fp8's blocks": (_of(weight=FP8_W), BLOCKS, "'weight_scale_inv' or 'scale' or 'weight_scale' among it"),
    "fp8's scale": (_of(weight=FP8_W), {"quant_method": "fp8"}, "'weight_scale' or 'weight_scale_inv' among it"),
    "fp8 of compressed-tensors": (_of(weight=FP8_W), compressed("float-quantized", CHANNEL), "'weight_scale' or"),
    "modelopt's fp8": (_of(weight=FP8_W), {"quant_method": "modelopt", "quant_algo": "FP8"}, "'weight_scale' or"),
    "modelopt's nvfp4": (
        _of(weight=BYTES_W, weight_scale=GROUPS_16),
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        "'weight_scale_2' among it",
    ),
    "nvfp4 of compressed-tensors": (
        _of(weight_packed=BYTES_W, weight_scale=GROUPS_16),
        compressed("nvfp4-pack-quantized", NVFP4_GROUP),
        "'weight_global_scale' among it",
    ),
    "and its groups": (
        _of(weight_packed=BYTES_W, weight_global_scale=ONE),
        compressed("nvfp4-pack-quantized", NVFP4_GROUP),
        "'weight_scale' among it",
    ),
    "mxfp4 of compressed-tensors": (
        _of(weight_packed=BYTES_W),
        compressed("mxfp4-pack-quantized", MXFP4_GROUP),
        "'weight_scale' among it",
    ),
    "gpt-oss": (
        _of(blocks=(torch.uint8, lambda N, K: (N, K // 32, 16))),
        {"quant_method": "mxfp4"},
        "'scales' among it",
    ),
    "DeepSeek-V4": (_of(weight=BYTES_W), BLOCKS | {"expert_dtype": "fp4"}, "'scale' or 'weight_scale_inv' among it"),
}


@pytest.mark.parametrize("name", PROMISED)
def test_a_tensor_that_the_config_promises_is_missed_by_name(name: str) -> None:
    make, config, expected = PROMISED[name]
    with pytest.raises(InputError, match=rf"what belongs to '{LAYER}\.0\.down_proj.*' is .*, wanted {expected}"):
        ExpertWeights.from_tensors(each(make), config, "down")


@pytest.mark.parametrize(
    "change", [{"format": "mxfp4-pack-quantized"}, {"format": "nvfp4-pack-quantized"}, {"format": "float-quantized"}]
)
def test_zero_points_are_int4_s_alone(change: dict[str, Any]) -> None:
    config = compressed("", CHANNEL | {"symmetric": False}) | change
    with pytest.raises(InputError, match=r"with symmetric false, wanted true"):
        ExpertWeights.from_tensors(_fp8(), config, "down")


def test_settings_that_give_some_experts_zero_points() -> None:
    def make(N: int, K: int, seed: int) -> dict[str, torch.Tensor]:
        return gptq_matrix(N, K, seed) | {"qzeros": words(torch.full((K // 64, N), 7))}

    config = GPTQ | {"dynamic": {r".*experts\.1\..*": {"sym": False}}}
    with pytest.raises(InputError, match=r"zero of expert 1 of those given is there, wanted alike for all experts"):
        ExpertWeights.from_tensors(each(make), config, "down")


@pytest.mark.parametrize("name", ["pre_quant_scale", "w_bf16_to_fp8_scale"])
def test_tensors_that_no_format_multiplies_by(name: str) -> None:
    tensors = _fp8() | {f"{LAYER}.1.down_proj.{name}": torch.ones(I)}
    with pytest.raises(InputError, match=rf"down_proj.{name} is among the tensors, wanted none"):
        ExpertWeights.from_tensors(tensors, BLOCKS, "down")


def test_rotations_of_x() -> None:
    config = compressed("pack-quantized", INT4)
    for location, read in (("weight_input", True), ("input", False), ("output", False)):
        places = [{"targets": ["Linear"], "location": location}]
        config["transform_config"] = {"config_groups": {"R": {"type": "hadamard", "apply": places}}}
        if read:
            check(
                each(_int4_tensors),
                config,
                "int4_g32",
                lambda N, K, seed: (randint(16, N, K, seed=seed) - 8) * spread(int4_scale(N, K // 32, seed), K),
            )
            continue
        with pytest.raises(InputError, match=f"a transform of each {location}"):
            ExpertWeights.from_tensors(each(_int4_tensors), config, "down")


def test_the_shape_beside_packed_words() -> None:
    for shape in ([H + 1, I], [H], [H, I, 1], [I, H]):
        tensors = each(_int4_tensors) | {f"{LAYER}.1.down_proj.weight_shape": torch.tensor(shape)}
        with pytest.raises(InputError, match=r"its weight_shape, is .*, wanted N and K, 256 and 128"):
            ExpertWeights.from_tensors(tensors, compressed("pack-quantized", INT4), "down")


OVERRIDES: dict[str, dict[str, Any]] = {
    "dynamic": {"dynamic": {r"-:.*\.gate$": {}, r"+:.*\.down_proj": {"group_size": 32}}},
    "dynamic without a sign": {"dynamic": {r".*experts\.\d+\.down_proj$": {"group_size": 32}, ".*": {}}},
    "extra_config of names": {
        "quant_method": "auto-round",
        "extra_config": {f"{LAYER}.{e}.down_proj": {"group_size": 32} for e in range(E)},
    },
    "extra_config of patterns": {
        "quant_method": "auto-round",
        "extra_config": {"model.layers.3.mlp.gate": {"bits": 16}, r"experts\.[0-9]+\.down": {"group_size": 32}},
    },
    "extra_config of an older root": {
        "quant_method": "auto-round",
        "extra_config": {f"model.language_model.{LAYER[6:]}.{e}.down_proj": {"group_size": 32} for e in range(E)},
    },
}


@pytest.mark.parametrize("name", OVERRIDES)
def test_settings_of_single_modules(name: str) -> None:
    def group(K: int) -> int:
        return 32 if K == I else 64

    def make(N: int, K: int, seed: int) -> dict[str, torch.Tensor]:
        scales = int4_scale(N, K // group(K), seed).half().T.contiguous()
        return {"qweight": words(randint(16, N, K, seed=seed)).T.contiguous(), "scales": scales}

    def want(N: int, K: int, seed: int) -> torch.Tensor:
        return (randint(16, N, K, seed=seed) - 8) * spread(int4_scale(N, K // group(K), seed), K)

    for part, format in (("gate_up", "int4_g64"), ("down", "int4_g32")):
        weights = ExpertWeights.from_tensors(each(make), GPTQ | OVERRIDES[name], part)
        assert weights.format == format
        torch.testing.assert_close(weights.dequantize(torch.float32), whole(want, part), rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"dynamic": {r".*experts\.1\.down.*": {"bits": 8}}},
            r"gptq of 8 bits for model.layers.3.mlp.experts.1.down_proj",
        ),
        ({"dynamic": {r"-:.*experts\.1\..*": {}}}, r"that leaves model.layers.3.mlp.experts.1.down_proj unquantised"),
        (
            {"dynamic": {r"+:.*layers\.(3|4)\..*": {"bits": 2}}},
            r"gptq of 2 bits for model.layers.3.mlp.experts.0.down_proj",
        ),
        (
            {"quant_method": "auto-round", "extra_config": {f"{LAYER}.1.down_proj": {"bits": 8}}},
            r"auto-round of 8 bits for",
        ),
        (
            {"quant_method": "auto-round", "extra_config": {LAYER: {"bits": 16}}},
            r"that leaves .*experts.0.down_proj unq",
        ),
        ({"dynamic": {".*": 5}}, r"dynamic of '\.\*' is a int, wanted a dict"),
        ({"dynamic": []}, r"dynamic is a list, wanted a dict"),
        ({"dynamic": {5: {}}}, r"dynamic has 5, wanted strings as names"),
        ({"dynamic": {"+:(": {}}}, r'"re:\(" is no regular expression'),
    ],
)
def test_settings_of_single_modules_that_can_not_be_read(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        ExpertWeights.from_tensors(each(gptq_matrix), GPTQ | change, "down")
    assert str(error.value).startswith("ExpertWeights.from_tensors: ")


def test_modelopt_with_a_recipe_for_each_layer() -> None:
    tensors = each(lambda N, K, seed: {"weight": e4m3(N, K, seed=seed), "weight_scale": torch.tensor(0.5)})
    config = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {
            "model.layers.3.self_attn.q_proj": {"quant_algo": "NVFP4"},
            **{f"{LAYER}.{e}.down_proj": {"quant_algo": "FP8"} for e in range(E)},
        },
    }
    assert ExpertWeights.from_tensors(tensors, config, "down").format == "fp8_channel"
    with pytest.raises(InputError, match=r"leaves model.layers.3.mlp.experts.0.gate_proj unquantised"):
        ExpertWeights.from_tensors(tensors, config, "gate_up")


def test_experts_of_two_groups_have_to_be_of_one_format() -> None:
    tensors = each(lambda N, K, seed: {"weight": e4m3(N, K, seed=seed), "weight_scale": torch.ones(N, 1)})
    config = compressed("float-quantized", CHANNEL, DYNAMIC)
    config["config_groups"]["group_1"] = {
        "targets": [r"re:.*experts\.1\..*"],
        "weights": CHANNEL,
        "input_activations": DYNAMIC,
    }
    assert ExpertWeights.from_tensors(tensors, config, "down").format == "fp8_channel"
    config["config_groups"]["group_1"]["weights"] = {
        "num_bits": 8,
        "type": "float",
        "strategy": "block",
        "block_structure": [128, 128],
    }
    wanted = r"the config's format of model.layers.3.mlp.experts.1.down_proj is fp8_block, wanted fp8_channel, as model"
    with pytest.raises(InputError, match=wanted):
        ExpertWeights.from_tensors(tensors, config, "down")


MXFP8_GROUP = {
    "num_bits": 8,
    "type": "float",
    "strategy": "group",
    "group_size": 32,
    "symmetric": True,
    "scale_dtype": "torch.uint8",
    "zp_dtype": "torch.uint8",
}
MXFP8: dict[str, dict[str, Any]] = {
    "MiniMax-M3-MXFP8": {
        "quant_method": "mxfp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [1, 32],
        "scale_fmt": "ue8m0",
        "ignored_layers": ["lm_head", "model.layers.0.mlp.gate"],
    },
    "Inkling-2-Small-MXFP8": {"quant_method": "fp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["lm_head"]},
    "hf_quant_config.json": {
        "producer": {"name": "modelopt"},
        "quantization": {
            "quant_algo": "MXFP8",
            "group_size": 32,
            "kv_cache_quant_algo": "FP8",
            "exclude_modules": ["lm_head"],
        },
    },
    "llm-compressor": compressed("mxfp8-quantized", MXFP8_GROUP, MXFP8_GROUP | {"dynamic": True}),
    "llm-compressor a16": compressed("mxfp8-quantized", MXFP8_GROUP),
    "AutoRound": {
        "quant_method": "auto-round",
        "data_type": "mx_fp",
        "bits": 8,
        "group_size": 32,
        "act_bits": 8,
        "packing_format": "auto_round:llm_compressor",
    },
}


@pytest.mark.parametrize("name", MXFP8)
@pytest.mark.parametrize("suffix", ["weight_scale", "weight_scale_inv"])
def test_mxfp8(name: str, suffix: str) -> None:
    """Each scale is a byte e, which multiplies 32 codes by 2**(e - 127)."""

    def scale(N: int, K: int, seed: int) -> torch.Tensor:
        return randint(40, N, K // 32, seed=seed + 7).add(96).to(torch.uint8)

    def want(N: int, K: int, seed: int) -> torch.Tensor:
        powers = torch.pow(2.0, scale(N, K, seed).double() - 127)
        return (e4m3(N, K, seed=seed).double() * powers.repeat_interleave(32, 1)).float()

    def make(N: int, K: int, seed: int) -> dict[str, torch.Tensor]:
        bits = scale(N, K, seed)
        return {"weight": e4m3(N, K, seed=seed), suffix: bits.view(torch.float8_e8m0fnu) if seed % 2 else bits}

    check(each(make), MXFP8[name], "mxfp8", want)
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    renamed = {
        name.replace("mlp", "block_sparse_moe").replace(old, new): tensor
        for name, tensor in each(make).items()
        for old, new in names.items()
        if old in name
    }
    check(
        renamed,
        {"model_type": "minimax_m3", "quantization_config": MXFP8[name]}
        if "quant_method" in MXFP8[name]
        else MXFP8[name],
        "mxfp8",
        want,
    )


def test_mxfp8_stacked_is_not_copied() -> None:
    codes, scale = e4m3(E, 2 * I, H), randint(40, E, 2 * I, H // 32).add(96).to(torch.uint8)
    tensors = {"experts.gate_up_proj": codes, "experts.gate_up_proj_scale_inv": scale}
    weights = ExpertWeights.from_tensors(tensors, MXFP8["Inkling-2-Small-MXFP8"])
    assert (weights.format, weights.shape) == ("mxfp8", (E, 2 * I, H))
    assert (weights.codes.data_ptr(), weights.scale.data_ptr()) == (codes.data_ptr(), scale.data_ptr())
    assert ExpertWeights.from_tensors(tensors, MXFP8["modelopt"], quantize_x=True).format == "mxfp8"


def _fp8(**change: Any) -> dict[str, torch.Tensor]:
    tensors = each(lambda N, K, seed: {"weight": e4m3(N, K), "weight_scale_inv": torch.ones(N // 128, K // 128)})
    return {name: tensor for name, tensor in (tensors | change).items() if tensor is not None}


@pytest.mark.parametrize(
    ("tensors", "config", "part", "message"),
    [
        (_fp8(), BLOCKS, None, "the tensors is of both products, wanted part='gate_up' or part='down'"),
        (_fp8(), BLOCKS, "up", "part is 'up', wanted 'gate_up', 'down' or None"),
        (_fp8(), {"quant_method": "bitsandbytes"}, "down", "quant_method is 'bitsandbytes', wanted fp8, mxfp4,"),
        (
            _fp8(),
            {"quant_method": "modelopt", "quant_algo": "MXFP4"},
            "down",
            "modelopt's MXFP4, wanted NVFP4, W4A16_NVFP4, MXFP8",
        ),
        (
            _fp8(),
            {"quant_method": "modelopt", "quant_algo": "MXFP8"},
            "down",
            "weight_scale_inv, is torch.float32, wanted torch.uint8",
        ),
        (
            _fp8(**{f"{LAYER}.0.down_proj.weight_scale_inv": torch.ones(H, 3, dtype=torch.uint8)}),
            MXFP8["MiniMax-M3-MXFP8"],
            "down",
            r"is of shape \[256, 3\], wanted \[256, 4\]",
        ),
        (
            _fp8(),
            compressed("mxfp8-quantized", MXFP8_GROUP | {"group_size": 64}),
            "down",
            "compressed-tensors' mxfp8-quantized with weights of",
        ),
        (_fp8(), None, "down", "quantization_config is a NoneType"),
        (
            _fp8(),
            BLOCKS | {"weight_block_size": [64, 64]},
            "down",
            r"weight_block_size is \[64, 64\], wanted \[128, 128\] or \[1, 32\]",
        ),
        (
            _fp8(),
            {"quant_method": "gptq", "bits": 8},
            "down",
            "gptq of 8 bits for model.layers.3.mlp.experts.0.down_proj, wanted 4 bits",
        ),
        (_fp8(), {"quant_method": "gptq", "bits": 4}, "down", "wanted 'scales' among it|wanted 'qweight' among it"),
        (
            _fp8(**{f"{LAYER}.1.down_proj.weight_scale_inv": None}),
            BLOCKS,
            "down",
            "1.down_proj.weight' is .'weight'., wanted",
        ),
        (
            _fp8(**{f"{LAYER}.1.down_proj.weight": torch.ones(H, I)}),
            BLOCKS,
            "down",
            "is torch.float32, wanted torch.float8",
        ),
        (
            _fp8(**{f"{LAYER}.1.down_proj.weight": e4m3(H, 64)}),
            BLOCKS,
            "down",
            "expert 1 of those given is torch.float8_e4m3fn .256, 64.",
        ),
        (_fp8(**{f"{LAYER}.3.down_proj.weight": e4m3(H, I)}), BLOCKS, "down", r"of experts \[0, 1, 3\]"),
        (
            _fp8(**{f"{LAYER}.1.up_proj.weight": None, f"{LAYER}.1.up_proj.weight_scale_inv": None}),
            BLOCKS,
            "gate_up",
            "the projections of expert 1 is 'gate_proj', wanted",
        ),
        (_fp8(**{"model.layers.4.mlp.experts.1.down_proj.weight": e4m3(H, I)}), BLOCKS, "down", "of 2 layers"),
        (
            {"model.norm.weight": torch.ones(2)},
            BLOCKS,
            None,
            "the tensors is model.norm.weight ..., wanted experts' weights",
        ),
        (
            each(lambda N, K, seed: {"weight": e4m3(100, K), "weight_scale_inv": torch.ones(1, K // 128)}),
            BLOCKS,
            "gate_up",
            "gate is of 100 rows, wanted a multiple of 128",
        ),
        (
            _fp8(),
            compressed("int-quantized", {"num_bits": 8, "type": "int"}),
            "down",
            "compressed-tensors' int-quantized",
        ),
        (_fp8(), {"quant_method": "compressed-tensors"}, "down", "of 0 config_groups, wanted one whose targets name"),
    ],
)
def test_what_can_not_be_read_is_reported(
    tensors: dict[str, torch.Tensor], config: Any, part: str | None, message: str
) -> None:
    with pytest.raises(InputError, match=message) as error:
        ExpertWeights.from_tensors(tensors, config, part)
    assert str(error.value).startswith("ExpertWeights.from_tensors: ")
