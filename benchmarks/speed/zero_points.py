"""Tests and times int4 weights with zero points, prepared, against the same format without zero points.

    python benchmarks/run.py zero_points --bundle candidates.msgpack.xz --json zero-points.json    # a GPU of sm_90

The bundle, or several together, has the variants of ``rows_wna16`` and ``rows_wna16_zero``: what ``aot compile`` makes
of weights=int4_g128 and weights=int4_g128_zp, and so on. First every variant with zero points multiplies small weights
that have every zero point: rows of x with a single 1 make y equal to w, bit for bit, ragged rows are compared with
float64, and a scale that is NaN may reach the rows of its expert alone. Then both formats are timed for each size and
number of tokens: all variants in turns, and the fastest of each format in turns again. Times are medians of CUDA graph
replays with a cold L2, in microseconds; ``ratio`` is zero points over none.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import method, provenance
from benchmarks.speed.kernels import in_turns
from pretuned.aot.measure.bench import NumericsCheck
from pretuned.aot.measure.inputs import Tensors, activations, caller, quantised_weights, routed_rows
from pretuned.artifacts.bundle_file import open_bundle
from pretuned.artifacts.records import DType, Fusion, Layout, Op, Problem, Variant
from pretuned.kernels.registry import beyond
from pretuned.kernels.spec import gemm_of
from pretuned.runtime.driver.device import local_gpu
from pretuned.runtime.launch.gemm import LoadedKernel, load_kernel
from pretuned.runtime.weights.expert_weights import ExpertWeights

MOST_ERROR = 5e-3
TOKENS = (1, 16, 128, 1024, 8192)
GROUPS = (32, 64, 128)
EDGES = ((192, 640), (320, 384))  # (N, K) without whole tiles, with whole groups of each size
RAGGED = (0, 1, 15, 16, 17, 40, 130, 300)  # rows of experts
# (model, product, E, top_k, N, K), and which groups and ops are timed.
SIZES = (
    ("qwen3-30b", "gate_up", 128, 8, 1536, 2048, GROUPS),
    ("qwen3-30b", "down", 128, 8, 2048, 768, (128,)),
    ("mixtral-8x7b", "gate_up", 8, 2, 28672, 4096, (128,)),
)
KERNELS = ("rows_wna16", "rows_wna16_zero")


class LoadedVariant(NamedTuple):
    """A variant of a bundle on this GPU."""

    variant: Variant
    kernel: LoadedKernel

    def __str__(self) -> str:
        return f"{self.variant.op.value} {self.variant.dtype.value} {self.kernel.config}"


def named(group: int, *, zero: bool) -> DType:
    return DType(f"int4_g{group}{'_zp' if zero else ''}")


class Loaded:
    """A bundle's loaded variants, by op, dtype and fusion."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._found: dict[tuple[Any, ...], list[LoadedVariant]] = {}
        sms, dtypes = local_gpu(0).gpu.sm_count, {named(g, zero=z) for g in GROUPS for z in (False, True)}
        for path in paths:
            with open_bundle(path) as bundle:
                for i, variant in enumerate(bundle.variants()):
                    if variant.kernel in KERNELS and variant.dtype in dtypes:
                        loaded = LoadedVariant(variant, load_kernel(variant, bundle.cubin(i), 0, sms))
                        self._found.setdefault((variant.op, variant.dtype, variant.fusion), []).append(loaded)

    def __call__(self, op: Op, dtype: DType, fusion: Fusion = Fusion.NONE) -> list[LoadedVariant]:
        return self._found.get((op, dtype, fusion), [])


