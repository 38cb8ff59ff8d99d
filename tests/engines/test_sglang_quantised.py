"""SGLang's whole layers of quantised experts on the CPU, loaded by its own loaders, beside what its own code says.

That is an unquantised layer of SGLang's with the weights that the codes stand for, without the plug-in.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import sglang_layer
import torch
from sglang_layer import ask, fused, lines, load

pytestmark = pytest.mark.filterwarnings("default")
E, H, I, T = 4, 256, 128, 7  # noqa: E741
OAI = {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0, "with_bias": True}

registry, told = sglang_layer.registry, sglang_layer.told


class Kind(NamedTuple):
    """A way in which checkpoints have quantised experts, and SGLang its parameters of them."""

    format: str
    names: tuple[str, str]  # of codes and scales in the checkpoint, or of the parameters where all experts are loaded
    is_turned: bool = False  # GPTQ's [K/8, N]
    layer: dict[str, Any] = {}  # noqa: RUF012


_INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
_MXFP4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32}
_FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "block", "block_structure": [128, 128]}
_TOKENS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "group", "group_size": 128, "dynamic": True}
_ROWS, _A_TOKEN = ({"num_bits": 8, "type": "float", "symmetric": True, "strategy": one, "dynamic": one == "token"}
                   for one in ("channel", "token"))  # fmt: skip
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": True, "desc_act": False}
KINDS = {
    "fp8": Kind("fp8_block", ("weight", "weight_scale_inv")),
    "compressed fp8": Kind("fp8_block", ("weight", "weight_scale")),
    "gpt-oss mxfp4": Kind("mxfp4", ("weight", "weight_scale"), layer=OAI),
    "compressed mxfp4": Kind("mxfp4", ("weight", "weight_scale")),
    "compressed int4": Kind("int4_g32", ("weight_packed", "weight_scale")),
    "gptq": Kind("int4_g64", ("qweight", "scales"), is_turned=True),
    "moe_wna16": Kind("int4_g64", ("qweight", "scales"), is_turned=True),
}
_RUNNERS = {"compressed int4": "marlin", "gptq": "marlin"}


def quant_config(name: str, **changes: Any) -> Any:
    """SGLang's, of what such a checkpoint's config.json says."""
    from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
    from sglang.srt.layers.quantization.fp8 import Fp8Config
    from sglang.srt.layers.quantization.gptq import GPTQMarlinConfig
    from sglang.srt.layers.quantization.moe_wna16 import MoeWNA16Config
    from sglang.srt.layers.quantization.mxfp4 import Mxfp4Config

    if name == "fp8":
        how = {"is_checkpoint_fp8_serialized": True, "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
        return Fp8Config(**(how | changes))
    if name == "gpt-oss mxfp4":
        return Mxfp4Config(is_checkpoint_mxfp4_serialized=True)
    if name in ("gptq", "moe_wna16"):
        return {"gptq": GPTQMarlinConfig, "moe_wna16": MoeWNA16Config}[name].from_config(_GPTQ | changes)
    weights, packing, tokens = {
        "compressed fp8": (_FP8, "float-quantized", _TOKENS), "fp8 rows": (_ROWS, "float-quantized", _A_TOKEN),
        "compressed int4": (_INT4, "pack-quantized", None), "compressed mxfp4": (_MXFP4, "mxfp4-pack-quantized", None),
    }[name]  # fmt: skip
    group = {"targets": ["Linear"], "weights": weights | changes, "input_activations": tokens,
             "output_activations": None}  # fmt: skip
    return CompressedTensorsConfig.from_config(
        {"quant_method": "compressed-tensors", "format": packing, "quantization_status": "compressed",
         "config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    )  # fmt: skip


def matrices(format: str, seed: int) -> list[Any]:
    """Weights of gate and up together, and of down, as codes."""
    from pretuned.runtime import ExpertWeights

    torch.manual_seed(seed)
    return [ExpertWeights.quantize(torch.randn(E, *shape) * 0.1, format) for shape in ((2 * I, H), (H, I))]


def fill(layer: Any, name: str, given: list[Any], biases: list[torch.Tensor] | None = None) -> None:
    """Load a checkpoint's tensors by SGLang's loader, as its models do."""
    kind = KINDS[name]
    for which, one in zip(("w13", "w2"), given, strict=True):
        scale = one.scale.to(torch.float16) if name == "gptq" else one.scale
        tensors = dict(zip(kind.names, (one.codes, scale), strict=True))
        if kind.format.startswith("int4"):
            tensors[kind.names[0]] = one.codes.view(torch.int32)
        for suffix, tensor in tensors.items():
            parameter = getattr(layer, f"{which}_{suffix}")
            if name == "gpt-oss mxfp4":
                parameter.weight_loader(parameter, tensor, f"{which}_{suffix}", shard_id=None, expert_id=None)
                continue
            for e in range(E):
                halves = (
                    {"w2": tensor[e]} if which == "w2" else dict(zip(("w1", "w3"), tensor[e].chunk(2), strict=True))
                )
                for shard, half in halves.items():
                    lies = half.t().contiguous() if kind.is_turned else half
                    parameter.weight_loader(parameter, lies, f"experts.{which}_{suffix}", shard_id=shard, expert_id=e)
    for which, bias in zip(("w13", "w2"), biases or (), strict=False):
        parameter = getattr(layer, f"{which}_weight_bias")
        parameter.weight_loader(parameter, bias, f"{which}_weight_bias", shard_id=None, expert_id=None)


def twin(given: list[Any], biases: list[torch.Tensor] | None, **layer: Any) -> Any:
    """SGLang's unquantised layer of the same weights."""
    made = fused(None, **layer)
    for which, one in zip(("w13", "w2"), given, strict=True):
        getattr(made, f"{which}_weight").data.copy_(one.dequantize(torch.float32))
    for which, bias in zip(("w13", "w2"), biases or (), strict=False):
        getattr(made, f"{which}_weight_bias").data.copy_(bias)
    made.quant_method.process_weights_after_loading(made)
    return made


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
        [torch.randn(E, 2 * I).bfloat16(), torch.randn(E, H).bfloat16()] if "with_bias" in KINDS[name].layer else None
    )


