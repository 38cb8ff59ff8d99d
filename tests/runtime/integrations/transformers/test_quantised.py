"""Experts of transformers' models that stay quantised, with ``experts_implementation="pretuned"``."""

from __future__ import annotations

import copy
import gc
import random
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import largest_tensors
import pytest
import torch
from emulated_kernels import bundle_of, variant_and_code
from host_gpu import Device
from safetensors.torch import load_file

from pretuned.artifacts.codec import encode
from pretuned.artifacts.errors import InputError, ProblemNotInBundle
from pretuned.artifacts.records import DType, Layout, Op
from pretuned.integrations import transformers as ours
from pretuned.integrations.transformers import experts_forward
from pretuned.integrations.transformers.gates import recognise
from pretuned.integrations.transformers.packed import keep_compressed_tensors, keep_mxfp4
from pretuned.integrations.transformers.quantised import prepare_parameters, quantised, refresh, restore
from pretuned.kernels.activations import Activation
from pretuned.kernels.spec import Config, Loads, Schedule, Spec
from pretuned.runtime import ExpertWeights
from pretuned.runtime.ops.activation import RowActivation
from pretuned.runtime.weights.prepared_layout import ORDERS

pytestmark = [pytest.mark.filterwarnings("ignore")]  # transformers' own
_SIZES = {
    "vocab_size": 97,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "head_dim": 32,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "moe_intermediate_size": 128,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IDS = torch.tensor([[5, 9, 11, 40, 7, 8, 96], [3, 3, 3, 60, 61, 62, 63]])


@pytest.fixture(scope="module")
def library() -> Any:
    library = pytest.importorskip("transformers", minversion="5.23")
    from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface
    from transformers.integrations.moe import ExpertsInterface

    for interface in (ExpertsInterface, FP8ExpertsInterface):
        interface.register("pretuned", experts_forward)
    return library


def pair(library: Any, **config: Any) -> tuple[Any, Any]:
    """A Qwen3-MoE whose experts transformers has made quantised ones, and the same with what their codes say."""
    from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

    torch.manual_seed(0)
    model_config = library.AutoConfig.for_model("qwen3_moe", **_SIZES, experts_implementation="pretuned")
    twin = library.AutoModelForCausalLM.from_config(model_config).float().eval()
    model = copy.deepcopy(twin)
    how = library.FineGrainedFP8Config(**({"weight_block_size": (128, 128)} | config))
    if config.get("expert_dtype"):
        how.expert_dtype = config["expert_dtype"]
    others = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    replace_with_fp8_linear(model, modules_to_not_convert=others, quantization_config=how)
    for (name, experts), whole in zip(experts_of(model), (experts for _, experts in experts_of(twin)), strict=True):
        built = experts.to_empty(device="cpu")
        for part in ("gate_up_proj", "down_proj"):
            codes, scale = getattr(built, part), getattr(built, f"{part}_scale_inv")
            if built.block_size is None:
                matrices(getattr(whole, part).data, codes.data, scale.data)
                continue
            w = ExpertWeights.quantize(getattr(whole, part).data, format_of(built, part))
            codes.data.copy_(w.codes.view(codes.dtype))
            scale.data.view(torch.uint8).copy_(w.scale.view(torch.uint8))
            getattr(whole, part).data.copy_(w.dequantize(torch.float32))
        assert name
    return model, twin


def matrices(w: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> None:
    """fp8 with a scale for each matrix, of which gate and up are two; w is what they say afterwards."""
    parts = w.view(w.shape[0], scale.shape[1], -1)
    scale.copy_(parts.abs().amax(2, keepdim=True) / 448)
    codes.copy_((parts / scale).view(w.shape).to(codes.dtype))
    w.copy_((codes.float().view(parts.shape) * scale).view(w.shape))


def format_of(experts: Any, part: str) -> str:
    if getattr(experts, part).dtype is torch.int8:
        return "mxfp4"
    return "fp8_channel" if experts.block_size is None else "fp8_block"


def experts_of(model: Any) -> list[tuple[str, Any]]:
    return [(name, module) for name, module in model.named_modules() if name.endswith(".experts")]


BOTH = pytest.mark.parametrize("config", [{}, {"expert_dtype": "fp4", "scale_fmt": "ue8m0"}], ids=["fp8", "fp4"])
EVERY = pytest.mark.parametrize(
    "config",
    [{}, {"weight_block_size": None}, {"expert_dtype": "fp4", "scale_fmt": "ue8m0"}],
    ids=["fp8", "matrices", "fp4"],
)


@EVERY
def test_a_model_says_what_its_codes_say(library: Any, config: dict[str, Any]) -> None:
    model, twin = pair(library, **config)
    for _, experts in experts_of(model):
        assert recognise(experts, True) == RowActivation(Activation("silu"), True, False)
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
    packed = quantised(experts, "down_proj")
    assert packed is not None
    assert packed.format == ("fp8_channel_a16" if rows else "fp8_block_a16")
    factor = torch.exp2(exponents.float() - 127)
    wanted = codes.float() * (factor if rows else factor.repeat_interleave(128, 1))
    assert torch.equal(packed.dequantize(torch.float32), wanted)


def test_a_gradient_goes_to_what_is_not_quantised(library: Any) -> None:
    model, twin = pair(library)
    for either in (model, twin):
        either(IDS).logits.square().sum().backward()
    name = "model.layers.0.self_attn.q_proj.weight"
    torch.testing.assert_close(model.get_parameter(name).grad, twin.get_parameter(name).grad, rtol=1e-3, atol=1e-4)


def prepare(model: Any, parts: tuple[str, str] = ("gate_up_proj", "down_proj")) -> None:
    """Prepare all experts, as a GPU whose kernels want that has it."""
    for _, experts in experts_of(model):
        prepare_parameters(experts, parts, lambda w: True)
        assert all(quantised(experts, part).is_prepared for part in parts)


@EVERY
def test_state_dicts_speak_of_the_checkpoint_s_layout(library: Any, config: dict[str, Any]) -> None:
    model, _ = pair(library, **config)
    said, before = model(IDS).logits, {name: tensor.clone() for name, tensor in model.state_dict().items()}
    prepare(model)
    assert torch.equal(model(IDS).logits, said)
    for keep in (False, True):
        state = model.state_dict(keep_vars=keep)
        assert state.keys() == before.keys()
        assert all(tensor.dtype is before[name].dtype and same(tensor, before[name]) for name, tensor in state.items())
    assert all(matrix.codes.dim() == 6 for _, each in experts_of(model) for matrix in [quantised(each, "down_proj")])
    others = {
        name: tensor.flip(0) if name.endswith((".gate_up_proj", ".down_proj")) else tensor
        for name, tensor in ((name, raw(tensor)) for name, tensor in before.items())
    }
    others = {name: other.view(before[name].dtype) for name, other in others.items()}
    fresh, _ = pair(library, **config)
    fresh.load_state_dict(others)
    wanted = fresh(IDS).logits
    assert not torch.equal(wanted, said)
    model.load_state_dict(others)  # in place
    assert all(quantised(each, "down_proj").is_prepared for _, each in experts_of(model))
    assert torch.equal(model(IDS).logits, wanted)
    model.load_state_dict(before, assign=True)  # the parameters are those of the state
    assert torch.equal(model(IDS).logits, said)
    prepare(model)
    assert torch.equal(model(IDS).logits, said)


@BOTH
def test_parts_of_a_state_are_loaded(library: Any, config: dict[str, Any]) -> None:
    model, _ = pair(library, **config)
    fresh = copy.deepcopy(model)
    prepare(model)
    (_, experts), *_ = experts_of(model)
    (_, others), *_ = experts_of(fresh)
    for name in ("down_proj", "gate_up_proj_scale_inv"):
        part = {name: raw(others.state_dict()[name]).flip(0).view(others.state_dict()[name].dtype)}
        for each in (experts, others):
            each.load_state_dict(part, strict=False)
        assert torch.equal(model(IDS).logits, fresh(IDS).logits)
    large = {name: tensor.clone() for name, tensor in others.state_dict().items()}
    large["down_proj_scale_inv"].view(torch.uint8).fill_(0x90) if config else large["down_proj_scale_inv"].fill_(128)
    for each in (experts, others):
        each.load_state_dict(large)
    assert not quantised(experts, "down_proj").is_prepared  # there is no room for such scales
    assert torch.equal(model(IDS).logits, fresh(IDS).logits)


@BOTH
def test_a_state_is_written_into_the_prepared_parameters(library: Any, config: dict[str, Any]) -> None:
    """Its names in any order, and a layer's alone: the numbers are a new model's, and no copy of a product is made."""
    model, _ = pair(library, **config)
    before = model.state_dict()
    state = {
        name: raw(tensor).flip(0).view(tensor.dtype) if "_proj" in name else tensor for name, tensor in before.items()
    }
    fresh = copy.deepcopy(model)
    fresh.load_state_dict(state)
    prepare(model)
    held = [quantised(experts, "gate_up_proj").codes for _, experts in experts_of(model)]
    names = random.Random(1).sample(sorted(state), len(state))
    for some in ([name for name in names if ".layers.0." in name], names):
        with largest_tensors.Spy() as spy:
            model.load_state_dict({name: state[name] for name in some}, strict=False)
        assert spy.most < held[0].nbytes
    assert torch.equal(model(IDS).logits, fresh(IDS).logits)
    now = [quantised(experts, "gate_up_proj").codes for _, experts in experts_of(model)]
    assert [tensor.data_ptr() for tensor in now] == [tensor.data_ptr() for tensor in held]


def test_a_nan_code_of_a_state_is_loaded_as_nan(library: Any) -> None:
    """The kernels of prepared weights would read 480: such a product is in the checkpoint's layout again."""
    model, _ = pair(library)
    prepare(model)
    (_, experts), *_ = experts_of(model)
    state = {name: tensor.clone() for name, tensor in experts.state_dict().items()}
    state["down_proj"].view(torch.uint8)[2, 3, 5] = 0xFF
    experts.load_state_dict(state)
    packed = quantised(experts, "down_proj")
    assert not packed.is_prepared
    assert packed.dequantize(torch.float32).isnan().nonzero().tolist() == [[2, 3, 5]]
    assert quantised(experts, "gate_up_proj").is_prepared
    prepare_parameters(experts, ("gate_up_proj", "down_proj"), lambda w: True)
    assert not quantised(experts, "down_proj").is_prepared


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of what torch can't move."""
    return tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor


@BOTH
def test_who_writes_to_prepared_parameters_is_right_or_fails(library: Any, config: dict[str, Any]) -> None:
    model, _ = pair(library, **config)
    said, fresh = model(IDS).logits, copy.deepcopy(model)
    prepare(model)
    for (_, experts), (_, others) in zip(experts_of(model), experts_of(fresh), strict=True):
        codes, new = experts.gate_up_proj, others.gate_up_proj.detach()
        assert dict(experts.named_parameters())["gate_up_proj"].dtype is torch.int32
        for write in (
            lambda: codes.data.copy_(raw(new)),  # noqa: B023
            lambda: codes.copy_(new.float()),  # noqa: B023
            lambda: codes[0].copy_(raw(new)[0]),  # noqa: B023
            lambda: codes.narrow(0, 1, 2).copy_(raw(new)[1:3]),  # noqa: B023
        ):
            with torch.no_grad(), pytest.raises(RuntimeError, match="size"):
                write()
    assert torch.equal(model(IDS).logits, said)
    for _, experts in experts_of(model):
        experts.gate_up_proj.data = torch.randint(0, 9, experts.gate_up_proj.shape, dtype=torch.int32)
    assert not torch.equal(model(IDS).logits, said)  # seen, as prepared codes
    for (_, experts), (_, others) in zip(experts_of(model), experts_of(fresh), strict=True):
        experts.gate_up_proj = torch.nn.Parameter(others.gate_up_proj.detach().clone(), requires_grad=False)
        if config:
            with pytest.raises(InputError, match="ExpertWeights: scale is of shape"):  # of another layout
                quantised(experts, "gate_up_proj")
        scale = others.gate_up_proj_scale_inv.detach().clone()
        experts.gate_up_proj_scale_inv = torch.nn.Parameter(scale, requires_grad=False)
        assert not quantised(experts, "gate_up_proj").is_prepared
    assert torch.equal(model(IDS).logits, said)
    prepare(model)
    assert torch.equal(model(IDS).logits, said)
    for (_, experts), (_, others) in zip(experts_of(model), experts_of(fresh), strict=True):
        for end in ("", "_scale_inv"):  # as a loader that keeps the parameter
            parameter = getattr(experts, f"gate_up_proj{end}")
            parameter.data = getattr(others, f"gate_up_proj{end}").detach().clone()
    assert torch.equal(model(IDS).logits, said)


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu])
def test_scales_that_are_written_to_are_read_anew(library: Any, dtype: torch.dtype, prepared: bool) -> None:
    model, _ = pair(library)
    for _, experts in experts_of(model):
        for part in ("gate_up_proj", "down_proj"):
            scale = torch.randint(117, 122, (4, 1, 1), dtype=torch.uint8)
            scale = scale.expand(getattr(experts, f"{part}_scale_inv").shape).contiguous().view(torch.float8_e8m0fnu)
            setattr(experts, f"{part}_scale_inv", torch.nn.Parameter(scale.to(dtype), requires_grad=False))
    if prepared:
        prepare(model)
    model(IDS)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for name, tensor in state.items():
        if name.endswith("scale_inv"):
            tensor.copy_((tensor.float() * 2).to(dtype))
    fresh = copy.deepcopy(model)
    fresh.load_state_dict(state, assign=True)
    wanted = fresh(IDS).logits
    model.load_state_dict(state)
    assert torch.equal(model(IDS).logits, wanted)
    with torch.no_grad():
        for _, experts in experts_of(model):
            experts.down_proj_scale_inv.copy_((experts.down_proj_scale_inv.float() * 4).to(dtype))
    for (_, experts), (_, others) in zip(experts_of(model), experts_of(fresh), strict=True):
        others.down_proj_scale_inv = torch.nn.Parameter(experts.down_proj_scale_inv.detach().clone(), False)
    wanted = fresh(IDS).logits
    assert torch.equal(model(IDS).logits, wanted)
    for _, experts in experts_of(model):
        experts.down_proj_scale_inv.data.copy_((experts.down_proj_scale_inv.float() / 4).to(dtype))  # not counted
    refresh(model)
    assert not torch.equal(model(IDS).logits, wanted)


