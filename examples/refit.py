"""A refit loop on one GPU: a layer learns in bf16, and its quantised twin gets the new weights in place.

So does a rollout engine in reinforcement learning. Addresses stay: the CUDA graph that samples is captured once. On a
machine without a GPU torch computes the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch
from torch import nn

from pretuned.runtime import ExpertWeights, moe_mlp


def sampler(call: Callable[[], torch.Tensor], device: str) -> Callable[[], torch.Tensor]:
    """A function that runs ``call``; on a GPU the replay of one graph."""
    out = call()
    if device == "cpu":
        return call
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()

    def replay() -> torch.Tensor:
        graph.replay()
        return out

    return replay


def main(arguments: Sequence[str] | None = None) -> list[tuple[float, float]]:
    """Train and refit; returns for each step the trainer's loss, and the twin's after it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--format", default="fp8_block")
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    E, H, I, k, T = (128, 2048, 768, 8, 512) if device == "cuda" else (4, 128, 128, 2, 32)

    gate_up = nn.Parameter((torch.randn(E, 2 * I, H, device=device) * H**-0.5).bfloat16())
    down = nn.Parameter((torch.randn(E, H, I, device=device) * I**-0.5).bfloat16())
    hidden = torch.randn(T, H, device=device).bfloat16()
    target = torch.randn(T, H, device=device) * 0.1
    chosen, ids = torch.randn(T, E, device=device).topk(k, dim=-1)
    weights = chosen.softmax(-1)
    optimizer = torch.optim.AdamW((gate_up, down), lr=1e-2, weight_decay=0.0)

    twin = [ExpertWeights.quantize(w.detach(), args.format).prepare() for w in (gate_up, down)]
    sample = sampler(lambda: moe_mlp(hidden, *twin, ids, weights, "silu"), device)
    losses = []
    for step in range(args.steps):
        loss = (moe_mlp(hidden, gate_up, down, ids, weights, "silu").float() - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for held, w in zip(twin, (gate_up, down), strict=True):
            held.copy_(w)  # check=False leaves out the search for NaN
        sampled = (sample().float() - target).square().mean()
        losses.append((loss.item(), sampled.item()))
        print(f"step {step}: loss {losses[-1][0]:.4f}, of the {args.format} twin {losses[-1][1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
