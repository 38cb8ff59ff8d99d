"""Times QuACK's grouped GEMMs and ours in one process, in turns, with torch grouped_mm and one dense product.

    pip install quack-kernels==0.6.5 'nvidia-cutlass-dsl[cu13]==4.8.1'
    python benchmarks/run.py beside_quack --smoke                                   # one tiny product an op, seconds
    python benchmarks/run.py beside_quack --more 3 --out beside-quack-h200.json
    QUACK_CACHE_DIR=cache python benchmarks/run.py beside_quack --more 3 --compile  # no GPU: fills QuACK's cache only

Per cell (model, GEMM, op, tokens): ours through the public call; QuACK in the configuration that was the fastest of
57 on an H200 (quack-configs.jsonl) and, with ``--more N``, in the N that were fastest most often for that op, of
which its best time counts; torch's grouped_mm; and one dense product of as many FLOPs. All take turns, by
benchmarks/method.py. Each graph's result is compared with fp32 before it is timed. QuACK may look better than its own
call: its row offsets are made beforehand, and the flush between two calls zeroes the counter of its dynamic scheduler,
outside the time. The file is written after every cell.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks import method, provenance
from benchmarks.method import MODELS
from benchmarks.peers import beside
from benchmarks.peers.beside import OPS, OURS, Call, Maker
from benchmarks.peers.quack_configs import Cell, Config, read, to_try
from benchmarks.speed.kernels import layers_of, room

INSTALL = "pip install quack-kernels==0.6.5 'nvidia-cutlass-dsl[cu13]==4.8.1'"
LIBRARY = "QuACK"
PACKAGES = ("quack-kernels", "nvidia-cutlass-dsl", "nvidia-cutlass-dsl-libs-cu13", "apache-tvm-ffi", "triton")
# One product an op, an expert without rows among them, and both kinds of scheduler.
SMOKE = (
    ("forward", ("128x192pp12", "64x256pp12d")),
    ("dX", ("128x192pp11", "128x256co12dk32")),
    ("dW", ("128x128pp21", "128x256co11dk32")),
)


def quack_module() -> Any:
    """quack.gemm. Ends the process with 2 if a package is missing, with 1 if it can't be loaded."""
    try:
        import quack.gemm
    except ModuleNotFoundError as error:
        print(f"beside_quack: {error}: QuACK is not installed here. {INSTALL}", file=sys.stderr)
        sys.exit(2)
    except (ImportError, RuntimeError, OSError) as error:
        print(f"beside_quack: QuACK is installed, and can't be loaded: {error}", file=sys.stderr)
        sys.exit(1)
    return quack.gemm


def quack_call(
    module: Any, config: Config, op: str, inputs: method.Inputs, out: torch.Tensor, counter: torch.Tensor
) -> Call:
    """QuACK's D[g] = A[g] @ B[g].T on views of the same tensors, nothing copied.

    forward: x, w and y, grouped along M. dX: dy, w as [E, K, N] and dx. dW: dy.T, x.T and dw, grouped along the
    reduction. ``out`` holds the result; a dynamic scheduler counts in ``counter`` [1] int32, zero before a call.
    """
    ends = inputs.m_sizes.cumsum(0)
    offsets = torch.cat([ends.new_zeros(1), ends]).to(torch.int32)
    E, N, K = inputs.w.shape
    M = inputs.x.shape[0]
    if op == "forward":
        left, right, result = inputs.x, inputs.w, out[: M * N].view(M, N)
    else:
        assert inputs.dy is not None
        if op == "dX":
            left, right, result = inputs.dy, inputs.w.transpose(1, 2), out[: M * K].view(M, K)
        else:
            left, right, result = inputs.dy.t(), inputs.x.t(), out[: E * N * K].view(E, N, K)
    grouped = {"cu_seqlens_k" if op == "dW" else "cu_seqlens_m": offsets}

    def call() -> torch.Tensor:
        module.gemm(
            left,
            right,
            result,
            None,
            counter if config.dynamic else None,
            config.tile_m,
            config.tile_n,
            config.cluster_m,
            config.cluster_n,
            tile_K=config.tile_k,
            pingpong=config.pingpong,
            persistent=True,
            is_dynamic_persistent=config.dynamic,
            **grouped,
        )
        return result

    return call


def quack_calls(
    module: Any, clock: method.Clock, op: str, inputs: method.Inputs, out: torch.Tensor, configs: Sequence[Config]
) -> dict[str, Maker]:
    """A call for each configuration, by its text. A dynamic scheduler's counter is in memory that the flush zeroes."""
    counter = clock.flush[:4].view(torch.int32)
    return {str(c): partial(quack_call, module, c, op, inputs, out, counter) for c in configs}


def plan(models: str, ops: Sequence[str], tokens: Sequence[int], more: int) -> dict[Cell, list[Config]]:
    """QuACK's configurations to try in every cell that is asked for."""
    best = read()
    return {
        (name, gemm, op, T): to_try(best, (name, gemm, op, T), more)
        for name, gemms, _, _ in layers_of(models)
        for gemm, _, _ in gemms
        for op in ops
        for T in tokens
    }


