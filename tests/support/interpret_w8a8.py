"""Runs kernels/portable_w8a8/rows.py under Triton's interpreter: cases as JSON on stdin, what is wrong on stdout.

The interpreter's own e4m3 has neither NaN nor the nearest code: torch's stands in for it.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from typing import Any

import numpy
import torch
import triton.language as tl
from interpret_coded import DTYPES, Operands, weights, wrong
from triton.runtime import interpreter

from pretuned.artifacts.records import DType, Fusion, Layout, Op
from pretuned.kernels.portable_w8a8.rows import w8a8
from pretuned.kernels.spec import Config, Schedule, Spec

MOST = {"fp32": 1e-6, "bf16": 6e-3}  # (the interpreter cuts bf16 off)
GROUP = 128
converted = interpreter._convert_float


def as_the_hardware_does(data: Any, source: Any, to: Any, rounding: Any) -> Any:
    """To e4m3, past its largest that, and from it: NaN stays NaN."""
    if to is tl.float8e4nv:
        wide = torch.from_numpy(numpy.ascontiguousarray(data)).float().clamp(-448, 448)
        return wide.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    if source is tl.float8e4nv:
        codes = torch.from_numpy(numpy.ascontiguousarray(data)).view(torch.uint8).view(torch.float8_e4m3fn)
        return codes.to(torch.float16 if to is tl.float16 else torch.float32).numpy()
    return converted(data, source, to, rounding)


interpreter._convert_float = as_the_hardware_does


def drawn(case: dict[str, Any], count: int) -> torch.Tensor:
    """x [count, K] of very different sizes, groups of zeros among them; with ``ends`` as small and large as can be."""
    K = case["K"]
    groups = -(-K // GROUP)
    powers = torch.tensor([-140, -100, 100] if case["ends"] else [-9, -1, 0, 1])
    scale = 2.0 ** powers[torch.randint(0, len(powers), (count, groups, 1))]
    values = torch.randn(count, groups, GROUP) * scale
    values[0, -1] = 0.0
    return values.view(count, -1)[:, :K].contiguous().to(DTYPES[case["dtype"]])


def quantised(x: torch.Tensor, *, blocks: bool) -> torch.Tensor:
    """x as the kernel is to read it, in float64: e4m3 codes times their scale, one for each 128 of K or each row."""
    M, K = x.shape
    parts = torch.nn.functional.pad(x.float(), (0, -K % GROUP)).view(M, -1, GROUP) if blocks else x.float()[:, None]
    factor = parts.abs().amax(2) * torch.tensor(1 / 448)
    factor = torch.where(factor > 0, factor.clamp(min=2.0**-126), 1.0)[..., None]
    codes = (parts * (1 / factor)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return (codes.double() * factor.double()).view(M, -1)[:, :K]


def run(case: dict[str, Any]) -> list[str]:
    torch.manual_seed(case["seed"])
    w = weights(case)
    if case["bad_code"]:  # NaN in one row of one expert's w
        w.codes.view(torch.uint8)[1, 3, 5] = 0x7F
    on = Operands(
        {"w": w.codes.view(torch.uint8), "w_scale": w.scale},
        partial(drawn, case),
        partial(quantised, blocks=case["format"] == "fp8_block"),
        list(w.dequantize(torch.float32).double()),
    )
    config = Config(*case["block"], 4, 2, case["group_m"], schedule=Schedule.TILE)
    spec = Spec(Op.FORWARD, DType(case["format"]), config, Layout.STORED, Fusion(case["fusion"]), 1)
    return wrong(case, w8a8, spec, 89, on, MOST[case["dtype"]])


if __name__ == "__main__":
    json.dump([run(case) for case in json.load(sys.stdin)], sys.stdout)
