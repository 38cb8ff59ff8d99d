"""Times one layer of transformers with attention, its experts with PEFT's LoRA, forward and backward: ms, peak memory.

    python benchmarks/run.py lora_layer --json lora-layer-h100.json
    python benchmarks/run.py lora_layer --json - --sizes 8,64,32,2 --tokens 64 --rounds 1    # any machine: does it run

Everything is frozen but A and B of both expert parameters (PEFT's ``target_parameters``) and the layer's input. Four
ways, which share the weights:

- ``frozen``: no adapters, experts on pretuned, the baseline of the others;
- ``ours``: PEFT's adapters, experts on pretuned, which recognises them;
- ``whole``: the same, but read as PEFT makes them, W + s B A of every expert;
- ``grouped_mm``: PEFT's adapters over transformers' own grouped_mm.

On a GPU by CUDA events, eagerly, the ways in turns, the median; the peak is that of a step alone, with the layer's
weights and the way's adapters. The hidden states and the gradients of the last three are compared first.
``--profile`` adds what one step of ``frozen`` and of ``ours`` is made of: its kernels in their order, us.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import provenance
from benchmarks.method import MODELS
from benchmarks.speed.lora import MAX_DIFFERENCE, kernels_of, ms_of, off, peak_gb

WAYS = {"frozen": "pretuned", "ours": "pretuned", "whole": "pretuned", "grouped_mm": "grouped_mm"}
# Each model's type in transformers, and its attention's sizes.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-30b": ("qwen3_moe", {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}),
    "gpt-oss-20b": ("gpt_oss", {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64}),
}


class Layer(NamedTuple):
    """A module of one layer, and its trainable tensors by name."""

    model: Any
    learns: dict[str, torch.Tensor]


def config_of(name: str, sizes: tuple[int, int, int], top_k: int) -> Any:
    import transformers

    kind, attention = KINDS[name]
    E, H, I = sizes  # noqa: E741
    fields = attention | {"vocab_size": 64, "num_hidden_layers": 1, "hidden_size": H, "num_experts_per_tok": top_k}
    fields |= {"num_experts": E, "num_local_experts": E, "moe_intermediate_size": I, "intermediate_size": I}
    if H < 1024:  # a small size for tests
        fields |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    return transformers.AutoConfig.for_model(kind, pad_token_id=0, bos_token_id=1, eos_token_id=2, **fields)


def make_layers(config: Any, r: int, device: str) -> dict[str, Layer]:
    """The layer for each way; all share the weights' tensors."""
    import peft
    import transformers

    from pretuned.integrations.transformers import register

    register()
    weights: dict[str, torch.Tensor] = {}
    layers = {}
    for way, how in WAYS.items():
        own = copy.deepcopy(config)  # because a config remembers its experts' implementation
        with torch.device("meta" if weights else device):
            model = transformers.AutoModel.from_config(own, dtype=torch.bfloat16, experts_implementation=how)
        if not weights:
            torch.manual_seed(0)
            for name, parameter in model.named_parameters():
                weights[name] = torch.randn(parameter.shape, device=device, dtype=parameter.dtype).mul_(
                    parameter.shape[-1] ** -0.5
                )
            buffers = {name: buffer.to(device) for name, buffer in model.named_buffers()}
        model.load_state_dict(weights | buffers, assign=True, strict=False)
        for name, _ in list(model.named_buffers()):  # also buffers that no checkpoint has
            owner, _, last = name.rpartition(".")
            model.get_submodule(owner).register_buffer(last, buffers[name], persistent=False)
        model.requires_grad_(False)
        if way != "frozen":
            names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
            lora = {"r": r, "lora_alpha": 2 * r, "target_modules": [], "target_parameters": names}
            with torch.device(device):
                model = peft.get_peft_model(model, peft.LoraConfig(init_lora_weights=False, **lora))
        model = model.train()
        learns = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        for i, parameter in enumerate(learns.values()):
            torch.manual_seed(i)
            parameter.data.normal_(0, 0.1)
        layers[way] = Layer(model, learns)
    return layers


