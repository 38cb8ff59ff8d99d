"""Experts are recognised by what their code is: every stock class, and none that was changed."""

from __future__ import annotations

import functools
import sys
import timeit
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import stockexperts
import torch
from acts import UNGATED, row_act
from pairwise import pairwise
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from pretuned.integrations import transformers as ours
from pretuned.integrations.transformers.gates import recognise, source_digest
from pretuned.kernels.activations import Activation
from pretuned.runtime.ops.activation import RowActivation, by_torch

pytestmark = [pytest.mark.filterwarnings("ignore")]  # transformers' own

FAMILIES = stockexperts.families()
PLAIN = ("silu", "gelu", "gelu_tanh", "relu2")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def library() -> Any:
    return pytest.importorskip("transformers", minversion="5.8")


def tried(experts: Any) -> RowActivation | None:
    """The activation that agrees with the module's own code on small and large numbers, in fp32."""
    h = 4 * torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    h = torch.cat([h, 64 * h, 4096 * h])
    numbers = {name: getattr(experts, name, None) for name in ("limit", "alpha", "swiglu_limit", "swiglu_alpha")}
    limit, alpha = numbers["limit"] or numbers["swiglu_limit"], numbers["alpha"] or numbers["swiglu_alpha"] or 1.0
    softcap = getattr(getattr(experts, "act_fn", None), "gate_softcap", None)
    if experts.has_gate:
        acts = [*PLAIN, Activation("swiglu", limit=limit), Activation("swiglu", limit=limit, alpha=alpha, beta=1.0)]
        if softcap is not None:
            acts.append(Activation("situ", beta=softcap.softcap, linear_beta=experts.act_fn.up_softcap.softcap))
        expected = [row_act(act, True, turned) for act in acts for turned in (False, True)]
    else:
        expected = [row_act(name, False, False) for name in UNGATED]
    does = between(experts, h)
    return next((act for act in expected if torch.allclose(does, by_torch(h, act), rtol=1e-5, atol=1e-6)), None)


def between(experts: Any, h: torch.Tensor) -> torch.Tensor:
    got: torch.Tensor = experts._apply_gate(h) if experts.has_gate else experts.act_fn(h)
    return got


def inputs(dtype: torch.dtype = torch.float32, tokens: int = 9) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    ids = torch.stack([torch.randperm(stockexperts.E, generator=generator)[:2] for _ in range(tokens)])
    return [
        torch.randn(tokens, stockexperts.H, generator=generator).to(dtype),
        ids,
        torch.rand(tokens, 2, generator=generator).to(dtype),
    ]


def run(
    forward: Callable[..., torch.Tensor], experts: Any, tensors: list[torch.Tensor], *more: torch.Tensor
) -> list[torch.Tensor]:
    """Return ``forward``'s result, and the gradients of hidden, the routing weights, the parameters and ``more``."""
    hidden, ids, weights = (tensor.clone() for tensor in tensors)
    wanted = [hidden.requires_grad_(), weights.requires_grad_(), *experts.parameters(), *more]
    out = forward(experts, hidden, ids, weights)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(4)).to(out.dtype)
    grads = torch.autograd.grad(out, wanted, upstream, allow_unused=True, materialize_grads=True)
    return [out.detach(), *grads]


def assert_same(got: list[torch.Tensor], wanted: list[torch.Tensor], dtype: torch.dtype) -> None:
    most = 1e-5 if dtype is torch.float32 else 2e-2 if dtype is torch.bfloat16 else 4e-3
    for tensor, other in zip(got, wanted, strict=True):
        assert tensor.dtype is other.dtype
        assert float((tensor.double() - other.double()).norm()) <= most * (float(other.double().norm()) + 1e-6)


def grouped_mm(experts: Any, *tensors: torch.Tensor) -> torch.Tensor:
    from transformers.integrations.moe import grouped_mm_experts_forward

    got: torch.Tensor = grouped_mm_experts_forward(experts, *tensors)
    return got


def stock(family: str = "qwen2_moe") -> Any:
    """A module of a family of its own class, so that what a test does to the class stays its own."""
    return next(stockexperts.build_experts(*entry) for entry in stockexperts.classes(family))


