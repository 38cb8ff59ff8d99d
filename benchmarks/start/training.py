"""Check training on a GPU: all fusions and their gradients, equal bits in each run, and a loss curve.

    aot build --models models.txt --models catalogue --sm 90 --out bundles           (any machine)
    PRETUNED_BUNDLES=bundles python benchmarks/run.py training --out results/training.json  (the GPU machine)

- ``cells``: the shapes of every catalogue model's two GEMMs, each once, at T = 1, 17, 128, 1000, 1024, 8192. y and
  every gradient (x, w, topk_weights, bias) against fp32, relative Frobenius error. Routing is skewed, with empty
  experts; at T = 1000 one expert has every row. Every cell runs the plain form and two of the seven fused ones, in
  turn: each shape meets each form.
- ``repeats``: all results and gradients of every form bit by bit, again and again, and from two captured training
  steps that replay on two streams at once.
- ``losses``: 50 steps of a small layer of Qwen3-MoE's shape and its router, against torch in bf16 and in fp32.

It exits 1 if anything is wrong, and names it. ``--device cpu`` runs all but the graphs on the reference, on small
shapes: a check of this script.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import method, provenance
from benchmarks.start.cases import BF16, FUSED, PLAIN, Case, Form, Shape, catalogue_shapes
from pretuned.artifacts.bundle_file import open_bundle
from pretuned.runtime import moe_mlp

TOKENS = (1, 17, 128, 1000, 1024, 8192)
MAX_ERROR = 1e-2
STEPS = 50


def cells(shapes: list[Shape], tokens: tuple[int, ...], device: str) -> dict[str, Any]:
    worst: dict[str, float] = {}
    wrong: list[str] = []
    runs: Counter[str] = Counter()
    results = 0
    for number, shape in enumerate(shapes):
        w = method.weights(shape.E, shape.N, shape.K, BF16, device)
        for at, T in enumerate(tokens):
            case = Case(shape, w, T, device)
            first = 2 * at + number
            for form in (PLAIN, FUSED[first % len(FUSED)], FUSED[(first + 1) % len(FUSED)]):
                got = case.run(form)
                runs[str(form)] += 1
                for name, error in case.errors(form, got):
                    key = f"{form}: {name}"
                    results += 1
                    worst[key] = max(worst.get(key, 0.0), error) if error == error else math.nan
                    if not error < MAX_ERROR:
                        wrong.append(f"{shape} T={T} {key}: {error}")
                del got
            del case
        del w
        if device == "cuda":
            torch.cuda.empty_cache()
        say(f"{number + 1}/{len(shapes)} {shape.model} {shape.E}x{shape.N}x{shape.K}: worst {max(worst.values()):.2e}")
    return {
        "shapes": len(shapes),
        "tokens": list(tokens),
        "runs": dict(sorted(runs.items())),
        "results": results,
        "worst_error": {key: round(error, 6) for key, error in sorted(worst.items())},
        "wrong": wrong,
    }


def repeats(shapes: list[Shape], T: int, device: str) -> dict[str, Any]:
    """Run every form three more times, and the layer's forms as two captured steps that replay at the same time."""
    wrong: list[str] = []
    compared = 0
    for shape in shapes:
        case = Case(shape, method.weights(shape.E, shape.N, shape.K, BF16, device), T, device)
        for form in (PLAIN, *FUSED):
            first = case.run(form)
            for _ in range(3):
                for name, result in case.run(form).items():
                    compared += 1
                    if not torch.equal(result, first[name]):
                        wrong.append(f"{shape} {form}: {name} again")
            if device == "cuda":
                replays = replayed(case, form, first)
                compared += replays[0]
                wrong += [f"{shape} {form}: {name} of graph {graph}, replay {turn}" for graph, turn, name in replays[1]]
    return {"shapes": len(shapes), "T": T, "compared": compared, "wrong": wrong}


def replayed(
    case: Case, form: Form, first: dict[str, torch.Tensor], replays: int = 5
) -> tuple[int, list[tuple[int, int, str]]]:
    """Replay two graphs of one step on two streams at once; return (results compared, results with other bits)."""
    captured = []
    for _ in range(2):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            case.run(form)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            results = case.run(form)
        captured.append((graph, stream, results))
    different = []
    for turn in range(replays):
        for _, _, results in captured:
            for result in results.values():
                result.fill_(float("nan"))
        torch.cuda.synchronize()
        for graph, stream, _ in captured:
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for number, (_, _, results) in enumerate(captured):
            different += [(number, turn, n) for n, result in results.items() if not torch.equal(result, first[n])]
    return replays * len(captured) * len(first), different


