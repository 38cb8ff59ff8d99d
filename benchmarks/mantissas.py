"""fp16 beside bf16 at the power limit: the same code, with as many bits in the factors, and with more.

    PRETUNED_BUNDLES=dtypes-sm90.msgpack:artifacts/bundles/catalogue-sm90.msgpack \\
        python benchmarks/mantissas.py --out benchmarks/results/mantissas-h200.json

A grouped product (forward, T = 8192) and one dense torch product of as many FLOPs, in bf16, in fp16, and in fp16 of the
values that bf16 has (3 of the 10 bits of each mantissa are zero), all in turns. The bundle: docs/performance.md, Other
dtypes. In four of the six cells of the committed results both types run one config.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path

import method
import torch

from kernels import in_turns, layers_of
from pretuned.runtime import explain, grouped_gemm


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
                one.float() for one in (method.weights(E, N, K, torch.float16), method.activations(M, K, torch.float16))
            )
            kinds = {
                "bf16": (x.bfloat16(), w.bfloat16()),
                "fp16": (x.half(), w.half()),
                "fp16 of bf16": (x.bfloat16().half(), w.bfloat16().half()),
            }
            del w, x
            grouped = [partial(grouped_gemm, x, w, m_sizes) for x, w in kinds.values()]
            dense = [partial(torch.mm, x, w[0].T) for x, w in kinds.values()]
            us = in_turns(clock, *grouped, *dense)
            chosen = {kind: str(explain(x, w, m_sizes).candidates[0].config) for kind, (x, w) in kinds.items()}
            cells.append({"model": name, "gemm": gemm, "M": M, "E": E, "N": N, "K": K, "chosen": chosen,
                          "grouped_us": dict(zip(kinds, us[:3], strict=True)),
                          "dense_us": dict(zip(kinds, us[3:], strict=True))})  # fmt: skip
            for what in ("grouped_us", "dense_us"):
                found = cells[-1][what]
                text = "  ".join(f"{kind} {us:.1f} ({found['bf16'] / us:.3f})" for kind, us in found.items())
                print(f"{name:13}{gemm:8}{what:11}{text}", flush=True)
    report = {"command": " ".join(sys.argv), "gpu": torch.cuda.get_device_name(), "torch": torch.__version__,
              "seconds": round(time.time() - begun, 1), "cells": cells}  # fmt: skip
    args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
