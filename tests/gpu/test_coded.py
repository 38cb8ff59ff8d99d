"""The kernel for codes of w as they lie, against float32 products of what the weights are: forward, dX, a layer.

PRETUNED_BUNDLES names bundles of tests/gpu/gpu-models.txt. Sizes that are no multiples of 64 are never put in order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch

from pretuned.artifacts.records import PRECISIONS, Fusion, Layout, Op, Problem
from pretuned.runtime import ExpertWeights, grouped_gemm, grouped_gemm_dX, moe_mlp
from pretuned.runtime.dispatch import snapshot as dispatch_snapshot
from pretuned.runtime.driver.device import local_gpu
from pretuned.runtime.ops import quantised
from pretuned.runtime.weights.prepared_layout import ORDERS

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(
        not os.environ.get("PRETUNED_BUNDLES"), reason="needs PRETUNED_BUNDLES to name bundles for this GPU"
    ),
]

FORMATS = [name for name, precision in PRECISIONS.items() if precision.quantised]
ORDERED = [name for name in FORMATS if name in ORDERS]
E = 8
AS_STORED = [(704, 544), (544, 352), (151, 74)]  # N, K: lines of 16 bytes, and none
IN_BLOCKS = [(768, 512), (512, 384)]
ROWS = [1, 40, 700]
MOST = 3e-3  # w and y are rounded to bf16

Make = Callable[..., ExpertWeights]


@pytest.fixture
def make(caplog: pytest.LogCaptureFixture) -> Iterator[Make]:
    """Makes weights that a bundle has this kernel for, which is to run: torch's way fails."""

    def packed_layer(
        format: str, N: int, K: int, *, prepared: bool = False, ops: tuple[Op, ...] = (Op.FORWARD, Op.DX)
    ) -> ExpertWeights:
        if PRECISIONS[format].w.bits == 4:
            K += K % 2
        draw = torch.randn(E, N, K, generator=torch.Generator().manual_seed(N)) / K**0.5
        w = ExpertWeights.quantize(draw, format).to("cuda")
        w = w.prepare() if prepared else w
        if prepared and not w.is_prepared:
            pytest.skip("these can't be prepared")
        layout = Layout.NK if prepared else Layout.STORED
        for op in ops:
            for fusion in (Fusion.NONE, Fusion.SCATTER, Fusion.GATHER):
                if prepared and (op is Op.FORWARD and fusion is Fusion.GATHER):
                    continue
                problem = Problem(op, w.kernel_dtypes[-1], E, N, K, layout, fusion)
                if not dispatch_snapshot.snapshot().serves(problem, local_gpu(0)):
                    pytest.skip(f"the bundles have no code of {problem} for this GPU")
        return w

    quantised._tell.cache_clear()
    yield packed_layer
    assert "torch dequantises them" not in " ".join(record.getMessage() for record in caplog.get_records("call"))


def fallen(M: int) -> torch.Tensor:
    """Rows of each expert, int32 [E], M in all; some have none."""
    ids = torch.randint(0, E, (M,), generator=torch.Generator().manual_seed(M)) // 2 * 2 + 1
    return torch.bincount(ids, minlength=E).int().cuda()


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16().cuda()


def product(x: torch.Tensor, w: torch.Tensor, m_sizes: torch.Tensor) -> torch.Tensor:
    """x's rows by their experts' matrices [E, columns, reduction], float64; rows that belong to none are 0."""
    y, row = x.new_zeros(x.shape[0], w.shape[1], dtype=torch.float64), 0
    for e, count in enumerate(m_sizes.tolist()):
        y[row : row + count] = x[row : row + count].double() @ w[e].double().T
        row += count
    return y


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("M", ROWS)
@pytest.mark.parametrize(("N", "K"), AS_STORED)
@pytest.mark.parametrize("format", FORMATS)
def test_a_forward_of_codes_as_they_are(make: Make, format: str, N: int, K: int, M: int) -> None:
    w = make(format, N, K, ops=(Op.FORWARD,))
    dense, x, m_sizes = w.dequantize(torch.float32), drawn(M, w.shape[2]), fallen(M)
    for _ in range(2):
        y = grouped_gemm(x, w, m_sizes)
        assert not w.is_prepared
        assert off(y, product(x, dense, m_sizes)) < MOST
    assert torch.equal(grouped_gemm(x, w, m_sizes.long()), y)


@pytest.mark.parametrize("M", ROWS)
@pytest.mark.parametrize(("N", "K"), AS_STORED)
@pytest.mark.parametrize("format", FORMATS)
def test_dx_of_codes_as_they_are(make: Make, format: str, N: int, K: int, M: int) -> None:
    w = make(format, N, K, ops=(Op.DX,))
    dense, dy, m_sizes = w.dequantize(torch.float32).transpose(1, 2), drawn(M + 9, N), fallen(M)
    dx = grouped_gemm_dX(dy, w, m_sizes)
    assert not w.is_prepared
    assert off(dx, product(dy, dense, m_sizes)) < MOST
    assert not dx[M:].any()


@pytest.mark.parametrize("M", ROWS)
@pytest.mark.parametrize(("N", "K"), IN_BLOCKS)
@pytest.mark.parametrize("format", ORDERED)
def test_dx_of_codes_in_order(make: Make, format: str, N: int, K: int, M: int) -> None:
    w = make(format, N, K, prepared=True, ops=(Op.DX,))
    dense, dy, m_sizes = w.dequantize(torch.float32).transpose(1, 2), drawn(M, N), fallen(M)
    dx = grouped_gemm_dX(dy, w, m_sizes)
    assert w.order == ORDERS[format].number
    assert off(dx, product(dy, dense, m_sizes)) < MOST


