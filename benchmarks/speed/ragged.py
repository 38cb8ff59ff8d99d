"""Time equal numbers of rows in one expert, in equal experts and as routed, against a dense product.

    python benchmarks/run.py ragged --out ragged-h200.json

The forward through the public call, from the shipped bundles. The calls take turns (benchmarks/method.py), so that the
chip's clock, which falls under load, is the same for all. ``padded`` is the number of
rows if each expert's rows are padded to 64 or 128, over the real number: it tells what a kernel really multiplies.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import method, provenance
from benchmarks.method import MODELS
from benchmarks.speed.kernels import geometric_mean
from pretuned.runtime import grouped_gemm

KINDS = ("dense", "one", "equal", "routed")


def padded(m_sizes: torch.Tensor, rows: int) -> float:
    """The number of rows if each expert's are padded to a multiple of ``rows``, over the real number."""
    return float((m_sizes.add(rows - 1) // rows * rows).sum() / m_sizes.sum())


def measure(names: list[str], T: int) -> list[dict[str, Any]]:
    clock, cells = method.Clock(), []
    for name, E, H, width, top_k in MODELS:
        if name not in names:
            continue
        for gemm, N, K in (("gate_up", 2 * width, H), ("down", H, width)):
            M = T * top_k
            x, w = method.activations(M, K, torch.bfloat16), method.weights(E, N, K, torch.bfloat16)
            routed = method.routed_rows(E, top_k, T)
            single = torch.tensor([M], dtype=torch.int32)
            equal = torch.full((E,), M // E, dtype=torch.int32)
            calls = [functools.partial(torch.mm, x, w[0].t())]
            calls += [
                functools.partial(grouped_gemm, x, w[: len(sizes)], sizes.cuda()) for sizes in (single, equal, routed)
            ]
            graphs = [clock.capture(call) for call in calls]
            rounds = clock.rounds_us(graphs, 2)
            rounds = clock.rounds_us(graphs, max(7, min(50, int(4e5 / sum(times[-1] for times in rounds)))))
            us = dict(zip(KINDS, (statistics.median(times) for times in rounds), strict=True))
            cell = {
                "model": name,
                "gemm": gemm,
                "tokens": T,
                "M": M,
                "E": E,
                "N": N,
                "K": K,
                "us": us,
                "padded_64": padded(routed, 64),
                "padded_128": padded(routed, 128),
            }
            cells.append(cell)
            over = {kind: us[kind] / us["dense"] for kind in KINDS}
            print(
                f"{name:13}{gemm:8} dense {us['dense']:8.1f} us ({2e-6 * M * N * K / us['dense']:.0f} TFLOP/s), "
                f"one expert x {over['one']:.3f}, equal x {over['equal']:.3f}, routed x {over['routed']:.3f}; rows "
                f"padded to 64 x {cell['padded_64']:.3f}, to 128 x {cell['padded_128']:.3f}",
                flush=True,
            )
            del x, w, graphs, calls
            torch.cuda.empty_cache()
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", default=",".join(model[0] for model in MODELS))
    parser.add_argument("--tokens", type=int, default=8192)
    args = parser.parse_args()
    begun = time.time()
    cells = measure(args.models.split(","), args.tokens)
    means = {kind: geometric_mean(cell["us"][kind] / cell["us"]["dense"] for cell in cells) for kind in KINDS}
    print("over the dense product, geometric means:", ", ".join(f"{kind} {mean:.3f}" for kind, mean in means.items()))
    report = {
        **provenance.about(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "seconds": round(time.time() - begun, 1),
        "triton_imported": "triton" in sys.modules,
        "over_dense": means,
        "cells": cells,
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n")
