"""Products with an adapter against float64 ones with W + scale * B A written out, and their gradients."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from host_gpu import Device, use_low_rank_kernels
from pairwise import pairwise

from pretuned.artifacts.errors import InputError
from pretuned.artifacts.records import Fusion, Layout, Op
from pretuned.runtime import ExpertWeights, Lora, grouped_gemm, moe_mlp, sort_routing
from pretuned.runtime.dispatch import snapshot as dispatch_snapshot
from pretuned.runtime.launch import program
from pretuned.runtime.ops.low_rank import as_used

E, T, TOPK, N, K, R = 4, 11, 2, 12, 10, 4
SCALE = 0.75


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64).requires_grad_()


def whole(w: torch.Tensor, lora: Lora, layout: str = "nk") -> torch.Tensor:
    delta = lora.scale * lora.B @ lora.A
    return w + (delta if layout == "nk" else delta.transpose(1, 2))


FORMS = [
    dict(zip(("permute_x", "permute_y", "weigh", "bias", "kn"), on, strict=True))
    for on in itertools.product((False, True), repeat=5)
]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: "+".join(name for name, on in form.items() if on) or "plain")
@pytest.mark.parametrize("shared", [False, True])
def test_every_form_and_its_gradients(form: dict[str, bool], shared: bool) -> None:
    torch.manual_seed(0)
    routing = sort_routing(torch.stack([torch.randperm(E + 1)[:TOPK] for _ in range(T)]), E)  # E: on another rank
    x, w = random(T if form["permute_x"] else T * TOPK, K), random(E, N, K)
    adapters = 1 if shared else E
    lora = Lora(random(adapters, R, K), random(adapters, N, R), SCALE)
    weights, bias = random(T, TOPK), random(E, N)
    layout = "kn" if form["kn"] else "nk"
    if form["kn"]:
        w = w.detach().transpose(1, 2).contiguous().requires_grad_()
    how: dict[str, Any] = {
        "topk": TOPK,
        "gather_indices": routing.gather_indices,
        "permute_x": form["permute_x"],
        "permute_y": form["permute_y"],
        "w_layout": layout,
        "zero_tail": True,
        "bias": bias if form["bias"] else None,
    }
    if form["weigh"]:
        how |= {"topk_weights": weights, "fuse_mul_post": True}
    leaves = [x, lora.A, lora.B, *([weights] if form["weigh"] else []), *([bias] if form["bias"] else [])]
    want = grouped_gemm(x, whole(w, lora, layout), routing.m_sizes, **how)
    got = grouped_gemm(x, w, routing.m_sizes, lora=lora, **how)
    torch.testing.assert_close(got, want)
    dy = torch.randn_like(got)
    torch.testing.assert_close(torch.autograd.grad(got, leaves, dy), torch.autograd.grad(want, leaves, dy))


def test_a_frozen_weight_is_not_copied_and_gets_no_gradient() -> None:
    """The graph keeps x A.T, [M, r], beside the operands: nothing of w's size."""
    w = random(E, N, K).detach()
    lora, x, m_sizes = Lora(random(E, R, K), random(E, N, R), SCALE), random(9, K), torch.tensor([2, 3, 0, 4])
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        y = grouped_gemm(x, w, m_sizes, lora=lora)
    mine = {tensor.data_ptr() for tensor in (x, w, lora.A, lora.B, m_sizes)}
    assert {tensor.shape for tensor in kept if tensor.data_ptr() not in mine} == {(9, R)}
    y.sum().backward()
    assert w.grad is None
    assert lora.A.grad is not None


