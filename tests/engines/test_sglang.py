"""SGLang's own plug-in loader, registry and runner on the CPU: which layers are taken, and what they compute.

(SGLang's CPU engine runs its layers past its runners, so no whole engine is asked here.)
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torchvision_absent

pytestmark = pytest.mark.filterwarnings("default")
_FP8 = ("create_moe_runner", "process_weights_after_loading", "apply")


@pytest.fixture(autouse=True)
def hooks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """SGLang's registry of hooks, as it is before plug-ins are loaded."""
    torchvision_absent.stand_in()
    from sglang.srt import plugins
    from sglang.srt.layers.quantization.fp8 import Fp8MoEMethod
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
    from sglang.srt.plugins.hook_registry import HookRegistry

    from pretuned.integrations import sglang_experts

    create = UnquantizedFusedMoEMethod.create_moe_runner
    own = {name: vars(Fp8MoEMethod)[name] for name in _FP8}
    monkeypatch.setattr(plugins, "_plugins_loaded", False)
    monkeypatch.delenv("PRETUNED_SGLANG", raising=False)
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    sglang_experts._tell.cache_clear()
    HookRegistry.reset()
    yield HookRegistry
    HookRegistry.reset()
    UnquantizedFusedMoEMethod.create_moe_runner = create
    for name, method in own.items():
        setattr(Fp8MoEMethod, name, method)


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, "sglang.pretuned"):
        yield caplog


def config(**changes: Any) -> Any:
    """SGLang's MoeRunnerConfig of a small layer."""
    from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig

    given = {"num_experts": 4, "num_local_experts": 4, "hidden_size": 32, "intermediate_size_per_partition": 16,
             "top_k": 2, "params_dtype": torch.float32}  # fmt: skip
    return MoeRunnerConfig(**(given | changes))


def made(**changes: Any) -> Any:
    """SGLang's method for a layer, its runner chosen."""
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod

    method = UnquantizedFusedMoEMethod()
    method.create_moe_runner(torch.nn.Module(), config(**changes))
    return method


def load(monkeypatch: pytest.MonkeyPatch, **environ: str) -> None:
    from sglang.srt import plugins

    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(plugins, "_plugins_loaded", False)
    plugins.load_plugins()


def test_sglang_finds_the_plug_in_and_loads_it_twice(hooks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    load(monkeypatch)
    load(monkeypatch)
    from pretuned.integrations.sglang import PLACES

    assert {place: len(hooks._hooks[place]) for place in PLACES} == dict.fromkeys(PLACES, 1)
    assert len(PLACES) == 4


@pytest.mark.parametrize("environ", [{"PRETUNED_SGLANG": "0"}, {"PRETUNED_SGLANG": "False"}, {"SGLANG_PLUGINS": "x"}])
def test_switches(environ: dict[str, str], hooks: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    load(monkeypatch, **environ)
    assert not any("pretuned" in one.__module__ for row in hooks._hooks.values() for _, one, *_ in row)


def test_a_layer_is_taken_and_told(monkeypatch: pytest.MonkeyPatch, told: pytest.LogCaptureFixture) -> None:
    load(monkeypatch, PRETUNED_SGLANG="1")
    methods = [made() for _ in range(3)]
    assert {type(one.runner.runner_core).__name__ for one in methods} == {"PretunedRunnerCore"}
    assert {one.get_moe_runner_backend(None).value for one in methods} == {"pretuned"}
    lines = [one.getMessage() for one in told.records if one.name == "sglang.pretuned"]
    assert lines == ["pretuned: runs the MoE layers of E=4 H=32 I=16 k=2 fp32 silu"]


def test_without_a_switch_the_cpu_stays_with_sglang(
    monkeypatch: pytest.MonkeyPatch, told: pytest.LogCaptureFixture
) -> None:
    load(monkeypatch)
    assert made().runner.runner_backend.is_triton()
    lines = [one.getMessage() for one in told.records if one.name == "sglang.pretuned"]
    assert lines == [
        "pretuned: leaves the MoE layers of E=4 H=32 I=16 to SGLang's triton runner: pretuned has no kernels for the "
        "CPU (PRETUNED_SGLANG=1 runs its reference there)"
    ]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"params_dtype": torch.float64}, "the dtype torch.float64 is none"),
        ({"activation": "situ"}, "the activation situ with alpha and limits of (None, None, None)"),
        ({"swiglu_limit": 10.0}, "the activation silu with alpha and limits of (None, None, 10.0)"),
        ({"gemm1_alpha": 1.5, "gemm1_clamp_limit": 7.0}, "with alpha and limits of (1.5, 7.0, None)"),
        ({"activation": "relu2"}, "the activation relu2"),
        ({"no_combine": True}, "(no_combine)"),
    ],
)
def test_what_stays_with_sglang_and_why(changes: dict[str, Any], told: str) -> None:
    from pretuned.integrations.sglang_experts import refusal

    why = refusal(made(**changes), config(**changes), everywhere=True)
    assert why is not None
    assert told in why


