"""Reductions and scans with a function of ours, by Triton's own way and by quick_interpreter's: prints both as JSON."""

from __future__ import annotations

import json
import sys

import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

OWN = interpreter.ReduceOps.generic_reduce, interpreter.ScanOps.generic_scan


@triton.jit
def later(a, a_sum, b, b_sum):  # type: ignore[no-untyped-def]
    """The last that is not zero, and the sum: associative, and not the same the other way round."""
    return tl.where(b != 0, b, a), a_sum + b_sum


@triton.jit
def kernel(x, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr, AXIS: tl.constexpr, REVERSE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    loaded = tl.load(x + at)
    last, total = tl.associative_scan((loaded, loaded), AXIS, later, reverse=REVERSE)
    tl.store(out + at, last)
    tl.store(out + ROWS * COLUMNS + at, total)
    last, total = tl.reduce((loaded, loaded), AXIS, later, keep_dims=True)
    tl.store(out + 2 * ROWS * COLUMNS + at, tl.broadcast_to(last, (ROWS, COLUMNS)))
    tl.store(out + 3 * ROWS * COLUMNS + at, tl.broadcast_to(total, (ROWS, COLUMNS)))


@triton.jit
def whole(x, out, ROWS: tl.constexpr, COLUMNS: tl.constexpr, AXIS: tl.constexpr, REVERSE: tl.constexpr):  # type: ignore[no-untyped-def]
    loaded = tl.load(x + tl.arange(0, ROWS * COLUMNS))
    last, total = tl.reduce((loaded, loaded), AXIS, later)
    tl.store(out, last)
    tl.store(out + 1, total)


def results() -> list[list[int]]:
    x = torch.randint(-2, 3, (8, 4), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    wrong = []
    for function, axis, reverse in (
        (kernel, 0, False),
        (kernel, 1, False),
        (kernel, 0, True),
        (whole, 0, False),
    ):
        out = torch.zeros(4 * x.numel(), dtype=torch.int32)
        function[(1,)](x, out, 8, 4, axis, reverse)
        wrong.append(out.tolist())
    return wrong


own = results()
import quick_interpreter  # noqa: E402

quick = results()
used = interpreter.ReduceOps.generic_reduce, interpreter.ScanOps.generic_scan
ours = quick_interpreter.generic_reduce, quick_interpreter.generic_scan
json.dump({"quick": quick, "own": own, "ours": used == ours and not {*ours} & {*OWN}}, sys.stdout)
