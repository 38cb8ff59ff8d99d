"""Times the layer of one rank of expert parallelism, most of whose slots are on other ranks.

    python benchmarks/run.py expert_parallel --json expert-parallel-h100.json

One rank of 8 sees T tokens and has an eighth of the experts: 7 of 8 ids are -1. ``moe_mlp`` runs with
``expected_rows`` (hint), without it (none), and on this rank's slots alone (compact): T/8 tokens whose k experts
are all on this rank. The rows of each expert are the same in all three, and so is the sum over a token's slots, which
is checked. The compact call reads an eighth of the tokens and writes an eighth of the result; one that reads and writes
as much as the others is timed, too (single): T tokens with their one slot on this rank. The weights are those of one
rank. CUDA graphs take turns, L2 flushed. The command takes at most 90 s on an H100; cells that it has no time for are
left out. It exits with 1 if a result with the hint is wrong.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import method, provenance
from benchmarks.speed.kernels import in_turns
from pretuned.aot.measure.inputs import quantised_weights
from pretuned.artifacts.records import DType
from pretuned.runtime import ExpertWeights, moe_mlp

RANKS = 8
TOKENS = (16, 128, 512, 1024, 4096, 8192)
MAX_DIFFERENCE = 2e-2  # of two bf16 layers, relative
MOST = 1.03  # limit of a time, in times of the compact call's
BUDGET_MS = 300.0  # of a cell


class Kind(NamedTuple):
    """A layer of all ranks, and the format of its weights; None for bf16."""

    name: str
    E: int
    H: int
    I: int  # noqa: E741
    top_k: int
    format: DType | None
    activation: str = "silu"
    has_bias: bool = False


KINDS = (
    Kind("Qwen3-235B bf16", 128, 4096, 1536, 8, None),
    Kind("DeepSeek-V3 fp8 blocks", 256, 7168, 2048, 8, DType.FP8_BLOCK),
    Kind("gpt-oss-120b mxfp4", 128, 2880, 2880, 4, DType.MXFP4, "swiglu_oai", True),
    Kind("Kimi-K2 int4", 384, 7168, 2048, 8, DType.INT4_G32),
)


class Calls(NamedTuple):
    """A cell's calls; each of the compact call's tokens stands for RANKS tokens of the other calls."""

    hint: Callable[[], torch.Tensor]
    none: Callable[[], torch.Tensor]
    compact: Callable[[], torch.Tensor]
    single: Callable[[], torch.Tensor]


def weights_of(kind: Kind, device: str = "cuda") -> dict[str, Any]:
    """The tensors of one rank, by ``moe_mlp``'s names."""
    E = kind.E // RANKS
    sizes = {"gate_up_weight": (E, 2 * kind.I, kind.H), "down_weight": (E, kind.H, kind.I)}
    operands: dict[str, Any] = {}
    for name, (_, N, K) in sizes.items():
        if kind.format is None:
            operands[name] = method.weights(E, N, K, torch.bfloat16, device)
        elif kind.format is DType.FP8_BLOCK:  # checkpoints in this format quantise x
            w = quantised_weights(E, N, K, kind.format, device, prepared=False)
            operands[name] = ExpertWeights.fp8_block(w.codes, w.scale).prepare()
        else:
            operands[name] = quantised_weights(E, N, K, kind.format, device)
        if kind.has_bias:
            operands[name.replace("weight", "bias")] = method.activations(E, N, torch.bfloat16, device)
    return operands


