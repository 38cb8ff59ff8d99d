"""The instructions that make bf16 of mxfp8's codes and scales, carried out on words as the order has them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from pretuned.kernels.hopper_w4a16 import code_layout
from pretuned.runtime import ExpertWeights
from tests.support.ptx import carried_out, numbers, rounded

mx8 = pytest.importorskip("pretuned.kernels.hopper_w4a16.dequantize_mx8")

N, K = 128, 192
MOST = 134  # the largest scale that is prepared


def weights() -> ExpertWeights:
    """Every code and every scale from 0 on, another in each neighbouring group and row."""
    row, group = torch.arange(N)[:, None], torch.arange(K // 32)[None]
    scale = ((row * 7 + group * 5) % (MOST + 1)).to(torch.uint8)
    code = (torch.arange(N)[:, None] * 37 + torch.arange(K)[None] * 3) % 254
    code += (code >= 127).long()  # 127 and 255 are no numbers
    return ExpertWeights.mxfp8(code.to(torch.uint8).view(torch.float8_e4m3fn)[None], scale[None])


def prepared() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return w, and the words and scales [N/64, K/64, 64, ...] of its blocks, each row's words as c = 0 ... 3."""
    w = weights()
    assert (len(w.codes.view(torch.uint8).unique()), len(w.scale.unique())) == (254, MOST + 1)
    dense = w.dequantize(torch.float64)[0].numpy()
    w = w.prepare()
    assert w.is_prepared
    words = w.codes[0].numpy().view(np.uint32)  # [N/64, K/64, 64, 4, 4]
    rows, places = np.arange(64)[:, None], np.arange(4)[None]
    return dense, words[:, :, rows, places ^ rows // 2 % 4], w.scale[0].numpy()


def test_prepared_weights_become_their_values() -> None:
    dense, words, scales = prepared()
    pair = scales.copy().view(np.uint16)[..., 0].astype(np.uint32)[..., None]
    signed = pair | np.where(pair & 0x8000, 0xFFFF0000, 0).astype(np.uint32)  # two bytes are widened with their sign
    registers = carried_out(mx8.mx8_text(), {f"${8 + word}": words[..., word] for word in range(4)} | {"$12": signed})
    values = np.full((N, K), np.nan)
    for (j, register), p in itertools.product(enumerate(registers), range(2)):
        result, upper = j >> 1, j & 1  # of one word two results, of the words 0 and 1 and of 2 and 3
        s, h = 2 * upper + (result >> 1), result & 1
        decoded = numbers(register >> np.uint32(16 * p) & 0xFFFF)  # [N/64, K/64, 64, 4]
        for c in range(4):
            values[:, 16 * s + 8 * h + 2 * c + p :: 64] = decoded[..., c].transpose(0, 2, 1).reshape(N, -1)
    assert (values == numbers(rounded(dense))).all()


def test_prepared_weights_turned_round_become_their_values() -> None:
    """dX: two rows of one column of w are a register, of every block, p and word."""
    dense, words, scales = prepared()
    first, second = slice(0, None, 2), slice(1, None, 2)
    by = np.concatenate([scales[:, :, first], scales[:, :, second]], axis=-1).copy().view(np.uint32)
    values = np.full((N, K), np.nan)
    for p, word in itertools.product(range(2), range(4)):
        halves = np.uint32(mx8._HALVES.value + p * mx8._HALF.value)
        inputs = {
            "$2": words[:, :, first, :, word],
            "$3": words[:, :, second, :, word],
            "$4": halves,
            "$6": by,
            "$8": np.uint32(mx8._SCALES.value + word // 2 * mx8._SCALE.value),
        }
        for h, register in enumerate(carried_out(mx8.mx8_turned_text(), inputs, 2)):
            for row in range(2):
                decoded = numbers(register >> np.uint32(16 * row) & 0xFFFF)  # [N/64, K/64, 32, 4]
                for c in range(4):
                    column = 16 * word + 8 * h + 2 * c + p
                    values[row::2, column::64] = decoded[..., c].transpose(0, 2, 1).reshape(N // 2, -1)
    assert (values == numbers(rounded(dense))).all()


def test_a_scale_that_is_no_number_leaves_the_other_group_s_values() -> None:
    """Weights with such a scale are refused; one that was written later makes no NaN, which a reduction would keep."""
    for scales in (255 | 127 << 8, 127 | 255 << 8):
        words = {f"${8 + i}": np.asarray([0x38383838], dtype=np.uint32) for i in range(4)}
        registers = carried_out(mx8.mx8_text(), words | {"$12": np.asarray([scales], dtype=np.uint32)})
        values = [float(numbers(register & 0xFFFF)[0]) for register in registers]
        assert all(np.isfinite(values))
        assert values.count(1.0) == 4


def test_blocks_are_those_of_the_entry() -> None:
    layout = code_layout(weights().kernel_dtypes[0])
    assert (layout.words, layout.scale_bytes) == (mx8.WORDS.value, mx8.SCALE_BYTES.value)
    assert [layout.places(blocks) for blocks in (1, 2, 8)] == [1, 2, 8]
