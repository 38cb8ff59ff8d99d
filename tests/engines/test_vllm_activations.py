"""The activations of vLLM's MoE layers on pretuned, by vLLM's own functions, and in layers of vLLM's own models."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import save
from vllm_engine import NEW_TOKENS, config, generate, lines, run
from vllm_flagships import FLAGSHIPS, E, Made, build_flagship, error_of, function, results, twin

pytestmark = pytest.mark.filterwarnings("default")
_TOKENS = {"mxfp4": 0.01, "fp8_block": 0.08, None: 0.01}  # of fp8 blocks x is quantised, too


def test_in_a_whole_engine_each_layer_has_its_own_limit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each call of a layer is what vLLM's functions make of the checkpoint's weights."""
    from pretuned.integrations.vllm.experts import PretunedExperts

    limits, calls, apply = [0.0, 10.0], [], PretunedExperts.apply

    def kept(self: Any, output: torch.Tensor, hidden_states: torch.Tensor, **kwargs: Any) -> None:
        apply(self, output=output, hidden_states=hidden_states, **kwargs)
        calls.append(
            (hidden_states.clone(), kwargs["topk_weights"].clone(), kwargs["topk_ids"].clone(), output.clone())
        )

    path = save("EXAONE-MoE", tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if ".experts." in name and not name.endswith("down_proj.weight"):
            tensor.mul_(40)  # limits act
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    said = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(said | {"swiglu_limits": limits}))
    monkeypatch.setattr(PretunedExperts, "apply", kept)
    ignored = run(path, "0", generate)  # by vLLM's own layers on the CPU
    with lines() as logged:
        _, said_with = run(path, "1", lambda llm: (calls.clear(), generate(llm)))
    assert said_with.tokens != ignored.tokens
    sizes = "pretuned: runs the MoE layers of E=8 H=64 I=32 k=2 fp32"
    assert logged == [f"{sizes} silu", f"{sizes} swiglu(limit=10)"]
    assert len(calls) >= 2 * NEW_TOKENS
    acts = [function("SiluAndMul", ()), function("SiluAndMulWithClamp", (limits[1],))]
    for i, (x, weights, ids, out) in enumerate(calls):
        layer = Made(None, None, *(checkpoint(tensors, i % 2, names) for names in (("gate", "up"), ("down",))))
        mine, other = (
            twin(layer, act, x, weights, ids, round_to=torch.float32) for act in (acts[i % 2], acts[i % 2 - 1])
        )
        torch.testing.assert_close(out, mine, rtol=1e-4, atol=1e-3)
        assert error_of(out, other) > 0.1


def checkpoint(tensors: dict[str, torch.Tensor], layer: int, names: tuple[str, ...]) -> torch.Tensor:
    """The matrices of a layer's experts, one below another."""
    where = f"model.layers.{layer}.mlp.experts"
    return torch.stack(
        [torch.cat([tensors[f"{where}.{e}.{name}_proj.weight"].float() for name in names]) for e in range(8)]
    )


@pytest.fixture(scope="module")
def vllm_of_one_process() -> Iterator[None]:
    """vLLM's groups and workspace, with the plug-in."""
    import vllm_layers
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.model_executor import custom_op

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PRETUNED_VLLM", "1")
        custom_op.op_registry_oot.clear()
        vllm_layers.start()
        vllm_layers.register()
        yield
        # Imported by Kimi-K3's modules. An engine that starts later looks for kernels in all modules, and fails in it.
        sys.modules.pop("llvmlite.binding.ffi", None)
        custom_op.op_registry_oot.clear()
        cleanup_dist_env_and_memory()


@pytest.mark.usefixtures("vllm_of_one_process")
@pytest.mark.parametrize("name", FLAGSHIPS)
def test_a_model_s_layer_computes_the_model_s_activation(name: str) -> None:
    flagship = FLAGSHIPS[name]
    with lines() as logged:
        layer = build_flagship(flagship)
    H, wide = layer.w2.shape[1:]
    assert logged == [f"pretuned: runs the MoE layers of E={E} H={H} I={wide} k=2 {flagship.logged}"]
    got = results(flagship, layer)
    assert error_of(got.out, got.twin) < _TOKENS[flagship.quantised]
    assert error_of(got.out, got.without) > 0.15  # a layer that ignored the numbers would fail


