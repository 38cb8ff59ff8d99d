"""Real vLLM engines of quantised checkpoints on the CPU, and what is loaded, prepared and left to vLLM."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import largest_tensors
import pytest
import tiny_quantised
import torch
from tiny_quantised import Pair
from vllm_engine import NEW_TOKENS, Told, config, generate, lines, run

pytestmark = pytest.mark.filterwarnings("default")
_TOKENS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
_STATIC = _TOKENS | {"strategy": "tensor", "dynamic": False}
_FP4 = {
    "num_bits": 4,
    "type": "float",
    "symmetric": True,
    "strategy": "tensor_group",
    "group_size": 16,
    "dynamic": "local",
}
_KINDS: dict[str, Callable[..., Pair]] = {
    "fp8": tiny_quantised.fp8,
    "int4": tiny_quantised.int4,
    "mxfp4": tiny_quantised.mxfp4,
    "awq": tiny_quantised.awq,
    "int4_zero": tiny_quantised.int4_zero,
    "gptq": tiny_quantised.gptq,
    "gptq zeros": tiny_quantised.gptq_zero,
    "int4 static order": functools.partial(tiny_quantised.int4, actorder="static"),
    "mxfp8": tiny_quantised.mxfp8,
    "mxfp8 compressed": functools.partial(tiny_quantised.compressed, how="mxfp8"),
    "mxfp8 padded": functools.partial(tiny_quantised.mxfp8, moe_intermediate_size=96),
    "int4 padded": functools.partial(tiny_quantised.int4, moe_intermediate_size=96),
    "int4_zero padded": functools.partial(tiny_quantised.int4_zero, moe_intermediate_size=96),
    "mxfp4 padded": functools.partial(tiny_quantised.mxfp4, intermediate_size=96),
    "fp8 rows": functools.partial(tiny_quantised.compressed, how="fp8_channel", x=_TOKENS),
    "fp8 rows padded": functools.partial(
        tiny_quantised.compressed, how="fp8_channel", x=_TOKENS, moe_intermediate_size=96
    ),
    "fp8 matrices": tiny_quantised.fp8_tensor,
    "fp8 static": functools.partial(tiny_quantised.compressed, how="fp8_tensor", x=_STATIC),
    "modelopt fp8": functools.partial(tiny_quantised.modelopt, how="FP8"),
    "nvfp4": functools.partial(tiny_quantised.compressed, how="nvfp4"),
    "nvfp4 w4a4 padded": functools.partial(tiny_quantised.compressed, how="nvfp4", x=_FP4, moe_intermediate_size=48),
    "modelopt nvfp4": functools.partial(tiny_quantised.modelopt, how="NVFP4"),
}
_SETTINGS = {"gptq zeros": {"quantization": "moe_wna16"}}
_STATIC_X = "the checkpoint's static scales of x are not used: a call makes scales of its own where it quantises x"
_TOLD = {
    "fp8": "E=8 H=128 I=128 k=2 fp8_block silu",
    "int4": "E=8 H=128 I=128 k=2 int4_g32 silu",
    "mxfp4": "E=8 H=64 I=64 k=2 mxfp4 swiglu_oai",
    "awq": "E=8 H=128 I=128 k=2 int4_g64_zp silu",
    "int4_zero": "E=8 H=128 I=128 k=2 int4_g32_zp silu",
    "gptq": "E=8 H=128 I=128 k=2 int4_g128 silu",
    "int4 static order": "E=8 H=128 I=128 k=2 int4_g32 silu",
    "gptq zeros": "E=8 H=128 I=128 k=2 int4_g128_zp silu",
    "mxfp8": "E=8 H=128 I=128 k=2 mxfp8 silu",
    "mxfp8 compressed": "E=8 H=128 I=128 k=2 mxfp8 silu",
    "mxfp8 padded": "E=8 H=128 I=96 (padded to 128: 33.3% more memory) k=2 mxfp8 silu",
    "int4 padded": "E=8 H=128 I=96 (padded to 128: 33.3% more memory) k=2 int4_g32 silu",
    "int4_zero padded": "E=8 H=128 I=96 (padded to 128: 33.3% more memory) k=2 int4_g32_zp silu",
    "mxfp4 padded": "E=8 H=64 I=96 (padded to 128: 33.3% more memory) k=2 mxfp4 swiglu_oai",
    "fp8 rows": "E=8 H=128 I=128 k=2 fp8_channel silu",
    "fp8 rows padded": "E=8 H=128 I=96 (padded to 128: 33.3% more memory) k=2 fp8_channel silu",
    "fp8 matrices": "E=8 H=128 I=128 k=2 fp8_channel silu",
    "fp8 static": f"E=8 H=128 I=128 k=2 fp8_channel silu; {_STATIC_X}",
    "modelopt fp8": f"E=8 H=128 I=128 k=2 fp8_channel silu; {_STATIC_X}",
    "nvfp4": "E=8 H=128 I=128 k=2 nvfp4 silu",
    "nvfp4 w4a4 padded": "E=8 H=128 I=48 (padded to 64: 33.3% more memory) k=2 nvfp4 silu; x is not quantised to fp4",
    "modelopt nvfp4": "E=8 H=128 I=128 k=2 nvfp4 silu; x is not quantised to fp4",
}


@pytest.fixture(scope="module", autouse=True)
def amx() -> Iterator[None]:
    """vLLM's CPU engine has a backend for fp8 blocks with AMX alone, and none for most formats.

    Here it chooses one, as on a GPU. Its layers are taken, and it never runs.
    """
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend
    from vllm.model_executor.layers.quantization import auto_awq, auto_gptq, modelopt
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
        compressed_tensors_moe_w4a4_nvfp4,
        compressed_tensors_moe_w8a8_mxfp8,
    )
    from vllm.scalar_type import scalar_types

    with pytest.MonkeyPatch.context() as patch:
        for experts_class in (cpu_moe.CPUExpertsFp8, cpu_moe.CPUExpertsMxfp4, cpu_moe.CPUExpertsInt4):
            patch.setattr(experts_class, "_supports_current_device", staticmethod(lambda: True))
            patch.setattr(experts_class, "_supports_quant_scheme", staticmethod(lambda *_: True))
        for experts_class in (compressed_tensors_moe_w4a4_nvfp4, modelopt):
            patch.setattr(experts_class, "select_nvfp4_moe_backend", lambda **_: (NvFp4MoeBackend.MARLIN, None))
        for experts_class in (compressed_tensors_moe_w8a8_mxfp8, modelopt):
            chosen = Fp8MoeBackend.MARLIN, cpu_moe.CPUExpertsFp8
            patch.setattr(experts_class, "select_mxfp8_moe_backend", lambda chosen=chosen, **_: chosen)
        # vLLM refuses GPTQ with zero points where it makes dense layers, which are not quantised here.
        patch.setitem(auto_gptq.AutoGPTQConfig.TYPE_MAP, (4, False), scalar_types.uint4)
        for experts_class in (auto_awq, auto_gptq):
            patch.setattr(experts_class, "check_moe_marlin_supports_layer", lambda *_, **__: True)
        yield


@pytest.fixture(scope="module", params=_KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def pair(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return _KINDS[kind](tmp_path_factory.mktemp(kind))


def calls_of(llm: Any) -> tuple[Told, list[str]]:
    """Return the model's output and the classes by which its layers ran."""
    ran = []
    (model,) = llm.apply_model(lambda model: model)
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if hasattr(method, "moe_kernel"):
            ran.append(type(method.moe_kernel.fused_experts).__name__)
    return generate(llm), ran