@EVERY
def test_copies_and_swaps_of_prepared_models(library: Any, config: dict[str, Any], tmp_path: Path) -> None:
    """deepcopy, torch.save, functional_call, DataParallel's replicas, a move, torch.compile."""
    from torch.nn.parallel.replicate import _replicatable_module

    model, _ = pair(library, **config)
    said, plain = model(IDS).logits, {name: tensor.clone() for name, tensor in model.state_dict().items()}
    prepare(model)
    other = copy.deepcopy(model)
    assert torch.equal(other(IDS).logits, said)
    assert all(same(tensor, plain[name]) for name, tensor in other.state_dict().items())
    torch.save(model.state_dict(), tmp_path / "state")
    state = torch.load(tmp_path / "state", weights_only=True)
    assert all(same(tensor, plain[name]) for name, tensor in state.items())
    torch.save(dict(model.named_parameters()), tmp_path / "parameters")
    parameters = torch.load(tmp_path / "parameters", weights_only=True)
    for source in (state, plain, parameters, dict(model.named_parameters())):
        assert torch.equal(torch.func.functional_call(model, source, (IDS,)).logits, said)
        assert torch.equal(model(IDS).logits, said)
    assert _replicatable_module(model)
    for experts in (module for _, module in experts_of(model)):
        replica = experts._replicate_for_data_parallel()
        replica._parameters = {}
        for name, parameter in experts._parameters.items():  # as replicate() has them: tensors of another device
            if parameter is not None:
                setattr(replica, name, parameter.detach().clone())
        x, ids, weights = torch.randn(6, 128), torch.randint(0, 4, (6, 2)), torch.rand(6, 2)
        assert torch.equal(replica(x, ids, weights), experts(x, ids, weights))
    assert torch.equal(model(IDS).logits, said)
    model.to("meta")
    assert all(parameter.is_meta for parameter in model.parameters())


