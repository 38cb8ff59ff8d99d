"""Runs kernels/portable_w4a16/rows.py under Triton's interpreter: cases as JSON on stdin, what is wrong on stdout."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import quick_interpreter  # noqa: F401
import torch
import triton
import triton.language as tl

from pretuned.artifacts.records import Fusion, Layout, Op, Problem
from pretuned.kernels import reference, registry
from pretuned.kernels.entry import CLEARER_ROWS, ZERO_TAIL
from pretuned.kernels.portable_plain import lookup
from pretuned.kernels.portable_plain.tiles import expert_rows, expert_tiles, locate
from pretuned.kernels.portable_w4a16.rows import coded
from pretuned.kernels.spec import Config, Schedule, Spec, gemm_of
from pretuned.runtime import ExpertWeights
from pretuned.runtime.check.tensors import address_of

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
GUARD = 3.0
MOST = {"fp32": 1e-6, "fp16": 2e-3, "bf16": 6e-3}


FEW: tl.constexpr = tl.constexpr(8)  # experts: the interpreter takes long over 512


@triton.jit
def ask(part, m_sizes, m_sizes_step, M, E, TEXT: tl.constexpr, BLOCK_M: tl.constexpr):  # type: ignore[no-untyped-def]
    """Stand in for the PTX of kernels/portable_plain/lookup.py, which the interpreter can't run."""
    starts, ends = expert_rows(m_sizes, m_sizes_step, M, E, 0, 0, FEW)
    expert, inner, row_start, row_end = locate(part, expert_tiles(starts, ends, 1, BLOCK_M), ends, M)
    return expert, part - inner, row_start, row_end


lookup._ask = ask


def weights(case: dict[str, Any]) -> ExpertWeights:
    """Every code there is, and scales about 1; or with ``ends`` those that are as large, and as small, as can be."""
    E, N, K = len(case["m_sizes"]), case["N"], case["K"]
    weights = ExpertWeights.quantize(torch.randn(E, N, K), case["format"])
    draw = torch.randint(0, 256, weights.codes.shape, dtype=torch.uint8)
    if weights.precision.w.bits == 8:
        draw[(draw & 0x7F) == 0x7F] = 0x7E
    weights.codes.view(torch.uint8).copy_(draw)
    if weights.zero is not None:
        weights.zero.copy_(torch.randint(0, 16, weights.zero.shape, dtype=torch.uint8))
    scale = weights.precision.w.scale
    assert scale is not None
    if scale.name == "e8m0":
        low, high = (0, 129) if case["ends"] else (125, 129)
        weights.scale.copy_(torch.randint(low, high, weights.scale.shape, dtype=torch.uint8))
        if case["ends"] and not case["prepared"]:
            weights.scale[0, 0, 0] = 240
    elif scale.name == "e4m3":
        weights.scale.view(torch.uint8).copy_(torch.randint(0, 0x7F, weights.scale.shape, dtype=torch.uint8))
        weights.global_scale.copy_(torch.rand(E) + 0.5)
    else:
        weights.scale.copy_((torch.rand(weights.scale.shape) + 0.5) * (2.0**-100 if case["ends"] else 1.0))
    if scale.name == "bf16":
        weights.scale = weights.scale.bfloat16()
    return weights


class Operands(NamedTuple):
    """w's operands by name, the kernel's x of some rows, x as it reads them in float64, and w [columns, reduction]."""

    words: dict[str, Any]
    draw: Callable[[int], torch.Tensor]
    read: Callable[[torch.Tensor], torch.Tensor]
    matrices: list[torch.Tensor]


