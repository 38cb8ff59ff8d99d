"""Rows of experts with room between them: padding is neither read nor written, on any device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from host_gpu import Device, Replay, replays

from pretuned.artifacts.errors import InputError
from pretuned.artifacts.records import Fusion, Op, RowOp
from pretuned.kernels import reference
from pretuned.kernels.activations import Activation
from pretuned.kernels.spec import Config
from pretuned.runtime import Lora, experts_mlp, explain, grouped_gemm
from pretuned.runtime.launch import program
from pretuned.runtime.ops.padded_rows import place

E, MOST, N, K, I = 4, 5, 8, 12, 16  # noqa: E741
COUNTS = ([3, 0, 5, 1], [0, 0, 0, 0], [5, 5, 5, 5], [9, -2, 2**31 - 1, 5])
STARTS = [14, 0, 4, 9]  # of 20 rows, in which the last expert comes second
CANARY = 7.25


@pytest.fixture(params=["cpu", "gpu"])
def where(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """On the CPU, and by an emulated GPU's kernels, which compute in float32."""
    if request.param == "gpu":
        request.getfixturevalue("device")
        monkeypatch.setattr(program, "KINDS", (torch.float32,))
    else:
        request.getfixturevalue("clean_places")
    return request.param


class Call:
    """Tensors of a call whose padding is poisoned, and what it comes to in plain torch."""

    def __init__(self, counts: list[int], *, starts: bool = False, kind: torch.dtype = torch.int32, seed: int = 0):
        self.generator = torch.Generator().manual_seed(seed)
        R = E * MOST
        self.starts = STARTS if starts else [e * MOST for e in range(E)]
        room = [6, 4, 5, 5] if starts else [MOST] * E
        if starts:
            counts = [min(max(count, 0), most) for count, most in zip(counts, room, strict=True)]
        self.counts = [min(max(count, 0), most) for count, most in zip(counts, room, strict=True)]
        self.m_sizes = torch.tensor(counts, dtype=kind)
        self.m_starts = torch.tensor(self.starts, dtype=kind) if starts else None
        self.there = torch.zeros(R, dtype=torch.bool)
        for start, count in zip(self.starts, self.counts, strict=True):
            self.there[start : start + count] = True
        self.shape = (R,) if starts else (E, MOST)

    def random(self, *shape: int, grad: bool = False) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator).requires_grad_(grad)

    def rows(self, columns: int, *, grad: bool = False) -> torch.Tensor:
        """Rows, NaN where none is there."""
        tensor = self.random(E * MOST, columns)
        tensor[~self.there] = float("nan")
        return tensor.view(*self.shape, columns).requires_grad_(grad)

    def each(self, x: torch.Tensor, of: Callable[[int, torch.Tensor], torch.Tensor], columns: int) -> torch.Tensor:
        """of(e, rows of expert e), in place among zeros."""
        flat, y = x.reshape(-1, x.shape[-1]), torch.zeros(E * MOST, columns)
        for e, (start, count) in enumerate(zip(self.starts, self.counts, strict=True)):
            if count:
                index = torch.arange(start, start + count)
                y = y.index_put((index,), of(e, flat[start : start + count]))
        return y.view(*self.shape, columns)

    def gradients(self, y: torch.Tensor, asked: list[torch.Tensor], dy: torch.Tensor) -> list[torch.Tensor]:
        """Return the gradients of autograd; zeros where no row is there."""
        y = y + 0 * sum(leaf.sum() for leaf in asked)
        return list(torch.autograd.grad(y, asked, dy.nan_to_num(0.0)))

    def packed(self, y: torch.Tensor) -> torch.Tensor:
        """The rows that are there."""
        return y.reshape(-1, y.shape[-1])[self.there]

    def padding(self, y: torch.Tensor) -> torch.Tensor:
        return y.reshape(-1, y.shape[-1])[~self.there]


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    largest = float(want.abs().nan_to_num(0, 0).max()) if want.numel() else 0.0  # of such a sum's parts
    torch.testing.assert_close(got, want, rtol=1e-4, atol=max(1e-5, 1e-6 * largest))


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize(("starts", "kind"), [(False, torch.int32), (False, torch.int64), (True, torch.int64)])
def test_a_product_leaves_padding_alone(where: str, counts: list[int], starts: bool, kind: torch.dtype) -> None:
    call = Call(counts, starts=starts, kind=kind)
    x, w, bias = call.rows(K), call.random(E, N, K), call.random(E, N)
    want = call.each(x, lambda e, rows: rows @ w[e].T + bias[e], N)
    out = torch.full((*call.shape, N), CANARY)
    for _ in range(2):  # the second call is its plan's
        inputs: dict[str, Any] = {"m_starts": call.m_starts, "bias": bias}
        y = grouped_gemm(x, w, call.m_sizes, **inputs)
        assert y.shape == (*call.shape, N)
        close(call.packed(y), call.packed(want))
        assert grouped_gemm(x, w, call.m_sizes, out=out, **inputs) is out
        close(call.packed(out), call.packed(want))
        assert (call.padding(out) == CANARY).all()
        close(grouped_gemm(x, w, call.m_sizes, zero_tail=True, **inputs), want)
        kn = grouped_gemm(x, w.transpose(1, 2).contiguous(), call.m_sizes, w_layout="kn", **inputs)
        close(call.packed(kn), call.packed(want))


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize(("starts", "low"), [(False, False), (False, True), (True, False), (True, True)])
def test_gradients_read_no_padding(where: str, counts: list[int], starts: bool, low: bool) -> None:
    call = Call(counts, starts=starts)
    x, w, bias = call.rows(K, grad=True), call.random(E, N, K, grad=True), call.random(E, N, grad=True)
    A, B = call.random(E, 4, K, grad=True), call.random(E, N, 4, grad=True)
    lora = Lora(A, B, 0.5) if low else None
    asked = [x, w, bias, *((A, B) if low else ())]

    def of(e: int, rows: torch.Tensor) -> torch.Tensor:
        more = 0.5 * rows @ A[e].T @ B[e].T if low else 0
        return rows @ w[e].T + bias[e] + more

    dy = call.rows(N)
    y = grouped_gemm(x, w, call.m_sizes, m_starts=call.m_starts, bias=bias, lora=lora, expected_rows=3)
    got = torch.autograd.grad(y, asked, dy)
    clean = x.detach().nan_to_num(0.0).requires_grad_()
    want_y = call.each(clean, of, N)
    want = call.gradients(want_y, [clean, *asked[1:]], dy)
    close(call.packed(y.detach()), call.packed(want_y.detach()))
    for tensor, other in zip(got, want, strict=True):
        close(tensor, other)


