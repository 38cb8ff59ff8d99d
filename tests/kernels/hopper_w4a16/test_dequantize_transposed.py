"""The instructions that turn codes round for dX, carried out on words as the order has them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from pretuned.kernels.codes import CODES
from tests.support.ptx import carried_out, numbers, rounded

turned = pytest.importorskip("pretuned.kernels.hopper_w4a16.dequantize_transposed")
dequantize = pytest.importorskip("pretuned.kernels.hopper_w4a16.dequantize")

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def half_of(codes: list[int], kind: str) -> int:
    """16 bits of four codes, as runtime/weights/prepared_layout.py lays them."""
    if kind == "int4":
        return sum(code << 4 * i for i, code in enumerate(codes))
    a, b, c, d = codes
    bits = (a & 8) << 12 | (a & 7) << 6 | (b & 8) << 9 | (b & 7) << 3 | (c & 8) << 6 | c & 7
    return bits | (d & 8) << 11 | (d & 4) << 11 | (d & 3) << 10


def value_of(code: int, kind: str) -> float:
    """The number of a code, without its scale."""
    return float(code - 8) if kind == "int4" else (-1) ** (code >> 3) * E2M1[code & 7]


def bf16(value: float) -> int:
    return int(np.float32(value).view(np.uint32)) >> 16


@pytest.mark.parametrize("name", ["int4_g32", "int4_g64", "int4_g128", "mxfp4", "nvfp4"])
def test_two_rows_of_a_column_are_their_codes_times_their_scales(name: str) -> None:
    """$0 and $1 are the columns of h = 0 and 1: the first word's row in the low half, the other in the high one."""
    layout, text = CODES[name], turned._turned_asm.fn(name)
    random = np.random.default_rng(0)
    kinds = 4 if name == "nvfp4" else 2 if layout.groups == 2 else 1
    for p, s, which in itertools.product(range(2), range(2), range(kinds)):
        for _ in range(24):
            codes = random.integers(0, 16, (2, 2, 4))  # row, p, (s, h)
            words = [
                sum(half_of([*map(int, codes[row, i])], layout.codes) << 16 * i for i in range(2)) for row in (0, 1)
            ]
            if name == "mxfp4":
                raw = random.integers(100, 129, (2, 2))  # row, group
                scales, held = 2.0 ** (raw - 127.0), (sum(int(b) << 8 * i for i, b in enumerate(raw.ravel())), 0)
            elif name == "nvfp4":
                raw = random.integers(8, 127, (2, 4))
                scales = (8 + raw % 8) * 2.0 ** (raw // 8 - 10.0)
                held = tuple(sum(int(b) << 8 * i for i, b in enumerate(row)) for row in raw)
            else:
                scales = random.integers(128, 256, (2, kinds)) * 2.0 ** random.integers(-12, 3, (2, kinds))
                halves = [[bf16(scale) for scale in row] for row in scales]
                held = (
                    tuple(row[0] | row[1] << 16 for row in halves)
                    if kinds == 2
                    else (halves[0][0] | halves[1][0] << 16, 0)
                )
            inputs = {"$2": words[0], "$3": words[1], "$4": p, "$6": s, "$8": held[0], "$9": held[1], "$10": which}
            registers = carried_out(text, {key: np.asarray([word], dtype=np.uint32) for key, word in inputs.items()}, 2)
            for h, register in enumerate(registers):
                for row in range(2):
                    wanted = value_of(int(codes[row, p, 2 * s + h]), layout.codes) * scales[row, which]
                    half = register >> np.uint32(16 * row) & 0xFFFF
                    assert numbers(half)[0] == numbers(rounded(np.asarray([wanted])))[0], (name, p, s, which, row, h)


def test_a_scale_of_a_block_is_rounded_once() -> None:
    """fp8 blocks: code x (scale in bf16) + code x (what bf16 leaves of it)."""
    text = turned._turned_asm.fn("fp8_block_a16")
    first, rest = 1.0078125, 2.0**-9 * 1.015625
    code = 0x3B  # 1.375 of e4m3
    words = {
        "$2": code << 8 | 0x38,
        "$3": code << 8 | 0x38,
        "$4": 0,
        "$6": 0,
        "$8": bf16(first) * 0x10001,
        "$9": 0,
        "$10": bf16(rest) * 0x10001,
    }
    high, low = carried_out(text, {key: np.asarray([word], dtype=np.uint32) for key, word in words.items()}, 2)
    for register, value in ((high, 1.375), (low, 1.0)):
        once = numbers(
            rounded(
                np.asarray([value * 2.0**-120 * first + numbers(rounded(np.asarray([value * 2.0**-120 * rest])))[0]])
            )
        )
        assert numbers(register & 0xFFFF)[0] == once[0]
