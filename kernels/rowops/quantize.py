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
def quantize(x, index, used, codes, scale, M, columns, top_k, index_step, flags, BLOCK: tl.constexpr):
    """scale[g, i] = max |x[i, 128 g : 128 (g + 1)]| / 448, or 1; codes[i, k] = x[i, k] / scale[k // 128, i] as e4m3.

    x [M, columns], rows dense; PICKED, row i of x is ``index[i] // top_k`` (int32 words, a step of 2 means int64). With
    USED rows from ``used`` on are left as they are. codes are bytes [M, columns], each 64 columns in ``K_ORDER``
    (runtime/weights/order.py), written as int32; scale is fp32 [columns / 128, M], its rows of whole fours. A program
    does BLOCK elements, which are whole groups, of one row or of several.
    """
    GROUPS: tl.constexpr = BLOCK // _GROUP
    end = M
    if (flags & _USED) != 0:
        end = tl.load(used)
    each = columns // _GROUP  # groups of a row
    before = tl.program_id(0).to(tl.int64) * GROUPS
    at = (before % each).to(tl.int32) + tl.arange(0, GROUPS)
    row, group = before // each + at // each, at % each
    there = row < end
    source = row
    if (flags & _PICKED) != 0:
        source = (tl.load(index + row * index_step, mask=there, other=0) // top_k).to(tl.int64)
    first = source * columns + group * _GROUP
    element = first[:, None] + tl.arange(0, _GROUP)[None, :]
    value = tl.load(x + element, mask=there[:, None], other=0.0).to(tl.float32)
    factor = tl.math.div_rn(tl.max(tl.abs(value), 1), _MOST)
    factor = tl.where(factor > 0, factor, 1.0)
    tl.store(scale + group * (tl.cdiv(M, 4).to(tl.int64) * 4) + row, factor, mask=there)
    rounded = (value * tl.math.div_rn(1.0, factor)[:, None]).to(tl.float8e4nv)
    # Of 64 columns k = 16 s + 8 h + 2 c + p is byte 16 c + 4 s + 2 p + (1 - h).
    bits = rounded.to(tl.uint8, bitcast=True).to(tl.int32).reshape(GROUPS, 2, 4, 2, 4, 2)
    h = tl.arange(0, 2)[None, None, None, :, None, None]
    p = tl.arange(0, 2)[None, None, None, None, None, :]
    words = tl.sum(tl.sum(bits << (8 * (2 * p + 1 - h)), 5), 3)  # [GROUPS, half, s, c]
    half = tl.arange(0, 2)[None, :, None, None]
    s = tl.arange(0, 4)[None, None, :, None]
    c = tl.arange(0, 4)[None, None, None, :]
    place = (row * (columns // 4) + group * (_GROUP // 4))[:, None, None, None] + 16 * half + 4 * c + s
    tl.store(codes + place, words, mask=there[:, None, None, None])
