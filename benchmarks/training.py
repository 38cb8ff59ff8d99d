"""Proof of training on a GPU: every form and its gradients, the same bits every time, and a loss curve.

    aot build --models models.txt --models catalogue --sm 90 --out bundles           (any machine)
    PRETUNED_BUNDLES=bundles python benchmarks/training.py --out results/training.json  (the GPU machine)

- ``cells``: the shapes of every catalogue model's two GEMMs, each once, at T = 1, 17, 128, 1000, 1024, 8192. y and
  every gradient (x, w, topk_weights, bias) against fp32, relative Frobenius error. Routing is skewed, with empty
  experts; at T = 1000 one expert has every row. Every cell runs the plain form and two of the seven fused ones, in
  turn: each shape meets each form.
- ``repeats``: all results and gradients of every form bit by bit, again and again, and from two captured training
  steps that replay on two streams at once.
- ``losses``: 50 steps of a small layer of Qwen3-MoE's shape and its router, against torch in bf16 and in fp32.

It exits 1 where anything is wrong, and names it. ``--device cpu`` runs all but the graphs on the reference, on small
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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pretuned.artifacts.store import open_bundle
from pretuned.runtime import grouped_gemm, moe_mlp, sort_routing

TOKENS = (1, 17, 128, 1000, 1024, 8192)
MAX_ERROR = 1e-2
BF16 = torch.bfloat16
STEPS = 50


@dataclass(frozen=True)
class Form:
    """What a call does beside the product."""

    permute_x: bool = False
    permute_y: bool = False
    weights: bool = False
    bias: bool = False

    def __str__(self) -> str:
        parts = {"gather": self.permute_x, "scatter": self.permute_y, "weight": self.weights, "bias": self.bias}
        return "+".join(name for name, on in parts.items() if on) or "plain"


PLAIN = Form()
FUSED = (
    Form(permute_x=True), Form(permute_y=True, weights=True), Form(permute_x=True, bias=True),
    Form(permute_y=True, weights=True, bias=True), Form(permute_x=True, weights=True), Form(permute_y=True),
    Form(permute_x=True, permute_y=True, weights=True, bias=True),
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """One GEMM of a model's layer: w [E, N, K], top_k experts a token."""

    model: str
    E: int
    N: int
    K: int
    top_k: int


def catalogue_shapes() -> list[Shape]:
    """Both GEMMs of every catalogue model; a shape that several have, once."""
    from pretuned.aot.catalogue import catalogue

    shapes: dict[tuple[int, ...], Shape] = {}
    for entry in catalogue().values():
        layer = entry.layer
        for N, K in (((2 if layer.gated else 1) * layer.I, layer.H), (layer.H, layer.I)):
            shapes.setdefault((layer.E, N, K, layer.k), Shape(entry.id, layer.E, N, K, layer.k))
    return list(shapes.values())


