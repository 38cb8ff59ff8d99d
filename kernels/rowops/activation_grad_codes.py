"""The activation's gradient before the products of a backward in fp8: dh as codes along K and M, act(h) along M.

That is ``activation_grad``, ``quantize_both`` of dh and ``quantize_columns`` of a, of one read of h and da. What is
between them is in shared memory, rounded to bfloat16 as if it were stored, so codes and scales have the bits of three
kernels. Sums for dweights are of 128 columns each; a second launch adds them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy

from ..gluon.pipeline import async_load, view
from .activation import _act, _limited, _number
from .packed import lower_of, rounded, upper_of
from .quantize_columns import GROUP, groups_of, locate, store_columns, store_rows

# Flags; kernels/rowops/__init__.py has equal values.
_KIND: tl.constexpr = tl.constexpr(7)
_SILU: tl.constexpr = tl.constexpr(0)
_SITU: tl.constexpr = tl.constexpr(5)
_WEIGHTED: tl.constexpr = tl.constexpr(64)
_WRITES_DWEIGHTS: tl.constexpr = tl.constexpr(512)
_NOTES: tl.constexpr = tl.constexpr(1024)  # the second launch, which adds the sums that the first stored
_NARROW: tl.constexpr = tl.constexpr(4096)
_NARROW_DWEIGHTS: tl.constexpr = tl.constexpr(8192)
_BLOCKS: tl.constexpr = tl.constexpr(65536)
_PAIRS: tl.constexpr = tl.constexpr(64)  # pairs of neighbouring columns of a tile
_FAR: tl.constexpr = tl.constexpr(150.0)  # as in activation.py
# Sixteen warps took 1.04 times as long, and the next tile fetched to the L2 cache meanwhile 1.09 (an H200).
_PART: tl.constexpr = tl.constexpr(32)  # rows of a tile that are computed at a time
_PARTS: tl.constexpr = tl.constexpr(4)


@triton.jit
def _gradient(gate, up, d, scale, flags, limit, alpha, beta, linear_beta):
    """(d * act(gate) * up, dgate, dup, a) of float32 numbers, by the arithmetic of ``activation_grad``."""
    kind = flags & _KIND
    if kind == _SILU:
        near = tl.clamp(gate, -_FAR, _FAR, propagate_nan=tl.PropagateNan.ALL)
        s = tl.sigmoid(near)
        act = gate * s
        whole = act * up
        dot = d * whole
        d *= scale
        dgate = d * up * (s + near * (s * (1.0 - s)))
        dup = d * act
    else:
        kept_gate, kept_up, most, most_up = _limited(gate, up, flags, limit, beta, linear_beta)
        act, slope = _act(kept_gate, flags, limit, alpha, beta)
        whole = act * kept_up
        dot = d * whole
        d *= scale
        dgate = tl.where(gate > most, 0.0, d * kept_up * slope)
        dup = tl.where(tl.abs(up) > most_up, 0.0, d * act)
        if kind == _SITU:
            bound = _number(linear_beta)
            if bound > 0.0:
                t = kept_up * (1.0 / bound)
                dup *= 1.0 - t * t
    return dot, dgate, dup, scale * whole


@gluon.jit
def _weights_of(row_weights, index, index_step, row, there, flags):
    """The routing weights of rows, float32; 1 without any."""
    weighted = there & ((flags & _WEIGHTED) != 0)
    narrow = (flags & _NARROW) != 0
    flat = gl.load(index + row.to(gl.int64) * index_step, mask=weighted, other=0).to(gl.int64)
    bits = row_weights.to(gl.pointer_type(gl.bfloat16), bitcast=True)
    weight = gl.load(row_weights + flat, mask=weighted & (not narrow), other=1.0)
    return weight * gl.load(bits + flat, mask=weighted & narrow, other=1.0).to(gl.float32)


@gluon.jit
def _read(tiles, h, da, first, row_end, block, pairs, COPY: gl.constexpr):
    """Begin to copy gate, up and da of 128 rows from ``first`` on and 128 columns; rows past the end are zeros."""
    row = first + gl.arange(0, GROUP, layout=gl.SliceLayout(1, COPY))
    pair = block * _PAIRS + gl.arange(0, _PAIRS, layout=gl.SliceLayout(0, COPY))
    inside = (row < row_end)[:, None] & (pair >= 0)[None, :]
    of_h = h.to(gl.pointer_type(gl.int32), bitcast=True) + (row.to(gl.int64) * (2 * pairs))[:, None] + pair[None, :]
    of_da = da.to(gl.pointer_type(gl.int32), bitcast=True) + (row.to(gl.int64) * pairs)[:, None] + pair[None, :]
    async_load(tiles.index(0), of_h, mask=inside)
    async_load(tiles.index(1), of_h + pairs, mask=inside)
    async_load(tiles.index(2), of_da, mask=inside)
    async_copy.commit_group()


@gluon.jit
def _add_dots(index, m_sizes, dots, dweights, M, columns, E, index_step, m_sizes_step, flags):
    """dweights[index[i]] = the sums of row i in the order of columns, zero for rows of no expert."""
    ROWS: gl.constexpr = 32 * gl.num_warps()
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    _group_ends, ends = groups_of(m_sizes, m_sizes_step, M, E)
    used = gl.max(ends, 0)
    is_narrow = (flags & _NARROW_DWEIGHTS) != 0
    narrow = dweights.to(gl.pointer_type(gl.bfloat16), bitcast=True)
    first = gl.program_id(0) * ROWS
    while first < M:
        row = first + gl.arange(0, ROWS, layout=LAYOUT)
        dot = gl.zeros([ROWS], gl.float32, layout=LAYOUT)
        for block in range(columns // GROUP):
            dot += gl.load(dots + block * M.to(gl.int64) + row, mask=row < used, other=0.0)
        flat = gl.load(index + row.to(gl.int64) * index_step, mask=row < M, other=0).to(gl.int64)
        gl.store(dweights + flat, dot, mask=(row < M) & (not is_narrow))
        gl.store(narrow + flat, dot.to(gl.bfloat16), mask=(row < M) & is_narrow)
        first += gl.num_programs(0) * ROWS


@gluon.jit
def activation_grad_codes(
    h,
    da,
    row_weights,
    index,
    m_sizes,
    column_codes,
    column_scale,
    codes,
    scale,
    a_codes,
    a_scale,
    dots,
    dweights,
    M,
    columns,
    places,
    E,
    index_step,
    m_sizes_step,
    flags,
    limit,
    alpha,
    beta,
    linear_beta,
    BLOCK: gl.constexpr,
):
    """Codes of dh[i] = act'(h[i]) * t(i) * da[i] along M and K, and of a[i] = t(i) * act(h[i]) along M.

    With WRITES_DWEIGHTS dots[b, i] is the sum of da[i] * act(h[i]) over the 128 columns b of row i. A launch with NOTES
    writes only dweights[index[i]] = dots[0, i] + dots[1, i] + ..., or zero for rows of no expert.

    h [M, 2*columns] with a gate before up, da and a [M, columns], rows sorted and dense, columns whole 128s. t(i),
    ``index``, NARROW and NARROW_DWEIGHTS are as in ``activation_grad``. column_codes, codes and their scales are of dh
    as ``quantize_both`` writes them, a_codes and a_scale as ``quantize_columns`` does: with BLOCKS 128 columns share a
    scale of dh, without it of a. A program does 128 rows and BLOCK = 128 columns at a time, until there are no more.
    """
    if (flags & _NOTES) != 0:
        _add_dots(index, m_sizes, dots, dweights, M, columns, E, index_step, m_sizes_step, flags)
    else:
        WARPS: gl.constexpr = gl.num_warps()
        PLAIN: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 1, [1, 0])
        TALL: gl.constexpr = gl.BlockedLayout([64 // WARPS, 4], [2, 16], [WARPS, 1], [1, 0])
        WIDE: gl.constexpr = gl.BlockedLayout([32 // WARPS, 8], [4, 8], [WARPS, 1], [1, 0])
        FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        PART: gl.constexpr = gl.BlockedLayout([16 // WARPS, 4], [2, 16], [WARPS, 1], [1, 0])
        OF_ROWS: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
        # gate, up and da, which dgate, dup and a overwrite
        parts = gl.allocate_shared_memory(gl.int32, [3 * _PARTS, _PART, _PAIRS], PLAIN)
        tiles = view(parts, gl.int32, [3, GROUP, _PAIRS], PLAIN)
        weights = gl.allocate_shared_memory(gl.float32, [_PARTS, _PART], FLAT)
        group_ends, ends = groups_of(m_sizes, m_sizes_step, M, E)
        groups = gl.max(group_ends, 0)
        across, pairs = columns // BLOCK, columns // 2
        writes_dots = (flags & _WRITES_DWEIGHTS) != 0
        item = gl.program_id(0)
        first, row_end = locate(item // across, group_ends, ends, M)
        while item < groups * across:
            group, block = item // across, item % across
            _read(tiles, h, da, first, row_end, block, pairs, TALL)
            row = first + gl.arange(0, GROUP, layout=OF_ROWS)
            weight = _weights_of(row_weights, index, index_step, row, row < row_end, flags)
            view(weights, gl.float32, [1, GROUP], FLAT).index(0).store(weight)
            following = item + gl.num_programs(0)
            next_first, next_end = locate(following // across, group_ends, ends, M)  # while this tile is copied
            async_copy.wait_group(0)
            gl.barrier()
            for part in range(_PARTS):
                gate, up = parts.index(part).load(PART), parts.index(_PARTS + part).load(PART)
                d = parts.index(2 * _PARTS + part).load(PART)
                t = weights.index(part).load(gl.SliceLayout(1, PART))[:, None] + gl.zeros_like(lower_of(gate))
                dot, dgate, dup, a = _gradient(
                    lower_of(gate), lower_of(up), lower_of(d), t, flags, limit, alpha, beta, linear_beta
                )
                sums, dgate_1, dup_1, a_1 = _gradient(
                    upper_of(gate), upper_of(up), upper_of(d), t, flags, limit, alpha, beta, linear_beta
                )
                parts.index(part).store(rounded(dgate, dgate_1))
                parts.index(_PARTS + part).store(rounded(dup, dup_1))
                parts.index(2 * _PARTS + part).store(rounded(a, a_1))
                if writes_dots:
                    of_row = gl.sum(dot + sums, 1)
                    row_of = first + part * _PART + gl.arange(0, _PART, layout=of_row.type.layout)
                    gl.store(dots + block * M.to(gl.int64) + row_of, of_row, mask=row_of < row_end)
            gl.barrier()
            for half in range(2):
                at = block + half * across
                store_columns(
                    tiles.index(half).load(TALL), column_codes, column_scale, group, at, 2 * columns, places, flags
                )
                store_rows(tiles.index(half).load(WIDE), codes, scale, first, row_end, at, 2 * columns, M)
            store_columns(tiles.index(2).load(TALL), a_codes, a_scale, group, block, columns, places, flags ^ _BLOCKS)
            gl.barrier()
            item, first, row_end = following, next_first, next_end