def measure(module: Any, args: argparse.Namespace, head: dict[str, Any]) -> list[dict[str, Any]]:
    """Measure all cells; the file is complete after each cell."""
    configs = plan(args.models, args.op, args.tokens, args.more)
    clock, cells, begun = method.Clock(), [], time.time()
    where = room(args.models)
    top_k = {name: k for name, _, _, k in layers_of(args.models)}
    rows = max((T * top_k[name] for name, _, _, T in configs), default=0)
    widest = max(max(N, K) for _, gemms, _, _ in layers_of(args.models) for _, N, K in gemms)
    out = torch.empty(max(where.numel() if "dW" in args.op else 0, rows * widest), dtype=torch.bfloat16, device="cuda")
    print(beside.HEADER)
    for name, gemms, E, k in layers_of(args.models):
        for gemm, N, K in gemms:
            w = method.weights(E, N, K, torch.bfloat16, into=where)
            for op in args.op:
                for T in args.tokens:
                    M = T * k
                    dy = None if op == "forward" else method.activations(M, N, w.dtype)
                    inputs = method.Inputs(method.activations(M, K, w.dtype), w, method.routed_rows(E, k, T).cuda(), dy)
                    cell = {"model": name, "gemm": gemm, "op": op, "tokens": T, "M": M, "E": E, "N": N, "K": K}
                    calls = quack_calls(module, clock, op, inputs, out, configs[name, gemm, op, T])
                    cells.append(beside.judged(cell | beside.measure_cell(clock, op, inputs, calls)))
                    print(
                        beside.table_line(cells[-1]),
                        f"({len(cells)} of {len(configs)}, {time.time() - begun:.0f} s)",
                        flush=True,
                    )
                    beside.write(args.out, head, cells, begun, LIBRARY)
    return cells


def smoke(module: Any) -> int:
    """Run one small product an op and print whole tracebacks; return the number of failures."""
    clock, E, N, K, T, top_k = method.Clock(), 16, 512, 256, 512, 2
    wrong = 0
    for op, texts in SMOKE:
        w = method.weights(E, N, K, torch.bfloat16)
        dy = None if op == "forward" else method.activations(T * top_k, N, w.dtype)
        inputs = method.Inputs(method.activations(T * top_k, K, w.dtype), w, method.routed_rows(E, top_k, T).cuda(), dy)
        out = torch.empty(E * N * K, dtype=w.dtype, device="cuda")
        begun = time.time()
        calls = quack_calls(module, clock, op, inputs, out, [Config.parse(text) for text in texts])
        cell = beside.measure_cell(clock, op, inputs, calls, budget_ms=20.0)
        print(
            f"{op}: {time.time() - begun:.1f} s",
            {name: (round(us, 1), f"{cell['error'][name]:.1e}") for name, us in cell["us"].items()},
            flush=True,
        )
        for name, why in cell.get("failed", {}).items():
            wrong += 1
            print(f"{op}: {name}\n{why}", flush=True)
    print("compiled or read back:", module._compile_gemm.cache_info())
    return wrong


def compile_only(args: argparse.Namespace) -> None:
    """Compile the kernels of the cells into QuACK's cache, by QuACK's own path up to the launch."""
    os.environ.setdefault("QUACK_ARCH", "90")
    os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
    module = quack_module()
    wanted = [(op, Config.parse(text)) for op, texts in SMOKE for text in texts]
    for (_, _, op, _), configs in plan(args.models, args.op, args.tokens, args.more).items():
        wanted += [(op, config) for config in configs]
    wanted = list(dict.fromkeys(wanted))
    E, N, K, M = 4, 256, 256, 64
    inputs = method.Inputs(
        torch.empty(M, K, dtype=torch.bfloat16),
        torch.empty(E, N, K, dtype=torch.bfloat16),
        torch.full((E,), M // E, dtype=torch.int32),
        torch.empty(M, N, dtype=torch.bfloat16),
    )
    out, counter = torch.empty(E * N * K, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int32)
    with mock.patch.multiple(module, get_max_active_clusters=lambda *_, **__: 1, run_gemm_plan=lambda *_, **__: None):
        for number, (op, config) in enumerate(wanted, 1):
            begun = time.time()
            quack_call(module, config, op, inputs, out, counter)()
            print(f"{number} of {len(wanted)}: {op} {config} {time.time() - begun:.1f} s", flush=True)
    print(module._compile_gemm.cache_info())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("beside-quack.json"))
    parser.add_argument("--models", default=",".join(m[0] for m in MODELS))
    parser.add_argument("--tokens", type=lambda text: [int(count) for count in text.split(",")], default=[1024, 8192])
    parser.add_argument("--op", type=lambda text: text.split(","), default=list(OPS))
    parser.add_argument("--more", type=int, default=0, help="as many of the op's usual configurations besides")
    parser.add_argument("--smoke", action="store_true", help="one tiny product an op, then end")
    parser.add_argument("--compile", action="store_true", help="only fill QuACK's cache; needs no GPU")
    args = parser.parse_args()
    unknown = sorted(set(args.op) - set(OPS))
    if unknown:
        parser.error(f"--op: {', '.join(unknown)} is none of {', '.join(OPS)}")
    if args.compile:
        compile_only(args)
        return
    module = quack_module()
    if not torch.cuda.is_available():
        sys.exit("beside_quack: no CUDA device here; --compile needs none")
    print(beside.versions(PACKAGES), flush=True)
    if args.smoke:
        wrong = smoke(module)
        sys.exit(f"{wrong} failed" if wrong else 0)
    head = {**provenance.about(), "gpu": torch.cuda.get_device_name(), "versions": beside.versions(PACKAGES)}
    cells = measure(module, args, head)
    print("\n".join(beside.summary(cells, LIBRARY)))
    lost = sum(OURS in cell.get("failed", {}) for cell in cells)
    sys.exit(f"{lost} cells of ours are wrong" if lost else 0)
