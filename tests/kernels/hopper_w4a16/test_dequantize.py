"""The instructions that make bf16 of codes and scales at once, carried out on words as the order has them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from pretuned.aot.measure.inputs import quantised_weights
from pretuned.artifacts.records import DType
from pretuned.kernels.codes import CODES
from tests.support.ptx import carried_out, numbers, rounded

dequantize = pytest.importorskip("pretuned.kernels.hopper_w4a16.dequantize")


def test_bf16_is_rounded_as_torch_does() -> None:
    values = torch.randn(4096, dtype=torch.float32, generator=torch.Generator().manual_seed(0)) * 2.0 ** torch.arange(
        -133, 123
    ).repeat(16)
    assert (numbers(rounded(values.double().numpy())) == values.bfloat16().double().numpy()).all()


@pytest.mark.parametrize("groups", [1, 2])
def test_every_code_times_every_scale_is_rounded_once(groups: int) -> None:
    low, high = (np.float32(2.0**at).view(np.uint32) >> 16 for at in (-110, 11))
    scales = np.concatenate([sign | np.arange(low, high, dtype=np.uint32) for sign in (0, 0x8000)] + [[0]]).astype(
        np.uint32
    )
    text, less = dequantize.int4_text(groups), 1 / dequantize.smaller_by.fn(f"int4_g{64 // groups}", False)
    for code in range(16):  # at every place of one word, and others in the other
        word, other = np.uint32(0x11111111 * code), np.uint32(0x11111111 * (15 - code))
        for first, second in ((word, other), (other, word)):
            # The other group's scale is another one.
            pair = scales | (np.roll(scales, 1) << np.uint32(16)) if groups == 2 else scales
            registers = carried_out(text, {"$8": first, "$9": second, "$10": pair})
            for at in range(2):
                mine = np.roll(scales, 1) if groups == 2 and at else scales
                number = code if (first, second)[at] == word else 15 - code
                # (code - 8) x scale in bf16, and that times 2^-16, which loses no bits.
                wanted = rounded(numbers(rounded((number - 8) * numbers(mine))) * less)
                for i in range(4):
                    assert (registers[4 * at + i] & 0xFFFF == wanted).all()
                    assert (registers[4 * at + i] >> 16 == wanted).all()


def prepared(name: str) -> tuple[dict[str, np.ndarray], torch.Tensor]:
    """A thread's words and scales for each row, block of K and c, and the matrix [64, K]."""
    weights = quantised_weights(1, 64, 256, DType(name), "cpu", prepared=False)
    scale = weights.scale
    if name == "nvfp4":  # every scale that is a number and not negative
        scale.view(torch.uint8).copy_(torch.arange(scale.numel()).reshape(scale.shape).remainder(127))
    dense = weights.dequantize(torch.float64)[0]
    if name == "nvfp4":
        assert weights.outer_scale is not None
        dense = dense / weights.outer_scale.double()[0]
    weights = weights.prepare()
    words = weights.codes.view(torch.int32).numpy().view(np.uint32).reshape(4, 64, 4, 2)
    raw = (
        weights.kernel_scale.view(torch.uint8)
        .numpy()
        .reshape(-1, 64, weights.kernel_scale.element_size() * max(1, 64 // DType(name).precision.w.scale.columns))
    )
    rows = np.zeros((len(raw), 64, 4), dtype=np.uint8)
    rows[..., : raw.shape[2]] = raw
    of_rows = np.repeat(rows.view(np.uint32).reshape(-1, 64), 4 // len(raw), axis=0)
    return {"$8": words[..., 0], "$9": words[..., 1], "$10": np.repeat(of_rows[..., None], 4, axis=2)}, dense


@pytest.mark.parametrize("name", ["int4_g32", "int4_g64", "int4_g128", "nvfp4"])
def test_prepared_weights_become_their_values(name: str) -> None:
    words, dense = prepared(name)
    text = dequantize.nvfp4_text() if name == "nvfp4" else dequantize.int4_text(CODES[name].groups)
    registers = carried_out(text, words)
    values = np.empty((64, 256))
    for j, word in enumerate(registers):
        for p in range(2):
            numbers_of = numbers((word >> np.uint32(16 * p)) & 0xFFFF)  # [block, row, c]
            s, h = 2 * (j // 4) + j % 4 // 2, j % 2
            for block in range(4):
                for c in range(4):
                    values[:, 64 * block + 16 * s + 8 * h + 2 * c + p] = numbers_of[block, :, c]
    by = dequantize.smaller_by.fn(name, False)
    wanted = numbers(rounded(dense.numpy()))
    assert (values * by == wanted).all()


def test_what_sums_are_multiplied_by() -> None:
    """Of formats whose scales are apart, and of dX, nothing is made too small."""
    results = {name: dequantize.smaller_by.fn(name, False) for name in CODES}
    small = {name: by for name, by in results.items() if by != 1.0}
    assert small == {"int4_g32": 65536.0, "int4_g64": 65536.0, "int4_g128": 65536.0, "nvfp4": 1024.0}
    assert {dequantize.smaller_by.fn(name, True) for name in CODES} == {1.0}