def test_other_code_of_the_module_finds_the_checkpoint_s_layout(library: Any) -> None:
    model, _ = pair(library)
    said, (_, experts) = model(IDS).logits, experts_of(model)[0]
    before = {name: tensor.clone() for name, tensor in experts.state_dict().items()}
    prepare(model)
    experts.config._experts_implementation = "another"
    for hook in experts._forward_pre_hooks.values():
        hook(experts, ())
    assert same(experts.gate_up_proj, before["gate_up_proj"])
    experts.config._experts_implementation = "pretuned"
    assert torch.equal(model(IDS).logits, said)
    restore(torch.nn.Module())  # of which nothing was prepared


def test_a_restored_model_is_offloaded(library: Any) -> None:
    """accelerate takes a state_dict's tensors for the parameters, so both are to have one layout."""
    accelerate = pytest.importorskip("accelerate")
    model, _ = pair(library)
    said = model(IDS).logits
    prepare(model)
    restore(model)
    accelerate.cpu_offload(model, execution_device="cpu")
    assert torch.equal(model(IDS).logits, said)


def spec(layout: Layout) -> Spec:
    """The kernel for fp8 blocks as a checkpoint has them, or the faster one for prepared ones."""
    if layout is Layout.STORED:
        return Spec(Op.FORWARD, DType.FP8_BLOCK_A16, Config(16, 64, 128, 4, 4, schedule=Schedule.TILE), layout)
    config = Config(16, 64, 128, 8, 3, loads=Loads.TMA, schedule=Schedule.W4A16)
    return Spec(Op.FORWARD, DType.FP8_BLOCK_A16, config)


