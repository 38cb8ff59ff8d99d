"""Times one MoE block with LoRA adapters on both products, forward and backward: ms and peak memory.

    python benchmarks/run.py lora --json lora-h100.json
    python benchmarks/run.py lora --json qlora-h100.json --model gpt-oss-20b --weights mxfp4
    python benchmarks/run.py lora --json - --sizes 8,64,32,2 --tokens 64 --rounds 1      # any machine: does it run

The experts are frozen; hidden, the routing weights, A and B have gradients. Four ways to compute the same:

- ``frozen``: ``moe_mlp`` without adapters, the baseline of the others;
- ``ours``: ``moe_mlp(..., lora=...)``;
- ``torch``: by hand, ``torch._grouped_mm`` for W, A and B, as a careful user would write it;
- ``whole``: W + s B A of every expert made in every step (``torch.baddbmm``, as PEFT does), then ``moe_mlp``.

With ``--weights`` the experts are quantised, and two more compute with them; the four above have them in bf16:

- ``codes``: ``moe_mlp(..., lora=...)`` of the codes, forward and backward;
- ``dequantised``: both matrices made bf16 in every step (``ExpertWeights.dequantize``), then as ``ours``.

On a GPU by CUDA events, eagerly, the ways in turns, the median; the peak is what a step allocates above what lies
there before it (weights, adapters, inputs), of one step alone. out and dA, dB of the last three are compared first.
``--profile`` adds what one step of ``frozen``, of ``ours`` and of ``codes`` is made of: its kernels in their order, us.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType
from torch.nn.functional import silu
from torch.profiler import ProfilerActivity, profile

from benchmarks import provenance
from benchmarks.method import MODELS
from pretuned.runtime import ExpertWeights, Lora, moe_mlp

MAX_DIFFERENCE = 3e-2  # of two bf16 layers or their gradients, relative
WAYS = ("frozen", "ours", "torch", "whole")
QUANTISED = ("codes", "dequantised")
FORMATS = ("fp8_block_a16", "fp8_channel_a16", "mxfp4", "nvfp4", "int4_g32", "int4_g64", "int4_g128")


class Block(NamedTuple):
    """The tensors of a block: gate_up [E, 2*I, H], down [E, H, I], the adapters of both; both also quantised."""

    gate_up: torch.Tensor
    down: torch.Tensor
    first: Lora
    second: Lora
    codes: tuple[ExpertWeights, ExpertWeights] | None = None


class Step(NamedTuple):
    """The inputs of a step: hidden [T, H], ids and weights [T, k]."""

    hidden: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    dout: torch.Tensor


def frozen(block: Block, step: Step) -> torch.Tensor:
    return moe_mlp(step.hidden, block.gate_up, block.down, step.ids, step.weights)


def ours(block: Block, step: Step) -> torch.Tensor:
    lora = block.first, block.second
    return moe_mlp(step.hidden, block.gate_up, block.down, step.ids, step.weights, lora=lora)


def by_hand(block: Block, step: Step) -> torch.Tensor:
    """The block written in torch."""
    T, top_k = step.ids.shape
    order = step.ids.reshape(-1).argsort(stable=True)
    counts = torch.bincount(step.ids.reshape(-1), minlength=block.gate_up.shape[0])
    ends = counts.cumsum(0).to(torch.int32)

    def product(x: torch.Tensor, w: torch.Tensor, lora: Lora) -> torch.Tensor:
        low = torch._grouped_mm(x, lora.A.transpose(1, 2), offs=ends) * lora.scale
        y = torch._grouped_mm(x, w.transpose(1, 2), offs=ends)
        return y + torch._grouped_mm(low, lora.B.transpose(1, 2), offs=ends)

    gate, up = product(step.hidden[order // top_k], block.gate_up, block.first).chunk(2, dim=-1)
    y = product(silu(gate) * up, block.down, block.second)
    y = torch.empty_like(y).index_copy(0, order, y)
    return (y.view(T, top_k, -1).float() * step.weights[:, :, None]).sum(1).to(step.hidden.dtype)


def whole(block: Block, step: Step) -> torch.Tensor:
    adapters = (block.gate_up, block.first), (block.down, block.second)
    gate_up, down = (torch.baddbmm(w, adapter.B, adapter.A, alpha=adapter.scale) for w, adapter in adapters)
    return moe_mlp(step.hidden, gate_up, down, step.ids, step.weights)


def codes(block: Block, step: Step) -> torch.Tensor:
    assert block.codes is not None
    return moe_mlp(step.hidden, *block.codes, step.ids, step.weights, lora=(block.first, block.second))


def dequantised(block: Block, step: Step) -> torch.Tensor:
    assert block.codes is not None
    gate_up, down = (codes.dequantize(torch.bfloat16) for codes in block.codes)
    return moe_mlp(step.hidden, gate_up, down, step.ids, step.weights, lora=(block.first, block.second))


LAYERS: dict[str, Callable[[Block, Step], torch.Tensor]] = dict(
    zip((*WAYS, *QUANTISED), (frozen, ours, by_hand, whole, codes, dequantised), strict=True)
)


def make_block(sizes: tuple[int, int, int], r: int, device: str, weights: str | None) -> Block:
    E, H, I = sizes  # noqa: E741
    torch.manual_seed(0)

    def random(*shape: int, spread: float = 1.0) -> torch.Tensor:
        return (spread * torch.randn(shape, device=device)).to(torch.bfloat16)

    first = Lora(random(E, r, H, spread=H**-0.5), random(E, 2 * I, r, spread=0.1), 2.0)
    second = Lora(random(E, r, I, spread=I**-0.5), random(E, H, r, spread=0.1), 2.0)
    for matrix in (*first[:2], *second[:2]):
        matrix.requires_grad_()
    gate_up, down = random(E, 2 * I, H, spread=H**-0.5), random(E, H, I, spread=I**-0.5)
    if weights is None:
        return Block(gate_up, down, first, second)
    both = tuple(ExpertWeights.quantize(w, weights).prepare() for w in (gate_up, down))
    for quantised, w in zip(both, (gate_up, down), strict=True):  # dequantise: equal numbers in bf16
        w.copy_(quantised.dequantize(w.dtype))
    return Block(gate_up, down, first, second, (both[0], both[1]))


def step_of(sizes: tuple[int, int, int], T: int, top_k: int, device: str) -> Step:
    E, H, _ = sizes
    g = torch.Generator().manual_seed(T * 31 + E)
    logits = torch.randn(T, E, generator=g) - 0.3 * torch.log(torch.randperm(E, generator=g) + 1.0)
    weights, ids = logits.softmax(-1).topk(top_k, -1)
    hidden, dout = (torch.randn(T, H, generator=g).to(device, torch.bfloat16) for _ in range(2))
    return Step(hidden.requires_grad_(), ids.to(device), weights.to(device).requires_grad_(), dout)


def gradients(way: str, block: Block, step: Step) -> list[torch.Tensor]:
    """The result and the gradients of a way's leaves."""
    leaves = [step.hidden, step.weights, *(() if way == "frozen" else (*block.first[:2], *block.second[:2]))]
    out = LAYERS[way](block, step)
    return [out.detach(), *torch.autograd.grad(out, leaves, step.dout)]


