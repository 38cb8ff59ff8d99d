"""Times grouped GEMMs in the other dtypes: fp16 next to bf16, tf32 and IEEE fp32 next to loops of torch matmuls.

    PRETUNED_STRICT=1 PRETUNED_BUNDLES=dtypes-sm90.msgpack:catalogue-sm90.msgpack \\
        python benchmarks/run.py dtypes --out dtypes-h200.json

From bundles, through the public calls; benchmarks/peers/README.md has the commands that build the bundle. Calls that
are compared take turns in one process; the method is benchmarks/method.py. bf16 and fp16 take turns with their loops of
torch matmuls, too, which show how the chip itself differs in fp16. The loops know each expert's rows on the host.
float32 runs in tf32 if torch.backends.cuda.matmul.allow_tf32 is set, in torch and in pretuned. Cells of over 1.5 TFLOP
are left out in IEEE fp32.

The results are compared with fp64 first, on rows drawn at random (all elements must be finite). Exit status 1: a wrong
result, fp16 over 3 % slower than bf16 in the geometric mean, or tf32 over 10 % slower than its loop at T >= 1024.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import method, provenance
from benchmarks.method import MODELS
from benchmarks.speed.kernels import geometric_mean, in_turns
from pretuned.aot.compare.run import matmul_loop
from pretuned.kernels import reference
from pretuned.runtime import explain, grouped_gemm, grouped_gemm_dW, grouped_gemm_dX

CASES = (("forward", 16), ("forward", 1024), ("forward", 8192), ("dX", 1024), ("dX", 8192), ("dW", 1024), ("dW", 8192))
TORCH = {"bf16": torch.bfloat16, "fp16": torch.float16, "tf32": torch.float32, "fp32": torch.float32}
# Groups of dtypes that take turns: the 16-bit types together, float32 in one precision at a time.
GROUPS = (("bf16", "fp16"), ("tf32",), ("fp32",))
# Relative Frobenius error against fp64. 16 bits: the result is rounded once, each element by at most u = 2^-8, 2^-11.
# tf32: each factor is rounded by at most 2^-11; if cut off instead, the expected error is 7.7e-4. fp32: sums of up to
# 28672 terms, whose errors of 2^-24 each walk at random: sqrt(28672) 2^-24.
BOUNDS = {"bf16": 2.0**-8, "fp16": 2.0**-11, "tf32": 2.0**-10, "fp32": 1e-5}
FP32_FLOP = 1.5e12
ROWS = 256  # checked rows of a result; of dw 16 of each expert
FP16_SLOWER, TF32_SLOWER = 1.03, 1.10


@contextmanager
def precision(dtype: str) -> Iterator[None]:
    """Let torch and pretuned multiply float32 in tf32, or in IEEE fp32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def under(dtype: str, call: Callable[[], Any]) -> Callable[[], Any]:
    def run() -> Any:
        with precision(dtype):
            return call()

    return run


def ours(op: str, inputs: method.Inputs) -> Callable[[], torch.Tensor]:
    x, w, dy, m_sizes = inputs.x, inputs.w, inputs.dy, inputs.m_sizes
    if op == "forward":
        return partial(grouped_gemm, x, w, m_sizes)
    assert dy is not None
    return partial(grouped_gemm_dX, dy, w, m_sizes) if op == "dX" else partial(grouped_gemm_dW, dy, x, m_sizes)


def torchs(op: str, inputs: method.Inputs) -> torch.Tensor:
    """Return the result of a loop of torch matmuls in float32, in the precision that is set."""
    if op == "forward":
        return reference.forward(inputs.x, inputs.w, inputs.m_sizes)
    assert inputs.dy is not None
    if op == "dX":
        return reference.grad_input(inputs.dy, inputs.w, inputs.m_sizes)
    return reference.grad_weight(inputs.dy, inputs.x, inputs.m_sizes)


