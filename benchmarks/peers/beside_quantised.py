"""Compares our quantised products with other libraries' in one process, in turns.

    pip install humming-kernels==0.1.19
    pip download --no-deps vllm==0.20.2 && unzip -q vllm-0.20.2-*.whl -d vllm-0.20.2
    DG_JIT_USE_NVRTC=0 python benchmarks/run.py beside_quantised --vllm vllm-0.20.2 --out quantised-peers-h100.jsonl
    python benchmarks/run.py beside_quantised --table quantised-peers-h100.jsonl

y[g] = x[g] @ w[g].T, rows sorted by expert; ours by the public call with ``ExpertWeights``, x in bf16. In fp8 blocks
vLLM's kernel by its heuristic and DeepGEMM multiply an x that is quantised beforehand (w8a8), outside the time; so
does vLLM's in fp8 per channel, by its heuristic, its tuned files and in two tiles;
DeepGEMM in its contiguous form (every expert's rows padded to 128) and its masked one. Humming multiplies x in bf16.
"ours, of codes" is our product of a quantised x, by the choice of the bundle that has it. In mxfp4, mxfp8 and int4
(groups of 32 and 128, offset 8) x is bf16 for all: triton_kernels' matmul_ogs (mxfp4), vLLM's Marlin and Humming by its
heuristic, each with these weights in its own order. int4_g128_zp has zero points instead of the offset 8: of these
three, Marlin alone is measured. Each result is compared with fp32 of the dequantised operands
(three experts of each).

A line of JSON a cell as soon as it is measured: median microseconds, relative errors, and what failed. Several models
have a process each; before the first is timed, each library compiles what it needs in processes side by side.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch

from benchmarks import provenance
from benchmarks.peers import vllm_kernels
from pretuned.aot.measure.clock import Clock, HostClock, Replayed
from pretuned.runtime import grouped_gemm

from . import w4a16, w8a8
from .products import FLAGSHIPS, INT4, INT4_ZERO, MODELS, OF_CODES, Call, Cell, Product, models_of, products

Maker: TypeAlias = Callable[[Path, Product, list[int]], Callable[[Cell], dict[str, Call]]]
PEERS: dict[str, tuple[tuple[str, ...], Maker]] = {  # the formats that each has, and what prepares it
    "codes": (OF_CODES, w8a8.ours),
    "vllm": (OF_CODES, w8a8.vllm),
    "deepgemm": (("fp8_block",), w8a8.deepgemm),
    "triton_kernels": (("mxfp4",), w4a16.triton_kernels),
    "marlin": (("mxfp4", "mxfp8", *INT4, INT4_ZERO), w4a16.marlin),
    "humming": (("mxfp4", "mxfp8", *INT4, "fp8_block"), w4a16.humming),
}
FORMATS = ("mxfp4", *OF_CODES, *INT4, INT4_ZERO, "mxfp8")
TOKENS = "1,16,128,1024,8192"
ROUNDS = 15
OF_BF16 = ("ours", "humming")  # libraries that multiply bf16 x, not its codes
RUN = Path(__file__).parents[1] / "run.py"
WARMING = 0.45  # largest share of the budget for compiling
AT_ONCE = 12  # processes that compile at the same time
DEAD = 3  # the exit code where the GPU's context was lost


def ours(place: Path, product: Product, tokens: list[int]) -> Callable[[Cell], dict[str, Call]]:
    """Our calls of a cell by name: the public call."""
    return lambda cell: {"ours": partial(grouped_gemm, cell.x, product.weights, cell.m_sizes)}


def described(error: Exception) -> str:
    """An error's type and text in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def lost() -> bool:
    """Return True if a fault has destroyed the GPU's context: nothing more can be measured in this process."""
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except Exception:
        return True
    return False


def row(product: Product, T: int) -> dict[str, Any]:
    """A cell's line of the file, without measured values."""
    said = {"format": product.format, "model": product.model, "gemm": product.gemm, "tokens": T}
    device = torch.cuda.get_device_name() if product.device == "cuda" else product.device
    return said | {"E": product.E, "N": product.N, "K": product.K, "us": {}, "error": {}, "failed": {}, "gpu": device}


