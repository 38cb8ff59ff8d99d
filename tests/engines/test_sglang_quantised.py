"""SGLang's whole layers of quantised experts on the CPU, loaded by its own loaders, beside what its own code says.

That is an unquantised layer of SGLang's with the weights that the codes stand for, without the plug-in.
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import largest_tensors
import pytest
import sglang_layer
import tiny_quantised
import torch
from sglang_layer import ask, fused, lines, load

pytestmark = pytest.mark.filterwarnings("default")
E, H, I, T = 4, 256, 128, 7  # noqa: E741
OAI = {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0, "with_bias": True}

registry, logged = sglang_layer.registry, sglang_layer.logged


class Kind(NamedTuple):
    """A way in which checkpoints have quantised experts, and SGLang its parameters of them."""

    format: str
    names: tuple[str, ...]  # of codes, scales and the rest in the checkpoint, or of parameters that hold all experts
    packing: str = ""  # "gptq" or "awq": K before N
    layer: dict[str, Any] = {}  # noqa: RUF012
    note: str = ""
    width: int = I


_INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
_MXFP4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
_NVFP4 = _MXFP4 | {"strategy": "tensor_group", "group_size": 16}
_FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "block", "block_structure": [128, 128]}
_TOKENS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "group", "group_size": 128, "dynamic": True}
_ROWS, _MATRIX = (
    {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy} for strategy in ("channel", "tensor")
)
_A_TOKEN, _STATIC = _ROWS | {"strategy": "token", "dynamic": True}, _MATRIX | {"dynamic": False}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": False}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True}
_STATIC_X = "; the checkpoint's static scales of x are not used: a call makes scales of its own where it quantises x"
_A4 = "; x is not quantised to fp4"
_AWQ_NAMES = ("qweight", "scales", "qzeros")
KINDS = {
    "fp8": Kind("fp8_block", ("weight", "weight_scale_inv")),
    "compressed fp8": Kind("fp8_block", ("weight", "weight_scale")),
    "gpt-oss mxfp4": Kind("mxfp4", ("weight", "weight_scale"), layer=OAI),
    "gpt-oss mxfp4 padded": Kind("mxfp4", ("weight", "weight_scale"), layer=OAI, width=96),
    "compressed mxfp4": Kind("mxfp4", ("weight", "weight_scale")),
    "compressed int4": Kind("int4_g32", ("weight_packed", "weight_scale")),
    "compressed int4 padded": Kind("int4_g32", ("weight_packed", "weight_scale"), width=96),
    "gptq": Kind("int4_g64", ("qweight", "scales"), "gptq"),
    "moe_wna16": Kind("int4_g64", ("qweight", "scales"), "gptq"),
    "moe_wna16 zeros": Kind("int4_g64_zp", _AWQ_NAMES, "gptq"),
    "moe_wna16 zeros padded": Kind("int4_g32_zp", _AWQ_NAMES, "gptq", width=96),
    "moe_wna16 awq": Kind("int4_g64_zp", _AWQ_NAMES, "awq"),
    "awq": Kind("int4_g64_zp", _AWQ_NAMES, "awq"),
    "awq padded": Kind("int4_g32_zp", _AWQ_NAMES, "awq", width=96),
    "fp8 rows": Kind("fp8_channel", ("weight", "weight_scale")),
    "fp8 rows padded": Kind("fp8_channel", ("weight", "weight_scale"), width=96),
    "w8a8_fp8": Kind("fp8_channel", ("weight", "weight_scale")),
    "fp8 matrices": Kind("fp8_channel", ("weight", "weight_scale")),
    "fp8 static": Kind("fp8_channel", ("weight", "weight_scale", "input_scale"), note=_STATIC_X),
    "modelopt fp8": Kind("fp8_channel", ("weight", "weight_scale", "input_scale"), note=_STATIC_X),
    "nvfp4": Kind("nvfp4", ("weight_packed", "weight_scale", "weight_global_scale")),
    "nvfp4 w4a4 padded": Kind(
        "nvfp4", ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale"), note=_A4, width=48
    ),
    "modelopt nvfp4": Kind("nvfp4", ("weight", "weight_scale", "weight_scale_2", "input_scale"), note=_A4),
}
_BY_MATRIX = ("fp8 matrices", "fp8 static", "modelopt fp8")
_RUNNERS = {"compressed int4": "marlin", "gptq": "marlin", "modelopt nvfp4": "marlin"}


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch, registry: Any) -> None:
    """Answer what SGLang asks of the GPU before it builds a layer: a Hopper GPU."""
    from sglang.srt.layers.quantization import modelopt_quant, moe_wna16
    from sglang.srt.layers.quantization.awq import awq
    from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    monkeypatch.setattr(modelopt_quant, "is_cuda", lambda: True)
    for module in (modelopt_quant, moe_wna16):
        monkeypatch.setattr(module, "get_device_capability", lambda: (9, 0))
    for name in ("verify_marlin_supported", "check_moe_marlin_supports_layer"):
        monkeypatch.setattr(awq, name, lambda *_, **__: True)
    monkeypatch.setattr(CompressedTensorsConfig, "_check_scheme_supported", lambda _, least, error=True: least <= 90)


def quant_config(name: str, **changes: Any) -> Any:
    """SGLang's, of what such a checkpoint's config.json says."""
    from sglang.srt.layers.quantization.awq.awq import AWQMarlinConfig
    from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
    from sglang.srt.layers.quantization.fp8 import Fp8Config
    from sglang.srt.layers.quantization.gptq import GPTQMarlinConfig
    from sglang.srt.layers.quantization.modelopt_quant import ModelOptFp4Config, ModelOptFp8Config
    from sglang.srt.layers.quantization.moe_wna16 import MoeWNA16Config
    from sglang.srt.layers.quantization.mxfp4 import Mxfp4Config
    from sglang.srt.layers.quantization.w8a8_fp8 import W8A8Fp8Config

    group_size = {} if "padded" not in name else {"group_size": 32}
    kind, name = name, name.removesuffix(" padded")
    if name in ("fp8", "fp8 matrices"):
        how = {
            "is_checkpoint_fp8_serialized": True,
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128] if name == "fp8" else None,
        }
        return Fp8Config(**(how | changes))
    if name == "w8a8_fp8":
        return W8A8Fp8Config(is_checkpoint_fp8_serialized=True)
    if name == "modelopt fp8":
        return ModelOptFp8Config(is_checkpoint_fp8_serialized=True, exclude_modules=[], packed_modules_mapping={})
    if name == "modelopt nvfp4":
        how = {
            "is_checkpoint_nvfp4_serialized": True,
            "group_size": 16,
            "exclude_modules": [],
            "packed_modules_mapping": {},
        }
        return ModelOptFp4Config(**(how | changes))
    if name == "gpt-oss mxfp4":
        return Mxfp4Config(is_checkpoint_mxfp4_serialized=True)
    if name in ("awq", "moe_wna16 awq"):
        return {"awq": AWQMarlinConfig, "moe_wna16 awq": MoeWNA16Config}[name].from_config(_AWQ | group_size | changes)
    if name == "gptq" or name.startswith("moe_wna16"):
        sym = {"sym": "zeros" not in name} | group_size
        return {"gptq": GPTQMarlinConfig}.get(name, MoeWNA16Config).from_config(_GPTQ | sym | changes)
    weights, packing, tokens = {
        "compressed fp8": (_FP8, "float-quantized", _TOKENS),
        "fp8 rows": (_ROWS, "float-quantized", _A_TOKEN),
        "fp8 static": (_MATRIX, "float-quantized", _STATIC),
        "nvfp4": (_NVFP4, "nvfp4-pack-quantized", None),
        "nvfp4 w4a4": (_NVFP4, "nvfp4-pack-quantized", _NVFP4 | {"dynamic": "local"}),
        "compressed int4": (_INT4, "pack-quantized", None),
        "compressed mxfp4": (_MXFP4, "mxfp4-pack-quantized", None),
    }[name]
    assert kind
    group = {
        "targets": ["Linear"],
        "weights": weights | changes,
        "input_activations": tokens,
        "output_activations": None,
    }
    return CompressedTensorsConfig.from_config(
        {
            "quant_method": "compressed-tensors",
            "format": packing,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head"],
        }
    )


def sizes(name: str) -> dict[str, int]:
    """A layer's, where they are not those of most tests."""
    width = KINDS[name].width
    return {} if width == I else {"intermediate_size": width}


