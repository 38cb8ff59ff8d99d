from make import *
g1=[(S,"    layout: gl.constexpr = gl.BlockedLayout([EXPERTS // 32 // WARPS], [32], [WARPS], [0])","    layout: gl.constexpr = gl.BlockedLayout([EXPERTS // 32], [32], [WARPS], [0])\n    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])"),
 (S,"""            m = row + gl.arange(0, 128, layout=gl.SliceLayout(1, ROWS))
            flat, inside = flat_index(index, index_step, index_end, flags, m, row_end)
            source = gl.where((flags & GATHER_FLAG) != 0, flat // x_divisor, m)
""","""            m = row + gl.arange(0, 128, layout=LANES)
            flat, inside = flat_index(index, index_step, index_end, flags, m, row_end)
            source = gl.where((flags & GATHER_FLAG) != 0, flat // x_divisor, m)
            source = gl.convert_layout(gl.where(inside, source, -1), gl.SliceLayout(1, ROWS))
            inside = source >= 0
"""),
 (S,"""                both_halves = a.index(stage * 2)._reinterpret(w.dtype, [128, BLOCK_K], a.layout)
                in_k = (start + k < K)[None, :]
                async_copy.async_copy_global_to_shared(both_halves, x_at, mask=inside[:, None] & in_k)
                async_copy.mbarrier_arrive(bar, increment_count=False)
                x_at += BLOCK_K
""",""),
 (S,"            stage, phase = advance(stage, phase, STAGES)\n        number =","""            if GATHER:
                both_halves = a.index(stage * 2)._reinterpret(w.dtype, [128, BLOCK_K], a.layout)
                in_k = (start + k < K)[None, :]
                async_copy.async_copy_global_to_shared(both_halves, x_at, mask=inside[:, None] & in_k)
                async_copy.mbarrier_arrive(bar, increment_count=False)
                x_at += BLOCK_K
            stage, phase = advance(stage, phase, STAGES)
        number ="""),
]
make('g1',g1)
GW='''
@gluon.jit
def _gather_rows(
    x, a, full, empty, queue, filled, free, moved, K, stride_x_m,
    BLOCK_K: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_K, BLOCK_K // 8], [WARPS, 1], [1, 0])
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    index, _row_weights, _bias, index_step, index_end, x_divisor, flags = moved
    k = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, ROWS))
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    slot = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    row, _col, row_end, word = take(queue, filled, free, slot, turn, WARPS)
    while row >= 0:
        slot, turn = advance(slot, turn, 2)
        m = row + gl.arange(0, 128, layout=LANES)
        flat, inside = flat_index(index, index_step, index_end, flags, m, row_end)
        source = gl.where((flags & GATHER_FLAG) != 0, flat // x_divisor, m)
        source = gl.convert_layout(gl.where(inside, source, -1), gl.SliceLayout(1, ROWS))
        inside_rows = source >= 0
        x_at = x + (gl.maximum(source, 0).to(gl.int64)[:, None] * stride_x_m + k[None, :])
        for start in range(0, K, BLOCK_K):
            mbarrier.wait(empty.index(stage), phase ^ 1)
            both_halves = a.index(stage * 2)._reinterpret(a.dtype, [128, BLOCK_K], a.layout)
            in_k = (start + k < K)[None, :]
            async_copy.async_copy_global_to_shared(both_halves, x_at, mask=inside_rows[:, None] & in_k)
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
            x_at += BLOCK_K
            stage, phase = advance(stage, phase, STAGES)
        row, _col, row_end, word = take(queue, filled, free, slot, turn, WARPS)

'''
def g2(warps):
  return [
 (P,"def take(queue, filled, free, slot, phase):","def take(queue, filled, free, slot, phase, WARPS: gl.constexpr = 4):"),
 (P,"    layout: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])","    layout: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])"),
 (P,"def barriers(STAGES: gl.constexpr, FULL: gl.constexpr):","def barriers(STAGES: gl.constexpr, FULL: gl.constexpr, READERS: gl.constexpr = 2):"),
 (P,"        mbarrier.init(free.index(i), count=2)","        mbarrier.init(free.index(i), count=READERS)"),
 (S,"    WARPS: gl.constexpr = 4 if GATHER else 1\n","    WARPS: gl.constexpr = 1\n"),
 (S,"""        if GATHER:
            index, _row_weights, _bias, index_step, index_end, x_divisor, flags = moved
            m = row + gl.arange(0, 128, layout=gl.SliceLayout(1, ROWS))
            flat, inside = flat_index(index, index_step, index_end, flags, m, row_end)
            source = gl.where((flags & GATHER_FLAG) != 0, flat // x_divisor, m)
            k = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, ROWS))
            x_at = x + (gl.where(inside, source, 0).to(gl.int64)[:, None] * stride_x_m + k[None, :])
""",""),
 (S,"""                both_halves = a.index(stage * 2)._reinterpret(w.dtype, [128, BLOCK_K], a.layout)
                in_k = (start + k < K)[None, :]
                async_copy.async_copy_global_to_shared(both_halves, x_at, mask=inside[:, None] & in_k)
                async_copy.mbarrier_arrive(bar, increment_count=False)
                x_at += BLOCK_K
""",""),
 (S,"    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_K, BLOCK_K // 8], [4, 1], [1, 0])\n",""),
 (S,"barriers(STAGES, 129 if GATHER else 1)","barriers(STAGES, %d if GATHER else 1, 3 if GATHER else 2)"%(1+32*warps)),
 (S,"    result = y if INDEXED else y_map\n    gl.barrier()\n    gl.warp_specialize(\n","""    result = y if INDEXED else y_map
    gl.barrier()
    if GATHER:
        gl.warp_specialize(
            [
                (multiply, (
                    0, a, b, full, empty, queue, filled, free, buffers, result, moved, N, stride_y_m, BLOCK_N, STAGES,
                    SLOTS, True, not W_KN, False, INDEXED, GATHER, GATED, not GATED,
                )),
                (multiply, (
                    1, a, b, full, empty, queue, filled, free, buffers, result, moved, N, stride_y_m, BLOCK_N, STAGES,
                    SLOTS, True, not W_KN, False, INDEXED, GATHER, GATED, not GATED,
                )),
                (_gather_rows, (x, a, full, empty, queue, filled, free, moved, K, stride_x_m, BLOCK_K, STAGES, %d)),
                (_load_rows, (
                    x, w, a, b, full, empty, queue, filled, free, m_sizes, counter, moved, M, N, K, E, m_sizes_step,
                    stride_x_m, BLOCK_N, BLOCK_K, STAGES, GROUP_M, EXPERTS, W_KN, GATHER, GATED,
                )),
            ],
            [4, %d, 1],
            [REGISTERS, 504 - 2 * REGISTERS, 504 - 2 * REGISTERS],
        )  # fmt: skip
    else: gl.warp_specialize(
"""%(warps,warps)),
 (S,"\n\n@gluon.jit\ndef rows_specialized(",GW+"\n\n@gluon.jit\ndef rows_specialized("),
 (S,"    publish,\n)","    publish,\n    take,\n)"),
]
make('g2',g2(2))
make('g2w1',g2(1))
