"""The operands of a warpgroup's product in ``rows_wna16`` (rows.py): a block of w as bf16, and rows of x."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..gluon.pipeline import tile_of
from .dequantize import blocks_per_scale, operand, places_of
from .dequantize_transposed import turned

BLOCK: gl.constexpr = gl.constexpr(64)  # rows of w, and elements of K, in a block of prepared codes


@gluon.jit
def block_of(
    a,
    s,
    stage,
    half,
    UNIT: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    FORMAT: gl.constexpr,
    DX: gl.constexpr,
    OPERAND: gl.constexpr,
):
    """The UNIT-th block of w of a warpgroup in a stage: its columns' blocks at one K, then at the next."""
    DEEP: gl.constexpr = BLOCK_K // BLOCK
    MINE: gl.constexpr = max(1, BLOCK_N // (2 * BLOCK))
    if BLOCK_N == BLOCK:
        n, k = 0, 2 * UNIT + half
    else:
        n, k = half * MINE + UNIT % MINE, UNIT // MINE
    WIDE: gl.constexpr = BLOCK_N // BLOCK
    if DX:
        line = stage * DEEP + k
        at = line * places_of(FORMAT, WIDE) + n // blocks_per_scale(FORMAT)
        block = turned(a.index(line * WIDE + n), s.index(at), FORMAT, OPERAND)
    else:
        line = stage * WIDE + n
        at = line * places_of(FORMAT, DEEP) + k // blocks_per_scale(FORMAT)
        block = operand(a.index(line * DEEP + k), s.index(at), FORMAT, OPERAND)
    return block


@gluon.jit
def x_tile_of(b, stage, k, BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr):
    """The rows of x, [64, BLOCK_M], of the k-th block of K of a stage."""
    BOXES: gl.constexpr = BLOCK_M // min(BLOCK_M, 64)
    return tile_of(b, stage * (BLOCK_K // BLOCK) + k, BOXES, BLOCK_M, BLOCK).permute((1, 0))
