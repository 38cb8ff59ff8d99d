"""The steps of ``first_use.py`` that check results: all catalogue models' products, and unusual calls."""

from __future__ import annotations

import sys
from typing import Any

import torch

from benchmarks import method
from pretuned.artifacts.records import DType, Layout, Op
from pretuned.runtime import explain, grouped_gemm, grouped_gemm_dW, grouped_gemm_dX
from pretuned.runtime.check.call import Rows
from pretuned.runtime.launch.steps import resolve
from pretuned.runtime.ops.products import gated_rows, rows

TOKENS = (1, 16, 128, 1024, 8192)


def read_catalogue() -> list[tuple[str, int, int, int, int]]:
    """Return (name, E, N, K, top_k) of all catalogue models' two GEMMs, read without the builder's packages."""
    from pretuned.aot.models.catalogue import catalogue
    from pretuned.aot.models.layer import LayerShard

    cells = []
    for entry in catalogue().values():
        layer = entry.layer
        shape = LayerShard(
            entry.id,
            layer.E,
            layer.k,
            layer.H,
            layer.I,
            0,
            layer.gated,
            (DType.BF16,),
            1,
            1,
            (1, 65536),
            (Op.FORWARD,),
            "",
        )
        cells += [(f"{entry.id} {gemm.role}", gemm.E, gemm.N, gemm.K, layer.k) for gemm in shape.gemms()]
    return cells


def correct() -> dict[str, Any]:
    cells, worst = [], 0.0
    for name, E, N, K, top_k in read_catalogue():
        w = method.weights(E, N, K, torch.bfloat16)
        for T in TOKENS:
            m_sizes = method.routed_rows(E, top_k, T).cuda()
            M = T * top_k
            inputs = method.Inputs(method.activations(M, K, w.dtype), w, m_sizes)
            y = torch.full((M, N), float("nan"), dtype=w.dtype, device="cuda")
            grouped_gemm(inputs.x, w, m_sizes, out=y)
            error = method.relative_error(y, inputs)
            explanation = explain(inputs.x, w, m_sizes)
            chosen = str(explanation.chosen.config) if explanation.chosen else "torch"
            cells.append(
                {
                    "problem": name,
                    "E": E,
                    "N": N,
                    "K": K,
                    "T": T,
                    "M": M,
                    "error": error,
                    "chosen": chosen,
                    "reason": explanation.reason,
                }
            )
            worst = max(worst, error) if error == error else float("nan")
        del w
        torch.cuda.empty_cache()
        print(f"{name:55} worst so far {worst:.2e}", file=sys.stderr, flush=True)
    bad = [cell for cell in cells if not cell["error"] < method.MAX_ERROR]
    return {
        "cells": cells,
        "worst_error": worst,
        "wrong": len(bad),
        "count": len(cells),
        "triton_imported": "triton" in sys.modules,
    }


def forms() -> dict[str, Any]:
    results = {}

    def check(name: str, E: int, N: int, K: int, sizes: Any, dtype: torch.dtype, **how: Any) -> None:
        m_sizes = torch.tensor(sizes, dtype=how.get("counts", torch.int32), device="cuda")
        M = how.get("M", int(m_sizes.clamp(min=0).sum()))
        x = method.activations(M, K + how.get("pad", 0), dtype)[:, :K]
        w = method.weights(E, N, K, dtype)
        poison = how.get("poison")
        start = 0 if poison is None else int(m_sizes[:poison].sum())
        if poison is not None:
            clean = grouped_gemm(x, w, m_sizes)
            x[start : start + int(m_sizes[poison])] = float("nan")
        y = torch.full((M, N), 3.0, dtype=dtype, device="cuda")
        torch.backends.cuda.matmul.allow_tf32 = how.get("tf32", False)
        grouped_gemm(x, w, m_sizes, out=y)
        if poison is not None:
            rest = torch.ones(M, dtype=torch.bool, device="cuda")
            rest[start : start + int(m_sizes[poison])] = False
            results[name] = {"same_bits": bool(torch.equal(y[rest], clean[rest]))}
            return
        rows = m_sizes.clamp(min=0).to(torch.int32)
        used = min(int(rows.sum()), M)
        error = method.relative_error(y, method.Inputs(x, w, rows))
        again = torch.full_like(y, 3.0)
        torch.backends.cuda.matmul.allow_tf32 = how.get("tf32", False)
        grouped_gemm(x, w, m_sizes, out=again)
        results[name] = {
            "error": error,
            "rest_untouched": bool((y[used:] == 3.0).all()),
            "repeats": bool(torch.equal(y, again)),
        }

    bf16 = torch.bfloat16
    ragged = [0, 5, 130, 1, 0, 64, 17, 300]
    check("bf16", 8, 768, 512, ragged, bf16)
    check("fp16", 8, 768, 512, ragged, torch.float16)
    check("fp32 (ieee)", 8, 768, 512, ragged, torch.float32)
    check("fp32 (tf32 allowed)", 8, 768, 512, ragged, torch.float32, tf32=True)
    check("int64 counts", 8, 768, 512, ragged, bf16, counts=torch.int64)
    check("negative counts", 8, 768, 512, [0, 5, -3, 1, 0, 64, -1, 3], bf16)
    check("rows past the sum", 8, 768, 512, ragged, bf16, M=1000)
    check("padded rows of x", 8, 768, 512, ragged, bf16, pad=64)
    check("odd N and K", 8, 777, 513, ragged, bf16)
    check("tiny N and K", 3, 1, 1, [2, 0, 3], bf16)
    check("width 360", 32, 720, 2880, [1] * 32, bf16)
    check("one expert has all rows", 128, 1536, 2048, [0] * 77 + [4096] + [0] * 50, bf16)
    check("1000 experts", 1000, 64, 64, [1] * 1000, bf16)
    check("NaN stays in its expert", 8, 768, 512, ragged, bf16, poison=2)

    def good(r: dict[str, Any]) -> bool:
        if "same_bits" in r:
            return bool(r["same_bits"])
        return r["error"] < method.MAX_ERROR and r["rest_untouched"] and r["repeats"]

    bad = [name for name, r in results.items() if not good(r)]
    return {"cases": results, "wrong": bad}


