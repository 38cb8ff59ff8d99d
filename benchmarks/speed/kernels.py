"""Times grouped GEMMs as shipped: from a bundle, through the public calls, next to torch in the same run.

    python benchmarks/run.py kernels --out kernels-h200.json --plot kernels-h200.svg       # the bundles that ship
    PRETUNED_BUNDLES=bundles python benchmarks/run.py kernels --models models.txt --out mine.json
    python benchmarks/run.py kernels --models gpt-oss-20b --w-layout kn --out kn.json      # w lies as [E, K, N]
    python benchmarks/run.py kernels --of benchmarks/results/kernels-h200.json --plot kernels-h200.png

Per cell (model, GEMM, op, tokens): ours, torch grouped_mm, from 1024 tokens on a loop of matmuls and one dense matmul
of as many FLOPs, all in turns; the best of the libraries in benchmarks/peers, which were measured in one run (as it
was, and scaled by how grouped_mm drifted since), the ratios, the fraction of the floor, that of the roof (what the chip
allows such tiles), and the variant. Then the geometric means by op and tokens, and the cells lost. The method is
benchmarks/method.py. Models are the six that the
peers were measured on, by name, or what ``aot build --models`` takes. QuACK: benchmarks/peers/beside_quack.py.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from benchmarks import method, provenance
from benchmarks.method import MODELS
from pretuned.aot.compare.run import grouped_mm, matmul_loop, ours
from pretuned.artifacts.records import DType, Layout, Op, Problem
from pretuned.runtime import explain

PEERS = Path(__file__).parents[1] / "peers" / "h200.jsonl"
LOOP = "matmul_loop"  # no library: it needs the rows on the host, and is timed here in the same run
# Cells bound by memory come first: arithmetic heats the chip, and its clock falls.
COLUMNS = (
    (("forward", (1, 16, 128)),),
    (("forward", (1024, 8192)), ("dX", (1024, 8192)), ("dW", (1024, 8192))),
)
LAUNCH_US = 4.06  # replay of an empty graph
INK = "#7d8590"  # read on white and on black


def problem(op: str, E: int, N: int, K: int, w_layout: str) -> Problem:
    """Return the problem that a call looks up; dW of [E, K, N] is dW of [E, N, K] with dy and x exchanged."""
    if op == "dW":
        return Problem(Op.DW, DType.BF16, E, *((N, K) if w_layout == "nk" else (K, N)))
    return Problem(Op(op), DType.BF16, E, N, K, Layout(w_layout))


def dense(op: str, inputs: method.Inputs) -> Callable[[], torch.Tensor]:
    """One torch matmul of as many FLOPs: all rows by one expert's weights, or all rows into one expert's dw."""
    if op == "forward":
        return lambda: inputs.x @ inputs.w[0].T
    assert inputs.dy is not None
    dy = inputs.dy
    return (lambda: dy @ inputs.w[0]) if op == "dX" else (lambda: dy.T @ inputs.x)


def tile_waste(op: str, N: int, K: int, rows: torch.Tensor) -> float:
    """Return the padded work of the best tiles over the real work: rows in 64s (dW 32s), columns in 128s (dw's 64s)."""
    padded = [
        math.ceil(n / step) * step / n
        for n, step in {"forward": ((N, 128),), "dX": ((K, 128),), "dW": ((N, 64), (K, 128))}[op]
    ]
    step = 32 if op == "dW" else 64
    return math.prod(padded) * float((rows + step - 1).div(step, rounding_mode="floor").sum() * step / rows.sum())


def roof_us(cell: dict[str, Any]) -> float:
    """Return the time that the chip allows: a launch, plus the longer of its bytes and its product with tiles' waste.

    The product has the rate of a dense product of as many FLOPs, timed in turns, so at the clock that power allowed.
    """
    M, N, K = cell["M"], cell["N"], cell["K"]
    dense_us = cell.get("dense_same_flops_us", 2e6 * M * N * K / method.FLOPS) * cell["tile_waste"]
    return LAUNCH_US + max(dense_us, method.bytes_us(M, N, K, cell["active"]))


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else float("nan")


def layers_of(text: str) -> list[tuple[str, list[tuple[str, int, int]], int, int]]:
    """Each model's (name, [(gemm, N, K)], E, top_k), for names in MODELS, a models.txt or a spec."""
    by_name = {m[0]: m for m in MODELS}
    if set(text.split(",")) <= set(by_name):
        return [
            (name, [("gate_up", 2 * width, H), ("down", H, width)], E, top_k)
            for name, E, H, width, top_k in (by_name[part] for part in text.split(","))
        ]
    from pretuned.aot.models.load import load_models

    shapes = load_models([text]).shapes
    return [
        (
            f"{s.name} tp={s.tp} ep={s.ep}",
            [(g.role, g.N, g.K) for g in s.gemms()],
            s.experts_per_rank,
            s.experts_per_token,
        )
        for s in shapes
    ]


def in_turns(clock: method.Clock, *calls: Callable[[], Any], budget_ms: float = 400.0) -> list[float]:
    """The calls' median times in microseconds: up to 50 rounds, at least 5, within the budget if possible."""
    graphs = [clock.capture(call) for call in calls]
    last_us = sum(times[-1] for times in clock.rounds_us(graphs, 2))
    rounds = clock.rounds_us(graphs, max(5, min(50, int(budget_ms * 1000 / max(last_us, 1.0)))))
    return [statistics.median(times) for times in rounds]


def room(models: str) -> torch.Tensor:
    """Memory for the largest weights, reused for all weights, so that no large memory is freed during timing.

    On an H200 launches that are bound by memory take longer once a process has freed much: benchmarks/speed/freed.py.
    """
    most = max(E * N * K for _, gemms, E, _ in layers_of(models) for _, N, K in gemms)
    return torch.empty(most, dtype=torch.bfloat16, device="cuda")


def measure(
    models: str, columns: Iterable[tuple[str, tuple[int, ...]]], where: torch.Tensor, w_layout: str
) -> list[dict[str, Any]]:
    clock, cells = method.Clock(), []
    for name, gemms, E, top_k in layers_of(models):
        for gemm, N, K in gemms:
            w = method.weights(E, N, K, torch.bfloat16, into=where)
            w = w if w_layout == "nk" else w.view(E, K, N).transpose(1, 2)
            for op, tokens in columns:
                for T in tokens:
                    M = T * top_k
                    m_sizes = method.routed_rows(E, top_k, T).cuda()
                    dy = None if op == "forward" else method.activations(M, N, w.dtype)
                    inputs = method.Inputs(method.activations(M, K, w.dtype), w, m_sizes, dy)
                    own, torchs = ours(op, inputs, w_layout), grouped_mm(op, inputs)
                    result = own().transpose(1, 2) if op == "dW" and w_layout == "kn" else own()
                    error = method.relative_error(result, inputs, op)
                    del result
                    active = E if op == "dW" else int((m_sizes > 0).sum())
                    beside = [torchs, matmul_loop(op, inputs), dense(op, inputs)] if T >= 1024 else [torchs]
                    ours_us, torch_us, *others_us = in_turns(clock, own, *beside)
                    cell = {
                        "model": name if w_layout == "nk" else f"{name} kn",
                        "gemm": gemm,
                        "op": op,
                        "tokens": T,
                        "M": M,
                        "E": E,
                        "N": N,
                        "K": K,
                        "error": error,
                        "us": ours_us,
                        "torch_grouped_mm_us": torch_us,
                        "floor_us": method.floor_us(M, N, K, active),
                        "active": active,
                        "tile_waste": tile_waste(op, N, K, m_sizes.cpu()),
                    }
                    if others_us:
                        cell["matmul_loop_us"], cell["dense_same_flops_us"] = others_us
                    chosen = explain(problem(op, E, N, K, w_layout), M=M).chosen
                    cell["chosen"] = str(chosen.config) if chosen else "torch"
                    cells.append(cell)
                    print(f"{named(cell)} {cell['us']:9.1f} us", flush=True)
    return cells


def named(cell: dict[str, Any]) -> str:
    return f"{cell['model']:13}{cell['gemm']:8}{cell['op']:8}T={cell['tokens']:<5}"


def each(cells: list[dict[str, Any]]) -> list[str]:
    """A line for each cell, after ``compare``; then the cells behind their best peer by over 3 %, the worst first."""

    def line(cell: dict[str, Any]) -> str:
        us = cell["us"]
        text = f"{named(cell)} {us:9.1f} us   x grouped_mm {cell['torch_grouped_mm_us'] / us:.2f}"
        if "ratio" in cell:
            text += f"   x {cell['best_peer']} {cell['ratio']:.2f} (scaled {cell['ratio_scaled']:.2f})"
        return text + f"   of floor {cell['floor_us'] / us:.2f}, of roof {cell['roof_us'] / us:.2f}   {cell['chosen']}"

    behind = sorted((c for c in cells if c.get("ratio_scaled", 1.0) < 0.97), key=lambda c: c["ratio_scaled"])
    return [*map(line, cells), "", f"behind by over 3 %: {len(behind)}", *map(line, behind), ""]


def compare(cells: list[dict[str, Any]]) -> list[str]:
    """Add each cell's roof and best peer, scaled by grouped_mm's drift; return lines with means by op and tokens."""
    peers = {}
    for line in PEERS.read_text().splitlines():
        row = json.loads(line)
        peers[row["model"], row["gemm"], row["op"], row["tokens"]] = row["us"]
    lines = []
    for cell in cells:
        cell["roof_us"] = roof_us(cell)
        peer_us = peers.get((cell["model"], cell["gemm"], cell["op"], cell["tokens"]))
        if peer_us is None:
            continue
        cell["drift"] = cell["torch_grouped_mm_us"] / peer_us["torch_grouped_mm"]
        peer_us.pop(LOOP, None)
        best = min(
            (peer for peer in peer_us if not peer.endswith("_gather")), key=peer_us.__getitem__
        )  # peers with rows sorted beforehand
        cell |= {
            "best_peer": best,
            "best_peer_us": peer_us[best],
            "ratio": peer_us[best] / cell["us"],
            "ratio_scaled": peer_us[best] * cell["drift"] / cell["us"],
        }
    for op, tokens in sorted({(c["op"], c["tokens"]) for c in cells}, key=lambda k: (k[0] != "forward", k)):
        some = [c for c in cells if (c["op"], c["tokens"]) == (op, tokens)]
        torchs = geometric_mean(c["torch_grouped_mm_us"] / c["us"] for c in some)
        floor = geometric_mean((c["floor_us"] + LAUNCH_US) / c["us"] for c in some)
        roof = geometric_mean(c["roof_us"] / c["us"] for c in some)
        line = f"{op:8} T={tokens:<5} x grouped_mm {torchs:.2f}   of floor + launch {floor:.2f}   of roof {roof:.2f}"
        if all("matmul_loop_us" in c for c in some):
            line += f"   x loop {geometric_mean(c['matmul_loop_us'] / c['us'] for c in some):.2f}"
            line += f"   of dense {geometric_mean(c['dense_same_flops_us'] / c['us'] for c in some):.2f}"
        compared = [c for c in some if "ratio" in c]
        if compared:
            line += (
                f"   x best peer {geometric_mean(c['ratio'] for c in compared):.3f}"
                f" (scaled by drift {against(compared, 'ratio_scaled')})"
            )
        lines.append(line)
    compared = [c for c in cells if "ratio" in c]
    if compared:
        lines.append(
            f"all {len(compared)} cells: x grouped_mm "
            f"{geometric_mean(c['torch_grouped_mm_us'] / c['us'] for c in cells):.2f}, "
            f"x best peer {geometric_mean(c['ratio'] for c in compared):.3f} "
            f"(scaled by drift {against(compared, 'ratio_scaled')}); "
            f"grouped_mm's drift {geometric_mean(c['drift'] for c in compared):.3f}"
        )
    return lines


def against(cells: list[dict[str, Any]], ratio: str) -> str:
    """The geometric mean of a ratio to another library, and the number of cells behind it by over 3 %."""
    ratios = [cell[ratio] for cell in cells]
    return f"{geometric_mean(ratios):.3f}, behind by over 3 %: {sum(ratio < 0.97 for ratio in ratios)} of {len(ratios)}"


def plot(cells: list[dict[str, Any]], gpu: str, path: Path) -> None:
    """Every cell's ratio to torch grouped_mm and to the best peer, by op and tokens, for a light and a dark page."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    keys = sorted({(c["op"], c["tokens"]) for c in cells}, key=lambda k: (k[0] != "forward", k))
    mpl.rcParams.update(
        dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK)
    )
    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    for offset, colour, label, value in (
        (-0.12, "tab:blue", "as torch's grouped_mm", lambda c: c["torch_grouped_mm_us"] / c["us"]),
        (0.12, "tab:orange", "as the fastest of seven libraries in that cell", lambda c: c.get("ratio_scaled")),
    ):
        points = [(keys.index((c["op"], c["tokens"])) + offset, value(c)) for c in cells if value(c)]
        axes.scatter(*zip(*points, strict=True), s=18, alpha=0.7, color=colour, label=label)
    axes.axhline(1.0, color=INK, linewidth=0.8)
    axes.set_xticks(range(len(keys)), [f"{op}\nT={tokens}" for op, tokens in keys])
    axes.set_ylabel("times as fast (above 1: pretuned is faster)")
    axes.set_title(f"Grouped GEMM, bf16, {gpu}: two products of 6 models, T tokens")
    figure.legend(loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, transparent=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--of", type=Path, help="draw what an earlier run wrote, and time nothing")
    parser.add_argument("--models", default=",".join(m[0] for m in MODELS))
    parser.add_argument("--ops", default="forward,dX,dW")
    parser.add_argument("--w-layout", choices=("nk", "kn"), default="nk")
    args = parser.parse_args()
    if not (args.out or (args.of and args.plot)):
        parser.error("--out FILE is needed, or --of FILE --plot FILE")
    if args.of:
        earlier = json.loads(args.of.read_text())
        plot(earlier["cells"], earlier["gpu"], args.plot)
        return
    begun = time.time()
    ops = args.ops.split(",")
    where, cells = room(args.models), []
    for columns in COLUMNS:
        cells += measure(args.models, [column for column in columns if column[0] in ops], where, args.w_layout)
    lines = compare(cells)
    print("\n".join(("", *each(cells), *lines)))
    wrong = [c for c in cells if not c["error"] < method.MAX_ERROR]
    report = {
        **provenance.about(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "seconds": round(time.time() - begun, 1),
        "triton_imported": "triton" in sys.modules,
        "summary": lines,
        "wrong": len(wrong),
        "cells": cells,
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    if args.plot:
        plot(cells, report["gpu"], args.plot)
    sys.exit(f"{len(wrong)} cells are wrong" if wrong else 0)