def routed(shape: Shape, T: int, device: str) -> torch.Tensor:
    """topk_ids [T, k], skewed by expert (exponent 0.3), some experts empty; T = 1000: one expert has every row."""
    E, k = shape.E, shape.top_k
    if T == 1000:
        return torch.full((T, k), E // 2, device=device)
    g = torch.Generator().manual_seed(T * 31 + E)
    rank = torch.randperm(E, generator=g) + 1
    logits = torch.randn(T, E, generator=g) - 0.3 * torch.log(rank.float())
    empty = E // 32 if E >= 32 else int(E >= 16)
    if empty:
        logits[:, rank > E - empty] = -50.0
    return logits.topk(k, -1).indices.to(device)


class Case:
    """One shape at one T: the tensors that its forms share, and what they should give, in fp32.

    Every form reads the same sorted rows of x and of dy, so that x @ w.T and dy @ w are computed once.
    """

    def __init__(self, shape: Shape, w: torch.Tensor, T: int, device: str) -> None:
        g = torch.Generator(device).manual_seed(T)

        def random(*sizes: int) -> torch.Tensor:
            return torch.randn(*sizes, generator=g, device=device)

        self.shape, self.T, self.w, k = shape, T, w, shape.top_k
        routing = sort_routing(routed(shape, T, device), shape.E)
        self.index, self.m_sizes = routing.gather_indices, routing.m_sizes
        self.tokens = random(T, shape.K).to(BF16)
        self.weights = torch.rand(T, k, generator=g, device=device) + 0.5
        self.bias = random(shape.E, shape.N).to(BF16)
        self.x = self.tokens[self.index // k]
        self.dy = random(T * k, shape.N).to(BF16)
        ends = self.m_sizes.cumsum(0).tolist()
        self.bounds = [(a, b) for a, b in zip([0, *ends], ends, strict=False)]
        self.y = torch.empty(T * k, shape.N, device=device)
        self.dx = torch.empty(T * k, shape.K, device=device)
        for w_e, (a, b) in zip(w, self.bounds, strict=True):
            if b > a:
                wide = w_e.float()
                torch.mm(self.x[a:b].float(), wide.T, out=self.y[a:b])
                torch.mm(self.dy[a:b].float(), wide, out=self.dx[a:b])
        self.expert = torch.repeat_interleave(torch.arange(shape.E, device=device), self.m_sizes.long())

    def inputs(self, form: Form) -> dict[str, torch.Tensor]:
        """Fresh leaves that require grad: x, w and the fused ones."""
        given = {"x": self.tokens if form.permute_x else self.x, "w": self.w}
        if form.weights:
            given["topk_weights"] = self.weights
        if form.bias:
            given["bias"] = self.bias
        return {name: one.detach().requires_grad_() for name, one in given.items()}

    def call(self, form: Form, given: dict[str, torch.Tensor]) -> torch.Tensor:
        index = self.index if form != PLAIN and form != Form(bias=True) else None
        return grouped_gemm(
            **given, m_sizes=self.m_sizes, topk=self.shape.top_k, gather_indices=index,
            permute_x=form.permute_x, permute_y=form.permute_y, fuse_mul_post=form.weights,
        )  # fmt: skip

    def run(self, form: Form) -> dict[str, torch.Tensor]:
        """y in the sorted order, and the gradient of every input."""
        given = self.inputs(form)
        y = self.call(form, given)
        dy = torch.empty_like(self.dy).index_copy_(0, self.index, self.dy) if form.permute_y else self.dy
        found = dict(zip(given, torch.autograd.grad(y, list(given.values()), dy), strict=True))
        y = y.detach()
        return {"y": y[self.index] if form.permute_y else y} | {f"d{name}": one for name, one in found.items()}

    def errors(self, form: Form, got: dict[str, torch.Tensor]) -> Iterator[tuple[str, float]]:
        """The relative error of each result."""
        k, flat = self.shape.top_k, self.weights.flatten()[self.index]
        t = flat[:, None] if form.weights else 1.0
        bias = self.bias.float()[self.expert] if form.bias else 0.0
        yield "y", difference(got["y"], (self.y + bias) * t)
        dx = self.dx * t
        if form.permute_x:
            dx = torch.empty_like(dx).index_copy_(0, self.index, dx).view(self.T, k, -1).sum(1)
        yield "dx", difference(got["dx"], dx)
        del dx
        weighted = self.dy.float() * t
        wrong = total = 0.0
        dbias = torch.zeros(self.shape.E, self.shape.N, device=weighted.device)
        for e, (a, b) in enumerate(self.bounds):
            if a == b:  # zeros, exactly
                wrong += float(got["dw"][e].float().square().sum())
                continue
            want = weighted[a:b].T @ self.x[a:b].float()
            wrong += float((got["dw"][e].float() - want).square().sum(dtype=torch.float64))
            total += float(want.square().sum(dtype=torch.float64))
            dbias[e] = weighted[a:b].sum(0)
        yield "dw", math.sqrt(wrong / total)
        if form.weights:
            dots = (self.dy.float() * (self.y + bias)).sum(-1)
            want = torch.empty_like(dots).index_copy_(0, self.index, dots).view(self.T, k)
            yield "dtopk_weights", difference(got["dtopk_weights"], want)
        if form.bias:
            yield "dbias", difference(got["dbias"], dbias)


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """||got - want|| / ||want||; NaN where anything is not finite."""
    if got.shape != want.shape:
        return math.nan
    wrong = (got.float() - want).square().sum(dtype=torch.float64)
    return float((wrong / want.square().sum(dtype=torch.float64)).sqrt())


def expert_weights(shape: Shape, device: str) -> torch.Tensor:
    """w [E, N, K] ~ N(0, 0.05), made expert by expert: DeepSeek-V3's is 15 GB."""
    g = torch.Generator(device).manual_seed(1)
    w = torch.empty(shape.E, shape.N, shape.K, dtype=BF16, device=device)
    for matrix in w:
        matrix.copy_(torch.randn(shape.N, shape.K, generator=g, device=device) * 0.05)
    return w


def cells(shapes: list[Shape], tokens: tuple[int, ...], device: str) -> dict[str, Any]:
    worst: dict[str, float] = {}
    wrong: list[str] = []
    runs: Counter[str] = Counter()
    results = 0
    for number, shape in enumerate(shapes):
        w = expert_weights(shape, device)
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
        "shapes": len(shapes), "tokens": list(tokens), "runs": dict(sorted(runs.items())), "results": results,
        "worst_error": {key: round(error, 6) for key, error in sorted(worst.items())}, "wrong": wrong,
    }  # fmt: skip


def repeats(shapes: list[Shape], T: int, device: str) -> dict[str, Any]:
    """Every form three times more; the layer's forms as two captured steps that replay at once."""
    wrong: list[str] = []
    compared = 0
    for shape in shapes:
        case = Case(shape, expert_weights(shape, device), T, device)
        for form in (PLAIN, *FUSED):
            first = case.run(form)
            for _ in range(3):
                for name, one in case.run(form).items():
                    compared += 1
                    if not torch.equal(one, first[name]):
                        wrong.append(f"{shape} {form}: {name} again")
            if device == "cuda":
                found = replayed(case, form, first)
                compared += found[0]
                wrong += [f"{shape} {form}: {name} of graph {graph}, replay {turn}" for graph, turn, name in found[1]]
    return {"shapes": len(shapes), "T": T, "compared": compared, "wrong": wrong}


def replayed(
    case: Case, form: Form, first: dict[str, torch.Tensor], replays: int = 5
) -> tuple[int, list[tuple[int, int, str]]]:
    """Two graphs of one step on two streams at once: (results compared, those with other bits)."""
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
            for one in results.values():
                one.fill_(float("nan"))
        torch.cuda.synchronize()
        for graph, stream, _ in captured:
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        for number, (_, _, results) in enumerate(captured):
            different += [(number, turn, n) for n, one in results.items() if not torch.equal(one, first[n])]
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
    """A router, E experts, a fixed target, AdamW on fp32 masters. Noise is what bf16 does to torch's own curve.

    Distances are the most that two curves are apart at any step, of the first loss.
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

    def apart(one: list[float], other: list[float]) -> float:
        return max(abs(a - b) for a, b in zip(one, other, strict=True)) / wide[0]

    distance, noise = apart(ours, theirs), apart(theirs, wide)
    wrong = [] if distance <= max(2 * noise, 1e-3) else [f"the curves are {distance} apart, bf16's noise is {noise}"]
    if not ours[-1] < 0.9 * ours[0]:
        wrong.append(f"the loss went from {ours[0]} to {ours[-1]}")
    return {
        "layer": {"T": T, "E": E, "H": H, "I": I, "top_k": k}, "ours": ours, "torch_bf16": theirs, "torch_fp32": wide,
        "most_from_torch_bf16": distance, "torch_bf16_from_fp32": noise, "wrong": wrong,
    }  # fmt: skip


def environment(device: str) -> dict[str, Any]:
    found: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    if device == "cuda":
        from pretuned.runtime import driver

        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "sm_count": properties.multi_processor_count,
                  "driver": driver.driver_version()}  # fmt: skip
    return found


def run_by() -> str:
    """What computed all of it: a proof of torch's own kernels would be none."""
    from pretuned.runtime import productlaunchers

    # (Of "gated" products None says that the plain one ran.)
    launchers = [launch for key, launch in productlaunchers._launchers[1].items() if key[0] != "gated"]
    if not launchers:
        return "reference"
    return "torch, in part" if None in launchers else "bundle"


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def kernels() -> dict[str, str]:
    """The sha256 of the source of each kernel in the bundles named: what these results are of."""
    found: dict[str, str] = {}
    for path in sorted(Path(os.environ.get("PRETUNED_BUNDLES", "/nonexistent")).glob("*.msgpack")):
        with open_bundle(path) as bundle:
            found |= {kernel.name: kernel.source_sha256.hex() for kernel in bundle.kernels}
    return found


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
        again = [Shape("Qwen/Qwen3-30B-A3B", 128, 1536, 2048, 8), Shape("Qwen/Qwen3-30B-A3B", 128, 2048, 768, 8),
                 Shape("openai/gpt-oss-20b", 32, 2880, 2880, 4)]  # fmt: skip
        layer = (1024, 16, 1024, 384, 4)
    report: dict[str, Any] = {"command": " ".join(["python", *sys.argv])}
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "repeats": lambda: repeats(again, 300, args.device),
        "cells": lambda: cells(small, tokens, args.device),
        "losses": lambda: losses(args.device, *layer),  # last: torch's own optimizer imports Triton
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


if __name__ == "__main__":
    main()
