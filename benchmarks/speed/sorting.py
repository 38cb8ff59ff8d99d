"""Times sort_routing, by the bundle's kernel and by torch, in CUDA graphs that take turns, L2 flushed.

    python benchmarks/run.py sorting --out sorting-h200.json

Both results are checked to be equal first.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks import method, provenance
from benchmarks.speed.kernels import geometric_mean, in_turns
from pretuned.runtime import sort_routing
from pretuned.runtime.ops import routing

TOKENS = (1, 16, 128, 1024, 8192, 32768)
MODELS = ((8, 2), (64, 8), (128, 8), (256, 8), (512, 10))  # (experts, experts of a token)


def by_torch(ids: torch.Tensor, E: int) -> Any:
    """Return ``sort_routing`` with torch's operators, used if no bundle has the kernel."""
    with mock.patch.object(routing, "sort_slots", return_value=None):
        return sort_routing(ids, E)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    begun, clock, cells = time.time(), method.Clock(), []
    for E, top_k in MODELS:
        for T in TOKENS:
            generator = torch.Generator().manual_seed(T * 31 + E)
            ids = torch.randn(T, E, generator=generator).topk(top_k, -1).indices.cuda()
            if routing.sort_slots(ids, E) is None:
                sys.exit("no usable bundle has the kernel")
            same = all(map(torch.equal, sort_routing(ids, E), by_torch(ids, E)))
            ours, torchs = in_turns(clock, functools.partial(sort_routing, ids, E), functools.partial(by_torch, ids, E))
            cells.append({"E": E, "top_k": top_k, "tokens": T, "us": ours, "torch_us": torchs, "same": same})
            print(f"E={E:<4} T={T:<6} {ours:7.1f} us, torch {torchs:7.1f} us{'' if same else ' DIFFERENT'}", flush=True)
    report = {
        **provenance.about(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "seconds": round(time.time() - begun, 1),
        "triton_imported": "triton" in sys.modules,
        "x_torch": geometric_mean(c["torch_us"] / c["us"] for c in cells),
        "cells": cells,
    }
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit("some differ" if not all(c["same"] for c in cells) else 0)