@pytest.fixture
def gpu(device: Device) -> Device:
    """An emulated GPU that has a kernel for prepared fp8 blocks; torch computes, as x is float32."""
    ours._load.cache_clear()
    device.publish(encode(bundle_of([variant_and_code(spec(Layout.NK))])))
    return device


def test_threads_that_make_the_first_call(library: Any, gpu: Device) -> None:
    for _ in range(5):
        gpu.visible = False
        model, _ = pair(library)
        said, begin = copy.deepcopy(model)(IDS).logits, threading.Barrier(4)
        gpu.visible = True

        def first(model: Any = model, begin: threading.Barrier = begin) -> torch.Tensor:
            begin.wait()
            with torch.no_grad():
                return model(IDS).logits  # type: ignore[no-any-return]

        with ThreadPoolExecutor(4) as pool:
            results = [future.result() for future in [pool.submit(first) for _ in range(4)]]
        assert all(torch.equal(out, said) for out in results)
        assert all(quantised(each, "down_proj").is_prepared for _, each in experts_of(model))


def test_parameters_that_a_captured_graph_reads_stay(library: Any, gpu: Device) -> None:
    """To prepare them would free what the graph reads. (Nothing is captured here.)"""
    gpu.visible = False
    model, _ = pair(library)
    said = copy.deepcopy(model)(IDS).logits
    gpu.visible = True
    for _, experts in experts_of(model):
        gpu.capturing = True
        with pytest.raises(ProblemNotInBundle, match="graph capture"):  # of float32
            experts_forward(experts, torch.randn(3, 128), torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2))
        gpu.capturing = False
        at = experts.down_proj.data_ptr()
        prepare_parameters(experts, ("gate_up_proj", "down_proj"), lambda w: True)  # as eval() does
        assert experts.down_proj.data_ptr() == at
    assert torch.equal(model(IDS).logits, said)


