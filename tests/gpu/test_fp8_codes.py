"""The kernels of fp8 training on a real GPU: codes are torch's bits, dW is near fp32 of the codes and deterministic."""

from __future__ import annotations

import pytest
import torch

from pretuned.artifacts.records import DType, RowOp
from pretuned.runtime.launch import fp8_codes as launch
from pretuned.runtime.launch import rowops
from pretuned.runtime.ops import fp8_codes
from pretuned.runtime.weights import fp8_codes as by_torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

CASES = [
    ([0, 1, 127, 128, 129, 300, 0, 5], 512, 256),
    ([0, 0, 0], 128, 256),
    ([1], 256, 128),
    ([385, 0, 1000, 127, 255, 257], 384, 640),
]


@pytest.fixture(autouse=True)
def kernels() -> None:
    torch.manual_seed(0)
    if rowops.launcher(RowOp.QUANTIZE_COLUMNS, DType.BF16, 0, aligned=True) is None:
        pytest.skip("no bundle has these kernels for this GPU")


def rows(M: int, C: int) -> torch.Tensor:
    sizes = 2.0 ** torch.randint(-6, 6, (M, 1), device="cuda")
    return (torch.randn(M, C, device="cuda") * sizes).bfloat16()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("picks", [False, True])
@pytest.mark.parametrize(("counts", "C", "_K"), CASES)
def test_codes_along_m_are_torchs(
    counts: list[int], C: int, _K: int, picks: bool, blocks: bool, dtype: torch.dtype
) -> None:
    m_sizes, M = torch.tensor(counts, dtype=dtype, device="cuda"), sum(counts) + 9
    t, index, top_k = rows(M, C), None, 1
    if picks:
        index, top_k = torch.randperm(2 * M, device="cuda")[:M].to(dtype), 2
    t[0] = 0
    t[-1, 3] = float("nan")
    codes = launch.column_codes(t, m_sizes, index, top_k, blocks=blocks)
    assert codes is not None
    want = by_torch.column_codes(t, m_sizes, index, top_k, blocks=blocks)
    used = sum(-(-count // 128) for count in counts)
    assert torch.equal(codes.codes.view(torch.uint8)[:, : 128 * used], want.codes.view(torch.uint8)[:, : 128 * used])
    assert torch.equal(codes.scale[:used], want.scale[:used])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("counts", "N", "K"), CASES)
def test_dw_of_codes(counts: list[int], N: int, K: int, dtype: torch.dtype) -> None:
    """The tensor cores keep 14 bits of a sum of 128 products of e4m3."""
    m_sizes, M = torch.tensor(counts, dtype=torch.int32, device="cuda"), sum(counts) + 9
    dy = fp8_codes.column_codes(rows(M, N), m_sizes)
    x = fp8_codes.column_codes(rows(M, K), m_sizes, blocks=True)
    exact = torch.empty(len(counts), N, K, device="cuda")
    by_torch.grad_weight(dy, x, m_sizes, exact)
    size = exact.norm().clamp(min=1e-30)
    dw = torch.full((len(counts), N, K), 7.0, dtype=dtype, device="cuda")
    assert launch.grad_weight(dy, x, m_sizes, dw, accumulate=False)
    assert (dw.float() - exact).norm() < 2e-3 * size
    assert not any(dw[e].any() for e, count in enumerate(counts) if not count)
    assert torch.equal(fp8_codes.dW_of_codes(dy, x, m_sizes, dtype=dtype), dw)  # the same bits again
    base = torch.randn_like(dw)
    added = fp8_codes.dW_of_codes(dy, x, m_sizes, out=base.clone(), accumulate=True)
    want = base.float() + exact
    assert (added.float() - want).norm() < 4e-3 * want.norm()


def test_nan_stays_in_its_expert() -> None:
    m_sizes = torch.tensor([100, 200, 0], device="cuda")
    t = rows(300, 256)
    dy, clean = fp8_codes.column_codes(rows(300, 128), m_sizes), fp8_codes.column_codes(t, m_sizes, blocks=True)
    t[150, 7] = float("nan")
    dw = fp8_codes.dW_of_codes(dy, fp8_codes.column_codes(t, m_sizes, blocks=True), m_sizes)
    wanted = fp8_codes.dW_of_codes(dy, clean, m_sizes)
    assert dw[1, :, 7].isnan().all()
    assert not dw[1, :, :7].isnan().any()
    assert torch.equal(dw[0], wanted[0])
    assert not dw[2].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_both_ways_are_torchs(dtype: torch.dtype) -> None:
    w = torch.randn(3, 256, 384, device="cuda").to(dtype)
    w[1, 200, 300], w[2, 1, 2], w[0, :128, :128] = float("nan"), float("inf"), 0.0
    for weights, matrix in zip(fp8_codes.quantise_weights(w), (w, w.mT), strict=True):
        assert weights is not None
        codes, scale = by_torch.blocks(matrix)
        assert torch.equal(weights.codes, codes)
        assert torch.equal(weights.scale.nan_to_num(-1.0), scale.nan_to_num(-1.0))
        assert int(scale.isnan().sum()) == 2
