"""Runs quantize_columns.py and quantize_blocks.py of kernels/rowops under Triton's interpreter.

Cases are JSON on stdin, what is wrong on stdout: bytes are compared with those of runtime/ops/fp8_codes.py. torch's
e4m3 stands in for the interpreter's own, which has neither NaN nor the nearest code (interpret_w8a8.py).
"""

from __future__ import annotations

import json
import sys

import interpret_w8a8  # noqa: F401
import quick_interpreter  # noqa: F401
import torch
import triton
import triton.language as tl

from pretuned.kernels.rowops import ALONG_K, ALONG_N, BLOCKS, FP32_WEIGHTS, PICKED
from pretuned.kernels.rowops import quantize_blocks as of_blocks
from pretuned.kernels.rowops import quantize_columns as of_columns
from pretuned.kernels.rowops.quantize_blocks import quantize_blocks
from pretuned.kernels.rowops.quantize_columns import quantize_columns
from pretuned.runtime.ops import fp8_codes

BYTES = torch.uint8


@triton.jit
def _byte(number):
    return number.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)


@triton.jit
def packed(a, b, c, d):
    """Stand in for the PTX of quantize_columns.packed."""
    return _byte(a) | (_byte(b) << 8) | (_byte(c) << 16) | (_byte(d) << 24)


of_columns.packed = of_blocks.packed = packed


def columns(
    counts: list[int], spare: int, C: int, top_k: int, wide: bool, programs: int, shared: bool, special: bool
) -> list[str]:
    torch.manual_seed(sum(counts) + C)
    m_sizes = torch.tensor(counts, dtype=torch.int64 if wide else torch.int32)
    M = max(1, sum(max(0, count) for count in counts) + spare)
    T = M if not top_k else -(-M // top_k)
    x = (torch.randn(T, C) * 2.0 ** torch.randint(-12, 12, (T, 1))).bfloat16()
    index = torch.randperm(T * max(1, top_k))[:M].to(m_sizes.dtype)
    if special:
        x[3, 5], x[4, 70], x[:128, 9], x[:128, 11] = float("nan"), float("inf"), 0.0, 2.0**-126
    end = min(M, sum(max(0, count) for count in counts))
    index[end:] = 2**31 - 1  # rows of no expert are not to be read
    source = x if top_k else x.clone()
    if not top_k:
        source[end:] = float("nan")
    picks = index.clamp(max=T * top_k - 1) if top_k else None
    wanted = fp8_codes.column_codes(x, m_sizes, picks, max(1, top_k), blocks=shared)
    P = wanted.codes.shape[1]
    codes, scale = torch.full((C, P), 7, dtype=BYTES), torch.full(wanted.scale.shape, -1.0)
    words, sizes, step = index.view(torch.int32), m_sizes.view(torch.int32), 2 if wide else 1
    flags = (PICKED if top_k else 0) | (BLOCKS if shared else 0)
    places = P, len(counts), max(1, top_k), step, step, flags
    quantize_columns[(programs,)](source, words, sizes, codes, scale, M, C, *places, BLOCK=128)
    used = sum(-(-min(max(0, count), M) // 128) for count in counts)
    wrong = []
    same = torch.equal(codes[:, : used * 128], wanted.codes.view(BYTES)[:, : used * 128])
    wrong += [] if same else ["codes"]
    wrong += [] if torch.equal(scale[:used], wanted.scale[:used]) else ["scales"]
    others = (codes[:, used * 128 :] != 7).any() or (scale[used:] != -1).any()
    return wrong + (["others"] if others else [])


def blocks(E: int, N: int, K: int, fp32: bool, apart: int, along: list[int], special: bool) -> list[str]:
    torch.manual_seed(E * N + K)
    whole = torch.randn(E, N, K + apart) * 2.0 ** torch.randint(-9, 9, (E, N, 1))
    w = (whole if fp32 else whole.bfloat16())[:, :, :K]
    if special:
        w[0, 5, 7], w[-1, 130, 3], w[0, :128, 128:256] = float("nan"), float("inf"), 0.0
    wanted = fp8_codes.quantise_weights(w)
    flags, wrong = (FP32_WEIGHTS if fp32 else 0) | sum(along), []
    codes = [torch.full_like(want.codes, 7) for want in wanted if want is not None]
    scales = [torch.full_like(want.scale, -1.0) for want in wanted if want is not None]
    bits = w if fp32 else w.view(torch.int16)
    quantize_blocks[(E * (N // 128) * (K // 128),)](
        bits, codes[0], scales[0], codes[1], scales[1], N, K, w.stride(0), w.stride(1), flags, BLOCK=128
    )
    for way, flag in enumerate((ALONG_K, ALONG_N)):
        want = wanted[way]
        if want is None:
            raise AssertionError
        if flag not in along:
            wrong += [f"written {way}"] if (codes[way] != 7).any() or (scales[way] != -1).any() else []
            continue
        wrong += [] if torch.equal(codes[way], want.codes) else [f"codes {way}"]
        same = torch.equal(scales[way].nan_to_num(-7.0), want.scale.nan_to_num(-7.0))
        wrong += [] if same else [f"scales {way}"]
    return wrong


if __name__ == "__main__":
    json.dump([(blocks if "N" in case else columns)(**case) for case in json.load(sys.stdin)], sys.stdout)