def off(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


def ms_of(calls: dict[str, Callable[[], object]], rounds: int, cuda: bool) -> dict[str, float]:
    """Median times of calls that take turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for number in range(rounds + 2):
        for i in range(len(names)):
            name = names[(i + number) % len(names)]
            if cuda:
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                torch.cuda.synchronize()
                start.record()
                calls[name]()
                end.record()
                torch.cuda.synchronize()
                took = start.elapsed_time(end)
            else:
                begun = time.perf_counter()
                calls[name]()
                took = 1e3 * (time.perf_counter() - begun)
            if number >= 2:
                times[name].append(took)
    return {name: statistics.median(row) for name, row in times.items()}


def peak_gb(call: Callable[[], object]) -> float:
    """Return the peak memory that a call adds to what is allocated before, in GB (1e9 bytes)."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e9


def kernels_of(call: Callable[[], object]) -> list[tuple[str, float]]:
    """The GPU kernels of a call, by name, with their time in us."""
    with profile(activities=[ProfilerActivity.CUDA]) as watched:
        call()
        torch.cuda.synchronize()
    ran = [event for event in watched.events() or () if event.device_type == DeviceType.CUDA]
    return [
        (event.name, event.time_range.elapsed_us()) for event in sorted(ran, key=lambda event: event.time_range.start)
    ]


def measure(
    sizes: tuple[int, int, int],
    top_k: int,
    T: int,
    r: int,
    rounds: int,
    device: str,
    weights: str | None = None,
    profiled: bool = False,
) -> dict[str, Any]:
    block, step = make_block(sizes, r, device, weights), step_of(sizes, T, top_k, device)
    ways = WAYS if weights is None else (*WAYS, *QUANTISED)
    cuda = device == "cuda"
    grads = {way: gradients(way, block, step) for way in ways[1:]}
    difference = {
        way: max(off(a, b) for a, b in zip(grads[way], grads["torch"], strict=True))
        for way in ways[1:]
        if way != "torch"
    }
    del grads
    calls = {way: (lambda way=way: gradients(way, block, step)) for way in ways}
    times = ms_of(calls, rounds, cuda)  # type: ignore[arg-type]
    peaks = {way: peak_gb(calls[way]) for way in ways} if cuda else {}
    kernels = {way: kernels_of(calls[way]) for way in (*ways[:2], *ways[4:5])} if profiled and cuda else {}
    weights_gb = sum(w.nbytes for w in block[:2]) / 1e9
    codes_gb = sum(codes.codes.nbytes + codes.scale.nbytes for codes in block.codes or ()) / 1e9
    return {
        "T": T,
        "r": r,
        "E, H, I": sizes,
        "top_k": top_k,
        "weights": weights,
        "weights_gb": weights_gb,
        "codes_gb": codes_gb,
        "ms": times,
        "peak_gb": peaks,
        "difference_from_torch": difference,
        **({"kernels": kernels} if kernels else {}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True, help="the file to write, - for standard output")
    parser.add_argument("--model", default="qwen3-30b", choices=[model[0] for model in MODELS])
    parser.add_argument("--sizes", help="E,H,I,top_k instead of a model's")
    parser.add_argument("--weights", choices=FORMATS, help="quantise the experts, and time two ways more")
    parser.add_argument("--tokens", default="1024,8192")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--profile", action="store_true", help="also what one step is made of (on a GPU)")
    args = parser.parse_args()
    if args.sizes:
        E, H, I, top_k = map(int, args.sizes.split(","))  # noqa: E741
    else:
        E, H, I, top_k = next(model[1:] for model in MODELS if model[0] == args.model)  # noqa: E741
    device = "cuda" if torch.cuda.is_available() else "cpu"
    cells = []
    for T in map(int, args.tokens.split(",")):
        cell = measure((E, H, I), top_k, T, args.rank, args.rounds, device, args.weights, args.profile)
        cells.append(cell)
        base = cell["ms"]["frozen"]
        for way in cell["ms"]:
            peak = f", peak {cell['peak_gb'][way]:.2f} GB" if cell["peak_gb"] else ""
            line = f"T={T:<5} {way:11} {cell['ms'][way]:8.2f} ms, {cell['ms'][way] / base:.2f} x frozen{peak}"
            print(line, file=sys.stderr, flush=True)
    report = {
        **provenance.about(),
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "torch": torch.__version__,
        "cells": cells,
    }
    text = json.dumps(report, indent=1) + "\n"
    if args.json == "-":
        print(text, end="")
    else:
        Path(args.json).write_text(text)
    wrong = [
        difference
        for cell in cells
        for difference in cell["difference_from_torch"].values()
        if not difference < MAX_DIFFERENCE
    ]
    sys.exit(f"{len(wrong)} results differ from torch" if wrong else 0)