def test_how_many_families_there_are(library: Any) -> None:
    count = {"5.23": 64, "5.24": 67}.get(library.__version__.rpartition(".")[0])
    assert count in (None, len(FAMILIES))
    assert set(FAMILIES) >= {"qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3"}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_stock_class_is_recognised_for_what_it_does(library: Any, family: str) -> None:
    """If trying recognises an activation, its values and gradients are the code's own."""
    for kind, configs in stockexperts.classes(family):
        experts = stockexperts.build_experts(kind, configs)
        act = recognise(experts, experts.has_gate)
        assert act == tried(experts)
        assert act is not None
        h = (20 * torch.randn(33, 32, generator=torch.Generator().manual_seed(5))).requires_grad_()
        first, other = by_torch(h, act), between(experts, h)
        torch.testing.assert_close(first, other, rtol=1e-5, atol=1e-5)
        upstream = torch.randn(first.shape, generator=torch.Generator().manual_seed(6))
        grads = [torch.autograd.grad(out, h, upstream)[0] for out in (first, other)]
        torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_stock_class_computes_what_its_own_code_does(library: Any, family: str) -> None:
    for kind, configs in stockexperts.classes(family):
        for dtype in DTYPES:
            experts = stockexperts.build_experts(kind, configs).to(dtype)
            assert_same(
                run(ours.experts_forward, experts, inputs(dtype)), run(grouped_mm, experts, inputs(dtype)), dtype
            )


