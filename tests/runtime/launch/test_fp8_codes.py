"""The kernels of fp8 training, on the emulated GPU: which calls they take, and what they are launched with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import emulated_kernels
import pytest
import torch
from emulated_driver import H200, EmulatedGpu, emulated

from pretuned.artifacts.records import Op, RowOp
from pretuned.kernels import search
from pretuned.runtime import reload
from pretuned.runtime.driver.device import current_stream
from pretuned.runtime.ops import fp8_codes
from pretuned.runtime.weights import fp8_codes as by_torch

COUNTS = [3, 0, 130, 128, 1]
M, N, K = sum(COUNTS) + 7, 256, 384


@pytest.fixture
def gpu(clean_places: Path) -> Iterator[EmulatedGpu]:
    gemms, rows = search.of_training(90)
    emulated_kernels.write(
        clean_places / "training.msgpack", [emulated_kernels.variant_and_code(spec) for spec in (*gemms, *rows)]
    )
    with emulated(EmulatedGpu(H200)) as gpu:
        reload()
        yield gpu


def launched(gpu: EmulatedGpu) -> list[Op | RowOp]:
    """Return the kernels launched since, without self-tests, which have a stream of their own."""
    own = current_stream(0)
    seen = [row_kernel.code.op for row_kernel in (*gpu.passes, *gpu.launches) if row_kernel.stream == own]
    gpu.launches.clear()
    return list(dict.fromkeys(seen))


@pytest.mark.parametrize("index_dtype", [None, torch.int32, torch.int64])
@pytest.mark.parametrize("blocks", [False, True])
def test_codes_of_columns(gpu: EmulatedGpu, blocks: bool, index_dtype: torch.dtype | None) -> None:
    torch.manual_seed(0)
    m_sizes = torch.tensor(COUNTS, dtype=torch.int64 if blocks else torch.int32)
    t, index, top_k = torch.randn(M, K).bfloat16(), None, 1
    if index_dtype is not None:
        index, top_k = torch.randperm(M * 2)[:M].to(index_dtype), 2
    codes = fp8_codes.column_codes(t, m_sizes, index, top_k, blocks=blocks)
    assert launched(gpu) == [RowOp.QUANTIZE_COLUMNS]
    want = by_torch.column_codes(t, m_sizes, index, top_k, blocks=blocks)
    used = sum(-(-count // 128) for count in COUNTS)
    assert torch.equal(codes.codes.view(torch.uint8)[:, : 128 * used], want.codes.view(torch.uint8)[:, : 128 * used])
    assert torch.equal(codes.scale[:used], want.scale[:used])
    assert codes.M == M


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("accumulate", [False, True])
def test_dw_of_codes(gpu: EmulatedGpu, dtype: torch.dtype, accumulate: bool) -> None:
    torch.manual_seed(0)
    m_sizes = torch.tensor(COUNTS)
    dy, x = (
        by_torch.column_codes(torch.randn(M, N), m_sizes),
        by_torch.column_codes(torch.randn(M, K), m_sizes, blocks=True),
    )
    want = torch.randn(len(COUNTS), N, K).to(dtype)
    out = want.clone()
    version = out._version
    by_torch.grad_weight(dy, x, m_sizes, want, accumulate=accumulate)
    assert fp8_codes.dW_of_codes(dy, x, m_sizes, out=out, accumulate=accumulate) is out
    assert launched(gpu) == [Op.DW]
    assert out._version > version  # a backward pass that saved it fails
    assert torch.equal(out, want)
    if not accumulate:
        assert torch.equal(fp8_codes.dW_of_codes(dy, x, m_sizes, dtype=dtype), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_both_ways(gpu: EmulatedGpu, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    w = torch.randn(2, N, K).to(dtype)
    for rows, columns in ((True, True), (True, False), (False, True)):
        for weights, wanted, matrix in zip(
            fp8_codes.quantise_weights(w, rows=rows, columns=columns), (rows, columns), (w, w.mT), strict=True
        ):
            assert (weights is not None) == wanted
            if weights is not None:
                codes, scale = by_torch.blocks(matrix)
                assert torch.equal(weights.codes, codes)
                assert torch.equal(weights.scale, scale)
        assert launched(gpu) == [RowOp.QUANTIZE_BLOCKS]


def test_torch_does_what_no_kernel_takes(gpu: EmulatedGpu) -> None:
    torch.manual_seed(0)
    m_sizes = torch.tensor(COUNTS)
    apart = torch.randn(M, 2 * K).bfloat16()[:, :K]
    codes = fp8_codes.column_codes(apart, m_sizes)
    assert torch.equal(codes.scale, by_torch.column_codes(apart, m_sizes).scale)
    dy, out = fp8_codes.column_codes(torch.randn(M, N), m_sizes), torch.zeros(len(COUNTS), N, 2 * K)[:, :, :K]
    fp8_codes.dW_of_codes(dy, by_torch.column_codes(apart, m_sizes, blocks=True), m_sizes, out=out)
    assert out.any()
    fp8_codes.quantise_weights(torch.randn(1, K, N).mT)
    assert launched(gpu) == []


def test_no_rows_and_no_experts(gpu: EmulatedGpu) -> None:
    m_sizes = torch.zeros(3, dtype=torch.int32)
    dy, x = (fp8_codes.column_codes(torch.zeros(0, C).bfloat16(), m_sizes, blocks=C == K) for C in (N, K))
    out = torch.ones(3, N, K)
    assert fp8_codes.dW_of_codes(dy, x, m_sizes, out=out, accumulate=True).all()
    assert not fp8_codes.dW_of_codes(dy, x, m_sizes, out=out).any()
    assert launched(gpu) == []
