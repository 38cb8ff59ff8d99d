"""Gathered rows of x: their addresses and copies, for the four loading warps of a warp-specialised kernel."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..gluon.consumer import flat_index
from ..gluon.pipeline import GATHER_FLAG, async_load


@gluon.jit
def _held(pointer):
    """The pointers, unchanged, but each in registers of its own.

    Otherwise the compiler subtracts the column and adds it again for each copy, in a single register: each copy then
    waits until the copy before has read its address (1.01 x the time of the whole kernel).
    """
    word = pointer.to(gl.int64, bitcast=True)
    word = gl.inline_asm_elementwise("mov.b64 $0, $1;", "=l,l", [word], dtype=gl.int64, is_pure=True, pack=1)
    return gl.max_contiguous(gl.multiple_of(word.to(pointer.dtype, bitcast=True), [1, 16]), [1, 8])


@gluon.jit
def rows_at(x, moved, row, row_end, stride_x_m, k, LAYOUT: gl.constexpr):
    """Pointers [128, BLOCK_K] to the elements of x for a tile's 128 rows from ``row`` on.

    Also [128, 1], true for rows that exist, and a flag: each of the tile's rows has an index in range.
    """
    index, _row_weights, _bias, index_step, index_end, x_divisor, flags = moved
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    m = row + gl.arange(0, 128, layout=lanes)
    flat, inside = flat_index(index, index_step, index_end, flags, m, row_end)
    source = gl.where((flags & GATHER_FLAG) != 0, flat // x_divisor, m)
    start = gl.where(inside, source, -1)
    whole = gl.min((inside | (m >= row_end)).to(gl.int32), 0) != 0
    start = gl.convert_layout(start, gl.SliceLayout(1, LAYOUT))[:, None]
    return _held(x + (start.to(gl.int64) * stride_x_m + k[None, :])), start >= 0, whole


@gluon.jit
def copy_rows(to, at, there, k, left):
    """Copy a step of the rows of ``there``, and of the ``left`` columns of x; other elements become zero."""
    if left >= to.shape[1]:
        async_load(to, at, mask=there)
    else:
        async_load(to, at, mask=there & (k < left)[None, :])
