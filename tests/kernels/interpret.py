"""Runs cases (JSON on standard input) under Triton's interpreter; prints what was wrong with each."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from pretuned.artifacts.types import DType, Layout, Op, Problem
from pretuned.kernels import abi, forward
from pretuned.kernels.config import Config

GUARD = 3.0  # what y holds where the kernel must not write


def run(case: dict[str, Any]) -> dict[str, Any]:
    E, M, N, K = len(case["m_sizes"]), case["M"], case["N"], case["K"]
    dtype = {"fp32": torch.float32, "fp16": torch.float16}[case["dtype"]]
    op, layout = Op(case["op"]), Layout(case["layout"])
    problem = Problem(op, DType(case["dtype"]), E, N, K, layout)
    gemm = abi.gemm_of(problem)
    rng = np.random.default_rng(case["seed"])
    x = torch.tensor(rng.standard_normal((M, gemm.reduction)), dtype=dtype)
    w = torch.tensor(rng.standard_normal((E, N, K) if layout is Layout.NK else (E, K, N)) * 0.1, dtype=dtype)
    y = torch.full((M + 2, gemm.columns + 3), GUARD, dtype=dtype)  # a row stride of its own, and guards
    counts = torch.tensor(case["m_sizes"], dtype=torch.int64 if case["wide"] else torch.int32)
    ends = np.minimum(np.cumsum([min(max(c, 0), M) for c in case["m_sizes"]]), M)
    starts = np.concatenate([[0], ends[:-1]])
    for expert in case["poison"]:
        x[starts[expert] : ends[expert]] = float("nan")
        x[starts[expert], ::2] = float("inf")

    config = Config(*case["block"], 4, 2, case["group_m"], case["tma"], case["persistent"])
    spec = abi.Spec(op, problem.dtype, config, layout, alignment=1, max_experts=triton.next_power_of_2(max(E, 2)))
    tiles = abi.most_tiles(M, E, gemm.columns, config)
    values: dict[str, Any] = {
        "x": x, "w": w, "y": y, "m_sizes": counts.view(torch.int32), "M": M, "N": gemm.columns, "K": gemm.reduction,
        "E": E, "stride_x_m": x.stride(0), "stride_w_e": w.stride(0), "stride_w_row": w.stride(1),
        "stride_y_m": y.stride(0), "m_sizes_step": 2 if case["wide"] else 1,
    }  # fmt: skip
    boxes = abi.boxes(spec)
    values |= {f"{name}_desc": descriptor(values[name], boxes[f"{name}_desc"]) for name in "xw" if boxes}
    kernel = getattr(forward, spec.kernel)
    grid = min(tiles, case["programs"]) if case["persistent"] else tiles
    kernel[(grid,)](*(values[name] for name, _ in abi.arguments(spec)), **abi.constants(spec))

    wrong = []
    matrices = w.double().numpy() if gemm.w_kn else w.double().numpy().transpose(0, 2, 1)
    got = y[:M, : gemm.columns].double().numpy()
    for expert, (start, end) in enumerate(zip(starts, ends, strict=True)):
        if expert in case["poison"] or start == end:
            continue
        want = x[start:end].double().numpy() @ matrices[expert]
        error = np.linalg.norm(got[start:end] - want) / np.linalg.norm(want)
        if not error < (1e-5 if dtype is torch.float32 else 2e-3):
            wrong.append((expert, float(error)))
    rest = torch.ones_like(y, dtype=torch.bool)
    rest[: int(ends[-1]), : gemm.columns] = False
    return {"wrong": wrong, "untouched": bool((y[rest] == GUARD).all())}


def descriptor(tensor: torch.Tensor, box: tuple[int, ...]) -> TensorDescriptor:
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(box))


if __name__ == "__main__":
    json.dump([run(case) for case in json.load(sys.stdin)], sys.stdout)