def error_of(result: torch.Tensor, op: str, inputs: method.Inputs) -> float:
    """||result - ref|| / ||ref|| of some rows, ref in fp64 from the same inputs; NaN where anything is not finite."""
    if not result.isfinite().all():
        return float("nan")
    g = torch.Generator().manual_seed(4)
    M, N = inputs.x.shape[0], inputs.w.shape[1]
    some = torch.randperm(M, generator=g)[:ROWS].sort().values  # on the host, like the counts
    columns = torch.randperm(N, generator=g)[:16].to(result.device)
    wrong = total = torch.zeros((), dtype=torch.float64, device=result.device)
    start = 0
    for expert, rows in enumerate(inputs.m_sizes.tolist()):
        here = slice(start, start + rows)
        mine = some[(some >= start) & (some < start + rows)]
        start += rows
        if op == "dW":
            want = inputs.dy[here][:, columns].double().T @ inputs.x[here].double()
            got = result[expert, columns]
        elif len(mine):
            w = inputs.w[expert].double()
            want = inputs.x[mine].double() @ w.T if op == "forward" else inputs.dy[mine].double() @ w
            got = result[mine]
        else:
            continue
        wrong = wrong + (got.double() - want).square().sum()
        total = total + want.square().sum()
    return float((wrong / total).sqrt())


def fault(dtype: str, error: float) -> str | None:
    """Return why a result with this error is wrong, None if it is not."""
    if not error < BOUNDS[dtype]:
        return f"error {error:.2e}, wanted below {BOUNDS[dtype]:.2e}"
    if dtype == "tf32" and error < BOUNDS["fp32"]:
        return f"error {error:.2e}: that is IEEE fp32, not tf32"
    return None


class Weights:
    """w of one GEMM in each dtype, one after the other in the same memory: no large memory is freed (kernels.room)."""

    def __init__(self, names: list[str], device: str) -> None:
        most = max(E * 2 * width * H for name, E, H, width, _ in MODELS if name in names)
        self._rooms = {dtype: torch.empty(most, dtype=dtype, device=device) for dtype in dict.fromkeys(TORCH.values())}

    def fill(self, E: int, N: int, K: int) -> dict[torch.dtype, torch.Tensor]:
        return {dtype: method.weights(E, N, K, dtype, room.device, into=room) for dtype, room in self._rooms.items()}


def timed(
    clock: method.Clock, op: str, dtypes: tuple[str, ...], inputs: dict[str, method.Inputs], budget_ms: float
) -> dict[str, dict[str, Any]]:
    """Errors and times for some dtypes, our calls and the loops in turns."""
    figures, calls = {}, []
    for dtype in dtypes:
        call = under(dtype, ours(op, inputs[dtype]))
        figures[dtype] = {"error": error_of(call(), op, inputs[dtype])}
        if TORCH[dtype] is torch.float32:  # check that torch used the precision that ours is compared with
            theirs = under(dtype, partial(torchs, op, inputs[dtype]))()
            figures[dtype]["loop_error"] = error_of(theirs, op, inputs[dtype])
            del theirs
        if op == "forward":
            operands = inputs[dtype]
            with precision(dtype):
                figures[dtype]["chosen"] = str(explain(operands.x, operands.w, operands.m_sizes).candidates[0].config)
        calls += [call, under(dtype, matmul_loop(op, inputs[dtype]))]
    times = in_turns(clock, *calls, budget_ms=budget_ms)
    for dtype, us, loop_us in zip(dtypes, times[::2], times[1::2], strict=True):
        figures[dtype] |= {"us": us, "loop_us": loop_us}
    return figures


def measure(names: list[str], budget_ms: float, device: str = "cuda") -> Iterator[dict[str, Any]]:
    clock, weights = method.Clock(device), Weights(names, device)
    models = sorted((model for model in MODELS if model[0] in names), key=lambda model: names.index(model[0]))
    begun, count, done = time.time(), 2 * len(CASES) * len(models), 0
    for name, E, H, width, top_k in models:
        for gemm, N, K in (("gate_up", 2 * width, H), ("down", H, width)):
            w = weights.fill(E, N, K)
            for op, T in CASES:
                M = T * top_k
                m_sizes = method.routed_rows(E, top_k, T).to(device)
                cell: dict[str, Any] = {
                    "model": name,
                    "gemm": gemm,
                    "op": op,
                    "tokens": T,
                    "M": M,
                    "E": E,
                    "N": N,
                    "K": K,
                    "dtypes": {},
                }
                for dtypes in GROUPS:
                    if dtypes == ("fp32",) and 2.0 * M * N * K > FP32_FLOP:
                        continue
                    inputs = {}
                    for dtype in dtypes:
                        kind = TORCH[dtype]
                        dy = None if op == "forward" else method.activations(M, N, kind, device)
                        x = method.activations(M, K, kind, device)
                        inputs[dtype] = method.Inputs(x, w[kind], m_sizes, dy)
                    cell["dtypes"] |= timed(clock, op, dtypes, inputs, budget_ms)
                yield cell
                done += 1
                left = (time.time() - begun) / done * (count - done)
                line = "  ".join(
                    f"{d} {figures['us']:9.1f} us, loop {figures['loop_us']:9.1f}, error {figures['error']:.1e}"
                    for d, figures in cell["dtypes"].items()
                )
                print(f"{name:13}{gemm:8}{op:8}T={T:<5}{line}  ({left:.0f} s left)", flush=True)


