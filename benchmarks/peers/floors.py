"""Compares quantised products with their bounds in one process, in turns: reading their bytes, and a dense product.

    python benchmarks/run.py floors --out floors-h100.jsonl
    python benchmarks/run.py floors --table floors-h100.jsonl

The products of beside_quantised. For each, timed like the product, after the same flush:

- *read*: a kernel that reads as many bytes as the product does (w of the experts that have rows, its scales, x) and
  writes as many as y has, and nothing else. Persistent, of 1 to 8 programs an SM; the fastest counts.
- *nothing*: the same kernel with nothing to read or write: the launch, and what the flush leaves.
- *dense*: one product of torch of as many FLOPs, [M, K] by [K, N]: in bf16, of fp8 blocks in e4m3 with a scale a row.

A line of JSON a cell: median microseconds. Both need the GPU and its Triton; --table needs neither.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pretuned.aot.measure.clock import Clock, HostClock
from pretuned.runtime import grouped_gemm

from . import w8a8
from .products import MODELS, Call, Cell, products
from .targets import TARGETS, TOKENS, bytes_of

FORMATS = ("mxfp4", "fp8_block", "int4_g32", "int4_g128")
ROUNDS = 15
PER_SM = (1, 2, 4, 8)  # programs


def dense(cell: Cell) -> Call:
    """A call of one torch product of as many FLOPs."""
    w = torch.empty(cell.N, cell.K, device=cell.device, dtype=torch.bfloat16).normal_()
    if cell.product.format != "fp8_block":
        return partial(torch.mm, cell.x, w.T)
    scales = [torch.ones(shape, device=cell.device) for shape in ((cell.M, 1), (1, cell.N))]
    x, codes = cell.x.to(torch.float8_e4m3fn), w.to(torch.float8_e4m3fn)
    return partial(torch._scaled_mm, x, codes.T, *scales, out_dtype=torch.bfloat16)


def calls_of(cell: Cell, of_codes: Callable[[Cell], dict[str, Call]] | None, sms: int) -> dict[str, Call]:
    """Our call, then the calls that bound it."""
    calls: dict[str, Call] = {"ours": partial(grouped_gemm, cell.x, cell.product.weights, cell.m_sizes)}
    calls |= {} if of_codes is None else of_codes(cell)
    read, written = bytes_of(cell.product.format, (cell.E, cell.N, cell.K), cell.T, cell.product.top_k)
    from .stream import reader  # here, as --table needs no Triton

    for per in PER_SM:
        calls[f"read {per}"] = reader(read, written, cell.device, per * sms)
    calls["nothing"] = reader(0, 0, cell.device, sms)
    calls["dense"] = dense(cell)
    return calls


def measured(cell: Cell, calls: dict[str, Call], clock: Clock | HostClock) -> dict[str, Any]:
    """A cell's line: all calls in turns. Failures are recorded."""
    product = cell.product
    result: dict[str, Any] = {
        "format": product.format,
        "model": product.model,
        "gemm": product.gemm,
        "tokens": cell.T,
        "us": {},
        "failed": {},
        "gpu": torch.cuda.get_device_name() if cell.device == "cuda" else cell.device,
    }
    graphs = {}
    for name, call in calls.items():
        try:
            graphs[name] = clock.capture(call)
        except Exception as error:
            result["failed"][name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    times = clock.rounds_us(list(graphs.values()), ROUNDS)
    result["us"] = {name: round(statistics.median(replays), 2) for name, replays in zip(graphs, times, strict=True)}
    clock.release()
    return result


def table(rows: list[dict[str, Any]]) -> list[str]:
    """A Markdown table by format and tokens: geometric means of the bounds' times over ours (of codes, if timed)."""
    lines = ["| format, tokens | read, of ours | nothing, us | dense, of ours |", "|---" * 4 + "|"]
    for kind in TARGETS:
        for tokens in TOKENS:
            here = [row for row in rows if row["tokens"] == tokens and row["format"].startswith(kind.split()[0])]
            if here:
                read = [min(us for name, us in row["us"].items() if name.startswith("read")) for row in here]
                ours = [row["us"].get("ours, of codes", row["us"]["ours"]) for row in here]
                by = statistics.geometric_mean(a / b for a, b in zip(read, ours, strict=True))
                same = [row["us"]["dense"] / us for row, us in zip(here, ours, strict=True) if "dense" in row["us"]]
                product = f"{statistics.geometric_mean(same):.2f}" if same else "-"
                nothing = statistics.median(row["us"]["nothing"] for row in here)
                lines.append(f"| {kind}, {tokens:,} | {by:.2f} | {nothing:.1f} | {product} |")
    return lines


def measure(args: argparse.Namespace) -> int:
    """Measure every cell of the products, until the time is up."""
    until, clock = time.monotonic() + args.budget, Clock()
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    with args.out.open("w") as out:
        for product in products(list(FORMATS), args.models):
            of_codes = w8a8.ours(Path(), product, list(TOKENS)) if product.format == "fp8_block" else None
            for T in TOKENS:
                if time.monotonic() > until:
                    print(f"time is up before {product.model} {product.gemm} at {T} tokens", flush=True)
                    return 0
                cell = Cell(product, T)
                result = measured(cell, calls_of(cell, of_codes, sms), clock)
                out.write(json.dumps(result) + "\n")
                out.flush()
                print(*result.values(), flush=True)
                torch.cuda.empty_cache()
    return 0


def main(argv: list[str] | None = None) -> int:
    """Measure the cells, writing a line for each, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--out", type=Path, help="the file to write, a line a cell")
    parser.add_argument("--models", type=lambda text: text.split(","), help="some of them; default: all")
    parser.add_argument("--budget", type=float, default=170.0, help="seconds after which no cell begins")
    parser.add_argument("--table", type=Path, help="print the table of a file, and measure nothing")
    args = parser.parse_args(argv)
    names = {model for models in MODELS.values() for model in models}
    if wrong := set(args.models or ()) - names:
        parser.error(f"--models: {sorted(wrong)[0]!r} is none of {', '.join(sorted(names))}")
    if not args.table and not args.out:
        parser.error("--out is needed, or --table")
    code = 0 if args.table else measure(args)
    rows = [json.loads(line) for line in (args.table or args.out).read_text().splitlines()]
    print("\n".join(table(rows)), flush=True)
    return code
