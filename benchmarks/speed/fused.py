"""Time products that gather or scatter rows, against the plain product, and torch's separate gather and scatter.

    python benchmarks/run.py fused --out benchmarks/results/fused-h200.json

Each first GEMM of a layer with its rows gathered by token, each second one with its rows scattered back and weighted:
against the plain product of sorted rows, and against this product with torch's own gather, or multiply and scatter.
Forward, bf16, from the bundle, through ``grouped_gemm``, all in CUDA graphs that take turns, L2 flushed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import method, provenance
from benchmarks.method import MODELS
from benchmarks.speed.kernels import geometric_mean, in_turns, layers_of, room
from pretuned.runtime import explain, grouped_gemm

TOKENS = (1, 16, 128, 1024, 8192)
MAX_DIFFERENCE = 1e-2  # relative: both are rounded to bf16, torch's twice


def calls(
    gemm: str, w: torch.Tensor, T: int, top_k: int, m_sizes: torch.Tensor
) -> tuple[Callable[[], torch.Tensor], Callable[[], torch.Tensor], Callable[[], torch.Tensor]]:
    """The fused call, the equal computation in two steps, and the plain product."""
    M, K = T * top_k, w.shape[2]
    index = torch.randperm(M, generator=torch.Generator().manual_seed(3)).to(torch.int32).cuda()
    for end, count in zip(m_sizes.cumsum(0).tolist(), m_sizes.tolist(), strict=True):  # by token, like a stable sort
        index[end - count : end] = index[end - count : end].sort().values
    tokens, weights = method.activations(T, K, w.dtype), torch.rand(T, top_k, device="cuda") + 0.5
    x = tokens[index // top_k]
    if gemm == "gate_up":
        return (
            lambda: grouped_gemm(tokens, w, m_sizes, topk=top_k, gather_indices=index, permute_x=True),
            lambda: grouped_gemm(tokens[index // top_k], w, m_sizes),
            lambda: grouped_gemm(x, w, m_sizes),
        )

    def apart() -> torch.Tensor:
        y = grouped_gemm(x, w, m_sizes)
        out = torch.empty_like(y)
        out[index.long()] = y * weights.view(-1)[index.long(), None].to(y.dtype)
        return out

    return (
        lambda: grouped_gemm(
            x, w, m_sizes, topk=top_k, gather_indices=index, permute_y=True, topk_weights=weights, fuse_mul_post=True
        ),
        apart,
        lambda: grouped_gemm(x, w, m_sizes),
    )


def measure(models: str) -> Iterator[dict[str, Any]]:
    clock, where = method.Clock(), room(models)
    for name, gemms, E, top_k in layers_of(models):
        for gemm, N, K in gemms:
            w = method.weights(E, N, K, torch.bfloat16, into=where)
            for T in TOKENS:
                m_sizes = method.routed_rows(E, top_k, T).cuda()
                with torch.no_grad():
                    fused, apart, plain = calls(gemm, w, T, top_k, m_sizes)
                    difference = float((fused().float() - apart().float()).norm() / apart().float().norm())
                    fused_us, apart_us, plain_us = in_turns(clock, fused, apart, plain)
                    x = method.activations(T * top_k, K, w.dtype)
                    chosen = explain(x, w, m_sizes).candidates[0].config
                yield {
                    "model": name,
                    "gemm": gemm,
                    "moved": "gathered" if gemm == "gate_up" else "scattered, weighted",
                    "tokens": T,
                    "E": E,
                    "N": N,
                    "K": K,
                    "M": T * top_k,
                    "fused_us": fused_us,
                    "apart_us": apart_us,
                    "plain_us": plain_us,
                    "plain_config": str(chosen),
                    "difference": difference,
                }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", default=",".join(model[0] for model in MODELS))
    args = parser.parse_args()
    begun, cells = time.time(), []
    for cell in measure(args.models):
        cells.append(cell)
        print(
            f"{cell['model']:13}{cell['gemm']:8}T={cell['tokens']:<5} {cell['fused_us']:9.1f} us, plain "
            f"{cell['plain_us']:9.1f} ({cell['fused_us'] / cell['plain_us']:.3f}), in two steps "
            f"{cell['apart_us']:9.1f} ({cell['apart_us'] / cell['fused_us']:.2f} x)",
            flush=True,
        )
    lines = []
    for moved in dict.fromkeys(cell["moved"] for cell in cells):
        for T in TOKENS:
            some = [cell for cell in cells if (cell["moved"], cell["tokens"]) == (moved, T)]
            over = [cell["fused_us"] / cell["plain_us"] for cell in some]
            apart = geometric_mean(cell["apart_us"] / cell["fused_us"] for cell in some)
            lines.append(
                f"{moved:20} T={T:<5} of the plain product {geometric_mean(over):.3f}, "
                f"at most {max(over):.3f}; in two steps {apart:.2f} x"
            )
    print("\n".join(lines))
    report = {
        **provenance.about(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "seconds": round(time.time() - begun, 1),
        "triton_imported": "triton" in sys.modules,
        "summary": lines,
        "cells": cells,
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    wrong = [cell for cell in cells if not cell["difference"] < MAX_DIFFERENCE]
    sys.exit(f"{len(wrong)} cells differ" if wrong else 0)
