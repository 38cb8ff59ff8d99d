"""A bundle's kernels for quantised weights, against float32 products of what the weights are.

PRETUNED_BUNDLES names bundles of tests/gpu/gpu-models.txt.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from pretuned.artifacts.records import Fusion, Layout, Op, Problem
from pretuned.kernels.hopper_w4a16 import DTYPES
from pretuned.runtime import ExpertWeights, grouped_gemm, moe_mlp
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

E, H, I = 8, 512, 384  # noqa: E741
SIZES = [(2 * I, H), (H, I)]  # N, K of both products
ROWS = [1, 40, 700]
MOST = 3e-3  # w and y are rounded to bf16
FALLS = ["random", "one", "few"]
FORMATS = sorted(dtype.value for dtype in DTYPES)

Make = Callable[[str, int, int], ExpertWeights]


@pytest.fixture
def make(caplog: pytest.LogCaptureFixture) -> Iterator[Make]:
    """Makes weights that a bundle has kernels for, which are to run: torch's way fails."""

    def packed_weights(format: str, N: int, K: int) -> ExpertWeights:
        w = ExpertWeights.quantize(torch.randn(E, N, K, generator=torch.Generator().manual_seed(N)) / K**0.5, format)
        dtype = w.kernel_dtypes[-1]
        for fusion in (Fusion.NONE, Fusion.SCATTER):
            problem = Problem(Op.FORWARD, dtype, E, N, K, Layout.NK, fusion)
            if not dispatch_snapshot.snapshot().serves(problem, local_gpu(0)):
                pytest.skip(f"the bundles have no code of {problem} for this GPU")
        return w.to("cuda").prepare()

    quantised._tell.cache_clear()
    yield packed_weights
    assert "torch dequantises them" not in " ".join(record.getMessage() for record in caplog.get_records("call"))


