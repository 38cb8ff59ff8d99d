"""Every form and gradient launched on host memory, its arguments carried out as the kernels' docstrings say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from host_gpu import ALL, TOPK, Device, E, K, N, T, device, on, ran, tensors
from made import H200, ON_H100, ON_H200, PROBLEM, WIDE, measured, snapshot, write

from pretuned.artifacts.records.problem import Fusion, Layout, Op, RowOp
from pretuned.runtime import Lora, current, grouped_gemm, moe_mlp
from pretuned.runtime.check.operands import Rows
from pretuned.runtime.dispatch import snapshot as dispatch_snapshot
from pretuned.runtime.launch import ready

__all__ = ["device"]  # a fixture
IS_BY_TORCH, GROUPED_MM = ready.is_by_torch, ready.grouped_mm


@pytest.mark.parametrize(
    "missing",
    [set(), {Fusion.GATHER}, {Fusion.GATHER, Fusion.SCATTER}, {Fusion.GATHER, Fusion.SCATTER, Fusion.NONE}],
    ids=["every kernel", "none that gathers", "plain kernels", "no kernel"],
)
@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("fused", [(x, y, w, b) for x in (0, 1) for y in (0, 1) for w in (0, 1) for b in (0, 1)])
def test_a_launch_computes_what_the_reference_does(
    device: Device, monkeypatch: pytest.MonkeyPatch, fused: tuple[int, ...], layout: str, missing: set[Fusion]
) -> None:
    permute_x, permute_y, weights, bias = map(bool, fused)
    device.there = {(op, fusion) for op, fusion in ALL if fusion not in missing}
    given = tensors(permute_x=permute_x, weights=weights, bias=bias, layout=layout)
    form = {"permute_x": permute_x, "permute_y": permute_y, "w_layout": layout}
    on(monkeypatch, False)
    wanted = ran(form, given, wide=False)
    assert not device.launched
    on(monkeypatch, True)
    for wide in (False, True):
        for got, want in zip(ran(form, given, wide), wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert all(kernel in device.there for kernel in device.launched)
    if not missing:
        assert {op for op, _ in device.launched} == set(Op)


def test_which_kernels_a_layer_needs(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, True)
    hidden = torch.randn(T, K, requires_grad=True)
    up, down = torch.randn(E, 2 * N, K, requires_grad=True), torch.randn(E, K, N, requires_grad=True)
    ids, weights = torch.randint(0, E, (T, TOPK)), torch.rand(T, TOPK, requires_grad=True)
    moe_mlp(hidden, up, down, ids, weights).sum().backward()
    forward, dx, dw = Op.FORWARD, Op.DX, Op.DW
    # dW reads gathered rows, so dX has them too, and gathers nothing itself.
    assert device.launched == [
        (forward, Fusion.GATHER), (forward, Fusion.NONE),
        (dx, Fusion.NONE), (dw, Fusion.NONE), (dx, Fusion.NONE), (dw, Fusion.NONE),
    ]  # fmt: skip


def test_a_call_like_an_earlier_one_chooses_nothing(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, True)
    for rows, chosen in ((12, 1), (16, 1), (22, 1), (23, 2)):  # by bucket
        x, w = torch.randn(rows, K, requires_grad=True), torch.randn(E, N, K)
        grouped_gemm(x, w, torch.tensor([rows, 0, 0, 0]))
        assert len(device.launched) == chosen


def test_a_table_that_another_thread_clears_loses_no_call(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full tables begin anew. What a call found, or built, is its own even so."""

    class Cleared(dict[object, object]):
        def __contains__(self, key: object) -> bool:
            found = super().__contains__(key)
            self.clear()
            return found

        def __setitem__(self, key: object, value: object) -> None:
            self.clear()

    on(monkeypatch, True)
    x, w, m_sizes = torch.randn(8, K), torch.randn(E, N, K), torch.tensor([3, 0, 5, 0])
    call, y = Rows(Op.FORWARD, x, w, m_sizes, Layout.NK, 8), torch.empty(8, N)
    first = ready.ready_for(call, y)
    current = dispatch_snapshot.snapshot()
    known = current.launchers
    assert first is not None
    assert first in known.values()
    for table, same in ((Cleared(known), True), (Cleared(), False)):
        monkeypatch.setattr(current, "launchers", table)
        launch = ready.ready_for(call, y)
        assert launch is not None
        assert (launch is first) is same


