"""SGLang's own plug-in loader, registry and runner on the CPU: which layers are taken, and what they compute.

(SGLang's CPU engine runs its layers past its runners, so no whole engine is asked here.)
"""

from __future__ import annotations

import dataclasses
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import sglang_layer
import torch
from sglang_layer import lines, load, wanted

pytestmark = pytest.mark.filterwarnings("default")

registry, logged = sglang_layer.registry, sglang_layer.logged


def config(**changes: Any) -> Any:
    """SGLang's MoeRunnerConfig of a small layer."""
    from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig

    settings = {
        "num_experts": 4,
        "num_local_experts": 4,
        "hidden_size": 32,
        "intermediate_size_per_partition": 16,
        "top_k": 2,
        "params_dtype": torch.float32,
    }
    return MoeRunnerConfig(**(settings | changes))


def built(**changes: Any) -> Any:
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
    assert len(PLACES) == 2 + 9 * 4


@pytest.mark.parametrize("environ", [{"PRETUNED_SGLANG": "0"}, {"PRETUNED_SGLANG": "False"}, {"SGLANG_PLUGINS": "x"}])
def test_switches(environ: dict[str, str], registry: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    load(monkeypatch, **environ)
    assert not any("pretuned" in hook.__module__ for row in registry._hooks.values() for _, hook, *_ in row)


def test_a_layer_is_taken_and_told(monkeypatch: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture) -> None:
    load(monkeypatch, PRETUNED_SGLANG="1")
    methods = [built() for _ in range(3)]
    assert {type(method.runner.runner_core).__name__ for method in methods} == {"PretunedRunnerCore"}
    assert {method.get_moe_runner_backend(None).value for method in methods} == {"pretuned"}
    assert lines(logged) == ["pretuned: runs the MoE layers of E=4 H=32 I=16 k=2 fp32 silu"]


def test_without_a_switch_the_cpu_stays_with_sglang(
    monkeypatch: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture
) -> None:
    load(monkeypatch)
    assert built().runner.runner_backend.is_triton()
    assert lines(logged) == [
        "pretuned: leaves the MoE layers of E=4 H=32 I=16 to SGLang's triton runner: pretuned has no kernels for the "
        "CPU (PRETUNED_SGLANG=1 runs its reference there)"
    ]


def own_runs(method: Any, logged: pytest.LogCaptureFixture, reason: str) -> None:
    assert method.runner.runner_backend.is_triton()
    assert lines(logged) == [
        f"pretuned: MoE layers stay with SGLang, as pretuned could not take a layer: {reason}. PRETUNED_SGLANG=0 "
        "switches pretuned off"
    ]


@pytest.mark.parametrize("name", ["refusal", "layer_of", "_tell", "_register_core", "runs_by"])
def test_a_layer_that_can_not_be_taken_is_sglang_s(
    name: str, monkeypatch: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture
) -> None:
    from pretuned.integrations.sglang import PLUG_IN, experts

    def fails(*_: Any, **__: Any) -> None:
        raise KeyError(name)

    PLUG_IN._logged.clear()
    load(monkeypatch, PRETUNED_SGLANG="1")
    monkeypatch.setattr(experts, name, fails)
    for _ in range(3):
        method = built()
    own_runs(method, logged, f"KeyError: '{name}'")


@pytest.mark.parametrize("name", ["pretuned.integrations.sglang.experts", "pretuned.integrations.served_layer"])
def test_a_module_that_can_not_be_imported_leaves_layers_to_sglang(
    name: str, monkeypatch: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture
) -> None:
    from pretuned.integrations import sglang

    sglang.PLUG_IN._logged.clear()
    load(monkeypatch, PRETUNED_SGLANG="1")
    monkeypatch.delitem(sys.modules, "pretuned.integrations.sglang.experts", raising=False)
    monkeypatch.delattr(sglang, "experts", raising=False)
    monkeypatch.setitem(sys.modules, name, None)
    method = built()
    assert method.runner.runner_backend.is_triton()
    (line,) = lines(logged)
    assert line.startswith("pretuned: MoE layers stay with SGLang, as pretuned could not take a layer: ")
    assert name in line


def test_a_layer_that_can_not_be_run_is_run_by_sglang_s_own_runner(
    monkeypatch: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture
) -> None:
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    from pretuned.integrations.sglang import PLUG_IN, experts

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("made to fail")

    PLUG_IN._logged.clear()
    load(monkeypatch, PRETUNED_SGLANG="1")
    method, layer = built(), torch.nn.Module()
    layer.w13_weight, layer.w2_weight = torch.randn(4, 32, 32), torch.randn(4, 32, 16)
    own = method.runner.runner_core.own
    assert own.runner_backend.is_triton()
    asked: list[Any] = []
    monkeypatch.setattr(own, "run", lambda *args: asked.append(args))  # it wants a GPU
    monkeypatch.setattr(experts, "moe_mlp", fails)
    logged.clear()
    topk = StandardTopKOutput(torch.rand(3, 2), torch.zeros(3, 2).int(), torch.empty(0))
    dispatched = StandardDispatchOutput(torch.randn(3, 32), None, topk)
    assert method.forward_cuda(layer, dispatched) is None
    ((first, weights),) = asked
    assert first is dispatched
    assert weights.w13_weight is layer.w13_weight
    assert lines(logged) == [
        "pretuned: MoE layers stay with SGLang, as pretuned could not run a layer: RuntimeError: made to fail. "
        "PRETUNED_SGLANG=0 switches pretuned off"
    ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"params_dtype": torch.float64}, "the dtype torch.float64 is none"),
        ({"activation": "silu_rounded"}, "the activation silu_rounded with a gate is none of pretuned's (silu, gelu, "),
        ({"activation": "relu2"}, "the activation relu2 with a gate is none"),
        ({"activation": "situ", "is_gated": False}, "the activation situ without a gate is none"),
        ({"activation": "situ", "gemm1_alpha": -1.0}, "situ needs a gemm1_alpha above 0"),
        ({"activation": "situ", "swiglu_limit": 10.0}, "swiglu_limit=10: SGLang's runners do not all read"),
        ({"gemm1_alpha": 1.5}, "the activation silu with a gate, gemm1_alpha=1.5, without gemm1_clamp_limit"),
        ({"gemm1_alpha": 1.5, "gemm1_beta": 0.5, "gemm1_clamp_limit": 7.0}, "gemm1_beta=0.5, gemm1_clamp_limit=7: "),
        ({"gemm1_clamp_limit": 7.0, "swiglu_limit": 10.0}, "gemm1_clamp_limit=7, swiglu_limit=10: SGLang's runners"),
        ({"activation": "gelu", "swiglu_limit": 10.0}, "the activation gelu with a gate, swiglu_limit=10: SGLang's"),
        ({"no_combine": True}, "(no_combine)"),
    ],
)
def test_what_stays_with_sglang_and_why(changes: dict[str, Any], message: str) -> None:
    from pretuned.integrations.sglang.experts import refusal

    why = refusal(built(**changes), torch.nn.Module(), config(**changes), None, everywhere=True)
    assert why is not None
    assert message in why