def near(out: torch.Tensor, exact: torch.Tensor, format: str) -> bool:
    """What quantising the rows of both products loses of fp8 blocks; of others none."""
    return float((out - exact).norm() / exact.norm()) < (6e-2 if format == "fp8_block" else 1e-5)


def test_its_result_is_that_of_sglang_s_own_layer_of_the_dequantised_weights(
    name: str, monkeypatch: pytest.MonkeyPatch, told: pytest.LogCaptureFixture
) -> None:
    kind = KINDS[name]
    given, biases = matrices(kind.format, 0), biases_of(name)
    exact = ask(twin(given, biases, **kind.layer), *question())
    load(monkeypatch, PRETUNED_SGLANG="1")
    layer = fused(quant_config(name), **kind.layer)
    assert layer.runner_backend.value == "pretuned"
    act = "swiglu_oai" if kind.layer else "silu"
    assert lines(told) == [f"pretuned: runs the MoE layers of E=4 H=256 I=128 k=2 {kind.format} {act}"]
    fill(layer, name, given, biases)
    pointers = {key: one.data_ptr() for key, one in layer.named_parameters()}
    layer.quant_method.process_weights_after_loading(layer)
    assert {key: one.data_ptr() for key, one in layer.named_parameters()} == pointers
    assert all(one.order for one in layer.pretuned_experts.weights)  # the kernels' own
    assert near(ask(layer, *question()), exact, kind.format)
    x, weights, ids = question()
    ids[2, 0] = -1  # an expert of another rank
    weights_without = weights.clone()
    weights_without[2, 0] = 0
    there = ids.clamp(min=0)
    exact = ask(layer, x, weights_without, there)
    torch.testing.assert_close(ask(layer, x, weights, ids), exact, rtol=1e-5, atol=1e-5)