def test_only_the_gradients_that_are_needed_run(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, True)
    x, w = torch.randn(8, K), torch.randn(E, N, K)
    m_sizes = torch.tensor([3, 0, 5, 0])
    for needs_x, needs_w, options, ops in (
        (True, False, {}, [Op.DX]),
        (False, True, {}, [Op.DW]),
        (True, True, {"dX_only": True}, [Op.DX]),
        (True, True, {"dW_only": True}, [Op.DW]),
    ):
        dispatch_snapshot.snapshot().launchers.clear()
        device.launched.clear()
        a, b = x.clone().requires_grad_(needs_x), w.clone().requires_grad_(needs_w)
        grouped_gemm(a, b, m_sizes, **options).sum().backward()
        assert [op for op, _ in device.launched] == [Op.FORWARD, *ops]
        assert (a.grad is not None) == (Op.DX in ops)
        assert (b.grad is not None) == (Op.DW in ops)


ROWS = 16
SIZES = [5, 0, 3, 4]


@pytest.mark.parametrize("sizes", [SIZES, [16, 0, 0, 0], [0, 0, 0, 0], [20, -4, 7, 1]])
@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("zero_tail", [False, True])
@pytest.mark.parametrize("clears", [False, True])
def test_torch_runs_plain_products_that_it_was_measured_faster_for(
    device: Device, monkeypatch: pytest.MonkeyPatch, sizes: list[int], layout: str, zero_tail: bool, clears: bool
) -> None:
    """The first call, the second, which replays a program, and calls without a gradient; dW stays a kernel's."""
    device.by_torch = {Op.FORWARD, Op.DX}
    device.there -= set() if clears else {RowOp.CLEAR}
    x = torch.randn(ROWS, N, requires_grad=True)
    w = torch.randn((E, K, N) if layout == "nk" else (E, N, K), requires_grad=True)  # K columns: rows of 16 bytes
    m_sizes, form = torch.tensor(sizes, dtype=torch.int32), {"w_layout": layout, "zero_tail": zero_tail}
    end = min(sum(min(max(one, 0), ROWS) for one in sizes), ROWS)
    dy = torch.randn(ROWS, K)

    def ran() -> list[torch.Tensor]:
        y = grouped_gemm(x, w, m_sizes, **form)
        with torch.no_grad():
            bare = grouped_gemm(x, w, m_sizes, **form)
        used = [one if zero_tail else one[:end] for one in (y, bare)]
        return [*used, *torch.autograd.grad(y, (x, w), dy)]

    on(monkeypatch, False)
    wanted = ran()
    on(monkeypatch, True)
    for turn in (1, 2):
        for got, want in zip(ran(), wanted, strict=True):
            torch.testing.assert_close(got.detach(), want.detach(), rtol=1e-4, atol=1e-5)
        assert device.grouped == 3 * turn
    assert all(one.program is not None for one in dispatch_snapshot.snapshot().plans.values())
    assert bool(device.cleared) is clears  # of dX at least
    assert (Op.DW, Fusion.NONE) in device.launched


