"""Rows of x in codes, as the pass that quantises them writes them."""

from __future__ import annotations

import pytest
import torch

from pretuned.artifacts.records import DType
from pretuned.runtime.weights import row_codes
from pretuned.runtime.weights.codes import quantise_rows
from pretuned.runtime.weights.prepared_layout import K_ORDER
from pretuned.runtime.weights.row_codes import codes_of_rows, values_of_rows, values_on_load

BLOCKS, ROWS = DType.FP8_BLOCK.precision.x.scale, DType.FP8_CHANNEL.precision.x.scale
assert BLOCKS is not None and ROWS is not None  # noqa: PT018


@pytest.mark.parametrize("M", [1, 4, 7])
def test_codes_of_rows_are_those_of_a_product_that_quantises_x(monkeypatch: pytest.MonkeyPatch, M: int) -> None:
    K = 384
    x = torch.randn(M, K, generator=torch.Generator().manual_seed(M)).bfloat16()
    x[0, 128:256] = 0
    codes, scale = codes_of_rows(x, BLOCKS)
    assert (codes.dtype, codes.shape) == (torch.float8_e4m3fn, (M, K))
    assert (scale.dtype, scale.shape) == (torch.float32, (3, -(-M // 4) * 4))  # rows of whole 16 bytes
    assert float(scale[1, 0]) == 1
    wanted = quantise_rows(x, BLOCKS)
    for here in (slice(0, M), slice(M // 2, M), slice(0, 1)):
        assert torch.equal(values_of_rows(codes, scale, here), wanted[here])
    monkeypatch.setattr(row_codes, "_CHUNK_ELEMENTS", 2 * K)  # two rows at a time
    for tensor, again in zip((codes, scale), codes_of_rows(x, BLOCKS), strict=True):
        assert torch.equal(tensor.view(torch.uint8), again.view(torch.uint8))


@pytest.mark.parametrize("M", [1, 7])
def test_codes_of_rows_with_a_scale_each(M: int) -> None:
    x = torch.randn(M, 192, generator=torch.Generator().manual_seed(M)).bfloat16()
    x[0] = 0
    codes, scale = codes_of_rows(x, ROWS)
    assert (codes.dtype, codes.shape, scale.dtype, scale.shape) == (torch.float8_e4m3fn, (M, 192), torch.float32, (M,))
    assert scale.is_contiguous()
    assert float(scale[0]) == 1
    wanted = quantise_rows(x, ROWS)
    for here in (slice(0, M), slice(M // 2, M)):
        assert torch.equal(values_of_rows(codes, scale, here), wanted[here])


def test_codes_of_rows_lie_in_the_kernel_s_order() -> None:
    """Of 64 columns k = 16 s + 8 h + 2 c + p is byte 16 c + 4 s + 2 p + (1 - h)."""
    numbers = torch.arange(1, 65, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    x = torch.cat((numbers, numbers))
    x[127] = 448  # the scale is 1: each code is its own value
    bits = codes_of_rows(x[None].bfloat16(), BLOCKS)[0].view(torch.uint8)[0, :64].tolist()
    for k in range(64):
        s, h, c, p = k // 16, k // 8 % 2, k // 2 % 4, k % 2
        assert bits[16 * c + 4 * s + 2 * p + 1 - h] == k + 1
    assert [bit - 1 for bit in bits] == list(K_ORDER)


@pytest.mark.parametrize("dtype", [DType.FP8_BLOCK, DType.FP8_CHANNEL, DType.FP8_BLOCK_A16, DType.MXFP4])
def test_rows_that_a_product_loads_as_they_are(dtype: DType) -> None:
    """Quantised where its dtype says so, of any K: by the largest of each 128, or of a row."""
    x = torch.randn(5, 200, generator=torch.Generator().manual_seed(1)).bfloat16()
    read = values_on_load(x, dtype)
    assert (read.dtype, read.shape) == (torch.float32, x.shape)
    if not dtype.quantises_x:
        assert torch.equal(read, x.float())
        return
    for part in x.float().split(128 if dtype is DType.FP8_BLOCK else 200, 1):
        factor = part.abs().amax(1, keepdim=True) / 448
        here = read[:, : part.shape[1]]
        assert torch.equal(here, (part / factor).to(torch.float8_e4m3fn).float() * factor)
        read = read[:, part.shape[1] :]
