"""Times vLLM's fused_moe kernel, triton_kernels and ours in one process, in turns.

    pip download --no-deps vllm==0.20.2 && unzip -q vllm-0.20.2-*.whl -d vllm-0.20.2
    python benchmarks/run.py beside_vllm --vllm vllm-0.20.2 --out beside-vllm-h200.json
    python benchmarks/run.py beside_vllm --vllm vllm-0.20.2 --models olmoe --op forward --tokens 1,16 --out some.json

These two libraries are the fastest in most cells of benchmarks/peers. They run with ours in one run, on one machine,
nothing scaled. Per cell (model, GEMM, op, tokens; dX and dW begin at 1024 tokens): ours through the public call; for
the forward, vLLM's kernel in the configuration that vLLM has tuned for an H200, where it has one for these sizes, and
in the one of its heuristic; triton_kernels' matmul_ogs as it chooses for itself; torch's grouped_mm; and one dense
product of as many FLOPs. Each graph's result is compared with fp32 before it is timed. Both libraries may look better
than their own calls: each row's expert, padded as each library wants it, is made beforehand, outside the time. The file
is written after every cell.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import method, provenance
from benchmarks.method import MODELS
from benchmarks.peers import beside, vllm_kernels
from benchmarks.peers.beside import OPS, OURS, Maker
from benchmarks.speed.kernels import layers_of, room

LIBRARY = "the better of vLLM and triton_kernels"
_MANY = 1024  # tokens


def calls(
    theirs: vllm_kernels.Kernels, op: str, inputs: method.Inputs, width: int, top_k: int, T: int
) -> dict[str, Maker]:
    """The rivals' calls, by name."""
    E, N, K = inputs.w.shape
    makers: dict[str, Maker] = {"triton_kernels": partial(theirs.triton_kernels, op, inputs)}
    if op == "forward":
        for whence, config in theirs.configs_of(E, N, K, width, top_k, T).items():
            makers[f"vllm {whence}"] = partial(theirs.vllm, inputs, config)
    return makers


def few(args: argparse.Namespace) -> list[tuple[str, int]]:
    """The selected (op, tokens) below 1024 tokens: forwards only, because training steps are larger."""
    return [("forward", T) for T in args.tokens if T < _MANY and "forward" in args.op]


def many(args: argparse.Namespace) -> list[tuple[str, int]]:
    return [(op, T) for op in args.op for T in args.tokens if T >= _MANY]


def measure(theirs: vllm_kernels.Kernels, args: argparse.Namespace, head: dict[str, Any]) -> list[dict[str, Any]]:
    """Measure all cells, few tokens first, before arithmetic heats the chip; the file is complete after each cell."""
    clock, cells, begun, where = method.Clock(), [], time.time(), room(args.models)
    print(beside.HEADER)
    for columns in (few(args), many(args)):
        for name, gemms, E, top_k in layers_of(args.models) if columns else ():
            width = next(K for gemm, _, K in gemms if gemm == "down")
            for gemm, N, K in gemms:
                w = method.weights(E, N, K, torch.bfloat16, into=where)
                for op, T in columns:
                    M = T * top_k
                    dy = None if op == "forward" else method.activations(M, N, w.dtype)
                    rows = method.routed_rows(E, top_k, T).cuda()
                    inputs = method.Inputs(method.activations(M, K, w.dtype), w, rows, dy)
                    cell = {"model": name, "gemm": gemm, "op": op, "tokens": T, "M": M, "E": E, "N": N, "K": K}
                    tried = calls(theirs, op, inputs, width, top_k, T)
                    cells.append(beside.judged(cell | beside.measure_cell(clock, op, inputs, tried, args.budget_ms)))
                    print(beside.table_line(cells[-1]), f"({len(cells)}, {time.time() - begun:.0f} s)", flush=True)
                    beside.write(args.out, head, cells, begun, LIBRARY)
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("beside-vllm.json"))
    parser.add_argument("--vllm", type=Path, help="where vLLM's wheel was unpacked (default: the installed package)")
    parser.add_argument("--models", default=",".join(m[0] for m in MODELS))
    parser.add_argument(
        "--tokens", type=lambda text: [int(count) for count in text.split(",")], default=[1, 16, 128, 1024, 8192]
    )
    parser.add_argument("--op", type=lambda text: text.split(","), default=list(OPS))
    parser.add_argument("--budget-ms", type=float, default=100.0, help="for each call of a cell (default 100)")
    args = parser.parse_args()
    unknown = sorted(set(args.op) - set(OPS))
    if unknown:
        parser.error(f"--op: {', '.join(unknown)} is none of {', '.join(OPS)}")
    if not (few(args) or many(args)):
        parser.error(f"nothing is left to time: dX and dW begin at {_MANY} tokens")
    try:
        place = vllm_kernels.package(args.vllm)
    except FileNotFoundError as error:
        parser.error(str(error))
    try:
        theirs = vllm_kernels.Kernels(place)
    except (ValueError, ImportError) as error:  # another version's file, or a wheel without triton_kernels
        parser.error(f"{place}: {error}. {vllm_kernels.INSTALL}")
    if not torch.cuda.is_available():
        sys.exit("beside_vllm: no CUDA device here")
    head = {
        **provenance.about(),
        "gpu": torch.cuda.get_device_name(),
        "versions": beside.versions(["triton"]) | {"vllm": vllm_kernels.version_of(place)},
    }
    cells = measure(theirs, args, head)
    print("\n".join(beside.summary(cells, LIBRARY)))
    lost = sum(OURS in cell.get("failed", {}) for cell in cells)
    sys.exit(f"{lost} cells of ours are wrong" if lost else 0)
