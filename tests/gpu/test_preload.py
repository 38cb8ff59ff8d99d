"""preload on a real GPU, in a fresh process. PRETUNED_BUNDLES names a bundle that was built for Qwen/Qwen3-30B-A3B."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(
        not os.environ.get("PRETUNED_BUNDLES"), reason="needs PRETUNED_BUNDLES to name bundles for this GPU"
    ),
]

MODEL = "Qwen/Qwen3-30B-A3B"

SCRIPT = f"""
import json, sys
import torch
from pretuned.runtime import grouped_gemm, moe_mlp, preload
from pretuned.runtime.launch.loader import loaded_count
torch.zeros(1, device="cuda")  # the context's own start
import pretuned.runtime.inspect.preload
done = preload(models=["{MODEL}"], tokens=range(1, 4097))
loaded = loaded_count()
again = preload(models=["{MODEL}"], tokens=range(1, 4097))
E, H, I, k = 128, 2048, 768, 8
new = dict(device="cuda", dtype=torch.bfloat16)
up, down = (torch.randn(E, n, d, **new).mul_(0.02).requires_grad_() for n, d in ((2 * I, H), (H, I)))
up_bias, down_bias = (torch.randn(E, n, **new) for n in (2 * I, H))
for T in (1, 3, 16, 100, 1000, 4096):
    hidden = torch.randn(T, H, **new).requires_grad_()
    weights, ids = torch.rand(T, E, device="cuda").topk(k)
    moe_mlp(hidden, up, down, ids, weights).sum().backward()
    with torch.no_grad():
        moe_mlp(hidden, up, down, ids, weights, gate_up_bias=up_bias, down_bias=down_bias)
    rows = torch.full((E,), T * k // E, dtype=torch.int32, device="cuda")
    x = torch.randn(T * k, H, **new)
    for first in (x, torch.randn(T * k, H + 3, **new)[:, 3:]):  # aligned, and not
        with torch.no_grad():
            grouped_gemm(first, up, rows)
            grouped_gemm(first, up, rows, bias=up_bias)
torch.cuda.synchronize()
print(json.dumps({{"count": done.count, "ms": done.seconds * 1e3, "again": again.count, "cells": done.cells,
                  "loaded": loaded, "after": loaded_count(), "triton": "triton" in sys.modules}}))
"""


@pytest.fixture(scope="module")
def figures() -> dict[str, float]:
    """The figures that a fresh process prints."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def test_no_call_of_the_model_loads_anything_afterwards(figures: dict[str, float]) -> None:
    assert figures["count"] == figures["loaded"] > 10
    assert figures["after"] == figures["loaded"]
    assert not figures["triton"]


def test_again_it_has_nothing_to_do(figures: dict[str, float]) -> None:
    assert figures["again"] == figures["count"]
