"""Time the batch-invariant mode against the free choice, and against vLLM's kernel with its invariant tile.

    python benchmarks/run.py batch_invariant --vllm vllm-0.20.2 --out batch-invariant-h100.json    # 100 s
    python benchmarks/run.py batch_invariant --formats bf16,mxfp4 --tokens 1,128 --out some.json

Forward products through the public call, in CUDA graphs that take turns. ``free`` is without the mode, ``mode`` with
PRETUNED_BATCH_INVARIANT=1; of fp8 ``always`` is with PRETUNED_BATCH_INVARIANT=quantize_x. ``vllm`` is its Triton kernel
with the tile of VLLM_BATCH_INVARIANT=1, of bf16 and fp8, where its wheel was unpacked: x's codes lie ready outside its
time, and so does each row's expert. Every result is compared with float32. The file is complete after each
cell; products that the budget leaves no time for are named. (tests/gpu/test_batch_invariant.py compares the bits.)
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import method, provenance
from benchmarks.peers import vllm_kernels, w8a8
from benchmarks.peers.products import OF_CODES, Cell, Product, models_of
from pretuned.aot.measure.clock import Clock
from pretuned.runtime import batch_invariant, grouped_gemm

PLAIN = {model[0]: model[1:] for model in method.MODELS}
MODELS: Mapping[str, tuple[str, ...]] = {
    "bf16": ("qwen3-30b", "gpt-oss-20b", "mixtral-8x7b", "qwen3-next"),
    "mxfp4": ("gpt-oss-20b",),
    "fp8_block": ("qwen3-30b", "qwen3-235b"),
    "fp8_channel": ("qwen3-30b",),
    "int4_g128": ("qwen3-30b",),
    "int4_g128_zp": ("qwen3-30b",),
}
TOKENS = (1, 16, 128, 1024, 8192)
FREE, MODE, ALWAYS, VLLM = "free", "mode", "always", "vllm"
MOST_MEAN, MOST = 1.03, 1.10  # limits of (time in the mode) / (time without it)
ROUNDS = 15
Call = Callable[[], torch.Tensor]


def within(block: Callable[[], Any], call: Call) -> Call:
    def run() -> torch.Tensor:
        with block():
            return call()

    return run


def modes(format: str) -> dict[str, Callable[[], Any]]:
    """Return the context managers of a format's modes, by name."""
    blocks: dict[str, Callable[[], Any]] = {FREE: partial(batch_invariant, False), MODE: batch_invariant}
    return blocks | ({ALWAYS: partial(batch_invariant, quantize_x=True)} if format in OF_CODES else {})


def sizes_of(format: str, model: str) -> tuple[int, int, int, int]:
    """Return E, H, I and top_k of a model."""
    return PLAIN[model] if format == "bf16" else models_of(format)[model]


def plain_calls(model: str, gemm: str, theirs: Any) -> Callable[[int], tuple[dict[str, Call], Callable[..., float]]]:
    """Return a function of T that makes the bf16 calls, and the function that computes a result's error."""
    E, H, width, top_k = sizes_of("bf16", model)
    N, K = (2 * width, H) if gemm == "gate_up" else (H, width)
    w = method.weights(E, N, K, torch.bfloat16)

    def at(T: int) -> tuple[dict[str, Call], Callable[..., float]]:
        x = method.activations(T * top_k, K, torch.bfloat16)
        inputs = method.Inputs(x, w, method.routed_rows(E, top_k, T).cuda())
        call = partial(grouped_gemm, x, w, inputs.m_sizes)
        calls = {name: within(block, call) for name, block in modes("bf16").items()}
        if theirs is not None:
            config = theirs.fused_moe["get_default_config"](T, E, width, K, top_k, None)
            calls[VLLM] = theirs.vllm(inputs, config)
        return calls, lambda y, _name: method.relative_error(y, inputs)

    return at


def coded_calls(product: Product, place: Path | None) -> Callable[[int], tuple[dict[str, Call], Callable[..., float]]]:
    """Return a function of T that makes the calls of quantised weights, and the function for a result's error."""
    theirs = None
    if place is not None and product.format in OF_CODES:
        theirs = w8a8.vllm(place, product, [], invariant=True)

    def at(T: int) -> tuple[dict[str, Call], Callable[..., float]]:
        cell = Cell(product, T)
        call = partial(grouped_gemm, cell.x, product.weights, cell.m_sizes)
        calls = {name: within(block, call) for name, block in modes(product.format).items()}
        if theirs is not None:
            (calls[VLLM],) = theirs(cell).values()

        def error(y: torch.Tensor, name: str) -> float:
            kinds = {MODE: (False,), FREE: (False, True)}.get(name, (True,)) if ALWAYS in calls else (False,)
            return min(cell.error(y, of_codes=kind) for kind in kinds)

        return calls, error

    return at


def cells(args: argparse.Namespace) -> Iterator[tuple[dict[str, Any], Callable[[], Any]]]:
    """Yield each product's line without times, and the function that makes its calls."""
    place = None if args.vllm is None else vllm_kernels.package(args.vllm)
    theirs = None if place is None else vllm_kernels.FusedMoe(place, invariant=True)
    for format in args.formats:
        for model in MODELS[format]:
            E, H, width, top_k = sizes_of(format, model)
            for gemm, N, K in (("gate_up", 2 * width, H), ("down", H, width)):
                row = {"format": format, "model": model, "gemm": gemm, "E": E, "N": N, "K": K, "top_k": top_k}
                if format == "bf16":
                    yield row, partial(plain_calls, model, gemm, theirs)
                else:
                    yield row, partial(coded_calls, Product(format, model, gemm, E, N, K, width, top_k), place)


