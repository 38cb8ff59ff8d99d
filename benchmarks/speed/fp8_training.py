"""Times the step of a MoE layer, forward and backward, in fp8 and in bf16, with the most memory that each takes.

    python benchmarks/run.py fp8_training --out fp8-training-h200.json

``moe_mlp(..., precision="fp8")`` against the same call without a precision, eagerly, by events, in turns. In fp8,
``fp8`` quantises the weights in every forward and backward, ``fp8 kept`` once for all steps (in a block of
``reuse_fp8_weights``, as micro-batches do). ``sustained`` steps follow each other without a pause. ``forward`` is
the forward alone, without a gradient. Memory is the most that a step allocates. ``host`` is the host's time to
launch a step. First each product of a small ragged problem is compared with float32 of the quantised operands, and
each layer's result and gradients with those in bf16. The exit status is 1 if something is wrong. ``--profile``
prints the time of a step in fp8 by kernel. ``--products`` times the three products of both weights apart, ours in
bf16 and in fp8 and, with ``--vllm``, DeepGEMM's of rows that were padded and quantised beforehand.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import method, provenance
from benchmarks.speed.layer import eager_us
from pretuned.artifacts.records import PRECISIONS
from pretuned.runtime import grouped_gemm, moe_mlp, reuse_fp8_weights
from pretuned.runtime.ops.fp8_products import Picked, grad_weight, multiplies_codes
from pretuned.runtime.weights.codes import quantise_rows

# name, E, H, I, k; with ep=8 a rank gets about one row for each token
LAYERS = (
    ("qwen3-30b", 128, 2048, 768, 8),
    ("deepseek-v3-ep8", 32, 7168, 2048, 1),
    ("mixtral-8x7b", 8, 4096, 14336, 2),
)
TOKENS = (8192, 32768)
DEVICE = "cuda"
OF_ROWS = PRECISIONS["fp8_block"].x.scale  # the scale of x and dy: one for each row and 128 columns
MAX_PRODUCT, MAX_LAYER = 2e-3, 8e-2  # relative errors: of a product of quantised operands, of a layer against bf16
RAGGED = (129, 0, 1, 127, 128, 256, 300, 3)
Step = Callable[[], list[torch.Tensor]]


def apart(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = got.detach().float(), want.detach().float()
    return float((got - want).norm() / want.norm())


def quantised(w: torch.Tensor) -> torch.Tensor:
    """w [E, N, K] rounded to e4m3 with a scale for each 128 x 128, float32, like ``quantise_weights``."""
    E, N, K = w.shape
    blocks = w.detach().float().view(E, N // 128, 128, K // 128, 128)
    most = blocks.abs().amax((2, 4), keepdim=True)
    scale = most / most.new_full((), 448)  # (On a GPU torch divides by a Python number as a product with its inverse.)
    scale = torch.where(scale > 0, scale, 1)
    return ((blocks * scale.reciprocal()).to(torch.float8_e4m3fn).float() * scale).view(w.shape)


def by_columns(t: torch.Tensor, columns: int) -> torch.Tensor:
    """One expert's rows t [M, C] rounded to e4m3 with a scale for each 128 rows and so many columns, float32."""
    padded = torch.nn.functional.pad(t.detach().float(), (0, 0, 0, -len(t) % 128))
    groups = padded.view(-1, 128, t.shape[1] // columns, columns)
    most = groups.abs().amax((1, 3), keepdim=True)
    scale = most * torch.tensor(1 / 448, device=t.device)
    scale = torch.where(scale > 0, scale, 1)
    return ((groups * scale.reciprocal()).to(torch.float8_e4m3fn).float() * scale).view(padded.shape)[: len(t)]


def check_products(seed: int, N: int = 4096, K: int = 4096) -> dict[str, float]:
    """Errors of y, dx and dw of ragged rows, against float32 of quantised operands; dw also against bf16 operands."""
    E, M = len(RAGGED), sum(RAGGED)
    g = torch.Generator(DEVICE).manual_seed(seed)
    x = torch.randn(M, K, generator=g, device=DEVICE).bfloat16().requires_grad_()
    w = (torch.randn(E, N, K, generator=g, device=DEVICE) / K**0.5).bfloat16().requires_grad_()
    dy = torch.randn(M, N, generator=g, device=DEVICE).bfloat16()
    m_sizes = torch.tensor(RAGGED, dtype=torch.int32, device=DEVICE)
    y = grouped_gemm(x, w, m_sizes, precision="fp8")
    y.backward(dy)
    qx, qdy = (quantise_rows(rows.detach(), OF_ROWS) for rows in (x, dy))
    qw = quantised(w)
    want_y, want_dx, first = [], [], 0
    of_codes, plain = torch.zeros(E, N, K, device=DEVICE), torch.zeros(E, N, K, device=DEVICE)
    for e, count in enumerate(RAGGED):
        rows = slice(first, first + count)
        first += count
        want_y.append(qx[rows] @ qw[e].T)
        want_dx.append(qdy[rows] @ qw[e])
        if count:
            of_codes[e] = by_columns(dy[rows], 1).T @ by_columns(x[rows], 128)
            plain[e] = dy[rows].float().T @ x.detach()[rows].float()
    if x.grad is None or w.grad is None:
        raise AssertionError("no gradients")
    return {
        "y": apart(y, torch.cat(want_y)),
        "dx": apart(x.grad, torch.cat(want_dx)),
        "dw": apart(w.grad, of_codes if multiplies_codes(N, K) else plain),
        "dw_beside_bf16": apart(w.grad, plain),
    }


def tensors_of(E: int, H: int, width: int, k: int, T: int) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    """Leaves: hidden, the weights and the routing weights; then the ids, and the gradient of the result."""
    g = torch.Generator().manual_seed(T * 31 + E)
    logits = torch.randn(T, E, generator=g) - 0.3 * torch.log(torch.randperm(E, generator=g) + 1.0)
    weights, ids = logits.softmax(-1).topk(k, -1)
    leaves = [
        method.activations(T, H, torch.bfloat16, DEVICE),
        method.weights(E, 2 * width, H, torch.bfloat16, DEVICE),
        method.weights(E, H, width, torch.bfloat16, DEVICE),
        weights.to(DEVICE),
    ]
    return [leaf.requires_grad_() for leaf in leaves], ids.to(DEVICE), method.activations(T, H, torch.bfloat16, DEVICE)


def step_of(leaves: list[torch.Tensor], ids: torch.Tensor, dout: torch.Tensor, **more: Any) -> Step:
    def step() -> list[torch.Tensor]:
        for leaf in leaves:
            leaf.grad = None
        hidden, gate_up, down, weights = leaves
        y = moe_mlp(hidden, gate_up, down, ids, weights, **more)
        y.backward(dout)
        return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]

    return step


