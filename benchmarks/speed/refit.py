"""Times new weights for a layer: bf16 quantised in place, codes prepared, restored and dequantised.

    python benchmarks/run.py refit --out refit-h100.json

Of both weights of a layer, in milliseconds by CUDA events: by row kernels, and by torch for the first model. A floor is
the time of the bytes that are read and written. ``extra_mb`` is the most memory in addition to the result; the aim is
one expert's; ``copy`` is a plain copy of w. The bits of row kernels and torch are compared: of all experts of the first
model, of the last two of others. Without a bundle that has the row kernels only torch is timed. The exit status is 1 if
something is wrong.

    quantise      out.copy_(w, check=False), w in bf16, out prepared
    checked       out.copy_(w)
    prepare       out.copy_(stored, check=False), stored in the checkpoint's layout
    load          stored.prepare(), with its check for NaN
    in_place      out.restore_in_place().prepare_in_place(), with the same check
    restore       out.restore()
    dequantise    out.dequantize()
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import provenance
from benchmarks.method import MODELS
from pretuned.artifacts.records import PRECISIONS, DType, RowOp
from pretuned.kernels import rowops
from pretuned.runtime import ExpertWeights
from pretuned.runtime.launch import rowops as launch_rowops
from pretuned.runtime.weights import writing

FORMATS = ("fp8_block", "fp8_channel", "int4_g128", "int4_g128_zp", "int4_g32", "mxfp4", "mxfp8", "nvfp4")
FIRST = "qwen3-30b"  # the model for which torch is timed
ROUNDS = 7
WARM_S = 1.0
BYTES_PER_S = 3.0e12  # rate of a large copy on an H100
Call = Callable[[], object]


def times_ms(call: Call, rounds: int) -> float:
    """The median of some runs, each between two events, after a warm-up run."""
    call()
    results = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        results.append(begin.elapsed_time(end))
    return statistics.median(results)


def awake(seconds: float) -> None:
    """Copy memory for some time: in a cold process the first cell would be slower than others."""
    memory = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    begun = time.monotonic()
    while time.monotonic() - begun < seconds:
        memory[: 1 << 27].copy_(memory[1 << 27 :])
        torch.cuda.synchronize()


def numbers(E: int, N: int, K: int, seed: int) -> torch.Tensor:
    w = torch.empty(E, N, K, dtype=torch.bfloat16, device="cuda")
    g = torch.Generator("cuda").manual_seed(seed)
    for of_expert in w:
        of_expert.normal_(0, 0.02, generator=g)
    return w


def calls(weights: list[tuple[torch.Tensor, ExpertWeights, ExpertWeights]]) -> dict[str, Call]:
    """The calls to time, by name, on (w, weights in the checkpoint's layout, prepared weights) of both products."""

    def each(call: Callable[[torch.Tensor, ExpertWeights, ExpertWeights], object]) -> Call:
        def run() -> None:
            for matrices in weights:
                call(*matrices)

        return run

    return {
        "quantise": each(lambda w, stored, out: out.copy_(w, check=False)),
        "checked": each(lambda w, stored, out: out.copy_(w)),
        "prepare": each(lambda w, stored, out: out.copy_(stored, check=False)),
        "load": each(lambda w, stored, out: ExpertWeights(stored.format, *stored._quantised).prepare()),
        "in_place": each(lambda w, stored, out: out.restore_in_place().prepare_in_place()),
        "restore": each(lambda w, stored, out: out.restore()),
        "dequantise": each(lambda w, stored, out: out.dequantize()),
    }


def floors_ms(format: str, w: list[torch.Tensor]) -> dict[str, float]:
    """The time to move each call's bytes. nvfp4 is read twice, as its outer scale depends on a whole expert."""
    wide = sum(tensor.numel() * 2 for tensor in w)
    narrow = sum(matrix.shape[0] * PRECISIONS[format].w_bytes(*matrix.shape[1:]) for matrix in w)
    passes = 2 if format == "nvfp4" else 1
    moved = {
        "quantise": passes * wide + narrow,
        "checked": (passes + 1) * wide + narrow,
        "prepare": 2 * narrow,
        "load": 2 * narrow,
        "in_place": 4 * narrow,
        "restore": 2 * narrow,
        "dequantise": wide + narrow,
    }
    return {name: 1e3 * count / BYTES_PER_S for name, count in moved.items()}


def extra_mb(call: Call, results: int) -> float:
    """The most memory that a call takes, minus its results' bytes."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return max(0, torch.cuda.max_memory_allocated() - before - results) / 1e6


def measure(models: list[str], formats: list[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """Return a cell for each model, format and call, and the faults."""
    cells, wrong = [], []
    awake(WARM_S)
    for name, E, H, width, _ in MODELS:
        if name not in models:
            continue
        plain = [numbers(E, 2 * width, H, 1), numbers(E, H, width, 2)]
        copies = [torch.empty_like(w) for w in plain]
        copy_ms = times_ms(lambda pairs=(copies, plain): [to.copy_(w) for to, w in zip(*pairs, strict=True)], ROUNDS)
        print(f"{name:13} copy {copy_ms:8.3f} ms", flush=True)
        del copies
        for format in formats:
            op = RowOp.QUANTIZE_WEIGHTS
            kept = launch_rowops.launcher(op, rowops.dtype_of(DType(format), op), 0, aligned=True)
            if kept is None:
                wrong.append(f"no bundle has the kernels of {format}: torch alone is timed")
            stored = [ExpertWeights.quantize(w, format, check=False) for w in plain]
            ready = [ExpertWeights(format, *map(_copied, matrix._quantised)).prepare() for matrix in stored]
            if not all(matrix.is_prepared for matrix in ready):
                wrong.append(f"{format} of {name} was not prepared")
                continue
            what, floors = calls(list(zip(plain, stored, ready, strict=True))), floors_ms(format, plain)
            narrow = max(matrix.nbytes for each in stored for matrix in (each.codes,))
            results = {"load": narrow, "restore": narrow, "dequantise": max(w.nbytes for w in plain)}
            expert_mb = max(w[0].nbytes for w in plain) / 1e6
            cell: dict[str, Any] = {"model": name, "format": format, "copy_ms": copy_ms, "expert_mb": expert_mb}
            for call_name, call in what.items():
                row = {"floor_ms": floors[call_name]}
                if kept is not None:
                    row["kernels_ms"] = times_ms(call, ROUNDS)
                    row["extra_mb"] = extra_mb(call, results.get(call_name, 0))
                if name == FIRST:
                    with by_torch():
                        row["torch_ms"] = times_ms(call, 1)
                cell[call_name] = row
                line = "  ".join(f"{key} {value:8.3f}" for key, value in row.items())
                print(f"{name:13} {format:13} {call_name:10} {line}", flush=True)
            if kept is not None:
                experts = slice(None) if name == FIRST else slice(-2, None)
                wrong += [f"{name}: {difference}" for difference in _differences(format, plain, stored, ready, experts)]
            cells.append(cell)
            del stored, ready, what
            torch.cuda.empty_cache()
        del plain
        torch.cuda.empty_cache()
    return cells, wrong


@contextlib.contextmanager
def by_torch() -> Iterator[None]:
    """Run without row kernels."""
    kernels, writing.kernels = writing.kernels, None
    try:
        yield
    finally:
        writing.kernels = kernels


def _copied(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.clone()


def _differences(
    format: str,
    plain: list[torch.Tensor],
    stored: list[ExpertWeights],
    ready: list[ExpertWeights],
    experts: slice,
) -> list[str]:
    """The tensors of some experts whose bits differ between row kernels and torch, in both layouts."""
    wrong = []
    for w, matrix, out in zip(plain, stored, ready, strict=True):
        out.copy_(w, check=False)
        with by_torch():
            want = ExpertWeights.quantize(w[experts], format)
            want_ready = ExpertWeights.quantize(w[experts], format).prepare()
        for what, got, other in (("stored", matrix, want), ("prepared", out, want_ready)):
            for tensor, theirs in other.tensors().items():
                if not _equal(got.tensors()[tensor][experts], theirs):
                    wrong.append(f"{format}: {what} {tensor} are not torch's")
        values = out.dequantize()[experts]
        for expert in range(want.shape[0]):
            if not torch.equal(values[expert], want.dequantize(expert=expert)):
                wrong.append(f"{format}: dequantised numbers of expert {expert} are not torch's")
        back = out.restore().tensors()
        for tensor, theirs in matrix.tensors().items():
            if not _equal(back[tensor], theirs):
                wrong.append(f"{format}: restored {tensor} are not those of the checkpoint's layout")
    return wrong


def _equal(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if the bits are equal."""
    return torch.equal(tensor.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file of the report")
    parser.add_argument("--models", default="qwen3-30b,deepseek-v3")
    parser.add_argument("--formats", default=",".join(FORMATS))
    args = parser.parse_args()
    begun = time.time()
    with torch.no_grad():
        cells, wrong = measure(args.models.split(","), args.formats.split(","))
    report = {
        **provenance.about(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "seconds": round(time.time() - begun, 1),
        "wrong": wrong,
        "cells": cells,
    }
    if args.out:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit("\n".join(wrong) or None)