def test_gpt_oss_widths_that_sglang_pads_for_triton_kernels(
    monkeypatch: pytest.MonkeyPatch, told: pytest.LogCaptureFixture
) -> None:
    from sglang.srt.layers.quantization import mxfp4

    from pretuned.runtime import ExpertWeights

    torch.manual_seed(0)
    width, kind = 96, KINDS["gpt-oss mxfp4"]
    given = [ExpertWeights.quantize(torch.randn(E, *one) * 0.1, "mxfp4") for one in ((2 * width, H), (H, width))]
    biases = [torch.randn(E, 2 * width).bfloat16(), torch.randn(E, H).bfloat16()]
    exact = ask(twin(given, biases, **kind.layer, intermediate_size=width), *question())
    load(monkeypatch, PRETUNED_SGLANG="1")
    monkeypatch.setattr(mxfp4, "has_triton_kernels", True)  # which is not installed here
    layer = fused(quant_config("gpt-oss mxfp4"), **kind.layer, intermediate_size=width)
    assert lines(told) == [
        "pretuned: runs the MoE layers of E=4 H=256 I=96 (padded to 128: 33.3% more memory) k=2 mxfp4 swiglu_oai"
    ]
    fill(layer, "gpt-oss mxfp4", given, biases)
    layer.quant_method.process_weights_after_loading(layer)
    assert [one.shape for one in layer.pretuned_experts.weights] == [(E, 256, H), (E, H, 128)]
    assert all(one.is_prepared for one in layer.pretuned_experts.weights)
    assert near(ask(layer, *question()), exact, kind.format)