class Served(NamedTuple):
    """An engine of a quantised checkpoint; ``second`` and ``in_place`` are of the weights that it loaded again."""

    first: Told
    ran: list[str]
    log: list[str]
    second: Told | None
    in_place: bool


@pytest.fixture(scope="module")
def other(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """The checkpoint with other weights."""
    return _KINDS[kind](tmp_path_factory.mktemp(f"other {kind}"), seed=1)


@pytest.fixture(scope="module")
def wanted(kind: str, other: Pair) -> Told:
    """The tokens of an engine that begins with the other weights."""
    return run(other.quantised, "1", generate, dtype="bfloat16", **_SETTINGS.get(kind, {}))


@pytest.fixture(scope="module")
def twin(pair: Pair) -> Told:
    """The tokens of the model that has the quantised weights' values in bf16."""
    return run(pair.twin, "1", generate, dtype="bfloat16")


@pytest.fixture(scope="module")
def served(kind: str, pair: Pair, other: Pair, twin: Told) -> Served:
    """One engine for both tests: it takes seconds to start. It is not the first: that sets up vLLM's loggers."""

    def ask(llm: Any) -> Served:
        first, ran = calls_of(llm)
        said, before = list(log), pointers(llm)
        if "mxfp4" in kind:  # vLLM 0.32 itself says something else after gpt-oss, unquantised as well, is loaded again
            return Served(first, ran, said, None, True)
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other.quantised)})
        return Served(first, ran, said, generate(llm), before == pointers(llm))

    with lines() as log:
        settings = {"dtype": "bfloat16", **_SETTINGS.get(kind, {})}
        return run(pair.quantised, "1", ask, **settings, enable_prefix_caching=False)


