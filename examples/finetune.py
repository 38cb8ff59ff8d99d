"""A fine-tuning loop over one MoE layer: ``moe_mlp`` is differentiable, the router learns through its weights.

On a machine without a GPU a slow torch reference computes the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import nn

from pretuned.runtime import moe_mlp, preload


class MoE(nn.Module):
    """E experts of width I behind a router that takes the k best ones for each token."""

    def __init__(self, E: int, H: int, I: int, k: int) -> None:
        super().__init__()
        self.k = k
        self.router = nn.Linear(H, E, bias=False)
        self.gate_up = nn.Parameter(torch.randn(E, 2 * I, H) * H**-0.5)
        self.down = nn.Parameter(torch.randn(E, H, I) * I**-0.5)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[T, H] -> [T, H]."""
        chosen, ids = self.router(hidden).float().topk(self.k, dim=-1)
        return moe_mlp(hidden, self.gate_up, self.down, ids, chosen.softmax(-1), "silu")


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Fit the layer to a fixed target; returns the loss of each step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args(arguments)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    E, H, I, k, T = (128, 2048, 768, 8, 4096) if device == "cuda" else (4, 32, 16, 2, 64)

    preload(models=["Qwen/Qwen3-30B-A3B"], tokens=range(T, T + 1))  # optional: no step waits for a kernel
    layer = MoE(E, H, I, k).to(device, torch.bfloat16)
    hidden = torch.randn(T, H, device=device, dtype=torch.bfloat16)
    target = torch.randn(T, H, device=device) * 0.1
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2, weight_decay=0.0)
    losses = []
    for step in range(args.steps):
        loss = (layer(hidden).float() - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        print(f"step {step}: loss {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