def measured(clock: Clock, calls: Mapping[str, Call], error: Callable[..., float]) -> dict[str, Any]:
    """Return errors, and times in turns; calls that fail are listed and left out."""
    result: dict[str, Any] = {"us": {}, "error": {}, "failed": {}}
    graphs = {}
    for name, call in calls.items():
        try:
            result["error"][name] = float(f"{error(call(), name):.2e}")
            graphs[name] = clock.capture(call)
        except Exception as fault:  # another library's, compiled here
            result["failed"][name] = f"{type(fault).__name__}: {' '.join(str(fault).split())[:300]}"
    times = clock.rounds_us([*graphs.values()], ROUNDS)
    result["us"] = {name: round(statistics.median(replays), 2) for name, replays in zip(graphs, times, strict=True)}
    clock.release()
    return result


def mean(values: Iterable[float]) -> float:
    """Return the geometric mean; 1 if there are no values."""
    logs = [math.log(value) for value in values]
    return math.exp(math.fsum(logs) / len(logs)) if logs else 1.0


def ratios(rows: Iterable[Mapping[str, Any]], over: str, under: str) -> list[float]:
    """Return the ratio of two calls' times for the cells that have both calls."""
    return [row["us"][over] / row["us"][under] for row in rows if over in row["us"] and under in row["us"]]


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """By format: mode / free, for fp8 also always / free; then the time of vLLM's kernel over the mode's time."""
    lines = []
    formats = dict.fromkeys(row["format"] for row in rows)
    for format in formats:
        some = [row for row in rows if row["format"] == format]
        for name in (MODE, ALWAYS):
            quotients = ratios(some, name, FREE)
            if quotients:
                over = sum(quotient > MOST for quotient in quotients)
                line = f"mean {mean(quotients):.3f}, worst {max(quotients):.2f}, "
                line += f"over {MOST:.2f}: {over} of {len(quotients)}"
                lines.append(f"{format:14} {name:6} / free   {line}")
    plain = [row for row in rows if row["format"] not in OF_CODES]
    plain_ratios = ratios(plain, MODE, FREE)
    lines.append(f"all but fp8    mode   / free   mean {mean(plain_ratios):.3f} (wanted at most {MOST_MEAN:.2f})")
    for format in formats:
        for T in sorted({row["tokens"] for row in rows}):
            some = [row for row in rows if row["format"] == format and row["tokens"] == T]
            for name in (MODE, ALWAYS):
                quotients = ratios(some, VLLM, name)
                if quotients:
                    lines.append(f"{format:14} vllm   / {name:6} T={T:<5} mean {mean(quotients):.2f}")
        quotients = ratios([row for row in rows if row["format"] == format], VLLM, MODE)
        if quotients:
            lines.append(f"{format:14} vllm   / mode   all T    mean {mean(quotients):.2f}")
    return lines


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("batch-invariant.json"))
    parser.add_argument("--vllm", type=Path, help="where vLLM's wheel was unpacked; without it vLLM is left out")
    parser.add_argument("--formats", type=lambda text: text.split(","), default=[*MODELS])
    parser.add_argument("--tokens", type=lambda text: [int(count) for count in text.split(",")], default=[*TOKENS])
    parser.add_argument("--budget", type=float, default=100.0, help="seconds, after which no cell begins (default 100)")
    args = parser.parse_args(argv)
    unknown = sorted(set(args.formats) - set(MODELS))
    if unknown:
        parser.error(f"--formats: {', '.join(unknown)} is none of {', '.join(MODELS)}")
    try:
        products = [*cells(args)]
    except (FileNotFoundError, ValueError, ImportError) as error:
        parser.error(str(error))
    if not torch.cuda.is_available():
        sys.exit("batch_invariant: no CUDA device here")
    head, rows, clock = provenance.about(), [], Clock()
    until, left = time.monotonic() + args.budget, []
    for row, make in products:
        if time.monotonic() > until:
            left.append(f"{row['format']} {row['model']} {row['gemm']}")
            continue
        at = make()
        for T in args.tokens:
            calls, error = at(T)
            rows.append(row | {"tokens": T} | measured(clock, calls, error))
            us = "  ".join(f"{name} {time_us:8.1f} us" for name, time_us in rows[-1]["us"].items())
            print(f"{row['format']:13} {row['model']:12} {row['gemm']:8} T={T:<5} {us}  {rows[-1]['failed'] or ''}")
            sys.stdout.flush()
            args.out.write_text(json.dumps({**head, "cells": rows}, indent=1) + "\n")
        del at, calls, error
        torch.cuda.empty_cache()
    print("\n".join(summary(rows)))
    if left:
        print(f"no time was left for: {', '.join(left)}")
    off = [row for row in rows for name, value in row["error"].items() if value > method.MAX_ERROR and name != VLLM]
    return 1 if off else 0


if __name__ == "__main__":
    sys.exit(main())