def every_zero_point(E: int, N: int, K: int, group: int, device: str = "cuda") -> ExpertWeights:
    """Weights in the checkpoint's layout: another zero point in each neighbouring row and group, any codes."""
    g = torch.Generator().manual_seed(N + K + group)
    row, column, expert = torch.arange(N)[:, None], torch.arange(K // group)[None], torch.arange(E)[:, None, None]
    zero = (3 * row + 5 * column + 7 * expert & 15).to(torch.uint8)
    codes = torch.randint(0, 256, (E, N, K // 2), dtype=torch.uint8, generator=g)
    scale = (torch.rand(E, N, K // group, generator=g) * 0.1 + 0.01).bfloat16()
    scale[:, ::7] *= -1
    return ExpertWeights.int4(codes.to(device), scale.to(device), zero.to(device))


def on(problem: Problem, x: torch.Tensor, w: ExpertWeights) -> Tensors:
    y = torch.full((x.shape[0], gemm_of(problem).columns), float("nan"), dtype=torch.bfloat16, device=x.device)
    return Tensors(problem, x.shape[0], x, w, y)


def wrong(loaded: LoadedVariant, group: int) -> Iterator[str]:
    """Yield the faults in a plain variant's results, for each of ``EDGES``."""
    op, dtype = loaded.variant.op, loaded.variant.dtype
    assert isinstance(op, Op)
    for N, K in EDGES:
        E = 3
        stored = every_zero_point(E, N, K, group)
        dense = stored.dequantize(torch.bfloat16)
        matrices = dense if op is Op.FORWARD else dense.transpose(1, 2)
        w = stored.prepare()
        problem = Problem(op, dtype, E, N, K)
        if beyond(problem, loaded.kernel.config) is not None:
            continue
        width = gemm_of(problem).reduction
        # Each expert's rows are the unit matrix, so y equals w.
        x = torch.eye(width, device="cuda", dtype=torch.bfloat16).repeat(E, 1)
        sizes = torch.full((E,), width, dtype=torch.int32, device="cuda")
        here = on(problem, x, w)
        call = caller(loaded.kernel, here, sizes)
        call()
        off = here.result.view(E, width, -1).transpose(1, 2) != matrices
        if bool(off.any()):
            at = tuple(off.nonzero()[0].tolist())
            got = here.result.view(E, width, -1).transpose(1, 2)[at]
            yield f"{N} x {K}: {int(off.sum())} of {off.numel()} weights, the first at {at}: {got}, not {matrices[at]}"
        first = here.result.clone()
        call()
        if not torch.equal(first, here.result):
            yield f"{N} x {K}: another result the second time"
        assert w.scale.dim() == 5
        w.scale.data[1].fill_(float("nan"))
        call()
        nan, parts = here.result.isnan().view(E, width, -1), here.result.view(E, width, -1)
        others = [e for e in range(E) if e != 1]
        if not bool(nan[1].all()) or not torch.equal(parts[others], first.view(E, width, -1)[others]):
            yield f"{N} x {K}: NaN of an expert's scales is not in all of its rows, or in others"
    yield from wrong_rows(loaded, group)


def wrong_rows(loaded: LoadedVariant, group: int, *, scatter: bool = False) -> Iterator[str]:
    """Yield the faults in a variant's results for ragged rows of random numbers."""
    op, dtype = loaded.variant.op, loaded.variant.dtype
    assert isinstance(op, Op)
    N, K = EDGES[0]
    E, M = len(RAGGED), sum(RAGGED)
    stored = every_zero_point(E, N, K, group)
    dense = stored.dequantize(torch.bfloat16).double()
    matrices = dense if op is Op.FORWARD else dense.transpose(1, 2)
    problem = Problem(op, dtype, E, N, K, Layout.NK, Fusion.SCATTER if scatter else Fusion.NONE)
    gemm = gemm_of(problem)
    x = activations(M, gemm.reduction, torch.bfloat16, "cuda")
    here = on(problem, x, stored.prepare())
    wanted = torch.cat([part.double() @ w.T for part, w in zip(x.split(list(RAGGED)), matrices, strict=True)])
    if scatter:
        index = torch.randperm(M, generator=torch.Generator().manual_seed(M)).int().cuda()
        weights = torch.rand(M, device="cuda")
        here = Tensors(problem, M, x, here.weights, here.result, index, 1, weights)
        moved = torch.empty_like(wanted)
        moved[index.long()] = wanted * weights.double()[index.long(), None]
        wanted = moved
    caller(loaded.kernel, here, torch.tensor(RAGGED, dtype=torch.int32, device="cuda"))()
    error = float(((here.result.double() - wanted).norm(dim=1) / wanted.norm(dim=1)).max())
    if not error < MOST_ERROR:
        yield f"a ragged row is off by {error:.2e}"


def wrong_calls(group: int) -> Iterator[str]:
    """Yield the faults of the runtime's calls: both layouts, gradients, an adapter, writes to prepared weights."""
    from pretuned.runtime import Lora, grouped_gemm

    E, (N, K), M = len(RAGGED), EDGES[0], sum(RAGGED)
    sizes = torch.tensor(RAGGED, dtype=torch.int32, device="cuda")
    x, dy = activations(M, K, torch.bfloat16, "cuda"), activations(M, N, torch.bfloat16, "cuda")
    A, B = (torch.randn(E, *s, device="cuda").bfloat16() * 0.05 for s in ((8, K), (N, 8)))
    dense = every_zero_point(E, N, K, group).dequantize(torch.bfloat16).double()
    low = [(B[e].double() @ A[e].double()) for e in range(E)]

    def by_rows(rows: torch.Tensor, matrices: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat([part.double() @ w.T for part, w in zip(rows.split(list(RAGGED)), matrices, strict=True)])

    def check(what: str, got: torch.Tensor, want: torch.Tensor, most: float = MOST_ERROR) -> Iterator[str]:
        error = float((got.double() - want).norm() / want.norm())
        if not error < most:
            yield f"{what}: off by {error:.2e}"

    for prepared in (False, True):
        w = every_zero_point(E, N, K, group)
        w = w.prepare() if prepared else w
        how = "prepared" if prepared else "as stored"
        if w.is_prepared is not prepared:
            yield "weights are not prepared"
        leaf = x.clone().requires_grad_()
        y = grouped_gemm(leaf, w, sizes)
        yield from check(f"forward, {how}", y.detach(), by_rows(x, dense))
        (dx,) = torch.autograd.grad(y, leaf, dy)
        yield from check(f"dX, {how}", dx, by_rows(dy, dense.transpose(1, 2)))
        leaf = x.clone().requires_grad_()
        y = grouped_gemm(leaf, w, sizes, lora=Lora(A, B))
        both = [dense[e] + low[e] for e in range(E)]
        yield from check(f"forward with an adapter, {how}", y.detach(), by_rows(x, both), 8e-3)
        (dx,) = torch.autograd.grad(y, leaf, dy)
        yield from check(f"dX with an adapter, {how}", dx, by_rows(dy, [w.T for w in both]), 8e-3)
        index = torch.randperm(M, generator=torch.Generator().manual_seed(1)).cuda()
        leaf = x.clone().requires_grad_()
        y = grouped_gemm(leaf, w, sizes, gather_indices=index, permute_x=True)
        yield from check(f"gathered, {how}", y.detach(), by_rows(x[index], dense))
        (dx,) = torch.autograd.grad(y, leaf, dy)
        moved = torch.empty(M, K, dtype=torch.float64, device="cuda")
        moved[index] = by_rows(dy, dense.transpose(1, 2))
        yield from check(f"dX of gathered rows, {how}", dx, moved)
        if prepared:
            other = every_zero_point(E, N, K, group)
            assert other.zero is not None
            other.zero.copy_(other.zero.flip(1))
            wanted = other.dequantize(torch.bfloat16).double()
            w.copy_(other)
            yield from check("after copy_", grouped_gemm(x, w, sizes), by_rows(x, wanted))


def tested(variants: Loaded) -> dict[str, list[str]]:
    """Return the faults by variant; an empty list if there are none."""
    faults: dict[str, list[str]] = {}
    for group in GROUPS:
        dtype = named(group, zero=True)
        for op in (Op.FORWARD, Op.DX):
            for loaded in variants(op, dtype):
                faults[str(loaded)] = list(wrong(loaded, group))
        for loaded in variants(Op.FORWARD, dtype, Fusion.SCATTER):
            faults[f"{loaded} scatter"] = list(wrong_rows(loaded, group, scatter=True))
        faults[f"calls int4_g{group}_zp"] = list(wrong_calls(group))
    for name, lines in faults.items():
        for line in lines:
            print(f"WRONG {name}: {line}", flush=True)
    return faults


def cell(
    variants: Loaded,
    op: Op,
    size: tuple[Any, ...],
    group: int,
    T: int,
    clock: method.Clock,
    both: dict[bool, tuple[ExpertWeights, NumericsCheck]],
) -> dict[str, Any]:
    """Time the fastest variants of both formats in turns, for one size and number of tokens."""
    model, product, E, top_k, N, K, _ = size
    M = T * top_k
    m_sizes = routed_rows(E, top_k, T).cuda()
    result: dict[str, Any] = {
        "model": model,
        "product": product,
        "op": op.value,
        "E": E,
        "N": N,
        "K": K,
        "T": T,
        "group": group,
        "active": int((m_sizes > 0).sum()),
    }
    x = activations(M, K if op is Op.FORWARD else N, torch.bfloat16, "cuda")
    calls: dict[tuple[bool, str], Callable[[], None]] = {}
    for zero, (w, judge) in both.items():
        problem = Problem(op, named(group, zero=zero), E, N, K)
        here = on(problem, x, w)
        wanted = judge.reference(here, m_sizes.tolist())
        for loaded in variants(op, problem.dtype):
            if beyond(problem, loaded.kernel.config) is not None or not useful(loaded, T):
                continue
            call = caller(loaded.kernel, here, m_sizes)
            here.result.fill_(float("nan"))
            call()
            error = judge.error(here, wanted)
            if not error < MOST_ERROR:
                print(f"WRONG {loaded} {problem} T={T}: {error:.2e}", flush=True)
                result.setdefault("wrong", []).append([str(loaded), error])
            calls[zero, str(loaded.kernel.config)] = call
    first = dict(zip(calls, in_turns(clock, *calls.values(), budget_ms=250.0), strict=True))
    result["all_us"] = {f"{'zero ' if zero else ''}{config}": us for (zero, config), us in first.items()}
    best = {zero: min((key for key in first if key[0] is zero), key=lambda key: first[key]) for zero in (False, True)}
    again = dict.fromkeys((best[False], best[True], (True, best[False][1])))
    there = [key for key in again if key in calls]
    times = dict(zip(there, in_turns(clock, *(calls[key] for key in there), budget_ms=500.0), strict=True))
    fastest = min((key for key in there if key[0]), key=lambda key: times[key])
    return result | {
        "none": best[False][1],
        "zero": fastest[1],
        "none_us": times[best[False]],
        "zero_us": times[fastest],
        "ratio": times[fastest] / times[best[False]],
    }


def useful(loaded: LoadedVariant, T: int) -> bool:
    """Return True if a variant is meant for so many tokens: fitted tiles are for many."""
    return (loaded.kernel.config.block_m >= 64) == (T >= 512) or T == 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle", type=Path, nargs="+", required=True)
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    parser.add_argument("--seconds", type=float, default=210.0, help="no further cell is begun after so long")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    begun = time.monotonic()
    variants, clock = Loaded(args.bundle), method.Clock()
    result: dict[str, Any] = provenance.about() | {"cells": []}

    def write() -> None:
        if args.json:
            args.json.write_text(json.dumps(result, indent=1))

    print(f"{result['gpu']}, torch {torch.__version__}", flush=True)
    result["wrong"] = tested(variants)
    bad = sum(map(bool, result["wrong"].values()))
    print(f"{len(result['wrong'])} tested, {bad} wrong, {time.monotonic() - begun:.0f} s", flush=True)
    write()
    for op in (Op.FORWARD, Op.DX):
        for size in SIZES if op is Op.FORWARD else SIZES[:2]:
            for group in size[-1]:
                _, _, E, _, N, K, _ = size
                both = {}
                for zero in (False, True):
                    dtype = named(group, zero=zero)
                    w = quantised_weights(E, N, K, dtype, "cuda")
                    both[zero] = w, NumericsCheck(Problem(op, dtype, E, N, K), w, torch.device("cuda"))
                for T in args.tokens:
                    if time.monotonic() - begun > args.seconds:
                        continue
                    row = cell(variants, op, size, group, T, clock, both)
                    result["cells"].append(row)
                    print(
                        f"{row['model']} {row['product']} {row['op']} g{group} T={T}: none {row['none_us']:.1f} us "
                        f"({row['none']}), zero points {row['zero_us']:.1f} us ({row['zero']}): "
                        f"x{row['ratio']:.3f}",
                        flush=True,
                    )
                    write()
                del both
    for op in ("forward", "dX"):
        for T in args.tokens:
            ratios = [row["ratio"] for row in result["cells"] if (row["op"], row["T"]) == (op, T)]
            if ratios:
                mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
                print(f"{op} T={T}: x{mean:.3f} on average, x{max(ratios):.3f} at most, {len(ratios)} cells")
    print(f"{bad} wrong, {time.monotonic() - begun:.0f} s", flush=True)


if __name__ == "__main__":
    main()
