"""The passes over rows and the whole layer on a real GPU. PRETUNED_BUNDLES is as for test_training.py."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from acts import GATED, UNGATED, row_act
from selected import failed

from pretuned.artifacts.records import DType, RowOp
from pretuned.kernels import rowops as contract
from pretuned.kernels.activations import Activation
from pretuned.runtime import grouped_gemm, moe_mlp, sort_routing
from pretuned.runtime.dispatch.snapshot import snapshot
from pretuned.runtime.launch import rowops
from pretuned.runtime.ops import activation, gather_combine, zero_rows
from pretuned.runtime.ops import routing as ops_routing
from pretuned.runtime.ops.activation import Needs, RowActivation, by_torch

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(
        not os.environ.get("PRETUNED_BUNDLES"), reason="needs PRETUNED_BUNDLES to name bundles for this GPU"
    ),
]

E, H, I, TOPK = 8, 768, 512, 2  # noqa: E741
MOST = {torch.bfloat16: 4e-3, torch.float16: 6e-4, torch.float32: 4e-6}  # one rounding, and fp32's arithmetic
FORMS = [
    *(row_act(act, True, interleaved) for act in GATED for interleaved in (False, True)),
    *(row_act(name, False, False) for name in UNGATED),
]


def random(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed + sum(shape))
    return (scale * torch.randn(*shape, device="cuda", generator=generator)).to(dtype)


def near(got: torch.Tensor | None, want: torch.Tensor, most: float) -> None:
    assert got is not None
    error = (got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30)
    assert float(error) < most, f"off by {float(error):.2e}, at most {most:.0e}"


def demand(op: RowOp, dtype: torch.dtype, columns: int) -> None:
    """A bundle has the kernel: nothing here is to be torch's."""
    assert rowops.for_rows(op, columns, 1, like=torch.empty(1, device="cuda", dtype=dtype)) is not None


@pytest.mark.parametrize("columns", [512, 768, 1536, 40, 33, 1])
@pytest.mark.parametrize("dtype", list(MOST), ids=str)
@pytest.mark.parametrize("act", FORMS, ids=str)
def test_the_activation_and_its_gradient(act: RowActivation, dtype: torch.dtype, columns: int) -> None:
    demand(RowOp.ACTIVATION, dtype, columns)
    demand(RowOp.ACTIVATION_GRAD, dtype, columns)
    M, end = 300, 217
    h = random(M, columns * (2 if act.gated else 1), dtype=dtype, scale=4)
    da, weights = random(M, columns, dtype=dtype), torch.rand(M, device="cuda")
    index = torch.randperm(M, device="cuda")
    bounds = torch.tensor([0, 100, end], device="cuda", dtype=torch.int32)
    h[end:], da[end:] = float("nan"), float("nan")
    wide = h[:end].double().requires_grad_()
    want = by_torch(wide, act)
    near(activation.forward(h, act, bounds)[:end], want.detach(), MOST[dtype])
    scale = weights[index][:end, None].double()
    (dh,) = torch.autograd.grad(want, wide, da[:end].double() * scale)
    got = activation.gradient(h, da, act, Needs(True, True, True), weights=weights, index=index, bounds=bounds)
    near(got[0][:end] if got[0] is not None else None, dh, MOST[dtype])
    near(got[1][:end] if got[1] is not None else None, want.detach() * scale, MOST[dtype])
    dots = torch.zeros(M, device="cuda", dtype=torch.float64)
    dots[index[:end]] = (da[:end].double() * want.detach()).sum(1)
    near(got[2], dots, 1e-5)
    again = activation.gradient(h, da, act, Needs(True, True, True), weights=weights, index=index.int(), bounds=bounds)
    assert all(torch.equal(tensor[:end], two[:end]) for tensor, two in zip(got[:2], again[:2], strict=True))
    assert torch.equal(got[2], again[2])