def torch_experts(
    hidden: torch.Tensor, up: torch.Tensor, down: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The layer in plain torch, an expert at a time."""
    out = torch.zeros_like(hidden, dtype=torch.float32)
    for e in range(up.shape[0]):
        token, slot = (ids == e).nonzero(as_tuple=True)
        gate, value = (hidden[token] @ up[e].T).chunk(2, -1)
        y = (torch.nn.functional.silu(gate.float()) * value.float()).to(hidden.dtype) @ down[e].T
        out = out.index_add(0, token, y.float() * weights[token, slot][:, None])
    return out.to(hidden.dtype)


def losses(device: str, T: int, E: int, H: int, I: int, k: int) -> dict[str, Any]:  # noqa: E741
    """Train a router and E experts on a fixed target with AdamW on fp32 masters. Noise is bf16's effect in torch.

    Distances are the largest differences of two curves at any step, relative to the first loss.
    """
    g = torch.Generator(device).manual_seed(21)
    data = torch.randn(T, H, device=device, generator=g)
    target = torch.randn(T, H, device=device, generator=g).mul(0.5).sin()

    def train(experts: Callable[..., torch.Tensor], dtype: torch.dtype) -> list[float]:
        own = torch.Generator(device).manual_seed(22)
        shapes = ((E, H), (E, 2 * I, H), (E, H, I))
        router, up, down = (
            (torch.randn(*shape, device=device, generator=own) * shape[-1] ** -0.5).requires_grad_() for shape in shapes
        )
        optimizer = torch.optim.AdamW([router, up, down], lr=5e-4)
        curve = []
        for _ in range(STEPS):
            chosen, ids = (data @ router.T).topk(k, dim=-1)
            y = experts(data.to(dtype), up.to(dtype), down.to(dtype), ids, chosen.softmax(-1))
            loss = (y.float() - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            curve.append(loss.item())
        return curve

    ours, theirs, wide = train(moe_mlp, BF16), train(torch_experts, BF16), train(torch_experts, torch.float32)

    def apart(a_curve: list[float], b_curve: list[float]) -> float:
        return max(abs(a - b) for a, b in zip(a_curve, b_curve, strict=True)) / wide[0]

    distance, noise = apart(ours, theirs), apart(theirs, wide)
    wrong = [] if distance <= max(2 * noise, 1e-3) else [f"the curves are {distance} apart, bf16's noise is {noise}"]
    if not ours[-1] < 0.9 * ours[0]:
        wrong.append(f"the loss went from {ours[0]} to {ours[-1]}")
    return {
        "layer": {"T": T, "E": E, "H": H, "I": I, "top_k": k},
        "ours": ours,
        "torch_bf16": theirs,
        "torch_fp32": wide,
        "most_from_torch_bf16": distance,
        "torch_bf16_from_fp32": noise,
        "wrong": wrong,
    }


def environment(device: str) -> dict[str, Any]:
    facts: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    if device == "cuda":
        from pretuned.runtime.driver import cuda

        properties = torch.cuda.get_device_properties(0)
        facts |= {"gpu": properties.name, "sm_count": properties.multi_processor_count, "driver": cuda.driver_version()}
    return facts


def run_by() -> str:
    """Return what computed the results: this benchmark must not test torch's own kernels."""
    from pretuned.runtime.dispatch import snapshot

    # For "gated" products None says that the kernel without silu ran.
    launchers = [launch for key, launch in snapshot.snapshot().launchers.items() if key[0] != "gated"]
    if not launchers:
        return "reference"
    return "torch, in part" if None in launchers else "bundle"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def kernels() -> dict[str, str]:
    """The sha256 of the source of each kernel in the bundles used, to identify the tested kernels."""
    digests: dict[str, str] = {}
    for path in sorted(Path(os.environ.get("PRETUNED_BUNDLES", "/nonexistent")).glob("*.msgpack")):
        with open_bundle(path) as bundle:
            digests |= {kernel.name: kernel.source_sha256.hex() for kernel in bundle.kernels}
    return digests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--every", type=int, default=1, help="take every n-th shape alone")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    begun = time.perf_counter()
    if args.device == "cpu":
        small = [Shape("small", 20, 24, 16, 3), Shape("small", 4, 16, 32, 2), Shape("odd", 5, 9, 7, 1)]
        tokens, again, layer = (1, 17, 1000), small[:1], (64, 8, 32, 16, 2)
    else:
        small = catalogue_shapes()[:: args.every]
        tokens = TOKENS
        again = [
            Shape("Qwen/Qwen3-30B-A3B", 128, 1536, 2048, 8),
            Shape("Qwen/Qwen3-30B-A3B", 128, 2048, 768, 8),
            Shape("openai/gpt-oss-20b", 32, 2880, 2880, 4),
        ]
        layer = (1024, 16, 1024, 384, 4)
    report: dict[str, Any] = {"command": " ".join(["python", *sys.argv])}
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "repeats": lambda: repeats(again, 300, args.device),
        "cells": lambda: cells(small, tokens, args.device),
        "losses": lambda: losses(args.device, *layer),  # last, because torch's optimizer imports Triton
    }
    triton_imported = False
    for name, part in parts.items():
        triton_imported = "triton" in sys.modules
        start = time.perf_counter()
        report[name] = part() | {"seconds": round(time.perf_counter() - start, 1)}
        shown = {key: value for key, value in report[name].items() if not key.startswith(("ours", "torch_"))}
        print(f"{name}: {json.dumps(shown)}", flush=True)
    report["run_by"] = run_by()
    report["kernels"] = kernels()
    report = provenance.about() | report
    report["environment"] = environment(args.device) | {"seconds": round(time.perf_counter() - begun, 1)}
    wrong = list(itertools.chain(*(report[name]["wrong"] for name in parts)))
    if report["run_by"] != ("reference" if args.device == "cpu" else "bundle"):
        wrong.append(f"run by {report['run_by']}: PRETUNED_BUNDLES names no bundle with all of it for this GPU")
    report["triton_imported"] = triton_imported
    if triton_imported:
        wrong.append("triton was imported")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    if wrong:
        sys.exit("\n".join([f"{len(wrong)} wrong:", *wrong[:20]]))
