"""Runs cases (JSON on standard input) under Triton's interpreter; prints what was wrong with each."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import quick_interpreter  # noqa: F401
import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from pretuned.artifacts.records import DType, Fusion, Layout, Op, Problem
from pretuned.kernels import registry
from pretuned.kernels import spec as contract_spec
from pretuned.kernels.entry import CLEARER_ROWS, RAGGED_SIZES, ZERO_TAIL, ragged_strides
from pretuned.kernels.portable_plain import lookup, weight
from pretuned.kernels.portable_plain import rows as portable_rows
from pretuned.kernels.portable_plain.tiles import expert_rows, locate
from pretuned.kernels.spec import Config, Loads, Schedule

GUARD = 3.0  # what y holds where the kernel must not write
RANK = 20  # of a low-rank part: no whole step of the reduction
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}


@triton.jit
def ask(part, m_sizes, m_sizes_step, M, E, TEXT: tl.constexpr, BLOCK_M: tl.constexpr):  # type: ignore[no-untyped-def]
    """Stand in for the PTX of kernels/portable_plain/lookup.py, which the interpreter can't run.

    As there, tiles are of all rows asked for.
    """
    _starts, ends = expert_rows(m_sizes, m_sizes_step, M, E, 0, 0, 512)
    e = tl.arange(0, 512)
    low = tl.load(m_sizes + e * m_sizes_step, mask=e < E, other=0)
    high = tl.load(m_sizes + e * m_sizes_step + m_sizes_step - 1, mask=e < E, other=0)
    asked = low.to(tl.int64)
    if m_sizes_step == 2:
        asked = (high.to(tl.int64) << 32) | (asked & 0xFFFFFFFF)
    asked = tl.minimum(tl.maximum(asked, 0), M)
    parts = tl.cumsum((asked + BLOCK_M - 1) // BLOCK_M, 0).to(tl.int32)
    expert, inner, row_start, row_end = locate(part, parts, ends, M)
    return expert, part - inner, row_start, row_end


lookup._ask = ask


def rows_of_experts(case: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """First and end row of each expert, counts clamped as the contract says."""
    M = case["M"]
    ends = np.minimum(np.cumsum([min(max(c, 0), M) for c in case["m_sizes"]]), M)
    return np.concatenate([[0], ends[:-1]]), ends


def experts(case: dict[str, Any]) -> int:
    """Return the experts that the variant is compiled for; ``scan`` takes any number, a few counts at a time."""
    return contract_spec.MAX_EXPERTS_FALLBACK if case["scan"] else triton.next_power_of_2(max(len(case["m_sizes"]), 2))


def poisoned(rows: torch.Tensor, case: dict[str, Any]) -> torch.Tensor:
    starts, ends = rows_of_experts(case)
    for expert in case["poison"]:
        rows[starts[expert] : ends[expert]] = float("nan")
        rows[starts[expert], ::2] = float("inf")
    return rows


@triton.jit
def tell(out, m_sizes, m_sizes_step, M, E, tiles_n, BLOCK_M: tl.constexpr, GROUP_M: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store each program's tile, as (whether there is a tile, expert, row tile, column tile)."""
    tile = tl.program_id(0)
    there, expert, tile_m, tile_n, _start, _end = lookup.find(
        tile, m_sizes, m_sizes_step, M, E, tiles_n, BLOCK_M, GROUP_M
    )
    tl.store(out + 4 * tile, there.to(tl.int32))
    tl.store(out + 4 * tile + 1, expert)
    tl.store(out + 4 * tile + 2, tile_m)
    tl.store(out + 4 * tile + 3, tile_n)


