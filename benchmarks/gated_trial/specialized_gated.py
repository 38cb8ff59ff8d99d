"""The first GEMM of an MoE layer with its gated activation, for sm_90: ``specialized.py``'s rows, half of them stored.

A tile of the product has BLOCK_N columns of w, half gate and half up: of w's two halves, or even and odd ones.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .specialized import (
    _BIAS,
    _GATHER,
    _WEIGHT,
    _ZERO_TAIL,
    _add,
    _advance,
    _before,
    _expert_ends,
    _flat,
    _next_tile,
    _publish,
    _store_part,
    _take,
)

# What ``flags`` says of the activation, from bit 8 on: see abi.ACTIVATIONS.
_GELU: gl.constexpr = gl.constexpr(1)
_GELU_TANH: gl.constexpr = gl.constexpr(2)
_SWIGLU_OAI: gl.constexpr = gl.constexpr(3)


@gluon.jit
def _logistic(x):
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=r,r", [1.0 + gl.exp(-x)], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _activated(gate, up, activation: gl.constexpr):
    """act(gate) * up, as runtime/activation.py has it. NaN stays NaN."""
    if activation == _SWIGLU_OAI:
        gate = gl.where(gate > 7.0, 7.0, gate)
        up = gl.where(up > 7.0, 7.0, gl.where(up < -7.0, -7.0, up))
        result = (up + 1.0) * gate * _logistic(1.702 * gate)
    elif activation == _GELU:
        result = 0.5 * gate * (1.0 + gl.erf(gate * 0.7071067811865476)) * up
    elif activation == _GELU_TANH:
        result = gate * _logistic(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
    else:
        result = gate * _logistic(gate) * up
    return result


@gluon.jit
def _halves(tile, WIDTH: gl.constexpr):
    """The left and the right half of [64, WIDTH]."""
    return tile.reshape([64, 2, WIDTH // 2]).permute(0, 2, 1).split()


@gluon.jit
def _gate_and_up(
    acc, moved, expert, row, col, row_end, N,
    BLOCK_N: gl.constexpr, INTERLEAVED: gl.constexpr, INDEXED: gl.constexpr,
):  # fmt: skip
    """Both halves of (acc + bias) * weight, where the call has them: [64, BLOCK_N // 2] each."""
    if INTERLEAVED:
        gate, up = acc.reshape([64, BLOCK_N // 2, 2]).split()
    else:
        gate, up = _halves(acc, BLOCK_N)
    if INDEXED:
        LAYOUT: gl.constexpr = gate.type.layout
        index, row_weights, bias, index_step, index_end, _x_divisor, flags = moved
        n = col * (BLOCK_N // 2) + gl.arange(0, BLOCK_N // 2, layout=gl.SliceLayout(0, LAYOUT))
        wanted = (n < N // 2) & ((flags & _BIAS) != 0)
        here = bias + expert.to(gl.int64) * N
        if INTERLEAVED:
            of_gate = gl.load(here + 2 * n, mask=wanted, other=0.0)
            of_up = gl.load(here + 2 * n + 1, mask=wanted, other=0.0)
        else:
            of_gate = gl.load(here + n, mask=wanted, other=0.0)
            of_up = gl.load(here + N // 2 + n, mask=wanted, other=0.0)
        m = row + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT)).to(gl.int64)
        flat, inside = _flat(index, index_step, index_end, flags, m, row_end)
        scale = gl.load(row_weights + flat, mask=inside & ((flags & _WEIGHT) != 0), other=1.0)[:, None]
        gate = (gate + of_gate.to(gl.float32)[None, :]) * scale
        up = (up + of_up.to(gl.float32)[None, :]) * scale
    return gate, up


@gluon.jit
def _store(
    y, result, buffer, moved, row, col, row_end, columns, stride_y_m,
    WIDTH: gl.constexpr, PARTS: gl.constexpr, INDEXED: gl.constexpr, CONVERT: gl.constexpr,
):  # fmt: skip
    """Stores 64 x WIDTH of y, in one part or two: the buffer holds one."""
    PART: gl.constexpr = WIDTH // PARTS
    LANES: gl.constexpr = PART // 8
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [4, 1], [1, 0])
    part = result.to(y.dtype.element_ty)
    if CONVERT:
        RESULT: gl.constexpr = gl.NVMMADistributedLayout(
            version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 16]
        )
        part = gl.convert_layout(part, RESULT)
    if PARTS == 1:
        _store_part(y, part, buffer, moved, row, col, row_end, columns, stride_y_m, PART, INDEXED, LAYOUT)
    else:
        left, right = _halves(part, WIDTH)
        _store_part(y, left, buffer, moved, row, col, row_end, columns, stride_y_m, PART, INDEXED, LAYOUT)
        _store_part(y, right, buffer, moved, row, col + PART, row_end, columns, stride_y_m, PART, INDEXED, LAYOUT)


@gluon.jit
def _multiply(
    half, a, b, full, empty, queue, filled, free, buffers, y, moved, N, stride_y_m,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr, W_KN: gl.constexpr,
    INTERLEAVED: gl.constexpr, INDEXED: gl.constexpr, GATHER: gl.constexpr, ACTIVATION: gl.constexpr,
):  # fmt: skip
    """One warpgroup, as in ``specialized.py``: 64 rows of every tile."""
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16])
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    slot = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    row, col, row_end, word = _take(queue, filled, free, slot, turn)
    while row >= 0:
        slot, turn = _advance(slot, turn, 2)
        steps = word & 0xFFFFF
        mine = row + half * 64
        if mine < row_end:
            acc = gl.zeros([64, BLOCK_N], gl.float32, mma)
            for step in range(steps):
                mbarrier.wait(full.index(stage), phase)
                if GATHER:
                    fence_async_shared()
                a_tile = a.index(stage * 2 + half)
                if INTERLEAVED:
                    b_tile = b.index(stage)
                elif W_KN:
                    b_tile = b.index(stage * 2)._reinterpret(b.dtype, [BLOCK_K, BLOCK_N], b.layout)
                else:
                    b_tile = b.index(stage * 2)._reinterpret(b.dtype, [BLOCK_N, BLOCK_K], b.layout)
                if not W_KN:
                    b_tile = b_tile.permute((1, 0))
                acc = warpgroup_mma(a_tile, b_tile, acc, is_async=True)
                acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
                gl.barrier()
                mbarrier.arrive(empty.index(_before(stage, STAGES)), count=1, pred=step > 0)
                stage, phase = _advance(stage, phase, STAGES)
            acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
            if steps > 0:
                gl.barrier()
                mbarrier.arrive(empty.index(_before(stage, STAGES)), count=1)
            gate, up = _gate_and_up(acc, moved, word >> 20, mine, col, row_end, N, BLOCK_N, INTERLEAVED, INDEXED)
            _store(
                y, _activated(gate, up, ACTIVATION), buffers.index(half), moved, mine, col * (BLOCK_N // 2), row_end,
                N // 2, stride_y_m, BLOCK_N // 2, PARTS, INDEXED, INTERLEAVED,
            )  # fmt: skip
        else:
            for _ in range(steps):
                mbarrier.wait(full.index(stage), phase)
                mbarrier.arrive(empty.index(stage), count=1)
                stage, phase = _advance(stage, phase, STAGES)
        row, col, row_end, word = _take(queue, filled, free, slot, turn)


@gluon.jit
def _load_rows(
    x, w, a, b, full, empty, queue, filled, free, ends, tile_ends, counter, moved, M, N, K, total, stride_x_m,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr,
    EXPERTS: gl.constexpr, W_KN: gl.constexpr, INTERLEAVED: gl.constexpr, GATHER: gl.constexpr,
):  # fmt: skip
    """The loading warp, four where rows of x are gathered: of w two boxes, gate and up, where those are halves."""
    WARPS: gl.constexpr = 4 if GATHER else 1
    layout: gl.constexpr = gl.BlockedLayout([EXPERTS // 32 // WARPS], [32], [WARPS], [0])
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_K, BLOCK_K // 8], [4, 1], [1, 0])
    BOX_N: gl.constexpr = BLOCK_N if INTERLEAVED else BLOCK_N // 2
    half_bytes: gl.constexpr = 64 * BLOCK_K * w.dtype.primitive_bitwidth // 8
    b_bytes: gl.constexpr = BLOCK_N * BLOCK_K * w.dtype.primitive_bitwidth // 8
    tiles_n = gl.cdiv(N, BLOCK_N)
    steps = gl.cdiv(K, BLOCK_K)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    slot = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    tile = gl.program_id(0)
    while tile < total:
        tile_end = tile_ends.load(layout)
        end = ends.load(layout)
        done = tile_end <= tile
        expert = gl.sum(done.to(gl.int32), 0)
        first_tile = gl.max(gl.where(done, tile_end, 0), 0)
        row_start = gl.max(gl.where(done, end, 0), 0)
        row_end = gl.min(gl.where(done, M, end), 0)
        # GROUP_M row tiles share a column before the next.
        inner = tile - first_tile
        tiles_m = gl.cdiv(row_end - row_start, 128)
        per_group = GROUP_M * tiles_n
        group = inner // per_group
        first = group * GROUP_M
        height = gl.minimum(tiles_m - first, GROUP_M)
        rest = inner - group * per_group
        row = row_start + (first + rest % height) * 128
        col = rest // height
        _publish(queue, filled, free, slot, turn, row, col, row_end, steps | (expert << 20), WARPS)
        slot, turn = _advance(slot, turn, 2)
        tile = _next_tile(counter, total)
        both = row + 64 < row_end
        if GATHER:
            index, _row_weights, _bias, index_step, index_end, x_divisor, flags = moved
            m = row + gl.arange(0, 128, layout=gl.SliceLayout(1, ROWS)).to(gl.int64)
            flat, inside = _flat(index, index_step, index_end, flags, m, row_end)
            source = gl.where((flags & _GATHER) != 0, flat // x_divisor, m)
            k = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, ROWS))
            x_at = x + gl.where(inside, source, 0)[:, None] * stride_x_m + k[None, :]
        for start in range(0, K, BLOCK_K):
            mbarrier.wait(empty.index(stage), phase ^ 1)
            bar = full.index(stage)
            if GATHER:
                mbarrier.expect(bar, b_bytes)
                both_halves = a.index(stage * 2)._reinterpret(w.dtype, [128, BLOCK_K], a.layout)
                in_k = (start + k < K)[None, :]
                async_copy.async_copy_global_to_shared(both_halves, x_at + start, mask=inside[:, None] & in_k)
                async_copy.mbarrier_arrive(bar, increment_count=False)
            else:
                mbarrier.expect(bar, half_bytes + b_bytes, pred=both == 0)
                mbarrier.expect(bar, 2 * half_bytes + b_bytes, pred=both)
                tma.async_copy_global_to_shared(x, [row, start], bar, a.index(stage * 2))
                tma.async_copy_global_to_shared(x, [row + 64, start], bar, a.index(stage * 2 + 1), pred=both)
            for part in gl.static_range(1 if INTERLEAVED else 2):
                n = col * BOX_N + part * (N // 2)
                if INTERLEAVED:
                    box = b.index(stage)
                else:
                    box = b.index(stage * 2 + part)
                if W_KN:
                    box = box._reinterpret(w.dtype, [1, BLOCK_K, BOX_N], w.layout)
                    tma.async_copy_global_to_shared(w, [expert, start, n], bar, box)
                else:
                    box = box._reinterpret(w.dtype, [1, BOX_N, BLOCK_K], w.layout)
                    tma.async_copy_global_to_shared(w, [expert, n, start], bar, box)
            stage, phase = _advance(stage, phase, STAGES)
    _publish(queue, filled, free, slot, turn, -1, 0, 0, 0, WARPS)


@gluon.jit
def rows_gated(
    x, w, y, m_sizes, index, row_weights, bias, counter, M, N, K, E, stride_x_m, stride_w_e, stride_w_row, stride_y_m,
    m_sizes_step, index_step, index_end, x_divisor, flags,
    BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr, GROUP_M: gl.constexpr,
    EXPERTS: gl.constexpr, W_KN: gl.constexpr, INTERLEAVED: gl.constexpr, INDEXED: gl.constexpr,
    GATHER: gl.constexpr, ACTIVATION: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """y[m, i] = act(h[m, gate(i)]) * h[m, up(i)], h what ``rows_specialized`` stores, in fp32: y [M, N // 2].

    gate(i), up(i) are i, N // 2 + i, or INTERLEAVED 2 * i, 2 * i + 1. ``flags`` says which activation.
    """
    element: gl.constexpr = w.dtype
    a_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    b_layout: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=w.layout.swizzle_byte_width, element_bitwidth=w.layout.element_bitwidth, rank=2
    )
    BOXES: gl.constexpr = STAGES if INTERLEAVED else 2 * STAGES
    BOX_N: gl.constexpr = BLOCK_N if INTERLEAVED else BLOCK_N // 2
    a = gl.allocate_shared_memory(element, [2 * STAGES, 64, BLOCK_K], a_layout)
    if W_KN:
        b = gl.allocate_shared_memory(element, [BOXES, BLOCK_K, BOX_N], b_layout)
    else:
        b = gl.allocate_shared_memory(element, [BOXES, BOX_N, BLOCK_K], b_layout)
    buffer_layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    buffers = gl.allocate_shared_memory(element, [2, 64, BLOCK_N // 2 // PARTS], buffer_layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    filled = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    queue = gl.allocate_shared_memory(gl.int32, [2, 4], flat)
    ends = gl.allocate_shared_memory(gl.int32, [EXPERTS], flat)
    tile_ends = gl.allocate_shared_memory(gl.int32, [EXPERTS], flat)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=129 if GATHER else 1)
        mbarrier.init(empty.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(filled.index(i), count=1)
        mbarrier.init(free.index(i), count=2)
    experts: gl.constexpr = gl.BlockedLayout([EXPERTS // 128 if EXPERTS > 128 else 1], [32], [4], [0])
    count, end = _expert_ends(m_sizes, m_sizes_step, M, E, EXPERTS, experts)
    tiles = (count // 128 + (count % 128 != 0).to(gl.int32)) * gl.cdiv(N, BLOCK_N)
    tile_end = gl.associative_scan(tiles, 0, _add)
    ends.store(end)
    tile_ends.store(tile_end)
    total = gl.max(tile_end, 0)
    used = gl.max(end, 0)
    moved = (index, row_weights, bias, index_step, index_end, x_divisor, flags)
    gl.barrier()
    gl.warp_specialize(
        [
            (_multiply, (
                0, a, b, full, empty, queue, filled, free, buffers, y, moved, N, stride_y_m, BLOCK_N, BLOCK_K,
                STAGES, PARTS, W_KN, INTERLEAVED, INDEXED, GATHER, ACTIVATION,
            )),
            (_multiply, (
                1, a, b, full, empty, queue, filled, free, buffers, y, moved, N, stride_y_m, BLOCK_N, BLOCK_K,
                STAGES, PARTS, W_KN, INTERLEAVED, INDEXED, GATHER, ACTIVATION,
            )),
            (_load_rows, (
                x, w, a, b, full, empty, queue, filled, free, ends, tile_ends, counter, moved, M, N, K, total,
                stride_x_m, BLOCK_N, BLOCK_K, STAGES, GROUP_M, EXPERTS, W_KN, INTERLEAVED, GATHER,
            )),
        ],
        [4, 4 if GATHER else 1],
        [REGISTERS, 504 - 2 * REGISTERS],
    )  # fmt: skip

    if (flags & _ZERO_TAIL) != 0:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
        for row in range(used + 4 * gl.program_id(0), M, 4 * gl.num_programs(0)):
            m = row + gl.arange(0, 4, layout=gl.SliceLayout(1, layout)).to(gl.int64)
            for col in range(0, N // 2, 256):
                n = col + gl.arange(0, 256, layout=gl.SliceLayout(0, layout))
                address = y + m[:, None] * stride_y_m + n[None, :]
                gl.store(
                    address, gl.zeros([4, 256], y.dtype.element_ty, layout),
                    mask=(m < M)[:, None] & (n < N // 2)[None, :],
                )  # fmt: skip
