"""Rows at odd multiples of 16 bytes: is a tuned bundle's call ever slower than torch's grouped_mm?

    python benchmarks/run.py by_torch --out by-torch-h100.json    # 90 s on a GPU; exit code 1 if a call is slower

Measures the shipped kernels for E=32, N=2048 and five K, forward and dX, at 1,024 and 8,192 tokens, as ``aot measure``
does, builds a bundle from these times, and times the public calls from it. All take turns in CUDA graphs: the call,
the bundle's kernel alone (of the forward, through ``out``), torch's grouped_mm with offsets made beforehand, and
grouped_mm after one cumsum, as a caller with m_sizes needs it. The call has to reach 0.98 of the last one's speed.
``around`` is what the call adds to a bare grouped_mm where torch runs it: AROUND_TORCH_NS of aot/choose/choices.py.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import provenance
from pretuned.aot.build.pick import published_candidates
from pretuned.aot.choose.bundle import measured_bundle
from pretuned.aot.choose.candidates import Candidates, read_candidates
from pretuned.aot.choose.incumbents import Incumbents
from pretuned.aot.compile.shipped import shipped_file
from pretuned.aot.journal.file import read_journal
from pretuned.aot.plan.plan import BuildPlan
from pretuned.aot.tune.tuner import tune_problems
from pretuned.artifacts.codec import encode
from pretuned.artifacts.publishing import publish
from pretuned.artifacts.records import DType, Op, Problem

KS = (1000, 1032, 1448, 2056, 4104)
BUCKETS = (8192, 65536)  # 1,024 and 8,192 tokens of 8 experts each
LEAST = 0.98
CELLS: Mapping[Problem, Sequence[int]] = {
    Problem(op, DType.BF16, 32, 2048, K): BUCKETS for op in (Op.FORWARD, Op.DX) for K in KS
}


def built(cells: Mapping[Problem, Sequence[int]], candidates: Candidates, journal: Path, path: Path) -> Path:
    """Publish the bundle that a journal makes of these cells."""
    publish(path, encode(measured_bundle(BuildPlan(cells, ()), candidates, read_journal(journal))))
    return path


def tuned(folder: Path, candidates: Candidates) -> Path:
    """Measure the cells on this GPU; return the path of the bundle that they give."""
    journal, incumbents = folder / "odd-k.journal", Incumbents.on_search_path()
    bundle = candidates.with_others(incumbents.codes([*CELLS], candidates.target.sm))
    with published_candidates(BuildPlan(CELLS, ()), bundle, incumbents) as (file, ships, entrants):
        outcome = tune_problems(CELLS, file, journal, entrants=entrants, ships=ships)
    print(f"measured {outcome.measured} of {outcome.total} cells in {outcome.seconds:.0f} s", flush=True)
    return built(CELLS, bundle, journal, folder / "odd-k.msgpack")


def timed() -> list[dict[str, Any]]:
    """Time the public calls in each cell, from the bundles that the runtime finds."""
    import torch

    from benchmarks import method
    from pretuned.aot.compare.run import Inputs, grouped_mm, ours, relative_error
    from pretuned.aot.measure.inputs import measured_routings
    from pretuned.runtime import explain, grouped_gemm

    clock, cells = method.Clock(), []
    for problem, buckets in CELLS.items():
        E, N, K, op = problem.E, problem.N, problem.K, problem.op.value
        for M in buckets:
            w, m_sizes = method.weights(E, N, K, torch.bfloat16), measured_routings(E, M, torch.device("cuda"))[0]
            x = method.activations(M, K, torch.bfloat16)
            inputs = Inputs(x, w, m_sizes, method.activations(M, N, torch.bfloat16) if op == "dX" else None)
            bare = grouped_mm(op, inputs)
            calls: dict[str, Callable[[], object]] = {"ours": ours(op, inputs), "grouped_mm": bare}
            calls["from m_sizes"] = partial(_from_sizes, bare, m_sizes)
            if op == "forward":
                calls["kernel"] = partial(grouped_gemm, x, w, m_sizes, out=x.new_empty((M, N)))
            graphs = [clock.capture(call) for call in calls.values()]
            rounds = clock.rounds_us(graphs, 2)
            rounds = clock.rounds_us(graphs, max(11, min(60, int(3e5 / sum(times[-1] for times in rounds)))))
            us = dict(zip(calls, (statistics.median(times) for times in rounds), strict=True))
            explanation = explain(problem, M=M)
            error = relative_error(ours(op, inputs)(), inputs, op)
            cell = {
                "op": op,
                "K": K,
                "M": M,
                "us": us,
                "runs": explanation.runs,
                "ratio": us["from m_sizes"] / us["ours"],
                "around": us["ours"] - us["grouped_mm"] if explanation.runs == "torch" else None,
                "error": error,
            }
            cells.append(cell)
            shown = "  ".join(f"{name} {time_us:7.1f} us" for name, time_us in us.items())
            print(
                f"{op:8}K={K:<5}M={M:<6}{explanation.runs:7} {shown}  {cell['ratio']:.3f}x torch, error {error:.1e}",
                flush=True,
            )
            del x, w, inputs, bare, calls, graphs
    return cells


def cold_capture() -> float | str:
    """Return the relative error of a graph of this process's first call, which torch runs; or the capture's error."""
    import torch

    from benchmarks import method
    from pretuned.aot.measure.inputs import measured_routings
    from pretuned.runtime import grouped_gemm

    M, K = BUCKETS[-1], KS[-1]
    x, w = method.activations(M, K, torch.bfloat16), method.weights(32, 2048, K, torch.bfloat16)
    m_sizes, graph = measured_routings(32, M, torch.device("cuda"))[0], torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(graph):
            y = grouped_gemm(x, w, m_sizes)
        graph.replay()
        return method.relative_error(y, method.Inputs(x, w, m_sizes))
    except RuntimeError as error:
        return str(error)


def _from_sizes(bare: Any, m_sizes: Any) -> object:
    """A call of grouped_mm that first makes its offsets from m_sizes."""
    return bare(offs=m_sizes.cumsum(0, dtype=bare.keywords["offs"].dtype))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    from pretuned.runtime import reload
    from pretuned.runtime.driver.device import local_gpu

    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pretuned-by-torch-") as folder:
        os.environ["PRETUNED_BUNDLES"] = str(tuned(Path(folder), read_candidates(shipped_file(local_gpu(0).sm))))
        reload()
        captured = cold_capture()
        print(f"a first call in a graph capture: {captured}", flush=True)
        cells = timed()
    worst, around = (
        min(cell["ratio"] for cell in cells),
        [around_us for cell in cells if (around_us := cell["around"]) is not None],
    )
    seconds = round(time.monotonic() - begun, 1)
    print(
        f"{sum(cell['runs'] == 'torch' for cell in cells)} of {len(cells)} cells by torch, worst {worst:.3f}x torch, "
        f"around it {max(around, default=0.0):.1f} us at most, {seconds} s"
    )
    import torch

    report = {
        **provenance.about(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "seconds": seconds,
        "worst": worst,
        "cold_capture": captured,
        "cells": cells,
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    wrong = [
        error for error in (captured, *(cell["error"] for cell in cells)) if isinstance(error, str) or not error < 0.01
    ]
    sys.exit(worst < LEAST or bool(wrong))


if __name__ == "__main__":
    main()
