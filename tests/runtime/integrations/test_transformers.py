"""transformers' models with ``experts_implementation="pretuned"``: what their own code computes, and its gradients."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import stockexperts
import torch
from acts import row_act
from calls import calls_of
from emulated_driver import EmulatedGpu, emulated
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from pretuned.aot.models.load import load_models
from pretuned.aot.plan.plan import plan
from pretuned.artifacts.errors import InputError
from pretuned.artifacts.records import Fusion, Op
from pretuned.integrations import transformers as ours
from pretuned.integrations.transformers.gates import recognise
from pretuned.kernels.activations import Activation
from pretuned.runtime import reload
from pretuned.runtime.ops.activation import RowActivation

pytestmark = [pytest.mark.filterwarnings("ignore")]  # transformers' own

TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, tuple[dict[str, Any], str]] = {  # what a model is made of, and the activation that is found
    "qwen3_moe": ({"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}, "silu"),
    "mixtral": ({"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}, "silu"),
    "olmoe": ({"num_experts": 6, "num_experts_per_tok": 3}, "silu"),
    "gpt_oss": ({"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 8}, "swiglu_oai"),
    "granitemoe": ({"num_local_experts": 4, "num_experts_per_tok": 2}, "silu"),
    "deepseek_v3": (
        {
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
        "silu",
    ),
}
GPU = torch.cuda.is_available() and "PRETUNED_BUNDLES" in os.environ  # it names bundles for the sizes below
IDS = torch.tensor([[5, 9, 11, 40, 7, 8, 96], [3, 3, 3, 60, 61, 62, 63]])


@pytest.fixture(scope="module")
def library() -> Any:
    library = pytest.importorskip("transformers", minversion="5.8")
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register("pretuned", ours.experts_forward)
    return library


def model_of(library: Any, kind: str) -> Any:
    config = library.AutoConfig.for_model(kind, **(TINY | MODELS[kind][0]))
    torch.manual_seed(0)
    model = library.AutoModelForCausalLM.from_config(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    return model.eval()


def experts_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "down_proj") and hasattr(module, "has_bias")]


def run(model: Any, how: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.set_experts_implementation(how)
    model.zero_grad()
    logits = model(IDS.to(model.device)).logits
    logits.square().mean().backward()
    return logits.detach(), {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_and_its_gradients(library: Any, kind: str) -> None:
    model = model_of(library, kind)
    (wanted, grads), (got, ours_too) = run(model, "eager"), run(model, "pretuned")
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    assert set(ours_too) >= {name for name, grad in grads.items() if grad.any()}
    for name, grad in grads.items():
        torch.testing.assert_close(ours_too[name], grad, rtol=1e-3, atol=1e-5)
    activations = {recognise(experts, True) for experts in experts_of(model)}
    assert activations == {row_act(MODELS[kind][1], True, kind == "gpt_oss")}


def test_a_model_is_loaded_with_it_by_name(library: Any, tmp_path: Path) -> None:
    model = model_of(library, "qwen3_moe")
    model.save_pretrained(tmp_path)
    loaded = library.AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="pretuned")
    model.set_experts_implementation("eager")
    torch.testing.assert_close(loaded(IDS).logits, model(IDS).logits, rtol=1e-4, atol=1e-5)
    assert loaded.config._experts_implementation == "pretuned"
    assert all(recognise(experts, True) for experts in experts_of(loaded))


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PRETUNED_STRICT", "1")
    reload()
    yield
    monkeypatch.undo()
    reload()


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("device", ["cpu", "cuda"] if GPU else ["cpu"])
def test_in_bf16_with_the_sizes_that_gpu_models_txt_has(
    library: Any, kind: str, device: str, request: pytest.FixtureRequest
) -> None:
    """On a GPU: by kernels that were built for these sizes, or strict mode raises."""
    if device == "cuda":
        request.getfixturevalue("strict")
    sizes = {name: 8 for name in ("num_experts", "num_local_experts", "n_routed_experts") if name in MODELS[kind][0]}
    sizes |= {"hidden_size": 768, "intermediate_size": 512, "moe_intermediate_size": 512, "num_experts_per_tok": 2}
    # One layer with experts: its router has the same input in both, so no token may go elsewhere by a rounding.
    sizes["num_hidden_layers"] = 2 if kind == "deepseek_v3" else 1
    config = library.AutoConfig.for_model(kind, **(TINY | MODELS[kind][0] | sizes))
    torch.manual_seed(0)
    model = library.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.1)
    model = model.eval().to(device)
    (wanted, grads), (got, ours_too) = run(model, "eager"), run(model, "pretuned")
    experts = {name for name in grads if "experts" in name}  # before them bf16's own roundings add up
    assert len(experts) >= 2
    for tensor, other in ((got, wanted), *((ours_too[name], grads[name]) for name in experts)):
        assert float((tensor.float() - other.float()).norm() / other.float().norm()) < 2e-2


class Experts(torch.nn.Module):
    """A module as transformers' decorator leaves it."""

    def __init__(self, act: Callable[[torch.Tensor], torch.Tensor] = functional.silu, **how: bool) -> None:
        super().__init__()
        self.act_fn = act
        self.has_gate, self.has_bias = how.get("has_gate", True), how.get("has_bias", False)
        self.is_transposed, self.is_concatenated = how.get("is_transposed", False), how.get("is_concatenated", True)
        self.has_post_expert_norm = how.get("has_post_expert_norm", False)
        E, H, narrow, wide = 5, 16, 12, 24 if self.has_gate else 12
        first = "gate_up_proj" if self.has_gate else "up_proj"
        sizes = (E, H, wide), (E, narrow, H)
        if not self.is_transposed:
            sizes = (E, wide, H), (E, H, narrow)
        generator = torch.Generator().manual_seed(1)
        for name, size in zip((first, "down_proj"), sizes, strict=True):
            self.register_parameter(name, torch.nn.Parameter(torch.randn(size, generator=generator)))
        if self.has_bias:
            self.register_parameter(f"{first}_bias", torch.nn.Parameter(torch.randn(E, wide, generator=generator)))
            self.register_parameter("down_proj_bias", torch.nn.Parameter(torch.randn(E, H, generator=generator)))
        self.post_expert_norm = torch.nn.RMSNorm(H)

    def _apply_gate(self, h: torch.Tensor) -> torch.Tensor:
        gate, up = h.chunk(2, -1) if self.is_concatenated else (h[..., ::2], h[..., 1::2])
        return self.act_fn(gate) * up


