"""dW for sm_90 of e4m3 codes of dy and x, transposed; warp-specialised.

A tile is 128 rows of dw by 256 columns, of which each of two warpgroups has 128. A step is 128 rows of an expert, in
which each column of dy has a scale, and each 128 columns of x share one: a warpgroup has one scale of x. It multiplies
the upper 64 rows of a step and adds the product, times its scales, to sums in fp32, as ``rows_w8a8`` does; then the
lower 64 rows. Meanwhile the tensor cores multiply for the other warpgroup. A scale for each column of x would take one
more multiplication for each product, and more of shared memory's bandwidth, which limits dW: 1.43 to 1.49 x as long on
an H200 (docs/inside/trials.md, dw-of-codes).

Results leave through TMA; those that are added to dw, or are fp32, through pointers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from ..gluon.consumer import parts_of, store_boxes
from ..gluon.pipeline import (
    add,
    advance,
    barriers,
    begin,
    draw,
    expert_ends,
    grouped,
    next_tile,
    publish,
    take_all,
    tma_load,
    told,
    view,
)

ROWS: gl.constexpr = gl.constexpr(128)  # rows of a tile
COLUMNS: gl.constexpr = gl.constexpr(256)
GROUP: gl.constexpr = gl.constexpr(128)  # rows of an expert that share a scale
# Values of ``dw_flags``, as in kernels/hopper_w8a8_block/__init__.py.
ADDS: gl.constexpr = gl.constexpr(1)  # add to dw instead of overwriting it
FP32: gl.constexpr = gl.constexpr(2)  # dw's dtype


@gluon.jit
def _load_columns(
    dy,
    x,
    dy_scale,
    a,
    b,
    s,
    full,
    empty,
    queue,
    filled,
    free,
    m_sizes,
    counter,
    M,
    N,
    K,
    E,
    m_sizes_step,
    STAGES: gl.constexpr,
    GROUP_M: gl.constexpr,
    EXPERTS: gl.constexpr,
):
    """The loading warp. Columns past N and K are loaded as zeros."""
    layout: gl.constexpr = gl.BlockedLayout([EXPERTS // 32], [32], [1], [0])
    STEP_BYTES: gl.constexpr = (ROWS + COLUMNS) * GROUP + ROWS * 4
    tiles_n = gl.cdiv(N, ROWS)
    tiles_k = gl.cdiv(K, COLUMNS)
    per_expert = tiles_n * tiles_k
    total = E * per_expert
    count, _end = expert_ends(m_sizes, m_sizes_step, M, E, EXPERTS, layout)
    group_end = gl.associative_scan(count // GROUP + (count % GROUP != 0).to(gl.int32), 0, add)
    stage, phase, slot, turn = begin()
    tile = gl.program_id(0)
    while tile < total:
        expert = tile // per_expert
        n, k = grouped(tile - expert * per_expert, tiles_n, tiles_k, GROUP_M)
        i = gl.arange(0, EXPERTS, layout=layout)
        first = gl.max(gl.where(i < expert, group_end, 0), 0)
        last = gl.max(gl.where(i <= expert, group_end, 0), 0)
        publish(queue, filled, free, slot, turn, n * ROWS, k, first, (last - first) | (expert << 20), 1)
        slot, turn = advance(slot, turn, 2)
        drawn = draw(counter)
        for group in range(first, last):
            mbarrier.wait(empty.index(stage), phase ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, STEP_BYTES)
            at = group * GROUP
            tma_load(dy, [n * ROWS, at], bar, a.index(stage * 2))
            for half in gl.static_range(2):
                tma_load(x, [k * COLUMNS + half * (COLUMNS // 2), at], bar, b.index(stage * 2 + half))
            tma_load(dy, [n * ROWS + 64, at], bar, a.index(stage * 2 + 1))
            tma_load(dy_scale, [group, n * ROWS], bar, s.index(stage))
            stage, phase = advance(stage, phase, STAGES)
        tile = next_tile(counter, told(drawn), gl.num_programs(0), total)
    publish(queue, filled, free, slot, turn, -1, 0, 0, 0, 1)


@gluon.jit
def _scales(held, upper: gl.constexpr, MMA: gl.constexpr):
    """dy's scales of the upper or lower 64 rows of dw."""
    halves = view(held, gl.float32, [2, 64], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return halves.index(upper).load(gl.SliceLayout(1, MMA))


@gluon.jit
def _quarters(tile):
    """Split a tile of 128 columns into parts of 32 columns."""
    left, right = parts_of(tile)
    first, second = left.reshape([64, 2, 32]).permute(0, 2, 1).split()
    third, last = right.reshape([64, 2, 32]).permute(0, 2, 1).split()
    return first, second, third, last


@gluon.jit
def _store_part(dw, part, buffer, row, first, expert, N, K, stride_dw_e, stride_dw_row, dw_flags):
    """dw[expert, row + i, first + j] = part[i, j], 64 x 32, or += it; dw points at bf16, or by the flags at fp32."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    swizzled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2)
    wide = view(buffer, gl.float32, [64, 32], swizzled)
    wide.store(part)
    value = wide.load(LINES)
    n = row + gl.arange(0, 64, layout=gl.SliceLayout(1, LINES))
    k = first + gl.arange(0, 32, layout=gl.SliceLayout(0, LINES))
    inside = (n < N)[:, None] & (k < K)[None, :]
    adds = inside & ((dw_flags & ADDS) != 0)
    at = expert.to(gl.int64) * stride_dw_e + n.to(gl.int64)[:, None] * stride_dw_row + k[None, :]
    if (dw_flags & FP32) != 0:
        to_fp32 = dw.to(gl.pointer_type(gl.float32), bitcast=True) + at
        gl.store(to_fp32, gl.load(to_fp32, mask=adds, other=0.0) + value, mask=inside)
    else:
        value += gl.load(dw + at, mask=adds, other=0.0).to(gl.float32)
        gl.store(dw + at, value.to(dw.dtype.element_ty), mask=inside)


@gluon.jit
def _multiply_columns(
    half: gl.constexpr,
    a,
    b,
    s,
    full,
    empty,
    queue,
    filled,
    free,
    buffers,
    x_scale,
    dw,
    dw_at,
    N,
    K,
    stride_dw_e,
    stride_dw_row,
    dw_flags,
    STAGES: gl.constexpr,
    SLOTS: gl.constexpr,
):
    """One warpgroup: multiply its 128 columns of every tile, and store them."""
    WIDTH: gl.constexpr = COLUMNS // 2
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 32])
    stage, phase, slot, turn = begin()
    groups_k = gl.cdiv(K, GROUP)
    row, col, group, word, _e, _f = take_all(queue, filled, free, slot, turn, 4)
    while row >= 0:
        slot, turn = advance(slot, turn, 2)
        steps = word & 0xFFFFF
        expert = word >> 20
        upper = gl.zeros([64, WIDTH], gl.float32, mma)
        lower = gl.zeros([64, WIDTH], gl.float32, mma)
        at = x_scale + group.to(gl.int64) * groups_k + gl.minimum(col * 2 + half, groups_k - 1)
        by = gl.load(at, mask=steps > 0, other=0.0)
        for step in range(steps):
            following = gl.load(at + gl.minimum(step + 1, steps - 1) * groups_k)
            mbarrier.wait(full.index(stage), phase)
            b_tile = b.index(stage * 2 + half).permute((1, 0))
            part = gl.zeros([64, WIDTH], gl.float32, mma)
            part = warpgroup_mma(a.index(stage * 2), b_tile, part, use_acc=False, is_async=True)
            scale = _scales(s.index(stage), 0, mma) * by
            part = warpgroup_mma_wait(num_outstanding=0, deps=(part,))
            upper += part * scale[:, None]
            # The sums above end here: see ``rows._multiply_scaled``.
            upper, part = warpgroup_mma_wait(num_outstanding=0, deps=(upper, part))
            part = warpgroup_mma(a.index(stage * 2 + 1), b_tile, part, use_acc=False, is_async=True)
            scale = _scales(s.index(stage), 1, mma) * by
            part = warpgroup_mma_wait(num_outstanding=0, deps=(part,))
            lower += part * scale[:, None]
            gl.barrier()
            mbarrier.arrive(empty.index(stage), count=1)
            by = following
            stage, phase = advance(stage, phase, STAGES)
        first = col * COLUMNS + half * WIDTH
        if first < K:
            for i in gl.static_range(2):
                mine = row + 64 * i
                result = upper if i == 0 else lower
                if dw_flags == 0:
                    if mine < N:
                        store_boxes(dw, result, buffers, half, mine, N, first, expert, SLOTS, True, WIDTH // 64)
                elif (steps > 0) | ((dw_flags & ADDS) == 0):
                    parts = _quarters(result)
                    for j in gl.static_range(WIDTH // 32):
                        _store_part(
                            dw_at,
                            parts[j],
                            buffers.index(half * SLOTS),
                            mine,
                            first + 32 * j,
                            expert,
                            N,
                            K,
                            stride_dw_e,
                            stride_dw_row,
                            dw_flags,
                        )
        row, col, group, word, _e, _f = take_all(queue, filled, free, slot, turn, 4)
    tma.store_wait(0)


@gluon.jit
def weight_w8a8(
    dy,
    x,
    dy_scale,
    x_scale,
    dw,
    dw_at,
    m_sizes,
    counter,
    M,
    N,
    K,
    E,
    stride_dw_e,
    stride_dw_row,
    m_sizes_step,
    dw_flags,
    STAGES: gl.constexpr,
    SLOTS: gl.constexpr,
    GROUP_M: gl.constexpr,
    EXPERTS: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """dw[e, n, k] = sum_g dys[g, n] * xs[g, k // 128] * sum_m dy[n, m] * x[k, m], of e's groups g, m of g's 128 rows.

    dy and x are e4m3 [N, P] and [K, P], dy_scale dys and x_scale xs, fp32 [P / 128, N] and [P / 128, K / 128]: as
    ``rowops.quantize_columns`` writes them of M rows, of x with BLOCKS. e4m3 has an exponent: what 128 columns that
    share a scale lose is below 2^-15 of the largest of them. ``dw_at`` points at dw, bf16 or fp32 [E, N, K]; ``dw``
    describes it if it is bf16. ``dw_flags`` are ADDS and FP32. Groups are added in their order.
    """
    swizzled: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    lines: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    flat: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
    a = gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES, ROWS // 2, GROUP], swizzled)
    b = gl.allocate_shared_memory(gl.float8e4nv, [2 * STAGES, COLUMNS // 2, GROUP], swizzled)
    s = gl.allocate_shared_memory(gl.float32, [STAGES, 1, ROWS], flat)
    buffers = gl.allocate_shared_memory(dw.dtype, [2 * SLOTS, 64, 64], lines)
    full, empty, queue, filled, free = barriers(STAGES, 1, 2, 2)
    gl.barrier()
    gl.warp_specialize(
        [
            (
                _multiply_columns,
                (
                    0,
                    a,
                    b,
                    s,
                    full,
                    empty,
                    queue,
                    filled,
                    free,
                    buffers,
                    x_scale,
                    dw,
                    dw_at,
                    N,
                    K,
                    stride_dw_e,
                    stride_dw_row,
                    dw_flags,
                    STAGES,
                    SLOTS,
                ),
            ),
            (
                _multiply_columns,
                (
                    1,
                    a,
                    b,
                    s,
                    full,
                    empty,
                    queue,
                    filled,
                    free,
                    buffers,
                    x_scale,
                    dw,
                    dw_at,
                    N,
                    K,
                    stride_dw_e,
                    stride_dw_row,
                    dw_flags,
                    STAGES,
                    SLOTS,
                ),
            ),
            (
                _load_columns,
                (
                    dy,
                    x,
                    dy_scale,
                    a,
                    b,
                    s,
                    full,
                    empty,
                    queue,
                    filled,
                    free,
                    m_sizes,
                    counter,
                    M,
                    N,
                    K,
                    E,
                    m_sizes_step,
                    STAGES,
                    GROUP_M,
                    EXPERTS,
                ),
            ),
        ],
        [4, 1],
        [REGISTERS, 504 - 2 * REGISTERS],
    )