def run_find(case: dict[str, Any]) -> dict[str, Any]:
    """Every tile is found by one program, and by no other of the grid."""
    E, M, block_m, tiles_n = len(case["m_sizes"]), case["M"], case["block"][0], -(-case["N"] // case["block"][1])
    counts = torch.tensor(case["m_sizes"], dtype=torch.int64 if case["wide"] else torch.int32).view(torch.int32)
    tiles = registry.most_tiles(M, E, case["N"], Config(*case["block"], 4, 2, schedule=Schedule.TILE))
    out = torch.full((tiles, 4), -9, dtype=torch.int32)
    tell[(tiles,)](out, counts, 2 if case["wide"] else 1, M, E, tiles_n, BLOCK_M=block_m, GROUP_M=case["group_m"])
    starts, ends = rows_of_experts(case)
    wanted = [
        (e, m, n)
        for e, (start, end) in enumerate(zip(starts, ends, strict=True))
        for m in range(-(-(end - start) // block_m))
        for n in range(tiles_n)
    ]
    rows = sorted(tuple(row[1:]) for row in out.tolist() if row[0])
    return {"wrong": [] if rows == sorted(wanted) else [str(rows), str(wanted)], "untouched": True}


def run(case: dict[str, Any]) -> dict[str, Any]:
    if case["op"] == "find":
        return run_find(case)
    return run_weight(case) if case["op"] == "dW" else run_rows(case)


def index_of(case: dict[str, Any], limit: int) -> torch.Tensor:
    """A shuffled index into [0, limit) for every row, int32 or int64; ``bad_index`` puts two values outside."""
    rng = np.random.default_rng(case["seed"] + 1)
    index = rng.permutation(limit)[: case["M"]]
    if case["bad_index"]:
        index[0], index[-1] = -1, limit + 5
    return torch.tensor(index, dtype=torch.int64 if case["wide"] else torch.int32)


def run_rows(case: dict[str, Any]) -> dict[str, Any]:
    E, M, N, K, top_k = len(case["m_sizes"]), case["M"], case["N"], case["K"], case["top_k"]
    dtype = {"fp32": torch.float32, "fp16": torch.float16}[case["dtype"]]
    op, layout, fusion = Op(case["op"]), Layout(case["layout"]), Fusion(case["fusion"])
    problem = Problem(op, DType(case["dtype"]), E, N, K, layout)
    gemm = contract_spec.gemm_of(problem)
    rng = np.random.default_rng(case["seed"])
    limit = -(-M // top_k) * top_k + top_k  # one token more than the rows come from
    index = index_of(case, limit)
    gathers = Fusion.GATHER in fusion
    x = torch.tensor(rng.standard_normal((limit // top_k if gathers else M, gemm.reduction)), dtype=dtype)
    x = x if gathers else poisoned(x, case)
    w = torch.tensor(rng.standard_normal((E, N, K) if layout is Layout.NK else (E, K, N)) * 0.1, dtype=dtype)
    bias = torch.tensor(rng.standard_normal((E, gemm.columns)), dtype=dtype)
    row_weights = torch.tensor(rng.random(limit), dtype=torch.float32)
    columns = case["filled_up"] or gemm.columns  # of y, as the kernel is told; w's descriptor has those that there are
    y = torch.full((limit + 2, columns + 3), GUARD, dtype=dtype)  # a row stride of its own, and guards

    config = Config(*case["block"], 4, 2, case["group_m"], Loads(case["tma"]), Schedule(case["persistent"]))
    spec = contract_spec.Spec(op, problem.dtype, config, layout, contract_spec.code_of(op, fusion), 1, experts(case))
    tiles = registry.most_tiles(M, E, columns, config)
    values = {
        "x": x,
        "w": w,
        "y": y,
        "N": columns,
        "K": gemm.reduction,
        "stride_x_m": x.stride(0),
        "stride_w_e": w.stride(0),
        "stride_w_row": w.stride(1),
        "stride_y_m": y.stride(0),
        "bias": bias,
        "row_weights": row_weights,
    }
    u = torch.tensor(rng.standard_normal((M, RANK)), dtype=dtype)
    second = torch.tensor(rng.standard_normal((E, gemm.columns, RANK)), dtype=dtype)
    if low_rank := Fusion.LOW_RANK in fusion:
        values |= {"low_x": u, "low_w": second.transpose(1, 2).contiguous() if gemm.w_kn else second, "R": RANK}
        fusion &= ~Fusion.LOW_RANK
    values |= {name: descriptor(values[name], box) for name, box in registry.boxes(spec).items()}
    if fusion:
        values |= {
            "index": index.view(torch.int32),
            "index_step": 2 if case["wide"] else 1,
            "index_end": limit,
            "x_divisor": top_k,
            "flags": fusion.value,
        }
    if case["zero_tail"]:
        values["flags"] = fusion.value | ZERO_TAIL
        if Fusion.SCATTER in fusion:
            assert registry.clears(spec.fusion, config)
            tiles += -(-limit // CLEARER_ROWS)
    launch(portable_rows.rows, spec, case, tiles, values)

    wrong = []
    matrices = w.double().numpy() if gemm.w_kn else w.double().numpy().transpose(0, 2, 1)
    written = torch.zeros_like(y, dtype=torch.bool)
    starts, ends = rows_of_experts(case)
    for expert, (start, end) in enumerate(zip(starts, ends, strict=True)):
        rows = np.arange(start, end)
        flat = index[rows].numpy() if fusion else rows
        rows, flat = rows[(flat >= 0) & (flat < limit)], flat[(flat >= 0) & (flat < limit)]
        target = torch.tensor(flat if Fusion.SCATTER in fusion else rows, dtype=torch.int64)
        written[target, :columns] = True
        if expert in case["poison"] or not len(rows):
            continue
        if bool(y[target, gemm.columns : columns].any()):
            wrong.append((expert, float("inf")))
        want = x[flat // top_k if gathers else rows].double().numpy() @ matrices[expert]
        if low_rank:
            want += u[rows].double().numpy() @ second[expert].double().numpy().T
        if Fusion.BIAS in fusion:
            want += bias[expert].double().numpy()
        if Fusion.WEIGHT in fusion:
            want *= row_weights[flat].double().numpy()[:, None]
        got = y[target, : gemm.columns].double().numpy()
        error = np.linalg.norm(got - want) / np.linalg.norm(want)
        if not error < TOLERANCE[dtype]:
            wrong.append((expert, float(error)))
    if case["zero_tail"]:
        tail = y[int(ends[-1]) : M, : gemm.columns]
        if Fusion.SCATTER in fusion:
            rest = ~written[:limit, 0]
            tail = y[:limit, : gemm.columns][rest]
            y[:limit, : gemm.columns][rest] = GUARD
        if not (tail == 0).all():
            wrong.append((E, float("nan")))
        tail.fill_(GUARD)
    return {"wrong": wrong, "untouched": bool((y[~written] == GUARD).all())}


def run_weight(case: dict[str, Any]) -> dict[str, Any]:
    E, M, N, K = len(case["m_sizes"]), case["M"], case["N"], case["K"]
    dtype = {"fp32": torch.float32, "fp16": torch.float16}[case["dtype"]]
    rng = np.random.default_rng(case["seed"])
    dy = poisoned(torch.tensor(rng.standard_normal((M, N)), dtype=dtype), case)
    x = poisoned(torch.tensor(rng.standard_normal((M, K)), dtype=dtype), case)
    dw = torch.full((E, N, K + 3), GUARD, dtype=dtype)

    config = Config(*case["block"], 4, 2, case["group_m"], Loads(case["tma"]), Schedule(case["persistent"]))
    spec = contract_spec.Spec(Op.DW, DType(case["dtype"]), config, alignment=1, max_experts=experts(case))
    values = {
        "dy": dy,
        "x": x,
        "dw": dw,
        "N": N,
        "K": K,
        "stride_dy_m": dy.stride(0),
        "stride_x_m": x.stride(0),
        "stride_dw_e": dw.stride(0),
        "stride_dw_row": dw.stride(1),
    }
    for name, box in registry.boxes(spec).items():
        rows: torch.Tensor = values[name]
        sizes, strides = [*RAGGED_SIZES, rows.shape[1]], [*ragged_strides(rows.stride(0)), 1]
        values[name] = TensorDescriptor(rows, sizes, strides, list(box))
    launch(weight.weight, spec, case, registry.weight_tiles(N, K, E, config), values)

    wrong = []
    starts, ends = rows_of_experts(case)
    for expert, (start, end) in enumerate(zip(starts, ends, strict=True)):
        if expert in case["poison"]:
            continue
        want = dy[start:end].double().numpy().T @ x[start:end].double().numpy()
        error = np.linalg.norm(dw[expert, :, :K].double().numpy() - want) / max(np.linalg.norm(want), 1e-30)
        if not error < TOLERANCE[dtype]:
            wrong.append((expert, float(error)))
    return {"wrong": wrong, "untouched": bool((dw[:, :, K:] == GUARD).all())}


def launch(kernel: Any, spec: contract_spec.Spec, case: dict[str, Any], tiles: int, values: dict[str, Any]) -> None:
    counts = torch.tensor(case["m_sizes"], dtype=torch.int64 if case["wide"] else torch.int32)
    values |= {"m_sizes": counts.view(torch.int32), "m_sizes_step": 2 if case["wide"] else 1}
    values |= {"M": case["M"], "E": len(case["m_sizes"])}
    null = torch.zeros(1, dtype=torch.int32)  # the interpreter takes no null pointer
    plain = {"index": null, "row_weights": null.float(), "bias": null.float(), "index_step": 1, "index_end": 0}
    values = plain | {"x_divisor": 1, "flags": 0} | values
    grid = min(tiles, case["programs"]) if case["persistent"] else tiles
    constants = registry.constants(spec, 80) | ({"EXPERTS": case["scan"]} if case["scan"] else {})
    kernel[(grid,)](**{name: values[name] for name, _ in registry.arguments(spec)}, **constants)


def descriptor(tensor: torch.Tensor, box: tuple[int, ...]) -> TensorDescriptor:
    return TensorDescriptor(tensor, list(tensor.shape), list(tensor.stride()), list(box))


if __name__ == "__main__":
    json.dump([run(case) for case in json.load(sys.stdin)], sys.stdout)
