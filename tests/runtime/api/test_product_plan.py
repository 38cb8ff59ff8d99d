"""Calls that come again: a plan computes what the long way does, and lets no other call through."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from host_gpu import PERSISTENT, TOPK, Device, E, K, N, Replay, T, ran, replays, tensors, use_low_rank_kernels
from pairwise import pairwise

from pretuned.artifacts.errors import InputError
from pretuned.artifacts.records import DType, Layout, Op, RowOp
from pretuned.runtime import Lora, grouped_gemm, reload, sort_routing
from pretuned.runtime.api import product_plan
from pretuned.runtime.dispatch import snapshot as dispatch_snapshot
from pretuned.runtime.launch import program
from pretuned.runtime.ops import zero_rows

pytestmark = pytest.mark.skipif(program._TensorGuards is None, reason="this torch has no guards")


@pytest.fixture(autouse=True)
def planned(device: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[product_plan.ProductPlan]]:
    """The plans that took a call. The emulated GPU computes in float32."""
    monkeypatch.setattr(program, "KINDS", (torch.float32,))
    taken: list[product_plan.ProductPlan] = []

    def noted(replay: Replay) -> None:
        taken.extend(plan for plan in dispatch_snapshot.snapshot().plans.values() if replay.is_of(plan.program))

    with replays(noted):
        yield taken


FUSED = dict.fromkeys(("permute_x", "permute_y", "weights", "bias"), (False, True))


@pairwise({**FUSED, "layout": ["nk", "kn"]}, strength=3)
def test_it_computes_what_the_long_way_does(
    planned: list[product_plan.ProductPlan], permute_x: bool, permute_y: bool, weights: bool, bias: bool, layout: str
) -> None:
    inputs = tensors(permute_x=permute_x, weights=weights, bias=bias, layout=layout)
    form = {"permute_x": permute_x, "permute_y": permute_y, "w_layout": layout}
    first = ran(form, inputs, wide=False)
    assert planned == []
    for _ in range(3):
        for got, want in zip(ran(form, inputs, wide=False), first, strict=True):
            assert torch.equal(got, want)
    # An index that nothing reads is no part of a plan.
    assert len(planned) == (3 if any((permute_x, permute_y, weights)) else 0)
    for got, want in zip(ran(form, inputs, wide=True), first, strict=True):  # int64: another call
        assert torch.equal(got, want)


def of_tokens(tokens: int, form: tuple[int, ...], low: bool, w: torch.Tensor) -> list[torch.Tensor]:
    """y and the gradients of a call of that many tokens, with weights, a bias and an adapter or without."""
    permute_x, permute_y, weights, bias = map(bool, form)
    generator = torch.Generator().manual_seed(tokens)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).requires_grad_()

    ids = torch.randint(-1, E + 1, (tokens, TOPK), generator=generator)
    routing = sort_routing(ids, E)
    x = random(tokens if permute_x else tokens * TOPK, K)
    more = {"topk_weights": random(tokens, TOPK)} if weights else {}
    more |= {"bias": random(E, N)} if bias else {}
    adapter = Lora(random(E, 4, K), random(E, N, 4), 0.5) if low else None
    y = grouped_gemm(
        x,
        w,
        routing.m_sizes,
        TOPK,
        routing.gather_indices if any(form[:3]) else None,
        permute_x=permute_x,
        permute_y=permute_y,
        fuse_mul_post=weights,
        zero_tail=True,
        lora=adapter,
        **more,
    )
    asked = [x, *more.values(), *(adapter[:2] if adapter else ()), *([w] if w.requires_grad else [])]
    return [y, *torch.autograd.grad(y, asked, torch.linspace(-1, 1, y.numel()).view_as(y))]


@pairwise({**FUSED, "low": [False, True]}, strength=3)
def test_calls_of_other_rows_of_the_bucket_run_the_same_plan(
    planned: list[product_plan.ProductPlan], permute_x: bool, permute_y: bool, weights: bool, bias: bool, low: bool
) -> None:
    fused = (permute_x, permute_y, weights, bias)
    counts, w = (9, 11, 8, 10, 9), torch.randn(E, N, K).requires_grad_(not low)
    wanted = []
    for tokens in counts:
        reload()
        wanted.append(of_tokens(tokens, fused, low, w))
    reload()
    assert planned == []
    for tokens, want in zip(counts, wanted, strict=True):
        for got, expected in zip(of_tokens(tokens, fused, low, w), want, strict=True):
            assert torch.equal(got, expected)
    assert len(planned) == len(counts) - 1
    assert len(dispatch_snapshot.snapshot().plans) == 1


def test_rows_that_are_not_all_slots_have_a_plan_of_their_own_size(planned: list[product_plan.ProductPlan]) -> None:
    """With padded experts, or other ranks' slots, kernels are told where indices end."""
    x, w, m_sizes = torch.randn(T, K), torch.randn(E, N, K), torch.tensor([4, 0, 5, 2], dtype=torch.int32)
    for more in (1, 3, 1, 3):
        index = torch.cat([torch.randperm(T * TOPK), torch.full((more,), -1)])
        y = grouped_gemm(x, w, m_sizes, TOPK, index, permute_x=True, zero_tail=True)
        assert torch.equal(y[:11], grouped_gemm(x[index[:11] // TOPK], w, m_sizes)[:11])
    assert {plan._own_sizes for plan in planned} == {
        None,
        (T * TOPK + 1, T, T * TOPK + 1),
        (T * TOPK + 3, T, T * TOPK + 3),
    }


def test_flattened_weights_have_a_plan_too(planned: list[product_plan.ProductPlan]) -> None:
    x, w, m_sizes = call()
    first = gradients(x, w, m_sizes)
    flat = w.detach().view(-1, K).requires_grad_()
    for _ in range(3):
        for got, want in zip(gradients(x, flat, m_sizes), first, strict=True):
            assert torch.equal(got, want.view_as(got))
    assert len(planned) == 2


def test_a_given_out_is_written_by_the_plan_and_may_not_be_read(planned: list[product_plan.ProductPlan]) -> None:
    x, w, m_sizes = call(x=False, w=False)
    want = grouped_gemm(x, w, m_sizes)
    wide = torch.zeros(8, N + K)
    for out in (torch.empty(8, N), torch.empty(8, N), wide[:, :N], wide[:, :N]):
        before = out._version
        assert grouped_gemm(x, w, m_sizes, out=out) is out
        assert torch.equal(out, want)
        assert out._version > before
    assert len(planned) == 2
    both = torch.zeros(16 * max(N, K))
    with pytest.raises(InputError, match="in the memory of x"):
        grouped_gemm(both[: 8 * K].view(8, K), w, m_sizes, out=both[: 8 * N].view(8, N))
    with pytest.raises(InputError, match="in the memory of w"):
        grouped_gemm(x, w, m_sizes, out=w.view(-1)[: 8 * N].view(8, N))
    with pytest.raises(InputError, match="requires grad"):
        grouped_gemm(x.requires_grad_(), w, m_sizes, out=torch.empty(8, N))


@pytest.mark.parametrize("learns", [False, True])
def test_no_rows_launch_nothing(planned: list[product_plan.ProductPlan], device: Device, learns: bool) -> None:
    w, m_sizes = torch.randn(E, N, K).requires_grad_(learns), torch.tensor([0, 1, 0, 0], dtype=torch.int32)
    for _ in range(2):
        grouped_gemm(torch.randn(1, K), w, m_sizes)
    assert len(planned) == 1
    launched = len(device.launched)
    assert grouped_gemm(torch.randn(0, K), w, 0 * m_sizes).shape == (0, N)
    assert (len(planned), len(device.launched)) == (1, launched)


@pytest.mark.parametrize("first_as_int64", [False, True])
def test_counts_of_another_dtype_have_another_gradient(
    planned: list[product_plan.ProductPlan], first_as_int64: bool
) -> None:
    """A hook on saved tensors may give int64 for int32, which a program would read as int32."""
    x, w, m_sizes = call()

    def by_int64() -> list[torch.Tensor]:
        unpack = lambda saved: saved.long() if saved.dtype is torch.int32 else saved  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, unpack):
            return gradients(x, w, m_sizes)

    def as_they_are() -> list[torch.Tensor]:
        return gradients(x, w, m_sizes)

    first, then = (by_int64, as_they_are) if first_as_int64 else (as_they_are, by_int64)
    wanted = first()
    for again in (first, then, first, then):
        assert all(map(torch.equal, again(), wanted))


def test_slots_that_are_no_whole_tokens_are_refused_as_the_first_time(planned: list[product_plan.ProductPlan]) -> None:
    x, w, m_sizes = torch.randn(9, K), torch.randn(E, N, K), torch.tensor([3, 0, 4, 1], dtype=torch.int32)
    for _ in range(2):
        grouped_gemm(x[:8], w, m_sizes, 2, torch.randperm(8), permute_y=True)
    assert len(planned) == 1
    for out in (None, torch.empty(9, N)):
        with pytest.raises(InputError):
            grouped_gemm(x, w, m_sizes, 2, torch.randperm(9), permute_y=True, out=out)
    for topk in (True, 2.0):
        with pytest.raises(InputError, match="topk"):
            grouped_gemm(x[:8], w, m_sizes, topk, torch.randperm(8), permute_y=True)  # type: ignore[arg-type]


def test_ranks_that_differ_are_refused_as_the_first_time(planned: list[product_plan.ProductPlan]) -> None:
    """A and B are padded to whole 16 bytes before a plan compares them."""
    x, w, m_sizes = call(x=False, w=False)
    A, B = torch.randn(E, 4, K), torch.randn(E, N, 4)
    for _ in range(2):
        grouped_gemm(x, w, m_sizes, lora=Lora(A, B))
    assert len(planned) == 1
    with pytest.raises(InputError, match="B"):
        grouped_gemm(x, w, m_sizes, lora=Lora(A[:, :3].contiguous(), B))


@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_flattened_weights_reach_torch_as_matrices(
    planned: list[product_plan.ProductPlan], device: Device, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    """If torch's grouped_mm is the choice: with two matrices it multiplies something else."""
    seen: list[torch.Size] = []

    def grouped_mm(x: torch.Tensor, w: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        seen.append(w.shape)
        ends = offs.tolist()
        return torch.cat([x[a:b] @ w[e] for e, (a, b) in enumerate(itertools.pairwise([0, *ends]))])

    monkeypatch.setattr(program, "KINDS", (torch.bfloat16,))
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", grouped_mm, raising=False)
    device.has(PERSISTENT, DType.BF16)
    device.layout = Layout(layout)
    device.runs_torch([Op.FORWARD], (16, 8))
    x, m_sizes = torch.randn(8, 8).bfloat16(), torch.tensor([3, 0, 4, 1], dtype=torch.int32)
    w = torch.randn(E * (16 if layout == "nk" else 8), 8 if layout == "nk" else 16).bfloat16()
    wanted = grouped_gemm(x, w, m_sizes, w_layout=layout)
    assert wanted.shape == (8, 16)
    for _ in range(2):
        assert torch.equal(grouped_gemm(x, w, m_sizes, w_layout=layout), wanted)
    assert len(planned) == 2
    assert seen == [torch.Size((E, 8, 16))] * 3


def test_tf32_is_another_call(planned: list[product_plan.ProductPlan]) -> None:
    x, w, m_sizes = call(x=False, w=False)
    grouped_gemm(x, w, m_sizes)
    try:
        torch.backends.cuda.matmul.allow_tf32 = True
        grouped_gemm(x, w, m_sizes)
        assert planned == []
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    grouped_gemm(x, w, m_sizes)
    assert len(planned) == 1


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_trace_of_a_call_that_has_a_plan_keeps_the_call(planned: list[product_plan.ProductPlan]) -> None:
    x, w, m_sizes = call(x=False, w=False)
    wanted = grouped_gemm(x, w, m_sizes)
    grouped_gemm(x, w, m_sizes)
    assert len(planned) == 1
    traced = torch.jit.trace(lambda x: grouped_gemm(x, w, m_sizes), (x,), check_trace=False)
    assert "pretuned::grouped_gemm" in str(traced.graph)
    assert len(planned) == 1
    assert torch.equal(traced(x), wanted)


def test_one_row_of_another_stride(planned: list[product_plan.ProductPlan]) -> None:
    """A row of a wider matrix is as good as one alone."""
    w, sizes = torch.randn(E, N, K), torch.tensor([0, 1, 0, 0], dtype=torch.int32)
    wide = torch.randn(1, 2 * K)
    for x in (wide[:, :K], wide[:, :K].clone(), torch.randn(3, 2 * K)[1:2, :K]):
        for _ in range(3):
            torch.testing.assert_close(grouped_gemm(x, w, sizes), x @ w[1].T, rtol=1e-4, atol=1e-4)
    assert planned


def test_a_plain_call_that_is_not_like_the_first_is_looked_at(
    planned: list[product_plan.ProductPlan], device: Device
) -> None:
    """Calls that one plan's function does not accept are checked again, with the same numbers."""
    w, sizes = torch.randn(E, N, K), torch.tensor([3, 0, 4, 1], dtype=torch.int32)
    wide, memory = torch.randn(8, 2 * K), torch.randn(8 * (K + N) + 8)
    x, out = memory[: 8 * K].view(8, K), memory[8 * K : 8 * (K + N)].view(8, N)

    def ran(x: torch.Tensor, m_sizes: torch.Tensor = sizes, out: torch.Tensor | None = None) -> tuple[int, bool]:
        before, wanted = len(planned), torch.cat([x[:3] @ w[0].T, x[3:7] @ w[2].T, x[7:8] @ w[3].T])
        got = grouped_gemm(x, w, m_sizes, out=out)
        return len(planned) - before, torch.allclose(got[: len(wanted)], wanted, rtol=1e-4, atol=1e-4)

    for first in (None, out):
        assert [ran(x, out=first) for _ in range(3)] == [(0, True), (1, True), (1, True)]
    odd = memory[1 : 1 + 8 * K].view(8, K).clone()
    odd = torch.cat([torch.zeros(1), odd.flatten()])[1:].view(8, K)  # begins elsewhere
    for other in (wide[:, :K], wide[:, 1 : 1 + K], odd, x.t().contiguous().t()):
        assert ran(other)[1]
        assert ran(other, out=out)[1]
        assert ran(x)[1]
        assert ran(x, out=out)[1]
    assert ran(x, sizes.long())[1]
    assert ran(x)[1]
    with pytest.raises(InputError, match="memory of x"):
        grouped_gemm(x, w, sizes, out=memory[8 * K - 4 : 8 * (K + N) - 4].view(8, N))
    with pytest.raises(InputError, match="memory of w"):
        grouped_gemm(x, w, sizes, out=w.view(-1)[: 8 * N].view(8, N))
    with pytest.raises(InputError, match="memory of m_sizes"):
        grouped_gemm(x, w, memory.view(torch.int32)[8 * K + 4 : 8 * K + 8], out=out)
    for rows in (out[:7], torch.empty(9, N)):
        with pytest.raises(InputError, match="out is of shape"):
            grouped_gemm(x, w, sizes, out=rows)
    apart = torch.empty(8, 2 * N)[:, :N]
    assert ran(x, out=apart)[1]
    assert not apart[0].isnan().any()
    assert grouped_gemm(x.detach().requires_grad_(), w, sizes).requires_grad
    with torch.autocast("cuda", torch.bfloat16):
        before = len(planned)
        grouped_gemm(x, w, sizes)
        assert len(planned) == before
    version = out._version
    grouped_gemm(x, w, sizes, out=out)
    assert out._version > version


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_trace_keeps_a_plain_call_that_came_before(planned: list[product_plan.ProductPlan]) -> None:
    x, w, m_sizes = torch.randn(8, K), torch.randn(E, N, K), torch.tensor([3, 0, 4, 1], dtype=torch.int32)
    y = [grouped_gemm(x, w, m_sizes) for _ in range(3)][-1]
    assert len(planned) == 2
    traced = torch.jit.trace(lambda x, m_sizes: grouped_gemm(x, w, m_sizes), (x, m_sizes), check_trace=False)
    assert len(planned) == 2
    assert "pretuned::grouped_gemm" in str(traced.graph)
    assert torch.equal(traced(x, m_sizes), y)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float64])
def test_routing_weights_of_any_float(planned: list[product_plan.ProductPlan], kind: torch.dtype) -> None:
    inputs = tensors(permute_x=True, weights=True, bias=False, layout="nk")
    assert inputs["topk_weights"] is not None
    inputs["topk_weights"] = inputs["topk_weights"].detach().to(kind).requires_grad_()
    first = ran({"permute_x": True, "permute_y": True}, inputs, wide=False)
    for _ in range(2):
        for got, want in zip(ran({"permute_x": True, "permute_y": True}, inputs, wide=False), first, strict=True):
            assert torch.equal(got, want)
    assert len(planned) == 2


def test_rows_that_no_index_names_are_cleared(
    planned: list[product_plan.ProductPlan], device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zero_rows, "LEAST_BYTES", 0)
    x, w, index = torch.randn(T * TOPK, K), torch.randn(E, N, K), torch.randperm(T * TOPK).int()
    m_sizes = torch.tensor([3, 0, 4, 1], dtype=torch.int32)
    for _ in range(3):
        filled = torch.full((T * TOPK, N), float("nan"))  # (memory that the next result may get)
        del filled
        y = grouped_gemm(x, w, m_sizes, TOPK, index, permute_y=True)
        assert (y[index[8:].long()] == 0).all()
        assert y[index[:8].long()].all(1).all()
    assert len(planned) == 2
    assert device.cleared == [RowOp.CLEAR] * 6


def test_a_zero_tail_is_the_kernels_own(
    planned: list[product_plan.ProductPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w, m_sizes = torch.randn(8, K), torch.randn(E, N, K), torch.tensor([3, 0, 2, 1], dtype=torch.int32)
    first = grouped_gemm(x.requires_grad_(), w, m_sizes, zero_tail=True).detach()
    zeroed: list[int] = []
    monkeypatch.setattr(torch.Tensor, "zero_", lambda tensor: zeroed.append(tensor.numel()) or tensor)
    assert torch.equal(grouped_gemm(x, w, m_sizes, zero_tail=True), first)
    assert (first[6:] == 0).all()
    assert len(planned) == 1
    assert zeroed == []


def call(**how: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, K, generator=generator).requires_grad_(how.get("x", True))
    w = torch.randn(E, N, K, generator=generator).requires_grad_(how.get("w", True))
    return x, w, torch.tensor([3, 0, 4, 1], dtype=torch.int32)


def gradients(x: torch.Tensor, w: torch.Tensor, m_sizes: torch.Tensor, **how: Any) -> list[torch.Tensor]:
    y = grouped_gemm(x, w, m_sizes, **how)
    asked = [tensor for tensor in (x, w) if tensor.requires_grad]
    return [y, *torch.autograd.grad(y, asked, torch.linspace(-1, 1, y.numel()).view_as(y))]


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("how", [{}, {"zero_tail": True}, {"dX_only": True}, {"dW_only": True}])
def test_a_plain_backward_is_planned_too(
    planned: list[product_plan.ProductPlan], device: Device, needs: tuple[bool, bool], how: dict[str, bool]
) -> None:
    x, w, m_sizes = call(x=needs[0], w=needs[1])
    used = {"x": needs[0] and "dW_only" not in how, "w": needs[1] and "dX_only" not in how}
    if not all(used[name] for name, need in zip("xw", needs, strict=True) if need):
        x, w = x.requires_grad_(used["x"]), w.requires_grad_(used["w"])
    if not any(used.values()):
        return
    first = gradients(x, w, m_sizes, **how)
    for _ in range(3):
        for got, want in zip(gradients(x, w, m_sizes, **how), first, strict=True):
            assert torch.equal(got, want)
    assert len(planned) == 3
    ((needs_found, gradient),) = planned[0]._gradients.items()
    assert gradient is not None
    assert needs_found == (used["x"], used["w"], False, False)
    assert len(gradient.program.steps) == used["x"] + used["w"]
    assert {op for op, _ in device.launched} >= {Op.FORWARD}


def test_a_backward_that_wants_no_gradient_comes_again(planned: list[product_plan.ProductPlan]) -> None:
    x, w, m_sizes = call(x=False, w=True)
    for _ in range(3):
        y = grouped_gemm(x, w, m_sizes, dX_only=True)
        assert torch.autograd.grad(y, w, torch.ones_like(y), allow_unused=True) == (None,)


def test_another_call_goes_the_long_way(planned: list[product_plan.ProductPlan]) -> None:
    x, w, m_sizes = call()
    wanted = gradients(x, w, m_sizes)
    gradients(x, w, m_sizes)
    assert len(planned) == 1
    odd = torch.cat([torch.zeros(1), x.detach().flatten()])[1:].view_as(x).requires_grad_()  # begins elsewhere
    wide = torch.cat([x.detach()] * 2, dim=1)[:, :K].requires_grad_()
    for other in (odd, wide, x.detach()):
        got = gradients(other, w, m_sizes)
        assert torch.equal(got[0], wanted[0])
        assert torch.equal(got[-1], wanted[-1])
    assert torch.equal(gradients(x, w, m_sizes.long())[0], wanted[0])
    assert len(planned) == 1
    with torch.no_grad():
        y = grouped_gemm(x, w, m_sizes, zero_tail=True)
    assert not y.requires_grad


def test_it_runs_without_a_gradient_too(planned: list[product_plan.ProductPlan]) -> None:
    x, w, m_sizes = call()
    bias = torch.randn(E, N)
    with torch.no_grad():
        y = [grouped_gemm(x, w, m_sizes, bias=bias) for _ in range(3)]
    assert len(planned) == 2
    assert all(torch.equal(tensor, y[0]) and not tensor.requires_grad for tensor in y)
    assert grouped_gemm(x, w, m_sizes, bias=bias).requires_grad


def test_a_gradient_of_any_stride_and_a_saved_tensor_that_moved(planned: list[product_plan.ProductPlan]) -> None:
    x, dense, m_sizes = call()
    strided = torch.randn(E, N + 1, K)[:, :N].detach().requires_grad_()
    for w in (dense, strided):
        dy = torch.randn(8, N)
        wanted = torch.autograd.grad(grouped_gemm(x, w, m_sizes), [x, w], dy)
        for _ in range(2):
            for gradient in (dy, dy.t().contiguous().t()):
                got = torch.autograd.grad(grouped_gemm(x, w, m_sizes), [x, w], gradient)
                assert all(map(torch.equal, got, wanted))
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t.detach().contiguous().clone()):
                y = grouped_gemm(x, w, m_sizes)
            assert all(map(torch.equal, torch.autograd.grad(y, [x, w], dy), wanted))
        expanded = torch.autograd.grad(grouped_gemm(x, w, m_sizes).sum(), [x, w])
        assert all(
            map(torch.equal, expanded, torch.autograd.grad(grouped_gemm(x, w, m_sizes), [x, w], torch.ones(8, N)))
        )
    assert planned


def test_rows_past_the_sum_have_no_gradient(planned: list[product_plan.ProductPlan]) -> None:
    x, w, _ = call()
    m_sizes = torch.tensor([3, 0, 2, 1], dtype=torch.int32)
    for _ in range(3):
        _, dx, _ = gradients(x, w, m_sizes, zero_tail=True)
        assert not dx[6:].any()
        assert dx[:6].all()
    assert len(planned) == 2


def test_torch_func_takes_the_long_way(planned: list[product_plan.ProductPlan]) -> None:
    x, w, m_sizes = call()
    gradients(x, w, m_sizes)
    gradients(x, w, m_sizes)
    before = len(planned)
    with pytest.raises(RuntimeError):  # an autograd.Function without setup_context says so
        torch.func.grad(lambda a: grouped_gemm(a, w, m_sizes).sum())(x)
    assert len(planned) == before


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
def test_a_trace_keeps_the_call_that_came_before(planned: list[product_plan.ProductPlan]) -> None:
    x, w, m_sizes = torch.randn(T, K), torch.randn(E, N, K), torch.tensor([3, 0, 4, 0], dtype=torch.int32)
    bias = torch.randn(E, N)

    def call(x: torch.Tensor, m_sizes: torch.Tensor) -> torch.Tensor:
        return grouped_gemm(x, w, m_sizes, bias=bias)

    y = [call(x, m_sizes) for _ in range(3)][-1]
    assert len(planned) == 2
    traced = torch.jit.trace(call, (x, m_sizes), check_trace=False)
    assert len(planned) == 2
    assert "pretuned::grouped_gemm" in str(traced.graph)
    assert torch.equal(traced(x, m_sizes), y)


def test_a_plan_keeps_no_tensor(planned: list[product_plan.ProductPlan]) -> None:
    x, w, m_sizes = call()
    gradients(x, w, m_sizes)
    gradients(x, w, m_sizes)
    held = [weakref.ref(reference) for reference in (x, w, m_sizes)]
    assert len(planned) == 1
    del x, w, m_sizes
    gc.collect()
    assert [reference() for reference in held] == [None] * 3


def test_reload_forgets_and_a_full_table_begins_anew(
    planned: list[product_plan.ProductPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w, m_sizes = call()
    gradients(x, w, m_sizes)
    before = dispatch_snapshot.snapshot()
    assert len(before.plans) == 1
    reload()
    assert dispatch_snapshot.snapshot() is not before
    assert dispatch_snapshot.snapshot().plans == {}
    monkeypatch.setattr(program, "MOST_PLANS", 2)
    for rows in (1, 2, 4):  # of three buckets
        gradients(x[:rows], w, m_sizes)
    assert len(dispatch_snapshot.snapshot().plans) == 1
    assert planned == []


def test_what_cannot_be_used_is_still_named(planned: list[product_plan.ProductPlan]) -> None:
    inputs = tensors(permute_x=True, weights=True, bias=False, layout="nk")
    form = {"permute_x": True, "permute_y": False, "w_layout": "nk"}
    ran(form, inputs, wide=False)
    ran(form, inputs, wide=False)
    assert len(planned) == 1
    x, w, weights = inputs["x"], inputs["w"], inputs["topk_weights"]
    assert x is not None
    assert w is not None
    m_sizes, index = torch.tensor([4, 4, 3, 3]), torch.arange(T * TOPK)
    for how, words in (
        ({"topk": 3}, "pass topk=2"),
        ({"topk_weights": None}, "nothing to multiply with"),
        ({"gather_indices": index.float()}, "int32 or int64"),
        ({"is_first_gemm": False}, "sorted already"),
        ({"fuse_mul_post": False}, "nothing would be multiplied"),
        ({"out": 3}, "out is a int"),
    ):
        good = {"topk": TOPK, "gather_indices": index, "topk_weights": weights, "fuse_mul_post": True}
        with pytest.raises(ValueError, match=words):
            grouped_gemm(x, w, m_sizes, permute_x=True, **{**good, **how})  # type: ignore[arg-type]


@pytest.mark.parametrize("learns", ["x", "w"])
def test_a_frozen_weight_of_rows_that_stay_is_in_the_gradient(device: Device, learns: str) -> None:
    """Of rows that stay where they are a gradient is planned: of those that are weighed it was that of others."""
    inputs = tensors(permute_x=False, weights=True, bias=False, layout="nk")
    inputs = {
        name: None if tensor is None else tensor.detach().requires_grad_(name == learns)
        for name, tensor in inputs.items()
    }
    m_sizes, index = torch.tensor([5, 0, 7, 2]), torch.arange(T * TOPK).flip(0)
    results = []
    for simulated in (False, True, True, True):
        device.visible = simulated
        y = grouped_gemm(**inputs, m_sizes=m_sizes, topk=TOPK, gather_indices=index, fuse_mul_post=True)  # type: ignore[arg-type]
        results.append(torch.autograd.grad(y, inputs[learns], torch.ones_like(y))[0])  # type: ignore[arg-type]
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=1e-5, atol=1e-4)


@pairwise({"needs": ["xAB", "AB", "x", "B", ""], "gathered": [False, True], "inside": [False, True]})
def test_a_product_beside_an_adapter(
    planned: list[product_plan.ProductPlan],
    device: Device,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    needs: str,
    gathered: bool,
    inside: bool,
) -> None:
    """It comes again with other numbers, and so does its gradient."""
    if inside:
        use_low_rank_kernels(monkeypatch, tmp_path)
    generator = torch.Generator().manual_seed(3)
    m_sizes, index = torch.tensor([5, 0, 7, 1]), torch.randperm(T * TOPK, generator=generator)  # the last is no one's
    w, dy = torch.randn(E, N, K, generator=generator), torch.randn(T * TOPK, N, generator=generator)
    how: dict[str, Any] = {"topk": TOPK, "gather_indices": index, "permute_x": True} if gathered else {}

    def step(seed: int, simulated: bool, r: int = 4, scale: float = 0.5) -> list[torch.Tensor]:
        device.visible = simulated
        numbers = torch.Generator().manual_seed(seed)
        shapes = {"x": (T if gathered else T * TOPK, K), "A": (E, r, K), "B": (E, N, r)}
        inputs = {
            name: torch.randn(shape, generator=numbers).requires_grad_(name in needs) for name, shape in shapes.items()
        }
        lora = Lora(inputs["A"], inputs["B"], scale)
        arguments = {"w": w, "lora": lora} if simulated else {"w": w + scale * lora.B @ lora.A}
        y = grouped_gemm(inputs["x"], m_sizes=m_sizes, **arguments, **how)
        gradients = torch.autograd.grad(y, [inputs[name] for name in needs], dy) if needs else ()
        return [y[:13].detach(), *gradients]

    def same(seed: int, **other: Any) -> None:
        for got, want in zip(step(seed, True, **other), step(seed, False, **other), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)

    same(0)
    assert planned == []
    for seed in (1, 2, 3):
        same(seed)
    assert len(planned) == 3
    programs = [gradient.program for gradient in planned[0]._gradients.values() if gradient is not None]
    # v, dX with its part or two products, dB and dA; rows that were gathered by torch's own steps
    dx = (1 if inside else 2) + gathered  # and its rows are put in their places
    steps = (1 + dx * ("x" in needs) + 2 * ("B" in needs)) if needs else 0
    assert [len(program.steps) for program in programs] == ([steps] if steps else [])
    same(4, r=8)  # another kind each
    same(4, scale=2.0)
    same(5)
    assert len(planned) == 3


@pytest.mark.parametrize("topk", [1, TOPK])
@pytest.mark.parametrize("padding", [0, 3])
def test_a_gathered_gradient_beside_an_adapter_comes_again(
    planned: list[product_plan.ProductPlan], device: Device, topk: int, padding: int
) -> None:
    """Rows of other experts, rows that pad them, another order each time: of what the plan was made for or not."""
    w, many = torch.randn(E, N, K), T * topk
    sizes = {"x": (T, K), "A": (E, 4, K), "B": (E, N, 4)}

    def step(seed: int, simulated: bool) -> list[torch.Tensor]:
        device.visible = simulated
        torch.manual_seed(seed)
        inputs = {name: torch.randn(size, requires_grad=True) for name, size in sizes.items()}
        index = torch.cat([torch.randperm(many), torch.full((padding,), -1)])[torch.randperm(many + padding)]
        last = many + padding - seed - 3  # of the others no expert is here
        m_sizes = torch.tensor([3, 0, last - 1, 1])
        y = grouped_gemm(
            inputs["x"],
            w,
            m_sizes,
            topk,
            index,
            permute_x=True,
            zero_tail=True,
            lora=Lora(inputs["A"], inputs["B"], 0.5),
        )
        return [y.detach(), *torch.autograd.grad(y, list(inputs.values()), torch.randn_like(y))]

    for seed in range(4):
        for got, want in zip(step(seed, True), step(seed, False), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)
    gradients = [gradient for each in planned for gradient in each._gradients.values()]
    assert any(gradient is not None for gradient in gradients) is (not padding or topk == 1)


@pytest.mark.parametrize(
    ("m_sizes", "why"),
    [
        ([3, 0, 4, 1], "m_sizes is a list"),
        (None, "m_sizes is a NoneType"),
        (torch.tensor(8), r"m_sizes is of shape \[\]"),
    ],
)
def test_a_call_beside_an_adapter_that_came_before_is_refused_in_the_words_of_the_first(
    planned: list[product_plan.ProductPlan], m_sizes: Any, why: str
) -> None:
    x, w, lora = torch.randn(8, K), torch.randn(E, N, K), Lora(torch.randn(E, 4, K), torch.randn(E, N, 4))
    for _ in range(2):
        grouped_gemm(x, w, torch.tensor([3, 0, 4, 1]), lora=lora)
    assert planned
    with pytest.raises(InputError, match=why):
        grouped_gemm(x, w, m_sizes, lora=lora)
