"""Codes of fp8 training by torch: rows quantised along M, the weight's gradient of them, weights both ways."""

from __future__ import annotations

import pytest
import torch

from pretuned.kernels import reference
from pretuned.runtime import ExpertWeights
from pretuned.runtime.ops import fp8_codes

COUNTS = [0, 1, 127, 128, 129, 300, 0, 5]


def sizes(*counts: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(counts, dtype=dtype)


def restored(codes: fp8_codes.ColumnCodes, m_sizes: torch.Tensor) -> torch.Tensor:
    """The rows [M, C] that the codes stand for, found without the module's own places; zeros of no expert."""
    of_column = codes.scale.T.repeat_interleave(len(codes.codes) // codes.scale.shape[1], 0)
    numbers = codes.codes.float() * of_column.repeat_interleave(128, 1)
    rows, first, row = torch.zeros(codes.M, len(numbers)), 0, 0
    for count in m_sizes.tolist():
        rows[row : row + count] = numbers[:, first : first + count].T
        first, row = first + -(-count // 128) * 128, row + count
    return rows


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_are_quantised_along_m(dtype: torch.dtype, blocks: bool) -> None:
    """With ``blocks`` a scale is of 128 columns."""
    torch.manual_seed(0)
    m_sizes = sizes(*COUNTS, dtype=dtype)
    M = sum(COUNTS) + 9  # nine rows of no expert
    t = torch.randn(M, 128).bfloat16() * 2.0 ** torch.randint(-9, 9, (M, 1))
    codes = fp8_codes.column_codes(t, m_sizes, blocks=blocks)
    P = codes.codes.shape[1]
    assert P % 128 == 0
    assert sum(-(-count // 128) * 128 for count in COUNTS) <= P
    assert codes.scale.shape == (P // 128, 1 if blocks else 128)
    rows = restored(codes, m_sizes)
    assert not rows[sum(COUNTS) :].any()
    wrong = (rows - t.float())[: sum(COUNTS)].abs()
    # A code differs by at most 1/16 of its size, or by half a step of the smallest, 2^-10 of a scale.
    parts = [part.float().abs() for part in groups_of(t)]
    largest = torch.cat([(part.amax() if blocks else part.amax(0)).expand_as(part) for part in parts])
    assert (wrong <= t[: sum(COUNTS)].float().abs() / 16 + largest / 448 * 2.0**-10).all()


def groups_of(t: torch.Tensor) -> list[torch.Tensor]:
    parts, row = [], 0
    for count in COUNTS:
        parts += t[row : row + count].split(128) if count else []
        row += count
    return list(parts)


def test_rows_that_an_index_picks() -> None:
    torch.manual_seed(0)
    t, m_sizes = torch.randn(40, 128).bfloat16(), sizes(30, 0, 50)
    index = torch.randperm(80)
    picked = fp8_codes.column_codes(t, m_sizes, index, 2)
    plain = fp8_codes.column_codes(t[index // 2], m_sizes)
    assert torch.equal(picked.codes.view(torch.uint8), plain.codes.view(torch.uint8))
    assert torch.equal(picked.scale, plain.scale)


def test_nan_stays_in_its_column_and_group() -> None:
    torch.manual_seed(0)
    t, m_sizes = torch.randn(300, 128).bfloat16(), sizes(100, 200)
    clean = fp8_codes.column_codes(t, m_sizes)
    t[130, 7], t[5, 9] = float("nan"), float("inf")
    codes = fp8_codes.column_codes(t, m_sizes)
    numbers, others = restored(codes, m_sizes), restored(clean, m_sizes)
    assert numbers[130, 7].isnan()
    assert numbers[:100, 9].isnan().any()  # of infinity the others of its group are no numbers
    numbers[130, 7], others[130, 7] = 0, 0
    numbers[:100, 9] = others[:100, 9] = 0
    assert torch.allclose(numbers, others)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_gradient_of_codes(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    m_sizes = sizes(*COUNTS)
    dy, x = torch.randn(sum(COUNTS), 256).bfloat16(), torch.randn(sum(COUNTS), 128).bfloat16()
    left, right = fp8_codes.column_codes(dy, m_sizes), fp8_codes.column_codes(x, m_sizes, blocks=True)
    exact = reference.grad_weight(restored(left, m_sizes), restored(right, m_sizes), m_sizes)
    dw = fp8_codes.dW_of_codes(left, right, m_sizes, dtype=dtype)
    assert dw.dtype is dtype
    assert (dw.float() - exact).norm() <= (2e-3 if dtype is torch.bfloat16 else 1e-6) * exact.norm()
    assert not dw[0].any()
    more = fp8_codes.dW_of_codes(left, right, m_sizes, out=dw.clone(), accumulate=True)
    assert (more.float() - 2 * exact).norm() <= 4e-3 * exact.norm()
    written = fp8_codes.dW_of_codes(left, right, m_sizes, out=torch.full_like(dw, 7.0))
    assert torch.equal(written, dw)


def test_a_scale_for_128_columns_loses_little_beside_outliers() -> None:
    """Of activations with a few columns a hundred times as large, like those of large models."""
    torch.manual_seed(0)
    m_sizes = sizes(512)
    dy, x = torch.randn(512, 128), torch.randn(512, 256)
    x[:, [3, 77, 200]] *= 100.0
    dy, x = dy.bfloat16(), x.bfloat16()
    exact = reference.grad_weight(dy.float(), x.float(), m_sizes)
    left, errors = fp8_codes.column_codes(dy, m_sizes), []
    for blocks in (False, True):
        dw = fp8_codes.dW_of_codes(
            left, fp8_codes.column_codes(x, m_sizes, blocks=blocks), m_sizes, dtype=torch.float32
        )
        errors.append((dw - exact).norm(dim=1) / exact.norm(dim=1))  # of each column of dw
    assert errors[1].max() < 0.05
    assert errors[1].mean() < 1.05 * errors[0].mean()


def test_weights_both_ways() -> None:
    torch.manual_seed(0)
    w = torch.randn(2, 256, 128).bfloat16()
    w8, transposed = fp8_codes.quantise_weights(w)
    assert w8 is not None
    assert transposed is not None
    own = ExpertWeights.quantize(w, "fp8_block").prepare()
    assert torch.equal(w8.codes, own.codes)
    assert torch.equal(w8.scale, own.scale)
    assert torch.equal(transposed.dequantize(), w8.dequantize().transpose(1, 2))
    assert fp8_codes.quantise_weights(w, columns=False)[1] is None


@pytest.mark.parametrize("number", [float("nan"), float("inf"), float("-inf")])
def test_a_block_that_is_not_finite_has_no_scale(number: float) -> None:
    w = torch.randn(1, 256, 256).bfloat16()
    w[0, 130, 7] = number
    w8, transposed = fp8_codes.quantise_weights(w)
    assert w8 is not None
    assert transposed is not None
    assert w8.scale.isnan().tolist() == [[[False, False], [True, False]]]
    assert transposed.scale.isnan().tolist() == [[[False, True], [False, False]]]