def test_a_function_that_says_that_it_wraps_another_is_its_own(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """inspect would show the source of the wrapped one."""
    experts = stock("gpt_oss")
    kind = type(experts)

    @functools.wraps(kind._apply_gate)
    def other(self: Any, gate_up: torch.Tensor) -> torch.Tensor:
        return gate_up[..., ::2]

    assert source_digest(other.__code__) not in (None, source_digest(kind._apply_gate.__code__))
    monkeypatch.setattr(kind, "_apply_gate", other)
    assert recognise(experts, True) is None


def test_a_function_without_a_source_runs_itself(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    experts, space = stock("gpt_oss"), vars(sys.modules[type(stock("gpt_oss")).__module__])
    exec("def _apply_gate(self, gate_up):\n    return gate_up[..., ::2]\n", space, names := {})
    monkeypatch.setattr(type(experts), "_apply_gate", names["_apply_gate"])
    assert source_digest(names["_apply_gate"].__code__) is None
    assert recognise(experts, True) is None


class Straight(torch.autograd.Function):
    """silu, whose gradient is passed on as it comes."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor) -> torch.Tensor:
        return functional.silu(h)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor) -> torch.Tensor:
        return dout


class Detached(nn.Module):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return functional.silu(h).detach()


class WithFunction(nn.Module):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return Straight.apply(h)  # type: ignore[no-any-return, no-untyped-call]


class Clamping(nn.Module):
    """silu, whose gradient a hook clamps."""

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        out = functional.silu(h)
        if out.requires_grad:
            out.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
        return out


class Like(nn.SiLU):
    """A class like one that is known, and not that one."""

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return functional.silu(h) + 0.1 * h.sin().detach()


def by(act: nn.Module) -> Callable[[Any], None]:
    return lambda experts: setattr(experts, "act_fn", act)


def hooked(register: str, hook: Callable[..., Any]) -> Callable[[Any], None]:
    return lambda experts: getattr(experts.act_fn, register)(hook)


def another_gate(experts: Any) -> None:
    experts._apply_gate = lambda h: h[..., : h.shape[-1] // 2].tanh() * h[..., h.shape[-1] // 2 :]


def another_gate_of_the_class(experts: Any) -> None:
    class Changed(type(experts)):  # type: ignore[misc]
        def _apply_gate(self, h: torch.Tensor) -> torch.Tensor:
            gate, up = h.chunk(2, dim=-1)
            return torch.relu(self.act_fn(gate)) * up

    experts.__class__ = Changed


def closed(experts: Any) -> None:
    del experts.act_fn
    experts.act_fn = lambda h: functional.silu(h).detach()


CHANGES: dict[str, Callable[[Any], None]] = {
    "detached": by(Detached()),
    "a custom Function": by(WithFunction()),
    "a hook that clamps the gradient": by(Clamping()),
    "a class like it": by(Like()),
    "two in one": by(nn.Sequential(nn.SiLU(), nn.Hardtanh())),
    "a hook that clamps": hooked("register_forward_hook", lambda module, taken, out: out.clamp(max=0.1)),
    "a hook before": hooked("register_forward_pre_hook", lambda module, taken: (taken[0] * 2,)),
    "a hook of the gradient": hooked("register_full_backward_hook", lambda module, into, out: (into[0] * 3,)),
    "its forward": lambda experts: setattr(experts.act_fn, "forward", torch.relu),
    "its gate": another_gate,
    "its class's gate": another_gate_of_the_class,
    "a function": closed,
}


@pairwise({"change": CHANGES, "dtype": DTYPES, "when": ["before the first call", "after it"]})
def test_what_is_changed_runs_its_own_code(library: Any, change: str, when: str, dtype: torch.dtype) -> None:
    experts = stock().to(dtype)
    if when == "after it":
        ours.experts_forward(experts, *inputs(dtype))
        assert recognise(experts, True) is not None
    CHANGES[change](experts)
    assert_same(run(ours.experts_forward, experts, inputs(dtype)), run(grouped_mm, experts, inputs(dtype)), dtype)
    assert recognise(experts, True) is None


def test_a_beta_in_a_closure_is_learnt(library: Any) -> None:
    experts, beta = stock(), torch.ones((), requires_grad=True)
    experts.act_fn = Own(lambda h: h * torch.sigmoid(beta * h))
    got, wanted = (run(forward, experts, inputs(), beta) for forward in (ours.experts_forward, grouped_mm))
    assert float(wanted[-1].abs()) > 0
    assert_same(got, wanted, torch.float32)


class Own(nn.Module):
    def __init__(self, does: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.does = [does]

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.does[0](h)


def replaced(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return tensor.tanh()


@pytest.mark.parametrize("when", ["before the first call", "after it"])
@pytest.mark.parametrize(
    "what",
    [
        "transformers.activations.SiLUActivation.forward",
        "torch.nn.functional.silu",
        "torch.nn.Module.__call__",
        "transformers.models.qwen2_moe.modeling_qwen2_moe.Qwen2MoeExperts._apply_gate",
        "torch.Tensor.chunk",
        "transformers.activations.nn",
    ],
)
def test_what_is_replaced_in_the_library_is_seen(
    library: Any, what: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pretuned.integrations.transformers import gates

    experts = stock()
    gates._functions.clear()
    gates._classes.clear()
    if when == "after it":
        ours.experts_forward(experts, *inputs())
        assert recognise(experts, True) is not None
    with monkeypatch.context() as patch:
        if what.endswith("chunk"):
            patch.setattr(
                torch.Tensor, "chunk", lambda tensor, parts, dim: torch.chunk(tensor, parts, dim)[::-1], raising=False
            )
        elif what.endswith("__call__"):
            patch.setattr(nn.Module, "__call__", lambda self, tensor: self.forward(tensor).tanh())
        elif what.endswith(".nn"):
            patch.setattr(what, functools)
        elif what.endswith("_apply_gate"):
            patch.setattr(what, lambda self, tensor: self.act_fn(tensor.chunk(2, dim=-1)[0]))
        else:
            patch.setattr(what, (lambda self, tensor: tensor.tanh()) if what[-4:] != "silu" else replaced)
        assert recognise(experts, True) is None
        if not what.endswith((".nn", "__call__")):
            assert_same(run(ours.experts_forward, experts, inputs()), run(grouped_mm, experts, inputs()), torch.float32)
    assert recognise(experts, True) is not None


def test_a_hook_of_all_modules_runs(library: Any) -> None:
    experts, seen = stock(), []
    handle = nn.modules.module.register_module_forward_hook(lambda module, taken, out: seen.append(module))
    try:
        ours.experts_forward(experts, *inputs())
    finally:
        handle.remove()
    assert experts.act_fn in seen
    assert recognise(experts, True) is not None


@pytest.mark.parametrize("name", ["limit", "alpha"])
def test_a_limit_is_read_in_every_call(library: Any, name: str) -> None:
    experts = stock("gpt_oss")
    assert recognise(experts, True) == row_act("swiglu_oai", True, True)
    setattr(experts, name, 0.5)
    assert_same(run(ours.experts_forward, experts, inputs()), run(grouped_mm, experts, inputs()), torch.float32)
    setattr(experts, name, nn.Parameter(torch.tensor(7.0 if name == "limit" else 1.702)))
    assert recognise(experts, True) is None  # it may be learnt


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("deepseek_v4", "limit"),
        ("hy_v4", "swiglu_limit"),
        ("gpt_oss", "limit"),
        ("gpt_oss", "alpha"),
        ("minimax_m3_vl", "swiglu_limit"),
        ("minimax_m3_vl", "swiglu_alpha"),
    ],
)
@pytest.mark.parametrize(
    ("value", "is_known"),
    [
        (0.3, True),
        (1, True),
        (np.float64(0.3), False),
        (True, False),
        (torch.tensor(0.3), False),
        (-1.0, None),
        (0, None),
        (float("inf"), None),
    ],
    ids=str,
)
def test_a_number_that_was_set_after_load(
    library: Any, family: str, name: str, value: Any, is_known: bool | None
) -> None:
    """A layer is recognised with it, or runs its own code: what comes out is the code's own."""
    experts, tensors = stock(family), inputs()
    ours.experts_forward(experts, *tensors)
    setattr(experts, name, value)
    act = recognise(experts, True)
    assert is_known is None or (act is not None) == is_known
    tensors[0] = 6 * tensors[0]  # where a limit says something
    torch.testing.assert_close(ours.experts_forward(experts, *tensors), grouped_mm(experts, *tensors))


def has_no_softcap(caps: Any) -> None:
    caps.__dict__["up_softcap"] = nn.Identity()  # before the module of this name


SOFTCAPS: dict[str, tuple[Callable[[Any], Any], dict[str, float] | None]] = {
    "of the gate": (lambda caps: setattr(caps.gate_softcap, "softcap", 0.5), {"beta": 0.5, "linear_beta": 25.0}),
    "of up": (lambda caps: setattr(caps.up_softcap, "softcap", 1), {"beta": 4.0, "linear_beta": 1.0}),
    "exchanged": (
        lambda caps: caps._modules.update(gate_softcap=caps.up_softcap, up_softcap=caps.gate_softcap),
        {"beta": 25.0, "linear_beta": 4.0},
    ),
    "zero": (lambda caps: setattr(caps.up_softcap, "softcap", 0.0), None),
    "below zero": (lambda caps: setattr(caps.gate_softcap, "softcap", -2.0), None),
    "a tensor": (lambda caps: setattr(caps.gate_softcap, "softcap", torch.tensor(2.0)), None),
    "another module": (lambda caps: setattr(caps, "up_softcap", nn.Identity()), None),
    "an attribute": (has_no_softcap, None),
    "a hook": (lambda caps: caps.up_softcap.register_forward_hook(lambda module, taken, out: 2 * out), None),
}


@pytest.mark.parametrize("change", SOFTCAPS)
def test_softcaps_that_were_changed_after_load(library: Any, change: str) -> None:
    if "inkling2" not in FAMILIES:
        pytest.skip("a transformers before Inkling2")
    experts, tensors = stock("inkling2"), inputs()
    ours.experts_forward(experts, *tensors)
    does, numbers = SOFTCAPS[change]
    does(experts.act_fn)
    act = recognise(experts, True)
    assert act == (None if numbers is None else RowActivation(Activation("situ", **numbers), True, False))
    tensors[0] = 6 * tensors[0]
    torch.testing.assert_close(
        ours.experts_forward(experts, *tensors), grouped_mm(experts, *tensors), equal_nan=True, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, Activation("silu")),
        ({"swiglu_limit": 0.5}, Activation("swiglu", limit=0.5)),
        ({"swiglu_limit": 0.5, "swiglu_alpha": 1.3}, Activation("swiglu", limit=0.5, alpha=1.3, beta=1.0)),
        (
            {"swiglu_limit": 0.5, "swiglu_alpha": 1.3, "mlp_gate_softcap": 2.0, "mlp_up_softcap": 3.0},
            Activation("situ", beta=2.0, linear_beta=3.0),
        ),
        ({"swiglu_limit": 0.0}, None),
        ({"swiglu_limit": -1.0, "swiglu_alpha": 1.3}, None),
    ],
)
def test_the_gate_of_transformers_own_fp8_experts(
    library: Any, settings: dict[str, float], expected: Activation | None
) -> None:
    module = pytest.importorskip("transformers.integrations.finegrained_fp8")
    sizes = {"hidden_size": 128, "num_experts": 2, "moe_intermediate_size": 128, "hidden_act": "silu"}
    with torch.device("meta"):
        experts = module.FP8Experts(SimpleNamespace(**sizes, **settings), block_size=(128, 128))
    act = recognise(experts, True)
    assert act == (None if expected is None else RowActivation(expected, True, False))
    if act is not None:
        h = 4 * torch.randn(9, 64, generator=torch.Generator().manual_seed(1))
        torch.testing.assert_close(by_torch(h, act), experts._apply_gate(h))


