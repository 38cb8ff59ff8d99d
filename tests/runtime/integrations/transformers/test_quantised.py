"""Experts of transformers' models that stay quantised, with ``experts_implementation="pretuned"``."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from pretuned.artifacts.errors import InputError
from pretuned.artifacts.records.precision import DType
from pretuned.artifacts.records.problem import Layout, Op, Problem
from pretuned.integrations import transformers as ours
from pretuned.integrations.transformers import experts_forward
from pretuned.integrations.transformers.gates import recognise
from pretuned.integrations.transformers.quantised import (
    _codes_of,
    keep_compressed_tensors,
    keep_mxfp4,
    quantised,
    restore,
)
from pretuned.runtime import ExpertWeights
from pretuned.runtime.ops.activation import Activation
from pretuned.runtime.weights.order import ORDERS

pytestmark = [pytest.mark.filterwarnings("ignore")]  # transformers' own
_SIZES = {"vocab_size": 97, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 32,
          "num_key_value_heads": 2, "intermediate_size": 48, "moe_intermediate_size": 128, "num_experts": 4,
          "num_experts_per_tok": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
IDS = torch.tensor([[5, 9, 11, 40, 7, 8, 96], [3, 3, 3, 60, 61, 62, 63]])


@pytest.fixture(scope="module")
def library() -> Any:
    found = pytest.importorskip("transformers", minversion="5.23")
    from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface
    from transformers.integrations.moe import ExpertsInterface

    for interface in (ExpertsInterface, FP8ExpertsInterface):
        interface.register("pretuned", experts_forward)
    return found


def pair(library: Any, **config: Any) -> tuple[Any, Any]:
    """A Qwen3-MoE whose experts transformers has made quantised ones, and the same with what their codes say."""
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

    torch.manual_seed(0)
    given = library.AutoConfig.for_model("qwen3_moe", **_SIZES, experts_implementation="pretuned")
    twin = library.AutoModelForCausalLM.from_config(given).float().eval()
    model = copy.deepcopy(twin)
    how = library.FineGrainedFP8Config(**({"weight_block_size": (128, 128)} | config))
    if config.get("expert_dtype"):
        how.expert_dtype = config["expert_dtype"]
    others = [name for name, one in model.named_modules() if isinstance(one, torch.nn.Linear)]
    replace_with_fp8_linear(model, modules_to_not_convert=others, quantization_config=how)
    for (name, one), whole in zip(experts_of(model), (one for _, one in experts_of(twin)), strict=True):
        made = one.to_empty(device="cpu")
        for part in ("gate_up_proj", "down_proj"):
            w = ExpertWeights.quantize(getattr(whole, part).data, format_of(made, part))
            codes, scale = getattr(made, part), getattr(made, f"{part}_scale_inv")
            codes.data.copy_(w.codes.view(codes.dtype))
            scale.data.view(torch.uint8).copy_(w.scale.view(torch.uint8))
            getattr(whole, part).data.copy_(w.dequantize(torch.float32))
        assert name
    return model, twin


def format_of(experts: Any, part: str) -> str:
    return "mxfp4" if getattr(experts, part).dtype is torch.int8 else "fp8_block"


def experts_of(model: Any) -> list[tuple[str, Any]]:
    return [(name, one) for name, one in model.named_modules() if name.endswith(".experts")]


@pytest.mark.parametrize("config", [{}, {"expert_dtype": "fp4", "scale_fmt": "ue8m0"}], ids=["fp8", "fp4"])
def test_a_model_says_what_its_codes_say(library: Any, config: dict[str, Any]) -> None:
    model, twin = pair(library, **config)
    for _, experts in experts_of(model):
        assert recognise(experts, True) == Activation("silu", True, False)
    said, own = model(IDS).logits, twin(IDS).logits
    torch.testing.assert_close(said, own, rtol=1e-5, atol=1e-5)
    twin.set_experts_implementation("eager")
    torch.testing.assert_close(said, twin(IDS).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("dtype", ["float8_e8m0fnu", "uint8", "int8"])
def test_byte_scales_beside_fp8_codes_are_e8m0(dtype: str, rows: bool) -> None:
    codes, exponents = torch.randn(2, 256, 128).to(torch.float8_e4m3fn), torch.tensor([[[120], [130]]] * 2)
    exponents = exponents.repeat_interleave(128, 1) if rows else exponents
    experts = torch.nn.Module()
    experts.down_proj = torch.nn.Parameter(codes, requires_grad=False)
    scale = exponents.to(torch.uint8).view(getattr(torch, dtype))
    experts.down_proj_scale_inv = torch.nn.Parameter(scale, requires_grad=False)
    found = quantised(experts, "down_proj")
    assert found is not None
    assert found.format == ("fp8_channel_a16" if rows else "fp8_block_a16")
    factor = torch.exp2(exponents.float() - 127)
    wanted = codes.float() * (factor if rows else factor.repeat_interleave(128, 1))
    assert torch.equal(found.dequantize(torch.float32), wanted)


def test_a_gradient_goes_to_what_is_not_quantised(library: Any) -> None:
    model, twin = pair(library)
    for one in (model, twin):
        one(IDS).logits.square().sum().backward()
    name = "model.layers.0.self_attn.q_proj.weight"
    torch.testing.assert_close(model.get_parameter(name).grad, twin.get_parameter(name).grad, rtol=1e-3, atol=1e-4)


def test_codes_are_put_back_before_something_else_reads_them(library: Any) -> None:
    model, _ = pair(library)
    (_, experts), *_ = experts_of(model)
    said, before = model(IDS).logits, {name: one.clone() for name, one in experts.state_dict().items()}

    def prepare() -> None:
        weights = [quantised(experts, part) for part in ("gate_up_proj", "down_proj")]
        assert all(one is not None and one.prepare().order for one in weights)
        assert not same(experts.gate_up_proj, before["gate_up_proj"])

    prepare()
    assert torch.equal(model(IDS).logits, said)
    assert all(same(one, before[name]) for name, one in experts.state_dict().items())
    prepare()
    other = copy.deepcopy(model)  # of what is prepared
    assert torch.equal(other(IDS).logits, said)
    assert same(experts_of(other)[0][1].state_dict()["gate_up_proj"], before["gate_up_proj"])
    prepare()
    experts._apply(lambda one: one.clone())  # as a move to another device does
    assert torch.equal(model(IDS).logits, said)
    prepare()
    experts.load_state_dict(before)
    assert torch.equal(model(IDS).logits, said)
    prepare()
    experts.gate_up_proj = torch.nn.Parameter(before["gate_up_proj"].clone(), requires_grad=False)  # as accelerate
    experts.down_proj = torch.nn.Parameter(before["down_proj"].clone(), requires_grad=False)
    assert torch.equal(model(IDS).logits, said)
    prepare()
    experts.config._experts_implementation = "another"
    for hook in experts._forward_pre_hooks.values():
        hook(experts, ())
    assert same(experts.gate_up_proj, before["gate_up_proj"])
    restore(torch.nn.Module())  # of which nothing is held


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.data.view(torch.uint8), other.view(torch.uint8))


def test_other_blocks_are_refused_by_name(library: Any) -> None:
    model, _ = pair(library)
    (_, experts), *_ = experts_of(model)
    experts.down_proj_scale_inv = torch.nn.Parameter(torch.ones(4, 2, 2))
    with pytest.raises(InputError, match=r"ExpertWeights: scale is of shape \[4, 2, 2\], wanted \[4, 1, 1\]"):
        model(IDS)


def test_own_code_is_none_that_asks_pretuned_again(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """FP8Experts is one class, whose forward transformers wraps anew for each layer."""
    model, _ = pair(library)
    (_, experts), *_ = experts_of(model)
    own = ours._own(type(experts))
    assert own.__qualname__ == "FP8Experts.forward"
    assert own.__code__ is not type(experts).forward.__code__
    experts.down_proj_scale_inv = torch.nn.Parameter(torch.ones(4, 2, 2))
    asked: list[Any] = []

    def linear(_self: Any, x: torch.Tensor, w: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        asked.append(w)
        return x.new_zeros(len(x), w.shape[0])

    monkeypatch.setattr(type(experts), "linear", linear)
    x = torch.randn(3, 128)
    out = ours.experts_or_own(experts, x, torch.tensor([[0], [1], [1]]), torch.ones(3, 1))
    assert len(asked) == 4
    assert not out.any()


def test_gpt_oss_stays_packed(library: Any, tmp_path: Path) -> None:
    import tiny_quantised
    from transformers.quantizers import auto

    saved = tiny_quantised.mxfp4(tmp_path)
    before = auto.AUTO_QUANTIZER_MAPPING["mxfp4"]
    keep_mxfp4()
    keep_mxfp4()
    how = {"experts_implementation": "pretuned", "dtype": torch.float32}
    try:
        model = library.AutoModelForCausalLM.from_pretrained(saved.quantised, **how)
    finally:
        auto.AUTO_QUANTIZER_MAPPING["mxfp4"] = before
    twin = library.AutoModelForCausalLM.from_pretrained(saved.twin, **how)
    (_, experts), *_ = experts_of(model)
    assert {one.dtype for name, one in experts.named_parameters() if "bias" not in name} == {torch.uint8}
    assert recognise(experts, True) == Activation("swiglu_oai", True, True)
    said = model(IDS).logits
    torch.testing.assert_close(said, twin(IDS).logits, rtol=1e-4, atol=1e-4)
    twin.set_experts_implementation("eager")
    torch.testing.assert_close(said, twin(IDS).logits, rtol=1e-3, atol=1e-3)
    weights = quantised(experts, "down_proj")
    assert weights is not None
    blocks = experts.down_proj_blocks.clone()
    weights.prepare()
    assert not torch.equal(experts.down_proj_blocks, blocks)
    assert torch.equal(model(IDS).logits, said)
    model.save_pretrained(tmp_path / "again")
    for name, one in load_file(saved.quantised / "model.safetensors").items():
        assert torch.equal(load_file(tmp_path / "again" / "model.safetensors")[name].to(one.dtype), one), name


def test_prepared_where_it_comes_to_a_gpu(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not in the first step. (Here memory on the host is taken for a GPU's.)"""
    ours.register()
    model, _ = pair(library)
    said = model(IDS).logits
    (_, experts), *_ = experts_of(model)
    before = experts.down_proj.clone()
    monkeypatch.setattr(ours, "_on_gpu", lambda experts: True)
    loaded: list[frozenset[Problem]] = []
    monkeypatch.setattr(ours, "_load", lambda problems, device: loaded.append(problems))
    monkeypatch.setattr(ours, "wants_order", lambda one, device: False)  # a GPU whose forward reads codes as they are
    model.to("cpu")
    assert same(experts.down_proj, before)
    assert {one.layout for problems in loaded for one in problems} == {Layout.STORED}
    loaded.clear()
    monkeypatch.setattr(ours, "wants_order", lambda one, device: True)
    model.to("cpu")
    assert loaded == 2 * [{
        Problem(Op.FORWARD, DType.FP8_BLOCK_A16, 4, N, K) for N, K in ((256, 128), (128, 128))
    }]  # fmt: skip
    assert {quantised(one, "down_proj").order for _, one in experts_of(model)} == {ORDERS["fp8_block"].number}
    assert not same(experts.down_proj, before)
    assert torch.equal(model(IDS).logits, said)
    experts.state_dict()  # puts them back
    assert same(experts.down_proj, before)
    model.eval()  # what from_pretrained ends with
    assert not same(experts.down_proj, before)
    assert torch.equal(model(IDS).logits, said)