@pytest.mark.parametrize(
    ("changes", "has_bias"),
    [
        ({}, False),
        ({"activation": "gelu"}, False),
        ({"routed_scaling_factor": 2.5}, False),
        ({"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0}, True),
        ({"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0, "gate_up_interleaved": False}, True),
        ({"apply_router_weight_on_input": True, "top_k": 1}, False),
    ],
)
def test_its_result_is_sglang_s(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], has_bias: bool) -> None:
    """By the code with which SGLang's method calls its runner on a GPU, beside a loop over tokens and experts."""
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    load(monkeypatch, PRETUNED_SGLANG="1")
    method, how, T, E, H, I = made(**changes), config(**changes), 7, 4, 32, 16  # noqa: E741
    torch.manual_seed(0)
    layer = torch.nn.Module()
    layer.w13_weight, layer.w2_weight = torch.randn(E, 2 * I, H), torch.randn(E, H, I)
    if has_bias:
        layer.w13_weight_bias, layer.w2_weight_bias = torch.randn(E, 2 * I), torch.randn(E, H)
    x, weights = torch.randn(T, H), torch.rand(T, how.top_k)
    ids = torch.stack([torch.randperm(E)[: how.top_k] for _ in range(T)]).int()
    ids[2, 0] = -1  # an expert of another rank
    given = StandardDispatchOutput(x.clone(), None, StandardTopKOutput(weights, ids, torch.empty(0)))
    out = method.forward_cuda(layer, given).hidden_states
    torch.testing.assert_close(out, wanted(layer, how, x, weights, ids), rtol=1e-4, atol=1e-4)


def wanted(layer: Any, how: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Each token's experts, one by one, as SGLang's Triton runner has it."""
    out = torch.zeros_like(x)
    for t, s in torch.cartesian_prod(*map(torch.arange, ids.shape)).tolist():
        e = int(ids[t, s])
        if e < 0:
            continue
        first = how.apply_router_weight_on_input
        h = layer.w13_weight[e] @ (x[t] * weights[t, s] if first else x[t])
        if hasattr(layer, "w13_weight_bias"):
            h = h + layer.w13_weight_bias[e]
        gate, up = (h[::2], h[1::2]) if how.gemm1_alpha and how.gate_up_interleaved else h.chunk(2)
        if how.gemm1_alpha:
            gate, up = gate.clamp(max=how.gemm1_clamp_limit), up.clamp(-how.gemm1_clamp_limit, how.gemm1_clamp_limit)
            a = gate * torch.sigmoid(gate * how.gemm1_alpha) * (up + 1)
        else:
            a = getattr(torch.nn.functional, how.activation)(gate) * up
        y = layer.w2_weight[e] @ a
        if hasattr(layer, "w2_weight_bias"):
            y = y + layer.w2_weight_bias[e]
        out[t] += y if first else y * weights[t, s]
    return out * (how.routed_scaling_factor or 1.0)


def fp8_method(blocks: tuple[int, int] | None = (128, 128), scheme: str = "dynamic") -> Any:
    from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8MoEMethod

    how = Fp8Config(is_checkpoint_fp8_serialized=True, activation_scheme=scheme,
                    weight_block_size=None if blocks is None else [*blocks])  # fmt: skip
    return Fp8MoEMethod(how)


SIZES = {"hidden_size": 256, "intermediate_size_per_partition": 128}


def test_fp8_blocks_are_read_as_codes(monkeypatch: pytest.MonkeyPatch, told: pytest.LogCaptureFixture) -> None:
    """SGLang's own method makes the parameters, loads nothing else, and is called; beside the dequantised weights."""
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    from pretuned.runtime import ExpertWeights

    load(monkeypatch, PRETUNED_SGLANG="1")
    method, how, (T, E, H, I) = fp8_method(), config(**SIZES), (7, 4, 256, 128)  # noqa: E741
    torch.manual_seed(0)
    layer = torch.nn.Module()
    method.create_moe_runner(layer, how)
    assert method.get_moe_runner_backend(layer).value == "pretuned"
    lines = [one.getMessage() for one in told.records if one.name == "sglang.pretuned"]
    assert lines == ["pretuned: runs the MoE layers of E=4 H=256 I=128 k=2 fp8_block silu"]
    given = [ExpertWeights.quantize(torch.randn(E, *shape) * 0.1, "fp8_block") for shape in ((2 * I, H), (H, I))]
    twin = torch.nn.Module()
    twin.w13_weight, twin.w2_weight = (one.dequantize(torch.float32) for one in given)
    layer.w13_input_scale = layer.w2_input_scale = None
    for name, one in zip(("w13_weight", "w2_weight"), given, strict=True):
        setattr(layer, name, torch.nn.Parameter(one.codes.clone(), requires_grad=False))
        setattr(layer, f"{name}_scale_inv", torch.nn.Parameter(one.scale.clone(), requires_grad=False))
    method.process_weights_after_loading(layer)
    assert not torch.equal(layer.w13_weight.view(torch.uint8), given[0].codes.view(torch.uint8)), (
        "in the kernels' order"
    )
    x, weights = torch.randn(T, H), torch.rand(T, how.top_k)
    ids = torch.stack([torch.randperm(E)[: how.top_k] for _ in range(T)]).int()
    ids[2, 0] = -1
    tokens = StandardDispatchOutput(x.clone(), None, StandardTopKOutput(weights, ids, torch.empty(0)))
    out = method.apply(layer, tokens).hidden_states
    exact = wanted(twin, how, x, weights, ids)
    assert float((out - exact).norm() / exact.norm()) < 6e-2  # what quantising the rows of both products loses


@pytest.mark.parametrize(
    ("given", "changes", "told"),
    [
        ({"blocks": None}, {}, "no scale for each 128 x 128"),
        ({"blocks": (64, 64)}, {}, "no scale for each 128 x 128 (blocks of [64, 64])"),
        ({}, {"intermediate_size_per_partition": 96}, "N and K must be multiples of 64, of fp8_block of 128"),
        ({}, {"activation": "situ"}, "the activation situ"),
    ],
)
def test_fp8_layers_that_stay_with_sglang(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], changes: dict[str, Any], told: str
) -> None:
    from pretuned.integrations.sglang_experts import refusal

    load(monkeypatch, PRETUNED_SGLANG="1")
    method, how = fp8_method(**given), config(**(SIZES | changes))
    method.create_moe_runner(torch.nn.Module(), how)
    assert method.runner.runner_backend.is_triton()
    why = refusal(method, how, everywhere=True)
    assert why is not None
    assert told in why