def test_step_3_7_clamps_after_silu_and_deepseek_v4_before(library: Any) -> None:
    """Both gates have one name, and both modules a limit and an act_fn."""
    step = pytest.importorskip("transformers.models.step3p7.modeling_step3p7")
    sizes = {"hidden_size": 16, "num_local_experts": 2, "moe_intermediate_size": 8, "hidden_act": "silu"}
    h, seen = 4 * torch.randn(9, 16, generator=torch.Generator().manual_seed(1)), []
    for experts in (step.Step3p7Experts(SimpleNamespace(**sizes), swiglu_limit=0.5), stock("deepseek_v4")):
        experts.limit = 0.5
        act = recognise(experts, True)
        assert act is not None
        torch.testing.assert_close(by_torch(h, act), experts._apply_gate(h))
        seen.append(act.function)
    assert seen == [Activation("swiglustep", limit=0.5), Activation("swiglu", limit=0.5)]


class Dropping(nn.Module):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return functional.dropout(functional.silu(h), 0.5, training=True)


def test_nothing_is_drawn_from_torch_s_generator(library: Any) -> None:
    for experts in (stock(), stock("gpt_oss"), stock("nemotron_h"), stock("deepseek_v4")):
        before = torch.get_rng_state()
        ours.experts_forward(experts, *inputs())
        assert torch.equal(torch.get_rng_state(), before)


