"""The whole layer against plain torch: a loop over the experts, differentiated by torch itself."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from acts import GATED, UNGATED, row_act
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import pairwise

from pretuned.artifacts.errors import InputError
from pretuned.artifacts.records import Layout
from pretuned.kernels.activations import Activation
from pretuned.runtime import ExpertWeights, activate, moe_mlp, sort_routing
from pretuned.runtime.api import layer_call
from pretuned.runtime.ops import layer as layer_module
from pretuned.runtime.ops.low_rank import Lora

T, TOPK, E, H, I = 9, 3, 5, 8, 4  # noqa: E741  (I is the expert's width, here as everywhere)


def gate_of(h: torch.Tensor, activation: str | Activation, gated: bool, interleaved: bool) -> torch.Tensor:
    """The published equations, one by one."""
    if not gated:
        return gate_of(torch.cat([h, torch.ones_like(h)], -1), activation, True, False)
    gate, up = (h[..., 0::2], h[..., 1::2]) if interleaved else (h[..., : h.shape[-1] // 2], h[..., h.shape[-1] // 2 :])
    if activation == "silu":
        return gate / (1 + torch.exp(-gate)) * up
    if activation == "gelu":
        return gate * 0.5 * (1 + torch.erf(gate / 2**0.5)) * up
    if activation == "gelu_tanh":
        return gate * 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up
    if activation == "relu2":
        return torch.clamp(gate, min=0) ** 2 * up
    if activation == "swiglu_oai":
        gate, up = torch.minimum(gate, torch.tensor(7.0, dtype=h.dtype)), up.clamp(-7, 7)
        return (up + 1) * gate / (1 + torch.exp(-1.702 * gate))
    assert isinstance(activation, Activation)
    _, limit, alpha, beta, linear_beta = activation
    if activation.name == "situ":
        v = up if linear_beta is None else linear_beta * (2 / (1 + torch.exp(-2 * up / linear_beta)) - 1)
        return beta * (2 / (1 + torch.exp(-2 * gate / beta)) - 1) / (1 + torch.exp(-gate)) * v
    most = torch.tensor(limit, dtype=h.dtype)
    up = up.clamp(-limit, limit)
    if activation.name == "swiglustep":
        return torch.minimum(gate / (1 + torch.exp(-gate)), most) * up
    gate = torch.minimum(gate, most)
    return (up + beta) * gate / (1 + torch.exp(-alpha * gate))


def plain(
    hidden: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    activation: str = "silu",
    *,
    gated: bool = True,
    interleaved: bool = False,
    gate_up_bias: Any = None,
    down_bias: Any = None,
    weights_on: str = "output",
    w_layout: str = "nk",
) -> torch.Tensor:
    x = hidden.reshape(-1, hidden.shape[-1])
    out = torch.zeros(x.shape[0], down.shape[1 if w_layout == "nk" else 2], dtype=x.dtype)
    rows = list(out)
    for t in range(x.shape[0]):
        for s in range(ids.shape[1]):
            e = int(ids[t, s])
            if not 0 <= e < up.shape[0]:
                continue
            first, second = (up[e], down[e]) if w_layout == "nk" else (up[e].T, down[e].T)
            weight = weights[t, s].to(x.dtype)
            h = first @ (x[t] * weight if weights_on == "input" else x[t])
            h = gate_of(h if gate_up_bias is None else h + gate_up_bias[e], activation, gated, interleaved)
            y = second @ h
            y = y if down_bias is None else y + down_bias[e]
            rows[t] = rows[t] + (y * weight if weights_on == "output" else y)
    return torch.stack(rows).view(*hidden.shape[:-1], -1)


def layer(gated: bool = True, layout: str = "nk", seed: int = 0, spread: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return (spread * torch.randn(*shape, generator=generator, dtype=torch.float64)).requires_grad_()

    up, down = random(E, 2 * I if gated else I, H), random(E, H, I)
    if layout == "kn":
        up, down = (tensor.detach().transpose(1, 2).contiguous().requires_grad_() for tensor in (up, down))
    return [random(T, H), up, down, random(T, TOPK), random(E, 2 * I if gated else I), random(E, H)]


IDS = torch.randint(-1, E + 1, (T, TOPK), generator=torch.Generator().manual_seed(4))


@pairwise(
    {
        "activation, gated, interleaved": [
            *((name, True, False) for name in GATED),
            *((name, False, False) for name in UNGATED),
            ("swiglu_oai", True, True),
        ],
        "layout": ["nk", "kn"],
        "biased": [False, True],
        "weights_on": ["output", "input"],
    }
)
def test_the_layer_and_its_gradients(
    activation: str, gated: bool, interleaved: bool, layout: str, biased: bool, weights_on: str
) -> None:
    hidden, up, down, weights, up_bias, down_bias = layer(gated, layout, spread=3.0)  # so that gpt-oss's limits bind
    how: dict[str, Any] = {
        "gated": gated,
        "interleaved": interleaved,
        "weights_on": weights_on,
        "w_layout": layout,
        "gate_up_bias": up_bias if biased else None,
        "down_bias": down_bias if biased else None,
    }
    y = moe_mlp(hidden, up, down, IDS, weights, activation, **how)
    wanted = plain(hidden, up, down, IDS, weights, activation, **how)
    torch.testing.assert_close(y, wanted)
    inputs = [hidden, up, down, weights, *([up_bias, down_bias] if biased else [])]
    dy = torch.randn_like(y)
    for got, want in zip(torch.autograd.grad(y, inputs, dy), torch.autograd.grad(wanted, inputs, dy), strict=True):
        torch.testing.assert_close(got, want)


@pytest.fixture
def new_memory_is_nan() -> Iterator[None]:
    """torch fills uninitialised memory, and stops at a gradient that is NaN."""
    torch.use_deterministic_algorithms(True)
    with warnings.catch_warnings(), torch.autograd.set_detect_anomaly(True):
        yield
    torch.use_deterministic_algorithms(False)


@pairwise(
    {
        "activation, gated": [*((name, True) for name in GATED), ("relu2", False)],
        "kind": ["plain", "biased", "adapters", "quantised"],
        "weights_on": ["output", "input"],
    }
)
@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
@pytest.mark.filterwarnings("ignore:.*dequantis.*")
@pytest.mark.usefixtures("new_memory_is_nan")
def test_rows_of_no_expert_pass_anomaly_detection(activation: str, gated: bool, kind: str, weights_on: str) -> None:
    hidden, up, down, weights, up_bias, down_bias = layer(gated)
    how: dict[str, Any] = {"gated": gated, "weights_on": weights_on}
    inputs: list[torch.Tensor] = [hidden, weights]
    products: list[Any] = [up, down]
    if kind == "biased":
        how |= {"gate_up_bias": up_bias, "down_bias": down_bias}
        inputs += [up_bias, down_bias]
    if kind == "adapters":
        low = [
            torch.randn(E, *shape, dtype=torch.float64, requires_grad=True)
            for shape in ((2, H), (up.shape[1], 2), (2, I), (H, 2))
        ]
        how |= {"lora": (Lora(low[0], low[1], 0.5), Lora(low[2], low[3], 1.0))}
        inputs += low
    if kind == "quantised":
        products = [ExpertWeights.quantize(matrix.detach(), "int4_g32") for matrix in products]
    else:
        inputs += products
    y = moe_mlp(hidden, products[0], products[1], IDS, weights, activation, **how)
    for gradient in torch.autograd.grad(y.square().sum(), inputs):
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("weights_on", ["output", "input"])
def test_gradcheck(weights_on: str) -> None:
    tensors = layer()

    def function(*args: torch.Tensor) -> torch.Tensor:
        hidden, up, down, weights, up_bias, down_bias = args
        return moe_mlp(hidden, up, down, IDS, weights, gate_up_bias=up_bias, down_bias=down_bias, weights_on=weights_on)

    assert torch.autograd.gradcheck(function, tensors, fast_mode=True)


def test_bfloat16_and_leading_dimensions() -> None:
    hidden, up, down, weights, *_ = (tensor.detach() for tensor in layer())
    low = moe_mlp(hidden.bfloat16().view(3, 3, H), up.bfloat16(), down.bfloat16(), IDS, weights.float())
    assert low.shape == (3, 3, H)
    assert low.dtype is torch.bfloat16
    wanted = plain(hidden, up, down, IDS, weights)
    assert (low.view(T, H).double() - wanted).norm() / wanted.norm() < 1e-2


@settings(max_examples=80)
@given(
    ids=st.lists(st.lists(st.integers(-2, 8), min_size=2, max_size=2), max_size=12),
    E=st.integers(1, 6),
    kind=st.sampled_from([torch.int16, torch.int32, torch.int64]),
)
def test_routing_is_a_stable_sort_with_the_others_last(ids: list[list[int]], E: int, kind: torch.dtype) -> None:
    flat = [expert for pair in ids for expert in pair]
    routing = sort_routing(torch.tensor(ids, dtype=kind).reshape(-1, 2), E)
    here = sorted((i for i, expert in enumerate(flat) if 0 <= expert < E), key=lambda i: flat[i])
    others = [i for i, expert in enumerate(flat) if not 0 <= expert < E]
    order = routing.gather_indices.tolist()
    assert order[: len(here)] == here
    assert sorted(order[len(here) :]) == others
    assert routing.bounds.tolist() == [sum(0 <= expert < g for expert in flat) for g in range(E + 1)]
    assert [0 <= expert < E for expert in routing.experts.tolist()] == [0 <= expert < E for expert in flat]
    assert routing.m_sizes.tolist() == [flat.count(g) for g in range(E)]
    assert {tensor.dtype for tensor in routing[1:]} == {torch.int32}  # as kernels read them


@pytest.mark.parametrize("weights_on", ["output", "input"])
def test_no_tokens_with_biases(weights_on: str) -> None:
    hidden, up, down, weights, up_bias, down_bias = layer(True, "nk")
    y = moe_mlp(
        hidden[:0], up, down, IDS[:0], weights[:0], weights_on=weights_on, gate_up_bias=up_bias, down_bias=down_bias
    )
    assert y.shape == (0, hidden.shape[1])
    assert all(not gradient.any() for gradient in torch.autograd.grad(y.sum(), [up, down, up_bias, down_bias]))


def test_no_tokens_and_nobody_here() -> None:
    hidden, up, down, weights, *_ = layer()
    empty = moe_mlp(hidden[:0], up, down, IDS[:0], weights[:0])
    assert empty.shape == (0, H)
    empty.sum().backward()
    assert not moe_mlp(hidden, up, down, torch.full_like(IDS, -1), weights).any()


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"activation": "situ"}, "needs its beta"),
        ({"activation": ["silu"]}, "wanted one of silu"),
        ({"activation": Activation("situ", beta=1.0), "gated": False}, "with gated=False"),
        ({"activation": "tanh"}, "wanted one of silu"),
        ({"activation": "swiglu_oai", "gated": False}, "wanted one of silu, gelu, gelu_tanh, relu2"),
        ({"interleaved": True, "gated": False}, "without a gate nothing is interleaved"),
        ({"weights_on": "both"}, "wanted 'output' or 'input'"),
        ({"topk_ids": IDS[1:]}, "T=9"),
        ({"topk_weights": torch.ones(T, 1)}, r"topk_weights \[9, 1\]"),
        ({"down_weight": torch.ones(E + 1, H, I, dtype=torch.float64)}, "same number of experts"),
        ({"gate_up_bias": torch.ones(E, 3, dtype=torch.float64)}, r"\[E, N\] = \[5, 8\]"),
    ],
)
def test_what_makes_no_sense_is_refused(how: dict[str, Any], says: str) -> None:
    hidden, up, down, weights, *_ = layer()
    inputs: dict[str, Any] = {
        "hidden": hidden,
        "gate_up_weight": up,
        "down_weight": down,
        "topk_ids": IDS,
        "topk_weights": weights,
    }
    with pytest.raises(InputError, match=says):
        moe_mlp(**{**inputs, **how})


@pytest.mark.parametrize("weights_on", ["output", "input"])
@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"hidden": [1.0]}, "hidden is a list, wanted a torch.Tensor"),
        ({"down_bias": 3}, "down_bias is a int, wanted a torch.Tensor"),
        ({"hidden": torch.tensor(1.0)}, r"hidden is of shape \[\], wanted \[T, H\]"),
        ({"hidden": torch.ones(T, 0)}, r"hidden is of shape \[9, 0\], wanted .* H of at least 1"),
        ({"hidden": torch.ones(T, H).int()}, "hidden is torch.int32, wanted torch.bfloat16"),
        ({"hidden": torch.ones(T, H).to(torch.float8_e4m3fn)}, "hidden is torch.float8_e4m3fn, wanted torch.bfloat16"),
        ({"hidden": torch.ones(T, H, device="meta")}, "gate_up_weight is on cpu, wanted hidden's device, meta"),
        ({"gate_up_weight": torch.ones(E, 2 * I, H).half()}, "gate_up_weight is torch.float16, wanted hidden's dtype"),
        ({"down_weight": torch.ones(E, H, I)}, "down_weight is torch.float32, wanted hidden's dtype, torch.float64"),
        ({"down_weight": torch.ones(E, H, I).int()}, "down_weight is torch.int32, wanted a floating-point type"),
        ({"down_weight": torch.ones(E, H, I, device="meta")}, "down_weight is on meta, wanted hidden's device, cpu"),
        ({"gate_up_bias": torch.ones(E, 2 * I)}, "gate_up_bias is torch.float32, wanted hidden's dtype"),
        ({"down_bias": torch.ones(E, H, device="meta")}, "down_bias is on meta, wanted hidden's device, cpu"),
        ({"topk_ids": IDS.to("meta")}, "topk_ids is on meta, wanted hidden's device, cpu"),
        ({"topk_ids": IDS.float()}, "topk_ids is torch.float32, wanted an integer type"),
        ({"topk_ids": IDS > 0}, "topk_ids is torch.bool, wanted an integer type"),
        ({"topk_weights": torch.ones(T, TOPK, device="meta")}, "topk_weights is on meta, wanted hidden's device, cpu"),
        ({"topk_weights": torch.ones(T, TOPK).int()}, "topk_weights is torch.int32, wanted a floating-point type"),
        ({"topk_ids": IDS[:, :0], "topk_weights": torch.ones(T, 0)}, r"topk_ids is \[9, 0\].* k of at least 1"),
        ({"w_layout": "NK"}, "w_layout is 'NK', wanted 'nk'"),
    ],
)
def test_what_cannot_be_used_has_the_callers_name(how: dict[str, Any], says: str, weights_on: str) -> None:
    hidden, up, down, weights, *_ = layer()
    inputs: dict[str, Any] = {
        "hidden": hidden,
        "gate_up_weight": up,
        "down_weight": down,
        "topk_ids": IDS,
        "topk_weights": weights,
    }
    with pytest.raises(InputError, match=f"^moe_mlp: {says}"):
        moe_mlp(**{**inputs, **how}, weights_on=weights_on)


def test_dtypes_may_differ_where_autocast_casts_them() -> None:
    hidden, up, down, weights, *_ = (tensor.detach().float() for tensor in layer())
    with torch.autocast("cpu", torch.bfloat16):
        out = moe_mlp(hidden, up.bfloat16(), down, IDS, weights)
    assert out.dtype is torch.float32


@pytest.mark.parametrize("experts", [0, -1, 4.0, True, "4", None, 65537, 2**31])
def test_a_number_of_experts_that_is_none(experts: Any) -> None:
    with pytest.raises(InputError, match=f"^sort_routing: E is {experts!r}, wanted the number of experts"):
        sort_routing(IDS, experts)
    assert sort_routing(IDS, 65536).m_sizes.shape == (65536,)


@pytest.mark.parametrize(
    ("ids", "says"), [([1], "a list, wanted a torch.Tensor"), (IDS.half(), "torch.float16, wanted an integer type")]
)
def test_ids_that_are_none(ids: Any, says: str) -> None:
    with pytest.raises(InputError, match=f"^sort_routing: topk_ids is {says}"):
        sort_routing(ids, E)


def test_an_odd_number_of_columns_has_no_halves() -> None:
    with pytest.raises(InputError, match=r"^activate: .* an even number"):
        activate(torch.ones(2, 5))
    for shape, how in (((2, 5, 8), {}), ((2, 8, 5), {"w_layout": "kn"}), ((2, 5, 8), {"weights_on": "input"})):
        with pytest.raises(InputError, match=r"^moe_mlp: gate and up have 5 columns together, wanted an even number"):
            moe_mlp(
                torch.ones(1, 8),
                torch.ones(*shape),
                torch.ones(2, 8, 2),
                torch.zeros(1, 1, dtype=torch.int32),
                torch.ones(1, 1),
                **how,
            )  # type: ignore[arg-type]


def test_what_is_no_activation_is_reported_the_call_that_was_made() -> None:
    with pytest.raises(InputError, match=r"^activate: activation is 'swish', wanted one of silu"):
        activate(torch.ones(2, 4), "swish")
    with pytest.raises(InputError, match=r"^activate: interleaved=True with gated=False"):
        activate(torch.ones(2, 4), gated=False, interleaved=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("activation", GATED)
def test_without_a_gradient_the_activation_has_the_same_bits(
    activation: str, interleaved: bool, dtype: torch.dtype
) -> None:
    h = 6 * torch.randn(64, 256, generator=torch.Generator().manual_seed(5))
    h[0, :8] = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 300.0, -300.0, 7.0])
    h = h.to(dtype)
    before = h.clone()
    without = activate(h, activation, interleaved=interleaved)
    kept = activate(h.clone().requires_grad_(), activation, interleaved=interleaved).detach()
    torch.testing.assert_close(without, kept, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(h.view(torch.int16), before.view(torch.int16))


@settings(max_examples=60, deadline=None)
@given(
    T=st.integers(0, 7),
    k=st.integers(1, 4),
    E=st.integers(1, 5),
    H=st.integers(1, 9),
    I=st.integers(1, 6),
    act=st.sampled_from(
        [*((name, True, False) for name in GATED), *((name, False, False) for name in UNGATED), ("gelu", True, True)]
    ),
    biased=st.booleans(),
    needs=st.lists(st.booleans(), min_size=6, max_size=6),
    seed=st.integers(0, 99),
)
def test_the_layers_own_gradient_is_that_of_the_calls_that_torch_traces(
    T: int,
    k: int,
    E: int,
    H: int,
    I: int,  # noqa: E741
    act: tuple[str, bool, bool],
    biased: bool,
    needs: list[bool],
    seed: int,
) -> None:
    how = layer_module.Layer(k, Layout.NK, row_act(*act))
    generator = torch.Generator().manual_seed(seed)
    wide = 2 * I if act[1] else I
    shapes = (T, H), (E, wide, H), (E, H, I), (T, k), *(((E, wide), (E, H)) if biased else ())
    tensors = [
        torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_(need)
        for shape, need in zip(shapes, needs, strict=False)
    ]
    hidden, up, down, weights, *biases = tensors
    up_bias, down_bias = biases or (None, None)
    ids = torch.randint(-1, E + 1, (T, k), generator=generator)
    out = moe_mlp(
        hidden,
        up,
        down,
        ids,
        weights,
        act[0],
        gated=act[1],
        interleaved=act[2],
        gate_up_bias=up_bias,
        down_bias=down_bias,
    )
    want = layer_call._composed(hidden, up, down, ids, weights, how, up_bias, down_bias, "output", "nk")
    torch.testing.assert_close(out, want)
    asked = [tensor for tensor in tensors if tensor.requires_grad]
    if asked and T:
        dout = torch.randn(out.shape, generator=generator, dtype=torch.float64)
        both = torch.autograd.grad(out, asked, dout), torch.autograd.grad(want, asked, dout)
        for got, other in zip(*both, strict=True):
            torch.testing.assert_close(got, other)


def given_of(dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    """hidden, both matrices, ids and routing weights of a layer that learns nothing."""
    x, up, down, weights, *_ = (tensor.detach().to(dtype) for tensor in layer())
    return x, up, down, IDS, weights


@pytest.mark.parametrize("shape", [(T, H), (1, T, H)])
@pytest.mark.parametrize("weights_on", ["output", "input"])
def test_out_is_written_and_returned(shape: tuple[int, ...], weights_on: str) -> None:
    x, *others = given_of()
    x = x.view(shape)
    want = moe_mlp(x, *others, weights_on=weights_on)
    out = torch.full_like(x, torch.nan)
    version = out._version
    assert moe_mlp(x, *others, weights_on=weights_on, out=out) is out
    assert torch.equal(out, want)
    assert out._version > version
    assert moe_mlp(x, *others, weights_on=weights_on, out=x) is x  # hidden is read before out is written
    assert torch.equal(x, want)


def test_an_out_that_can_not_be_written_is_reported() -> None:
    x, up, down, ids, weights = inputs = given_of()
    wide = torch.empty(T, 2 * H, dtype=x.dtype)
    for out, message in (
        (torch.empty(T, H), "out is [9, 8] torch.float32 on cpu, wanted hidden's [9, 8] torch.bfloat16 on cpu"),
        (torch.empty_like(x[:-1]), "out is [8, 8] torch.bfloat16"),
        (wide[:, :H], r"out is with strides [16, 1], wanted a contiguous tensor"),
        ([1], "out is a list"),
        (torch.empty_like(x).requires_grad_(), "out is given to a call that needs a gradient"),
        (weights.new_empty(T * H + T * TOPK), "in the memory of topk_weights"),
    ):
        more = weights
        if isinstance(out, torch.Tensor) and out.dim() == 1:
            more, out = out[T * H - T * TOPK : T * H].view(T, TOPK).copy_(weights), out[: T * H].view(T, H)
        with pytest.raises(InputError, match="moe_mlp: ") as error:
            moe_mlp(x, up, down, ids, more, out=out)
        assert message in str(error.value)
    with pytest.raises(InputError, match="needs a gradient"):
        moe_mlp(x.clone().requires_grad_(), *inputs[1:], out=torch.empty_like(x))
    with torch.no_grad():
        out = torch.empty_like(x)
        assert torch.equal(moe_mlp(x.clone().requires_grad_(), *inputs[1:], out=out), moe_mlp(*inputs))


def test_out_under_autocast_keeps_its_own_dtype() -> None:
    tensors = given_of(torch.float32)
    out = torch.empty_like(tensors[0])
    with torch.autocast("cpu", torch.bfloat16):
        moe_mlp(*tensors, out=out)
        assert torch.equal(out, moe_mlp(*tensors))


def test_out_is_traced() -> None:
    x, *others = given_of()

    def call(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return moe_mlp(x, *others, out=out)

    out = torch.empty_like(x)
    torch.compile(call, backend="eager", fullgraph=True)(x, out)
    assert torch.allclose(out.float(), moe_mlp(x, *others).float(), atol=0.05, rtol=0.02)
