"""Runs kernels/rowops/quantize.py, quantize_rows.py and order_codes.py under Triton's interpreter.

Cases are JSON on stdin, what is wrong on stdout. What order_codes.py makes of the codes and scales that stand for x is
compared, byte for byte, with what the others make of x.
Every x is a scale times codes that e4m3 has, the largest of them among each 128, or each row: the interpreter's own
rounding to e4m3 is wrong between two codes.
"""

from __future__ import annotations

import json
import sys

import quick_interpreter  # noqa: F401
import torch

from pretuned.kernels.rowops import ANY_ROWS, PICKED, USED
from pretuned.kernels.rowops.order_codes import order_codes
from pretuned.kernels.rowops.quantize import quantize
from pretuned.kernels.rowops.quantize_rows import quantize_rows
from pretuned.runtime.weights.prepared_layout import K_ORDER


def wrong(
    M: int,
    columns: int,
    block: int,
    top_k: int,
    used: int | None,
    wide: bool,
    seed: int,
    by_row: bool = False,
    programs: int | None = None,
) -> list[str]:
    torch.manual_seed(seed)
    T, groups, width = max(1, M // max(1, top_k)), 1 if by_row else columns // 128, M if by_row else -(-M // 4) * 4
    rows = T if top_k else M
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = numbers[torch.isfinite(numbers)]
    values = numbers[torch.randint(0, len(numbers), (rows, groups, columns // groups))]
    values[:, :, 0] = 448.0
    scale = 2.0 ** torch.randint(-3, 4, (rows, groups)).float()
    values[0, 0] = 0.0  # all of a group
    scale[0, 0] = 1.0
    if rows > 1:  # a group whose own scale would have no inverse: 2^-126 is the least, and codes are the smaller for it
        scale[1, 0] = 2.0**-126
        values[1, 0] *= (values[1, 0].abs() >= 2.0) / 16
    x = (values * scale[..., None]).view(rows, columns)
    index = torch.randint(0, T * max(1, top_k), (M,), dtype=torch.int64 if wide else torch.int32)
    codes, scales = torch.full((M, columns), 7, dtype=torch.uint8), torch.full((groups, width), -1.0)
    count = torch.tensor([M if used is None else used], dtype=torch.int32)
    flags = (PICKED if top_k else 0) | (0 if used is None else USED)
    end, from_row = min(int(count), M), index // top_k if top_k else torch.arange(M)
    index[end:] = 2**31 - 1  # rows of no expert are not to be read
    if not top_k:
        x[end:] = float("nan")
    words = index.view(torch.int32)
    kernel = quantize_rows if by_row else quantize
    kernel[(min(M, programs or M),)](
        x, words, count, codes, scales, M, columns, max(1, top_k), 2 if wide else 1, flags, BLOCK=block
    )
    wrong = []
    if not torch.equal(scales[:, :end], scale[from_row[:end]].T):
        wrong.append("scales")
    bits = codes[:end].view(end, columns // 64, 64)
    natural = torch.empty_like(bits)
    natural[..., torch.tensor(K_ORDER)] = bits
    if not torch.equal(
        natural.view(torch.float8_e4m3fn).float().view(end, columns), values[from_row[:end]].view(end, columns)
    ):
        wrong.append("codes")
    raw_codes, factors = values.view(rows, columns).to(torch.float8_e4m3fn).view(torch.uint8), scale.clone()
    if not top_k:
        raw_codes[end:], factors[end:] = 0x7F, float("nan")
    halves = [factors[: rows // 2], factors[rows // 2 :]]  # of two experts, each with columns of its own
    apart = torch.cat([half.T.reshape(-1) for half in halves]) if rows % 2 == 0 else None
    for of_x, steps in (
        (factors, (groups, 1, 0, ANY_ROWS)),
        (factors.T.contiguous(), (1, rows, 0, ANY_ROWS)),
        (apart, (1, rows // 2, rows // 2 * groups, rows // 2)),
    ):
        if of_x is None:
            continue
        ordered, moved = torch.full_like(codes, 7), torch.full((groups, -(-M // 4) * 4), -1.0)
        numbers = groups, *steps, max(1, top_k), 2 if wide else 1, flags
        order_codes[(min(M, programs or M),)](
            raw_codes, of_x, words, count, ordered, moved, M, columns, *numbers, BLOCK=max(block, 64)
        )
        if not torch.equal(ordered, codes):
            wrong.append("codes that were ordered")
        if not torch.equal(moved[:, : scales.shape[1]], scales) or (moved[:, end:] != -1.0).any():
            wrong.append("scales that were moved")
    if (codes[end:] != 7).any() or (scales[:, end:] != -1.0).any():
        wrong.append("others")
    return wrong


json.dump([wrong(**case) for case in json.load(sys.stdin)], sys.stdout)