def test_deterministic_inference_is_the_batch_invariant_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    from pretuned.integrations.sglang import experts
    from pretuned.runtime import reload
    from pretuned.runtime.dispatch.snapshot import snapshot

    monkeypatch.setenv("PRETUNED_BATCH_INVARIANT", "")  # so that the test's end takes it out
    monkeypatch.delenv("PRETUNED_BATCH_INVARIANT")
    monkeypatch.setattr(experts, "_settings", lambda: SimpleNamespace(enable_deterministic_inference=True))

    def why() -> str | None:
        return experts.refusal(built(), torch.nn.Module(), config(), None, everywhere=True)

    try:
        assert why() == "--enable-deterministic-inference: sums of pretuned's reference depend on the batch"
        assert snapshot().invariance is not None
        with monkeypatch.context() as patch:
            patch.setattr(torch.cuda, "is_available", lambda: True)
            patch.setattr(torch.version, "cuda", "13.0")
            assert experts._varies() is None
        monkeypatch.setenv("PRETUNED_BATCH_INVARIANT", "0")
        reload()
        assert why() == "PRETUNED_BATCH_INVARIANT=0 beside --enable-deterministic-inference"
    finally:
        monkeypatch.undo()
        reload()


@pytest.mark.parametrize(
    ("changes", "has_bias"),
    [
        ({}, False),
        ({"activation": "gelu"}, False),
        ({"routed_scaling_factor": 2.5}, False),
        ({"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0}, True),
        ({"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0, "gate_up_interleaved": False}, True),
        ({"gemm1_alpha": 1.702, "gemm1_beta": 1.0, "gemm1_clamp_limit": 7.0, "gate_up_interleaved": False}, False),
        ({"gemm1_alpha": 1.3, "gemm1_clamp_limit": 2.0}, False),
        ({"gemm1_clamp_limit": 7.0}, False),  # Step-3.7
        ({"gemm1_clamp_limit": 0.0, "swiglu_limit": 0.0}, False),
        ({"swiglu_limit": 10.0}, False),  # DeepSeek-V4, GLM-5.3-Flash
        ({"activation": "situ", "gemm1_alpha": 4.0, "gemm1_clamp_limit": 25.0}, False),  # Kimi-K3
        ({"activation": "situ"}, False),
        ({"activation": "gelu_tanh"}, False),
        ({"activation": "relu2", "is_gated": False}, False),  # Nemotron-3
        ({"activation": "silu", "is_gated": False}, False),
        ({"apply_router_weight_on_input": True, "top_k": 1}, False),
    ],
)
def test_its_result_is_sglang_s(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], has_bias: bool) -> None:
    """By the code with which SGLang's method calls its runner on a GPU, beside a loop over tokens and experts."""
    load(monkeypatch, PRETUNED_SGLANG="1")
    out, exact, unlimited = layer_of(built(**changes), config(**changes), has_bias=has_bias)
    torch.testing.assert_close(out, exact, rtol=1e-4, atol=1e-4)
    limits = [changes.get(name) for name in ("gemm1_clamp_limit", "swiglu_limit")]
    if any(limits):  # where they were ignored, it would fail
        assert float((out - unlimited).abs().max() / exact.abs().max()) > 0.2


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({}, None),  # all are here
        ({"num_experts": 16}, 7 * 2 // 4),
        ({"num_experts": 13, "num_fused_shared_experts": 1}, 7 + 7 * 3 // 12),  # of four here one is on all ranks
    ],
)
def test_the_rows_of_this_rank_choose_its_kernels(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], rows: int | None
) -> None:
    load(monkeypatch, PRETUNED_SGLANG="1")
    method = built(**changes)
    from pretuned.integrations.sglang import experts

    hints: list[int | None] = []

    def spied(*args: Any, expected_rows: int | None, **how: Any) -> torch.Tensor:
        hints.append(expected_rows)
        return moe_mlp(*args, expected_rows=expected_rows, **how)

    moe_mlp = experts.moe_mlp
    monkeypatch.setattr(experts, "moe_mlp", spied)
    out, exact, _ = layer_of(method, config(**changes))
    torch.testing.assert_close(out, exact, rtol=1e-4, atol=1e-4)
    assert hints == [rows]


def test_a_limit_that_a_model_sets_later_is_obeyed(
    monkeypatch: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture
) -> None:
    """GigaChat-3.5 does so after its layers and their runners were made."""
    load(monkeypatch, PRETUNED_SGLANG="1")
    method = built()
    method.runner.config.gemm1_clamp_limit = 7.0
    out, exact, _ = layer_of(method, config(gemm1_clamp_limit=7.0))
    torch.testing.assert_close(out, exact, rtol=1e-4, atol=1e-4)
    assert lines(logged)[-1] == (
        "pretuned: the model has set another activation: it runs the MoE layers of E=4 H=32 I=16 k=2 fp32 "
        "swiglustep(limit=7)"
    )
    own = method.runner.runner_core.own
    asked: list[Any] = []
    monkeypatch.setattr(own, "run", lambda *args: asked.append(args) or StandardResult(args[0].hidden_states))
    method.runner.config.swiglu_limit = 10.0  # beside the other: SGLang's runner takes the layer
    layer_of(method, config(gemm1_clamp_limit=7.0))
    assert len(asked) == 1


class StandardResult:
    """The result that a runner of SGLang's returns."""

    def __init__(self, hidden_states: torch.Tensor) -> None:
        self.hidden_states = hidden_states


def layer_of(method: Any, how: Any, *, has_bias: bool = False) -> list[torch.Tensor]:
    """A layer by its method, and as SGLang's functions have it, with the limits of its activation and without."""
    from sglang.srt.layers.moe.token_dispatcher.standard import StandardDispatchOutput
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    T, E, H, I = 7, 4, 32, 16  # noqa: E741
    torch.manual_seed(0)
    layer = torch.nn.Module()
    layer.w13_weight, layer.w2_weight = torch.randn(E, (1 + how.is_gated) * I, H) * 2, torch.randn(E, H, I)
    if has_bias:
        layer.w13_weight_bias, layer.w2_weight_bias = torch.randn(E, 2 * I), torch.randn(E, H)
    x, weights = torch.randn(T, H), torch.rand(T, how.top_k)
    ids = torch.stack([torch.randperm(E)[: how.top_k] for _ in range(T)]).int()
    ids[2, 0] = -1  # an expert of another rank
    dispatched = StandardDispatchOutput(x.clone(), None, StandardTopKOutput(weights, ids, torch.empty(0)))
    out = method.forward_cuda(layer, dispatched).hidden_states
    unlimited = dataclasses.replace(
        how, swiglu_limit=None, gemm1_clamp_limit=1e30 if how.gemm1_alpha and how.activation == "silu" else None
    )
    return [out, *(wanted(layer, act, x, weights, ids) for act in (how, unlimited))]
