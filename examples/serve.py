"""A serving loop: everything is loaded before the first request, and each size of a step is one CUDA graph.

On a machine without a GPU a slow torch reference computes each step, without graphs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch

from pretuned.runtime import moe_mlp, preload

MODEL = "Qwen/Qwen3-30B-A3B"
SIZES = (1, 8, 64)  # tokens of a step: a batch is padded to the next of them


def layer(E: int, H: int, I: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The experts' weights, [E, 2I, H] and [E, H, I] bf16; random, in place of a checkpoint's."""
    gate_up = torch.randn(E, 2 * I, H, device=device, dtype=torch.bfloat16) * H**-0.5
    down = torch.randn(E, H, I, device=device, dtype=torch.bfloat16) * I**-0.5
    return gate_up, down


def step_of(T: int, weights: tuple[torch.Tensor, torch.Tensor], k: int) -> Callable[..., torch.Tensor]:
    """A step of T tokens: hidden [T, H], ids [T, k], routing weights [T, k] -> [T, H]."""
    gate_up, down = weights
    E, H, device = gate_up.shape[0], gate_up.shape[2], gate_up.device
    hidden = torch.zeros(
        T, H, device=device, dtype=torch.bfloat16
    )  # a graph reads and writes the same memory each time
    ids = torch.arange(T * k, device=device).reshape(T, k) % E
    routing = torch.full((T, k), 1 / k, device=device)

    def run() -> torch.Tensor:
        return moe_mlp(hidden, gate_up, down, ids, routing, "silu")

    if device.type == "cpu":

        def eager(*args: torch.Tensor) -> torch.Tensor:
            for kept, value in zip((hidden, ids, routing), args, strict=True):
                kept.copy_(value)
            return run()

        return eager

    side = torch.cuda.Stream()  # what is captured has run once before, on a stream of its own
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()

    def replay(*args: torch.Tensor) -> torch.Tensor:
        for kept, value in zip((hidden, ids, routing), args, strict=True):
            kept.copy_(value)
        graph.replay()
        return out

    return replay


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve a few steps of random tokens, and say what they came to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args(arguments)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    E, H, I, k = (128, 2048, 768, 8) if device == "cuda" else (8, 64, 32, 2)

    loaded = preload(models=[MODEL], tokens=range(1, max(SIZES) + 1))  # no later call loads anything
    print(f"{loaded.count} kernels are loaded in {loaded.seconds:.2f} s")
    weights = layer(E, H, I, device)
    router = torch.randn(E, H, device=device, dtype=torch.bfloat16) * H**-0.5
    steps = {T: step_of(T, weights, k) for T in SIZES}

    generator = torch.Generator().manual_seed(0)
    for _ in range(args.steps):
        T = int(torch.randint(1, max(SIZES) + 1, (), generator=generator))  # requests that wait
        size = next(size for size in SIZES if size >= T)
        hidden = torch.zeros(size, H, device=device, dtype=torch.bfloat16)
        hidden[:T] = torch.randn(T, H, generator=generator).to(device, torch.bfloat16)
        chosen, ids = (hidden @ router.T).float().topk(k, dim=-1)
        out = steps[size](hidden, ids, chosen.softmax(-1))[:T]
        print(f"{T} tokens in a step of {size}: mean square {out.float().square().mean().item():.4f}")


if __name__ == "__main__":
    main()
