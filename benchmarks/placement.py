"""Whether a variant's time depends on where in memory the weights lie: each of a bundle, at several places, in turns.

    python benchmarks/placement.py artifacts/bundles/catalogue-sm90.msgpack --out placement.json

Per cell (model, GEMM, tokens) of the forward: all variants of the op that fit, by the runtime's own launcher, with the
same weights copied to places that lie some GB apart in one piece of memory, which is as large as benchmarks/kernels.py
has it. Another process has other physical memory: run it several times.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import method
import torch
from variants import MODELS, fits, launcher, loaded

from kernels import in_turns, layers_of, room
from pretuned.artifacts.store import open_bundle
from pretuned.artifacts.types import DType, Op
from pretuned.kernels.config import Config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--models", default="gpt-oss-20b")
    parser.add_argument("--tokens", type=lambda text: [int(one) for one in text.split(",")], default=[16])
    parser.add_argument("--places", type=int, default=4)
    parser.add_argument("--specialised", action="store_true", help="those that are, in place of those that aren't")
    parser.add_argument("--budget", type=float, default=400.0, help="ms a place")
    args = parser.parse_args()
    properties = torch.cuda.get_device_properties(0)
    kernels = loaded(open_bundle(args.bundle), Op.FORWARD, DType.BF16, "plain", properties.multi_processor_count)
    clock, where = method.Clock(), room(",".join(m[0] for m in MODELS))
    cells: list[dict[str, Any]] = []
    for name, gemms, E, top_k in layers_of(args.models):
        for gemm, N, K in gemms:
            step = (where.numel() - E * N * K) // max(1, args.places - 1) // 4096 * 4096
            for T in args.tokens:
                M = T * top_k
                for place in range(args.places):
                    w = method.weights(E, N, K, torch.bfloat16, into=where[place * step :])
                    sizes = method.routed_rows(E, top_k, T).cuda()
                    inputs = method.Inputs(method.activations(M, K, w.dtype), w, sizes)
                    y = torch.empty(M, N, dtype=w.dtype, device="cuda")
                    tried = {
                        str(Config.from_pairs(kernel.variant.config)): launcher(kernel, Op.FORWARD, inputs, y, None)
                        for kernel in kernels.values()
                        if fits(kernel.variant, Op.FORWARD, M, E)
                        and bool(dict(kernel.variant.config)["specialized"]) == args.specialised
                    }
                    for call in tried.values():
                        call()
                    us = dict(zip(tried, in_turns(clock, *tried.values(), budget_ms=args.budget), strict=True))
                    cells.append({"model": name, "gemm": gemm, "tokens": T, "place_gb": 2e-9 * place * step, "us": us})
                    print(name, gemm, T, place, {c: round(t, 1) for c, t in sorted(us.items(), key=lambda o: o[1])})
    args.out.write_text(json.dumps({
        "command": " ".join(sys.argv), "gpu": properties.name, "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "torch": torch.__version__, "cells": cells,
    }, indent=1) + "\n")  # fmt: skip


if __name__ == "__main__":
    main()