def most_mb(step: Step) -> float:
    """The most memory that a step takes, including its results."""
    step()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def host_us(step: Step, steps: int = 8, rounds: int = 5) -> float:
    """The host's time to launch a step, in microseconds: the least of some rounds, while the GPU is busy."""
    times, synchronize = [], torch.cuda.synchronize if DEVICE == "cuda" else lambda: None
    for _ in range(rounds):
        synchronize()
        begun = time.perf_counter()
        for _ in range(steps):
            step()
        times.append(1e6 * (time.perf_counter() - begun) / steps)
    synchronize()
    return min(times)


def sustained_us(steps: list[Step], seconds: float = 0.4, turns: int = 3) -> list[float]:
    """Median time of a step when it follows itself without a pause for so long: at the clock that its power allows."""
    times: list[list[float]] = [[] for _ in steps]
    for _ in range(turns):
        for step, of_step in zip(steps, times, strict=True):
            count = max(4, int(seconds * 1e6 / eager_us([step], 1)[0]))
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            for _ in range(count):
                step()
            end.record()
            torch.cuda.synchronize()
            of_step.append(1000 * start.elapsed_time(end) / count)
    return list(map(statistics.median, times))


def measure_layer(name: str, E: int, H: int, width: int, k: int, T: int, rounds: int) -> dict[str, Any]:
    leaves, ids, dout = tensors_of(E, H, width, k, T)
    plain, fp8 = step_of(leaves, ids, dout), step_of(leaves, ids, dout, precision="fp8")
    cell: dict[str, Any] = {"layer": name, "tokens": T, "rows_an_expert": T * k // E}
    results = {"bf16": [t.clone() for t in plain()], "fp8": [t.clone() for t in fp8()]}
    names = ("out", "dhidden", "dgate_up", "ddown", "dweights")
    cell["apart"] = dict(zip(names, map(apart, results["fp8"], results["bf16"]), strict=True))
    cell["same_bits"] = all(map(torch.equal, fp8(), results["fp8"]))
    del results
    cell["bf16_mb"], cell["fp8_mb"] = most_mb(plain), most_mb(fp8)
    cell["bf16_us"], cell["fp8_us"] = eager_us([plain, fp8], rounds)
    cell["bf16_host_us"], cell["fp8_host_us"] = host_us(plain), host_us(fp8)
    with reuse_fp8_weights():
        before = torch.cuda.memory_allocated() if DEVICE == "cuda" else 0
        cell["fp8_kept_mb"] = most_mb(fp8)
        cell["kept_mb"] = ((torch.cuda.memory_allocated() if DEVICE == "cuda" else 0) - before) / 1e6
        cell["bf16_again_us"], cell["fp8_kept_us"] = eager_us([plain, fp8], rounds)
        cell["fp8_kept_host_us"] = host_us(fp8)
        cell["bf16_sustained_us"], cell["fp8_kept_sustained_us"] = sustained_us([plain, fp8])
    hidden, gate_up, down, weights = leaves
    with torch.no_grad():
        forward = [
            lambda: moe_mlp(hidden, gate_up, down, ids, weights),
            lambda: moe_mlp(hidden, gate_up, down, ids, weights, precision="fp8"),
        ]
        cell["bf16_forward_us"], cell["fp8_forward_us"] = eager_us(forward, rounds)
    cell["gain"], cell["gain_kept"] = cell["bf16_us"] / cell["fp8_us"], cell["bf16_again_us"] / cell["fp8_kept_us"]
    cell["gain_sustained"] = cell["bf16_sustained_us"] / cell["fp8_kept_sustained_us"]
    return cell


def gaps(events: list[Any]) -> list[tuple[float, str]]:
    """The idle microseconds between two kernels, and the two kernels' names; the longest first."""
    spans = sorted((event.time_range.start, event.time_range.end, event.name) for event in events)
    idle, until, last = [], None, ""
    for begin, end, name in spans:
        if until is not None and begin > until:
            idle.append((begin - until, f"{last[:40]} -> {name[:40]}"))
        if until is None or end > until:
            until, last = end, name
    return sorted(idle, reverse=True)


def profile(name: str, E: int, H: int, width: int, k: int, T: int) -> list[tuple[str, float, int]]:
    """Print the microseconds and launches of each kernel of a step: in bf16, in fp8, and in fp8 with kept weights."""
    leaves, ids, dout = tensors_of(E, H, width, k, T)
    lines = []
    plain, fp8 = step_of(leaves, ids, dout), step_of(leaves, ids, dout, precision="fp8")
    for what, step in (("bf16", plain), ("fp8", fp8), ("fp8 kept", fp8)):
        with reuse_fp8_weights() if what == "fp8 kept" else contextlib.nullcontext():
            step()
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
                begun = time.perf_counter()
                step()
                host_us = 1e6 * (time.perf_counter() - begun)
                torch.cuda.synchronize()
        rows = [(row.key, row.self_device_time_total, row.count) for row in profiler.key_averages()]
        rows = sorted((row for row in rows if row[1] > 0), key=lambda row: -row[1])[:16]
        print(f"{name} T={T} {what}: host {host_us:,.0f} us, {sum(us for _, us, _ in rows):,.0f} us in", flush=True)
        for key, us, count in rows:
            print(f"  {us:10,.0f} us {count:4} x {key[:110]}", flush=True)
        idle = gaps([e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA])
        print(f"  idle {sum(us for us, _ in idle):,.0f} us between kernels, most {idle[:4]}", flush=True)
        lines += [(f"{what}: {key}", us, count) for key, us, count in rows]
    return lines


def measure_products(name: str, E: int, H: int, width: int, k: int, T: int, theirs: Any) -> dict[str, Any]:
    """Time each weight's three products by themselves: forward, dX and dW, in microseconds."""
    from pretuned.artifacts.records import Layout
    from pretuned.runtime import grouped_gemm_dW, grouped_gemm_dX
    from pretuned.runtime.ops import fp8_codes

    M, row = T * k, dict[str, Any](layer=name, tokens=T)
    m_sizes = method.routed_rows(E, k, T).to(DEVICE)
    for what, N, K in (("up", 2 * width, H), ("down", H, width)):
        w = method.weights(E, N, K, torch.bfloat16, DEVICE)
        x, dy = (method.activations(M, columns, torch.bfloat16, DEVICE) for columns in (K, N))
        pair = fp8_codes.quantise_weights(w)
        of_y, of_dx = pair
        if of_y is None or of_dx is None:
            raise AssertionError("both directions were asked for")
        of_y.always_quantises = of_dx.always_quantises = True
        calls: dict[str, Callable[[], object]] = {
            "forward": lambda x=x, w=w: grouped_gemm(x, w, m_sizes),
            "forward8": lambda x=x, w=of_y: grouped_gemm(x, w, m_sizes),
            "dx": lambda dy=dy, w=w: grouped_gemm_dX(dy, w, m_sizes),
            "dx8": lambda dy=dy, w=of_dx: grouped_gemm(dy, w, m_sizes),
            "dw": lambda dy=dy, x=x: grouped_gemm_dW(dy, x, m_sizes),
            "dw8": lambda dy=dy, x=x: grad_weight(Picked(dy), Picked(x), m_sizes, Layout.NK, torch.bfloat16),
            "codes_dy": lambda dy=dy: fp8_codes.column_codes(dy, m_sizes),
            "codes_x": lambda x=x: fp8_codes.column_codes(x, m_sizes, blocks=True),
            "quantise_rows": lambda w=w: fp8_codes.quantise_weights(w, columns=False),
            "quantise_columns": lambda w=w: fp8_codes.quantise_weights(w, rows=False),
            "quantise_both": lambda w=w: fp8_codes.quantise_weights(w),
        }
        if theirs is not None:
            calls |= theirs(x, dy, w, m_sizes)
        with torch.no_grad():
            names = list(calls)
            for each in names:
                try:
                    calls[each]()
                except Exception as error:  # a library without this call, or a failing kernel
                    row[f"{what}_{each}_failed"] = f"{type(error).__name__}: {str(error)[:200]}"
                    del calls[each]
            timed = eager_us(list(calls.values()), 9)
        row |= {f"{what}_{each}_us": us for each, us in zip(calls, timed, strict=True)}
        del w, x, dy, of_y, of_dx, pair, calls
    return row


def deepgemm_products(place: Path) -> Callable[..., dict[str, Callable[[], object]]]:
    """DeepGEMM's three products of a weight, on operands padded to 128 rows an expert and quantised beforehand."""
    sys.path.insert(0, str(place / "vllm" / "third_party"))
    import deep_gemm  # type: ignore[import-not-found]

    def codes(t: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        *outer, M, C = t.shape
        blocks = t.float().view(*outer, M // rows, rows, C // 128, 128)
        scale = (blocks.abs().amax((-3, -1), keepdim=True) / 448).clamp(min=1e-10)
        return (blocks / scale).to(torch.float8_e4m3fn).view(t.shape), scale.view(*outer, M // rows, C // 128)

    def calls(x: torch.Tensor, dy: torch.Tensor, w: torch.Tensor, m_sizes: torch.Tensor) -> dict[str, Any]:
        n, (E, N, K) = m_sizes.long(), w.shape
        whole = (n + 127) // 128 * 128
        owner = torch.repeat_interleave(torch.arange(E, device=DEVICE), n)
        at = ((whole.cumsum(0) - whole) - (n.cumsum(0) - n))[owner] + torch.arange(len(x), device=DEVICE)
        P, experts = int(whole.sum()), torch.repeat_interleave(torch.arange(E, device=DEVICE), whole).int()

        def padded(t: torch.Tensor) -> torch.Tensor:
            return torch.zeros(P, t.shape[1], dtype=t.dtype, device=DEVICE).index_copy_(0, at, t)

        wide_x, wide_dy, y = padded(x), padded(dy), x.new_empty(P, N)
        dx, dw = x.new_empty(P, K), torch.zeros(E, N, K, dtype=torch.float32, device=DEVICE)
        (cx, sx), (cdy, sdy) = codes(wide_x, 1), codes(wide_dy, 1)
        sx, sdy = map(deep_gemm.get_mn_major_tma_aligned_tensor, (sx, sdy))
        of_y, of_dx = codes(w, 128), codes(w.transpose(1, 2).contiguous(), 128)
        ks = whole.tolist()

        def of_columns(t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            """Each expert's [C, rows] codes one after another, and scales [C, P / 128], C innermost."""
            parts, scales = [], []
            for part in t.split(ks):
                if len(part):
                    code, scale = codes(part.T.contiguous(), 1)
                    parts.append(code.reshape(-1))
                    scales.append(scale.T)
            all_codes = torch.cat([part.view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn)
            return all_codes, torch.cat(scales).contiguous().T

        left, right = of_columns(wide_dy), of_columns(wide_x)
        counts = whole.int()
        how = {"disable_ue8m0_cast": True}
        return {
            "deepgemm_forward": lambda: deep_gemm.m_grouped_fp8_gemm_nt_contiguous((cx, sx), of_y, y, experts, **how),
            "deepgemm_dx": lambda: deep_gemm.m_grouped_fp8_gemm_nt_contiguous((cdy, sdy), of_dx, dx, experts, **how),
            "deepgemm_dw": lambda: deep_gemm.k_grouped_fp8_gemm_nt_contiguous(left, right, dw, ks, counts, dw),
        }

    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file of the report")
    parser.add_argument("--layers", default=",".join(name for name, *_ in LAYERS))
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--products", action="store_true")
    parser.add_argument("--vllm", type=Path, help="vLLM's wheel unpacked, for DeepGEMM")
    args = parser.parse_args()
    begun = time.time()
    layers = [layer for layer in LAYERS if layer[0] in args.layers.split(",")]
    products, wrong = {}, []
    for sizes in ((4096, 4096), (512, 768)):
        products[str(sizes)] = errors = check_products(1, *sizes)
        print(sizes, {name: f"{error:.1e}" for name, error in errors.items()}, flush=True)
        wrong += [
            f"{sizes}: {name} is off by {errors[name]:.1e}"
            for name in ("y", "dx", "dw")
            if not errors[name] < MAX_PRODUCT
        ]
    cells, profiles, apart_cells = [], {}, []
    theirs = deepgemm_products(args.vllm) if args.vllm else None

    def save() -> None:
        """Write the report of the cells measured so far."""
        report = {
            **provenance.about(),
            "gpu": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "seconds": round(time.time() - begun, 1),
            "products": products,
            "wrong": wrong,
            "cells": cells,
            "products_apart": apart_cells,
            "profiles": profiles,
        }
        if args.out:
            args.out.write_text(json.dumps(report, indent=1) + "\n")

    for layer in layers:
        for T in map(int, args.tokens.split(",")):
            save()
            cell = measure_layer(*layer, T, args.rounds)
            cells.append(cell)
            print(
                {key: round(value, 3) if isinstance(value, float) else value for key, value in cell.items()}, flush=True
            )
            wrong += [
                f"{cell['layer']} T={T}: {name} is {error:.3f} from bf16's"
                for name, error in cell["apart"].items()
                if not error < MAX_LAYER
            ]
            if not cell["same_bits"]:
                wrong.append(f"{cell['layer']} T={T}: a second step has other bits")
            torch.cuda.empty_cache()
            if args.products:
                apart_cells.append(measure_products(*layer, T, theirs))
                print(
                    {key: round(v, 1) if isinstance(v, float) else v for key, v in apart_cells[-1].items()}, flush=True
                )
                torch.cuda.empty_cache()
            if args.profile:
                profiles[f"{layer[0]} T={T}"] = profile(*layer, T)
                torch.cuda.empty_cache()
    save()
    sys.exit("\n".join(wrong) or None)


if __name__ == "__main__":
    main()
