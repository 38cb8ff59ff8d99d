"""Time launches before and after much memory is freed, in one process.

    python benchmarks/run.py freed --out freed-h200.json

Mixtral's gate_up at 16 tokens (1.9 GB of weights, bound by memory), torch's grouped_mm of it and a copy of 1 GB. All
tensors and CUDA graphs are made first; then memory that something else held is given back to the driver.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch

from benchmarks import method, provenance
from pretuned.runtime import grouped_gemm

E, N, K, TOP_K, T = 8, 28672, 4096, 2, 16
HELD_GB = (1, 4, 15, 30, 40)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    clock = method.Clock()
    held = [torch.empty(size << 30, dtype=torch.int8, device="cuda") for size in HELD_GB]
    w, x = method.weights(E, N, K, torch.bfloat16), method.activations(T * TOP_K, K, torch.bfloat16)
    m_sizes = method.routed_rows(E, TOP_K, T).cuda()
    ends, turned = m_sizes.cumsum(0).to(torch.int32), w.transpose(1, 2)
    source = torch.empty(1 << 30, dtype=torch.int8, device="cuda")
    target = torch.empty_like(source)
    calls = {
        "grouped_gemm": lambda: grouped_gemm(x, w, m_sizes),
        "torch_grouped_mm": lambda: torch._grouped_mm(x, turned, offs=ends),
        "copy": lambda: target.copy_(source),
    }
    graphs = [clock.capture(call) for call in calls.values()]
    rows = []
    for freed in (0, *HELD_GB):
        if freed:
            held.pop(0)
            torch.cuda.empty_cache()
        us = [statistics.median(times) for times in clock.rounds_us(graphs, 50)]
        rows.append({"freed_gb": freed, "us": dict(zip(calls, us, strict=True))})
        print(
            f"{freed:3} GB more given back:",
            ", ".join(f"{name} {time_us:.1f} us" for name, time_us in rows[-1]["us"].items()),
        )
    report = {**provenance.about(), "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
    args.out.write_text(json.dumps(report, indent=1) + "\n")
