"""Runs kernels/rowops/weights.py under Triton's interpreter: cases as JSON on stdin, what is wrong on stdout.

Each case is a format, a dtype of w and sizes. Bits are compared with runtime/weights, in both layouts.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import quick_interpreter  # noqa: F401
import torch

from pretuned.artifacts.records import DType, RowOp
from pretuned.kernels import rowops
from pretuned.kernels.rowops import RowOpSpec, constants
from pretuned.kernels.rowops.weights import dequantize_weights, largest_weight, move_codes, quantize_weights
from pretuned.runtime.launch.weights import KIND_FLAGS, bits_of
from pretuned.runtime.weights import writing
from pretuned.runtime.weights.expert_weights import ExpertWeights

np.seterr(all="ignore")  # Inf and NaN are among the numbers
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def numbers(case: dict, dtype: torch.dtype) -> torch.Tensor:
    """Numbers of all sizes: ties, zeros of both signs, blocks of zeros, the smallest there are."""
    E, N, K = case["shape"]
    torch.manual_seed(case["seed"])
    w = torch.randn(E, N, K) * 0.02
    if case["hard"]:
        w[0, :, : K // 2] = torch.randint(-64, 65, (N, K // 2)) / 16  # many are between two codes
        w[0, :8] *= 2.0 ** torch.randint(-140, 3, (8, K)).float()
        w[-1, : min(N, 128), : min(K, 128)] = 0
        w[-1, 1, :64] = -0.0
        w[-1, 2, 0] = 2.0**-149
        w[-1, -1, -1] = 7.75
    return w.to(dtype)


def wrong(**case: object) -> list[str]:
    format, dtype = str(case["format"]), DTYPES[str(case["dtype"])]
    E, N, K = case["shape"]
    w = numbers(case, dtype)
    new = torch.cat([torch.zeros_like(w), w], 1)[:, N:] if case["view"] else w
    wrong: list[str] = []

    def compare(what: str, got: ExpertWeights, want: ExpertWeights) -> None:
        for name, tensor in want.tensors().items():
            mine = got.tensors()[name].reshape(-1).view(torch.uint8)
            off = mine != tensor.reshape(-1).view(torch.uint8)
            if off.any():
                wrong.append(f"{what} {name}: {int(off.sum())} of {off.numel()}, first {int(off.nonzero()[0])}")

    def filled(like: ExpertWeights) -> ExpertWeights:
        def new(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else torch.empty_like(tensor).view(torch.uint8).fill_(0x5A).view(tensor.dtype)

        more = (new(like.zero), like.global_scale)
        return ExpertWeights(format, new(like.codes), new(like.scale), *more)

    want = ExpertWeights.quantize(w, format)
    ready = ExpertWeights.quantize(w, format).prepare()
    op = RowOp.QUANTIZE_WEIGHTS
    spec = RowOpSpec(op, rowops.dtype_of(DType(format), op))
    for weights in (want, ready) if ready.is_prepared else (want,):
        packed = filled(weights)
        flags = KIND_FLAGS[dtype] | (rowops.PREPARED if weights.is_prepared else 0)
        quantize_weights[(rowops.tiles(spec, E, N, K),)](
            bits_of(new, torch.int16),
            bits_of(packed.codes, torch.int32),
            bits_of(packed.scale, torch.uint8),
            packed.zero if packed.zero is None else packed.zero.view(torch.int8),
            packed.global_scale,
            N,
            K,
            new.stride(0),
            new.stride(1),
            flags,
            **constants(spec),
        )
        compare("prepared" if weights.is_prepared else "stored", packed, weights)
        op_back = RowOp.DEQUANTIZE_WEIGHTS
        back = RowOpSpec(op_back, rowops.dtype_of(DType(format), op_back))
        for to in DTYPES.values():
            got, values = torch.full((E, N, K), 3.0, dtype=to), weights.dequantize(to)
            dequantize_weights[(rowops.tiles(back, E, N, K),)](
                bits_of(got, torch.int16),
                bits_of(weights.codes, torch.int32),
                bits_of(weights.scale, torch.uint8),
                weights.zero if weights.zero is None else weights.zero.view(torch.int8),
                weights.global_scale,
                N,
                K,
                KIND_FLAGS[to] | (flags & rowops.PREPARED),
                **constants(back),
            )
            if not torch.equal(got.view(torch.uint8), values.view(torch.uint8)):
                wrong.append(f"dequantised {weights} to {to}")
    if ready.is_prepared:
        moves = RowOpSpec(RowOp.MOVE_CODES, rowops.dtype_of(DType(format), RowOp.MOVE_CODES))
        grid = (rowops.tiles(moves, E, N, K),)
        draw = torch.randint(0, 256, want.codes.shape, dtype=torch.uint8)
        if draw.shape[2] == K:
            draw[0, :64, :128] &= 0xBF
        words = writing.moved_codes(format, draw.view(want.codes.dtype))
        got, stored = torch.zeros_like(words), torch.zeros_like(draw)
        looked = torch.full(grid, -7, dtype=torch.int32)
        looks = rowops.LOOKS if draw.shape[2] == K else 0
        move_codes[grid](draw, got, looked, N, K, looks, **constants(moves))
        move_codes[grid](stored, words, None, N, K, rowops.BACK, **constants(moves))
        if not torch.equal(got, words):
            wrong.append("moved")
        if looks and not int(looked.amax()) > int(looked.amin()) == 0:  # one tile's codes are numbers
            wrong.append(f"NaN: {looked}")
        if not torch.equal(stored, draw):
            wrong.append("moved back")
    largest = RowOpSpec(RowOp.LARGEST_WEIGHT, DType.FP32)
    for value in (None, float("inf"), float("nan")):
        spoiled = new.clone() if value is None else new.clone().index_fill_(2, torch.tensor([K - 1]), value)
        grid = rowops.tiles(largest, E, N, K)
        most = torch.full((grid,), -7, dtype=torch.int32)
        largest_weight[(grid,)](
            bits_of(spoiled, torch.int16),
            most,
            N,
            K,
            spoiled.stride(0),
            spoiled.stride(1),
            KIND_FLAGS[dtype],
            **constants(largest),
        )
        got = most.amax().view(torch.float32)
        if value is not None and value != value and int(most.amax()) != 0x7F800001:
            wrong.append(f"NaN as {int(most.amax()):#x}")
        if not torch.equal(got, spoiled.float().abs().amax()) and not (
            value is not None and got != got and value != value
        ):
            wrong.append(f"largest {got} of {value}")
    return wrong


json.dump([wrong(**case) for case in json.load(sys.stdin)], sys.stdout)