def test_padding_rows_and_more_of_them_than_slots() -> None:
    torch.manual_seed(0)
    index = torch.tensor([0, 2, -1, 1, 3, -1, 5, 4, -1])  # 3 tokens of 2 slots; one row of padding an expert
    m_sizes, x, w = torch.tensor([3, 3, 0, 3]), random(3, K), random(E, N, K)
    lora = Lora(random(E, R, K), random(E, N, R), SCALE)
    how: dict[str, Any] = {"topk": 2, "gather_indices": index, "permute_x": True, "permute_y": True}
    got = grouped_gemm(x, w, m_sizes, lora=lora, **how)
    want = grouped_gemm(x, whole(w, lora), m_sizes, **how)
    torch.testing.assert_close(got, want)
    leaves = (x, lora.A, lora.B)
    torch.testing.assert_close(torch.autograd.grad(got.sum(), leaves), torch.autograd.grad(want.sum(), leaves))


@pytest.mark.parametrize("format", ["fp8_block", "mxfp4", "mxfp8", "int4_g64"])
def test_quantised_weights(format: str) -> None:
    torch.manual_seed(0)
    w = ExpertWeights.quantize(torch.randn(E, 128, 128) / 11, format)
    m_sizes, dense = torch.tensor([2, 3, 0, 4]), w.dequantize(torch.float32)
    x = torch.randn(9, 128).bfloat16().requires_grad_()
    lora = Lora(*((torch.randn(shape) / 11).requires_grad_() for shape in ((E, R, 128), (E, 128, R))), 2.0)  # float32
    y = grouped_gemm(x, w, m_sizes, lora=lora)
    dy = torch.randn_like(y)
    got = torch.autograd.grad(y, (x, lora.A, lora.B), dy)
    whole_x = x.detach().float().requires_grad_()
    want = grouped_gemm(whole_x, whole(dense, lora), m_sizes)
    wanted = torch.autograd.grad(want, (whole_x, lora.A, lora.B), dy.float())
    assert [tensor.dtype for tensor in got] == [torch.bfloat16, torch.float32, torch.float32]
    for tensor, other in ((y, want), *zip(got, wanted, strict=True)):
        assert float((tensor.float() - other).detach().norm() / other.detach().norm()) < (
            5e-2 if format == "fp8_block" else 1e-2
        )