@pytest.mark.parametrize(
    ("name", "layer", "act"),
    [
        ("fp8", {"swiglu_limit": 10.0}, {"name": "swiglu", "limit": 10.0}),  # GLM-5.3-Flash
        ("fp8", {"gemm1_clamp_limit": 7.0}, {"name": "swiglustep", "limit": 7.0}),  # Step-3.7
        ("compressed int4", {"swiglu_limit": 10.0}, {"name": "swiglu", "limit": 10.0}),
        ("compressed mxfp4", {"activation": "situ", "gemm1_alpha": 4.0, "gemm1_clamp_limit": 25.0},
         {"name": "situ", "beta": 4.0, "linear_beta": 25.0}),  # Kimi-K3
    ],
)  # fmt: skip
def test_the_numbers_of_its_activation_are_those_of_the_unquantised_layer(
    name: str, layer: dict[str, Any], act: dict[str, Any], monkeypatch: pytest.MonkeyPatch,
    told: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """(Which test_sglang.py compares with SGLang's functions. SGLang's own layer on a CPU ignores them.)"""
    from pretuned.runtime import Activation, moe_mlp

    load(monkeypatch, PRETUNED_SGLANG="1")
    given = matrices(KINDS[name].format, 0)
    made = fused(quant_config(name), **layer)
    assert lines(told) == [
        f"pretuned: runs the MoE layers of E=4 H=256 I=128 k=2 {KINDS[name].format} {Activation(**act)}"
    ]
    fill(made, name, given)
    made.quant_method.process_weights_after_loading(made)
    x, weights, ids = question()
    x = x * 10  # limits act
    out = ask(made, x, weights, ids)
    w13, w2 = (one.dequantize(torch.float32) for one in given)
    beta = {"beta": act["beta"]} if "beta" in act else {}
    exact, unlimited = (
        moe_mlp(x, w13, w2, ids, weights, Activation(**one)) for one in (act, {"name": act["name"], **beta})
    )
    assert near(out, exact, KINDS[name].format)
    assert float((out - unlimited).norm() / exact.norm()) > 0.2  # where limits were ignored, it would fail


def test_an_activation_that_a_model_sets_later_and_pretuned_lacks_goes_to_sglang_s_own_runner(
    monkeypatch: pytest.MonkeyPatch, told: pytest.LogCaptureFixture
) -> None:
    from pretuned.integrations import sglang

    own = fused(quant_config("fp8")).runner_backend
    sglang.PLUG_IN._logged.clear()
    load(monkeypatch, PRETUNED_SGLANG="1")
    layer, processed = fused(quant_config("fp8")), []
    fill(layer, "fp8", matrices("fp8_block", 0))
    layer.moe_runner_config.activation = "silu_rounded"
    sglang.loaded(lambda *given: processed.append(given), layer.quant_method, layer)
    assert processed == [(layer.quant_method, layer)]
    assert layer.runner_backend is own
    assert "the activation silu_rounded with a gate is none of pretuned's" in lines(told)[-1]


def test_weights_are_put_back_and_loaded_again_where_they_were(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As SGLang's ``update_weights`` does: restore, load (of one expert here, then of all), process."""
    kind = KINDS[name]
    load(monkeypatch, PRETUNED_SGLANG="1")
    layer = fused(quant_config(name), **kind.layer)
    given, other, biases = matrices(kind.format, 0), matrices(kind.format, 1), biases_of(name)
    fill(layer, name, given, biases)
    raw = {key: one.detach().clone() for key, one in layer.named_parameters()}
    method = layer.quant_method
    method.process_weights_after_loading(layer)
    first, before = layer.pretuned_experts.weights, ask(layer, *question())
    beside = [one.kernel_scale.data_ptr() for one in first]
    for _ in range(2):
        method.restore_weights_before_loading(layer)
    for key, one in layer.named_parameters():
        assert torch.equal(one.view(torch.uint8), raw[key].view(torch.uint8)), key
    method.process_weights_after_loading(layer)  # nothing was loaded
    torch.testing.assert_close(ask(layer, *question()), before, rtol=0, atol=0)
    method.restore_weights_before_loading(layer)
    fill(layer, name, other, biases)
    method.process_weights_after_loading(layer)
    assert layer.pretuned_experts.weights is first
    assert [one.kernel_scale.data_ptr() for one in first] == beside
    fresh = fused(quant_config(name), **kind.layer)
    fill(fresh, name, other, biases)
    fresh.quant_method.process_weights_after_loading(fresh)
    torch.testing.assert_close(ask(layer, *question()), ask(fresh, *question()), rtol=0, atol=0)
    for one, another in zip(first, fresh.pretuned_experts.weights, strict=True):
        assert torch.equal(one.kernel_scale, another.kernel_scale)
    assert not torch.allclose(ask(layer, *question()), before)


def test_weights_that_can_not_be_prepared_go_to_sglang_s_own_runner(
    name: str, monkeypatch: pytest.MonkeyPatch, told: pytest.LogCaptureFixture
) -> None:
    from pretuned.integrations import sglang
    from pretuned.runtime import ExpertWeights

    def fails(weights: Any) -> Any:
        if asked:
            raise RuntimeError("made to fail")
        asked.append(weights)
        return prepare(weights)  # of the first product: that is undone

    kind, prepare, processed, asked = KINDS[name], ExpertWeights.prepare_in_place, [], []
    own = fused(quant_config(name), **kind.layer).runner_backend
    sglang.PLUG_IN._logged.clear()
    load(monkeypatch, PRETUNED_SGLANG="1")
    layer = fused(quant_config(name), **kind.layer)
    fill(layer, name, matrices(kind.format, 0), biases_of(name))
    raw = {key: one.detach().clone() for key, one in layer.named_parameters()}
    monkeypatch.setattr(ExpertWeights, "prepare_in_place", fails)
    told.clear()
    sglang.loaded(lambda *given: processed.append(given), layer.quant_method, layer)  # SGLang's own wants a GPU
    assert processed == [(layer.quant_method, layer)]
    assert layer.runner_backend is own
    assert not hasattr(layer, "pretuned_experts")
    for key, one in layer.named_parameters():
        assert torch.equal(one.view(torch.uint8), raw[key].view(torch.uint8)), key
    assert lines(told) == [
        "pretuned: MoE layers stay with SGLang, as pretuned could not prepare a layer's weights: RuntimeError: made to "
        "fail. PRETUNED_SGLANG=0 switches pretuned off"
    ]


@pytest.mark.parametrize(
    ("name", "changes", "layer", "why"),
    [
        ("fp8", {"weight_block_size": None}, {}, "no scale for each 128 x 128"),
        ("fp8", {"weight_block_size": [64, 64]}, {}, "no scale for each 128 x 128 (blocks of [64, 64])"),
        ("fp8", {}, {"activation": "silu_rounded"}, "the activation silu_rounded"),
        ("fp8 rows", {}, {}, "(blocks of None)"),
        ("compressed int4", {"symmetric": False}, {}, "zero points"),
        ("compressed int4", {"actorder": "group"}, {}, "groups of another order (actorder)"),
        ("compressed int4", {"group_size": 16}, {}, "4 bits in groups of 16"),
        ("compressed int4", {"group_size": 128}, {"intermediate_size": 192}, "K of int4_g128 of 128"),
        ("compressed int4", {}, {"gemm1_clamp_limit": 7.0}, "its Marlin runner ignores gemm1_clamp_limit"),
        ("compressed int4", {}, OAI, "its Marlin runner has gate and up in halves"),
        ("gptq", {"desc_act": True}, {}, "groups of another order (desc_act)"),
        ("gptq", {"bits": 8}, {}, "8 bits in groups of 64"),
        ("moe_wna16", {"sym": False}, {}, "zero points"),
        ("gpt-oss mxfp4", {}, {"hidden_size": 96}, "N and K must be multiples of 64"),
        (
            "moe_wna16",
            {"group_size": 32},
            {"intermediate_size": 96},
            "N and K of (192, 256), pretuned reads (256, 256)",
        ),
    ],
)
def test_layers_that_stay_with_sglang(
    monkeypatch: pytest.MonkeyPatch, told: pytest.LogCaptureFixture, name: str, changes: dict[str, Any],
    layer: dict[str, Any], why: str,
) -> None:  # fmt: skip
    load(monkeypatch, PRETUNED_SGLANG="1")
    made = fused(quant_config(name, **changes), **layer)
    assert made.runner_backend.value == _RUNNERS.get(name, "triton")
    assert not hasattr(made, "pretuned_experts")
    (line,) = lines(told)
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
        ("enable_eplb", True, "--enable-eplb moves its weights"), ("cpu_offload_gb", 1, "--cpu-offload-gb moves"),
        ("moe_runner_backend", "triton_kernel", "--moe-runner-backend triton_kernel asks for it"),
    ):  # fmt: skip
        args = ServerArgs(model_path="none", device="cpu", **{option: value})
        monkeypatch.setattr(experts, "get_server_args", lambda args=args: args)
        assert str(refusal(*asked, everywhere=True)).startswith(why)
    monkeypatch.undo()
    layer.w13_weight.data = torch.zeros(E, 384, 128, dtype=torch.uint8)  # as for a backend that wants more rows
    assert str(refusal(*asked, everywhere=True)).startswith("its parameters have an N and K of (384, 256), ")


def test_a_scale_that_no_kernel_takes_is_an_error_on_a_gpu() -> None:
    from pretuned.artifacts.errors import InputError
    from pretuned.integrations.served_layer import prepared
    from pretuned.runtime import ExpertWeights

    given = [ExpertWeights.mxfp4(torch.zeros(E, 64, 32, dtype=torch.uint8), torch.full((E, 64, 2), 130).byte())]
    with pytest.raises(InputError, match=r"no kernel takes the scales of .*mxfp4.* PRETUNED_SGLANG=0 serves"):
        prepared(given, "PRETUNED_SGLANG", on_gpu=True)
    assert not prepared(given, "PRETUNED_SGLANG", on_gpu=False)[0].order