def test_a_quantised_model_says_what_its_twin_says(kind: str, pair: Pair, served: Served, twin: Told) -> None:
    assert set(served.ran) == {"PretunedQuantisedExperts"}
    assert served.log == [f"pretuned: runs the MoE layers of {_TOLD[kind]}"]
    if "fp8" in kind and "mx" not in kind:  # whose tokens are quantised, too
        assert served.first != twin
        assert served.first.logprobs[1][0] == pytest.approx(twin.logprobs[1][0], abs=0.05)
    else:
        assert served.first == twin  # the same arithmetic, of the same weights
    own = run(pair.twin, "0", generate, dtype="bfloat16")
    assert served.first.logprobs[1][0] == pytest.approx(own.logprobs[1][0], abs=0.05)
    assert len(served.first.tokens[0]) == NEW_TOKENS


@pytest.mark.parametrize("kind", [kind for kind in _KINDS if "mxfp4" not in kind], indirect=True, scope="module")
def test_weights_that_are_loaded_again(served: Served, wanted: Told) -> None:
    assert served.first != served.second
    assert served.second == wanted
    assert served.in_place


@pytest.mark.parametrize("kind", ["fp8", "int4_zero", "nvfp4"], indirect=True, scope="module")
def test_weights_come_again_in_any_order(kind: str, pair: Pair, other: Pair, wanted: Told) -> None:
    """By name, as a trainer sends them; a refit that is refused changes nothing."""
    from safetensors.torch import load_file

    settings = {"dtype": "bfloat16", **_SETTINGS.get(kind, {})}
    (tensors,) = (load_file(path) for path in other.quantised.glob("*.safetensors"))

    def ask(llm: Any) -> list[Told]:
        results, before = [], pointers(llm)
        for names in (sorted(tensors, reverse=True), random.Random(3).sample(sorted(tensors), len(tensors))):
            llm.collective_rpc("reload_weights", kwargs={"weights_path": str(pair.quantised)})
            assert generate(llm) != wanted
            changed = ((name, tensors[name]) for name in names)
            llm.collective_rpc("reload_weights", kwargs={"weights_iterator": changed})
            results.append(generate(llm))
        assert pointers(llm) == before
        return results

    for said in run(pair.quantised, "1", ask, **settings, enable_prefix_caching=False):
        assert said == wanted


