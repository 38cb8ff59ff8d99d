"""Runs quantize_columns.py and quantize_blocks.py of kernels/rowops under Triton's interpreter.

Cases are JSON on stdin, what is wrong on stdout: bytes are compared with those of runtime/ops/fp8_codes.py. torch's
e4m3 stands in for the interpreter's own, which has neither NaN nor the nearest code (interpret_w8a8.py).
"""

from __future__ import annotations

import json
import sys

import interpret_gluon
import interpret_w8a8  # noqa: F401
import quick_interpreter  # noqa: F401
import torch
import triton
import triton.language as tl

from pretuned.kernels.activations import KINDS, Activation
from pretuned.kernels.rowops import (
    ALONG_K,
    ALONG_N,
    BLOCKS,
    FP32_WEIGHTS,
    GATED,
    NARROW,
    NARROW_DWEIGHTS,
    NOTES,
    PICKED,
    USED,
    WEIGHTED,
    WRITES_A,
    WRITES_DH,
    WRITES_DWEIGHTS,
)
from pretuned.kernels.rowops import quantize_blocks as of_blocks
from pretuned.kernels.rowops.activation import activation_grad
from pretuned.kernels.rowops.quantize import quantize
from pretuned.kernels.rowops.quantize_blocks import quantize_blocks
from pretuned.runtime.ops import fp8_codes

BYTES = torch.uint8
of_columns, of_gradients = interpret_gluon.modules("rowops.quantize_columns", "rowops.activation_grad_codes")


@triton.jit
def _byte(number):
    return number.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)


@triton.jit
def packed(a, b, c, d):
    """Stand in for the PTX of packed.packed."""
    return _byte(a) | (_byte(b) << 8) | (_byte(c) << 16) | (_byte(d) << 24)


@triton.jit
def larger(a, b):
    """Stand in for the PTX of packed.larger."""
    low, high = _larger(a << 16, b << 16), _larger(a, b)
    return (low.to(tl.int32, bitcast=True) >> 16) & 65535 | high.to(tl.int32, bitcast=True)


@triton.jit
def _larger(a, b):
    a = (a & 0x7FFF0000).to(tl.float32, bitcast=True)
    b = (b & 0x7FFF0000).to(tl.float32, bitcast=True)
    return tl.where(a != a, b, tl.where(b != b, a, tl.maximum(a, b)))


@triton.jit
def rounded(low, high):
    """Stand in for the PTX of packed.rounded."""
    return _bfloat16(low) | (_bfloat16(high) << 16)


@triton.jit
def _bfloat16(number):
    return number.to(tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int32) & 65535