@pytest.mark.usefixtures("vllm_of_one_process")
@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.float32, torch.uint8])
def test_scales_of_mxfp4_are_loaded_as_their_bytes(dtype: torch.dtype) -> None:
    """DeepSeek-V4's are e8m0, which a copy into bytes would round to integers; vLLM's own method loads all three."""
    routed = build_flagship(FLAGSHIPS["Kimi-K3"], process=False).routed
    codes = torch.randint(118, 126, (128, 4), dtype=torch.uint8)
    scale = codes if dtype is torch.uint8 else codes.view(torch.float8_e8m0fnu).to(dtype)
    for shard, name in (("w1", "w13"), ("w3", "w13"), ("w2", "w2")):
        parameter = getattr(routed, f"{name}_weight_scale")
        parameter.weight_loader(parameter, scale, f"experts.{name}_weight_scale", shard_id=shard, expert_id=1)
        there = parameter.data[1, 128:] if shard == "w3" else parameter.data[1, :128]
        assert torch.equal(there, codes)


@pytest.mark.usefixtures("vllm_of_one_process")
def test_experts_of_a_deepseek_v4_checkpoint_are_loaded_and_run() -> None:
    """The model's ``load_weights`` loads int8 codes and e8m0 scales, each expert's w1, w3 and w2."""
    from pretuned.runtime import ExpertWeights

    flagship = FLAGSHIPS["DeepSeek-V4-Flash"]
    layer = build_flagship(flagship, process=False)
    matrices = [
        ExpertWeights.quantize(torch.randn(*shape) * size, "mxfp4")
        for shape, size in (((E, 256, 128), 1.0), ((E, 128, 128), 0.1))
    ]
    for which, matrix in zip(("w13", "w2"), matrices, strict=True):
        tensors = {"weight": matrix.codes.view(torch.int8), "weight_scale": matrix.scale.view(torch.float8_e8m0fnu)}
        for name, tensor in tensors.items():
            parameter = getattr(layer.routed, f"{which}_{name}")
            for e in range(E):
                shards = (
                    {"w2": tensor[e]} if which == "w2" else dict(zip(("w1", "w3"), tensor[e].chunk(2), strict=True))
                )
                for shard, half in shards.items():
                    parameter.weight_loader(parameter, half, f"experts.{which}_{name}", shard_id=shard, expert_id=e)
    layer.routed.quant_method.process_weights_after_loading(layer.routed)
    w13, w2 = (matrix.dequantize().float() for matrix in matrices)
    got = results(flagship, layer._replace(w13=w13, w2=w2))
    assert error_of(got.out, got.twin) < 0.01
    assert error_of(got.out, got.without) > 0.15


# vLLM's name, a layer's settings, and vLLM's class with its arguments, or torch where vLLM has none.
_ACTS: list[tuple[str, dict[str, float], str | Callable[[torch.Tensor], torch.Tensor], tuple[Any, ...]]] = [
    ("silu", {}, "SiluAndMul", ()),
    ("silu", {"swiglu_limit": 0.0, "swiglu_alpha": 1.0, "swiglu_beta": 0.0}, "SiluAndMul", ()),
    ("silu", {"swiglu_limit": 10.0}, "SiluAndMulWithClamp", (10.0,)),
    ("silu", {"swiglu_limit": 0.5}, "SiluAndMulWithClamp", (0.5,)),
    ("gelu", {}, "GeluAndMul", ("none",)),
    ("gelu_tanh", {}, "GeluAndMul", ("tanh",)),
    ("relu2", {}, lambda h: torch.relu(h[:, :64]).square() * h[:, 64:], ()),  # no function of vLLM's has it
    ("swigluoai", {}, "SwigluOAIAndMul", ()),
    ("swigluoai", {"swiglu_limit": 7.0, "swiglu_alpha": 1.702, "swiglu_beta": 1.0}, "SwigluOAIAndMul", ()),
    ("swigluoai_uninterleave", {"swiglu_limit": 7.0}, "SiluAndMulWithClamp", (7.0, 1.0, 0.0)),
    (
        "swigluoai_uninterleave",
        {"swiglu_limit": 3.0, "swiglu_alpha": 1.2, "swiglu_beta": 0.5},
        "SiluAndMulWithClamp",
        (3.0, 1.2, 0.5),
    ),
    ("swiglustep", {}, "SwigluStepAndMul", ()),
    ("swiglustep", {"swiglu_limit": 7.0}, "SwigluStepAndMul", (7.0,)),
    ("situ", {"activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0}, "SituAndMul", (4.0, 25.0)),
    ("situ", {"activation_situ_beta": 1.5}, "SituAndMul", (1.5, None)),
    ("situ", {"activation_situ_beta": 4.0, "activation_situ_linear_beta": 0.0}, "SituAndMul", (4.0, None)),
    ("silu_no_mul", {}, torch.nn.functional.silu, ()),
    ("gelu_no_mul", {}, torch.nn.functional.gelu, ()),
    ("gelu_tanh_no_mul", {}, lambda h: torch.nn.functional.gelu(h, approximate="tanh"), ()),
    ("relu2_no_mul", {}, "ReLUSquaredActivation", ()),
]


def moe(name: str, **settings: Any) -> Any:
    """vLLM's config of a layer; one without a gate is refused on the CPU."""
    from vllm.model_executor.layers.fused_moe import config as moe_config
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm_flagships import AsOnCuda

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moe_config, "current_platform", AsOnCuda())
        return config(activation=MoEActivation(name), **settings)


@pytest.mark.parametrize(("name", "settings", "act", "arguments"), _ACTS)
def test_each_activation_is_vllm_s(name: str, settings: dict[str, float], act: Any, arguments: tuple[Any, ...]) -> None:
    from pretuned.integrations.vllm.experts import ActivationNumbers, activation_of
    from pretuned.runtime import Activation
    from pretuned.runtime.ops.activation import activate

    activation = activation_of(moe(name, **settings), ActivationNumbers.of(moe(name, **settings)))
    assert not isinstance(activation, str)
    h = torch.randn(32, 128, generator=torch.Generator().manual_seed(0)) * 15  # limits act on many, on both sides
    wanted = (function(act, arguments) if isinstance(act, str) else act)(h)
    out = activate(h, activation.function, gated=activation.gated, interleaved=activation.interleaved)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-5)
    act = activation.function
    if act.limit is not None or act.linear_beta is not None:  # where these were ignored, it would fail
        beta = {"beta": act.beta} if act.name == "situ" else {}
        plain = (
            Activation(act.name, **beta) if act.alpha == 1.0 else Activation("swiglu", alpha=act.alpha, beta=act.beta)
        )
        unlimited = activate(h, plain, gated=activation.gated, interleaved=activation.interleaved)
        assert float((unlimited - wanted).abs().max() / wanted.abs().max()) > 0.2