def fallen(M: int, fall: str) -> torch.Tensor:
    """Rows of each expert, int32 [E], M in all."""
    if fall == "one":
        return torch.zeros(E, dtype=torch.int32).scatter(0, torch.tensor(E - 2), M)
    generator = torch.Generator().manual_seed(M)
    ids = torch.randint(0, E, (M,), generator=generator)
    return torch.bincount(ids if fall == "random" else ids // 3 * 3, minlength=E).int()  # few: 0, 3 and 6


def activations(rows: int, K: int) -> torch.Tensor:
    return torch.randn(rows, K, generator=torch.Generator().manual_seed(rows)).bfloat16().cuda()


def product(x: torch.Tensor, w: torch.Tensor, m_sizes: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x's rows by their experts' matrices, float64; rows that belong to none are 0."""
    y, row = x.new_zeros(x.shape[0], w.shape[1], dtype=torch.float64), 0
    for e, count in enumerate(m_sizes.tolist()):
        y[row : row + count] = x[row : row + count].double() @ w[e].double().T
        if bias is not None:
            y[row : row + count] += bias[e].double()
        row += count
    return y


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("fall", FALLS)
@pytest.mark.parametrize("M", ROWS)
@pytest.mark.parametrize(("N", "K"), SIZES)
@pytest.mark.parametrize("format", FORMATS)
def test_a_plain_product(make: Make, format: str, N: int, K: int, M: int, fall: str) -> None:
    w = make(format, N, K)
    dense, x, m_sizes = w.dequantize(torch.float32), activations(M, K), fallen(M, fall).cuda()
    assert w.order == ORDERS[format].number
    for _ in range(2):  # the second has the launcher
        y = grouped_gemm(x, w, m_sizes)
        assert off(y, product(x, dense, m_sizes)) < MOST
    assert torch.equal(w.dequantize(torch.float32), dense)
    assert torch.equal(grouped_gemm(x, w, m_sizes.long()), y)


@pytest.mark.parametrize("M", ROWS)
@pytest.mark.parametrize(("N", "K"), SIZES)
@pytest.mark.parametrize("format", FORMATS)
def test_rows_beyond_the_experts_are_zeroed(make: Make, format: str, N: int, K: int, M: int) -> None:
    w = make(format, N, K)
    dense, x, m_sizes = w.dequantize(torch.float32), activations(M + 37, K), fallen(M, "random").cuda()
    y = grouped_gemm(x, w, m_sizes, zero_tail=True)
    assert off(y, product(x, dense, m_sizes)) < MOST
    assert not y[M:].any()


@pytest.mark.parametrize("fall", FALLS)
@pytest.mark.parametrize("M", ROWS)
@pytest.mark.parametrize("format", FORMATS)
def test_rows_that_are_gathered(make: Make, format: str, M: int, fall: str) -> None:
    N, K = SIZES[0]
    w, top_k = make(format, N, K), 2 - M % 2
    dense, x, m_sizes = w.dequantize(torch.float32), activations(M // top_k, K), fallen(M, fall).cuda()
    index = torch.randperm(M, generator=torch.Generator().manual_seed(M)).cuda()
    y = grouped_gemm(x, w, m_sizes, topk=top_k, gather_indices=index, permute_x=True)
    assert off(y, product(x[index // top_k], dense, m_sizes)) < MOST
    assert torch.equal(grouped_gemm(x, w, m_sizes, topk=top_k, gather_indices=index.int(), permute_x=True), y)


@pytest.mark.parametrize("fall", FALLS)
@pytest.mark.parametrize("M", ROWS)
@pytest.mark.parametrize("format", FORMATS)
def test_rows_that_are_scattered_weighted_and_have_a_bias(make: Make, format: str, M: int, fall: str) -> None:
    N, K = SIZES[1]
    w, top_k = make(format, N, K), 2 - M % 2
    dense, x, m_sizes = w.dequantize(torch.float32), activations(M, K), fallen(M, fall).cuda()
    generator = torch.Generator().manual_seed(M)
    index = torch.randperm(M, generator=generator).cuda()
    weights = torch.rand(M // top_k, top_k, generator=generator).cuda()
    bias = torch.randn(E, N, generator=generator).bfloat16().cuda()
    want = torch.empty(M, N, dtype=torch.float64, device="cuda")
    want[index] = product(x, dense, m_sizes, bias) * weights.flatten()[index].double()[:, None]
    for kind in (torch.int32, torch.int64):
        y = grouped_gemm(
            x,
            w,
            m_sizes.to(kind),
            topk=top_k,
            gather_indices=index.to(kind),
            permute_y=True,
            topk_weights=weights,
            fuse_mul_post=True,
            bias=bias,
        )
        assert off(y, want) < MOST


def test_a_slot_that_no_row_goes_to_becomes_zero(make: Make) -> None:
    N, K = SIZES[1]
    w, M, left = make("mxfp4", N, K), 64, 24
    dense, x, m_sizes = w.dequantize(torch.float32), activations(M, K), fallen(M - left, "random").cuda()
    index = torch.randperm(M, generator=torch.Generator().manual_seed(M)).cuda()
    y = grouped_gemm(x, w, m_sizes, topk=2, gather_indices=index, permute_y=True, zero_tail=True)
    want = torch.zeros(M, N, dtype=torch.float64, device="cuda")
    want[index[: M - left]] = product(x, dense, m_sizes)[: M - left]
    assert off(y, want) < MOST
    assert not y[index[M - left :]].any()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("T", [1, 20, 350])
@pytest.mark.parametrize("format", FORMATS)
def test_a_layer_with_biases(make: Make, format: str, T: int, interleaved: bool) -> None:
    up, down = (make(format, N, K) for N, K in SIZES)
    generator = torch.Generator().manual_seed(T)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    inputs = random(T, H), torch.randint(-1, E, (T, 2), generator=generator), torch.rand(T, 2, generator=generator)
    biases = {"gate_up_bias": random(E, 2 * I), "down_bias": random(E, H)}
    dense = [ExpertWeights.to(matrix, "cpu").dequantize(torch.float32) for matrix in (up, down)]

    def call(device: str, *weights: torch.Tensor | ExpertWeights) -> torch.Tensor:
        hidden, ids, scale = (tensor.to(device) for tensor in inputs)
        how: dict[str, Any] = {name: bias.to(device) for name, bias in biases.items()}
        if device == "cpu":  # float32 throughout
            hidden, how = hidden.float(), {name: tensor.float() for name, tensor in how.items()}
        return moe_mlp(hidden, *weights, ids, scale, "swiglu_oai", interleaved=interleaved, **how)

    y = call("cuda", up, down)
    assert up.order == down.order == ORDERS[format].number
    assert off(y.cpu(), call("cpu", *dense)) < 8e-3  # what is between the products is rounded to bf16 as well


@pytest.mark.parametrize("format", FORMATS)
def test_a_graph_holds_a_product_and_a_layer(make: Make, format: str) -> None:
    up, down = (make(format, N, K) for N, K in SIZES)
    M = 40
    x, m_sizes = activations(M, H), fallen(M, "random").cuda()
    ids, scale = torch.randint(0, E, (M, 2), device="cuda"), torch.rand(M, 2, device="cuda")

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        return grouped_gemm(x, up, m_sizes), moe_mlp(x, up, down, ids, scale, "swiglu_oai")

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    for seed in range(2):
        x.copy_(torch.randn(M, H, generator=torch.Generator().manual_seed(100 + seed)))
        graph.replay()
        for tensor, want in zip(got, run(), strict=True):
            assert torch.equal(tensor, want)
