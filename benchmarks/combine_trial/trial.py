"""A layer's second half two ways: rows scattered to their slots and added up, or left sorted and gathered by the sum.

    python benchmarks/combine_trial/trial.py benchmarks OUT.json

Down's product (forward: weighted; and dX of gate_up, not weighted) and the pass that adds each token's rows up, in one
CUDA graph each, L2 flushed, in turns. ``scattered``: as shipped, the product stores through the index, weighted.
``gathered``: the plain product, and a pass that reads rows by their place, and weighs them. Also both products alone
and both passes alone. The passes are compiled here, by the same Triton.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])

import method
import torch
import triton
import triton.language as tl
from variants import MODELS

from kernels import geometric_mean, in_turns, layers_of, room
from pretuned.artifacts.types import Layout, Op
from pretuned.kernels.passes import BIASED, WEIGHTED
from pretuned.kernels.tokens import combine
from pretuned.runtime.products import Rows, rows


@triton.jit
def combine_scattered(y, experts, out, M, columns, top_k, E, BLOCK: tl.constexpr):
    """As it was at commit 501b571."""
    blocks = tl.cdiv(columns, BLOCK)
    token = tl.program_id(0) // blocks
    col = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    inside = col < columns
    acc = tl.zeros((BLOCK,), tl.float32)
    for first in tl.range(0, top_k, 8):
        for slot in tl.static_range(8):
            flat = token.to(tl.int64) * top_k + first + slot
            there = first + slot < top_k
            expert = tl.load(experts + flat, mask=there, other=-1)
            here = there & (expert >= 0) & (expert < E)
            acc += tl.load(y + flat * columns + col, mask=inside & here, other=0.0).to(tl.float32)
    tl.store(out + token.to(tl.int64) * columns + col, acc.to(out.dtype.element_ty), mask=inside)


# As it is compiled ahead of time: nothing is known of these numbers.
combine_gathered = triton.jit(combine.fn, do_not_specialize=["M", "top_k", "flags"])


BLOCK = 512


def cell(clock, name, op, w, T, k, E, biased):
    """The times of one cell; w as [E, N, K]."""
    torch.manual_seed(1)
    m_sizes = method.routed_rows(E, k, T).cuda()
    M = T * k
    index = torch.randperm(M, generator=torch.Generator().manual_seed(3)).to(torch.int64).cuda()
    for end, count in zip(m_sizes.cumsum(0).tolist(), m_sizes.tolist(), strict=True):
        index[end - count : end] = index[end - count : end].sort().values
    experts = torch.empty(M, dtype=torch.int32, device="cuda")
    experts[index] = torch.repeat_interleave(torch.arange(E, device="cuda"), m_sizes.long()).int()
    places = torch.empty(M, dtype=torch.int32, device="cuda")
    places[index] = torch.arange(M, device="cuda", dtype=torch.int32)
    _, N, K = w.shape
    H, inner = (N, K) if op is Op.FORWARD else (K, N)
    x = method.activations(M, inner, w.dtype)
    weights = torch.rand(M, device="cuda") + 0.5
    bias = torch.randn(E, H, device="cuda").to(w.dtype) if biased and op is Op.FORWARD else None
    weighted = weights if op is Op.FORWARD else None
    y, z = x.new_empty((M, H)), x.new_empty((M, H))
    out, other = x.new_empty((T, H)), x.new_empty((T, H))
    blocks = T * triton.cdiv(H, BLOCK)
    flags = (WEIGHTED if weighted is not None else 0) | (BIASED if bias is not None else 0)

    def scatter():
        rows(Rows(op, x, w, m_sizes, Layout.NK, M, index, 0, True, weighted, bias), y)

    def plain():
        rows(Rows(op, x, w, m_sizes, Layout.NK, M), z)

    def add():
        combine_scattered[(blocks,)](y, experts, out, T, H, k, E, BLOCK=BLOCK, num_warps=4)

    def by(block, warps):
        def add():
            given = z, places, weights, experts, y if bias is None else bias, other, T, H, k, flags
            combine_gathered[(T * triton.cdiv(H, block),)](*given, BLOCK=block, num_warps=warps)

        return add

    add_gathered = by(512, 4)
    blocks_and_warps = ((256, 2), (256, 1), (512, 2), (1024, 4), (1024, 8), (2048, 8))
    others = {f"{block}x{warps}": by(block, warps) for block, warps in blocks_and_warps}

    def scattered():
        scatter()
        add()

    def gathered():
        plain()
        add_gathered()

    scattered(), gathered()
    difference = float((out.float() - other.float()).norm() / out.float().norm())
    calls = {
        "scattered": scattered,
        "gathered": gathered,
        "scatter": scatter,
        "plain": plain,
        "add": add,
        "add_gathered": add_gathered,
    } | others
    us = dict(zip(calls, in_turns(clock, *calls.values()), strict=True))
    return {"model": name, "op": op.value, "tokens": T, "difference": difference, "us": us}


def main():
    names = ",".join(m[0] for m in MODELS if m[0] != "deepseek-v3")
    clock, where, cells = method.Clock(), room(names), []
    with torch.no_grad():
        for name, gemms, E, k in layers_of(names):
            for gemm, N, K in gemms:
                w = method.weights(E, N, K, torch.bfloat16, into=where)
                op = Op.FORWARD if gemm == "down" else Op.DX
                for T in (1, 16, 128, 1024, 4096, 8192) if op is Op.FORWARD else (1024, 8192):
                    one = cell(clock, name, op, w, T, k, E, name == "gpt-oss-20b")
                    cells.append(one)
                    us = one["us"]
                    x, off = us["scattered"] / us["gathered"], one["difference"]
                    print(
                        f"{name:13}{op.value:8} T={T:<5} {x:.3f} x  diff {off:.1e} "
                        + " ".join(f"{key} {value:.1f}" for key, value in us.items()),
                        flush=True,
                    )
    for op, T in dict.fromkeys((c["op"], c["tokens"]) for c in cells):
        some = [c["us"]["scattered"] / c["us"]["gathered"] for c in cells if (c["op"], c["tokens"]) == (op, T)]
        print(op, T, f"{geometric_mean(some):.3f}")
    Path(sys.argv[2]).write_text(
        json.dumps({"command": " ".join(sys.argv), "gpu": torch.cuda.get_device_name(), "cells": cells}, indent=1)
    )


main()