def test_all_of_vllm_s_activations_are_tested() -> None:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    assert {name for name, *_ in _ACTS} == {activation.value for activation in MoEActivation}


@pytest.mark.parametrize(
    ("name", "settings", "why"),
    [
        (
            "silu",
            {"swiglu_limit": 10.0, "swiglu_alpha": 1.702},
            "silu has a swiglu_alpha of 1.702, which vLLM's backends do not all read",
        ),
        ("silu", {"swiglu_beta": 1.0}, "silu has a swiglu_beta of 1, which"),
        ("gelu", {"swiglu_limit": 10.0}, "gelu has a swiglu_limit of 10, which"),
        ("swigluoai", {"swiglu_limit": 5.0}, "swigluoai has a swiglu_limit of 5, which"),
        (
            "swigluoai_uninterleave",
            {"swiglu_alpha": 1.702, "swiglu_limit": 0.0},
            "swigluoai_uninterleave has no swiglu_limit",
        ),
        ("swiglustep", {"swiglu_limit": 5.0}, "swiglustep has a swiglu_limit of 5, which"),
        ("situ", {}, "situ has no activation_situ_beta above 0"),
        ("situ", {"activation_situ_beta": 4.0, "swiglu_limit": 10.0}, "situ has a swiglu_limit of 10, which"),
        ("relu2_no_mul", {"swiglu_limit": 10.0}, "relu2_no_mul has a swiglu_limit of 10, which"),
    ],
)
def test_numbers_that_vllm_s_backends_read_differently_stay_with_vllm(
    name: str, settings: dict[str, float], why: str
) -> None:
    from pretuned.integrations.vllm.experts import ActivationNumbers, activation_of

    reason = activation_of(moe(name, **settings), ActivationNumbers.of(moe(name, **settings)))
    assert isinstance(reason, str)
    assert reason.startswith(f"the activation {why}")


def test_older_layers_have_the_numbers_themselves() -> None:
    """In vLLM 0.20 and 0.21 FusedMoEConfig has none."""
    from pretuned.integrations.vllm.experts import ActivationNumbers

    layer, older = SimpleNamespace(swiglu_limit=10.0), SimpleNamespace()
    assert ActivationNumbers.of(older, layer) == ActivationNumbers(swiglu_limit=10.0)
    assert ActivationNumbers.of(SimpleNamespace(swiglu_limit=5), layer) == ActivationNumbers(swiglu_limit=5.0)
    assert ActivationNumbers.of(older, older) == ActivationNumbers()


def test_a_name_that_vllm_adds_stays_with_vllm() -> None:
    from pretuned.integrations.vllm.experts import ActivationNumbers, activation_of

    layer = SimpleNamespace(activation=SimpleNamespace(value="swish9"), is_act_and_mul=True)
    assert str(activation_of(layer, ActivationNumbers())).startswith(
        "the activation swish9 is none of pretuned's (silu, gelu, "
    )
    layer = SimpleNamespace(activation=SimpleNamespace(value="relu2_no_mul"), is_act_and_mul=True)
    assert activation_of(layer, ActivationNumbers()) == "the activation relu2_no_mul in a layer with a gate"