@pytest.mark.parametrize("kind", ["fp8", "int4", "nvfp4"], indirect=True, scope="module")
def test_weights_are_loaded_again_after_sleep(kind: str, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the worker's own calls: into the memory that graphs read, an expert at a time.

    Level 2 keeps nothing. vLLM's worker on a CPU warns that it does not sleep, so the weights are overwritten here;
    tests/gpu/test_refit_in_vllm.py has its allocator. What vLLM itself makes to load a layer is not counted.
    """
    from pretuned.integrations.vllm.quantised import PretunedQuantisedMethod

    process, seen = PretunedQuantisedMethod.process_weights_after_loading, []

    def spied(self: Any, layer: Any) -> None:
        with largest_tensors.Spy() as spy:
            process(self, layer)
        seen.append(spy.most)

    def ask(llm: Any) -> tuple[list[Told], int]:
        result, before = [generate(llm)], pointers(llm)
        llm.collective_rpc("sleep", kwargs={"level": 1})
        llm.collective_rpc("wake_up")
        result.append(generate(llm))
        llm.collective_rpc("sleep", kwargs={"level": 2})
        for tensor in read_by_kernels(llm):
            tensor.view(torch.uint8).fill_(0x5A)
        llm.collective_rpc("wake_up")
        seen.clear()
        llm.collective_rpc("reload_weights")
        result.append(generate(llm))
        assert pointers(llm) == before
        return result, max(tensor.nbytes for tensor in read_by_kernels(llm))

    monkeypatch.setattr(PretunedQuantisedMethod, "process_weights_after_loading", spied)
    got, whole = run(pair.quantised, "1", ask, dtype="bfloat16", enable_prefix_caching=False)
    assert got[1:] == got[:1] * 2
    assert len(seen) == 2  # layers
    assert max(seen) < whole


def read_by_kernels(llm: Any) -> list[torch.Tensor]:
    """Return the tensors that kernels of all layers read."""
    (model,) = llm.apply_model(lambda model: model)
    results = []
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        for weights in kernel.fused_experts.weights if kernel is not None else ():
            results += [*weights.tensors().values(), *([] if weights.kernel_scale is None else [weights.kernel_scale])]
    return results


def pointers(llm: Any) -> list[int]:
    """Where what a layer's kernels read lies."""
    return [tensor.data_ptr() for tensor in read_by_kernels(llm)]


@pytest.mark.parametrize(
    ("name", "has", "changes", "message"),
    [
        ("Fp8MoEMethod", {"weight_block_size": [1, 32]}, {}, "fp8 with a scale for each [1, 32]"),
        ("Fp8MoEMethod", {"weight_block_size": [128, 128]}, {"intermediate_size": 192}, "192, is no multiple of 128"),
        ("Mxfp4MoEMethod", {}, {"hidden_dim": 96}, "the hidden size, 96, is no multiple of 64"),
        ("Mxfp4MoEMethod", {}, {"intermediate_size": 720}, "720, is no multiple of 32"),
        (
            "CompressedTensorsWNA16MoEMethod",
            {"num_bits": 4, "group_size": 128},
            {"intermediate_size": 352},
            "352, is no multiple of 128",
        ),
        ("Mxfp4MoEMethod", {}, {"swiglu_alpha": 1.5}, "the activation silu has a swiglu_alpha of 1.5, which vLLM's"),
        ("Mxfp4MoEMethod", {}, {"moe_backend": "marlin"}, "--moe-backend marlin asks for it"),
        ("CompressedTensorsWNA16MoEMethod", {"num_bits": 8, "group_size": 32}, {}, "8 bits in groups of 32"),
        ("CompressedTensorsWNA16MoEMethod", {"num_bits": 4, "group_size": -1}, {}, "4 bits in groups of -1"),
        ("AutoAWQMoEMethod", {"weight_bits": 8, "group_size": 64, "zero_point": True}, {}, "8 bits in groups of 64"),
        ("AutoAWQMoEMethod", {"weight_bits": 4, "group_size": 64, "zero_point": False}, {}, "AWQ without zero points"),
        ("AutoGPTQMoEMethod", {"weight_bits": 8, "group_size": 128, "is_sym": True}, {}, "8 bits in groups of 128"),
        (
            "MoeWNA16Method",
            {
                "weight_bits": 4,
                "group_size": 128,
                "has_zp": True,
                "linear_quant_method": "gptq",
                "full_config": {"desc_act": True},
            },
            {},
            "groups of another order (desc_act, g_idx)",
        ),
        (
            "MoeWNA16Method",
            {
                "weight_bits": 4,
                "group_size": 128,
                "has_zp": True,
                "linear_quant_method": "gptq",
                "full_config": {"checkpoint_format": "marlin"},
            },
            {},
            "checkpoint_format is 'marlin'",
        ),
        (
            "MoeWNA16Method",
            {"weight_bits": 4, "group_size": 128, "has_zp": False, "linear_quant_method": "awq", "full_config": {}},
            {},
            "AWQ without zero points",
        ),
        ("ModelOptFp8MoEMethod", {"quant_method": "FP8_PB_WO"}, {}, "modelopt's FP8_PB_WO"),
        ("ModelOptNvFp4FusedMoE", {"group_size": 32}, {}, "nvfp4 in groups of 32: pretuned serves groups of 16"),
        ("AutoGPTQMoEMethod", {"weight_bits": 4, "group_size": 128, "is_sym": True, "desc_act": True}, {}, "desc_act"),
        (
            "CompressedTensorsWNA16MarlinMoEMethod",
            {"num_bits": 4, "group_size": 32, "actorder": "group"},
            {},
            "actorder",
        ),
    ],
)
def test_what_stays_with_vllm_and_why(name: str, has: dict[str, Any], changes: dict[str, Any], message: str) -> None:
    from pretuned.integrations.vllm.quantised import take

    sizes = {
        "num_experts": 8,
        "num_local_experts": 8,
        "num_logical_experts": 8,
        "hidden_dim": 256,
        "intermediate_size": 256,
    }
    quant = SimpleNamespace(symmetric=has.pop("symmetric", True), actorder=has.pop("actorder", None))
    own = type(name, (), {})()
    own.__dict__.update(has, moe=config(**(sizes | changes)), weight_quant=quant, wna16_backend="Marlin")
    own.quant_config = SimpleNamespace(**has)
    with lines() as said:
        assert take(own, SimpleNamespace(), everywhere=True) is own
    assert len(said) == 1
    assert said[0].startswith("pretuned: leaves the MoE layers of E=8 H=")
    assert " to vLLM's Marlin backend: " in said[0]
    assert message in said[0]


def test_methods_of_other_formats_are_passed_over_in_silence() -> None:
    from pretuned.integrations.vllm.quantised import take

    own = SimpleNamespace(moe=None)
    with lines() as said:
        assert take(own, SimpleNamespace(), everywhere=True) is own
    assert not said


def loaded(scale: int, width: int = 64) -> tuple[Any, Any]:
    """pretuned's method for a layer in mxfp4, and the layer, whose scales are all 2**(scale - 127)."""
    import torch

    from pretuned.integrations.vllm.experts import ActivationNumbers, activation_of
    from pretuned.integrations.vllm.quantised import _FORMATS, PretunedQuantisedMethod

    moe, layer = config(hidden_dim=64, intermediate_size=width), torch.nn.Module()
    method = PretunedQuantisedMethod(moe, _FORMATS["Mxfp4MoEMethod"](None), activation_of(moe, ActivationNumbers()))
    method.create_weights(layer, 4, 64, width, torch.bfloat16)
    for name in ("w13_weight_scale", "w2_weight_scale"):
        getattr(layer, name).data.fill_(scale)
    return method, layer


def test_scales_that_no_kernel_takes_are_an_error_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from pretuned.artifacts.errors import InputError
    from pretuned.integrations.vllm import quantised

    monkeypatch.setattr(quantised, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    method, layer = loaded(scale=130)
    with pytest.raises(InputError, match=r"no kernel takes the scales of .*mxfp4.* PRETUNED_VLLM=0 serves"):
        method.process_weights_after_loading(layer)


def test_weights_loaded_again_in_another_order_are_an_error() -> None:
    from pretuned.artifacts.errors import InputError
    from pretuned.runtime import ExpertWeights

    method, layer = loaded(scale=130)  # which stay as they are
    _, first = loaded(scale=120)
    held = tuple(
        ExpertWeights.mxfp4(
            first.get_parameter(f"{which}_weight").data, getattr(first, f"{which}_weight_scale").data
        ).prepare()
        for which in ("w13", "w2")
    )
    assert all(matrix.order for matrix in held)
    method.moe_kernel = SimpleNamespace(fused_experts=SimpleNamespace(weights=held))
    with pytest.raises(InputError, match=r"the weights loaded again are .* the first were .*: start anew"):
        method.process_weights_after_loading(layer)


@pytest.mark.parametrize(("tp", "rank"), [(2, 0), (2, 1), (4, 0), (4, 3), (8, 0), (8, 7)])
def test_each_rank_of_gpt_oss_has_its_blocks_and_zeros(tp: int, rank: int) -> None:
    """With garbage where the loader writes nothing, as when weights are loaded again."""
    import torch
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    from pretuned.integrations.vllm import quantised
    from pretuned.runtime import ExpertWeights

    E, H, whole, (width, wide) = 2, 64, 2880, {2: (1440, 1472), 4: (736, 768), 8: (384, 384)}[tp]
    first, last = rank * width, min((rank + 1) * width, whole)
    draw = functools.partial(torch.randint, generator=torch.Generator().manual_seed(rank), dtype=torch.uint8)
    settings = {
        "w13_weight": draw(0, 256, (E, 2 * whole, H // 2)),
        "w13_weight_scale": draw(120, 128, (E, 2 * whole, H // 32)),
        "w2_weight": draw(0, 256, (E, H, whole // 2)),
        "w2_weight_scale": draw(120, 128, (E, H, whole // 32)),
        "w13_bias": torch.randn(E, 2 * whole).bfloat16(),
        "w2_bias": torch.randn(E, H).bfloat16(),
    }
    moe = config(
        hidden_dim=H,
        num_experts=E,
        num_local_experts=E,
        num_logical_experts=E,
        has_bias=True,
        intermediate_size=whole,
        parallel={"tp_size": tp, "tp_rank": rank},
        activation=MoEActivation("swigluoai"),
    )
    own, layer = type("GptOssMxfp4MoEMethod", (), {"moe": moe, "mxfp4_backend": "Marlin"})(), torch.nn.Module()
    with lines() as logged:
        method = quantised.take(own, SimpleNamespace(), everywhere=True)
    more = "" if wide == whole // tp else f" (padded to {wide}: {wide * tp / whole - 1:.1%} more memory)"
    assert logged == [f"pretuned: runs the MoE layers of E=2 H=64 I={whole // tp}{more} k=2 mxfp4 swiglu_oai"]
    sizes = method.maybe_roundup_sizes(H, moe.intermediate_size_per_partition, moe.in_dtype, moe.moe_parallel_config)
    assert sizes == (H, width)
    moe.intermediate_size_per_partition = width  # as vLLM's layer does
    method.create_weights(layer, E, H, width, torch.bfloat16)
    for name, parameter in layer.named_parameters():
        parameter.data.view(torch.uint8).fill_(255 if "scale" in name else 119)
        part = settings[name]
        if name.startswith("w13"):
            part = part[:, 2 * first : 2 * last]
        elif name != "w2_bias":
            part = part[..., first * part.shape[2] // whole : last * part.shape[2] // whole]
        parameter.data[tuple(map(slice, part.shape))].copy_(part)
        settings[name] = part.contiguous()
    prepared = [method._prepared(layer, which) for which in ("w13", "w2")]
    method._pad_bias(layer)
    assert all(matrix.is_prepared for matrix in prepared)
    n = last - first
    w13 = prepared[0].dequantize()
    assert torch.equal(
        w13[:, : 2 * n], ExpertWeights.mxfp4(settings["w13_weight"], settings["w13_weight_scale"]).dequantize()
    )
    assert w13.shape == (E, 2 * wide, H)
    assert not w13[:, 2 * n :].any()
    w2 = prepared[1].dequantize()
    plain = ExpertWeights.mxfp4(settings["w2_weight"], settings["w2_weight_scale"])
    assert torch.equal(w2[..., :n], plain.dequantize())
    assert not w2[..., n:].any()
    assert torch.equal(layer.w13_bias[:, : 2 * n], settings["w13_bias"])
    assert layer.w13_bias.shape == (E, 2 * wide)
    assert not layer.w13_bias[:, 2 * n :].any()


class PaddedMethod:
    """A method like vLLM's, whose parameters may be wider than the checkpoint's, and which has K before N in w2's."""

    def __init__(self, more: int) -> None:
        self.more = more

    def maybe_roundup_sizes(self, hidden: int, intermediate: int, *_: Any) -> tuple[int, int]:
        return hidden + 64, intermediate + self.more

    def create_weights(self, layer: Any, hidden_size: int, intermediate_size_per_partition: int, **kwargs: Any) -> None:
        import torch

        E, H, I = kwargs["num_experts"], hidden_size, intermediate_size_per_partition  # noqa: E741
        self.params_dtype = kwargs["params_dtype"]
        for name, shape in {
            "w13_weight": (E, 2 * I, H // 2),
            "w13_weight_scale": (E, 2 * I, H // 32),
            "w2_weight": (E, I // 2, H),
            "w2_weight_scale": (E, -(-I // 32), H),
        }.items():
            parameter = torch.nn.Parameter(torch.full(shape, 255, dtype=torch.uint8), requires_grad=False)
            parameter.is_transposed = name.startswith("w2_")
            layer.register_parameter(name, parameter)

    def process_weights_after_loading(self, layer: Any) -> None:
        self.processed = {name: parameter.data for name, parameter in layer.named_parameters()}


@pytest.mark.parametrize("fails", ["a scale", "the first token"])
@pytest.mark.parametrize(("width", "more"), [(64, 32), (96, 0), (96, 16), (96, 64)])  # pretuned pads 96 to 128
def test_what_can_not_be_run_goes_to_vllm_s_own_method_in_its_layout(
    fails: str, width: int, more: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from pretuned.integrations.vllm import PLUG_IN, quantised

    PLUG_IN._logged.clear()
    method, layer = loaded(130 if fails == "a scale" else 120, width)
    if fails == "a scale":
        monkeypatch.setattr(quantised, "current_platform", SimpleNamespace(is_cuda=lambda: True))
    else:
        monkeypatch.setattr(quantised, "_kernel", lambda *_: SimpleNamespace(fused_experts=SimpleNamespace()))
    method.own = own = PaddedMethod(more)
    layer.hidden_size, replaced = 64, []
    layer._replace_quant_method = replaced.append
    for name in ("w13_weight", "w2_weight"):
        getattr(layer, name).data.random_(0, 256, generator=torch.Generator().manual_seed(0))
    before = {name: parameter.data.clone() for name, parameter in layer.named_parameters()}
    with lines() as logged:
        method.process_weights_after_loading(layer)
    assert replaced == [own]
    assert layer.hidden_size == method.moe.hidden_dim == 128
    assert method.moe.intermediate_size_per_partition == width + more
    assert own.params_dtype is torch.bfloat16
    for name, columns in (("w13_weight", 32), ("w13_weight_scale", 2)):
        for half, of in zip(own.processed[name].chunk(2, 1), before[name].chunk(2, 1), strict=True):
            assert torch.equal(half[:, :width, :columns], of)
            assert name != "w13_weight" or not half[:, width:].any()
            assert not half[:, :, columns:].any()
    for name, columns in (("w2_weight", width // 2), ("w2_weight_scale", width // 32)):
        assert torch.equal(own.processed[name].mT[:, :64, :columns], before[name])
    assert not own.processed["w2_weight"].mT[:, :, width // 2 :].any()
    (line,) = logged
    assert line.startswith("pretuned: MoE layers stay with vLLM, as pretuned could not prepare or run a layer: ")
    assert ("no kernel takes the scales of" in line) == (fails == "a scale")


class SameMethod:
    """A method like vLLM's for int4, whose parameters have the checkpoint's shapes."""

    def __init__(self, shapes: dict[str, Any], is_turned: bool) -> None:
        self.shapes, self.is_turned = shapes, is_turned

    def maybe_roundup_sizes(self, hidden: int, intermediate: int, *_: Any) -> tuple[int, int]:
        return hidden, intermediate

    def create_weights(self, layer: Any, **_: Any) -> None:
        import torch

        for name, like in self.shapes.items():
            parameter = torch.nn.Parameter(torch.full_like(like, 7), requires_grad=False)
            parameter.is_transposed = self.is_turned
            layer.register_parameter(name, parameter)

    def process_weights_after_loading(self, layer: Any) -> None:
        self.processed = {name: parameter.data for name, parameter in layer.named_parameters()}


@pytest.mark.parametrize("fails", ["the first product", "the second product", "the first token"])
@pytest.mark.parametrize("name", ["AutoAWQMoEMethod", "AutoGPTQMoEMethod", "CompressedTensorsWNA16MoEMethod"])
def test_packed_weights_that_can_not_be_run_go_to_vllm_s_own_method(
    name: str, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    from pretuned.integrations.vllm import PLUG_IN, quantised
    from pretuned.integrations.vllm.experts import ActivationNumbers, activation_of

    PLUG_IN._logged.clear()
    how = SimpleNamespace(weight_bits=4, group_size=32, zero_point=True, is_sym=True, desc_act=False)
    asked = SimpleNamespace(
        quant_config=how, num_bits=4, group_size=32, weight_quant=SimpleNamespace(symmetric=False, actorder=None)
    )
    moe, layer = config(hidden_dim=64, intermediate_size=64), torch.nn.Module()
    format = quantised._FORMATS[name](asked)
    assert isinstance(format, quantised.Format)
    method = quantised.PretunedQuantisedMethod(moe, format, activation_of(moe, ActivationNumbers()))
    method.create_weights(layer, 4, 64, 64, torch.bfloat16)
    layer._loaded_expert_biases = {"w13_bias", "w2_bias"}
    g = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        drawn = torch.randint(-(1 << 31), 1 << 31, parameter.shape, generator=g)
        parameter.data.copy_(drawn if parameter.dtype is torch.int32 else torch.rand(parameter.shape, generator=g))
    loaded = {key: parameter.data.clone() for key, parameter in layer.named_parameters()}
    method.own = own = SameMethod(loaded, bool(format.packing))
    layer._replace_quant_method = lambda _: None
    prepare, calls = quantised.prepared, iter(range(2))
    at = ["the first product", "the second product", "the first token"].index(fails)

    def fails_at(*args: Any, **named: Any) -> Any:
        if next(calls) == at:
            raise RuntimeError("made to fail")
        return prepare(*args, **named)

    monkeypatch.setattr(quantised, "prepared", fails_at)
    monkeypatch.setattr(quantised, "_kernel", lambda *_: SimpleNamespace(fused_experts=SimpleNamespace()))
    with lines() as logged:
        method.process_weights_after_loading(layer)
    assert own.processed.keys() == loaded.keys()
    assert all(torch.equal(own.processed[key], tensor) for key, tensor in loaded.items())
    assert not method._loaded
    (line,) = logged
    assert line.startswith("pretuned: MoE layers stay with vLLM, as pretuned could not prepare or run a layer: ")


class StaticMethod(SameMethod):
    """A method like vLLM's, whose parameters have scales of x, which its loader writes."""

    def create_weights(self, layer: Any, **kwargs: Any) -> None:
        import torch

        super().create_weights(layer, **kwargs)
        for which in ("w13", "w2"):
            parameter = torch.nn.Parameter(torch.ones(4, 2), requires_grad=False)
            parameter.weight_loader = self.load
            layer.register_parameter(f"{which}_input_scale", parameter)

    def load(self, param: Any, scale: Any, name: str, *, shard_id: str, expert_id: int) -> None:
        param.data[expert_id, int(shard_id == "w3")] = scale


def test_gate_and_up_with_two_global_scales_go_to_vllm_s_own_method_with_the_scales_of_x() -> None:
    import torch

    from pretuned.integrations.vllm import PLUG_IN, quantised
    from pretuned.integrations.vllm.experts import ActivationNumbers, activation_of

    PLUG_IN._logged.clear()
    moe, layer = config(hidden_dim=64, intermediate_size=64), torch.nn.Module()
    format = quantised._FORMATS["ModelOptNvFp4FusedMoE"](SimpleNamespace())
    assert isinstance(format, quantised.Format)
    method = quantised.PretunedQuantisedMethod(moe, format, activation_of(moe, ActivationNumbers()))
    method.create_weights(layer, 4, 64, 64, torch.bfloat16, weight_loader=lambda *_: None)
    layer.w13_weight_scale_2.data.fill_(0.5)
    layer.w13_weight_scale_2.data[2, 1] = 0.25
    loaded = {name: parameter.data.clone() for name, parameter in layer.named_parameters() if "input" not in name}
    method.own = own = StaticMethod(loaded, is_turned=False)
    for shard, scale in (("w1", 2.0), ("w3", 3.0)):
        parameter = layer.w13_input_scale
        parameter.weight_loader(parameter, torch.tensor(scale), "experts.w13_input_scale", shard_id=shard, expert_id=1)
    layer._replace_quant_method = lambda _: None
    with lines() as logged:
        method.process_weights_after_loading(layer)
    assert {name for name, tensor in loaded.items() if not torch.equal(own.processed[name], tensor)} == set()
    assert own.processed["w13_input_scale"].tolist() == [[1, 1], [2, 3], [1, 1], [1, 1]]
    (line,) = logged
    assert "gate and up of expert 2 have the global scales [0.5, 0.25], wanted one for both" in line