of_columns.packed = of_blocks.packed = packed
of_columns.larger = larger
of_gradients.rounded = rounded


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
    of_columns.quantize_columns[(programs,)](source, words, sizes, codes, scale, M, C, *places, BLOCK=128)
    again, rows = (torch.full_like(codes, 7), torch.full_like(scale, -1.0)), x if picks is None else x[picks // top_k]
    of_rows = torch.full((M, C), 7, dtype=BYTES), torch.full((C // 128, -(-M // 4) * 4), -1.0)
    of_columns.quantize_both[(programs,)](source, words, sizes, *again, *of_rows, M, C, *places, BLOCK=128)
    used = sum(-(-min(max(0, count), M) // 128) for count in counts)
    wrong = []
    same = torch.equal(codes[:, : used * 128], wanted.codes.view(BYTES)[:, : used * 128])
    wrong += [] if same else ["codes"]
    wrong += [] if torch.equal(scale[:used], wanted.scale[:used]) else ["scales"]
    others = (codes[:, used * 128 :] != 7).any() or (scale[used:] != -1).any()
    wrong += ["others"] if others else []
    wrong += [] if torch.equal(again[0], codes) and torch.equal(again[1], scale) else ["both"]
    return wrong + ([] if all(map(torch.equal, of_rows, quantised(rows, end))) else ["rows"])


def quantised(x: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes along K and their scales, by the kernel that makes nothing else."""
    M, C = x.shape
    codes, scale = torch.full((M, C), 7, dtype=BYTES), torch.full((C // 128, -(-M // 4) * 4), -1.0)
    used = torch.tensor([rows], dtype=torch.int32)
    quantize[(3,)](x, used, used, codes, scale, M, C, 1, 1, USED, BLOCK=128)
    return codes, scale


def gradients(
    counts: list[int],
    spare: int,
    I: int,  # noqa: E741
    kind: int,
    wide: bool,
    programs: int,
    shared: bool,
    weighted: bool,
    narrow: bool,
    special: bool,
) -> list[str]:
    """activation_grad_codes against activation_grad, whose results torch and ``quantize`` quantise."""
    torch.manual_seed(sum(counts) + I)
    m_sizes = torch.tensor(counts, dtype=torch.int64 if wide else torch.int32)
    end = sum(max(0, count) for count in counts)
    M = max(1, end + spare)
    h = (2 * torch.randn(M, 2 * I)).bfloat16()
    da = (torch.randn(M, I) * 2.0 ** torch.randint(-12, 12, (M, 1))).bfloat16()
    if special:
        h[3, 5], h[4, 70], h[5, I + 3], da[6, 7], da[:128, 9] = torch.nan, torch.inf, -torch.inf, torch.nan, 0.0
    index, weights = torch.randperm(M).to(m_sizes.dtype), torch.rand(M)
    weights = weights.bfloat16() if narrow else weights
    words = Activation(KINDS[kind]).words
    numbers = [words[name] for name in ("limit", "alpha", "beta", "linear_beta")]
    both = GATED | kind | (WEIGHTED if weighted else 0) | WRITES_DWEIGHTS | (NARROW | NARROW_DWEIGHTS if narrow else 0)
    dh, a, dots = torch.full_like(h, 7.0), torch.full_like(da, 7.0), torch.full((M,), 7.0).to(weights.dtype)
    used, step = torch.tensor([end], dtype=torch.int32), 2 if wide else 1
    flags = both | USED | WRITES_DH | WRITES_A
    activation_grad[(3,)](
        h, da, weights, index.view(torch.int32), used, dh, a, dots, M, I, step, flags, *numbers, BLOCK=256
    )
    want_dh = fp8_codes.column_codes(dh, m_sizes, blocks=shared)
    want_a = fp8_codes.column_codes(a, m_sizes, blocks=not shared)
    want_rows, want_scale = quantised(dh, end)
    P = want_dh.codes.shape[1]
    outputs = [torch.full((2 * I, P), 7, dtype=BYTES), torch.full(want_dh.scale.shape, -1.0)]
    outputs += [torch.full((M, 2 * I), 7, dtype=BYTES), torch.full(want_scale.shape, -1.0)]
    outputs += [torch.full((I, P), 7, dtype=BYTES), torch.full(want_a.scale.shape, -1.0)]
    parts, dweights = torch.full((I // 128, M), 7.0), torch.full((M,), 7.0).to(weights.dtype)
    h[end:], da[end:] = torch.nan, torch.nan
    for adds in (0, NOTES):
        flags = both | adds | (BLOCKS if shared else 0)
        sizes = index.view(torch.int32), m_sizes.view(torch.int32)
        places = M, I, P, len(counts), step, step, flags
        kernel = of_gradients.activation_grad_codes[(programs,)]
        kernel(h, da, weights, *sizes, *outputs, parts, dweights, *places, *numbers, BLOCK=128)
    groups = sum(-(-min(max(0, count), M) // 128) for count in counts)
    wrong = []
    for what, at, want in (("dh", 0, want_dh), ("a", 4, want_a)):
        same = torch.equal(outputs[at][:, : groups * 128], want.codes.view(BYTES)[:, : groups * 128])
        wrong += [] if same else [f"{what} codes"]
        wrong += [] if torch.equal(outputs[at + 1][:groups], want.scale[:groups]) else [f"{what} scales"]
        others = (outputs[at][:, groups * 128 :] != 7).any() or (outputs[at + 1][groups:] != -1).any()
        wrong += [f"{what} others"] if others else []
    wrong += [] if torch.equal(outputs[2], want_rows) and torch.equal(outputs[3], want_scale) else ["rows"]
    near = torch.allclose(dweights.float(), dots.float(), 1e-2 if narrow else 1e-5, 1e-4, equal_nan=True)
    return wrong + ([] if near else ["dweights"])


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
    json.dump(
        [(blocks if "N" in case else gradients if "I" in case else columns)(**case) for case in json.load(sys.stdin)],
        sys.stdout,
    )