def measured(
    cell: Cell, makers: dict[str, Callable[[Cell], dict[str, Call]]], clock: Clock | HostClock | None
) -> dict[str, Any]:
    """A cell's line: each call is tested, then all are timed in turns; without a clock nothing is timed.

    Failures are recorded in the line.
    """
    result = row(cell.product, cell.T)
    graphs: dict[str, Replayed] = {}
    for peer, calls_of in makers.items():
        try:
            for name, call in calls_of(cell).items():
                y = call()
                if clock is not None:
                    error = cell.error(y, of_codes=cell.product.format in OF_CODES and peer not in OF_BF16)
                    result["error"][name] = float(f"{error:.2e}")
                    graphs[name] = clock.capture(call)
            if cell.product.device == "cuda":
                torch.cuda.synchronize()
        except Exception as error:
            result["failed"][peer] = described(error)
            if lost():
                return result
    if clock is not None:
        try:
            times = clock.rounds_us(list(graphs.values()), ROUNDS)
            result["us"] = {
                name: round(statistics.median(replays), 2) for name, replays in zip(graphs, times, strict=True)
            }
        except Exception as error:
            result["failed"]["timing"] = described(error)
        clock.release()
    return result


def measure(args: argparse.Namespace, keep: Callable[[dict[str, Any]], None]) -> int:
    """Measure every cell of the selected products in this process, until the time is up."""
    place = vllm_kernels.package(args.vllm)
    sys.path.insert(0, str(place / "third_party"))  # triton_kernels, deep_gemm
    about = provenance.about()
    until, clock = time.monotonic() + args.budget, None if args.warm else Clock()
    for product in products(args.formats, args.models):
        makers, refused = {} if args.warm else {"ours": ours(place, product, args.tokens)}, {}
        for peer, (formats, make) in PEERS.items():
            if product.format in formats and peer in args.peers and time.monotonic() < until:
                try:
                    makers[peer] = make(place, product, args.tokens)
                except Exception as error:
                    refused[peer] = described(error)
        for T in args.tokens:
            if time.monotonic() > until:
                print(f"time is up before {product.model} {product.gemm} at {T} tokens", flush=True)
                return 0
            result = measured(Cell(product, T), makers, clock)
            result["failed"] |= refused
            keep(result | {"run": about})
            if lost():
                return DEAD
        makers.clear()
        torch.cuda.empty_cache()
    return 0


def pairs(args: argparse.Namespace) -> list[tuple[str, str]]:
    """The selected formats, each with its models."""
    return [
        (format, model)
        for format in args.formats
        for model in models_of(format)
        if model in (args.models or MODELS[format])
    ]


def in_processes(args: argparse.Namespace) -> None:
    """Measure each model in a process of its own, after parallel processes have compiled what the libraries need."""
    until = time.monotonic() + args.budget
    each, tokens = pairs(args), ",".join(map(str, args.tokens))

    def process(format: str, model: str, peers: Sequence[str], seconds: float, *more: str) -> None:
        words = {
            "--vllm": args.vllm,
            "--out": args.out,
            "--formats": format,
            "--models": model,
            "--peers": ",".join(peers),
            "--tokens": tokens,
            "--budget": f"{seconds:.0f}",
        }
        asked = [str(word) for pair in words.items() for word in pair]
        try:
            done = subprocess.run(
                [sys.executable, str(RUN), "beside_quantised", "--append", *asked, *more],
                check=False,
                timeout=seconds + 20,
            )
        except subprocess.TimeoutExpired:
            print(f"{format} {model} {' '.join(more)}: stopped, its time was up", flush=True)
        else:
            if done.returncode:
                print(f"{format} {model} {' '.join(more)}: its process ended with {done.returncode}", flush=True)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        for format, model in each:
            for peer in args.peers:
                if format in PEERS[peer][0]:
                    pool.submit(process, format, model, [peer], args.budget * WARMING, "--warm")
    print(f"warm: {until - time.monotonic():.0f} s are left", flush=True)
    for number, (format, model) in enumerate(each):
        left = until - time.monotonic()
        if left > 0:
            process(format, model, args.peers, left if number + 1 == len(each) else left / (len(each) - number) * 2)


