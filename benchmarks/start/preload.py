"""Time ``preload`` for catalogue models in fresh processes, after CUDA's context is up and before a bundle is opened.

python benchmarks/run.py preload --out benchmarks/results/preload-h200.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

from benchmarks import provenance

MODELS = ("Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V3", "openai/gpt-oss-20b")
PROGRAM = """
import json, sys, time
import torch
torch.zeros(1, device="cuda").item()
begun = time.perf_counter()
from pretuned.runtime import preload
imported = time.perf_counter()
done = preload(models=[sys.argv[1]])
ended = time.perf_counter()
print(json.dumps({"count": done.count, "cells": done.cells, "import_ms": 1e3 * (imported - begun),
                  "preload_ms": 1e3 * (ended - imported), "gpu": torch.cuda.get_device_name()}))
"""


def fresh_process(model: str) -> dict[str, float]:
    """Return the figures of a new process."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, model], stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    report: dict[str, object] = {}
    for model in args.models.split(","):
        runs = [fresh_process(model) for _ in range(args.repeats)]
        report[model] = runs
        print(
            f"{model}: {runs[0]['count']} variants for {runs[0]['cells']} problems and sizes in "
            f"{statistics.median(run['preload_ms'] for run in runs):.1f} ms (import before it "
            f"{statistics.median(run['import_ms'] for run in runs):.1f} ms)",
            flush=True,
        )
    args.out.write_text(json.dumps(provenance.about() | report, indent=1) + "\n")