def training() -> dict[str, Any]:
    """Test dX, dW, and the gathered, gated, and scattered and weighted forward of all catalogue models' two GEMMs."""
    worst: dict[str, float] = {}
    wrong: list[str] = []
    count = 0

    def judge(form: str, where: str, result: torch.Tensor, inputs: method.Inputs, op: str) -> None:
        nonlocal count
        error = method.relative_error(result, inputs, op)
        worst[form] = max(worst.get(form, 0.0), error) if error == error else float("nan")
        count += 1
        if not error < method.MAX_ERROR:
            wrong.append(f"{form} {where}: {error}")

    for name, E, N, K, top_k in read_catalogue():
        w = method.weights(E, N, K, torch.bfloat16)
        for T in (1, 17, 128, 1000, 1024, 8192):
            m_sizes = method.routed_rows(E, top_k, T)
            if T == 1000:  # one expert has every row
                m_sizes = torch.zeros_like(m_sizes)
                m_sizes[E // 2] = T * top_k
            M, m_sizes, where = T * top_k, m_sizes.cuda(), f"{name} T={T}"
            x, dy = method.activations(M, K, w.dtype), method.activations(M, N, w.dtype)
            inputs = method.Inputs(x, w, m_sizes, dy)
            dx, dw = grouped_gemm_dX(dy, w, m_sizes), grouped_gemm_dW(dy, x, m_sizes)
            judge("dX", where, dx, inputs, "dX")
            judge("dW", where, dw, inputs, "dW")
            if T in (17, 1024) and not (
                torch.equal(dx, grouped_gemm_dX(dy, w, m_sizes)) and torch.equal(dw, grouped_gemm_dW(dy, x, m_sizes))
            ):
                wrong.append(f"bits differ {where}")
            del dx, dw
            index = torch.randperm(M, device="cuda", generator=torch.Generator("cuda").manual_seed(4))
            tokens, topk_weights = method.activations(T, K, w.dtype), torch.rand(T, top_k, device="cuda") + 0.5
            y = grouped_gemm(tokens, w, m_sizes, top_k, index, permute_x=True)
            gathered = method.Inputs(tokens[index // top_k], w, m_sizes)
            judge("gather", where, y, gathered, "forward")
            bounds = torch.zeros(E + 1, dtype=torch.int32, device="cuda")
            bounds[1:] = m_sizes.cumsum(0)
            call = Rows(Op.FORWARD, tokens, w, m_sizes, Layout.NK, M, index, top_k, bounds=bounds)  # as in a layer
            product = resolve(call, y)
            first = product is not None and len(product.steps) > 1
            judge(
                "gather beforehand" if first else "gather", where, rows(call, torch.empty_like(y)), gathered, "forward"
            )
            if name.endswith(" gate_up"):  # where a layer without gradients runs it
                a, again = (gated_rows(call) for _ in range(2))
                if a is not None and again is not None:
                    judge("gather, silu", where, a, gathered, "silu")
                    if not torch.equal(a, again):
                        wrong.append(f"bits differ {where}")
                del a, again
            del gathered
            y = grouped_gemm(x, w, m_sizes, top_k, index, permute_y=True, topk_weights=topk_weights, fuse_mul_post=True)
            y = y[index].float() / topk_weights.flatten()[index, None]
            judge("scatter, weight", where, y, inputs, "forward")
        del w, x, dy, y, inputs
        torch.cuda.empty_cache()
        print(f"{name:55} {worst}", file=sys.stderr, flush=True)
    return {"worst_error": worst, "wrong": wrong, "count": count, "triton_imported": "triton" in sys.modules}
