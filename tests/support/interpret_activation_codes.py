"""Runs activation_codes.py and activation_row_codes.py of kernels/rowops under Triton's interpreter.

Cases are JSON on stdin, what is wrong on stdout. Codes and scales are held, bit for bit, against those of the two
passes that it does in one, under the interpreter too, and what they stand for against torch.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import quick_interpreter  # noqa: F401
import torch

from pretuned.kernels.activations import Activation
from pretuned.kernels.hopper_w8a8_block import scale_columns
from pretuned.kernels.rowops import USED
from pretuned.kernels.rowops.activation import activation
from pretuned.kernels.rowops.activation_codes import activation_codes
from pretuned.kernels.rowops.activation_row_codes import activation_row_codes
from pretuned.kernels.rowops.quantize import quantize
from pretuned.kernels.rowops.quantize_rows import quantize_rows
from pretuned.runtime.ops.activation import RowActivation, by_torch
from pretuned.runtime.weights.row_codes import values_of_rows

BESIDE = 0.13  # two codes that lie side by side differ by an eighth
LEFT = 0.02  # of all: the interpreter rounds what lies just below a power of two to half of it


def wrong(case: dict[str, Any]) -> list[str]:
    M, columns, used, by_row = case["M"], case["columns"], case["used"], case.get("by_row", False)
    group = columns if by_row else 128
    function = Activation(case["act"], **case["numbers"])
    act, words = RowActivation(function, case["gated"], case["interleaved"]), function.words.values()
    g = torch.Generator().manual_seed(case["seed"])
    h = (4 * torch.randn(M, (1 + act.gated) * columns, generator=g)).half()
    end = M if used is None else min(used, M)
    h[0, : group * (1 + act.interleaved)] = 0.0  # a group of zeros
    if M > 2:
        h[1, 3], h[2, 5] = float("nan"), float("inf")
    h[end:] = float("nan")
    flags, count = act.flags | (0 if used is None else USED), torch.tensor([used or 0], dtype=torch.int32)

    def fresh() -> tuple[torch.Tensor, torch.Tensor]:
        shape = (1, M + 1) if by_row else (columns // 128, scale_columns(M))
        return torch.full((M + 1, columns), 7, dtype=torch.uint8), torch.full(shape, -1.0)

    (codes, scale), (codes_of_two, scale_of_two) = fresh(), fresh()
    block, rows = case["block"], case["rows"]
    grid = (-(-M // rows) * -(-columns // block),)
    both, second = (activation_row_codes, quantize_rows) if by_row else (activation_codes, quantize)
    programs = (M if columns > block else -(-M // rows)) if by_row else grid[0]
    both[(min(programs, case.get("programs", programs)),)](
        h, count, codes, scale, M, columns, flags, *words, BLOCK=block, ROWS=rows
    )
    a = torch.full((M, columns), 3.0, dtype=h.dtype)
    activation[grid](h, a, count, M, columns, flags, *words, BLOCK=block, ROWS=rows)
    second[(M,)](a, count, count, codes_of_two, scale_of_two, M, columns, 1, 1, flags & USED, BLOCK=1024)
    wrong = []
    if not torch.equal(codes, codes_of_two):
        wrong.append("codes are not those of the two passes")
    if not torch.equal(scale.view(torch.int32), scale_of_two.view(torch.int32)):
        wrong.append("scales are not those of the two passes")
    if (codes[end:] != 7).any() or (scale[:, end:] != -1.0).any():
        wrong.append("others were written")
    if not end:
        return wrong
    here = torch.ones(end, dtype=torch.bool)
    here[1:3] = False  # what is not finite
    want = by_torch(h[:end].double(), act).float()[here]
    most = want.view(len(want), -1, group).abs().amax(2) / 448
    if not torch.allclose(scale[:, :end].T[here], torch.where(most > 0, most, 1.0), rtol=2e-3):
        wrong.append("scales are not torch's")
    got = values_of_rows(codes.view(torch.float8_e4m3fn), scale[0] if by_row else scale, slice(0, end))[here]
    off = (got - want).abs() > BESIDE * (want.abs() + want.square().mean(-1, keepdim=True).sqrt())
    if off.float().mean() > LEFT:
        wrong.append("codes stand for other values")
    return wrong


json.dump([wrong(case) for case in json.load(sys.stdin)], sys.stdout)
