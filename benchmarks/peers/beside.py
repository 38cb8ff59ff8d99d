"""Compare another library with ours in one process: test each against fp32, then time them in turns (method.py).

Shared by beside_quack.py and beside_vllm.py. A cell is one model, GEMM, op and number of tokens; ``us`` and ``error``
have an entry each for ours, torch grouped_mm, one dense product of as many FLOPs, and each tried call of the library.
The library's fastest correct call counts.
"""

from __future__ import annotations

import json
import statistics
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from benchmarks import method
from benchmarks.speed.kernels import dense, geometric_mean
from pretuned.aot.compare.run import Call, CapturedCall, capture_call, grouped_mm, ours, replayed_error

OPS = ("forward", "dX", "dW")
OURS, TORCH, DENSE = "ours", "torch_grouped_mm", "dense_same_flops"
BEHIND = 0.97

Maker = Callable[[], Call]  # prepares a call outside the measured time


def measure_cell(
    clock: method.Clock, op: str, inputs: method.Inputs, theirs: Mapping[str, Maker], budget_ms: float = 100.0
) -> dict[str, Any]:
    """Errors and median times of a cell's calls, by name, in ``budget_ms`` each; failures are reported and left out."""
    product = dense(op, inputs)
    one_expert = replace(inputs, w=inputs.w[:1], m_sizes=torch.tensor([len(inputs.x)]))
    problems: dict[str, tuple[Maker, method.Inputs]] = {
        OURS: (lambda: ours(op, inputs), inputs),
        **{name: (maker, inputs) for name, maker in theirs.items()},
        TORCH: (lambda: grouped_mm(op, inputs), inputs),
        DENSE: (lambda: (lambda: product()[None]) if op == "dW" else product, one_expert),
    }
    kept: dict[str, CapturedCall] = {}
    error: dict[str, float] = {}
    failed: dict[str, str] = {}
    for name, (maker, of) in problems.items():
        try:
            timed = capture_call(clock, maker())
            error[name] = replayed_error(clock, timed, of, op)
        except Exception:  # another library's, compiled here: the others go on
            failed[name] = traceback.format_exc()
            torch.cuda.synchronize()  # an illegal access ends the run here
            continue
        if error[name] < method.MAX_ERROR:
            kept[name] = timed
        else:
            failed[name] = f"wrong: relative error {error[name]:.3g}"
    graphs = [call.graph for call in kept.values()]
    round_us = sum(times[-1] for times in clock.rounds_us(graphs, 2))
    rounds = max(5, min(50, int(len(graphs) * budget_ms * 1000 / max(round_us, 1.0))))
    times = clock.rounds_us(graphs, rounds)
    us = {name: statistics.median(these) for name, these in zip(kept, times, strict=True)}
    return {"rounds": rounds, "us": us, "error": error} | ({"failed": failed} if failed else {})


def judged(cell: dict[str, Any]) -> dict[str, Any]:
    """The cell with the fastest rival's time, and the ratios of other times to ours: above 1 ours is faster."""
    us = cell["us"]
    rivals = {name: time_us for name, time_us in us.items() if name not in (OURS, TORCH, DENSE)}
    ratios: dict[str, Any] = {}
    if OURS in us:
        if rivals:
            best = min(rivals, key=rivals.__getitem__)
            ratios |= {"rival": best, "rival_us": rivals[best], "ratio": rivals[best] / us[OURS]}
        ratios |= {f"{name}_ratio": us[name] / us[OURS] for name in (TORCH, DENSE) if name in us}
    return cell | ratios


def summary(cells: Sequence[dict[str, Any]], library: str) -> list[str]:
    """Geometric means by op and tokens, the cells behind the library by over 3 %, and what failed."""
    lines = []
    keys = sorted({(c["op"], c["tokens"]) for c in cells}, key=lambda k: (OPS.index(k[0]), k[1]))
    groups = [(f"{op:8} T={T:<5}", [c for c in cells if (c["op"], c["tokens"]) == (op, T)]) for op, T in keys]
    for name, some in [*groups, ("all", list(cells))]:
        means = {
            key: geometric_mean(c[key] for c in some if key in c)
            for key in ("ratio", f"{TORCH}_ratio", f"{DENSE}_ratio")
        }
        compared = [c for c in some if "ratio" in c]
        behind = sum(c["ratio"] < BEHIND for c in compared)
        lines.append(
            f"{name:16} x {library} {means['ratio']:.3f}, behind by over 3 %: {behind} of {len(compared)}   "
            f"x grouped_mm {means[f'{TORCH}_ratio']:.3f}   "
            f"of the dense product {means[f'{DENSE}_ratio']:.3f}"
        )
    for cell in sorted((c for c in cells if c.get("ratio", 1.0) < BEHIND), key=lambda c: c["ratio"]):
        lines.append(f"behind: {named(cell)} {cell['ratio']:.3f} ({cell['rival']})")
    for cell in cells:
        for name, why in cell.get("failed", {}).items():
            lines.append(f"failed: {named(cell)} {name}: {why.strip().splitlines()[-1]}")
    return lines


def named(cell: dict[str, Any]) -> str:
    return f"{cell['model']} {cell['gemm']} {cell['op']} T={cell['tokens']}"


HEADER = f"{'model':13}{'gemm':8}{'op':8}{'tokens':>6}{'ours us':>10}{'rival us':>10}{'ratio':>10}{'of dense':>10}"


def table_line(cell: dict[str, Any]) -> str:
    us = cell["us"]
    columns = [us.get(OURS), cell.get("rival_us"), cell.get("ratio"), cell.get(f"{DENSE}_ratio")]
    numbers = "".join(
        f"{'-':>10}" if value is None else f"{value:10.{places}f}"
        for value, places in zip(columns, (1, 1, 3, 3), strict=True)
    )
    return f"{cell['model']:13}{cell['gemm']:8}{cell['op']:8}{cell['tokens']:>6}{numbers}  {cell.get('rival', '-')}"


def write(out: Path, head: dict[str, Any], cells: Sequence[dict[str, Any]], begun: float, library: str) -> None:
    report = head | {"seconds": round(time.time() - begun, 1), "summary": summary(cells, library), "cells": list(cells)}
    temp = out.with_name(f".{out.name}.tmp")
    temp.write_text(json.dumps(report, indent=1) + "\n")
    temp.replace(out)


def versions(packages: Sequence[str]) -> dict[str, str]:
    versions = {"torch": torch.__version__}
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "no metadata"
    return versions
