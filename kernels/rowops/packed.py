"""Arithmetic of kernels that make codes which Triton has no operation for: PTX."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def packed(a, b, c, d):
    """The e4m3 codes of four numbers as the bytes of a word, those of ``a`` lowest.

    Triton 3.7.1 compiles codes that are shifted and joined as integers to code that reads undefined registers.
    """
    return tl.inline_asm_elementwise(
        "{.reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; "
        "mov.b32 $0, {low, high};}",
        "=r,f,f,f,f",
        [a, b, c, d],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def larger(a, b):
    """The larger magnitudes, with either sign, of two words of two bfloat16 numbers; NaN loses to a number."""
    return tl.inline_asm_elementwise(
        "max.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def lower_of(word):
    """The lower bfloat16 number of a word, as float32."""
    return (word << 16).to(tl.float32, bitcast=True)


@triton.jit
def upper_of(word):
    """The upper bfloat16 number of a word, as float32."""
    return (word & -65536).to(tl.float32, bitcast=True)


@triton.jit
def rounded(low, high):
    """A word of two float32 numbers as bfloat16."""
    return tl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1
    )
