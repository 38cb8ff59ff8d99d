"""Times a whole MoE layer, from hidden states to hidden states, against the same layer written with torch.

    python benchmarks/run.py layer --out layer-h200.json

``pretuned.runtime.moe_mlp`` against: a stable sort of the routing, x gathered, torch grouped_mm, silu(gate) * up,
grouped_mm, rows weighted and summed by token. With ``--compile`` the torch layer also runs under ``torch.compile``. The
forward (no gradients) in CUDA graphs that take turns, L2 flushed; forward and backward together run eagerly, timed by
events, in turns. The results of all are compared first. gpt-oss runs with silu and without biases here.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import silu

from benchmarks import method, provenance
from benchmarks.method import MODELS
from benchmarks.speed.kernels import geometric_mean, in_turns
from pretuned.runtime import moe_mlp

TOKENS = (1, 16, 128, 1024, 8192)
MAX_DIFFERENCE = 2e-2  # of two bf16 layers, relative


def torch_layer(
    hidden: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The layer in torch, written as a careful user would."""
    T, top_k = ids.shape
    order = ids.reshape(-1).argsort(stable=True)
    counts = torch.zeros(gate_up.shape[0], dtype=torch.int32, device=hidden.device)
    counts.index_add_(0, ids.reshape(-1), torch.ones_like(order, dtype=torch.int32))
    ends = counts.cumsum(0).to(torch.int32)
    x = hidden[order // top_k]
    gate, up = torch._grouped_mm(x, gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    y = torch._grouped_mm(silu(gate) * up, down.transpose(1, 2), offs=ends)
    out = torch.empty_like(y).index_copy(0, order, y) if y.requires_grad else torch.empty_like(y)
    if not y.requires_grad:
        out[order] = y
    return (out.view(T, top_k, -1).float() * weights[:, :, None]).sum(1).to(hidden.dtype)


def eager_us(calls: list[Callable[[], object]], rounds: int) -> list[float]:
    """Median times of calls that take turns, by CUDA events."""
    times: list[list[float]] = [[] for _ in calls]
    for call in calls:
        call()
        call()
    for number in range(rounds):
        for i in range(len(calls)):
            which = (i + number) % len(calls)
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            start.record()
            calls[which]()
            end.record()
            torch.cuda.synchronize()
            times[which].append(1000 * start.elapsed_time(end))
    return [statistics.median(row) for row in times]


def step(layer: Callable[..., torch.Tensor], tensors: list[torch.Tensor], ids: torch.Tensor) -> Callable[[], None]:
    """One forward and backward of the layer."""
    hidden, gate_up, down, weights = (tensor.detach().clone().requires_grad_() for tensor in tensors)
    dout = torch.randn_like(hidden)

    def run() -> None:
        for tensor in (hidden, gate_up, down, weights):
            tensor.grad = None
        layer(hidden, gate_up, down, ids, weights).backward(dout)

    return run


def compared(name: str, call: Callable[[], torch.Tensor], want: torch.Tensor, cell: dict[str, Any]) -> bool:
    """Return True if a baseline runs and computes the same; else the cell says why it has no time."""
    try:
        off = float((call().float() - want.float()).norm() / want.float().norm())
    except Exception as error:
        cell[f"{name}_failed"] = f"{type(error).__name__}: {str(error)[:200]}"
        return False
    if off < MAX_DIFFERENCE:
        return True
    cell[f"{name}_failed"] = f"off by {off:.1e}"
    return False


def measure(models: list[str], *, compile: bool = False) -> list[dict[str, Any]]:
    clock, cells = method.Clock(), []
    compiled_layer = torch.compile(torch_layer, dynamic=False) if compile else None
    for name, E, H, width, top_k in MODELS:
        if name not in models:
            continue
        gate_up = method.weights(E, 2 * width, H, torch.bfloat16)
        down = method.weights(E, H, width, torch.bfloat16)
        for T in TOKENS:
            g = torch.Generator().manual_seed(T * 31 + E)
            logits = torch.randn(T, E, generator=g) - 0.3 * torch.log(torch.randperm(E, generator=g) + 1.0)
            weights, ids = logits.softmax(-1).topk(top_k, -1)
            weights, ids = weights.cuda(), ids.cuda()
            hidden = method.activations(T, H, torch.bfloat16)
            with torch.no_grad():
                operands = hidden, gate_up, down, ids, weights
                ours, torchs = functools.partial(moe_mlp, *operands), functools.partial(torch_layer, *operands)
                want = torchs()
                difference = float((ours().float() - want.float()).norm() / want.float().norm())
                cell: dict[str, Any] = {"model": name, "tokens": T, "difference": difference}
                calls: list[Callable[[], torch.Tensor]] = [ours, torchs]
                if compiled_layer is not None:
                    compiled = functools.partial(compiled_layer, *operands)
                    if compared("compiled", compiled, want, cell):
                        calls.append(compiled)
                ours_us, torch_us, *others = in_turns(clock, *calls)
                cell |= {"forward_us": ours_us, "torch_forward_us": torch_us}
                cell |= {"compiled_forward_us": others[0]} if others else {}
            if T >= 1024 and gate_up.numel() < 6e9:
                tensors = [hidden, gate_up, down, weights]
                steps = [step(moe_mlp, tensors, ids), step(torch_layer, tensors, ids)]
                cell["step_us"], cell["torch_step_us"] = eager_us(steps, 7)
                del steps, tensors
            cells.append(cell)
            more = f", step x {cell['torch_step_us'] / cell['step_us']:.2f}" if "step_us" in cell else ""
            print(f"{name:13} T={T:<5} {ours_us:9.1f} us, torch x {torch_us / ours_us:.2f}{more}", flush=True)
        del gate_up, down
        torch.cuda.empty_cache()
    return cells


def summary(cells: list[dict[str, Any]]) -> list[str]:
    """For each number of tokens the mean and the lowest ratio, with the model of the lowest."""
    lines = []
    for T in TOKENS:
        some, parts = [cell for cell in cells if cell["tokens"] == T], []
        for title, theirs, ours in (
            ("forward x torch", "torch_forward_us", "forward_us"),
            ("forward x torch.compile", "compiled_forward_us", "forward_us"),
            ("forward + backward x torch", "torch_step_us", "step_us"),
        ):
            ratios = {cell["model"]: cell[theirs] / cell[ours] for cell in some if theirs in cell}
            if ratios:
                lowest = min(ratios, key=ratios.__getitem__)
                mean = geometric_mean(ratios.values())
                parts.append(f"{title} {mean:.2f} (lowest {ratios[lowest]:.2f}, {lowest})")
        if parts:
            lines.append(f"T={T:<5} " + "   ".join(parts))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", default=",".join(model[0] for model in MODELS))
    parser.add_argument("--compile", action="store_true", help="time the torch layer under torch.compile, too")
    args = parser.parse_args()
    begun = time.time()
    cells = measure(args.models.split(","), compile=args.compile)
    lines = summary(cells)
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
    wrong = [c for c in cells if not c["difference"] < MAX_DIFFERENCE]
    sys.exit(f"{len(wrong)} cells differ from torch" if wrong else 0)