@pytest.fixture
def keeping(library: Any) -> Iterator[None]:
    """transformers loads compressed-tensors' experts by pretuned's loader."""
    pytest.importorskip("compressed_tensors")
    from transformers.quantizers import auto

    before = auto.AUTO_QUANTIZER_MAPPING["compressed-tensors"]
    keep_compressed_tensors()
    mine = auto.AUTO_QUANTIZER_MAPPING["compressed-tensors"]
    keep_compressed_tensors()
    assert auto.AUTO_QUANTIZER_MAPPING["compressed-tensors"] is mine
    yield
    auto.AUTO_QUANTIZER_MAPPING["compressed-tensors"] = before


@pytest.mark.parametrize(
    ("made_by", "format"),
    [("int4", "int4_g32"), ("mxfp4", "mxfp4"), ("fp8_block", "fp8_block_a16"), ("fp8_channel", "fp8_channel_a16")],
)
def test_compressed_tensors_experts_stay_codes(
    library: Any, keeping: None, tmp_path: Path, made_by: str, format: str
) -> None:
    """Beside the twin, by pretuned and by transformers' own code; saved as they were."""
    import tiny_quantised

    pair = tiny_quantised.int4(tmp_path) if made_by == "int4" else tiny_quantised.compressed(tmp_path, made_by)
    how = {"experts_implementation": "pretuned", "dtype": torch.float32}
    model = library.AutoModelForCausalLM.from_pretrained(pair.quantised, **how)
    twin = library.AutoModelForCausalLM.from_pretrained(pair.twin, **how)
    (_, experts), *_ = experts_of(model)
    weights = quantised(experts, "gate_up_proj")
    assert weights is not None
    assert weights.format == format
    assert all(one.dtype.itemsize == 1 or one.dtype is torch.int32 or name.endswith(("_scale", "_shape"))
               for name, one in experts.named_parameters())  # fmt: skip
    said = model(IDS).logits
    torch.testing.assert_close(said, twin(IDS).logits, rtol=1e-4, atol=1e-4)
    twin.set_experts_implementation("eager")
    torch.testing.assert_close(said, twin(IDS).logits, rtol=1e-3, atol=1e-3)
    assert weights.prepare().order
    assert torch.equal(model(IDS).logits, said)
    model.save_pretrained(tmp_path / "again")
    saved = load_file(tmp_path / "again" / "model.safetensors")
    for name, one in load_file(pair.quantised / "model.safetensors").items():
        assert torch.equal(saved[name].to(one.dtype), one), name


