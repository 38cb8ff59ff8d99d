"""Times a layer of fp8 blocks with and without the row kernel that fuses the activation and its quantisation.

    python benchmarks/run.py quantised_layer --out quantised-layer-h100.json

``moe_mlp`` (silu, gate and up side by side, x quantised if the bundle says so) with the row kernel that makes codes of
the activation, and without it: then one row kernel stores the activation and another quantises it. Results are checked
to be equal bit for bit. The row kernels are also timed by themselves: the fused one, the two in a row, and each of the
two alone, against the time to move the fused one's bytes. All in CUDA graphs that take turns, L2 flushed.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import method, provenance
from benchmarks.method import MODELS
from pretuned.aot.measure.inputs import quantised_weights
from pretuned.artifacts.records import DType, RowOp
from pretuned.kernels.activations import Activation
from pretuned.kernels.rowops import USED
from pretuned.runtime import ExpertWeights, moe_mlp, reload
from pretuned.runtime.launch import rowops
from pretuned.runtime.launch.quantised import bytes_of_row
from pretuned.runtime.ops.activation import RowActivation

TOKENS = (128, 1024, 8192)
ROUNDS = 21
SILU = RowActivation(Activation("silu"), True, False)


def fp8_blocks(E: int, N: int, K: int) -> ExpertWeights:
    """Prepared weights in a format whose products quantise x."""
    w = quantised_weights(E, N, K, DType.FP8_BLOCK, prepared=False)
    return ExpertWeights.fp8_block(w.codes, w.scale).prepare()


def layers(clock: method.Clock, call: Callable[[], torch.Tensor]) -> list[Any]:
    """Graphs of ``call`` with the fused row kernel and without it; checks that both results are equal."""
    real, graphs, results = rowops.launcher, [], []
    ran: set[RowOp] = set()

    def launcher(op: RowOp, *args: Any, without: RowOp | None, **how: Any) -> Any:
        ran.add(op)
        return None if op is without else real(op, *args, **how)

    for without in (None, RowOp.ACTIVATION_CODES):
        rowops.launcher = functools.partial(launcher, without=without)
        reload()
        ran.clear()
        results.append(call())
        if without is None and RowOp.ACTIVATION in ran:
            print("  (x of the second product stays bf16: there is nothing to compare)")
        graphs.append(clock.capture(call))
    rowops.launcher = real
    if not torch.equal(*results):
        sys.exit("the results differ")
    return graphs


def passes(M: int, columns: int, device: str = "cuda") -> tuple[list[Callable[[], None]], int]:
    """Return the fused row kernel, the two in a row, each of them alone, and the bytes that the first moves."""
    h = method.activations(M, 2 * columns, torch.bfloat16, device)
    a, used = torch.empty(M, columns, dtype=torch.bfloat16, device=device), torch.full((1,), M, device=device).int()
    codes = torch.empty(M * bytes_of_row(columns), dtype=torch.uint8, device=device)
    scale = codes[M * columns :]
    kernels = {
        op: rowops.launcher(op, DType.BF16, 0, aligned=True)
        for op in (RowOp.ACTIVATION_CODES, RowOp.ACTIVATION, RowOp.QUANTIZE)
    }

    def run(op: RowOp, /, **words: torch.Tensor | int) -> None:
        launch = kernels[op]
        assert launch is not None, f"no bundle has {op}"
        addresses = {
            name: argument if isinstance(argument, int) else argument.data_ptr() for name, argument in words.items()
        }
        launch(M, torch.cuda.current_stream().cuda_stream, addresses | {"M": M, "columns": columns})

    act = {"h": h, "used": used, "flags": SILU.flags | USED, **SILU.function.words}
    fused = functools.partial(run, RowOp.ACTIVATION_CODES, codes=codes, scale=scale, **act)
    activate = functools.partial(run, RowOp.ACTIVATION, a=a, **act)
    quantise = functools.partial(
        run, RowOp.QUANTIZE, x=a, index=used, used=used, codes=codes, scale=scale, top_k=1, index_step=1, flags=USED
    )

    def two() -> None:
        activate()
        quantise()

    return [fused, two, activate, quantise], M * (5 * columns + columns // 32)


def measure(models: list[str], tokens: list[int]) -> list[dict[str, Any]]:
    clock, cells = method.Clock(), []
    for name, E, H, width, top_k in MODELS:
        if name not in models:
            continue
        gate_up, down = fp8_blocks(E, 2 * width, H), fp8_blocks(E, H, width)
        for T in tokens:
            g = torch.Generator().manual_seed(T * 31 + E)
            weights, ids = torch.randn(T, E, generator=g).softmax(-1).topk(top_k, -1)
            operands = method.activations(T, H, torch.bfloat16), gate_up, down, ids.cuda(), weights.cuda()
            calls, moved = passes(T * top_k, width)
            cell: dict[str, Any] = {"model": name, "tokens": T, "floor_us": 1e6 * moved / method.BYTES_PER_S}
            with torch.no_grad():
                graphs = layers(clock, functools.partial(moe_mlp, *operands))
            graphs += [clock.capture(call) for call in calls]
            names = ("one_pass_us", "two_passes_us", "pass_us", "both_us", "activation_us", "quantize_us")
            times = clock.rounds_us(graphs, ROUNDS)
            cell |= {which: statistics.median(row) for which, row in zip(names, times, strict=True)}
            cells.append(cell)
            print(
                f"{name:13} T={T:<5} layer {cell['one_pass_us']:8.1f} us, by two passes "
                f"{cell['two_passes_us']:8.1f}, x {cell['two_passes_us'] / cell['one_pass_us']:.3f}; pass "
                f"{cell['pass_us']:7.1f}, two {cell['both_us']:7.1f} ({cell['activation_us']:.1f} and "
                f"{cell['quantize_us']:.1f}), floor {cell['floor_us']:.1f}",
                flush=True,
            )
        del gate_up, down, operands
        torch.cuda.empty_cache()
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", default="deepseek-v3,qwen3-30b")
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    args = parser.parse_args()
    begun = time.time()
    cells = measure(args.models.split(","), args.tokens)
    report = {
        **provenance.about(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "seconds": round(time.time() - begun, 1),
        "cells": cells,
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n")