@pytest.mark.parametrize("M", ROWS)
@pytest.mark.parametrize("format", FORMATS)
def test_rows_that_are_moved_weighted_and_have_a_bias(make: Make, format: str, M: int) -> None:
    w, top_k = make(format, *AS_STORED[0]), 2 - M % 2
    N, K = w.shape[1:]
    dense, m_sizes = w.dequantize(torch.float32), fallen(M)
    index = torch.randperm(M, generator=torch.Generator().manual_seed(M)).cuda()
    hidden, weights, bias = drawn(M // top_k, K), torch.rand(M // top_k, top_k, device="cuda"), drawn(E, N, seed=3)
    hidden.requires_grad_()
    each = torch.repeat_interleave(torch.arange(E, device="cuda"), m_sizes)
    scale = weights.flatten()[index].double()[:, None]
    want = torch.empty(M, N, dtype=torch.float64, device="cuda")
    want[index] = (product(hidden[index // top_k].detach(), dense, m_sizes) + bias[each].double()) * scale
    y = grouped_gemm(
        hidden,
        w,
        m_sizes,
        topk=top_k,
        gather_indices=index,
        permute_x=True,
        permute_y=True,
        topk_weights=weights,
        fuse_mul_post=True,
        bias=bias,
    )
    assert off(y.detach(), want) < MOST
    dy = drawn(M, N, seed=4)
    (dx,) = torch.autograd.grad(y, hidden, dy)
    rows = torch.empty(M, K, dtype=torch.float64, device="cuda")
    rows[index] = product(dy[index], dense.transpose(1, 2), m_sizes) * scale
    assert off(dx, rows.view(M // top_k, top_k, K).sum(1)) < 2 * MOST
    assert not w.is_prepared


def test_a_slot_that_no_row_goes_to_becomes_zero(make: Make) -> None:
    w, M, left = make("mxfp4", *AS_STORED[1]), 64, 24
    dense, x, m_sizes = w.dequantize(torch.float32), drawn(M, w.shape[2]), fallen(M - left)
    index = torch.randperm(M, generator=torch.Generator().manual_seed(M)).cuda()
    y = grouped_gemm(x, w, m_sizes, topk=2, gather_indices=index, permute_y=True, zero_tail=True)
    want = torch.zeros(M, w.shape[1], dtype=torch.float64, device="cuda")
    want[index[: M - left]] = product(x, dense, m_sizes)[: M - left]
    assert off(y, want) < MOST
    assert not y[index[M - left :]].any()


def test_nan_and_inf_stay_in_their_expert(make: Make) -> None:
    w, m_sizes = make("mxfp4", *AS_STORED[0]), torch.tensor([3, 20, 0, 1, 40, 0, 0, 5], dtype=torch.int32).cuda()
    x = drawn(69, w.shape[2])
    x[3:23] = float("nan")
    x[23] = float("inf")
    y = grouped_gemm(x, w, m_sizes)
    assert y[3:24].isnan().any(1).all()
    assert not y[:3].isnan().any()
    assert not y[24:].isnan().any()


@pytest.mark.parametrize("sizes", [(544, 352), (512, 384)])
@pytest.mark.parametrize("T", [1, 20, 350])
@pytest.mark.parametrize("format", FORMATS)
def test_a_layer_and_its_gradient(make: Make, format: str, T: int, sizes: tuple[int, int]) -> None:
    H, I = sizes  # noqa: E741
    up, down = make(format, 2 * I, H), make(format, H, I)
    dense = [w.dequantize(torch.bfloat16) for w in (up, down)]
    generator = torch.Generator().manual_seed(T)
    ids = torch.randint(0, E, (T, 2), generator=generator).cuda()
    scale, hidden, dout = torch.rand(T, 2, generator=generator).cuda(), drawn(T, H), drawn(T, H, seed=5)

    def call(*weights: torch.Tensor | ExpertWeights) -> list[torch.Tensor]:
        x, s = hidden.clone().requires_grad_(), scale.clone().requires_grad_()
        out = moe_mlp(x, *weights, ids, s, "silu")
        return [out.detach(), *torch.autograd.grad(out, (x, s), dout)]

    ones = torch.ones(T, 1, device="cuda")
    alone = [moe_mlp(hidden, *dense, ids[:, [slot]], ones, "silu").double().norm(dim=1) for slot in range(2)]
    sums = torch.stack(alone, dim=1) * dout.double().norm(dim=1, keepdim=True)  # a routing weight's gradient at most
    most = 6e-2 if PRECISIONS[format].math == "fp8" else 8e-3
    want = call(*dense)
    for _ in range(2):
        got = call(up, down)
        for tensor, other in zip(got[:2], want[:2], strict=True):
            assert off(tensor, other) < most
        assert bool(((got[2] - want[2]).abs() < most * sums).all())  # (its terms cancel)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("sizes", [(544, 352), (512, 384)])
@pytest.mark.parametrize("format", ["mxfp4", "mxfp8", "fp8_block_a16"])
def test_nothing_waits_for_the_gpu(make: Make, format: str, sizes: tuple[int, int]) -> None:
    H, I = sizes  # noqa: E741
    up, down = make(format, 2 * I, H), make(format, H, I)
    ids, scale = torch.randint(0, E, (40, 2), device="cuda"), torch.rand(40, 2, device="cuda")
    hidden, dout = drawn(40, H).requires_grad_(), drawn(40, H, seed=5)

    def step() -> None:
        out = moe_mlp(hidden, up, down, ids, scale, "silu")
        torch.autograd.grad(out, hidden, dout)

    step()  # puts them in order, where that is wanted
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    try:
        torch.cuda.set_sync_debug_mode("error")
        step()
    finally:
        torch.cuda.set_sync_debug_mode(before)