def test_other_implementations_get_the_experts_that_transformers_makes(
    library: Any, keeping: None, tmp_path: Path
) -> None:
    import tiny_quantised

    pair = tiny_quantised.int4(tmp_path)
    model = library.AutoModelForCausalLM.from_pretrained(pair.quantised, dtype=torch.bfloat16)
    (_, experts), *_ = experts_of(model)
    assert {name: one.dtype for name, one in experts.named_parameters()} == {
        "gate_up_proj": torch.bfloat16, "down_proj": torch.bfloat16,
    }  # fmt: skip
    twin = library.AutoModelForCausalLM.from_pretrained(pair.twin, dtype=torch.bfloat16)
    assert torch.equal(model(IDS).logits, twin(IDS).logits)


@pytest.mark.parametrize(
    ("changed", "kept"),
    [
        ({}, True),
        ({"group_size": 128}, True),
        ({"group_size": 16}, False),
        ({"symmetric": False}, False),  # zero points
        ({"actorder": "weight"}, False),
        ({"num_bits": 8}, False),
    ],
)
@pytest.mark.parametrize("ignore", [[], ["re:.*mlp.experts.*"]])
def test_what_is_kept(library: Any, changed: dict[str, Any], kept: bool, ignore: list[str]) -> None:
    quantization = pytest.importorskip("compressed_tensors.quantization")
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32} | changed
    given = {"format": "pack-quantized", "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}
    config = quantization.QuantizationConfig.model_validate(given | {"ignore": ignore})
    assert (_codes_of(config, "model.layers.3.mlp.experts") is not None) == (kept and not ignore)
