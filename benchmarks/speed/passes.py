"""Times the row kernels of a MoE layer, from a bundle and by torch, against the time to move their bytes.

    python benchmarks/run.py passes --out passes-h200.json
    python benchmarks/run.py passes --blocks 512x4,1024x4,1024x8,2048x8 --out blocks.json     # compiles; needs Triton
    python benchmarks/run.py passes --waves 1,2,4,8,0 --present 8 --models qwen3-30b --out waves.json

Rows gathered, the activation (silu, halves), its gradient with routing weights, the weighted sum over a token's slots,
and the rows of y that an index leaves out set to zero, of which there are none (torch sets all rows): bf16, in CUDA
graphs that take turns with torch's own operations, L2 flushed. ``--blocks`` times other columns x warps of a program
than the bundle's. ``--waves`` times the bundle's with so many waves of programs at most (0: any number), in place of
``rowops.WAVES``. With ``--present 8`` an eighth of the rows belong to an expert. The method is benchmarks/method.py.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import method, provenance
from benchmarks.method import MODELS
from pretuned.artifacts.records import DType, RowOp
from pretuned.kernels import rowops as contract
from pretuned.kernels.activations import Activation
from pretuned.kernels.rowops import Block, RowOpSpec, dtype_of
from pretuned.runtime.dispatch.snapshot import snapshot
from pretuned.runtime.driver.rowops import RowOpLauncher
from pretuned.runtime.launch import rowops
from pretuned.runtime.launch.gemm import load_kernel
from pretuned.runtime.ops import activation, gather_combine, zero_rows
from pretuned.runtime.ops.activation import Needs, RowActivation

SILU = RowActivation(Activation("silu"), True, False)
TOKENS = (1, 128, 1024, 8192)


class OtherBlock(RowOpSpec):
    """A row kernel's spec with another block than the bundle's."""

    chosen: Block

    @property
    def config(self) -> Block:
        """The chosen block."""
        return self.chosen


def calls(
    T: int, H: int, width: int, top_k: int, E: int, present: int = 1
) -> Iterator[tuple[RowOp, Callable[[], Any], int]]:
    """Yield (row kernel, its call, the least bytes that it moves); 1 / ``present`` of the T * top_k rows are in use."""
    M = T * top_k
    used = M // present
    x = method.activations(T, H, torch.bfloat16)
    index = torch.rand(T, E, device="cuda").topk(top_k, 1).indices.reshape(-1).sort(stable=True).indices  # sorted slots
    h, da, y = (method.activations(M, columns, torch.bfloat16) for columns in (2 * width, width, H))
    weights = torch.rand(M, device="cuda")
    bounds = torch.full((1,), used, device="cuda", dtype=torch.int32)
    how: dict[str, Any] = {"weights": weights, "index": index, "bounds": bounds}
    yield (
        RowOp.GATHER,
        functools.partial(gather_combine.gather, x, index, top_k, bounds),
        2 * (used + min(T, used)) * H + 8 * used,
    )
    yield RowOp.ACTIVATION, functools.partial(activation.forward, h, SILU, bounds), 2 * 3 * used * width
    grad = functools.partial(activation.gradient, h, da, SILU, Needs(True, True, True), **how)
    yield RowOp.ACTIVATION_GRAD, grad, 2 * 6 * used * width + 16 * M

    places = torch.empty_like(index).index_copy_(0, index, torch.arange(M, device="cuda")).int()
    places[places >= used] = -1
    yield (
        RowOp.COMBINE,
        functools.partial(gather_combine.combine, y, places, top_k, weights),
        2 * (used + T) * H + 8 * M,
    )
    m_sizes = torch.full((E,), -(-M // E), device="cuda", dtype=torch.int32)
    yield RowOp.CLEAR, functools.partial(zero_rows.clear, y, index.int(), m_sizes, M), 4 * M + 3 * M


def by(launcher: object, call: Callable[[], Any]) -> Callable[[], Any]:
    """``call`` with this launcher in place of the bundles'; None runs torch."""

    def run() -> Any:
        original, rowops.launcher = rowops.launcher, lambda *_, **__: launcher
        try:
            return call()
        finally:
            rowops.launcher = original

    return run


def compiled(op: RowOp, block: Block) -> RowOpLauncher:
    """Compile a row kernel with another block."""
    from pretuned.aot.compile.triton import compile_variant

    spec = OtherBlock(op, dtype_of(DType.BF16, op))
    spec.chosen = block
    device = torch.cuda.current_device()
    properties = torch.cuda.get_device_properties(device)
    compiled = compile_variant(spec, 10 * properties.major + properties.minor)
    kernel = load_kernel(compiled.variant, compiled.cubin, device, properties.multi_processor_count)
    return RowOpLauncher(kernel.variant, kernel.function, op)


def limited(op: RowOp, waves: int) -> RowOpLauncher | None:
    """Return the bundles' launcher of a row kernel, with so many waves of programs at most; 0: no limit."""
    kept, contract.WAVES = contract.WAVES, waves or 1 << 20
    snapshot().passes.clear()
    try:
        return rowops.launcher(op, dtype_of(DType.BF16, op), torch.cuda.current_device(), aligned=True)
    finally:
        contract.WAVES = kept
        snapshot().passes.clear()


def measure(models: list[str], blocks: list[Block], waves: list[int], present: int) -> list[dict[str, Any]]:
    clock, cells = method.Clock(), []
    others = {(op, block): compiled(op, block) for op in RowOp for block in blocks}
    of_waves = {(op, many): limited(op, many) for op in RowOp for many in waves}
    for name, E, H, width, top_k in MODELS:
        for T in TOKENS if name in models else ():
            for op, call, moved in calls(T, H, width, top_k, E, present):
                by_way = {"ours": call, "torch": by(None, call)}
                by_way |= {f"{block.block}x{block.num_warps}": by(others[op, block], call) for block in blocks}
                by_way |= {f"{many} waves": by(of_waves[op, many], call) for many in waves}
                graphs = [clock.capture(way) for way in by_way.values()]
                times = [statistics.median(row) for row in clock.rounds_us(graphs, 15)]
                us, floor = dict(zip(by_way, times, strict=True)), 1e6 * moved / method.BYTES_PER_S
                cells.append(
                    {"model": name, "tokens": T, "pass": op.value, "moved_bytes": moved, "floor_us": floor, "us": us}
                )
                line = "  ".join(f"{which} {time_us:8.1f}" for which, time_us in us.items())
                print(f"{name:13} T={T:<5} {op.value:16} {line}  floor {floor:8.1f} us", flush=True)
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", default="qwen3-30b,mixtral-8x7b,gpt-oss-20b")
    parser.add_argument("--blocks", default="", help="columns x warps, e.g. 512x4,1024x8")
    parser.add_argument("--waves", default="", help="most waves of programs of a launch, e.g. 1,2,4; 0: any number")
    parser.add_argument("--present", type=int, default=1, help="one of so many rows belongs to an expert")
    args = parser.parse_args()
    begun = time.time()
    zero_rows.LEAST_BYTES = 0  # small results too
    blocks = [Block(*map(int, text.split("x"))) for text in args.blocks.split(",") if text]
    waves = [int(text) for text in args.waves.split(",") if text]
    cells = measure(args.models.split(","), blocks, waves, args.present)
    report = {
        **provenance.about(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "seconds": round(time.time() - begun, 1),
        "cells": cells,
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n")