def test_only_one_gradient(where: str) -> None:
    call = Call(COUNTS[0])
    x, w = call.rows(K, grad=True), call.random(E, N, K, grad=True)
    dy = call.rows(N)
    for only, there in (("dX_only", 0), ("dW_only", 1)):
        y = grouped_gemm(x, w, call.m_sizes, **{only: True})
        tensor = torch.autograd.grad(y, [x, w], dy, allow_unused=True)
        assert [gradient is not None for gradient in tensor] == [there == 0, there == 1]


ACTS = [("silu", True, False), ("gelu_tanh", False, False), (Activation("swiglu", limit=3.0), True, True)]


def layer_of(call: Call, act: Any, *, grad: bool = False, biases: bool = False) -> dict[str, Any]:
    _, gated, _ = act
    wide = 2 * I if gated else I
    weights = {"gate_up_weight": call.random(E, wide, K, grad=grad), "down_weight": call.random(E, K, I, grad=grad)}
    if biases:
        weights |= {"gate_up_bias": call.random(E, wide, grad=grad), "down_bias": call.random(E, K, grad=grad)}
    return weights


def layer_by_torch(call: Call, x: torch.Tensor, inputs: dict[str, Any], act: Any, low: Any = None) -> torch.Tensor:
    function, gated, interleaved = act
    function = Activation(function) if isinstance(function, str) else function
    up_bias, down_bias = inputs.get("gate_up_bias"), inputs.get("down_bias")

    def of(e: int, rows: torch.Tensor) -> torch.Tensor:
        h = rows @ inputs["gate_up_weight"][e].T + (0 if up_bias is None else up_bias[e])
        if low is not None:
            h = h + low[0].scale * rows @ low[0].A[e].T @ low[0].B[e].T
        a = reference.activation(h, function, gated=gated, interleaved=interleaved)
        y = a @ inputs["down_weight"][e].T + (0 if down_bias is None else down_bias[e])
        return y if low is None else y + low[1].scale * a @ low[1].A[e].T @ low[1].B[e].T

    return call.each(x, of, K)


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("starts", [False, True])
def test_a_layer_leaves_padding_alone(where: str, counts: list[int], act: Any, starts: bool) -> None:
    call = Call(counts, starts=starts)
    x, inputs = call.rows(K), layer_of(call, act, biases=starts)
    want = layer_by_torch(call, x, inputs, act)
    how: dict[str, Any] = {"activation": act[0], "gated": act[1], "interleaved": act[2], "m_starts": call.m_starts}
    out = torch.full_like(x, CANARY)
    for _ in range(2):
        y = experts_mlp(x, m_sizes=call.m_sizes, **inputs, **how)
        close(call.packed(y), call.packed(want))
        assert experts_mlp(x, m_sizes=call.m_sizes, out=out, **inputs, **how) is out
        close(call.packed(out), call.packed(want))
        assert (call.padding(out) == CANARY).all()
        close(experts_mlp(x, m_sizes=call.m_sizes, zero_tail=True, **inputs, **how), want)
        own = x.clone()
        experts_mlp(own, m_sizes=call.m_sizes, out=own, **inputs, **how)
        close(call.packed(own), call.packed(want))
        assert call.padding(own).isnan().all()


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize(("act", "low"), [(ACTS[0], False), (ACTS[1], True), (ACTS[2], True)])
def test_gradients_of_a_layer(where: str, counts: list[int], act: Any, low: bool) -> None:
    call = Call(counts)
    x, inputs = call.rows(K, grad=True), layer_of(call, act, grad=True, biases=True)
    lora = None
    if low:
        wide = inputs["gate_up_weight"].shape[1]
        lora = (
            Lora(call.random(E, 4, K, grad=True), call.random(E, wide, 4, grad=True), 0.5),
            Lora(call.random(E, 4, I, grad=True), call.random(E, K, 4, grad=True), 2.0),
        )
    asked = [x, *inputs.values(), *(each for pair in lora or () for each in pair[:2])]
    dy = call.rows(K)
    y = experts_mlp(x, m_sizes=call.m_sizes, activation=act[0], gated=act[1], interleaved=act[2], lora=lora, **inputs)
    got = torch.autograd.grad(y, asked, dy)
    clean = x.detach().nan_to_num(0.0).requires_grad_()
    want_y = layer_by_torch(call, clean, inputs, act, lora)
    want = call.gradients(want_y, [clean, *asked[1:]], dy)
    close(call.packed(y.detach()), call.packed(want_y.detach()))
    for tensor, other in zip(got, want, strict=True):
        close(tensor, other)
    if low:  # and where nothing needs a gradient
        with torch.no_grad():
            y = experts_mlp(
                x, m_sizes=call.m_sizes, activation=act[0], gated=act[1], interleaved=act[2], lora=lora, **inputs
            )
        close(call.packed(y), call.packed(want_y.detach()))