@pytest.mark.parametrize(
    ("weighted", "biased"), [(None, False), ("wide", False), ("narrow", False), ("wide", True), ("narrow", True)]
)
@pytest.mark.parametrize("top_k", [1, 2, 8, 11])
@pytest.mark.parametrize("columns", [2048, 768, 33])
@pytest.mark.parametrize("dtype", list(MOST), ids=str)
def test_combine(dtype: torch.dtype, columns: int, top_k: int, biased: bool, weighted: str | None) -> None:
    demand(RowOp.COMBINE, dtype, columns)
    T = 123
    M = T * top_k
    y, experts = random(M, columns, dtype=dtype), torch.randint(-2, E + 2, (M,), device="cuda").int()
    places, here = torch.randperm(M, device="cuda").int(), (experts >= 0) & (experts < E)
    bias = random(E, columns, dtype=dtype, seed=2) if biased else None
    weights = torch.rand(M, device="cuda").to(dtype if weighted == "narrow" else torch.float32) if weighted else None
    y[places[~here].long()] = float("nan")
    want = y[places.long()].double()
    places[~here] = -1
    if bias is not None:
        want += bias[experts.clamp(0, E - 1).long()].double()
    if weights is not None:
        weights[~here] = float("nan")
        want *= weights[:, None].double()
    want = torch.where(here[:, None], want, 0).view(T, top_k, columns).sum(1)
    near(gather_combine.combine(y, places, top_k, weights, experts, bias), want, MOST[dtype])


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("top_k", [1, 3, 8, 10])
@pytest.mark.parametrize("columns", [2048, 768, 33])
@pytest.mark.parametrize("dtype", list(MOST), ids=str)
def test_gather(dtype: torch.dtype, columns: int, top_k: int, many: bool) -> None:
    """A row a program, and each token's row once for all its slots: also those of which the index has several."""
    demand(RowOp.GATHER, dtype, columns)
    T, end, row_bytes = 1230, 1000, columns * dtype.itemsize
    if many:
        T += contract.BY_TOKEN_LEAST_BYTES // (row_bytes * top_k)
    assert contract.by_token(T * top_k, row_bytes, T * top_k, top_k) is (many and top_k > 1)
    x, index = random(T, columns, dtype=dtype), torch.randperm(T * top_k, device="cuda")
    bounds = torch.tensor([0, end], device="cuda", dtype=torch.int32)
    for repeated in (0, 300, 900):
        index[:repeated] = index[-1]
        assert torch.equal(gather_combine.gather(x, index, top_k), x[index // top_k])
        assert torch.equal(gather_combine.gather(x, index.int(), top_k, bounds)[:end], x[index // top_k][:end])


@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("named", [1.0, 0.9, 0.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_rows_that_no_index_names_become_zero(dtype: torch.dtype, named: float, kind: torch.dtype) -> None:
    rows, columns, E, M = 9001, 1032, 40, 9500
    y = random(rows, columns, dtype=dtype).abs_().add_(1)
    assert y.nbytes >= zero_rows.LEAST_BYTES
    index = torch.randint(-9, int(rows * named) + 9, (M,), device="cuda", generator=torch.Generator("cuda"))
    if named == 1.0:
        index[:rows] = torch.randperm(rows, device="cuda")
    m_sizes = torch.randint(0, 2 * M // E, (E,), device="cuda", dtype=kind)
    used = min(M, int(m_sizes.sum()))
    left = torch.zeros(rows, dtype=torch.bool, device="cuda")
    left[index[:used][(index[:used] >= 0) & (index[:used] < rows - 5)]] = True
    want = torch.where(left[:, None], y, 0)
    assert rowops.launcher(RowOp.CLEAR, DType.FP32, 0, aligned=True) is not None
    zero_rows.clear(y, index.to(kind), m_sizes, rows - 5)
    assert torch.equal(y, want)


def test_scattered_rows_are_cleared_in_a_graph_too() -> None:
    E, N, K, M = 8, 2048, 256, 8192
    x, w = random(M, K), random(E, N, K, scale=0.05)
    index, m_sizes = torch.randperm(M, device="cuda").int(), torch.full((E,), M // E, device="cuda", dtype=torch.int32)

    def call() -> torch.Tensor:
        return grouped_gemm(x, w, m_sizes, 1, index, permute_y=True)

    call()  # loads what a capture must not
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call()
    for kept in (M // E, 100, 0):
        m_sizes.fill_(kept)
        index.copy_(torch.randperm(M, device="cuda"))
        y.fill_(float("nan"))
        graph.replay()
        want = torch.zeros_like(y).index_copy_(0, index[: E * kept].long(), grouped_gemm(x, w, m_sizes)[: E * kept])
        assert torch.equal(y == 0, want == 0)
        near(y, want, 4e-3)


def test_offsets_past_2_31() -> None:
    M, columns = 1_200_000, 1024
    h = torch.zeros(M, 2 * columns, device="cuda", dtype=torch.bfloat16)
    h[-1] = random(2 * columns)
    act = RowActivation(Activation("silu"), True, False)
    da = torch.zeros(M, columns, device="cuda", dtype=torch.bfloat16)
    da[-1] = random(columns, seed=1)
    a = activation.forward(h, act)
    near(a[-1], by_torch(h[-1:].double(), act)[0], MOST[torch.bfloat16])
    assert not a[:-1].any()
    last = h[-1:].double().requires_grad_()
    (want,) = torch.autograd.grad(by_torch(last, act), last, da[-1:].double())
    dh, _, _ = activation.gradient(h, da, act, Needs())
    near(None if dh is None else dh[-1:], want, MOST[torch.bfloat16])


def layer(dtype: torch.dtype, gated: bool, layout: str, biased: bool) -> dict[str, torch.Tensor]:
    wide = 2 * I if gated else I
    up, down = random(E, wide, H, scale=H**-0.5, dtype=dtype), random(E, H, I, scale=I**-0.5, dtype=dtype)
    if layout == "kn":
        up, down = (tensor.transpose(1, 2).contiguous() for tensor in (up, down))
    arguments = {"gate_up_weight": up, "down_weight": down}
    if biased:
        arguments |= {"gate_up_bias": random(E, wide, dtype=dtype), "down_bias": random(E, H, dtype=dtype, seed=3)}
    return arguments


def step(
    hidden: torch.Tensor,
    inputs: dict[str, torch.Tensor],
    ids: torch.Tensor,
    weights: torch.Tensor,
    frozen: dict[str, torch.Tensor] | None = None,
    **how: Any,
) -> list[torch.Tensor]:
    """The layer's result, and all its gradients but for those of what is frozen."""
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in inputs.items()}
    x, t = hidden.detach().requires_grad_(), weights.detach().requires_grad_()
    out = moe_mlp(x, topk_ids=ids, topk_weights=t, **leaves, **(frozen or {}), **how)
    dout = torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out).to(out)
    return [out.detach(), *torch.autograd.grad(out, [x, t, *leaves.values()], dout)]


@pytest.mark.parametrize("dtype", list(MOST), ids=str)
@pytest.mark.parametrize(
    ("activation_", "gated", "layout", "biased"),
    [("silu", True, "nk", False), ("swiglu_oai", True, "kn", True), ("relu2", False, "nk", True)],
)
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("T", [1, 37, 700])
def test_the_layer_is_near_float64(
    T: int, narrow: bool, activation_: str, gated: bool, layout: str, biased: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(T)
    inputs = layer(dtype, gated, layout, biased)
    hidden = random(T, H, dtype=dtype)
    weights = torch.rand(T, TOPK, device="cuda").to(dtype if narrow else torch.float32)
    ids = torch.randint(-2, E, (T, TOPK), device="cuda")  # some on other ranks
    how: dict[str, Any] = {"activation": activation_, "gated": gated, "w_layout": layout}
    got = step(hidden, inputs, ids, weights, **how)
    wide = {name: tensor.double().cpu() for name, tensor in inputs.items()}
    want = step(hidden.double().cpu(), wide, ids.cpu(), weights.double().cpu(), **how)
    most = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 2e-5}[dtype]
    for tensor, other in zip(got, want, strict=True):  # (one token's weights have gradients of two sums that cancel)
        near(tensor.cpu(), other, most * (10 if other.numel() <= TOPK else 1))
    for tensor, other in zip(
        got, step(hidden, inputs, ids, weights, **how), strict=True
    ):  # by a plan, where there is one
        assert torch.equal(tensor, other)


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("T", [1, 37, 700])
def test_frozen_biases(T: int, narrow: bool) -> None:
    torch.manual_seed(T)
    inputs = layer(torch.bfloat16, True, "kn", True)
    biases = {name: inputs.pop(name) for name in ("gate_up_bias", "down_bias")}
    hidden, ids = random(T, H), torch.randint(-2, E, (T, TOPK), device="cuda")
    weights = torch.rand(T, TOPK, device="cuda").to(torch.bfloat16 if narrow else torch.float32)
    how: dict[str, Any] = {"activation": "swiglu_oai", "w_layout": "kn"}
    learnt = step(hidden, inputs | biases, ids, weights, **how)
    for _ in range(3):  # by a plan from the second on
        got = step(hidden, inputs, ids, weights, frozen=biases, **how)
        for tensor, other in zip(got, learnt[: len(got)], strict=True):
            near(tensor, other, 2e-2 * (10 if other.numel() <= TOPK else 1))


def test_biases_of_any_strides() -> None:
    inputs = layer(torch.bfloat16, True, "nk", True)
    hidden, weights = random(40, H), torch.rand(40, TOPK, device="cuda")
    ids = torch.randint(0, E, (40, TOPK), device="cuda")
    cut = inputs["gate_up_bias"].repeat(1, 2)[:, : 2 * I]
    spread = inputs["down_bias"][0].expand(E, H)
    strided = inputs | {"gate_up_bias": cut, "down_bias": spread}
    dense = inputs | {"gate_up_bias": cut.contiguous(), "down_bias": spread.contiguous()}
    got, want = (moe_mlp(hidden, topk_ids=ids, topk_weights=weights, **arguments) for arguments in (strided, dense))
    assert torch.equal(got, want)


def test_torch_in_place_of_the_passes_is_as_near() -> None:
    inputs = layer(torch.bfloat16, True, "nk", False)
    hidden, weights = random(200, H), torch.rand(200, TOPK, device="cuda")
    ids = torch.randint(-2, E, (200, TOPK), device="cuda")
    got = step(hidden, inputs, ids, weights)
    with failed(lambda variant: isinstance(variant.op, RowOp)):
        by_torch = step(hidden, inputs, ids, weights)
        passes = snapshot().passes
        assert {key[0] for key in passes} >= {RowOp.ACTIVATION, RowOp.COMBINE}
        assert not any(passes.values())
    for tensor, other in zip(got, by_torch, strict=True):
        near(tensor, other, 2e-2)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # of leaves that were made on another one
def test_a_step_is_captured_and_replayed_with_other_routing() -> None:
    inputs = {name: tensor.requires_grad_() for name, tensor in layer(torch.bfloat16, True, "nk", False).items()}
    hidden = random(128, H).requires_grad_()
    weights, ids = (
        torch.rand(128, TOPK, device="cuda").requires_grad_(),
        torch.randint(0, E, (128, TOPK), device="cuda"),
    )
    dout = random(128, H, seed=5)
    leaves = [hidden, weights, *inputs.values()]

    def run() -> list[torch.Tensor]:
        out = moe_mlp(hidden, topk_ids=ids, topk_weights=weights, **inputs)
        return [out, *torch.autograd.grad(out, leaves, dout)]

    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        run()
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    other = torch.randint(-2, E, (128, TOPK), device="cuda")
    ids.copy_(other)
    graph.replay()
    for tensor, want in zip(captured, run(), strict=True):
        assert torch.equal(tensor, want)


def test_out_takes_what_a_layer_comes_to() -> None:
    inputs = layer(torch.bfloat16, True, "nk", False)
    weights, ids = torch.rand(128, TOPK, device="cuda"), torch.randint(-1, E, (128, TOPK), device="cuda")
    for T in (128, 128, 100, 127):  # the second and later ones by a program
        hidden = random(T, H, seed=T)
        want = moe_mlp(hidden, topk_ids=ids[:T], topk_weights=weights[:T], **inputs)
        out = torch.full_like(hidden, torch.nan)
        assert moe_mlp(hidden, topk_ids=ids[:T], topk_weights=weights[:T], out=out, **inputs) is out
        assert torch.equal(out, want)
        shifted = torch.full((T * H + 1,), torch.nan, device="cuda", dtype=out.dtype)[1:].view(T, H)
        assert torch.equal(moe_mlp(hidden, topk_ids=ids[:T], topk_weights=weights[:T], out=shifted, **inputs), want)
        moe_mlp(hidden, topk_ids=ids[:T], topk_weights=weights[:T], out=hidden, **inputs)
        assert torch.equal(hidden, want)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16])
@pytest.mark.parametrize("experts", [1, 8, 31, 128, 256, 257, 512, 513])
def test_routing_is_that_of_the_host(experts: int, dtype: torch.dtype) -> None:
    kernel = ops_routing.sort_slots(torch.zeros(4, dtype=dtype, device="cuda"), experts) is not None
    assert kernel == (experts < 513 and dtype is not torch.int16)
    for T, k in ((1, 1), (1, 8), (128, 2), (257, 1), (999, TOPK), (4096, 8), (9000, 10)):
        ids = torch.randint(-1, experts + 1, (T, k), device="cuda", dtype=dtype)
        if dtype is torch.int64:
            ids[::3] += 2**32  # no expert's, though its low word is
        for routed in (ids, ids[::2], torch.zeros_like(ids)):
            here, there = sort_routing(routed, experts), sort_routing(routed.cpu(), experts)
            for tensor, other in zip(here, there, strict=True):
                assert tensor.dtype is other.dtype
                assert torch.equal(tensor.cpu(), other)


def test_routing_in_a_graph_and_on_other_streams() -> None:
    ids = torch.randint(0, E, (700, TOPK), device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = sort_routing(ids, E)
    for _ in range(3):
        ids.random_(-1, E)
        graph.replay()
        for tensor, other in zip(captured, sort_routing(ids.cpu(), E), strict=True):
            assert torch.equal(tensor.cpu(), other)
    want = sort_routing(ids.cpu(), E)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    results = []
    for stream in streams:
        with torch.cuda.stream(stream):
            results += [sort_routing(ids, E) for _ in range(20)]
    torch.cuda.synchronize()
    for routing in results:
        for tensor, other in zip(routing, want, strict=True):
            assert torch.equal(tensor.cpu(), other)