def table(rows: list[dict[str, Any]]) -> list[str]:
    """A Markdown table: by tokens the mean ratio of the fastest library's time to ours, and in brackets the least.

    Then a row for each library by itself, for each format. Means are geometric.
    """
    tokens = sorted({row["tokens"] for row in rows})
    lines = ["| tokens | " + " | ".join(f"{T:,}" for T in tokens) + " |", "|---" * (len(tokens) + 1) + "|"]
    kinds: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        kinds.setdefault("int4" if row["format"] in INT4 else row["format"], []).append(row)
    for kind, here in kinds.items():
        models = ", ".join(dict.fromkeys(row["model"] for row in here))
        peers_here = dict.fromkeys(peer_of(name) for row in here for name in row["us"] if peer_of(name) is not None)
        for label, peers in (
            (f"{kind}: {models}", list(peers_here)),
            *((f"{kind}: {peer}", [peer]) for peer in peers_here),
        ):
            lines.append(f"| {label} | " + " | ".join(said(here, T, peers) for T in tokens) + " |")
    return lines


def peer_of(name: str) -> str | None:
    """The library in a call's name, such as ``marlin (padded to ...)``; None for ours."""
    return None if name.startswith("ours") else name.split(" ")[0]


def said(rows: list[dict[str, Any]], T: int, peers: list[Any]) -> str:
    """A table cell's text: the mean and least ratio at T tokens, over the cells that these libraries and ours have."""
    ratios = []
    for row in rows:
        others = [us for name, us in row["us"].items() if peer_of(name) in peers]
        mine = row["us"].get("ours, of codes", row["us"].get("ours"))
        if row["tokens"] == T and others and mine:
            ratios.append(min(others) / mine)
    if not ratios:
        return "-"
    return f"{math.exp(statistics.fmean(map(math.log, ratios))):.2f} ({min(ratios):.2f})"


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--vllm", type=Path, help="where vLLM's wheel is unpacked")
    parser.add_argument("--out", type=Path, help="the file to write, a line a cell")
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--models", help="some of the formats', or flagships: recent models; default: all but these")
    parser.add_argument("--peers", default=",".join(PEERS))
    parser.add_argument("--tokens", default=TOKENS)
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds after which no cell begins")
    parser.add_argument("--append", action="store_true", help="add to the file")
    parser.add_argument("--warm", action="store_true", help="run each call once and time nothing: libraries compile")
    parser.add_argument("--table", type=Path, help="print the table of a file, and measure nothing")
    args = parser.parse_args(argv)
    models = [model for format in FORMATS for model in models_of(format)]
    if args.models == "flagships":
        args.models = ",".join(model for flagships in FLAGSHIPS.values() for model in flagships)
    for name, there in (("formats", FORMATS), ("models", models), ("peers", PEERS)):
        asked = getattr(args, name)
        for word in asked.split(",") if asked else ():
            if word not in there:
                parser.error(f"--{name}: {word!r} is none of {', '.join(dict.fromkeys(there))}")
        setattr(args, name, asked.split(",") if asked else None)
    if not args.table and not (args.vllm and args.out):
        parser.error("--vllm and --out are needed, or --table")
    args.tokens = [int(T) for T in args.tokens.split(",")]
    return args


def main(argv: list[str] | None = None) -> int:
    """Measure the cells, writing a line for each, and print the table."""
    args = arguments(argv)
    if args.table:
        print("\n".join(table([json.loads(line) for line in args.table.read_text().splitlines()])))
        return 0
    if not args.append:
        args.out.write_text("")
    if len(pairs(args)) > 1 and not args.warm:
        in_processes(args)
        rows = [json.loads(line) for line in args.out.read_text().splitlines()]
        print("\n".join(table(rows)), flush=True)
        return 0 if any(row["us"] for row in rows) else 1

    with args.out.open("a") if not args.warm else contextlib.nullcontext() as out:

        def keep(result: dict[str, Any]) -> None:
            if out is not None:
                out.write(json.dumps(result) + "\n")
                out.flush()
            said = (result[word] for word in ("format", "model", "gemm", "tokens", "us", "error", "failed"))
            print(*said, flush=True)

        return measure(args, keep)
