"""Times every variant of a bundle on a grid of problems: which variant wins where, with nothing chosen for us.

    python benchmarks/variants.py candidates.msgpack --out sweep.json
    python benchmarks/variants.py candidates.msgpack --models qwen3-30b,olmoe --tokens 1,128 --out sweep.json

Forward only, through the runtime's own launcher; the first launch of each (variant, problem) is
checked against fp32. The method is benchmarks/method.py.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import method
import torch
from pretuned.artifacts.store import open_bundle
from pretuned.artifacts.types import DType, Layout, Op, Variant
from pretuned.runtime import launch

# (name, E, H, I, top_k): the grid's models; two GEMMs each.
MODELS = (
    ("qwen3-30b", 128, 2048, 768, 8),
    ("qwen3-next", 512, 2048, 512, 10),
    ("deepseek-v3", 256, 7168, 2048, 8),
    ("mixtral-8x7b", 8, 4096, 14336, 2),
    ("gpt-oss-20b", 32, 2880, 2880, 4),
    ("olmoe", 64, 2048, 1024, 8),
)
TORCH = {DType.BF16: torch.bfloat16, DType.FP16: torch.float16, DType.FP32: torch.float32, DType.TF32: torch.float32}


def launcher(kernel: launch.LoadedKernel, inputs: method.Inputs, y: torch.Tensor):  # type: ignore[no-untyped-def]
    E, N, K = inputs.w.shape
    start = launch.row_launcher(
        kernel, columns=N, reduction=K, E=E, w_kn=False, stride_w_e=inputs.w.stride(0),
        stride_w_row=inputs.w.stride(1), m_sizes_step=1,
    )  # fmt: skip
    x, w, m = inputs.x, inputs.w, inputs.m_sizes
    M = x.shape[0]

    def call() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        start(x.data_ptr(), w.data_ptr(), y.data_ptr(), m.data_ptr(), x.stride(0), y.stride(0), M, stream)

    return call


def fits(variant: Variant, M: int, E: int) -> bool:
    """Leaves out what can't win: row tiles far larger than the experts' rows, tiny ones for long runs of rows."""
    rows, block_m = M / E, dict(variant.config)["block_m"]
    return variant.op is Op.FORWARD and variant.layout is Layout.NK and block_m <= max(16, 16 * rows) and (
        block_m >= min(64, rows / 8)
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", default=",".join(m[0] for m in MODELS))
    parser.add_argument("--tokens", default="1,16,128,1024,8192")
    parser.add_argument("--dtype", default="bf16", type=DType)
    args = parser.parse_args()

    properties = torch.cuda.get_device_properties(0)
    bundle = open_bundle(args.bundle)
    kernels = {}
    for number, variant in enumerate(bundle.variants()):
        if variant.dtype is args.dtype:
            kernels[number] = launch.load_kernel(variant, bundle.cubin(number), 0, properties.multi_processor_count)
    clock = method.Clock()
    cells = []
    begun = time.time()
    for name, E, H, width, top_k in MODELS:
        if name not in args.models.split(","):
            continue
        for gemm, N, K in (("gate_up", 2 * width, H), ("down", H, width)):
            w = method.weights(E, N, K, TORCH[args.dtype])
            for T in map(int, args.tokens.split(",")):
                m_sizes = method.routed_rows(E, top_k, T)
                M = T * top_k
                inputs = method.Inputs(method.activations(M, K, w.dtype), w, m_sizes.cuda())
                y = torch.empty(M, N, dtype=w.dtype, device="cuda")
                active = int((m_sizes > 0).sum())
                floor_us = round(method.floor_us(M, N, K, active, w.itemsize), 2)
                cell = {"model": name, "gemm": gemm, "E": E, "N": N, "K": K, "top_k": top_k, "tokens": T, "M": M,
                        "active": active, "floor_us": floor_us}  # fmt: skip
                times, errors = {}, {}
                for number, kernel in kernels.items():
                    if not fits(kernel.variant, M, E):
                        continue
                    y.fill_(float("nan"))
                    call = launcher(kernel, inputs, y)
                    call()
                    errors[number] = method.relative_error(y, inputs)
                    if errors[number] < method.MAX_ERROR:
                        times[number] = round(clock.median_us(call, 20, 30.0), 2)
                cell |= {"us": times, "worst_error": max(errors.values()),
                         "wrong": {n: e for n, e in errors.items() if not e < method.MAX_ERROR}}  # fmt: skip
                cells.append(cell)
                best = min(times, key=times.__getitem__)
                print(f"{name:14}{gemm:8} T={T:<5} floor {cell['floor_us']:8.1f} best {times[best]:8.1f} "
                      f"{kernels[best].config} wrong {len(cell['wrong'])} of {len(errors)}", flush=True)  # fmt: skip
            del w
            torch.cuda.empty_cache()
    result = {
        "command": " ".join(sys.argv), "seconds": round(time.time() - begun, 1), "gpu": properties.name,
        "sm_count": properties.multi_processor_count, "torch": torch.__version__,
        "triton_imported": "triton" in sys.modules,
        "variants": {n: {"config": dict(k.variant.config), "threads": k.variant.threads, "shared_bytes":
                         k.variant.shared_bytes, "registers": k.variant.registers, "alignment": k.variant.alignment,
                         "per_sm": k.function.per_sm} for n, k in kernels.items()},
        "cells": cells,
    }  # fmt: skip
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