def test_checkpointing_drops_the_same_again(library: Any) -> None:
    def both(forward: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        torch.manual_seed(7)
        experts = stock()
        experts.act_fn = Dropping()
        return run(forward, experts, inputs())

    def again(experts: Any, *tensors: torch.Tensor) -> torch.Tensor:
        got: torch.Tensor = checkpoint(ours.experts_forward, experts, *tensors, use_reentrant=False)
        return got

    assert_same(both(again), both(ours.experts_forward), torch.float32)


@pytest.mark.parametrize(
    ("act", "name"),
    [
        (nn.SiLU(), "silu"),
        (nn.GELU(), "gelu"),
        (nn.GELU("tanh"), "gelu_tanh"),
        (functional.silu, "silu"),
        (functional.gelu, "gelu"),
        (functools.partial(functional.gelu, approximate="tanh"), "gelu_tanh"),
        (nn.SiLU(inplace=True), None),
        (nn.Mish(), None),
        (torch.tanh, None),
        (functools.partial(functional.silu, inplace=True), None),
        ("gelu", "gelu"),
        ("gelu_pytorch_tanh", "gelu_tanh"),
        ("silu", "silu"),
        ("swish", "silu"),
        ("gelu_python", None),
        ("gelu_new", None),
        ("quick_gelu", None),
        ("relu2", "relu2"),
    ],
)
def test_activations_that_are_known(library: Any, act: Any, name: str | None) -> None:
    from transformers.activations import ACT2FN

    experts = stock()
    del experts.act_fn
    experts.act_fn = ACT2FN[act] if isinstance(act, str) else act
    assert recognise(experts, True) == (name and row_act(name))
    if "inplace" not in repr(act):  # torch refuses its gradient
        assert_same(run(ours.experts_forward, experts, inputs()), run(grouped_mm, experts, inputs()), torch.float32)


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss", "nemotron_h", "deepseek_v4"])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_under_autocast(library: Any, family: str, weights: torch.dtype) -> None:
    experts = stock(family).to(weights)
    in_bf16 = stock(family).to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        got = ours.experts_forward(experts, *inputs())
    wanted = ours.experts_forward(in_bf16, *inputs())
    assert got.dtype is torch.float32
    torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("change", [None, "a class like it"])
def test_compiled(library: Any, change: str | None) -> None:
    experts = stock()
    if change:
        CHANGES[change](experts)
    compiled = torch.compile(ours.experts_forward, backend="aot_eager", fullgraph=True)
    assert_same(run(compiled, experts, inputs()), run(grouped_mm, experts, inputs()), torch.float32)


def test_it_costs_little(library: Any) -> None:
    """A few looks at attributes: under 5 us on an idle machine, and here well under what trying costs."""
    experts = stock()
    recognise(experts, True)
    best = min(timeit.repeat(lambda: recognise(experts, True), number=1000, repeat=9)) / 1000
    assert best < 50e-6
