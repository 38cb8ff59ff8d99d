"""Every form and gradient launched on host memory, its arguments carried out as the kernels' docstrings say."""

from __future__ import annotations

import itertools
import logging
import threading

import pytest
import torch
from emulated_driver import forget
from host_gpu import ALL, PERSISTENT, TOPK, Device, E, K, N, T, ran, tensors
from pairwise import pairwise

from pretuned.artifacts.records import DType, Fusion, Layout, Op, RowOp
from pretuned.runtime import Lora, grouped_gemm, moe_mlp, reload
from pretuned.runtime.dispatch import snapshot as dispatch_snapshot
from pretuned.runtime.ops import zero_rows


@pairwise(
    {
        **dict.fromkeys(("permute_x", "permute_y", "weights", "bias"), (False, True)),
        "layout": ["nk", "kn"],
        "missing": [
            set(),
            {Fusion.GATHER},
            {Fusion.GATHER, Fusion.SCATTER},
            {Fusion.GATHER, Fusion.SCATTER, Fusion.NONE},
        ],
    },
    strength=3,
)
def test_a_launch_computes_what_the_reference_does(
    device: Device, permute_x: bool, permute_y: bool, weights: bool, bias: bool, layout: str, missing: set[Fusion]
) -> None:
    device.there = {(op, fusion) for op, fusion in ALL if fusion not in missing}
    inputs = tensors(permute_x=permute_x, weights=weights, bias=bias, layout=layout)
    device.layout = Layout(layout)
    form = {"permute_x": permute_x, "permute_y": permute_y, "w_layout": layout}
    device.visible = False
    wanted = ran(form, inputs, wide=False)
    assert not device.launched
    device.visible = True
    for wide in (False, True):
        for got, want in zip(ran(form, inputs, wide), wanted, strict=True):
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
        (forward, Fusion.GATHER),
        (forward, Fusion.NONE),
        (dx, Fusion.NONE),
        (dw, Fusion.NONE),
        (dx, Fusion.NONE),
        (dw, Fusion.NONE),
    ]


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
            for table in (snapshot.launchers, snapshot.plans):
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


ROWS, WIDE = 16, (16, 8)  # N and K of products whose rows are whole 16 bytes
SIZES = [5, 0, 3, 4]
NEW = (Op.FORWARD, Op.DX)