def by_hand(experts: Experts, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    out = torch.zeros_like(hidden)
    for t in range(len(hidden)):
        for slot, e in enumerate(ids[t].tolist()):
            if e >= 5:
                continue
            w1, w2 = getattr(experts, first)[e], experts.down_proj[e]
            w1, w2 = (w1.T, w2.T) if experts.is_transposed else (w1, w2)
            h = w1 @ hidden[t] + (getattr(experts, f"{first}_bias")[e] if experts.has_bias else 0)
            a = experts._apply_gate(h) if experts.has_gate else experts.act_fn(h)
            y = w2 @ a + (experts.down_proj_bias[e] if experts.has_bias else 0)
            y = experts.post_expert_norm(y) if experts.has_post_expert_norm else y
            out[t] = out[t] + weights[t, slot] * y
    return out


OTHERS: list[tuple[dict[str, bool], Any, str]] = [  # what is recognised without transformers' own gate
    ({}, functional.silu, ""),
    ({"has_gate": False, "has_bias": True}, functional.silu, "silu"),
    ({"has_gate": False, "is_transposed": True, "has_bias": True}, torch.nn.GELU("tanh"), "gelu_tanh"),
    ({"has_gate": False}, lambda h: torch.relu(h).square(), ""),
    ({"has_gate": False}, torch.tanh, ""),
    ({"is_transposed": True, "has_bias": True, "is_concatenated": False}, functional.silu, ""),
    ({"is_transposed": True, "has_bias": True}, functional.mish, ""),
    ({"has_post_expert_norm": True}, functional.silu, ""),
]


@pytest.mark.parametrize(("how", "act", "name"), OTHERS)
@pytest.mark.parametrize("elsewhere", [False, True])  # experts of another rank
def test_every_way_that_weights_may_lie(how: dict[str, bool], act: Any, name: str, elsewhere: bool) -> None:
    experts = Experts(act, **how)
    other = copy.deepcopy(experts)
    activation = recognise(experts, experts.has_gate)
    assert (activation.function.name if activation else "") == name
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(9, 16, generator=generator)
    ids = torch.stack([torch.randperm(7 if elsewhere else 5, generator=generator)[:3].clamp(max=5) for _ in range(9)])
    weights = torch.rand(9, 3, generator=generator)
    inputs = [tensor.clone().requires_grad_() for _ in range(2) for tensor in (hidden, weights)]
    got = ours.experts_forward(experts, inputs[0], ids, inputs[1])
    wanted = by_hand(other, inputs[2], ids, inputs[3])
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    upstream = torch.randn(9, 16, generator=generator)
    got.backward(upstream)
    wanted.backward(upstream)
    inside = ids < 5  # (of the others the router's module masks the weights)
    torch.testing.assert_close(inputs[0].grad, inputs[2].grad, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(inputs[1].grad * inside, inputs[3].grad * inside, rtol=1e-3, atol=1e-3)
    for (called, parameter), (_, two) in zip(experts.named_parameters(), other.named_parameters(), strict=True):
        if two.grad is not None:
            torch.testing.assert_close(parameter.grad, two.grad, rtol=1e-3, atol=1e-3, msg=called)


class Swish(torch.nn.Module):
    """silu at first; beta is learnt."""

    def __init__(self) -> None:
        super().__init__()
        self.beta = torch.nn.Parameter(torch.ones(()))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h * torch.sigmoid(self.beta * h)


def called(experts: Experts, *args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return ours.experts_forward(experts, *args), by_hand(experts, *args)


def test_an_activation_that_learns() -> None:
    experts = Experts(Swish())
    inputs = torch.randn(9, 16), torch.randint(0, 5, (9, 2)), torch.rand(9, 2)
    for beta in (1.0, 1.5):
        with torch.no_grad():
            experts.act_fn.beta.fill_(beta)
        got, wanted = called(experts, *inputs)
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
        grads = [torch.autograd.grad(out.square().sum(), experts.act_fn.beta)[0] for out in (got, wanted)]
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_of_an_activation_run(when: str) -> None:
    experts = Experts(torch.nn.Sequential(torch.nn.SiLU()))
    inputs = torch.randn(9, 16), torch.randint(0, 5, (9, 2)), torch.rand(9, 2)
    if when == "after":
        torch.testing.assert_close(*called(experts, *inputs), rtol=1e-4, atol=1e-4)
    handle = experts.act_fn[0].register_forward_hook(lambda module, taken, out: torch.zeros_like(out))
    got, wanted = called(experts, *inputs)
    assert float(got.detach().abs().max()) == float(wanted.detach().abs().max()) == 0.0
    handle.remove()
    torch.testing.assert_close(*called(experts, *inputs), rtol=1e-4, atol=1e-4)


def test_an_activation_that_drops_in_training_alone() -> None:
    experts = Experts(torch.nn.Sequential(torch.nn.SiLU(), torch.nn.Dropout(1.0))).eval()
    inputs = torch.randn(9, 16), torch.randint(0, 5, (9, 2)), torch.rand(9, 2)
    torch.testing.assert_close(*called(experts, *inputs), rtol=1e-4, atol=1e-4)
    experts.train()
    assert float(called(experts, *inputs)[0].detach().abs().max()) == 0.0
    experts.eval()
    torch.testing.assert_close(*called(experts, *inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("limit", [5.0, 20.0, 300.0, 20000.0])
def test_what_a_module_clamps_stays_clamped(limit: float) -> None:
    experts = Experts(lambda gate: functional.silu(gate.clamp(max=limit)))
    torch.manual_seed(3)
    hidden, ids, weights = limit * torch.randn(9, 16), torch.randint(0, 5, (9, 2)), torch.rand(9, 2)
    wanted = by_hand(experts, hidden, ids, weights)
    assert float((by_hand(Experts(), hidden, ids, weights) - wanted).norm() / wanted.norm()) > 0.5
    got = ours.experts_forward(experts, hidden, ids, weights)
    assert float((got - wanted).norm() / wanted.norm()) < 1e-5


def test_shapes_alone() -> None:
    experts = Experts(has_gate=False)
    inputs = torch.randn(9, 16), torch.randint(0, 5, (9, 2)), torch.rand(9, 2)
    with FakeTensorMode(allow_non_fake_inputs=True) as shapes:
        out = ours.experts_forward(experts, *map(shapes.from_tensor, inputs))
    assert out.shape == (9, 16)
    assert recognise(experts, False) == RowActivation(Activation("silu"), False, False)
    torch.testing.assert_close(*called(experts, *inputs), rtol=1e-4, atol=1e-4)


def test_an_earlier_transformers_says_less_of_a_module() -> None:
    experts = Experts()
    wanted = ours.experts_forward(experts, torch.ones(2, 16), torch.tensor([[0], [4]]), torch.ones(2, 1))
    for later in ("has_gate", "is_concatenated", "has_post_expert_norm"):
        delattr(experts, later)
    experts._apply_gate = lambda h: functional.silu(h[..., :12]) * h[..., 12:]  # type: ignore[method-assign]
    got = ours.experts_forward(experts, torch.ones(2, 16), torch.tensor([[0], [4]]), torch.ones(2, 1))
    torch.testing.assert_close(got, wanted)


def test_compiled_it_is_the_same() -> None:
    experts = Experts()
    hidden, ids, weights = torch.randn(9, 16), torch.randint(0, 5, (9, 2)), torch.rand(9, 2)
    compiled = torch.compile(ours.experts_forward, backend="eager", fullgraph=True)
    torch.testing.assert_close(
        compiled(experts, hidden, ids, weights),
        ours.experts_forward(experts, hidden, ids, weights),
        rtol=1e-4,
        atol=1e-4,
    )


def test_weights_in_another_dtype_than_hidden() -> None:
    experts = Experts().bfloat16()
    out = ours.experts_forward(experts, torch.randn(4, 16), torch.zeros(4, 1, dtype=torch.long), torch.ones(4, 1))
    assert out.dtype is torch.float32


@pytest.mark.parametrize("norm", [torch.nn.LayerNorm, torch.nn.RMSNorm])
def test_an_id_of_no_expert_adds_nothing_behind_a_norm(norm: Any) -> None:
    experts = Experts(has_post_expert_norm=True)
    experts.post_expert_norm = norm(16)
    for parameter in experts.post_expert_norm.parameters():
        torch.nn.init.normal_(parameter)
    hidden, weights = torch.randn(4, 16), torch.rand(4, 2).requires_grad_()
    out = ours.experts_forward(experts, hidden, torch.tensor([[-1, 5], [0, -1], [-7, 1], [2, 3]]), weights)
    assert not out[0].any()
    wanted = by_hand(experts, hidden[1:], torch.tensor([[0, 5], [5, 1], [2, 3]]), weights[1:])
    torch.testing.assert_close(out[1:], wanted, rtol=1e-4, atol=1e-4)
    ours_too, theirs = (
        torch.autograd.grad(result.square().sum(), (weights, *experts.post_expert_norm.parameters()))
        for result in (out, wanted)
    )
    for tensor, other in zip(ours_too, theirs, strict=True):
        torch.testing.assert_close(tensor, other, rtol=1e-3, atol=1e-3)
    assert not ours_too[0][[0, 0, 1, 2], [0, 1, 1, 0]].any()


@pytest.mark.parametrize("name", ["gate_up_proj", "down_proj"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn])
def test_quantised_weights_are_named(name: str, dtype: torch.dtype) -> None:
    experts = Experts()
    experts.register_parameter(name, torch.nn.Parameter(getattr(experts, name).detach().to(dtype), requires_grad=False))
    with pytest.raises(InputError, match=rf"experts_forward: {name} is {dtype}, .* Quantised weights don't run here"):
        ours.experts_forward(experts, torch.randn(2, 16), torch.tensor([[0], [4]]), torch.ones(2, 1))


def compared(library: Any, experts: Any, dtype: torch.dtype) -> None:
    """Ours beside transformers' grouped_mm: values and gradients, and the gradients' dtypes."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    ids, results = torch.tensor([[0, 1], [3, 2], [1, 0]]), []
    for forward in (ours.experts_forward, grouped_mm_experts_forward):
        torch.manual_seed(5)
        hidden, weights = torch.randn(3, 16).to(dtype).requires_grad_(), torch.rand(3, 2).to(dtype).requires_grad_()
        out = forward(experts, hidden, ids, weights)
        upstream = torch.randn(3, 16).to(dtype)
        results.append([out, *torch.autograd.grad(out, [hidden, weights, *experts.parameters()], upstream)])
    for result, other in zip(*results, strict=True):
        assert result.dtype is other.dtype
        assert float((result.double() - other.double()).norm()) <= 2e-2 * float(other.double().norm())


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["gpt_oss", "openai_privacy_filter"])
def test_fp32_biases_beside_narrower_weights(library: Any, family: str, narrow: torch.dtype) -> None:
    experts = next(stockexperts.build_experts(*entry) for entry in stockexperts.classes(family)).to(narrow)
    for name in ("gate_up_proj_bias", "down_proj_bias"):
        setattr(experts, name, torch.nn.Parameter(getattr(experts, name).detach().float()))
    assert recognise(experts, True) is not None
    compared(library, experts, narrow)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "nemotron_h", "deepseek_v4"])
@pytest.mark.parametrize(
    ("first", "second", "hidden"),
    [
        (torch.bfloat16, torch.float32, torch.bfloat16),
        (torch.float32, torch.bfloat16, torch.float32),
        (torch.float16, torch.bfloat16, torch.float32),
    ],
)
def test_two_weights_of_two_dtypes(
    library: Any, family: str, first: torch.dtype, second: torch.dtype, hidden: torch.dtype
) -> None:
    experts = next(stockexperts.build_experts(*entry) for entry in stockexperts.classes(family))
    for name, tensor in list(experts.named_parameters()):
        setattr(experts, name, torch.nn.Parameter(tensor.detach().to(second if "down" in name else first)))
    compared(library, experts, hidden)


def test_torch_func_s_transforms() -> None:
    several = [Experts(has_bias=True) for _ in range(3)]
    for number, module in enumerate(several):
        with torch.no_grad():
            module.down_proj.mul_(number + 1)
    inputs = torch.randn(9, 16), torch.randint(-1, 6, (9, 2)), torch.rand(9, 2)
    stacked, _ = torch.func.stack_module_state(several)  # type: ignore[arg-type]
    used = {name: tensor for name, tensor in stacked.items() if "norm" not in name}

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = several[0]

        def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
            return ours.experts_forward(self.experts, *tensors)

    layer = Layer()

    def called_with(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(
            layer, {f"experts.{name}": parameter for name, parameter in parameters.items()}, inputs
        )

    wanted = torch.stack([ours.experts_forward(module, *inputs) for module in several])
    torch.testing.assert_close(torch.vmap(called_with)(used), wanted, rtol=1e-4, atol=1e-4)
    grads = torch.vmap(torch.func.grad(lambda parameters: called_with(parameters).square().sum()))(used)
    wanted.square().sum().backward()
    for name, gradient in grads.items():
        theirs = torch.stack([dict(module.named_parameters())[name].grad for module in several])
        torch.testing.assert_close(gradient, theirs, rtol=1e-3, atol=1e-2)


def split(experts: Any, first: int, last: int) -> Any:
    """The experts of one rank."""
    part = copy.deepcopy(experts)
    for name, tensor in list(part.named_parameters()):
        if "norm" not in name:
            setattr(part, name, torch.nn.Parameter(tensor.detach()[first:last].clone()))
    part.num_experts, part._is_expert_parallel = last - first, True
    return part


def test_experts_that_the_ranks_do_not_divide() -> None:
    """103 on 8 ranks, 13 on each but the last, their outputs summed; where num_experts says otherwise: an error."""
    experts = Experts(has_bias=True)
    for name, tensor in list(experts.named_parameters()):
        if "norm" not in name:
            setattr(experts, name, torch.nn.Parameter(torch.randn(103, *tensor.shape[1:]) / 4))
    hidden, ids, weights = (
        torch.randn(20, 16),
        torch.stack([torch.randperm(103)[:4] for _ in range(20)]),
        torch.rand(20, 4),
    )
    wanted = ours.experts_forward(experts, hidden, ids, weights)
    got = torch.zeros_like(wanted)
    for first in range(0, 103, 13):
        part = split(experts, first, min(first + 13, 103))
        here = (ids >= first) & (ids < first + part.num_experts)
        got += ours.experts_forward(part, hidden, torch.where(here, ids - first, part.num_experts), weights * here)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    part.num_experts = 103 // 8  # the floor, where the rank has one more
    part.gate_up_proj = torch.nn.Parameter(torch.randn(13, 24, 16))
    with pytest.raises(InputError, match=r"gate_up_proj is 13 experts, wanted the module's num_experts, 12: .* divide"):
        ours.experts_forward(part, hidden, torch.zeros_like(ids), weights)


@pytest.mark.parametrize("grouped", [False, True])
def test_the_rows_of_a_rank_choose_its_kernels(grouped: bool) -> None:
    """All ids are here, or as many as with experts that are chosen alike; rows that were sent here are all here."""
    experts = Experts(has_bias=True, has_gate=grouped)  # whose own gate is not recognised
    period = 5
    hidden, ids, weights = torch.randn(20, 16), torch.randint(0, 2, (20, 4)), torch.rand(20, 4)
    part = split(experts, 0, 2)
    for module, config, top_k, wanted in (
        (experts, SimpleNamespace(num_experts=period), 4, None),
        (part, SimpleNamespace(num_experts=period), 4, 32),
        (part, SimpleNamespace(num_experts=None, num_local_experts=4 * period), 4, 8),
        (part, SimpleNamespace(num_experts=period), 1, None),  # of transformers' all-to-all
        (part, SimpleNamespace(), 4, None),
    ):
        module.config = config
        with calls_of(ours.moe_mlp, ours.grouped_gemm) as calls:
            ours.experts_forward(module, hidden, ids[:, :top_k], weights[:, :top_k])
        assert {call.name for call in calls} == {"grouped_gemm" if grouped else "moe_mlp"}
        assert {call.arguments["expected_rows"] for call in calls} == {wanted}


@pytest.fixture
def mesh() -> Iterator[Any]:
    """A mesh of 4 ranks of which this process is the second; nothing is sent."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
    yield lambda *shape: DeviceMesh("cpu", torch.arange(4).view(shape))
    torch.distributed.destroy_process_group()


def spread(experts: Any, mesh: Any, placements: list[Any]) -> None:
    from torch.distributed.tensor import DTensor

    for name, tensor in list(experts.named_parameters()):
        if "norm" not in name:
            sharded = DTensor.from_local(tensor.detach(), mesh, placements, run_check=False)
            setattr(experts, name, torch.nn.Parameter(sharded))


@pytest.mark.parametrize("shape", [(4,), (4, 1), (1, 4)])
def test_dtensor_weights_run_on_this_rank_s_experts(mesh: Any, shape: tuple[int, ...]) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    experts, other = Experts(has_bias=True), Experts(has_bias=True)
    spread(experts, mesh(*shape), [Shard(0) if many == 4 else Replicate() for many in shape])
    inputs = torch.randn(9, 16), torch.randint(0, 6, (9, 2)), torch.rand(9, 2)
    with pytest.raises(InputError, match=r"5 experts on this rank; the module's num_experts is None"):
        ours.experts_forward(experts, *inputs)  # are the ids those of all 20?
    experts.num_experts = 5
    got, wanted = ours.experts_forward(experts, *inputs), by_hand(other, *inputs)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    got.square().sum().backward()
    wanted.square().sum().backward()
    for name, parameter in experts.named_parameters():
        if "norm" not in name:
            assert isinstance(parameter.grad, DTensor)
            torch.testing.assert_close(parameter.grad.to_local(), getattr(other, name).grad, rtol=1e-3, atol=1e-2)


def test_other_dtensors_are_refused_by_their_placements(mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    inputs = torch.randn(9, 16), torch.randint(0, 6, (9, 2)), torch.rand(9, 2)
    for placement in (Shard(1), Replicate()):
        experts = Experts()
        experts.num_experts = 5
        spread(experts, mesh(4), [placement])
        with pytest.raises(
            InputError, match=r"gate_up_proj is a DTensor of .* with placements \[.*\(.*, wanted .*FSDP"
        ):
            ours.experts_forward(experts, *inputs)
    hidden = DTensor.from_local(inputs[0], mesh(4), [Replicate()], run_check=False)
    with pytest.raises(InputError, match=r"hidden_states is a DTensor of .*pass hidden_states.to_local"):
        ours.experts_forward(Experts(), hidden, *inputs[1:])


def test_register_is_one_line_and_can_be_called_again(library: Any) -> None:
    from transformers.integrations.moe import ExpertsInterface

    ours.register()
    hooks, kinds = len(torch.nn.modules.module._global_module_registration_hooks), ExpertsInterface._global_mapping
    ours.register()
    assert len(torch.nn.modules.module._global_module_registration_hooks) == hooks
    assert kinds["pretuned"] is ours.experts_or_own
    model = model_of(library, "qwen3_moe")
    own, _ = run(model, "eager")
    torch.testing.assert_close(run(model, "pretuned")[0], own, rtol=1e-4, atol=1e-4)
    with calls_of(ours.prepare) as prepared:
        model.to("cpu")
    assert not prepared, "there is no GPU"
    with emulated(EmulatedGpu()), calls_of(ours.prepare) as prepared:
        model.to("cpu")
    assert [call.arguments["experts"] for call in prepared] == experts_of(model)
    model.set_experts_implementation("eager")
    with emulated(EmulatedGpu()), calls_of(ours.prepare) as prepared:
        model.to("cpu")
    assert not prepared, "something else runs them"
    copy.deepcopy(model)


def test_what_is_prepared_is_what_is_planned(library: Any) -> None:
    for kind, shape in (("qwen3_moe", "shape:E=6,H=32,I=24,k=2"), ("gpt_oss", "shape:E=6,H=32,I=48,k=2 layout=kn")):
        experts, *_ = experts_of(model_of(library, kind).bfloat16())
        names = "gate_up_proj", "down_proj"
        wanted = plan(load_models([shape]).shapes).problems
        problems = ours._problems(experts, names, [None, None])
        assert problems == {problem for problem in wanted if problem.fusion is Fusion.NONE}
        frozen = ours._problems(experts.requires_grad_(False), names, [None, None])
        assert frozen == {problem for problem in problems if problem.op is Op.FORWARD}


def test_what_does_not_fit_runs_the_module_s_own_code_told_once(
    library: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours.register()
    ours._tell.cache_clear()
    model = model_of(library, "qwen3_moe")
    own, _ = run(model, "eager")
    for experts in experts_of(model):
        experts.num_experts, experts._is_expert_parallel = 8, True  # of which it has 6: ids may mean others
    assert torch.equal(run(model, "pretuned")[0], own)
    (line,) = [record.getMessage() for record in caplog.records if record.name == ours.__name__]
    assert line.startswith("pretuned: Qwen3MoeExperts runs its own code: experts_forward: gate_up_proj is 6 experts")
    monkeypatch.setenv("PRETUNED_STRICT", "1")
    reload()
    with pytest.raises(InputError, match="gate_up_proj is 6 experts"):
        run(model, "pretuned")
    monkeypatch.undo()
    reload()
