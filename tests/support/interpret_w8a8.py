"""Runs kernels/portable_w8a8/rows.py under Triton's interpreter: cases as JSON on stdin, what is wrong on stdout.

The interpreter's own e4m3 has neither NaN nor the nearest code: torch's stands in for it.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy
import torch
import triton.language as tl
from interpret_coded import DTYPES, FEW, GUARD, weights
from triton.runtime import interpreter

from pretuned.artifacts.records import DType, Fusion, Layout, Op
from pretuned.kernels import reference, registry
from pretuned.kernels.entry import CLEARER_ROWS, ZERO_TAIL
from pretuned.kernels.portable_w8a8.rows import w8a8
from pretuned.kernels.spec import Config, Schedule, Spec

MOST = {"fp32": 1e-6, "bf16": 6e-3}  # (the interpreter cuts bf16 off)
GROUP = 128
converted = interpreter._convert_float


def as_the_hardware_does(data: Any, source: Any, to: Any, rounding: Any) -> Any:
    """To e4m3, past its largest that, and from it: NaN stays NaN."""
    if to is tl.float8e4nv:
        wide = torch.from_numpy(numpy.ascontiguousarray(data)).float().clamp(-448, 448)
        return wide.to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    if source is tl.float8e4nv:
        codes = torch.from_numpy(numpy.ascontiguousarray(data)).view(torch.uint8).view(torch.float8_e4m3fn)
        return codes.to(torch.float16 if to is tl.float16 else torch.float32).numpy()
    return converted(data, source, to, rounding)


interpreter._convert_float = as_the_hardware_does


def drawn(case: dict[str, Any], count: int) -> torch.Tensor:
    """x [count, K] of very different sizes, groups of zeros among them; with ``ends`` as small and large as can be."""
    K = case["K"]
    groups = -(-K // GROUP)
    powers = torch.tensor([-140, -100, 100] if case["ends"] else [-9, -1, 0, 1])
    scale = 2.0 ** powers[torch.randint(0, len(powers), (count, groups, 1))]
    values = torch.randn(count, groups, GROUP) * scale
    values[0, -1] = 0.0
    return values.view(count, -1)[:, :K].contiguous().to(DTYPES[case["dtype"]])


def quantised(x: torch.Tensor, *, blocks: bool) -> torch.Tensor:
    """x as the kernel is to read it, in float64: e4m3 codes times their scale, one for each 128 of K or each row."""
    M, K = x.shape
    parts = torch.nn.functional.pad(x.float(), (0, -K % GROUP)).view(M, -1, GROUP) if blocks else x.float()[:, None]
    factor = parts.abs().amax(2) * torch.tensor(1 / 448)
    factor = torch.where(factor > 0, factor.clamp(min=2.0**-126), 1.0)[..., None]
    codes = (parts * (1 / factor)).clamp(-448, 448).to(torch.float8_e4m3fn)
    return (codes.double() * factor.double()).view(M, -1)[:, :K]


def run(case: dict[str, Any]) -> list[str]:
    torch.manual_seed(case["seed"])
    E, M, N, K, top_k = len(case["m_sizes"]), case["M"], case["N"], case["K"], case["top_k"]
    dtype, fusion = DTYPES[case["dtype"]], Fusion(case["fusion"])
    w = weights(case)
    gathers, scatters = Fusion.GATHER in fusion, Fusion.SCATTER in fusion
    limit = -(-M // top_k) * top_k + top_k
    x = drawn(case, limit // top_k if gathers else M)
    counts = torch.tensor(case["m_sizes"], dtype=torch.int64 if case["wide"] else torch.int32)
    if case["poison"]:  # of one expert's rows
        first, end = reference.expert_bounds(counts, M)[case["poison"]]
        x[first:end] = float("nan")
    if case["bad_code"]:  # NaN in one row of one expert's w
        w.codes.view(torch.uint8)[1, 3, 5] = 0x7F
    index = torch.randperm(limit)[:M].to(counts.dtype)
    if case["bad_index"]:
        index[0], index[-1] = -1, limit + 5
    bias, row_weights = torch.randn(E, N).to(dtype), torch.rand(limit)
    y = torch.full((limit + 2, N + 3), GUARD, dtype=dtype)
    want = y.double()
    indexed = bool(fusion & (Fusion.GATHER | Fusion.SCATTER | Fusion.WEIGHT))
    read, matrices = quantised(x, blocks=case["format"] == "fp8_block"), list(w.dequantize(torch.float32).double())
    reference.rows(
        read,
        matrices,
        counts,
        want[:, :N],
        M=M,
        layout=Layout.NK,
        index=index if indexed else None,
        index_end=limit,
        gather_divisor=top_k if gathers else 0,
        scatter=scatters,
        row_weights=row_weights.double() if Fusion.WEIGHT in fusion else None,
        bias=bias.double() if Fusion.BIAS in fusion else None,
    )
    config = Config(*case["block"], 4, 2, case["group_m"], schedule=Schedule.TILE)
    spec = Spec(Op.FORWARD, DType(case["format"]), config, Layout.STORED, fusion, 1)
    assert registry.refusal(spec) is None, registry.refusal(spec)
    flags, tiles = fusion.value, registry.most_tiles(M, E, N, config)
    if case["zero_tail"]:
        flags |= ZERO_TAIL
        tiles += -(-limit // CLEARER_ROWS) if scatters else 0
        used = reference.expert_bounds(counts, M)[-1][1]
        rest = (want[:limit, :N] == GUARD).all(1) if scatters else torch.arange(limit) >= used
        rest &= torch.arange(limit) < (limit if scatters else M)
        want[:limit, :N][rest] = 0
    null, wide = torch.zeros(1, dtype=torch.int32), 2 if case["wide"] else 1
    given = {
        "x": x,
        "w": w.codes.view(torch.uint8),
        "w_scale": w.scale,
        "y": y,
        "m_sizes": counts.view(torch.int32),
        "index": index.view(torch.int32),
        "row_weights": row_weights,
        "bias": bias,
        "M": M,
        "N": N,
        "K": K,
        "E": E,
        "stride_x_m": x.stride(0),
        "stride_y_m": y.stride(0),
        "m_sizes_step": wide,
        "index_step": wide,
        "index_end": limit if fusion else 0,
        "x_divisor": top_k,
        "flags": flags,
    }
    given |= {} if fusion else {"index": null, "row_weights": null.float(), "bias": null.float()}
    constants = registry.constants(spec, 89) | {"EXPERTS": FEW.value}
    w8a8[(tiles,)](**{name: given[name] for name, _ in registry.arguments(spec)}, **constants)

    found, touched = [], want != GUARD
    if not torch.equal(y[~touched], torch.full_like(y[~touched], GUARD)):
        found.append("memory around y")
    if not torch.equal(y.isnan(), want.isnan()):
        found.append(f"NaN: {int(y.isnan().sum())}, wanted {int(want.isnan().sum())}")
    there = touched & ~want.isnan()
    got, wanted = y.double()[there], want[there]
    if not wanted.any():
        found += ["what is to be zero"] if got.any() else []
    elif not (error := float((got - wanted).norm() / wanted.norm())) < MOST[case["dtype"]]:
        found.append(f"error {error}")
    return found


if __name__ == "__main__":
    json.dump([run(case) for case in json.load(sys.stdin)], sys.stdout)