def test_torch_runs_nothing_else(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run what is fused, goes into ``out``, is not aligned or has an adapter, whatever torch takes."""
    device.by_torch = set(Op)
    on(monkeypatch, True)
    x, w, m_sizes = torch.randn(ROWS, N), torch.randn(E, K, N), torch.tensor(SIZES)
    out = torch.zeros(ROWS, K)
    grouped_gemm(x, w, m_sizes, out=out)
    grouped_gemm(x, w, m_sizes, bias=torch.randn(E, K))
    grouped_gemm(torch.randn(ROWS * N + 1)[1:].view(ROWS, N), w, m_sizes)
    grouped_gemm(x, torch.randn(E, 7, N), m_sizes)
    grouped_gemm(x, w, m_sizes, gather_indices=torch.arange(ROWS), permute_x=True)
    grouped_gemm(x, w, m_sizes, lora=Lora(torch.randn(E, 4, N), torch.randn(E, K, 4)))
    grouped_gemm(torch.randn(0, N), w, m_sizes)
    assert not device.grouped
    grouped_gemm(x, w, m_sizes)
    assert device.grouped == 1


@pytest.mark.parametrize("rows", [6, 7])
def test_torch_runs_what_is_plain_of_a_layer(device: Device, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Its second product, and both of dX: rows of no expert, which torch leaves as they are, go nowhere."""
    H = K  # of whole 16 bytes, as I = N
    given = torch.Generator().manual_seed(1)
    x = torch.randn(rows, H, generator=given, requires_grad=True)
    up = torch.randn(E, 2 * N, H, generator=given, requires_grad=True)
    down = torch.randn(E, H, N, generator=given, requires_grad=True)
    ids = torch.randint(-1, E + 1, (rows, TOPK), generator=given)
    weights = torch.rand(rows, TOPK, generator=given, requires_grad=True)

    def ran() -> list[torch.Tensor]:
        out = moe_mlp(x, up, down, ids, weights)
        return [out, *torch.autograd.grad(out.square().sum(), (x, up, down, weights))]

    on(monkeypatch, False)
    wanted = ran()
    on(monkeypatch, True)
    device.by_torch = {Op.FORWARD, Op.DX}
    for turn in (1, 2):
        for got, want in zip(ran(), wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
        assert device.grouped == 3 * turn


def test_a_bundle_s_choice_has_torch_run(device: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From the file to torch's own grouped_mm; on another GPU, or for other rows, the kernel is launched."""
    by_torch = replace(measured(64, WIDE, 7.5), torch_ns=5000)
    write(tmp_path / "a.msgpack", {PROBLEM: [by_torch]}, gpus=[H200])
    here, calls = [ON_H200], []
    monkeypatch.setattr(ready, "is_by_torch", IS_BY_TORCH)
    monkeypatch.setattr(ready, "grouped_mm", lambda *given: [calls.append(given), GROUPED_MM(*given)][1])
    monkeypatch.setattr(ready, "local_gpu", lambda _: here[0])
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, PROBLEM.K, generator=generator).bfloat16()
    w = torch.randn(PROBLEM.E, PROBLEM.N, PROBLEM.K, generator=generator).bfloat16()
    m_sizes = torch.tensor([7, 0, 30, 2, 0, 0, 11, 14])
    on(monkeypatch, False)
    want = grouped_gemm(x, w, m_sizes)
    on(monkeypatch, True)
    monkeypatch.setattr(current, "snapshot", snapshot(tmp_path))
    torch.testing.assert_close(grouped_gemm(x, w, m_sizes), want, rtol=2e-2, atol=2e-1)
    product = Rows(Op.FORWARD, x, w, m_sizes, Layout.NK, 64)
    assert calls == [(torch.bfloat16, 90, PROBLEM.E)]
    chosen = ready.ready_for(product, None)
    assert chosen is not None
    assert chosen.by_torch is not None
    for gpu, call in ((ON_H100, product), (ON_H200, replace(product, x=x[:1], M=1))):
        here[0] = gpu
        monkeypatch.setattr(current, "snapshot", snapshot(tmp_path))
        other = ready.ready_for(call, None)
        assert other is not None
        assert other.by_torch is None
