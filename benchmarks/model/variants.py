"""Times every variant of a bundle on a grid of problems, to show which variant wins where.

    python benchmarks/run.py variants candidates.msgpack --out sweep.json
    python benchmarks/run.py variants candidates.msgpack --models qwen3-30b,olmoe --tokens 1,128 --out sweep.json
    python benchmarks/run.py variants candidates.msgpack --op dX,dW --out "sweep-{op}.json"

Through the runtime's own launcher; the first launch of each (variant, problem) is checked against fp32. torch's
grouped_mm is timed with them. The method is benchmarks/method.py. The file is written after every cell: the same
command continues an interrupted run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks import method, provenance
from benchmarks.method import MODELS
from pretuned.aot.measure.inputs import TORCH
from pretuned.artifacts.bundle_file import BundleFile, open_bundle
from pretuned.artifacts.records import DType, Fusion, Layout, Op, Variant
from pretuned.runtime.launch import gemm as launch_gemm


@dataclass(frozen=True)
class Moved:
    """Rows that an index moves: x's tokens gathered on load, or y's rows scattered on store."""

    fusion: Fusion
    index: torch.Tensor
    row_weights: torch.Tensor
    tokens: torch.Tensor
    top_k: int


def moved(form: str, T: int, top_k: int, x: torch.Tensor) -> Moved | None:
    """The row index of a form: a random order of the T * top_k (token, slot) pairs; None for the plain form."""
    if form == "plain":
        return None
    index = torch.randperm(T * top_k, generator=torch.Generator().manual_seed(3)).to(torch.int32).cuda()
    fusion = {"gather": Fusion.GATHER, "scatter": Fusion.SCATTER, "weight": Fusion.SCATTER | Fusion.WEIGHT}[form]
    row_weights = torch.rand(T * top_k, device="cuda") + 0.5
    return Moved(fusion, index, row_weights, method.activations(T, x.shape[1], x.dtype), top_k)


def put_back(result: torch.Tensor, how: Moved | None) -> torch.Tensor:
    """The result in the plain form's order: rows sorted by expert, without weights."""
    if how is None or how.fusion is Fusion.GATHER:
        return result
    index = how.index.long()
    rows = result[index]
    return rows.float() / how.row_weights[index, None] if Fusion.WEIGHT in how.fusion else rows


def launcher(
    kernel: launch_gemm.LoadedKernel, op: Op, inputs: method.Inputs, result: torch.Tensor, how: Moved | None
) -> Callable[[], None]:
    x, w, dy, m_sizes = inputs.x, inputs.w, inputs.dy, inputs.m_sizes
    E, N, K = w.shape
    M = x.shape[0]
    fused, words = launch_gemm.PLAIN, {}
    if how is not None:
        fused = launch_gemm.Fused(how.fusion, 1, how.top_k)
        words = {"index": how.index.data_ptr(), "row_weights": how.row_weights.data_ptr(), "index_end": len(how.index)}
    strides = (result if op is Op.DW else w).stride()[:2]
    N, K = (K, N) if op is Op.DX else (N, K)
    launch = launch_gemm.product_launcher(kernel, N=N, K=K, E=E, strides=strides, m_sizes_step=1, fused=fused)
    if op is Op.DW:
        words = {"dy": dy.data_ptr(), "x": x.data_ptr(), "stride_dy_m": dy.stride(0), "stride_x_m": x.stride(0)}
    else:
        rows = x if op is Op.FORWARD else dy
        if how is not None and how.fusion is Fusion.GATHER:
            rows = how.tokens
        words |= {"x": rows.data_ptr(), "w": w.data_ptr(), "stride_x_m": rows.stride(0), "stride_y_m": result.stride(0)}
    addresses = result.data_ptr(), m_sizes.data_ptr()

    def call() -> None:
        launch(*addresses, torch.cuda.current_stream().cuda_stream, M=M, **words)

    return call


