"""Compare fp16 with bf16: the same code, with as many mantissa bits in the factors as bf16, and with more.

    PRETUNED_BUNDLES=dtypes-sm90.msgpack:artifacts/bundles/catalogue-sm90.msgpack \\
        python benchmarks/run.py mantissas --out benchmarks/results/mantissas-h200.json

A grouped product (forward, T = 8192) and one dense torch product of as many FLOPs, in bf16, in fp16, and in fp16 of the
values that bf16 has (3 of the 10 bits of each mantissa are zero); fp16 runs the config that was chosen for bf16, where
the bundle has it. All in turns, twice: one right after the other, so that the power limit lowers the clock, and each
after a pause, at the clock that an idle chip begins with. The bundle: benchmarks/peers/README.md, Other dtypes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import method, provenance
from benchmarks.speed.kernels import in_turns, layers_of
from pretuned.artifacts.errors import InputError
from pretuned.kernels.spec import Config
from pretuned.runtime import explain, grouped_gemm

PAUSE_S, ROUNDS = 0.02, 9


def after_pauses(clock: method.Clock, calls: Sequence[Callable[[], object]]) -> list[float]:
    """The calls' median times in microseconds, in turns, with a pause of the whole GPU before each call."""
    graphs = [clock.capture(call) for call in calls]
    times: list[list[float]] = [[] for _ in graphs]
    for _ in range(ROUNDS):
        for graph, mine in zip(graphs, times, strict=True):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            time.sleep(PAUSE_S)
            clock.flush.zero_()
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            mine.append(1000.0 * start.elapsed_time(end))
    return [statistics.median(mine) for mine in times]


def has(config: Config, x: torch.Tensor, w: torch.Tensor, m_sizes: torch.Tensor) -> bool:
    """Return True if the bundles have this config for operands of this type."""
    try:
        grouped_gemm(x, w, m_sizes, kernel_config_fwd=config)
    except InputError:
        return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", default="qwen3-30b,olmoe,mixtral-8x7b")
    args = parser.parse_args()
    begun, clock, cells = time.time(), method.Clock(), []
    for name, gemms, E, top_k in layers_of(args.models):
        for gemm, N, K in gemms:
            M = 8192 * top_k
            m_sizes = method.routed_rows(E, top_k, 8192).cuda()
            w, x = (
                tensor.float()
                for tensor in (method.weights(E, N, K, torch.float16), method.activations(M, K, torch.float16))
            )
            kinds = {
                "bf16": (x.bfloat16(), w.bfloat16()),
                "fp16": (x.half(), w.half()),
                "fp16 of bf16": (x.bfloat16().half(), w.bfloat16().half()),
            }
            del w, x
            config = explain(*kinds["bf16"], m_sizes).candidates[0].config
            pin = config if has(config, *kinds["fp16"], m_sizes) else None
            pins = {"bf16": None, "fp16": pin, "fp16 of bf16": pin}
            grouped = [
                partial(grouped_gemm, x, w, m_sizes, kernel_config_fwd=pins[kind]) for kind, (x, w) in kinds.items()
            ]
            dense = [partial(torch.mm, x, w[0].T) for x, w in kinds.values()]
            cell: dict[str, Any] = {
                "model": name,
                "gemm": gemm,
                "M": M,
                "E": E,
                "N": N,
                "K": K,
                "config": str(config),
                "fp16_has_it": pin is not None,
            }
            for state, us in (
                ("in_turns", in_turns(clock, *grouped, *dense)),
                ("paused", after_pauses(clock, [*grouped, *dense])),
            ):
                cell[state] = {
                    "grouped_us": dict(zip(kinds, us[:3], strict=True)),
                    "dense_us": dict(zip(kinds, us[3:], strict=True)),
                }
                for what, times in cell[state].items():
                    text = "  ".join(f"{kind} {us:.1f} ({times['bf16'] / us:.3f})" for kind, us in times.items())
                    print(f"{name:13}{gemm:8}{state:9}{what:11}{text}", flush=True)
            cells.append(cell)
    report = {
        **provenance.about(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "seconds": round(time.time() - begun, 1),
        "cells": cells,
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n")