@pytest.mark.parametrize("weights_on", ["output", "input"])
@pytest.mark.parametrize("which", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("gated", [True, False])
def test_a_whole_layer(weights_on: str, which: tuple[bool, bool], gated: bool) -> None:
    torch.manual_seed(0)
    H, I = 10, 6  # noqa: E741
    wide = 2 * I if gated else I
    hidden, ids, weights = random(T, H), torch.randint(0, E, (T, TOPK)), random(T, TOPK)
    up, down = random(E, wide, H), random(E, H, I)
    pair = Lora(random(E, R, H), random(E, wide, R), SCALE), Lora(random(E, R, I), random(E, H, R), SCALE)
    lora = pair[0] if which[0] else None, pair[1] if which[1] else None
    more: dict[str, Any] = {"gated": gated, "weights_on": weights_on, "gate_up_bias": random(E, wide)}
    got = moe_mlp(hidden, up, down, ids, weights, "silu", lora=lora, **more)
    both = whole(up, pair[0]) if which[0] else up, whole(down, pair[1]) if which[1] else down
    want = moe_mlp(hidden, *both, ids, weights, "silu", **more)
    torch.testing.assert_close(got, want)
    leaves = [hidden, weights, up, *(matrix for part in lora if part is not None for matrix in part[:2])]
    dout = torch.randn_like(got)
    torch.testing.assert_close(torch.autograd.grad(got, leaves, dout), torch.autograd.grad(want, leaves, dout))
    torch.testing.assert_close(
        moe_mlp(hidden, up, down, ids, weights, "silu", lora=(None, None), **more),
        moe_mlp(hidden, up, down, ids, weights, "silu", **more),
    )


def test_gradcheck_with_every_input() -> None:
    torch.manual_seed(0)
    routing = sort_routing(torch.randint(0, E, (T, TOPK)), E)
    inputs = random(T, K), random(E, N, K), random(E, R, K), random(E, N, R), random(T, TOPK), random(E, N)

    def call(x: torch.Tensor, w: torch.Tensor, A: torch.Tensor, B: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        return grouped_gemm(
            x,
            w,
            routing.m_sizes,
            TOPK,
            routing.gather_indices,
            permute_x=True,
            topk_weights=more[0],
            fuse_mul_post=True,
            bias=more[1],
            lora=Lora(A, B, SCALE),
        )

    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)


@pytest.mark.parametrize("learns", ["A", "B", "x", "w", "bias"])
def test_one_gradient_alone(learns: str) -> None:
    """Only what it needs is kept; it is what it is among all."""
    torch.manual_seed(0)
    inputs = {"x": random(9, K), "w": random(E, N, K), "A": random(E, R, K), "B": random(E, N, R), "bias": random(E, N)}
    m_sizes = torch.tensor([2, 3, 0, 4])

    def call(x: torch.Tensor, w: torch.Tensor, A: torch.Tensor, B: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return grouped_gemm(x, w, m_sizes, bias=bias, lora=Lora(A, B, SCALE))

    (wanted,) = torch.autograd.grad(call(**inputs).square().sum(), inputs[learns])
    alone = {name: tensor.detach().requires_grad_(name == learns) for name, tensor in inputs.items()}
    (got,) = torch.autograd.grad(call(**alone).square().sum(), alone[learns])
    torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("inside", [False, True])
def test_rows_past_the_last_expert_s(
    device: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, inside: bool
) -> None:
    """Zero with zero_tail, else left as they are in ``out``; dx of them is zero."""
    if inside:
        use_low_rank_kernels(monkeypatch, tmp_path)
    x, w, m_sizes = torch.randn(9, 12), torch.randn(E, 8, 12), torch.tensor([2, 0, 3, 1])
    lora = Lora(torch.randn(E, R, 12), torch.randn(E, 8, R), SCALE)
    device.visible = True
    torch.use_deterministic_algorithms(True)  # new memory is NaN
    try:
        out = torch.full((9, 8), 7.0)
        assert grouped_gemm(x, w, m_sizes, lora=lora, out=out) is out
        y = grouped_gemm(x.requires_grad_(), w, m_sizes, lora=lora, zero_tail=True)
        (dx,) = torch.autograd.grad(y[:6].sum(), x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert (out[6:] == 7).all()
    assert (y[6:] == 0).all()
    assert (dx[6:] == 0).all()
    torch.testing.assert_close(out[:6], y[:6].detach())
    assert ((Op.DX, Fusion.LOW_RANK) in device.launched) is inside


def test_autocast_and_out() -> None:
    torch.manual_seed(0)
    x, w, m_sizes = torch.randn(9, K), torch.randn(E, N, K), torch.tensor([2, 3, 0, 4])
    lora = Lora(torch.randn(E, R, K), torch.randn(E, N, R), SCALE)
    want = grouped_gemm(x, whole(w, lora), m_sizes)
    with torch.autocast("cpu", torch.bfloat16):
        y = grouped_gemm(x, w, m_sizes, lora=lora)
    assert y.dtype is torch.bfloat16
    assert float((y.float() - want).norm() / want.norm()) < 1e-2
    out = torch.empty(9, N)
    assert grouped_gemm(x, w, m_sizes, lora=lora, out=out) is out
    torch.testing.assert_close(out, want)


def test_what_does_not_fit_is_refused() -> None:
    x, w, m_sizes = torch.randn(9, K), torch.randn(E, N, K), torch.tensor([2, 3, 0, 4])
    A, B = torch.randn(E, R, K), torch.randn(E, N, R)
    for lora, message in (
        ((A, B), "lora is a tuple, wanted a pretuned.runtime.Lora"),
        (Lora(A[:2], B), r"lora.A is of shape \[2, 4, 10\], wanted \[E, r, K\] = \[4 or 1, 1 to 256, 10\]"),
        (Lora(A, B[:, :, :3]), r"lora.B is of shape \[4, 12, 3\], wanted \[E, N, r\] = \[4 or 1, N, 4\]"),
        (Lora(A, B[:, :5]), r"lora.B is of shape \[4, 5, 4\], wanted \[E or 1, N=12, r=4\]"),
        (Lora(A, B.long()), "lora.B is torch.int64, wanted a floating-point type"),
        (Lora(A, None), "lora.B is a NoneType"),  # type: ignore[arg-type]
        (Lora(A, B, torch.ones(1)), r"lora.scale is tensor"),  # type: ignore[arg-type]
    ):
        with pytest.raises(InputError, match=message):
            grouped_gemm(x, w, m_sizes, lora=lora)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="dX_only or dW_only with lora"):
        grouped_gemm(x, w, m_sizes, lora=Lora(A, B), dX_only=True)
    for p in (0.0, 0.5):
        with pytest.raises(InputError, match="out with a lora that requires grad"):
            grouped_gemm(x, w, m_sizes, lora=Lora(A, B.requires_grad_(), dropout=p), out=torch.empty(9, N))
    with pytest.raises(InputError, match="moe_mlp: lora is a Lora, wanted"):
        moe_mlp(x, w, w, torch.zeros(9, 1, dtype=torch.int64), torch.ones(9, 1), lora=Lora(A, B))  # type: ignore[arg-type]


@pairwise(dict.fromkeys(("permute_x", "permute_y", "weigh", "bias", "kn", "inside"), (False, True)), strength=3)
def test_the_low_rank_part_is_in_the_product_s_kernel(
    device: Device,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    permute_x: bool,
    permute_y: bool,
    weigh: bool,
    bias: bool,
    kn: bool,
    inside: bool,
) -> None:
    """Forward and dX, where rows don't go elsewhere and are not weighed: by the code that there is for it, or not."""
    form = {"permute_x": permute_x, "permute_y": permute_y, "weigh": weigh, "bias": bias, "kn": kn}
    monkeypatch.setattr(program, "KINDS", (torch.float32,))
    if inside:
        use_low_rank_kernels(monkeypatch, tmp_path)
    device.layout = Layout.KN if form["kn"] else Layout.NK
    generator = torch.Generator().manual_seed(1)
    routing = sort_routing(torch.randint(-1, E + 1, (T, TOPK), generator=generator), E)  # some on other ranks

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).requires_grad_()

    x, w = random(T if form["permute_x"] else T * TOPK, 12), random(*((E, 12, 8) if form["kn"] else (E, 8, 12)))
    lora, weights, bias = Lora(random(E, R, 12), random(E, 8, R), SCALE), random(T, TOPK), random(E, 8)
    how: dict[str, Any] = {
        "topk": TOPK,
        "gather_indices": routing.gather_indices,
        "permute_x": form["permute_x"],
        "permute_y": form["permute_y"],
        "w_layout": "kn" if form["kn"] else "nk",
        "bias": bias if form["bias"] else None,
    }
    how |= {"topk_weights": weights, "fuse_mul_post": True} if form["weigh"] else {}
    leaves = [x, lora.A, lora.B, *([weights] if form["weigh"] else []), *([bias] if form["bias"] else [])]
    used = None if form["permute_y"] else int(routing.m_sizes.sum())
    results = []
    for simulated in (False, True):
        device.visible = simulated
        y = grouped_gemm(x, w.detach(), routing.m_sizes, lora=lora, **how)[:used]
        results.append([y.detach(), *torch.autograd.grad(y, leaves, torch.linspace(-1, 1, y.numel()).view_as(y))])
    for got, want in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)
    stay = not form["permute_y"] and not form["weigh"] and (form["permute_x"] or not form["bias"])
    forward = {(Op.FORWARD, Fusion.LOW_RANK | (Fusion.GATHER if form["permute_x"] else Fusion.NONE))} if stay else set()
    dx = {(Op.DX, Fusion.LOW_RANK)} if not (form["permute_x"] and form["weigh"]) else set()
    ran = {kind for kind in device.launched if Fusion.LOW_RANK in kind[1]}
    assert ran == (forward | dx if inside else set())


