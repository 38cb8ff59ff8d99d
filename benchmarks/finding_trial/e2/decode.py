from __future__ import annotations
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from .pipeline import add, advance, barriers, before, counts, expert_ends, publish, take

@gluon.jit
def _load_some(x, w, a, b, full, empty, queue, filled, free, m_sizes, M, N, K, E, m_sizes_step,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, EXPERTS: gl.constexpr, W_KN: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([EXPERTS // 32], [32], [1], [0])
    bytes_: gl.constexpr = (BLOCK_M + BLOCK_N) * BLOCK_K * w.dtype.primitive_bitwidth // 8
    tiles_n = gl.cdiv(N, BLOCK_N)
    steps = gl.cdiv(K, BLOCK_K)
    count, end = expert_ends(m_sizes, m_sizes_step, M, E, EXPERTS, layout)
    tile_end = gl.associative_scan((count + (BLOCK_M - 1)) // BLOCK_M, 0, add)
    total = gl.max(tile_end, 0) * tiles_n
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    slot = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        part = tile // tiles_n
        done = tile_end <= part
        expert = gl.sum(done.to(gl.int32), 0)
        first = gl.max(gl.where(done, tile_end, 0), 0)
        row_start = gl.max(gl.where(done, end, 0), 0)
        row_end = gl.min(gl.where(done, M, end), 0)
        tiles_m = (row_end - row_start + (BLOCK_M - 1)) // BLOCK_M
        inner = tile - first * tiles_n
        col = inner
        row = row_start
        if tiles_m > 1:
            col = inner // tiles_m
            row = row_start + (inner - col * tiles_m) * BLOCK_M
        col *= BLOCK_N
        for start in range(0, K, BLOCK_K):
            mbarrier.wait(empty.index(stage), phase ^ 1)
            bar = full.index(stage)
            mbarrier.expect(bar, bytes_)
            at = a.index(stage)
            if W_KN:
                tma.async_copy_global_to_shared(w, [expert, start, col], bar, at._reinterpret(w.dtype, [1, BLOCK_K, BLOCK_N], w.layout))
            else:
                tma.async_copy_global_to_shared(w, [expert, col, start], bar, at._reinterpret(w.dtype, [1, BLOCK_N, BLOCK_K], w.layout))
            tma.async_copy_global_to_shared(x, [row, start], bar, b.index(stage))
            stage, phase = advance(stage, phase, STAGES)
            if start == 0:
                publish(queue, filled, free, slot, turn, row, col, row_end, expert, 1)
                slot, turn = advance(slot, turn, 2)
    publish(queue, filled, free, slot, turn, -1, 0, 0, 0, 1)

@gluon.jit
def _load(x, w, a, b, full, empty, queue, filled, free, m_sizes, M, N, K, E, m_sizes_step,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, EXPERTS: gl.constexpr, W_KN: gl.constexpr):
    if E <= 128:
        _load_some(x, w, a, b, full, empty, queue, filled, free, m_sizes, M, N, K, E, m_sizes_step, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, 128, W_KN)
    else:
        _load_some(x, w, a, b, full, empty, queue, filled, free, m_sizes, M, N, K, E, m_sizes_step, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, EXPERTS, W_KN)

@gluon.jit
def _multiply(a, b, full, empty, queue, filled, free, y, N, K, stride_y_m,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, W_KN: gl.constexpr):
    mma: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_M, 16])
    lines: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_N, BLOCK_N // 8], [4, 1], [1, 0])
    steps = gl.cdiv(K, BLOCK_K)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    slot = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    row, col, row_end, expert = take(queue, filled, free, slot, turn)
    while row >= 0:
        slot, turn = advance(slot, turn, 2)
        acc = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, mma)
        for step in range(steps):
            mbarrier.wait(full.index(stage), phase)
            a_tile = a.index(stage)
            if W_KN:
                a_tile = a_tile.permute((1, 0))
            acc = warpgroup_mma(a_tile, b.index(stage).permute((1, 0)), acc, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
            gl.barrier()
            mbarrier.arrive(empty.index(before(stage, STAGES)), count=1, pred=step > 0)
            stage, phase = advance(stage, phase, STAGES)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        gl.barrier()
        mbarrier.arrive(empty.index(before(stage, STAGES)), count=1)
        out = gl.convert_layout(acc.to(y.dtype.element_ty).permute((1, 0)), lines)
        m = row + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, lines))
        n = col + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, lines))
        gl.store(y + m.to(gl.int64)[:, None] * stride_y_m + n[None, :], out, mask=(m < row_end)[:, None] & (n < N)[None, :])
        row, col, row_end, expert = take(queue, filled, free, slot, turn)

@gluon.jit
def rows_specialized(
    x, w, y, m_sizes, index, row_weights, bias, counter, M, N, K, E, stride_x_m, stride_w_e, stride_w_row,
    stride_y_m, m_sizes_step, index_step, index_end, x_divisor, flags,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    EXPERTS: gl.constexpr, W_KN: gl.constexpr, PREFETCH: gl.constexpr,
):
    element: gl.constexpr = w.dtype
    ahead: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    line = m_sizes + gl.arange(0, 128, layout=ahead) * 8
    line = gl.where(gl.arange(0, 128, layout=ahead) * 8 < E * m_sizes_step, line.to(gl.int64, bitcast=True), m_sizes.to(gl.int64, bitcast=True))
    if PREFETCH:
        gl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [line], dtype=gl.int32, is_pure=False, pack=1)
    lines: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    if W_KN:
        a = gl.allocate_shared_memory(element, [STAGES, BLOCK_K, BLOCK_N], lines)
    else:
        a = gl.allocate_shared_memory(element, [STAGES, BLOCK_N, BLOCK_K], lines)
    b = gl.allocate_shared_memory(element, [STAGES, BLOCK_M, BLOCK_K], lines)
    full, empty, queue, filled, free = barriers(STAGES, 1, 1)
    gl.barrier()
    gl.warp_specialize(
        [
            (_multiply, (a, b, full, empty, queue, filled, free, y, N, K, stride_y_m, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, W_KN)),
            (_load, (x, w, a, b, full, empty, queue, filled, free, m_sizes, M, N, K, E, m_sizes_step, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, EXPERTS, W_KN)),
        ],
        [1],
        [128],
    )
