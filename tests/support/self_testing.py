"""Self-tests on the emulated GPU: kernels whose results a test spoils, and which ones were tested."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from emulated_driver import EmulatedGpu, Launch
from rowops_in_numpy import at

from pretuned.artifacts.records import Op, RowOp
from pretuned.kernels.rowops import MAKES_CODES

_RESULTS = {
    RowOp.ACTIVATION: "a",
    RowOp.PLACE_ROWS: "index",
    RowOp.SORT_SLOTS: "experts",
    RowOp.CLEAR: "y",
    RowOp.ACTIVATION_GRAD: "dweights",
}
_RESULTS |= dict.fromkeys(MAKES_CODES, "codes")
_RESULTS |= {RowOp.QUANTIZE_COLUMNS: "column_codes", RowOp.ACTIVATION_GRAD_CODES: "dweights"}
_RESULTS |= {RowOp.QUANTIZE_BLOCKS: "across_words"}
_RESULTS |= {RowOp.QUANTIZE_WEIGHTS: "words", RowOp.MOVE_CODES: "words"}
_RESULTS |= {RowOp.DEQUANTIZE_WEIGHTS: "w", RowOp.LARGEST_WEIGHT: "most"}
Spoil = Callable[[int, dict[str, Any]], None]


def result_of(launch: Launch) -> int:
    """Where a launch stores its result."""
    if isinstance(launch.code.op, RowOp):
        return int(launch.words[_RESULTS.get(launch.code.op, "out")])
    name = "dw" if launch.code.op is Op.DW else "y"
    return launch.addresses()[name]


def spoil(gpu: EmulatedGpu, digest: bytes, how: Spoil) -> None:
    """Have this done after each launch of a cubin, with the address of the result and the launch's words."""
    gpu.after[digest] = lambda launch: how(result_of(launch), launch.words)


def one_bit(result: int, words: dict[str, Any]) -> None:
    """One bit of the result is another."""
    at(result, 3, ctypes.c_uint8)[2] ^= 16


def one_element(result: int, words: dict[str, Any]) -> None:
    """One element of the result is off by a half."""
    at(result, 3, ctypes.c_float)[2] += 0.5
