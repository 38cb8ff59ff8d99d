"""Every form and gradient launched on host memory, its arguments carried out as the kernels' docstrings say."""

from __future__ import annotations

import logging
import threading

import pytest
import torch
from host_gpu import ALL, TOPK, Device, E, K, N, T, ran, tensors

from pretuned.artifacts.records.problem import Fusion, Layout, Op
from pretuned.runtime import grouped_gemm, moe_mlp
from pretuned.runtime.dispatch import snapshot as dispatch_snapshot


@pytest.mark.parametrize(
    "missing",
    [set(), {Fusion.GATHER}, {Fusion.GATHER, Fusion.SCATTER}, {Fusion.GATHER, Fusion.SCATTER, Fusion.NONE}],
    ids=["every kernel", "none that gathers", "plain kernels", "no kernel"],
)
@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("fused", [(x, y, w, b) for x in (0, 1) for y in (0, 1) for w in (0, 1) for b in (0, 1)])
def test_a_launch_computes_what_the_reference_does(
    device: Device, fused: tuple[int, ...], layout: str, missing: set[Fusion]
) -> None:
    permute_x, permute_y, weights, bias = map(bool, fused)
    device.there = {(op, fusion) for op, fusion in ALL if fusion not in missing}
    given = tensors(permute_x=permute_x, weights=weights, bias=bias, layout=layout)
    device.layout = Layout(layout)
    form = {"permute_x": permute_x, "permute_y": permute_y, "w_layout": layout}
    device.visible = False
    wanted = ran(form, given, wide=False)
    assert not device.launched
    device.visible = True
    for wide in (False, True):
        for got, want in zip(ran(form, given, wide), wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    assert all(kernel in device.there for kernel in device.launched)
    if not missing:
        assert {op for op, _ in device.launched} == set(Op)


def test_which_kernels_a_layer_needs(device: Device) -> None:
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


def test_a_call_like_an_earlier_one_chooses_nothing(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        for rows, chosen in ((12, 1), (16, 1), (22, 1), (23, 2)):  # by bucket
            x, w = torch.randn(rows, K, requires_grad=True), torch.randn(E, N, K)
            grouped_gemm(x, w, torch.tensor([rows, 0, 0, 0]))
            assert caplog.text.count("no measured choice for forward") == chosen
    assert len(device.launched) == 4


def test_tables_that_another_thread_clears_lose_no_call(device: Device) -> None:
    """Full tables begin anew. What a call found, or built, is its own even so."""
    x, w, m_sizes = torch.randn(8, K), torch.randn(E, N, K), torch.tensor([3, 0, 5, 0])
    wanted, ended = grouped_gemm(x, w, m_sizes), threading.Event()

    def clear() -> None:
        while not ended.is_set():
            snapshot = dispatch_snapshot.snapshot()
            for table in (snapshot.launchers, snapshot.calls, snapshot.recent, snapshot.plans):
                table.clear()

    thread = threading.Thread(target=clear)
    thread.start()
    try:
        for _ in range(200):
            assert torch.equal(grouped_gemm(x, w, m_sizes), wanted)
            assert torch.equal(grouped_gemm(x.clone().requires_grad_(), w, m_sizes), wanted)
    finally:
        ended.set()
        thread.join()
    assert len(device.launched) == 401


def test_only_the_gradients_that_are_needed_run(device: Device) -> None:
    x, w = torch.randn(8, K), torch.randn(E, N, K)
    m_sizes = torch.tensor([3, 0, 5, 0])
    for needs_x, needs_w, options, ops in (
        (True, False, {}, [Op.DX]),
        (False, True, {}, [Op.DW]),
        (True, True, {"dX_only": True}, [Op.DX]),
        (True, True, {"dW_only": True}, [Op.DW]),
    ):
        device.launches.clear()
        a, b = x.clone().requires_grad_(needs_x), w.clone().requires_grad_(needs_w)
        grouped_gemm(a, b, m_sizes, **options).sum().backward()
        assert [op for op, _ in device.launched] == [Op.FORWARD, *ops]
        assert (a.grad is not None) == (Op.DX in ops)
        assert (b.grad is not None) == (Op.DW in ops)
