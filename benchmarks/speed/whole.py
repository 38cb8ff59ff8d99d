"""Whole models of transformers, their experts computed by pretuned and in transformers' own ways, in turns.

    pip install 'transformers>=5.8'
    python benchmarks/run.py whole --out benchmarks/results/whole-h200.json
    python benchmarks/run.py whole --models tiny --layers 1 --out tiny.json      # seconds, on any machine

The sizes of each model's layers are its own; of the layers there are ``--layers``, of the vocabulary 1,024 words, and
the weights are random, bf16. Wall-clock times of eager calls, as a user makes them: a forward without gradients over a
batch of sequences (of one token each: a step of decoding, but for the cache), and from 1,024 tokens on the forward and
backward of a training step. Medians of the rounds, with the same model without experts ("none"). Each way's logits
are compared with those of grouped_mm token by token, by the median: a rounding may send a token to other experts.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import provenance
from pretuned.integrations.transformers import experts_forward

SHAPES: dict[str, tuple[str, dict[str, int]]] = {  # transformers' kind of model, and its sizes
    "qwen3-30b": (
        "qwen3_moe",
        {
            "hidden_size": 2048,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
        },
    ),
    "mixtral-8x7b": (
        "mixtral",
        {
            "hidden_size": 4096,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": 14336,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
    ),
    "gpt-oss-20b": (
        "gpt_oss",
        {
            "hidden_size": 2880,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "intermediate_size": 2880,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
        },
    ),
    "olmoe": (
        "olmoe",
        {
            "hidden_size": 2048,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "intermediate_size": 1024,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
        },
    ),
    "tiny": (
        "qwen3_moe",
        {
            "hidden_size": 64,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
        },
    ),
}
BATCHES = ((1, 1), (16, 1), (128, 1), (1, 1024), (4, 2048))  # sequences, tokens of each
OURS, BESIDE, NONE = "pretuned", ("grouped_mm", "batched_mm", "eager"), "none"
MANY_TOKENS = 1024
MOST_COPIED = 8e9  # elements: batched_mm copies an expert's weights for each slot
MAX_DIFFERENCE = 2e-2


def no_experts(self: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """A replacement for a layer's experts that does nothing, to time the rest of the layer."""
    return hidden * weights[:, :1].to(hidden.dtype)


def make_model(library: Any, name: str, layers: int, device: str) -> Any:
    kind, sizes = SHAPES[name]
    config = library.AutoConfig.for_model(
        kind, num_hidden_layers=layers, vocab_size=1024, pad_token_id=0, bos_token_id=1, eos_token_id=2, **sizes
    )
    with torch.device(device):
        return library.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train(False)


