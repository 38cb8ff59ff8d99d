"""Host time of a call, and what it is made of.

    PRETUNED_BUNDLES=bundles python benchmarks/run.py host --out results/host.json
    python benchmarks/run.py host_trees --help  # to compare two checkouts: it starts this one with --serve

Each figure is a loop of 200 calls (50 or 20 of a layer, or of a gradient), timed on the host, in batches small enough
that the launch queue never fills; the
median and the 10th percentile over 40 batches, in microseconds. ``floor`` is what no call can do without: the driver's
launch through ctypes and the allocation of y. ``driver`` is that launch less the same ctypes call of a C function that
does nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

import pretuned.runtime
from benchmarks import provenance
from benchmarks.speed import host_turns, host_work
from benchmarks.speed.host_turns import Timed
from pretuned.runtime import grouped_gemm, moe_mlp, reload, sort_routing
from pretuned.runtime.dispatch import snapshot as dispatch_snapshot
from pretuned.runtime.driver import cuda, device

E, N, K, M, TOPK = 8, 256, 256, 16, 2  # so small that the GPU keeps up
BATCHES, CALLS = 40, 200


def host_us(call: Callable[[], object], calls: int = CALLS) -> dict[str, float]:
    """Median and 10th percentile of one call's host time."""
    for _ in range(20):
        call()
    batches = []
    for _ in range(BATCHES):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        batches.append((time.perf_counter() - start) / calls * 1e6)
    torch.cuda.synchronize()
    return {"median": round(statistics.median(batches), 2), "p10": round(sorted(batches)[BATCHES // 10], 2)}


def launch_arguments(
    x: torch.Tensor, w: torch.Tensor, m_sizes: torch.Tensor, out: torch.Tensor
) -> tuple[tuple[Any, ...], object]:
    """Return the arguments of a call to cuLaunchKernelEx, and the objects that own the memory they point to."""
    with launches_noted() as seen:
        grouped_gemm(x, w, m_sizes, out=out)
        torch.cuda.synchronize()
        return seen[0], list(dispatch_snapshot.snapshot().plans.values())


@contextmanager
def launches_noted() -> Iterator[list[tuple[Any, ...]]]:
    """Yield a list that gets the arguments of each kernel launch; the runtime reloads before and after."""
    seen: list[tuple[Any, ...]] = []
    launch, original = cuda.launch_kernel(), cuda.launch_kernel

    def noted(*arguments: Any) -> int:
        seen.append(arguments)
        return launch(*arguments)

    cuda.launch_kernel = lambda: noted  # type: ignore[assignment]
    try:
        reload()
        yield seen
    finally:
        cuda.launch_kernel = original
        reload()


def parts(x: torch.Tensor, w: torch.Tensor, m_sizes: torch.Tensor) -> dict[str, dict[str, float]]:
    """Times of the launch, the allocation, the device's look-up, and ctypes itself."""
    out = torch.empty(M, N, device="cuda", dtype=torch.bfloat16)
    (arguments, kept), launch = launch_arguments(x, w, m_sizes, out), cuda.launch_kernel()
    nothing: Any = ctypes.CDLL(None)["abs"]
    times = {
        "launch": host_us(lambda: launch(*arguments)),
        "ctypes": host_us(lambda: nothing(*arguments)),
        "allocation": host_us(lambda: device.empty((M, N), (N, 1), torch.bfloat16)),
        "torch_empty": host_us(lambda: torch.empty((M, N), dtype=torch.bfloat16, device="cuda")),
        "device_guard": host_us(lambda: torch.cuda.device(0).__enter__()),
        "device_is_current": host_us(lambda: device.device_is_current(0)),
        "stream": host_us(lambda: device.current_stream(0)),
        "loop": host_us(lambda: None),
    }
    del kept
    return times


def whole_calls(x: torch.Tensor, w: torch.Tensor, m_sizes: torch.Tensor) -> Timed:
    """Host times of grouped_gemm in every form, and of torch's own call."""
    out, dy = torch.empty(M, N, device="cuda", dtype=torch.bfloat16), torch.randn(M, N, device="cuda").bfloat16()
    moving = [torch.randn_like(x) for _ in range(300)]
    turn = iter(range(10**9))
    index = torch.randperm(M, device="cuda")
    tokens, weights = torch.randn_like(x[: M // TOPK]), torch.rand(M // TOPK, TOPK, device="cuda")
    offsets, wt = m_sizes.cumsum(0).to(torch.int32), w.transpose(1, 2)
    dense = torch.randn(N, K, device="cuda", dtype=torch.bfloat16).T
    xg, wg = x.clone().requires_grad_(), w.clone().requires_grad_()

    def step(forward: Callable[[], torch.Tensor]) -> Callable[[], None]:
        def both() -> None:
            xg.grad = wg.grad = None
            forward().backward(dy)

        return both

    def ours() -> torch.Tensor:
        return grouped_gemm(xg, wg, m_sizes)

    def torchs() -> torch.Tensor:
        return torch._grouped_mm(xg, wg.transpose(1, 2), offs=offsets)

    return {
        "call": (lambda: grouped_gemm(x, w, m_sizes), CALLS),
        "out_given": (lambda: grouped_gemm(x, w, m_sizes, out=out), CALLS),
        "new_x_each_call": (lambda: grouped_gemm(moving[next(turn) % 300], w, m_sizes), CALLS),
        "other_rows_each_call": (lambda: grouped_gemm(x[: 1 + next(turn) % M], w, m_sizes), CALLS),
        "gather": (lambda: grouped_gemm(tokens, w, m_sizes, TOPK, index, permute_x=True), CALLS),
        "scatter_weight": (
            lambda: grouped_gemm(x, w, m_sizes, TOPK, index, permute_y=True, topk_weights=weights, fuse_mul_post=True),
            CALLS,
        ),
        "autograd": (ours, CALLS),
        "autograd_and_backward": (step(ours), 50),
        "torch_mm": (lambda: torch.mm(x, dense), CALLS),
        "torch_grouped_mm": (lambda: torch._grouped_mm(x, wt, offs=offsets), CALLS),
        "torch_grouped_mm_autograd": (torchs, CALLS),
        "torch_grouped_mm_autograd_and_backward": (step(torchs), 50),
    }


def layers(w: torch.Tensor) -> Timed:
    """Host times of a whole layer, with routing weights in float32 and in bf16, and of sorting its slots."""
    T, H = M // TOPK, w.shape[2]
    hidden, down = torch.randn(T, H, device="cuda").bfloat16(), torch.randn(E, H, N // 2, device="cuda").bfloat16()
    ids, weights = torch.randint(0, E, (T, TOPK), device="cuda"), torch.rand(T, TOPK, device="cuda")
    narrow = weights.bfloat16()
    leaves = [leaf.clone().requires_grad_() for leaf in (hidden, w, down, narrow)]
    dout = torch.randn_like(hidden)

    def learning() -> torch.Tensor:
        return moe_mlp(*leaves[:3], ids, leaves[3])

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        learning().backward(dout)

    return {
        "layer": (lambda: moe_mlp(hidden, w, down, ids, weights), 50),
        "layer_bf16_weights": (lambda: moe_mlp(hidden, w, down, ids, narrow), 50),
        "layer_autograd": (learning, 50),
        "layer_autograd_and_backward": (step, 20),
        "sort_routing": (lambda: sort_routing(ids, E), CALLS),
    }


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def environment() -> dict[str, object]:
    return {
        "gpu": torch.cuda.get_device_properties(0).name,
        "cpu": cpu_name(),
        "driver": cuda.driver_version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, w and m_sizes."""
    return (
        torch.randn(M, K, device="cuda", dtype=torch.bfloat16),
        torch.randn(E, N, K, device="cuda", dtype=torch.bfloat16),
        torch.full((E,), M // E, dtype=torch.int32, device="cuda"),
    )


def asked(what: str) -> None:
    """Serve host_trees: time ``batches``, or report the ``work`` of each call."""
    to = host_turns.answers()
    torch.manual_seed(0)  # the same tensors in both trees
    if what == "batches":
        x, w, m_sizes = inputs()
        about = environment() | {"runtime": pretuned.runtime.__file__}
        short = {name: (call, calls // 4) for name, (call, calls) in (whole_calls(x, w, m_sizes) | layers(w)).items()}
        host_turns.serve(short, torch.cuda.synchronize, about, to)  # 1 to 2 ms a batch, so more are adjacent
        return
    with launches_noted() if hasattr(cuda, "launch_kernel") else nullcontext() as seen:
        x, w, m_sizes = inputs()
        timed = whole_calls(x, w, m_sizes) | layers(w)
        host_turns.tell(to, host_work.work(timed, seen, torch.cuda.synchronize))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="the JSON file to write")
    parser.add_argument("--serve", choices=host_turns.ASKED, help="answer host_trees on stdin and stdout")
    args = parser.parse_args()
    if args.serve:
        asked(args.serve)
        return
    x, w, m_sizes = inputs()
    report: dict[str, Any] = {"command": " ".join(["python", *sys.argv]), "unit": "us"}
    report["parts"] = parts(x, w, m_sizes)
    report["calls"] = {name: host_us(*figure) for name, figure in (whole_calls(x, w, m_sizes) | layers(w)).items()}
    median = {name: figure["median"] for name, figure in (report["parts"] | report["calls"]).items()}
    report["driver"] = round(median["launch"] - median["ctypes"], 2)
    report["floor"] = round(median["launch"] + median["allocation"] - median["loop"], 2)
    report["environment"] = environment() | {"about": provenance.about()}
    for name, figure in median.items():
        print(f"{name:42} {figure:8.2f} us")
    print(f"{'floor: launch and allocation':42} {report['floor']:8.2f} us, the driver's {report['driver']:.2f}")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")
