"""Rows of x as codes: e4m3 with a scale for each row and 128 columns, for products whose w is of such codes, too."""

from __future__ import annotations

import triton
import triton.language as tl

# The values of kernels/contract/rowops.py.
_USED: tl.constexpr = tl.constexpr(32)
_PICKED: tl.constexpr = tl.constexpr(32768)
_GROUP: tl.constexpr = tl.constexpr(128)  # columns that share a scale
_MOST: tl.constexpr = tl.constexpr(448.0)  # of e4m3


@triton.jit
def quantize(x, index, used, out, scale, M, columns, top_k, index_step, flags, BLOCK: tl.constexpr):
    """scale[g, i] = max |x[i, 128 g : 128 (g + 1)]| / 448, or 1; out[i, k] = x[i, k] / scale[k // 128, i] as e4m3.

    x [M, columns], rows dense; PICKED, row i of x is ``index[i] // top_k`` (int32 words, a step of 2 means int64). With
    USED rows from ``used`` on are left as they are. out is bytes [M, columns], each 64 columns in ``K_ORDER``
    (runtime/weights/order.py), written as int32; scale is fp32 [columns / 128, M], its rows of whole fours. One program
    a row.
    """
    row = tl.program_id(0).to(tl.int64)
    end = M
    if (flags & _USED) != 0:
        end = tl.load(used)
    if row < end:
        source = row
        if (flags & _PICKED) != 0:
            source = (tl.load(index + row * index_step) // top_k).to(tl.int64)
        width = tl.cdiv(M, 4).to(tl.int64) * 4
        h = tl.arange(0, 2)[None, None, :, None, None]
        p = tl.arange(0, 2)[None, None, None, None, :]
        block = tl.arange(0, BLOCK // 64)[:, None, None]
        s = tl.arange(0, 4)[None, :, None]
        c = tl.arange(0, 4)[None, None, :]
        word_of = block * 16 + 4 * c + s
        for first in tl.range(0, columns, BLOCK):
            col = first + tl.arange(0, BLOCK)
            value = tl.load(x + source * columns + col, mask=col < columns, other=0.0).to(tl.float32)
            groups = value.reshape(BLOCK // _GROUP, _GROUP)
            factor = tl.math.div_rn(tl.max(tl.abs(groups), 1), _MOST)
            factor = tl.where(factor > 0, factor, 1.0)
            group = first // _GROUP + tl.arange(0, BLOCK // _GROUP)
            tl.store(scale + group * width + row, factor, mask=group * _GROUP < columns)
            codes = tl.math.div_rn(groups, tl.broadcast_to(factor[:, None], groups.shape)).to(tl.float8e4nv)
            # Of 64 columns k = 16 s + 8 h + 2 c + p is byte 16 c + 4 s + 2 p + (1 - h).
            bits = codes.to(tl.uint8, bitcast=True).to(tl.int32).reshape(BLOCK // 64, 4, 2, 4, 2)
            words = tl.sum(tl.sum(bits << (8 * (2 * p + 1 - h)), 4), 2)
            at = first // 4 + word_of
            tl.store(out + row * (columns // 4) + at, words, mask=4 * at < columns)