def wrong(case: dict[str, Any], kernel: Any, spec: Spec, sm: int, on: Operands, most: float) -> list[str]:
    """Return the faults of y, and of the memory around it, after a launch of the kernel."""
    E, M, top_k, fusion = len(case["m_sizes"]), case["M"], case["top_k"], spec.fusion
    columns, reduction = on.matrices[0].shape
    dtype, wide = DTYPES[case["dtype"]], 2 if case["wide"] else 1
    gathers, scatters = Fusion.GATHER in fusion, Fusion.SCATTER in fusion
    limit = -(-M // top_k) * top_k + top_k
    x = on.draw(limit // top_k if gathers else M)
    counts = torch.tensor(case["m_sizes"], dtype=torch.int64 if case["wide"] else torch.int32)
    if case["poison"]:  # of one expert's rows
        first, end = reference.expert_bounds(counts, M)[case["poison"]]
        x[first:end] = float("nan")
    index = torch.randperm(limit)[:M].to(counts.dtype)
    if case["bad_index"]:
        index[0], index[-1] = -1, limit + 5
    bias, row_weights = torch.randn(E, columns).to(dtype), torch.rand(limit)
    y = torch.full((limit + 2, columns + 3), GUARD, dtype=dtype)
    want = y.double()
    reference.rows(
        on.read(x),
        on.matrices,
        counts,
        want[:, :columns],
        M=M,
        layout=Layout.NK,
        index=index if fusion & (Fusion.GATHER | Fusion.SCATTER | Fusion.WEIGHT) else None,
        index_end=limit,
        gather_divisor=top_k if gathers else 0,
        scatter=scatters,
        row_weights=row_weights.double() if Fusion.WEIGHT in fusion else None,
        bias=bias.double() if Fusion.BIAS in fusion else None,
    )
    assert registry.refusal(spec) is None, registry.refusal(spec)
    flags, tiles = fusion.value, registry.most_tiles(M, E, columns, spec.config)
    if case["zero_tail"]:
        flags |= ZERO_TAIL
        tiles += -(-limit // CLEARER_ROWS) if scatters else 0
        used = reference.expert_bounds(counts, M)[-1][1]
        rest = (want[:limit, :columns] == GUARD).all(1) if scatters else torch.arange(limit) >= used
        rest &= torch.arange(limit) < (limit if scatters else M)
        want[:limit, :columns][rest] = 0
    null = torch.zeros(1, dtype=torch.int32)
    arguments = on.words | {
        "x": x,
        "y": y,
        "m_sizes": counts.view(torch.int32),
        "index": index.view(torch.int32) if fusion else null,
        "row_weights": row_weights if fusion else null.float(),
        "bias": bias if fusion else null.float(),
        "M": M,
        "N": columns,
        "K": reduction,
        "E": E,
        "stride_x_m": x.stride(0),
        "stride_y_m": y.stride(0),
        "m_sizes_step": wide,
        "index_step": wide,
        "index_end": limit if fusion else 0,
        "x_divisor": top_k,
        "flags": flags,
    }
    constants = registry.constants(spec, sm) | {"EXPERTS": FEW.value}
    kernel[(tiles,)](**{name: arguments[name] for name, _ in registry.arguments(spec)}, **constants)

    wrong, touched = [], want != GUARD
    if not torch.equal(y[~touched], torch.full_like(y[~touched], GUARD)):
        wrong.append("memory around y")
    if not torch.equal(y.isnan(), want.isnan()):
        wrong.append(f"NaN: {int(y.isnan().sum())}, wanted {int(want.isnan().sum())}")
    there = touched & ~want.isnan()
    got, wanted = y.double()[there], want[there]
    if case.get("one_hot") or not wanted.any():
        if not torch.equal(got, wanted):
            wrong.append(
                f"{int((got != wanted).sum())} of {got.numel()} numbers, the first {got[got != wanted][:3]} "
                f"in place of {wanted[got != wanted][:3]}"
            )
    elif not (error := float((got - wanted).norm() / wanted.norm())) < most:
        wrong.append(f"error {error}")
    return wrong


def run(case: dict[str, Any]) -> list[str]:
    torch.manual_seed(case["seed"])
    E, N, K = len(case["m_sizes"]), case["N"], case["K"]
    dtype, op = DTYPES[case["dtype"]], Op(case["op"])
    w = weights(case)
    values = w.dequantize(torch.float32).to(dtype)
    if case["prepared"]:
        w = w.prepare()
        assert w.is_prepared, "nothing to prepare"
    layout = Layout.NK if case["prepared"] else Layout.STORED
    problem = Problem(op, w.kernel_dtypes[-1], E, N, K, layout)
    gemm, scale = gemm_of(problem), w.plain_scale
    assert address_of(scale)

    def draw(count: int) -> torch.Tensor:
        x = torch.randn(count, gemm.reduction)
        if case["one_hot"]:  # y is then w itself
            x = torch.nn.functional.one_hot(torch.randint(0, gemm.reduction, (count,)), gemm.reduction).float()
        return x.to(dtype)

    words = {
        "w": w.codes.view(torch.uint8 if layout is Layout.STORED else torch.int32),
        "w_scale": scale.view(torch.uint8) if scale.element_size() == 1 else scale,
        "w_zero": w.zero,
        "w_outer": w.global_scale,
    }
    matrices = list((values.transpose(1, 2) if op is Op.DX else values).double())
    config = Config(*case["block"], 4, 2, case["group_m"], schedule=Schedule.TILE)
    spec = Spec(op, problem.dtype, config, layout, Fusion(case["fusion"]), 1)
    return wrong(case, coded, spec, 80, Operands(words, draw, torch.Tensor.double, matrices), MOST[case["dtype"]])


if __name__ == "__main__":
    json.dump([run(case) for case in json.load(sys.stdin)], sys.stdout)
