"""The instructions that make bf16 of int4 codes, scales and zero points, carried out on words as the order has them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from pretuned.kernels.codes import CODES
from pretuned.runtime import ExpertWeights
from tests.support.ptx import carried_out, numbers, rounded

zeroed = pytest.importorskip("pretuned.kernels.hopper_w4a16.dequantize_zero")

FORMATS = ("int4_g32", "int4_g64", "int4_g128")  # of codes and scales: what the kernel is told
DOWN = 2.0**-7


def less_8(zero: np.ndarray | int) -> np.ndarray:
    """The byte of a zero point beside prepared codes."""
    return ((np.asarray(zero) - 8) & 0xFF).astype(np.uint32)


def bf16(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32).view(np.uint32) >> 16


@pytest.mark.slow  # all codes, zero points and scales
@pytest.mark.parametrize("groups", [1, 2])
def test_every_code_less_every_zero_point_times_every_scale_is_rounded_once(groups: int) -> None:
    """Each word has one code in every place; the other group has another scale and another zero point."""
    low, high = (np.float32(2.0**at).view(np.uint32) >> 16 for at in (-110, 10))
    scales = np.concatenate([sign | np.arange(low, high, dtype=np.uint32) for sign in (0, 0x8000)] + [[0]]).astype(
        np.uint32
    )
    text, other_scales = zeroed.zeroed_text(groups), np.roll(scales, 1)
    pair = scales | (other_scales << np.uint32(16)) if groups == 2 else scales
    for code, zero in itertools.product(range(16), range(16)):
        codes, zeros = (code, 15 - code), (zero, (zero + 5) % 16 if groups == 2 else zero)
        held = less_8(zeros[0]) | less_8(zeros[1]) << np.uint32(8) if groups == 2 else less_8(zero)
        held = held | np.uint32(0xFFFFFF00 if groups == 1 and zero < 8 else 0)  # a byte is widened with its sign
        words = [np.uint32(0x11111111 * code) for code in codes]
        registers = carried_out(text, {"$8": words[0], "$9": words[1], "$10": pair, "$12": held})
        for at in range(2):
            mine = other_scales if groups == 2 and at else scales
            value = codes[at] - zeros[at if groups == 2 else 0]
            wanted = rounded(numbers(rounded(value * numbers(mine))) * DOWN)
            for i in range(4):
                assert (registers[4 * at + i] & 0xFFFF == wanted).all(), (code, zero, at, i)
                assert (registers[4 * at + i] >> 16 == wanted).all(), (code, zero, at, i)


def weights(format: str, N: int, K: int) -> ExpertWeights:
    """Every zero point from 0 to 15, another in each neighbouring group and row, and random codes and scales."""
    group, g = int(format.rpartition("g")[2]), torch.Generator().manual_seed(N + K)
    codes = torch.randint(0, 256, (1, N, K // 2), dtype=torch.uint8, generator=g)
    zero = (torch.arange(N)[:, None] * 3 + torch.arange(K // group)[None] * 5 & 15).to(torch.uint8)[None]
    scale = (torch.rand(1, N, K // group, generator=g) + 0.01).bfloat16()
    return ExpertWeights.int4(codes, scale, zero)


def rows_of_bytes(tensor: torch.Tensor) -> np.ndarray:
    """Blocks of scales or zero points of one expert, seen as [blocks of rows, blocks of K, 64, bytes of a row]."""
    return tensor[0].view(torch.uint8).numpy().reshape(*tensor.shape[1:4], -1)


def word_of(row: np.ndarray) -> np.ndarray:
    """Up to four bytes as one word."""
    wide = np.zeros((*row.shape[:-1], 4), dtype=np.uint8)
    wide[..., : row.shape[-1]] = row
    return wide.view(np.uint32)[..., 0]


@pytest.mark.parametrize("format", FORMATS)
def test_prepared_weights_become_their_values(format: str) -> None:
    N, K = 128, 384
    w = weights(format, N, K)
    dense = w.dequantize(torch.float64)[0].numpy()
    w = w.prepare()
    assert w.is_prepared
    assert w.zero is not None
    words = w.codes[0].numpy().view(np.uint32)  # [N/64, K/64, 64, 4, 2]
    scales, zeros = (word_of(rows_of_bytes(value)) for value in (w.scale, w.zero))
    each = CODES[format].blocks_per_scale
    scales, zeros = (np.repeat(value, each, axis=1)[..., None] for value in (scales, zeros))
    text = zeroed._text.fn(format, False).value
    registers = carried_out(text, {"$8": words[..., 0], "$9": words[..., 1], "$10": scales, "$12": zeros})
    values = np.full((N, K), np.nan)
    for (j, register), p in itertools.product(enumerate(registers), range(2)):
        s, h = 2 * (j // 4) + j % 4 // 2, j % 2
        decoded = numbers(register >> np.uint32(16 * p) & 0xFFFF)  # [N/64, K/64, 64, 4]
        for c in range(4):
            values[:, 16 * s + 8 * h + 2 * c + p :: 64] = decoded[..., c].transpose(0, 2, 1).reshape(N, -1)
    assert (values / DOWN == numbers(rounded(dense))).all()


@pytest.mark.parametrize("format", FORMATS)
def test_prepared_weights_turned_round_become_their_values(format: str) -> None:
    """dX: two rows of one column of w are a register, of every block, p, half of a word and word."""
    N, K = 128, 384
    w = weights(format, N, K)
    dense = w.dequantize(torch.float64)[0].numpy()
    w = w.prepare()
    assert w.zero is not None
    words = w.codes[0].numpy().view(np.uint32)  # [N/64, K/64, 64, 4, 2]
    two, each = CODES[format].groups == 2, CODES[format].blocks_per_scale
    scales, zeros = (rows_of_bytes(value) for value in (w.scale, w.zero))
    scales, zeros = (np.repeat(value, each, axis=1) for value in (scales, zeros))
    first, second = slice(0, None, 2), slice(1, None, 2)
    zero_pair = word_of(np.concatenate([zeros[:, :, first], zeros[:, :, second]], axis=-1))[..., None]
    by_row = word_of(scales)[..., None]  # one scale, or those of two groups
    by = (by_row[:, :, first] | (by_row[:, :, second] << np.uint32(16) if not two else np.uint32(0)), None)
    held = (by_row[:, :, first], by_row[:, :, second]) if two else (by[0], by[0])
    text = zeroed._text.fn(format, True).value
    values = np.full((N, K), np.nan)
    for p, s, word in itertools.product(range(2), range(2), range(2)):
        inputs = {
            "$2": words[:, :, first, :, word],
            "$3": words[:, :, second, :, word],
            "$4": np.uint32(p),
            "$6": np.uint32(s),
            "$8": held[0],
            "$9": held[1],
            "$10": np.uint32(word),
            "$12": zero_pair,
        }
        for h, register in enumerate(carried_out(text, inputs, 2)):
            for row in range(2):
                decoded = numbers(register >> np.uint32(16 * row) & 0xFFFF)  # [N/64, K/64, 32, 4]
                for c in range(4):
                    column = 16 * (2 * word + s) + 8 * h + 2 * c + p
                    values[row::2, column::64] = decoded[..., c].transpose(0, 2, 1).reshape(N // 2, -1)
    assert (values / DOWN == numbers(rounded(dense))).all()


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("turned", [False, True])
def test_a_scale_that_is_no_number_makes_all_of_its_group_none(turned: bool, groups: int) -> None:
    """And the other group's values stay numbers. (Weights of a checkpoint with such a scale are refused.)"""
    nan, unit = 0x7FC0, 0x3F80
    text = (zeroed.zeroed_turned_text if turned else zeroed.zeroed_text)(groups)
    if turned:
        inputs = {
            "$2": 0x01234567,
            "$3": 0x89ABCDEF,
            "$4": 0,
            "$6": 0,
            "$10": 0,
            "$12": 0,
            "$8": nan | unit << 16,
            "$9": unit * 0x10001,
        }
    else:
        inputs = {"$8": 0x01234567, "$9": 0x89ABCDEF, "$10": nan | unit << 16, "$12": 0}
    count = 2 if turned else 8
    words = {name: np.asarray([word], dtype=np.uint32) for name, word in inputs.items()}
    with np.errstate(invalid="ignore"):
        registers = carried_out(text, words, count)
    for i, register in enumerate(registers):
        low, high = (np.isnan(numbers(register >> np.uint32(16 * half) & 0xFFFF))[0] for half in range(2))
        if turned:  # the first row's scale is none
            assert (low, high) == (True, False)
        else:
            assert low == high == (groups == 1 or i < 4)


@pytest.mark.parametrize("format", FORMATS)
def test_bytes_and_places_of_a_block_s_zero_points(format: str) -> None:
    """A byte for each scale; TMA writes to multiples of 128 bytes, and moves multiples of 16."""
    layout = CODES[format]
    size = zeroed.zero_bytes_of.fn(format)
    assert size == 64 * layout.groups
    for blocks in (2, 4, 8, 16) if layout.blocks_per_scale == 2 else (1, 2, 4, 8, 16):
        places = zeroed.zero_places_of.fn(format, blocks)
        assert places >= blocks // layout.blocks_per_scale
        assert places * size % 128 == 0