@contextlib.contextmanager
def reading(way: str) -> Iterator[None]:
    """In the way ``whole``, hide the adapters from pretuned, so that PEFT adds them to the weights."""
    from pretuned.integrations import transformers as ours

    adapted = ours.adapted
    if way == "whole":
        ours.adapted = lambda experts, name: (getattr(experts, name), None)
    try:
        yield
    finally:
        ours.adapted = adapted


def gradients(way: str, layer: Layer, hidden: torch.Tensor, dout: torch.Tensor) -> list[torch.Tensor]:
    """The hidden states after the layer, and the gradients of its input, A and B."""
    with reading(way):
        out = layer.model(inputs_embeds=hidden, use_cache=False).last_hidden_state
        return [out.detach(), *torch.autograd.grad(out, [hidden, *layer.learns.values()], dout)]


def measure(config: Any, T: int, r: int, rounds: int, device: str, profiled: bool = False) -> dict[str, Any]:
    layers, cuda = make_layers(config, r, device), device == "cuda"
    hidden, dout = (torch.randn(1, T, config.hidden_size, device=device).bfloat16() for _ in range(2))
    hidden.requires_grad_()
    grads = {way: gradients(way, layers[way], hidden, dout) for way in list(WAYS)[1:]}
    difference = {
        way: max(off(a, b) for a, b in zip(grads[way], grads["whole"], strict=True)) for way in ("ours", "grouped_mm")
    }
    del grads
    calls: dict[str, Callable[[], object]] = {
        way: (lambda way=way: gradients(way, layers[way], hidden, dout)) for way in WAYS
    }
    weights_gb = sum(parameter.nbytes for parameter in layers["frozen"].model.parameters()) / 1e9
    adapters_gb = sum(parameter.nbytes for parameter in layers["ours"].learns.values()) / 1e9
    steps = {way: peak_gb(calls[way]) for way in WAYS} if cuda else {}
    peaks = {way: peak + weights_gb + (0 if way == "frozen" else adapters_gb) for way, peak in steps.items()}
    times = ms_of(calls, rounds, cuda)
    kernels = {way: kernels_of(calls[way]) for way in ("frozen", "ours")} if profiled and cuda else {}
    return {
        "T": T,
        "r": r,
        "weights_gb": weights_gb,
        "adapters_gb": adapters_gb,
        "ms": times,
        "peak_gb": peaks,
        "difference_from_whole": difference,
        **({"kernels": kernels} if kernels else {}),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True, help="the file to write, - for standard output")
    parser.add_argument("--model", default="qwen3-30b", choices=list(KINDS))
    parser.add_argument("--sizes", help="E,H,I,top_k instead of a model's")
    parser.add_argument("--tokens", default="1024,8192")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--profile", action="store_true", help="also what one step is made of (on a GPU)")
    args = parser.parse_args()
    named = next(model[1:] for model in MODELS if model[0] == args.model)
    E, H, I, top_k = map(int, args.sizes.split(",")) if args.sizes else named  # noqa: E741
    device = "cuda" if torch.cuda.is_available() else "cpu"
    config, cells = config_of(args.model, (E, H, I), top_k), []
    for T in map(int, args.tokens.split(",")):
        cell = measure(config, T, args.rank, args.rounds, device, args.profile)
        cells.append(cell)
        for way in WAYS:
            peak = f", peak {cell['peak_gb'][way]:.2f} GB" if cell["peak_gb"] else ""
            ms, base = cell["ms"][way], cell["ms"]["frozen"]
            print(f"T={T:<5} {way:11} {ms:8.2f} ms, {ms / base:.2f} x frozen{peak}", file=sys.stderr, flush=True)
    report = {
        **provenance.about(),
        "gpu": torch.cuda.get_device_name() if device == "cuda" else None,
        "torch": torch.__version__,
        "model": args.model,
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
        for difference in cell["difference_from_whole"].values()
        if not difference < MAX_DIFFERENCE
    ]
    sys.exit(f"{len(wrong)} results differ" if wrong else 0)