def matrices(name: str, seed: int) -> list[Any]:
    """Weights of gate and up together, and of down, as codes."""
    from pretuned.runtime import ExpertWeights

    torch.manual_seed(seed)
    format, width = KINDS[name].format, KINDS[name].width
    matrices = [ExpertWeights.quantize(torch.randn(E, *shape) * 0.1, format) for shape in ((2 * width, H), (H, width))]
    if name in _BY_MATRIX:  # gate and up have one each
        for matrix, parts in zip(matrices, (2, 1), strict=True):
            matrix.scale.copy_((torch.rand(E, parts) * 1e-3).repeat_interleave(matrix.scale.shape[1] // parts, 1))
    return matrices


def fill(layer: Any, name: str, packed: list[Any], biases: list[torch.Tensor] | None = None) -> None:
    """Load a checkpoint's tensors by SGLang's loader, as its models do."""
    kind = KINDS[name]
    for which, matrix in zip(("w13", "w2"), packed, strict=True):
        if name.startswith("gpt-oss"):
            for suffix, tensor in zip(kind.names, (matrix.codes, matrix.scale), strict=True):
                parameter = getattr(layer, f"{which}_{suffix}")
                parameter.weight_loader(parameter, tensor, f"{which}_{suffix}", shard_id=None, expert_id=None)
            continue
        for e in range(E):
            shards = {"w2": slice(None)}
            if which == "w13":
                shards = {"w1": slice(0, kind.width), "w3": slice(kind.width, None)}
            for shard, rows in shards.items():
                for suffix, tensor in checkpoint(name, matrix, e, rows).items():
                    parameter, path = getattr(layer, f"{which}_{suffix}"), f"experts.{which}_{suffix}"
                    parameter.weight_loader(parameter, tensor, path, shard_id=shard, expert_id=e)
    for which, bias in zip(("w13", "w2"), biases or (), strict=False):
        parameter = getattr(layer, f"{which}_weight_bias")
        parameter.weight_loader(parameter, bias, f"{which}_weight_bias", shard_id=None, expert_id=None)


def checkpoint(name: str, matrix: Any, e: int, rows: slice) -> dict[str, torch.Tensor]:
    """A matrix's tensors as a checkpoint has them, by the last word of their names."""
    kind = KINDS[name]
    codes, scale = matrix.codes[e, rows], matrix.scale[e, rows]
    if kind.format.startswith("fp8_block"):
        blocks = slice(*(None if end is None else end // 128 for end in (rows.start, rows.stop)))
        scale = matrix.scale[e, blocks]
    if kind.format == "fp8_channel":
        scale = scale[0] if name in _BY_MATRIX else scale[:, None]
    stored = [codes, scale]
    if kind.format == "nvfp4":
        outer = matrix.global_scale[e]
        stored.append(outer if "modelopt" in name else 1 / outer[None])
    if kind.format.startswith("int4"):
        stored = [codes.view(torch.int32), scale.to(torch.float16) if name == "gptq" else scale]
    if kind.packing:
        nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
        zero = None if matrix.zero is None else matrix.zero[e, rows].mT
        if kind.packing == "awq":
            stored = [tiny_quantised.awq_words(nibbles.mT), scale, tiny_quantised.awq_words(zero)]
        elif zero is not None:
            stored.append(tiny_quantised.words(zero - 1 & 15))
        stored = [
            stored[0] if kind.packing == "awq" else stored[0].t().contiguous(),
            stored[1].t().contiguous(),
            *stored[2:],
        ]
    if kind.names[-1].startswith("input"):
        stored.append(torch.tensor(0.5))
    return dict(zip(kind.names, stored, strict=True))


def twin(packed: list[Any], biases: list[torch.Tensor] | None, **layer: Any) -> Any:
    """SGLang's unquantised layer of the same weights."""
    fused_layer = fused(None, **layer)
    for which, matrix in zip(("w13", "w2"), packed, strict=True):
        getattr(fused_layer, f"{which}_weight").data.copy_(matrix.dequantize(torch.float32))
    for which, bias in zip(("w13", "w2"), biases or (), strict=False):
        getattr(fused_layer, f"{which}_weight_bias").data.copy_(bias)
    fused_layer.quant_method.process_weights_after_loading(fused_layer)
    return fused_layer


def question(seed: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    ids = torch.stack([torch.randperm(E)[:2] for _ in range(T)]).int()
    return torch.randn(T, H), torch.rand(T, 2), ids


@pytest.fixture(params=KINDS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def biases_of(name: str, seed: int = 5) -> list[torch.Tensor] | None:
    torch.manual_seed(seed)
    return (
        [torch.randn(E, 2 * KINDS[name].width).bfloat16(), torch.randn(E, H).bfloat16()]
        if "with_bias" in KINDS[name].layer
        else None
    )


def near(out: torch.Tensor, exact: torch.Tensor, format: str) -> bool:
    """Return True if the results differ by the loss of quantised rows in fp8 at most; in other formats by nothing."""
    return float((out - exact).norm() / exact.norm()) < (6e-2 if format.startswith("fp8") else 1e-5)


def test_its_result_is_that_of_sglang_s_own_layer_of_the_dequantised_weights(
    name: str, monkeypatch: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture
) -> None:
    kind = KINDS[name]
    packed, biases = matrices(name, 0), biases_of(name)
    exact = ask(twin(packed, biases, **kind.layer, **sizes(name)), *question())
    load(monkeypatch, PRETUNED_SGLANG="1")
    layer = fused(quant_config(name), **kind.layer, **sizes(name))
    assert layer.runner_backend.value == "pretuned"
    act, wide = "swiglu_oai" if kind.layer else "silu", -(-kind.width // 64) * 64
    more = "" if wide == kind.width else f" (padded to {wide}: 33.3% more memory)"
    assert lines(logged) == [
        f"pretuned: runs the MoE layers of E=4 H=256 I={kind.width}{more} k=2 {kind.format} {act}{kind.note}"
    ]
    fill(layer, name, packed, biases)
    pointers = {key: tensor.data_ptr() for key, tensor in layer.named_parameters()}
    layer.quant_method.process_weights_after_loading(layer)
    if not more:
        assert {key: tensor.data_ptr() for key, tensor in layer.named_parameters()} == pointers
    assert all(weight.order for weight in layer.pretuned_experts.weights)  # the kernels' own
    assert near(ask(layer, *question()), exact, kind.format)
    x, weights, ids = question()
    ids[2, 0] = -1  # an expert of another rank
    weights_without = weights.clone()
    weights_without[2, 0] = 0
    there = ids.clamp(min=0)
    exact = ask(layer, x, weights_without, there)
    torch.testing.assert_close(ask(layer, x, weights, ids), exact, rtol=1e-5, atol=1e-5)


def test_gpt_oss_widths_that_sglang_pads_for_triton_kernels(
    monkeypatch: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture
) -> None:
    from sglang.srt.layers.quantization import mxfp4

    from pretuned.runtime import ExpertWeights

    torch.manual_seed(0)
    width, kind = 96, KINDS["gpt-oss mxfp4"]
    packed = [ExpertWeights.quantize(torch.randn(E, *shape) * 0.1, "mxfp4") for shape in ((2 * width, H), (H, width))]
    biases = [torch.randn(E, 2 * width).bfloat16(), torch.randn(E, H).bfloat16()]
    exact = ask(twin(packed, biases, **kind.layer, intermediate_size=width), *question())
    load(monkeypatch, PRETUNED_SGLANG="1")
    monkeypatch.setattr(mxfp4, "has_triton_kernels", True)  # which is not installed here
    layer = fused(quant_config("gpt-oss mxfp4"), **kind.layer, intermediate_size=width)
    assert lines(logged) == [
        "pretuned: runs the MoE layers of E=4 H=256 I=96 (padded to 128: 33.3% more memory) k=2 mxfp4 swiglu_oai"
    ]
    fill(layer, "gpt-oss mxfp4", packed, biases)
    layer.quant_method.process_weights_after_loading(layer)
    assert [weight.shape for weight in layer.pretuned_experts.weights] == [(E, 256, H), (E, H, 128)]
    assert all(weight.is_prepared for weight in layer.pretuned_experts.weights)
    assert near(ask(layer, *question()), exact, kind.format)


@pytest.mark.parametrize(
    ("name", "layer", "act"),
    [
        ("fp8", {"swiglu_limit": 10.0}, {"name": "swiglu", "limit": 10.0}),  # GLM-5.3-Flash
        ("fp8", {"gemm1_clamp_limit": 7.0}, {"name": "swiglustep", "limit": 7.0}),  # Step-3.7
        ("compressed int4", {"swiglu_limit": 10.0}, {"name": "swiglu", "limit": 10.0}),
        (
            "compressed mxfp4",
            {"activation": "situ", "gemm1_alpha": 4.0, "gemm1_clamp_limit": 25.0},
            {"name": "situ", "beta": 4.0, "linear_beta": 25.0},
        ),  # Kimi-K3
    ],
)
def test_the_numbers_of_its_activation_are_those_of_the_unquantised_layer(
    name: str,
    layer: dict[str, Any],
    act: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    logged: pytest.LogCaptureFixture,
) -> None:
    """(Which test_sglang.py compares with SGLang's functions. SGLang's own layer on a CPU ignores them.)"""
    from pretuned.runtime import Activation, moe_mlp

    load(monkeypatch, PRETUNED_SGLANG="1")
    packed = matrices(name, 0)
    fused_layer = fused(quant_config(name), **layer)
    assert lines(logged) == [
        f"pretuned: runs the MoE layers of E=4 H=256 I=128 k=2 {KINDS[name].format} {Activation(**act)}"
    ]
    fill(fused_layer, name, packed)
    fused_layer.quant_method.process_weights_after_loading(fused_layer)
    x, weights, ids = question()
    x = x * 10  # limits act
    out = ask(fused_layer, x, weights, ids)
    w13, w2 = (tensor.dequantize(torch.float32) for tensor in packed)
    beta = {"beta": act["beta"]} if "beta" in act else {}
    exact, unlimited = (
        moe_mlp(x, w13, w2, ids, weights, Activation(**fields)) for fields in (act, {"name": act["name"], **beta})
    )
    assert near(out, exact, KINDS[name].format)
    assert float((out - unlimited).norm() / exact.norm()) > 0.2  # where limits were ignored, it would fail


def test_an_activation_that_a_model_sets_later_and_pretuned_lacks_goes_to_sglang_s_own_runner(
    monkeypatch: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture
) -> None:
    from pretuned.integrations import sglang

    own = fused(quant_config("fp8")).runner_backend
    sglang.PLUG_IN._logged.clear()
    load(monkeypatch, PRETUNED_SGLANG="1")
    layer, processed = fused(quant_config("fp8")), []
    fill(layer, "fp8", matrices("fp8", 0))
    layer.moe_runner_config.activation = "silu_rounded"
    sglang.loaded(lambda *args: processed.append(args), layer.quant_method, layer)
    assert processed == [(layer.quant_method, layer)]
    assert layer.runner_backend is own
    assert "the activation silu_rounded with a gate is none of pretuned's" in lines(logged)[-1]


def tensors(weights: Any) -> list[torch.Tensor]:
    """All that kernels read of a layer's weights."""
    held = [tensor for weight in weights for tensor in (*weight.tensors().values(), weight.kernel_scale)]
    return [tensor for tensor in held if tensor is not None]


def test_weights_are_put_back_and_loaded_again_where_they_were(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's ``update_weights`` does this: restore, load (one expert here, then all), process."""
    kind = KINDS[name]
    load(monkeypatch, PRETUNED_SGLANG="1")
    layer = fused(quant_config(name), **kind.layer, **sizes(name))
    packed, other, biases = matrices(name, 0), matrices(name, 1), biases_of(name)
    fill(layer, name, packed, biases)
    raw = {key: tensor.detach().clone() for key, tensor in layer.named_parameters()}
    method = layer.quant_method
    method.process_weights_after_loading(layer)
    first, before = layer.pretuned_experts.weights, ask(layer, *question())
    beside = [tensor.data_ptr() for tensor in tensors(first)]
    for _ in range(2):
        method.restore_weights_before_loading(layer)
    for key, parameter in layer.named_parameters():
        assert torch.equal(parameter.view(torch.uint8), raw[key].view(torch.uint8)), key
    method.process_weights_after_loading(layer)  # nothing was loaded
    torch.testing.assert_close(ask(layer, *question()), before, rtol=0, atol=0)
    method.restore_weights_before_loading(layer)
    fill(layer, name, other, biases)
    method.process_weights_after_loading(layer)
    assert layer.pretuned_experts.weights is first
    assert [tensor.data_ptr() for tensor in tensors(first)] == beside
    fresh = fused(quant_config(name), **kind.layer, **sizes(name))
    fill(fresh, name, other, biases)
    fresh.quant_method.process_weights_after_loading(fresh)
    torch.testing.assert_close(ask(layer, *question()), ask(fresh, *question()), rtol=0, atol=0)
    for parameter, another in zip(tensors(first), tensors(fresh.pretuned_experts.weights), strict=True):
        assert torch.equal(parameter.view(torch.uint8), another.view(torch.uint8))
    assert not torch.allclose(ask(layer, *question()), before)


class Named(torch.nn.Module):
    """A model of one layer that loads by name, as SGLang's models do."""

    def __init__(self, layer: Any, name: str) -> None:
        super().__init__()
        self.experts, self._name = layer, name

    def load_weights(self, named: Any) -> None:
        for path, tensor in named:
            _, expert, shard, suffix = path.split(".")
            which = "w2" if shard == "w2" else "w13"
            parameter = getattr(self.experts, f"{which}_{suffix}")
            place = f"experts.{which}_{suffix}"
            parameter.weight_loader(parameter, tensor, place, shard_id=shard, expert_id=int(expert))


def names_of(name: str, packed: list[Any], experts: Any = range(E)) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors of some experts, by name."""
    results = {}
    for e in experts:
        parts = {
            "w1": (0, slice(0, KINDS[name].width)),
            "w3": (0, slice(KINDS[name].width, None)),
            "w2": (1, slice(None)),
        }
        for shard, (product, rows) in parts.items():
            for suffix, tensor in checkpoint(name, packed[product], e, rows).items():
                results[f"experts.{e}.{shard}.{suffix}"] = tensor
    return results


REFITS = ["fp8", "fp8 rows", "compressed int4", "awq", "nvfp4", "compressed int4 padded"]


class Refit:
    """A layer that pretuned runs, SGLang's own updater of its model, and the checkpoints that it gets."""

    def __init__(self, kind: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        from sglang.srt.model_executor.model_runner_components import weight_updater

        load(monkeypatch, PRETUNED_SGLANG="1")
        monkeypatch.setattr(weight_updater.WeightUpdater, "_assert_weight_cache_inactive", lambda *_: None)
        monkeypatch.setattr(weight_updater, "_unwrap_tensor", lambda tensor, **_: tensor)
        monkeypatch.setattr(weight_updater, "get_parallel", lambda: SimpleNamespace(tp_rank=0))
        self.kind, self.folder = kind, folder
        self.first, self.other, self.third = (matrices(kind, seed) for seed in range(3))
        self.layer = self.fresh(self.first)
        self.model, self.held = Named(self.layer, kind), self.layer.pretuned_experts.weights
        self.places = [tensor.data_ptr() for tensor in tensors(self.held)]
        config = SimpleNamespace(model_path="", revision=None, dtype=torch.float32, quantization=None)
        config.hf_config = SimpleNamespace(architectures=["Named"], model_type="named")
        self.updater = weight_updater.WeightUpdater(
            tp_rank=0,
            gpu_id=0,
            device="cpu",
            model_config=config,
            custom_weight_loaders={},
            get_model=lambda: self.model,
            get_model_runner=lambda: None,
            update_model_fields=lambda *_, **__: None,
            recapture_cuda_graph=lambda: None,
        )

    def fresh(self, packed: list[Any], more: dict[str, torch.Tensor] | None = None) -> Any:
        """A new layer of these weights, and of some by name that come after them."""
        fused_layer = fused(quant_config(self.kind), **sizes(self.kind))
        fill(fused_layer, self.kind, packed)
        Named(fused_layer, self.kind).load_weights((more or {}).items())
        fused_layer.quant_method.process_weights_after_loading(fused_layer)
        return fused_layer

    def update(self, how: str, named: dict[str, torch.Tensor]) -> None:
        """New weights, their names in any order, in two buckets."""
        order = random.Random(1).sample(sorted(named), len(named))
        buckets = [[(key, named[key]) for key in part] for part in (order[: len(order) // 3], order[len(order) // 3 :])]
        if how == "disk":
            self.from_disk(named)
            return
        self.updater.begin_weight_update()
        for done, message in self.from_tensors(buckets) if how == "tensor" else self.from_distributed(buckets):
            assert done, message
        self.updater.end_weight_update(run_post_load=False)

    def from_disk(self, named: dict[str, torch.Tensor]) -> None:
        from safetensors.torch import save_file

        save_file({name: tensor.contiguous() for name, tensor in named.items()}, self.folder / "model.safetensors")
        done, message = self.updater.update_weights_from_disk(str(self.folder), "auto")
        assert done, message

    def from_tensors(self, buckets: list[Any]) -> Iterator[tuple[bool, str]]:
        for bucket in buckets:
            yield self.updater.update_weights_from_tensor(bucket)

    def from_distributed(self, buckets: list[Any]) -> Iterator[tuple[bool, str]]:
        """By gloo, from another process."""
        port, file = sglang_layer.free_port(), self.folder / "buckets.pt"
        torch.save(buckets, file)
        script = Path(sglang_layer.__file__).with_name("sglang_trainer.py")
        trainer = subprocess.Popen([sys.executable, script, str(port), file], stderr=subprocess.PIPE)
        try:
            yield self.updater.init_weights_update_group("127.0.0.1", port, 1, 2, "refit", "gloo")
            for bucket in buckets:
                names, tensors = zip(*bucket, strict=True)
                received = self.updater.receive_weights_from_distributed(
                    names=list(names),
                    dtypes=[tensor.dtype for tensor in tensors],
                    shapes=[tensor.shape for tensor in tensors],
                    group_name="refit",
                    load_format="flattened_bucket",
                )
                yield self.updater.load_weights_from_distributed(received)
            yield self.updater.destroy_weights_update_group("refit")
        finally:
            _, error = trainer.communicate(timeout=120)
        assert trainer.returncode == 0, error.decode()[-3000:]

    def check(self, fresh: Any) -> None:
        """The numbers, and what they are computed of, are a fresh layer's, in the first weights' memory."""
        assert [tensor.data_ptr() for tensor in tensors(self.layer.pretuned_experts.weights)] == self.places
        for tensor, another in zip(tensors(self.held), tensors(fresh.pretuned_experts.weights), strict=True):
            assert torch.equal(tensor.view(torch.uint8), another.view(torch.uint8))
        torch.testing.assert_close(ask(self.layer, *question()), ask(fresh, *question()), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        *((kind, "tensor") for kind in REFITS),
        *((kind, how) for kind in ("fp8", "nvfp4") for how in ("disk", "distributed")),
    ],
)
def test_a_trainer_s_weights_by_sglang_s_weight_updater(
    kind: str, how: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """All experts, then two experts alone: the same bits as of a fresh layer, in place."""
    refit = Refit(kind, monkeypatch, tmp_path)
    refit.update(how, names_of(kind, refit.other))
    refit.check(refit.fresh(refit.other))
    some = names_of(kind, refit.third, (1, 3))
    refit.update(how, some)
    refit.check(refit.fresh(refit.other, some))


@pytest.mark.parametrize("kind", ["fp8", "compressed int4", "nvfp4"])
def test_a_refit_makes_no_copy_of_the_layer(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The memory that a refit takes is an expert's, if the chunks that are moved at once are that small."""
    from pretuned.runtime.weights import prepared_layout

    monkeypatch.setattr(prepared_layout, "_CHUNK_BYTES", 1)
    refit = Refit(kind, monkeypatch, tmp_path)
    codes = refit.layer.w13_weight if kind == "fp8" else refit.layer.w13_weight_packed
    whole = codes.numel() * codes.element_size()
    with largest_tensors.Spy() as spy:
        refit.updater.begin_weight_update()
        refit.updater.end_weight_update(run_post_load=False)
    assert spy.most < whole
    refit.check(refit.fresh(refit.first))


def test_weights_that_can_not_be_prepared_go_to_sglang_s_own_runner(
    name: str, monkeypatch: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture
) -> None:
    from pretuned.integrations import sglang
    from pretuned.runtime import ExpertWeights

    def fails(weights: Any) -> Any:
        if asked:
            raise RuntimeError("made to fail")
        asked.append(weights)
        return prepare(weights)  # of the first product: that is undone

    kind, prepare, processed, asked = KINDS[name], ExpertWeights.prepare_in_place, [], []
    own = fused(quant_config(name), **kind.layer, **sizes(name)).runner_backend
    sglang.PLUG_IN._logged.clear()
    load(monkeypatch, PRETUNED_SGLANG="1")
    layer = fused(quant_config(name), **kind.layer, **sizes(name))
    fill(layer, name, matrices(name, 0), biases_of(name))
    raw = {key: tensor.detach().clone() for key, tensor in layer.named_parameters()}
    monkeypatch.setattr(ExpertWeights, "prepare_in_place", fails)
    logged.clear()
    sglang.loaded(lambda *args: processed.append(args), layer.quant_method, layer)  # SGLang's own wants a GPU
    assert processed == [(layer.quant_method, layer)]
    assert layer.runner_backend is own
    assert not hasattr(layer, "pretuned_experts")
    for key, parameter in layer.named_parameters():
        assert torch.equal(parameter.view(torch.uint8), raw[key].view(torch.uint8)), key
    assert lines(logged) == [
        "pretuned: MoE layers stay with SGLang, as pretuned could not prepare a layer's weights: RuntimeError: made to "
        "fail. PRETUNED_SGLANG=0 switches pretuned off"
    ]


@pytest.mark.parametrize(
    ("name", "changes", "layer", "why"),
    [
        ("fp8", {"weight_block_size": [64, 64]}, {}, "no scale for each 128 x 128 (blocks of [64, 64])"),
        ("fp8", {}, {"activation": "silu_rounded"}, "the activation silu_rounded"),
        ("modelopt nvfp4", {"group_size": 32}, {}, "nvfp4 in groups of 32"),
        ("moe_wna16", {"desc_act": True}, {}, "groups of another order (desc_act, g_idx)"),
        ("moe_wna16 zeros", {"checkpoint_format": "gptq_v2"}, {}, "zero points of gptq_v2, to which SGLang adds one"),
        ("moe_wna16 awq", {"zero_point": False}, {}, "AWQ without zero points"),
        ("compressed int4", {"symmetric": False}, {}, "zero points"),
        ("compressed int4", {"actorder": "group"}, {}, "groups of another order (actorder group, weight_g_idx)"),
        ("compressed int4", {"group_size": 16}, {}, "4 bits in groups of 16"),
        ("compressed int4", {"group_size": 128}, {"intermediate_size": 192}, "K of int4_g128 of 128"),
        ("compressed int4", {}, {"gemm1_clamp_limit": 7.0}, "its Marlin runner ignores gemm1_clamp_limit"),
        ("compressed int4", {}, OAI, "its Marlin runner has gate and up in halves"),
        ("gptq", {"desc_act": True}, {}, "groups of another order (desc_act, g_idx)"),
        ("gptq", {"bits": 8}, {}, "8 bits in groups of 64"),
        ("gpt-oss mxfp4", {}, {"hidden_size": 96}, "N and K must be multiples of 64"),
    ],
)
def test_layers_that_stay_with_sglang(
    monkeypatch: pytest.MonkeyPatch,
    logged: pytest.LogCaptureFixture,
    name: str,
    changes: dict[str, Any],
    layer: dict[str, Any],
    why: str,
) -> None:
    load(monkeypatch, PRETUNED_SGLANG="1")
    fused_layer = fused(quant_config(name, **changes), **layer)
    assert fused_layer.runner_backend.value == _RUNNERS.get(name, "triton")
    assert not hasattr(fused_layer, "pretuned_experts")
    (line,) = lines(logged)
    assert line.startswith(f"pretuned: leaves the MoE layers of E=4 H={layer.get('hidden_size', 256)} I=")
    assert why in line


def test_what_moves_weights_while_it_runs_stays_with_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.server_args import ServerArgs

    from pretuned.integrations.sglang import experts
    from pretuned.integrations.sglang.experts import refusal
    from pretuned.integrations.sglang.quantised import format_of

    load(monkeypatch)
    layer = fused(quant_config("gpt-oss mxfp4"), **OAI)
    asked = layer.quant_method, layer, layer.moe_runner_config, format_of(layer.quant_method, layer)
    assert refusal(*asked, everywhere=True) is None
    for option, value, why in (
        ("enable_eplb", True, "--enable-eplb moves its weights"),
        ("cpu_offload_gb", 1, "--cpu-offload-gb moves"),
        ("moe_runner_backend", "triton_kernel", "--moe-runner-backend triton_kernel asks for it"),
    ):
        args = ServerArgs(model_path="none", device="cpu", **{option: value})
        monkeypatch.setattr(experts, "get_server_args", lambda args=args: args)
        assert str(refusal(*asked, everywhere=True)).startswith(why)
    monkeypatch.undo()
    layer.w13_weight.data = torch.zeros(E, 384, 128, dtype=torch.uint8)  # as for a backend that wants more rows
    assert str(refusal(*asked, everywhere=True)).startswith(
        "its parameters have an N and K of [(384, 256), (256, 128)], "
    )


def test_a_scale_that_no_kernel_takes_is_an_error_on_a_gpu() -> None:
    from pretuned.artifacts.errors import InputError
    from pretuned.integrations.served_layer import prepared
    from pretuned.runtime import ExpertWeights

    packed = [ExpertWeights.mxfp4(torch.zeros(E, 64, 32, dtype=torch.uint8), torch.full((E, 64, 2), 130).byte())]
    with pytest.raises(InputError, match=r"no kernel takes the scales of .*mxfp4.* PRETUNED_SGLANG=0 serves"):
        prepared(packed, "PRETUNED_SGLANG", on_gpu=True)
    assert not prepared(packed, "PRETUNED_SGLANG", on_gpu=False)[0].order


def gpt_oss(width: int) -> tuple[dict[str, torch.Tensor], list[Any], list[torch.Tensor]]:
    """A layer's tensors as gpt-oss's checkpoint names them, its weights and its biases."""
    from pretuned.runtime import ExpertWeights

    torch.manual_seed(0)
    packed = [ExpertWeights.quantize(torch.randn(E, *shape) * 0.1, "mxfp4") for shape in ((2 * width, H), (H, width))]
    biases = [torch.randn(E, 2 * width).bfloat16(), torch.randn(E, H).bfloat16()]
    tensors = {}
    for name, matrix, bias in zip(("gate_up_proj", "down_proj"), packed, biases, strict=True):
        tensors |= {
            f"experts.{name}_blocks": matrix.codes.unflatten(2, (-1, 16)),
            f"experts.{name}_scales": matrix.scale,
            f"experts.{name}_bias": bias,
        }
    return tensors, packed, biases


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_ranks_of_gpt_oss_add_up_to_the_whole_layer(tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """45 blocks of 32, which no number of ranks divides: SGLang's loader gives the last one what is left."""
    from sglang.srt.layers.quantization import mxfp4
    from sglang.srt.models.gpt_oss import GptOssForCausalLM

    width, kind = 1440, KINDS["gpt-oss mxfp4"]
    tensors, packed, biases = gpt_oss(width)
    exact = ask(twin(packed, biases, **kind.layer, intermediate_size=width), *question())
    load(monkeypatch, PRETUNED_SGLANG="1")
    monkeypatch.setattr(mxfp4, "has_triton_kernels", True)  # which is not installed here: SGLang pads for it
    out = torch.zeros(T, H)
    for rank in range(tp):
        layer = fused(quant_config("gpt-oss mxfp4"), **kind.layer, intermediate_size=width // tp)
        assert layer.runner_backend.value == "pretuned"
        layer.moe_tp_size, layer.moe_tp_rank = tp, rank
        model = torch.nn.Module()
        model.experts = layer
        model.config = SimpleNamespace(intermediate_size=width, num_local_experts=E)
        GptOssForCausalLM._load_mxfp4_experts_weights(model, tensors.items())
        layer.quant_method.process_weights_after_loading(layer)
        assert all(weight.is_prepared for weight in layer.pretuned_experts.weights)
        out += ask(layer, *question())
    assert near(out, exact, "mxfp4")


def test_gpt_oss_in_two_processes(tmp_path: Path) -> None:
    """In a width that SGLang pads for triton_kernels alone, which is not installed here."""
    width, kind = 192, KINDS["gpt-oss mxfp4"]
    tensors, packed, biases = gpt_oss(width)
    exact = ask(twin(packed, biases, **kind.layer, intermediate_size=width), *question())
    torch.save({"width": width, "layer": kind.layer, "tensors": tensors, "question": question()}, tmp_path / "given.pt")
    script, port = Path(sglang_layer.__file__).with_name("sglang_rank.py"), sglang_layer.free_port()
    ranks = [
        subprocess.Popen([sys.executable, script, str(rank), "2", str(port), tmp_path], stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    for process in ranks:
        _, error = process.communicate(timeout=600)
        assert process.returncode == 0, error.decode()[-3000:]
    for rank in range(2):
        report = torch.load(tmp_path / f"{rank}.pt")
        assert near(report["out"], exact, "mxfp4")
        assert report["lines"][-1] == (
            "pretuned: runs the MoE layers of E=4 H=256 I=96 (padded to 128: 33.3% more memory) k=2 mxfp4 swiglu_oai"
        )


def test_a_zero_point_of_0_that_sglang_s_loader_changes_leaves_the_layer_to_sglang(
    monkeypatch: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture
) -> None:
    from pretuned.integrations import sglang

    name = "moe_wna16 zeros"
    sglang.PLUG_IN._logged.clear()
    load(monkeypatch, PRETUNED_SGLANG="1")
    layer = fused(quant_config(name))
    packed = matrices(name, 0)
    packed[0].zero[1, 5, 2] = 0
    fill(layer, name, packed)
    layer.quant_method.process_weights_after_loading(layer)
    assert not hasattr(layer, "pretuned_experts")
    assert "a zero point of 0, which SGLang's loader makes 16" in lines(logged)[-1]


def test_gate_and_up_with_two_global_scales_are_left_to_sglang(
    monkeypatch: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture
) -> None:
    from pretuned.integrations import sglang

    sglang.PLUG_IN._logged.clear()
    load(monkeypatch, PRETUNED_SGLANG="1")
    layer, processed = fused(quant_config("modelopt nvfp4")), []
    fill(layer, "modelopt nvfp4", matrices("modelopt nvfp4", 0))
    layer.w13_weight_scale_2.data[2, 1] *= 2
    sglang.loaded(lambda *args: processed.append(args), layer.quant_method, layer)
    assert processed == [(layer.quant_method, layer)]
    assert layer.runner_backend.value == "marlin"
    assert "gate and up of expert 2 have the global scales [" in lines(logged)[-1]
