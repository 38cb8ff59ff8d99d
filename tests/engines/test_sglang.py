"""SGLang's own plug-in loader, registry and runner on the CPU: which layers are taken, and what they compute.

(SGLang's CPU engine runs its layers past its runners, so no whole engine is asked here.)
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import sglang_layer
import torch
from sglang_layer import lines, load

pytestmark = pytest.mark.filterwarnings("default")

registry, told = sglang_layer.registry, sglang_layer.told


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


def test_sglang_finds_the_plug_in_and_loads_it_twice(registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    load(monkeypatch)
    load(monkeypatch)
    from pretuned.integrations.sglang import PLACES

    assert {place: len(registry._hooks[place]) for place in PLACES} == dict.fromkeys(PLACES, 1)
    assert len(PLACES) == 1 + 5 * 4


@pytest.mark.parametrize("environ", [{"PRETUNED_SGLANG": "0"}, {"PRETUNED_SGLANG": "False"}, {"SGLANG_PLUGINS": "x"}])
def test_switches(environ: dict[str, str], registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    load(monkeypatch, **environ)
    assert not any("pretuned" in one.__module__ for row in registry._hooks.values() for _, one, *_ in row)


def test_a_layer_is_taken_and_told(monkeypatch: pytest.MonkeyPatch, told: pytest.LogCaptureFixture) -> None:
    load(monkeypatch, PRETUNED_SGLANG="1")
    methods = [made() for _ in range(3)]
    assert {type(one.runner.runner_core).__name__ for one in methods} == {"PretunedRunnerCore"}
    assert {one.get_moe_runner_backend(None).value for one in methods} == {"pretuned"}
    assert lines(told) == ["pretuned: runs the MoE layers of E=4 H=32 I=16 k=2 fp32 silu"]


def test_without_a_switch_the_cpu_stays_with_sglang(
    monkeypatch: pytest.MonkeyPatch, told: pytest.LogCaptureFixture
) -> None:
    load(monkeypatch)
    assert made().runner.runner_backend.is_triton()
    assert lines(told) == [
        "pretuned: leaves the MoE layers of E=4 H=32 I=16 to SGLang's triton runner: pretuned has no kernels for the "
        "CPU (PRETUNED_SGLANG=1 runs its reference there)"
    ]


def own_runs(method: Any, told: pytest.LogCaptureFixture, reason: str) -> None:
    assert method.runner.runner_backend.is_triton()
    assert lines(told) == [
        f"pretuned: MoE layers stay with SGLang, as pretuned could not take a layer: {reason}. PRETUNED_SGLANG=0 "
        "switches pretuned off"
    ]


@pytest.mark.parametrize("name", ["refusal", "layer_of", "_tell", "_register_core", "runs_by"])
def test_a_layer_that_can_not_be_taken_is_sglang_s(
    name: str, monkeypatch: pytest.MonkeyPatch, told: pytest.LogCaptureFixture
) -> None:
    from pretuned.integrations.sglang import PLUG_IN, experts

    def fails(*_: Any, **__: Any) -> None:
        raise KeyError(name)

    PLUG_IN._logged.clear()
    load(monkeypatch, PRETUNED_SGLANG="1")
    monkeypatch.setattr(experts, name, fails)
    for _ in range(3):
        method = made()
    own_runs(method, told, f"KeyError: '{name}'")


@pytest.mark.parametrize("name", ["pretuned.integrations.sglang.experts", "pretuned.integrations.served_layer"])
def test_a_module_that_can_not_be_imported_leaves_layers_to_sglang(
    name: str, monkeypatch: pytest.MonkeyPatch, told: pytest.LogCaptureFixture
) -> None:
    from pretuned.integrations import sglang

    sglang.PLUG_IN._logged.clear()
    load(monkeypatch, PRETUNED_SGLANG="1")
    monkeypatch.delitem(sys.modules, "pretuned.integrations.sglang.experts", raising=False)
    monkeypatch.delattr(sglang, "experts", raising=False)
    monkeypatch.setitem(sys.modules, name, None)
    method = made()
    assert method.runner.runner_backend.is_triton()
    (line,) = lines(told)
    assert line.startswith("pretuned: MoE layers stay with SGLang, as pretuned could not take a layer: ")
    assert name in line


def test_a_layer_that_can_not_be_run_is_run_by_sglang_s_own_runner(
    monkeypatch: pytest.MonkeyPatch, told: pytest.LogCaptureFixture
) -> None:
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    from pretuned.integrations.sglang import PLUG_IN, experts

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("made to fail")

    PLUG_IN._logged.clear()
    load(monkeypatch, PRETUNED_SGLANG="1")
    method, layer = made(), torch.nn.Module()
    layer.w13_weight, layer.w2_weight = torch.randn(4, 32, 32), torch.randn(4, 32, 16)
    own = method.runner.runner_core.own
    assert own.runner_backend.is_triton()
    asked: list[Any] = []
    monkeypatch.setattr(own, "run", lambda *given: asked.append(given))  # it wants a GPU
    monkeypatch.setattr(experts, "moe_mlp", fails)
    told.clear()
    topk = StandardTopKOutput(torch.rand(3, 2), torch.zeros(3, 2).int(), torch.empty(0))
    given = StandardDispatchOutput(torch.randn(3, 32), None, topk)
    assert method.forward_cuda(layer, given) is None
    ((first, weights),) = asked
    assert first is given
    assert weights.w13_weight is layer.w13_weight
    assert lines(told) == [
        "pretuned: MoE layers stay with SGLang, as pretuned could not run a layer: RuntimeError: made to fail. "
        "PRETUNED_SGLANG=0 switches pretuned off"
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
    from pretuned.integrations.sglang.experts import refusal

    why = refusal(made(**changes), torch.nn.Module(), config(**changes), None, everywhere=True)
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