@pytest.mark.parametrize("r", [1, 3, 4, 6])
def test_a_rank_of_no_whole_16_bytes_takes_the_kernel_too(
    device: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, r: int
) -> None:
    """By rows and columns of zeros beside A's and B's, whose gradients are none of the caller's."""
    monkeypatch.setattr(program, "KINDS", (torch.float32,))
    use_low_rank_kernels(monkeypatch, tmp_path)
    torch.manual_seed(r)
    x, w, m_sizes = torch.randn(9, 12).requires_grad_(), torch.randn(E, 8, 12), torch.tensor([2, 3, 0, 4])
    low = torch.randn(E, r, 12).requires_grad_(), torch.randn(E, 8, r).requires_grad_()
    up, down, ids = torch.randn(E, 16, 12) / 4, torch.randn(E, 12, 8) / 4, torch.randint(0, E, (9, TOPK))
    pair = [(torch.randn(shape) / 4).requires_grad_() for shape in ((E, r, 12), (E, 16, r), (1, r, 8), (1, 12, r))]
    results = []
    for simulated in (False, True):
        device.visible = simulated
        y = grouped_gemm(x, w, m_sizes, lora=Lora(*low, SCALE))
        results.append([y, *torch.autograd.grad(y.sum(), (x, *low))])
        for _ in range(3):
            both = Lora(*pair[:2], SCALE), Lora(*pair[2:], SCALE)
            out = moe_mlp(x, up, down, ids, torch.ones(9, TOPK), lora=both)
        results[-1] += [out, *torch.autograd.grad(out.sum(), (x, *pair))]
    for got, want in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    ran = {kind for kind in device.launched if Fusion.LOW_RANK in kind[1]}
    first = (Op.FORWARD, Fusion.LOW_RANK | Fusion.GATHER)
    assert ran == {(Op.FORWARD, Fusion.LOW_RANK), first, (Op.DX, Fusion.LOW_RANK)}