def test_a_graph_replays_with_other_counts(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches of a call depend on no count: with other counts they are the same."""
    monkeypatch.setattr(program, "KINDS", (torch.float32,))
    taken: list[Replay] = []
    ran = []
    with replays(taken.append):
        call = Call(COUNTS[0])
        inputs, x = layer_of(call, ACTS[0]), call.rows(K)
        for counts in COUNTS:
            now = Call(counts)
            x.copy_(now.rows(K))
            call.m_sizes.copy_(now.m_sizes)
            device.launches.clear()
            y = experts_mlp(x, m_sizes=call.m_sizes, **inputs)
            ran.append([(launch.code, launch.grid) for launch in device.launches])
            close(now.packed(y), now.packed(layer_by_torch(now, x, inputs, ACTS[0])))
    assert all(run == ran[0] for run in ran)
    assert len(taken) == len(COUNTS) - 1


def test_rows_that_are_there_are_all_that_row_kernels_touch(device: Device) -> None:
    call = Call(COUNTS[0])
    experts_mlp(call.rows(K), m_sizes=call.m_sizes, **layer_of(call, ACTS[0]))
    assert RowOp.COMBINE not in device.passed
    assert device.passed.count(RowOp.ACTIVATION) == 1


@pytest.mark.parametrize("starts", [False, True])
def test_one_launch_lists_the_rows(device: Device, starts: bool) -> None:
    call = Call(COUNTS[3], starts=starts, kind=torch.int64)
    grouped_gemm(call.rows(K), call.random(E, N, K), call.m_sizes, m_starts=call.m_starts)
    assert len(device.launches) == 2
    assert [row_kernel.code.op for row_kernel in device.passes] == [RowOp.PLACE_ROWS]
    device.there -= {RowOp.PLACE_ROWS}
    by_torch = place(call.m_sizes, call.m_starts, 20 if starts else MOST, 20)
    device.there |= {RowOp.PLACE_ROWS}
    for tensor, other in zip(place(call.m_sizes, call.m_starts, 20 if starts else MOST, 20), by_torch, strict=True):
        assert tensor.dtype is torch.int32
        assert torch.equal(tensor, other)


def test_explain_knows_padded_rows(device: Device) -> None:
    call = Call(COUNTS[0])
    x, w = call.rows(K), call.random(E, N, K)
    explanation = explain(x, w, call.m_sizes, sm=90, expected_rows=5)
    assert (explanation.M, explanation.expected_rows, explanation.problem.fusion) == (E * MOST, 5, Fusion.GATHER)
    device.launches.clear()
    grouped_gemm(x, w, call.m_sizes, expected_rows=5)
    assert device.launched == [(Op.FORWARD, explanation.problem.fusion)]
    assert explanation.chosen is not None
    assert explanation.chosen.config == Config.from_pairs(device.products[0].code.config)


def refused(match: str, call: Callable[[], Any]) -> None:
    with pytest.raises(InputError, match=match):
        call()


def test_bad_input(where: str) -> None:
    call = Call(COUNTS[0])
    x, w, sizes = call.rows(K), call.random(E, N, K), call.m_sizes
    flat, starts = x.view(-1, K), torch.tensor(STARTS)
    grouped_gemm(x, w, sizes)  # what is refused after it has no plan either
    refused(r"x is of shape \[3, 5, 12\], wanted \[E, M_max, K\] with E=4", lambda: grouped_gemm(x[:3], w, sizes))
    refused(r"leave one of the two away", lambda: grouped_gemm(x, w, sizes, m_starts=starts))
    refused(r"m_starts is torch.float32", lambda: grouped_gemm(flat, w, sizes, m_starts=starts.float()))
    refused(r"m_starts is torch.int64 of shape \[3\]", lambda: grouped_gemm(flat, w, sizes, m_starts=starts[:3]))
    refused("topk with x", lambda: grouped_gemm(x, w, sizes, 2))
    index = torch.arange(20)
    refused("gather_indices with m_starts", lambda: grouped_gemm(flat, w, sizes, 1, index, m_starts=starts))
    refused("expected_rows is 21, wanted an int of 0 to E", lambda: grouped_gemm(x, w, sizes, expected_rows=21))
    refused(r"out is of shape \[20, 8\]", lambda: grouped_gemm(x, w, sizes, out=torch.empty(20, N)))
    for name, shared in (("x", torch.randn(E, MOST, K)), ("w", torch.randn(E, N, K))):
        inputs = {"x": x, "w": w, name: shared}
        into = shared.view(-1)[: E * MOST * N].view(E, MOST, N)
        grouped_gemm(inputs["x"], inputs["w"], sizes, out=torch.empty(E, MOST, N))  # whose plan sees it, too
        refused(
            f"out is in the memory of {name},",
            lambda inputs=inputs, into=into: grouped_gemm(inputs["x"], inputs["w"], sizes, out=into),
        )
    refused(r"bias is of shape", lambda: grouped_gemm(x, w, sizes, bias=torch.empty(N)))
    layer = layer_of(call, ACTS[0])
    refused("experts_mlp: x is of shape", lambda: experts_mlp(flat, m_sizes=sizes, **layer))
    down = layer | {"down_weight": torch.empty(E, K + 1, I)}
    refused("experts_mlp: down_weight is", lambda: experts_mlp(x, m_sizes=sizes, **down))
    other = layer | {"down_weight": torch.empty(E, K, I + 1)}
    refused("of the product with down_weight as w", lambda: experts_mlp(x, m_sizes=sizes, **other))
    refused("activation", lambda: experts_mlp(x, m_sizes=sizes, activation="tanh", **layer))


def test_starts_that_overlap_are_seen_on_the_host(clean_places: object) -> None:
    x, w, sizes = torch.randn(20, K), torch.randn(E, N, K), torch.tensor([3, 2, 0, 1])
    for starts, match in (
        ([0, 2, 5, 9], "rows 2 to 3 for expert 1, of which some are expert 0's"),
        ([0, 3, 1, 20], "rows 20 to 20 for expert 3, wanted rows of 0 to M - 1 = 19"),
        ([-1, 3, 0, 9], "rows -1 to 1 for expert 0"),
    ):
        with pytest.raises(InputError, match=match):
            grouped_gemm(x, w, sizes, m_starts=torch.tensor(starts))


def test_nothing_past_m_is_touched_by_bad_starts(device: Device) -> None:
    """On a GPU starts are not read on the host: rows that would be elsewhere are not there."""
    x, w = torch.randn(20, K), torch.randn(E, N, K)
    sizes, starts = torch.tensor([3, 2, 4, 2**40]), torch.tensor([-1, 2**40, 18, 0])
    out = torch.full((20, N), CANARY)
    grouped_gemm(x, w, sizes, m_starts=starts, out=out)
    want = torch.cat([x @ w[3].T])
    close(out[:18], want[:18])


def test_no_rows_no_experts(where: str) -> None:
    w = torch.randn(E, N, K)
    none = torch.zeros(E, dtype=torch.int32)
    assert grouped_gemm(torch.empty(E, 0, K), w, none).shape == (E, 0, N)
    assert grouped_gemm(torch.empty(0, 3, K), w[:0], none[:0]).shape == (0, 3, N)


def test_dropout_is_beside_the_product(where: str) -> None:
    torch.manual_seed(0)
    call = Call(COUNTS[0])
    x, w = call.rows(K), call.random(E, N, K)
    lora = Lora(call.random(E, 4, K), torch.zeros(E, N, 4), 1.0, 0.5)
    out = torch.full((E, MOST, N), CANARY)
    y = grouped_gemm(x, w, call.m_sizes, lora=lora, out=out)
    close(call.packed(y), call.packed(grouped_gemm(x, w, call.m_sizes)))
    assert (call.padding(y) == CANARY).all()
    A, B = call.random(E, 4, K, grad=True), call.random(E, N, 4, grad=True)
    y = grouped_gemm(x, w, call.m_sizes, lora=Lora(A, B, 1.0, 0.5))
    for gradient in torch.autograd.grad(y, [A, B], call.rows(N)):
        assert gradient.isfinite().all()
        assert gradient.any()


@pytest.mark.slow
def test_torch_traces_it(clean_places: object) -> None:
    call = Call(COUNTS[0])
    x, w, inputs = call.rows(K), call.random(E, N, K), layer_of(call, ACTS[0])
    traced = torch.compile(lambda x, m: grouped_gemm(x, w, m), backend="eager", fullgraph=True)
    close(call.packed(traced(x, call.m_sizes)), call.packed(grouped_gemm(x, w, call.m_sizes)))
    layer = torch.compile(lambda x, m: experts_mlp(x, m_sizes=m, **inputs), backend="eager", fullgraph=True)
    close(call.packed(layer(x, call.m_sizes)), call.packed(experts_mlp(x, m_sizes=call.m_sizes, **inputs)))