def same(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(tensor.data.view(torch.uint8), other.view(torch.uint8))


def test_other_blocks_are_refused_by_name(library: Any) -> None:
    model, _ = pair(library)
    (_, experts), *_ = experts_of(model)
    experts.down_proj_scale_inv = torch.nn.Parameter(torch.ones(4, 2, 2))
    with pytest.raises(InputError, match=r"ExpertWeights: scale is of shape \[4, 2, 2\], wanted \[4, 1, 1\]"):
        model(IDS)


@pytest.mark.parametrize("block", [(64, 64), (1, 32)])
def test_other_blocks_are_refused_where_torch_traces(library: Any, block: tuple[int, int]) -> None:
    """A graph would read scales of other weights."""
    model, _ = pair(library)
    (_, experts), *_ = experts_of(model)
    inputs = torch.randn(6, 128), torch.randint(0, 4, (6, 2)), torch.rand(6, 2)
    torch._dynamo.reset()
    traced = torch.compile(lambda *args: experts_forward(*args), backend="eager")
    torch.testing.assert_close(traced(experts, *inputs), experts_forward(experts, *inputs))
    for name in ("gate_up_proj", "down_proj"):
        E, N, K = getattr(experts, name).shape
        setattr(experts, f"{name}_scale_inv", torch.nn.Parameter(torch.rand(E, N // block[0], K // block[1])))
    torch._dynamo.reset()
    with pytest.raises(InputError, match=r"ExpertWeights: scale is of shape .*, wanted \[4, [12], 1\]"):
        traced(experts, *inputs)


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
    assert {tensor.dtype for name, tensor in experts.named_parameters() if "bias" not in name} == {torch.uint8}
    assert recognise(experts, True) == RowActivation(Activation("swiglu_oai"), True, True)
    said = model(IDS).logits
    torch.testing.assert_close(said, twin(IDS).logits, rtol=1e-4, atol=1e-4)
    twin.set_experts_implementation("eager")
    torch.testing.assert_close(said, twin(IDS).logits, rtol=1e-3, atol=1e-3)
    prepare(model)
    assert experts.down_proj_blocks.dtype is torch.int32
    assert torch.equal(model(IDS).logits, said)
    model.save_pretrained(tmp_path / "again")
    for name, tensor in load_file(saved.quantised / "model.safetensors").items():
        assert torch.equal(load_file(tmp_path / "again" / "model.safetensors")[name].to(tensor.dtype), tensor), name


def test_prepared_where_it_comes_to_a_gpu(library: Any, gpu: Device) -> None:
    """Not in the first step."""
    ours.register()
    gpu.visible = False
    model, _ = pair(library)
    said = model(IDS).logits
    (_, experts), *_ = experts_of(model)
    before = experts.down_proj.clone()
    gpu.visible = True
    gpu.publish(
        encode(bundle_of([variant_and_code(spec(Layout.STORED))]))
    )  # a GPU whose forward reads codes as they are
    model.to("cpu")
    assert same(experts.down_proj, before)
    assert {entry.layout for entry in gpu.loads} == {Layout.STORED}
    gpu.loads.clear()
    gpu.publish(encode(bundle_of([variant_and_code(spec(Layout.NK))])))
    model.to("cpu")
    assert {(entry.layout, entry.dtype) for entry in gpu.loads} == {(Layout.NK, DType.FP8_BLOCK_A16)}
    assert {quantised(experts, "down_proj").order for _, experts in experts_of(model)} == {ORDERS["fp8_block"].number}
    assert torch.equal(model(IDS).logits, said)
    assert same(experts.state_dict()["down_proj"], before)
    restore(experts)
    assert same(experts.down_proj, before)
    model.eval()  # what from_pretrained ends with
    assert quantised(experts, "down_proj").is_prepared
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
    [
        ("int4", "int4_g32"),
        ("int4 static order", "int4_g32"),
        ("mxfp4", "mxfp4"),
        ("fp8_block", "fp8_block_a16"),
        ("fp8_channel", "fp8_channel_a16"),
    ],
)
def test_compressed_tensors_experts_stay_codes(
    library: Any, keeping: None, tmp_path: Path, made_by: str, format: str
) -> None:
    """Beside the twin, by pretuned and by transformers' own code; saved as they were."""
    import tiny_quantised

    order = "static" if made_by.endswith("order") else None
    pair = (
        tiny_quantised.int4(tmp_path, actorder=order)
        if made_by.startswith("int4")
        else tiny_quantised.compressed(tmp_path, made_by)
    )
    how = {"experts_implementation": "pretuned", "dtype": torch.float32}
    model = library.AutoModelForCausalLM.from_pretrained(pair.quantised, **how)
    twin = library.AutoModelForCausalLM.from_pretrained(pair.twin, **how)
    (_, experts), *_ = experts_of(model)
    weights = quantised(experts, "gate_up_proj")
    assert weights is not None
    assert weights.format == format
    assert all(
        tensor.dtype.itemsize == 1 or tensor.dtype is torch.int32 or name.endswith(("_scale", "_shape"))
        for name, tensor in experts.named_parameters()
    )
    said = model(IDS).logits
    torch.testing.assert_close(said, twin(IDS).logits, rtol=1e-4, atol=1e-4)
    twin.set_experts_implementation("eager")
    torch.testing.assert_close(said, twin(IDS).logits, rtol=1e-3, atol=1e-3)
    prepare(model)
    assert torch.equal(model(IDS).logits, said)
    model.save_pretrained(tmp_path / "again")
    saved = load_file(tmp_path / "again" / "model.safetensors")
    for name, tensor in load_file(pair.quantised / "model.safetensors").items():
        assert torch.equal(saved[name].to(tensor.dtype), tensor), name


def test_other_implementations_get_the_experts_that_transformers_makes(
    library: Any, keeping: None, tmp_path: Path
) -> None:
    import tiny_quantised

    pair = tiny_quantised.int4(tmp_path)
    model = library.AutoModelForCausalLM.from_pretrained(pair.quantised, dtype=torch.bfloat16)
    (_, experts), *_ = experts_of(model)
    assert {name: tensor.dtype for name, tensor in experts.named_parameters()} == {
        "gate_up_proj": torch.bfloat16,
        "down_proj": torch.bfloat16,
    }
    twin = library.AutoModelForCausalLM.from_pretrained(pair.twin, dtype=torch.bfloat16)
    assert torch.equal(model(IDS).logits, twin(IDS).logits)


def test_offloading_leaves_nothing_behind(library: Any) -> None:
    """accelerate gives a module its weights for one call: what was on the device for it is gone afterwards."""
    accelerate = pytest.importorskip("accelerate")
    gc.freeze()
    model, _ = pair(library)
    said, experts = model(IDS).logits, experts_of(model)[0][1]
    accelerate.cpu_offload(experts, execution_device="cpu")
    assert experts.gate_up_proj.is_meta
    seen, own = [], experts._old_forward

    def watched(*args: Any) -> Any:
        out = own(*args)
        seen.append(weakref.ref(quantised(experts, "gate_up_proj")))
        prepare_parameters(experts, ("gate_up_proj", "down_proj"), lambda w: True)  # which are lent, and stay
        assert not seen[-1]().is_prepared
        return out

    experts._old_forward = watched
    for _ in range(2):
        assert torch.equal(model(IDS).logits, said)
    gc.collect()
    assert len(seen) == 2
    assert all(reference() is None for reference in seen)
    assert experts.gate_up_proj.is_meta


@pytest.mark.slow
def test_fsdp2_over_experts(library: Any, tmp_path: Path) -> None:
    """In two processes: forward, gradient, state_dict and load_state_dict, as of the model that is not sharded."""
    import sharded_experts

    sharded_experts.run_ranks(tmp_path / "store", "never", "before", "call")


def test_cast_codes_are_refused(library: Any) -> None:
    """The module's own code ignores scales beside codes that were cast: it may not run instead."""
    ours.register()
    model, _ = pair(library)
    (_, experts), *_ = experts_of(model)
    torch.nn.Module.to(experts, torch.bfloat16)
    x, ids, weights = torch.randn(6, 128).bfloat16(), torch.randint(0, 4, (6, 2)), torch.rand(6, 2)
    with pytest.raises(InputError, match=r"cast, to torch\..* leave the dtype out of \.to\(\)"):
        ours.experts_or_own(experts, x, ids, weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp4_with_other_scales_is_not_taken_for_int4(
    library: Any, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Scales that transformers makes without ue8m0, and that a cast leaves: the module's own code runs these."""
    model, _ = pair(library, expert_dtype="fp4", scale_fmt="ue8m0")
    (_, experts), *_ = experts_of(model)
    for name in ("gate_up_proj_scale_inv", "down_proj_scale_inv"):
        setattr(experts, name, torch.nn.Parameter(getattr(experts, name).to(dtype), requires_grad=False))
    with pytest.raises(InputError, match=rf"gate_up_proj is fp4 with scales of {dtype}, wanted scales of e8m0"):
        experts_forward(experts, torch.randn(3, 128), torch.tensor([[0], [1], [1]]), torch.ones(3, 1))
    monkeypatch.setattr(type(experts), "linear", lambda _self, x, w, *_, **__: x.new_full((len(x), w.shape[0]), 2.0))
    out = ours.experts_or_own(experts, torch.randn(3, 128), torch.tensor([[0], [1], [1]]), torch.ones(3, 1))
    assert (out == 2).all()


@EVERY
@pytest.mark.parametrize("prepared", [False, True])
@torch.no_grad()
def test_moved_parameters_leave_no_memory_behind(library: Any, config: dict[str, Any], prepared: bool) -> None:
    """``.to`` gives a parameter other memory; the weights of the last call kept the old."""
    gc.freeze()  # gc.collect looks at what this test makes alone: with all of a process it takes half a second
    ours.register()
    model, _ = pair(library, **config)
    if prepared:
        prepare(model)
    said, (_, experts) = model(IDS).logits, experts_of(model)[0]
    old = weakref.ref(quantised(experts, "down_proj"))
    experts._apply(torch.clone)
    gc.collect()
    assert old() is None
    assert torch.equal(model(IDS).logits, said)
    kept = quantised(experts, "down_proj")
    model.to("cpu")  # where it is
    assert quantised(experts, "down_proj") is kept  # a captured graph reads its scales


@pytest.mark.parametrize("mode", [False, True])
@pytest.mark.parametrize("prepared", [False, True])
def test_loading_rewrites_derived_scales_at_once(library: Any, prepared: bool, mode: bool) -> None:
    """Before any call: a captured graph that is replayed makes none. Of tensors made in inference mode, too."""
    with torch.inference_mode(mode):
        model, _ = pair(library)
        (_, experts), *_ = experts_of(model)
        scale = experts.down_proj_scale_inv.detach().bfloat16()
        experts.down_proj_scale_inv = torch.nn.Parameter(scale, requires_grad=not mode)
        if prepared:
            prepare(model)
    with torch.inference_mode():  # as generate() makes the first call
        model(IDS)
    weights = quantised(experts, "down_proj")
    read = weights.derived if prepared else weights.scale
    before, state = read.clone(), {name: tensor.clone() for name, tensor in experts.state_dict().items()}
    state["down_proj_scale_inv"] *= 2
    with torch.inference_mode(mode):
        experts.load_state_dict(state)
    assert torch.equal(read, before * 2)
    assert quantised(experts, "down_proj") is weights
    assert not weights.scale.requires_grad


def test_scales_that_a_capture_copies_are_copied_again(library: Any, device: Device) -> None:
    """A captured kernel has not run when the capture ends. (Nothing is captured here.)"""
    device.visible = False
    model, _ = pair(library)
    (_, experts), *_ = experts_of(model)
    experts.down_proj_scale_inv = torch.nn.Parameter(experts.down_proj_scale_inv.bfloat16(), requires_grad=False)
    weights = quantised(experts, "down_proj")
    before = weights.scale.clone()
    with torch.no_grad():
        experts.down_proj_scale_inv.mul_(2)
    device.capturing = True
    assert quantised(experts, "down_proj") is weights
    weights.scale.copy_(before)  # as before the replay
    device.capturing = False
    assert torch.equal(quantised(experts, "down_proj").scale, before * 2)
    prepare(model)
    device.capturing = True
    with pytest.raises(InputError, match="a CUDA graph is being captured"):
        restore(experts)


def test_cast_scales_of_prepared_int4_are_saved_as_numbers(library: Any, keeping: None, tmp_path: Path) -> None:
    """bf16 and fp16 have as many bytes: a state_dict took the bits of one for those of the other."""
    import tiny_quantised

    saved = tiny_quantised.int4(tmp_path)
    model = library.AutoModelForCausalLM.from_pretrained(
        saved.quantised, experts_implementation="pretuned", dtype=torch.float32
    )
    (_, experts), *_ = experts_of(model)
    before = experts.state_dict()["down_proj_scale"].float()
    prepare(model)
    said = model(IDS).logits
    torch.nn.Module.half(experts)
    assert torch.equal(experts.state_dict()["down_proj_scale"].float(), before)
    assert torch.equal(model(IDS).logits, said)
    restore(experts)
    assert torch.equal(experts.down_proj_scale.float(), before)
    assert torch.equal(model(IDS).logits, said)