def test_a_dtype_that_no_adapter_can_be_cast_to_is_left_to_the_checks(
    device: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Beside plans of good calls, by whose weights and number of rows they are found."""
    monkeypatch.setattr(program, "KINDS", (torch.float32,))
    use_low_rank_kernels(monkeypatch, tmp_path)
    device.visible = True
    x, w, m_sizes = torch.randn(9, 12), torch.randn(E, 8, 12), torch.tensor([2, 3, 0, 4])
    low = Lora(torch.randn(E, R, 12), torch.randn(E, 8, R), SCALE)
    up, down, ids = torch.randn(E, 16, 12), torch.randn(E, 12, 8), torch.randint(0, E, (9, TOPK))
    pair = Lora(torch.randn(E, R, 12), torch.randn(E, 16, R)), Lora(torch.randn(E, R, 8), torch.randn(E, 12, R))
    for _ in range(2):
        grouped_gemm(x, w, m_sizes, lora=low)
        moe_mlp(x, up, down, ids, torch.ones(9, TOPK), lora=pair)
    snapshot = dispatch_snapshot.snapshot()
    assert {type(plan).__name__ for plan in snapshot.plans.values()} == {"ProductPlan", "LayerPlan"}
    odd = x.abs().to(torch.float8_e8m0fnu)
    with pytest.raises(RuntimeError, match="without overflow"):
        as_used(low, odd.dtype, E)
    with pytest.raises(InputError, match="wanted x's dtype"):
        grouped_gemm(odd, w, m_sizes, lora=low)
    with pytest.raises(InputError, match=r"hidden is torch\.float8_e8m0fnu"):
        moe_mlp(odd, up, down, ids, torch.ones(9, TOPK), lora=pair)


@pytest.mark.parametrize("form", [{}, {"permute_x": True}, {"permute_x": True, "permute_y": True}, {"permute_y": True}])
def test_dropout_is_on_what_a_reads(form: dict[str, bool]) -> None:
    """PEFT's layers drop x of the low-rank part alone, drawn by torch's generator anew in each call."""
    torch.manual_seed(0)
    routing = sort_routing(torch.randint(0, E, (T, TOPK)), E)
    x, w, bias = random(T if "permute_x" in form else T * TOPK, K), random(E, N, K), random(E, N)
    A, B = random(E, R, K), random(E, N, R)
    how: dict[str, Any] = {"topk": TOPK, "gather_indices": routing.gather_indices, **form}

    def call(x: torch.Tensor, w: torch.Tensor, **more: Any) -> torch.Tensor:
        return grouped_gemm(x, w, routing.m_sizes, **how, **more)

    torch.manual_seed(7)
    got = call(x, w, bias=bias, lora=Lora(A, B, SCALE, dropout=0.5))
    torch.manual_seed(7)
    seen = torch.nn.functional.dropout(x, 0.5)
    want = call(x, w, bias=bias) + call(seen, SCALE * B @ A)
    torch.testing.assert_close(got, want)
    assert not torch.equal(seen, x)
    leaves, dy = (x, w, A, B, bias), torch.randn_like(got)
    torch.testing.assert_close(torch.autograd.grad(got, leaves, dy), torch.autograd.grad(want, leaves, dy))


def test_a_layer_with_dropout(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its plan is not that of a layer without; no kernel has its low-rank part in it."""
    monkeypatch.setattr(program, "KINDS", (torch.float32,))
    torch.manual_seed(0)
    x, up, down, ids = torch.randn(T, 12), torch.randn(E, 16, 12), torch.randn(E, 12, 8), torch.randint(0, E, (T, TOPK))
    weights, low = torch.rand(T, TOPK), [torch.randn(s) for s in ((E, 4, 12), (E, 16, 4), (E, 4, 8), (E, 12, 4))]

    def call(p: float) -> torch.Tensor:
        torch.manual_seed(3)
        pair = Lora(low[0], low[1], SCALE, p), Lora(low[2], low[3], SCALE)
        return moe_mlp(x, up, down, ids, weights, lora=pair)

    device.visible = False
    wanted = {p: call(p) for p in (0.0, 0.5)}
    assert not torch.allclose(wanted[0.0], wanted[0.5])
    device.visible = True
    for p in (0.0, 0.0, 0.5, 0.5, 0.0):
        torch.testing.assert_close(call(p), wanted[p], rtol=1e-4, atol=1e-3)
    for wrong in (False, None, torch.tensor(0.0)):  # beside a plan of a layer without
        with pytest.raises(InputError, match=r"lora.dropout is .*, wanted a number of at least 0 and below 1"):
            call(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("p", [-0.1, 1.0, True, False, "0.1", None])
def test_what_is_no_dropout(p: Any) -> None:
    x, w, m_sizes = torch.randn(9, K), torch.randn(E, N, K), torch.tensor([2, 3, 0, 4])
    lora = Lora(torch.randn(E, R, K), torch.randn(E, N, R), 1.0, p)
    with pytest.raises(InputError, match=r"lora.dropout is .*, wanted a number of at least 0 and below 1"):
        grouped_gemm(x, w, m_sizes, lora=lora)


@pytest.mark.parametrize("scale", [True, False, "1", None, 1j])
def test_what_is_no_scale(scale: Any) -> None:
    x, w, m_sizes = torch.randn(9, K), torch.randn(E, N, K), torch.tensor([2, 3, 0, 4])
    with pytest.raises(InputError, match=r"lora.scale is .*, wanted a number"):
        grouped_gemm(x, w, m_sizes, lora=Lora(torch.randn(E, R, K), torch.randn(E, N, R), scale))