def ratios(cells: list[dict[str, Any]]) -> dict[str, float]:
    """Geometric means by dtype: fp16 over bf16 for our calls and for the loops, and our calls over the loops."""
    figures = [cell["dtypes"] for cell in cells]
    means = {
        "fp16 x bf16": geometric_mean(by_dtype["bf16"]["us"] / by_dtype["fp16"]["us"] for by_dtype in figures),
        "the loop's fp16 x bf16": geometric_mean(
            by_dtype["bf16"]["loop_us"] / by_dtype["fp16"]["loop_us"] for by_dtype in figures
        ),
    }
    for dtype in TORCH:
        means[f"{dtype} x loop"] = geometric_mean(
            by_dtype[dtype]["loop_us"] / by_dtype[dtype]["us"] for by_dtype in figures if dtype in by_dtype
        )
    return means


def summary(cells: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """``ratios`` by op and tokens, for all cells, and for cells of at least 1024 tokens."""
    rows = {f"{op} {T}": [c for c in cells if (c["op"], c["tokens"]) == (op, T)] for op, T in CASES}
    rows |= {"T >= 1024": [c for c in cells if c["tokens"] >= 1024], "all": cells}
    return {name: ratios(some) for name, some in rows.items()}


def table(means: dict[str, dict[str, float]]) -> list[str]:
    heads = list(next(iter(means.values())))
    lines = ["| op, tokens | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    return lines + [
        f"| {name} | " + " | ".join(f"{row[head]:.3f}" for head in heads) + " |" for name, row in means.items()
    ]


def verdict(cells: list[dict[str, Any]], means: dict[str, dict[str, float]]) -> list[str]:
    """Return the faults: wrong results, and means below the required ones."""
    faults = []
    for cell in cells:
        for dtype, figures in cell["dtypes"].items():
            for whose, key in (("", "error"), ("torch's loop, ", "loop_error")):
                what = fault(dtype, figures[key]) if key in figures else None
                if what:
                    faults.append(
                        f"{cell['model']} {cell['gemm']} {cell['op']} T={cell['tokens']} {dtype}: {whose}{what}"
                    )
    for name, row, slower in (("fp16 x bf16", "all", FP16_SLOWER), ("tf32 x loop", "T >= 1024", TF32_SLOWER)):
        if not means[row][name] >= 1 / slower:
            faults.append(f"{name} ({row}): {means[row][name]:.3f}, wanted at least {1 / slower:.3f}")
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", default="qwen3-30b,olmoe,mixtral-8x7b")
    parser.add_argument(
        "--budget-ms", type=float, default=100.0, help="for the rounds of what takes turns [%(default)s]"
    )
    args = parser.parse_args()
    names, models = args.models.split(","), [model[0] for model in MODELS]
    unknown = [name for name in names if name not in models]
    if unknown:
        parser.error(f"--models: {', '.join(unknown)} is none of {', '.join(models)}")
    begun = time.time()
    cells: list[dict[str, Any]] = []
    stopped = False
    try:
        for cell in measure(names, args.budget_ms):
            cells.append(cell)
    except KeyboardInterrupt:  # the cells measured so far count
        stopped = True
    means = summary(cells)
    faults = verdict(cells, means)
    worst = {d: max((c["dtypes"][d]["error"] for c in cells if d in c["dtypes"]), default=None) for d in TORCH}
    lines = [*table(means), "worst errors: " + ", ".join(f"{d} {e:.1e}" for d, e in worst.items() if e)]
    report = {
        **provenance.about(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "seconds": round(time.time() - begun, 1),
        "triton_imported": "triton" in sys.modules,
        "stopped": stopped,
        "bounds": BOUNDS,
        "worst_errors": worst,
        "means": means,
        "faults": faults,
        "cells": cells,
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print("\n".join(lines))
    print("\n".join(faults), file=sys.stderr)
    sys.exit(130 if stopped else int(bool(faults)))