def medians_us(model: Any, ways: list[str], call: Callable[[], Any], device: str, rounds: int) -> dict[str, float]:
    """Wall-clock medians in microseconds of the call with the experts computed in each way, the ways in turns."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    times: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(rounds + 2):
        for name in ways:
            model.set_experts_implementation(name)
            wait()
            start = time.perf_counter()
            call()
            wait()
            if i > 1:
                times[name].append(1e6 * (time.perf_counter() - start))
    return {name: statistics.median(row) for name, row in times.items()}


def measure(library: Any, name: str, layers: int, device: str, rounds: int) -> list[dict[str, Any]]:
    model = make_model(library, name, layers, device)
    sizes = SHAPES[name][1]
    width = sizes.get("moe_intermediate_size") or sizes["intermediate_size"]
    copied = sizes["num_experts_per_tok"] * 3 * sizes["hidden_size"] * width  # for each token
    cells = []

    def run(ids: torch.Tensor, learns: bool) -> torch.Tensor:
        with torch.set_grad_enabled(learns):
            logits: torch.Tensor = model(ids, use_cache=False).logits
            if learns:
                model.zero_grad()
                logits.float().square().mean().backward()
        return logits.detach().flatten(0, -2)

    def logits_of(how: str, ids: torch.Tensor) -> torch.Tensor:
        model.set_experts_implementation(how)
        return run(ids, False).float()

    for sequences, length in BATCHES:
        T = sequences * length
        ids = torch.randint(3, 1024, (sequences, length), generator=torch.Generator().manual_seed(T)).to(device)
        ways = [how for how in (OURS, *BESIDE) if how != "batched_mm" or T * copied <= MOST_COPIED]
        want = logits_of("grouped_mm", ids)
        differences = {how: difference(logits_of(how, ids), want) for how in ways}
        times = 1 if T >= MANY_TOKENS else 5  # with few tokens the host's time dominates, and it scatters
        for learns in (False, True) if T >= MANY_TOKENS else (False,):
            us = medians_us(model, [*ways, NONE], functools.partial(run, ids, learns), device, times * rounds)
            cells.append(
                {
                    "model": name,
                    "layers": layers,
                    "sequences": sequences,
                    "length": length,
                    "training": learns,
                    "us": us,
                    "differences": differences,
                }
            )
            print(line(cells[-1]), flush=True)
    return cells


def difference(logits: torch.Tensor, want: torch.Tensor) -> float:
    """The relative difference of the median token's logits."""
    return float(((logits - want).norm(dim=-1) / want.norm(dim=-1)).median())


def others(cell: dict[str, Any]) -> float:
    """The differences between transformers' own ways."""
    return max((value for how, value in cell["differences"].items() if how != OURS), default=0.0)


def line(cell: dict[str, Any]) -> str:
    us = cell["us"]
    ratios = {how: us[how] / us[OURS] for how in us if how != OURS}
    what = "training" if cell["training"] else "forward"
    where = f"{cell['model']:13}{cell['sequences']:4} x {cell['length']:<5}{what:9}"
    return f"{where}{us[OURS]:10.0f} us   {beside(ratios)}"


def beside(ratios: dict[str, float]) -> str:
    """Each way's time over ours."""
    others = [f"{ratio:.2f} x {how}" for how, ratio in ratios.items() if how != NONE]
    return ", ".join([*others, f"without experts {ratios[NONE]:.2f} of it"])


def summary(cells: list[dict[str, Any]]) -> list[str]:
    lines = []
    for sequences, length, training in dict.fromkeys((c["sequences"], c["length"], c["training"]) for c in cells):
        some = [c["us"] for c in cells if (c["sequences"], c["length"], c["training"]) == (sequences, length, training)]
        means = {
            how: math.exp(statistics.fmean(math.log(us[how] / us[OURS]) for us in some))
            for how in (*BESIDE, NONE)
            if all(how in us for us in some)
        }
        what = "training" if training else "forward"
        lines.append(f"{sequences:4} x {length:<5}{what:9}{beside(means)}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", default="qwen3-30b,mixtral-8x7b,gpt-oss-20b,olmoe")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7, help=f"below {MANY_TOKENS} tokens five times as many")
    args = parser.parse_args()
    try:
        import transformers
        from transformers.integrations.moe import ExpertsInterface
    except ImportError as error:
        sys.exit(f"whole: {error}: pip install 'transformers>=5.8'")
    ExpertsInterface.register(OURS, experts_forward)
    ExpertsInterface.register(NONE, no_experts)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    begun, cells, lines = time.time(), [], []
    for name in args.models.split(","):
        cells += measure(transformers, name, args.layers, device, args.rounds)
        if device == "cuda":
            torch.cuda.empty_cache()
        lines = summary(cells)
        report = {
            **provenance.about(),
            "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "seconds": round(time.time() - begun, 1),
            "summary": lines,
            "cells": cells,
        }
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    print("\n".join(("", *lines)))
    wrong = [c for c in cells if not c["differences"][OURS] < max(MAX_DIFFERENCE, 2 * others(c))]
    sys.exit(f"{len(wrong)} cells differ from grouped_mm's" if wrong else 0)