@pytest.fixture
def grouped(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The x of each call of torch's grouped_mm. What is past the last expert's end is no number."""
    calls: list[torch.Tensor] = []

    def grouped_mm(x: torch.Tensor, w: torch.Tensor, *, offs: torch.Tensor) -> torch.Tensor:
        assert offs.dtype is torch.int32
        calls.append(x)
        y = x.new_full((x.shape[0], w.shape[2]), float("nan"))
        for g, (start, end) in enumerate(itertools.pairwise([0, *offs.tolist()])):
            assert 0 <= start <= end <= x.shape[0]
            y[start:end] = x[start:end] @ w[g]
        return y

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", grouped_mm)
    return calls


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got.detach(), want.detach(), rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("sizes", [SIZES, [16, 0, 0, 0], [0, 0, 0, 0], [20, -4, 7, 1]])
@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("zero_tail", [False, True])
@pytest.mark.parametrize("clears", [False, True])
def test_torch_runs_plain_products_that_it_was_measured_faster_for(
    device: Device,
    monkeypatch: pytest.MonkeyPatch,
    grouped: list[torch.Tensor],
    sizes: list[int],
    layout: str,
    zero_tail: bool,
    clears: bool,
) -> None:
    """The first call, the second, which replays a program, and calls without a gradient; dW stays a kernel's."""
    monkeypatch.setattr(zero_rows, "LEAST_BYTES", 0)
    device.has(PERSISTENT, DType.BF16)
    device.layout = Layout(layout)
    device.there -= set() if clears else {RowOp.CLEAR}
    device.runs_torch(NEW, WIDE)
    N, K = WIDE
    x = torch.randn(ROWS, K).bfloat16().requires_grad_()
    w = torch.randn((E, N, K) if layout == "nk" else (E, K, N)).bfloat16().requires_grad_()
    m_sizes, form = torch.tensor(sizes, dtype=torch.int32), {"w_layout": layout, "zero_tail": zero_tail}
    end = min(sum(min(max(size, 0), ROWS) for size in sizes), ROWS)
    dy = torch.randn(ROWS, N).bfloat16()

    def ran() -> list[torch.Tensor]:
        y = grouped_gemm(x, w, m_sizes, **form)
        with torch.no_grad():
            bare = grouped_gemm(x, w, m_sizes, **form)
        used = [rows if zero_tail else rows[:end] for rows in (y, bare)]
        return [*used, *torch.autograd.grad(y, (x, w), dy)]

    device.visible = False
    wanted = ran()
    device.visible = True
    for turn in (1, 2):
        for got, want in zip(ran(), wanted, strict=True):
            close(got, want)
        assert len(grouped) == 3 * turn
    assert all(plan.program is not None for plan in dispatch_snapshot.snapshot().plans.values())
    assert bool(device.cleared) is clears  # of dX at least
    assert (Op.DW, Fusion.NONE) in device.launched


def test_torch_runs_nothing_else(device: Device, grouped: list[torch.Tensor]) -> None:
    """Kernels run what is fused, goes into ``out``, is not aligned or has an adapter, whatever torch takes."""
    device.has(PERSISTENT, DType.BF16)
    device.runs_torch(NEW, WIDE, (7, 8))
    N, K = WIDE
    m_sizes, kind = torch.tensor(SIZES), torch.bfloat16
    x, w, out = torch.randn(ROWS, K).to(kind), torch.randn(E, N, K).to(kind), torch.zeros(ROWS, N, dtype=kind)
    grouped_gemm(x, w, m_sizes, out=out)
    grouped_gemm(x, w, m_sizes, bias=torch.randn(E, N).to(kind))
    grouped_gemm(torch.randn(ROWS * K + 1).to(kind)[1:].view(ROWS, K), w, m_sizes)
    grouped_gemm(x, torch.randn(E, 7, K).to(kind), m_sizes)
    grouped_gemm(x, w, m_sizes, gather_indices=torch.arange(ROWS), permute_x=True)
    grouped_gemm(x, w, m_sizes, lora=Lora(torch.randn(E, 4, K).to(kind), torch.randn(E, N, 4).to(kind)))
    grouped_gemm(torch.randn(0, K).to(kind), w, m_sizes)
    assert not grouped
    grouped_gemm(x, w, m_sizes)
    assert len(grouped) == 1


@pytest.mark.parametrize("rows", [6, 7])
def test_torch_runs_what_is_plain_of_a_layer(device: Device, grouped: list[torch.Tensor], rows: int) -> None:
    """Its second product, and both of dX: rows of no expert, which torch leaves as they are, go nowhere."""
    H, I = WIDE  # noqa: E741
    device.has(PERSISTENT, DType.BF16)
    generator = torch.Generator().manual_seed(1)

    def leaf(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) / 4).bfloat16().requires_grad_()

    x, up, down = leaf(rows, H), leaf(E, 2 * I, H), leaf(E, H, I)
    ids = torch.randint(-1, E + 1, (rows, TOPK), generator=generator)
    weights = torch.rand(rows, TOPK, generator=generator, requires_grad=True)

    def ran() -> list[torch.Tensor]:
        out = moe_mlp(x, up, down, ids, weights)
        return [out, *torch.autograd.grad(out.float().square().sum(), (x, up, down, weights))]

    device.visible = False
    wanted = ran()
    device.visible = True
    device.runs_torch(NEW, (2 * I, H), (H, I))
    for turn in (1, 2):
        for got, want in zip(ran(), wanted, strict=True):
            close(got, want)
        assert len(grouped) == 3 * turn


def test_a_choice_has_torch_run_on_its_gpu_and_for_its_rows_alone(device: Device, grouped: list[torch.Tensor]) -> None:
    """On another GPU, or for other rows, the kernel is launched."""
    device.has(PERSISTENT, DType.BF16)
    N, K = WIDE
    device.runs_torch((Op.FORWARD,), WIDE, buckets=(16,))
    x, w = torch.randn(ROWS, K).bfloat16(), torch.randn(E, N, K).bfloat16()
    grouped_gemm(x, w, torch.tensor(SIZES))
    assert (len(grouped), len(device.launched)) == (1, 0)
    grouped_gemm(x[:1], w, torch.tensor([1, 0, 0, 0]))
    assert (len(grouped), len(device.launched)) == (1, 1)
    device.gpu = device.gpu._replace(name="NVIDIA H100 80GB HBM3")
    forget()
    reload()
    grouped_gemm(x, w, torch.tensor(SIZES))
    assert (len(grouped), len(device.launched)) == (1, 2)