def fits(variant: Variant, op: Op, M: int, E: int) -> bool:
    """False for variants that can't win: row tiles far larger than an expert's rows, or tiny tiles for many rows."""
    rows, block_m = M / E, dict(variant.config)["block_m"]
    if variant.layout is not Layout.NK:
        return False
    return op is Op.DW or min(64, rows / 8) <= block_m <= max(16, 16 * rows)


def torch_us(clock: method.Clock, op: Op, inputs: method.Inputs) -> float | None:
    """Return the time of torch's grouped_mm in us; None if it does not support the problem."""
    x, w, dy = inputs.x, inputs.w, inputs.dy
    ends = inputs.m_sizes.cumsum(0, dtype=torch.int32)
    left, right = {Op.FORWARD: (x, w.transpose(1, 2)), Op.DX: (dy, w), Op.DW: (None if dy is None else dy.T, x)}[op]
    try:
        return round(method.median_us(clock, lambda: torch._grouped_mm(left, right, offs=ends)), 2)
    except (AttributeError, RuntimeError):  # an older torch, another dtype
        return None


class Sweep:
    """The cells of one op and their file, which an interrupted run continues."""

    def __init__(self, out: Path, head: dict[str, object]) -> None:
        self._out, self._head = out, head
        self._cells: list[dict[str, object]] = []
        self._seconds = 0.0
        if out.exists():
            saved = json.loads(out.read_text())
            other = [name for name, value in head.items() if name != "command" and saved.get(name) != value]
            if other:
                raise SystemExit(f"{out}: a sweep of another {', '.join(other)}: name another --out, or remove it")
            self._cells, self._seconds = saved["cells"], saved["seconds"]

    def has(self, model: str, gemm: str, tokens: int) -> bool:
        return any((cell["model"], cell["gemm"], cell["tokens"]) == (model, gemm, tokens) for cell in self._cells)

    def add(self, cell: dict[str, object], seconds: float) -> None:
        """Add a cell that took ``seconds``. The file is complete after each cell."""
        self._cells.append(cell)
        self._seconds = round(self._seconds + seconds, 2)
        temp = self._out.with_name(f".{self._out.name}.tmp")
        temp.write_text(json.dumps({**self._head, "seconds": self._seconds, "cells": self._cells}, indent=1) + "\n")
        temp.replace(self._out)


def loaded(bundle: BundleFile, op: Op, dtype: DType, form: str, sm_count: int) -> dict[int, launch_gemm.LoadedKernel]:
    """The bundle's variants of one op and form, by number."""
    wanted = {"plain": Fusion.NONE, "gather": Fusion.GATHER}.get(form, Fusion.SCATTER)
    return {
        number: launch_gemm.load_kernel(variant, bundle.cubin(number), 0, sm_count)
        for number, variant in enumerate(bundle.variants())
        if variant.dtype is dtype and variant.op is op and variant.fusion is wanted
    }


def described(kernels: dict[int, launch_gemm.LoadedKernel]) -> dict[str, object]:
    """The loaded variants' configs and resources by number, for the sweep's file."""
    return {
        str(n): {
            "config": dict(k.variant.config),
            "threads": k.variant.threads,
            "shared_bytes": k.variant.shared_bytes,
            "registers": k.variant.registers,
            "alignment": k.variant.alignment,
            "per_sm": k.function.per_sm,
        }
        for n, k in kernels.items()
    }


