"""Times products of quantised weights and bf16 x: each config of a bundle, against torch's way.

    PRETUNED_BUNDLES=coded.msgpack python benchmarks/run.py coded --out coded.json
    PRETUNED_BUNDLES=artifacts/bundles/candidates-sm90.msgpack.xz python benchmarks/run.py coded --ops dX \\
        --layouts nk --sizes 128,1536,2048,8 128,2048,768,8 32,5760,2880,4 --out coded-dx.json

The kernel is launched as the runtime does, config by config: the sizes of Qwen3-30B-A3B's first product, or ``--sizes``
E,N,K and the experts of a token, routed evenly at random. ``nk`` is prepared weights, ``stored`` the checkpoint layout.
``torch`` dequantises expert by expert, as the runtime does where no bundle has code; ``bf16`` is the product of the
dequantised weights by whatever bundle has it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks import provenance
from pretuned.aot.measure.bench import NumericsCheck
from pretuned.aot.measure.inputs import Tensors, caller, quantised_weights
from pretuned.artifacts.bundle_file import open_bundle
from pretuned.artifacts.records import Fusion, Layout, Op, Problem
from pretuned.kernels.chips import chip_of
from pretuned.kernels.cost import Resources
from pretuned.kernels.cost_model import estimate_us
from pretuned.kernels.registry import beyond
from pretuned.kernels.spec import gemm_of
from pretuned.runtime import grouped_gemm, grouped_gemm_dX
from pretuned.runtime.driver.device import local_gpu
from pretuned.runtime.launch.gemm import load_kernel
from pretuned.runtime.ops.torch_fallback import on_cuda
from pretuned.runtime.weights.dequantised import Dequantised

SIZES = "128,1536,2048,8"
TOKENS = (1, 16, 128, 1024, 8192)
FLUSH_BYTES = 1 << 28


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    parser.add_argument("--formats", nargs="*", default=["mxfp4", "fp8_block_a16", "int4_g128"])
    parser.add_argument("--ops", nargs="*", default=["forward", "dX"], choices=["forward", "dX"])
    parser.add_argument("--layouts", nargs="*", default=["stored", "nk"], choices=["stored", "nk"])
    parser.add_argument("--sizes", nargs="*", default=[SIZES], help="E,N,K,top_k")
    parser.add_argument("--budget-s", type=float, default=540.0, help="no further cell is begun after so long")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    end, rows = time.monotonic() + args.budget_s, []
    bundle = open_bundle(os.environ["PRETUNED_BUNDLES"].split(os.pathsep)[0])
    local = local_gpu(0)
    print(f"{local.gpu.name}, torch {torch.__version__}; us, medians with a cold L2")
    for sizes, name in itertools.product(args.sizes, args.formats):
        for layout in map(Layout, args.layouts):
            for op in map(Op, args.ops):
                variants = [
                    (i, variant)
                    for i, variant in enumerate(bundle.variants())
                    if (variant.op, variant.layout, variant.fusion) == (op, layout, Fusion.NONE)
                    and variant.dtype.value == name
                    and variant.alignment > 1
                ]
                if variants and time.monotonic() < end:
                    each = tuple(map(int, sizes.split(",")))
                    rows += product(bundle, variants, op, layout, each, args.tokens, local, end)
    if args.out:
        report = provenance.about() | {"gpu": local.gpu.name, "rows": rows}
        args.out.write_text(json.dumps(report, indent=1) + "\n")


def product(
    bundle: Any, variants: Any, op: Op, layout: Layout, sizes: tuple[int, ...], tokens: Any, local: Any, end: float
) -> list[Any]:
    """Every config's times for one op, dtype and layout, at each number of tokens."""
    E, N, K, TOP_K = sizes
    dtype, rows = variants[0][1].dtype, []
    problem = Problem(op, dtype, E, N, K, layout)
    gemm, device = gemm_of(problem), torch.device("cuda", 0)
    w = quantised_weights(E, N, K, dtype, device, prepared=layout is Layout.NK)
    judge = NumericsCheck(problem, w, device)
    kernels = [(v, load_kernel(v, bundle.cubin(i), 0, local.gpu.sm_count)) for i, v in variants]
    kernels = [(v, k) for v, k in kernels if beyond(problem, k.config) is None]
    dense = w.dequantize(torch.bfloat16)
    matrices = Dequantised(w, torch.bfloat16, transposed=op is Op.DX)
    for T in tokens:
        if time.monotonic() > end:
            break
        M = T * TOP_K
        generator = torch.Generator().manual_seed(T)
        ids = torch.rand(T, E, generator=generator).argsort(1)[:, :TOP_K]
        counts = torch.bincount(ids.flatten(), minlength=E)
        m_sizes = counts.int().to(device)
        x = torch.randn(M, gemm.reduction, device=device).bfloat16()
        y = torch.empty(M, gemm.columns, dtype=torch.bfloat16, device=device)
        on = Tensors(problem, M, x, w, y)
        reference = judge.reference(on, counts.tolist())
        times: dict[str, float] = {}
        for variant, kernel in kernels:
            y.fill_(float("nan"))
            call = caller(kernel, on, m_sizes)
            call()
            error = judge.error(on, reference)
            if not error < 5e-3:
                print(f"WRONG {problem} {kernel.config} T={T}: {error}", flush=True)
            modelled = estimate_us(problem, M, Resources.of(variant), chip_of(local.gpu, local.sm))
            times[str(kernel.config)] = took = timed(call)
            rows.append(
                {
                    "problem": str(problem),
                    "T": T,
                    "config": str(kernel.config),
                    "us": took,
                    "modelled_us": modelled,
                    "error": error,
                }
            )

        def by_torch(x: torch.Tensor = x, m_sizes: torch.Tensor = m_sizes, y: torch.Tensor = y) -> None:
            on_cuda(x, matrices, m_sizes, y, Layout.NK, sm=local.sm, aligned=False)

        def in_bf16(x: torch.Tensor = x, m_sizes: torch.Tensor = m_sizes) -> None:
            (grouped_gemm if op is Op.FORWARD else grouped_gemm_dX)(x, dense, m_sizes)

        torch_us, bf16_us = timed(by_torch, graph=False), timed(in_bf16)
        read_us = int((counts > 0).sum()) * dtype.precision.w_bytes(N, K) / 3.0e6
        best = sorted(times.items(), key=lambda item: item[1])
        fastest = ", ".join(f"{config} {us:.1f}" for config, us in best[:3])
        print(
            f"{problem} T={T}: {best[0][1]:.1f} (torch {torch_us:.0f}, bf16 {bf16_us:.1f}, bytes {read_us:.1f}): "
            f"{fastest}",
            flush=True,
        )
        rows.append({"problem": str(problem), "T": T, "torch_us": torch_us, "bf16_us": bf16_us, "bytes_us": read_us})
    return rows


def timed(call: Any, repeats: int = 7, *, graph: bool = True) -> float:
    """The median of some runs in us, each after L2 was overwritten."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    call()
    torch.cuda.synchronize()
    run = call
    if graph:
        captured = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            call()
        torch.cuda.synchronize()
        with torch.cuda.graph(captured):
            call()
        run = captured.replay
    times = []
    for _ in range(repeats if graph else 3):
        flush.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return sorted(times)[len(times) // 2]


if __name__ == "__main__":
    main()