def ids_of(kind: Kind, T: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids of T tokens [T, k], all but T * k / RANKS of them -1, and the compact call's ids [T / RANKS, k].

    Slot s of the compact call's token t is slot s of one of the tokens RANKS * t to RANKS * t + RANKS - 1.
    """
    few, k = T // RANKS, kind.top_k
    g = torch.Generator().manual_seed(T * 31 + kind.E)
    E = kind.E // RANKS
    logits = torch.randn(few, E, generator=g) - 0.3 * torch.log(torch.randperm(E, generator=g) + 1.0)
    compact = logits.topk(k, -1).indices
    spread = torch.full((few, RANKS, k), -1)
    slots = torch.arange(k)
    spread[:, slots * RANKS // k, slots] = compact
    return spread.view(T, k), compact


def calls_of(kind: Kind, weights: dict[str, Any], T: int, device: str = "cuda") -> Calls:
    """The calls for T tokens."""
    many, few = ids_of(kind, T)
    x = method.activations(T // RANKS, kind.H, torch.bfloat16, device)
    share = torch.rand(few.shape, generator=torch.Generator().manual_seed(T)) + 0.5
    share = (share / share.sum(1, keepdim=True)).to(device)
    all_ranks = x.repeat_interleave(RANKS, 0), share.repeat_interleave(RANKS, 0)
    one_slot, slot = many.max(1, keepdim=True)

    def call(hidden: torch.Tensor, ids: torch.Tensor, share: torch.Tensor, **how: Any) -> Callable[[], torch.Tensor]:
        return functools.partial(
            moe_mlp,
            hidden,
            topk_ids=ids.to(device, torch.int32),
            topk_weights=share,
            activation=kind.activation,
            interleaved=kind.activation == "swiglu_oai",
            **weights,
            **how,
        )

    return Calls(
        call(all_ranks[0], many, all_ranks[1], expected_rows=few.numel()),
        call(all_ranks[0], many, all_ranks[1]),
        call(x, few, share),
        call(all_ranks[0], one_slot, all_ranks[1].gather(1, slot.to(device))),
    )


def difference(calls: Calls, which: Callable[[], torch.Tensor]) -> float:
    """The relative difference of a call's sum over RANKS tokens from the compact call's token."""
    want = calls.compact().float()
    got = which().float().view(-1, RANKS, want.shape[1]).sum(1)
    return float((got - want).norm() / want.norm())


def measure(kinds: Sequence[Kind], tokens: Sequence[int], seconds: float) -> list[dict[str, Any]]:
    """Measure a cell for each layer and number of tokens; no cell begins after so many seconds."""
    clock, begun, cells = method.Clock(), time.monotonic(), []
    for kind in kinds:
        weights = weights_of(kind)
        for T in tokens:
            if time.monotonic() - begun > seconds:
                break
            calls = calls_of(kind, weights, T)
            with torch.no_grad():
                cell: dict[str, Any] = {"model": kind.name, "tokens": T, "rows": T * kind.top_k // RANKS}
                cell |= {"difference": difference(calls, calls.hint), "none_difference": difference(calls, calls.none)}
                hint, none, compact, single = in_turns(clock, *calls, budget_ms=BUDGET_MS)
            cell |= {"hint_us": hint, "none_us": none, "compact_us": compact, "single_us": single}
            cells.append(cell)
            print(
                f"{kind.name:23} T={T:<5} compact {compact:8.1f} us, hint x {hint / compact:.3f}, "
                f"none x {none / compact:.3f}, single x {single / compact:.3f}",
                flush=True,
            )
            del calls
        del weights
        torch.cuda.empty_cache()
    return cells


def table(cells: Sequence[dict[str, Any]]) -> list[str]:
    """A Markdown table: for each layer the other calls' times over the compact call's, by tokens."""
    tokens = sorted({cell["tokens"] for cell in cells})
    lines = ["| layer | x compact | " + " | ".join(map(str, tokens)) + " |", "|---|---|" + "---|" * len(tokens)]
    for name in dict.fromkeys(cell["model"] for cell in cells):
        some = {cell["tokens"]: cell for cell in cells if cell["model"] == name}
        for way in ("hint", "none", "single"):
            ratios = [some[T][f"{way}_us"] / some[T]["compact_us"] if T in some else None for T in tokens]
            lines.append(f"| {name} | {way} | " + " | ".join("" if r is None else f"{r:.2f}" for r in ratios) + " |")
    slow = [cell for cell in cells if cell["hint_us"] > MOST * cell["compact_us"]]
    lines += ["", f"{len(cells) - len(slow)} of {len(cells)} cells at most x {MOST} of the compact call"]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--models", nargs="*", default=[kind.name for kind in KINDS], help="of the table's layers")
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS, help=f"multiples of {RANKS}")
    parser.add_argument("--seconds", type=float, default=75.0, help="no further cell is begun after so long")
    args = parser.parse_args()
    unknown = [name for name in args.models if all(name != kind.name for kind in KINDS)]
    if unknown or any(T < RANKS or T % RANKS for T in args.tokens):
        parser.error(f"wanted models of {[kind.name for kind in KINDS]} and tokens that are multiples of {RANKS}")
    begun = time.monotonic()
    cells = measure([kind for kind in KINDS if kind.name in args.models], args.tokens, args.seconds)
    lines = table(cells)
    print("\n".join(lines))
    report = {
        **provenance.about(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "seconds": round(time.monotonic() - begun, 1),
        "table": lines,
        "cells": cells,
    }
    args.json.write_text(json.dumps(report, indent=1) + "\n")
    wrong = [cell for cell in cells if not cell["difference"] < MAX_DIFFERENCE]
    sys.exit(f"{len(wrong)} results with the hint differ from those of the compact call" if wrong else 0)