def measured(
    clock: method.Clock,
    kernels: dict[int, launch_gemm.LoadedKernel],
    op: Op,
    form: str,
    w: torch.Tensor,
    T: int,
    top_k: int,
) -> dict[str, object]:
    """Measure one cell at T tokens: every variant's time, or its error if it is wrong."""
    E, N, K = w.shape
    m_sizes = method.routed_rows(E, top_k, T)
    M = T * top_k
    dy = None if op is Op.FORWARD else method.activations(M, N, w.dtype)
    inputs = method.Inputs(method.activations(M, K, w.dtype), w, m_sizes.cuda(), dy)
    how = moved(form, T, top_k, inputs.x if dy is None else dy)
    if how is not None and form == "gather":  # the reference gets rows that were gathered beforehand
        rows = how.tokens[how.index.long() // top_k]
        inputs = replace(inputs, x=rows) if op is Op.FORWARD else replace(inputs, dy=rows)
    sizes = {Op.FORWARD: (M, N), Op.DX: (M, K), Op.DW: (E, N, K)}[op]
    y = torch.empty(sizes, dtype=w.dtype, device="cuda")
    active = E if op is Op.DW else int((m_sizes > 0).sum())
    times, errors = {}, {}
    for number, kernel in kernels.items():
        if not fits(kernel.variant, op, M, E):
            continue
        y.fill_(float("nan"))
        call = launcher(kernel, op, inputs, y, how)
        call()
        errors[number] = method.relative_error(put_back(y, how), inputs, op.value)
        if errors[number] < method.MAX_ERROR:
            times[str(number)] = round(method.median_us(clock, call), 2)
    del y
    return {
        "E": E,
        "N": N,
        "K": K,
        "top_k": top_k,
        "tokens": T,
        "M": M,
        "active": active,
        "floor_us": round(method.floor_us(M, N, K, active, w.itemsize), 2),
        "us": times,
        "torch_us": torch_us(clock, op, inputs) if how is None else None,
        "worst_error": max(errors.values()),
        "wrong": {n: e for n, e in errors.items() if not e < method.MAX_ERROR},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--out", required=True, help="a file; with several ops, {op} in its name stands for each")
    parser.add_argument("--models", default=",".join(m[0] for m in MODELS))
    parser.add_argument("--tokens", default="1,16,128,1024,8192")
    parser.add_argument("--dtype", default="bf16", type=DType)
    parser.add_argument("--op", default="forward", help="forward, dX, dW, or several of them")
    parser.add_argument(
        "--form", default="plain", choices=("plain", "gather", "scatter", "weight"), help="how rows move"
    )
    args = parser.parse_args()
    ops, tokens = [Op(name) for name in args.op.split(",")], [int(T) for T in args.tokens.split(",")]
    if len(ops) > 1 and "{op}" not in args.out:
        parser.error("several ops need {op} in --out")

    properties = torch.cuda.get_device_properties(0)
    bundle = open_bundle(args.bundle)
    kernels = {op: loaded(bundle, op, args.dtype, args.form, properties.multi_processor_count) for op in ops}
    sweeps = {
        op: Sweep(
            Path(args.out.replace("{op}", op.value)),
            {
                **provenance.about(),
                "op": op.value,
                "form": args.form,
                "gpu": properties.name,
                "sm_count": properties.multi_processor_count,
                "torch": torch.__version__,
                "triton_imported": "triton" in sys.modules,
                "variants": described(kernels[op]),
            },
        )
        for op in ops
    }
    clock = method.Clock()
    for name, E, H, width, top_k in MODELS:
        if name not in args.models.split(","):
            continue
        for gemm, N, K in (("gate_up", 2 * width, H), ("down", H, width)):
            todo = [(op, T) for op in ops for T in tokens if not sweeps[op].has(name, gemm, T)]
            w = method.weights(E, N, K, TORCH[args.dtype]) if todo else None  # built once for all cells
            for op, T in todo:
                begun = time.time()
                cell = {"model": name, "gemm": gemm} | measured(clock, kernels[op], op, args.form, w, T, top_k)
                sweeps[op].add(cell, time.time() - begun)
                times = cell["us"]
                best = min(times, key=times.__getitem__)
                print(
                    f"{op.value:8}{name:14}{gemm:8} T={T:<5} floor {cell['floor_us']:8.1f} best {times[best]:8.1f} "
                    f"torch {cell['torch_us'] or 0.0:8.1f} wrong {len(cell['wrong'])} of {len(cell['us'])} "
                    f"{kernels[op][int(best)].config}",
                    flush=True,
                )
            del w
            torch.cuda.empty_cache()
