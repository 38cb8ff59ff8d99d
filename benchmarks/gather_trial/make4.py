from make3 import *
lpt=[(D,"""    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    slot = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    tile = gl.program_id(0)
""","""    # Few experts: those with the most rows come first, so that the last tiles are short ones.
    pairs: gl.constexpr = gl.BlockedLayout([4, 8], [8, 4], [1, 1], [1, 0])
    mine = counts(m_sizes, m_sizes_step, M, E, FEW, gl.SliceLayout(1, pairs)).to(gl.int32)[:, None]
    other = counts(m_sizes, m_sizes_step, M, E, FEW, gl.SliceLayout(0, pairs)).to(gl.int32)[None, :]
    this = gl.arange(0, FEW, layout=gl.SliceLayout(1, pairs))
    that = gl.arange(0, FEW, layout=gl.SliceLayout(0, pairs))
    before_it = (other > mine) | ((other == mine) & (that[None, :] < this[:, None]))
    place = gl.sum(before_it.to(gl.int32), 1)
    stage = gl.to_tensor(0)
    phase = gl.to_tensor(0)
    slot = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    tile = gl.program_id(0)
"""),
 (D,"""        inner = tile - expert * per_expert
""","""        inner = tile - expert * per_expert
        if E <= FEW:
            expert = gl.sum(gl.where(place == expert, this, 0), 0)
"""),
 (D,"    WARPS: gl.constexpr = 1\n","    WARPS: gl.constexpr = 1\n    FEW: gl.constexpr = 32\n"),
 (D,"    barriers,\n","    barriers,\n    counts,\n"),
]
make('lpt',lpt)
# gathered rows, results by TMA where nothing else moves
tm=[(W,"""        if INDEXED:
            _store_lines(y, parts[i], buffer, target, inside, first + 64 * i, N, stride_y_m, lines)
        else:
            _store_box(y, parts""","""        if INDEXED and not GATHER:
            _store_lines(y, parts[i], buffer, target, inside, first + 64 * i, N, stride_y_m, lines)
        elif GATHER:
            if plain:
                _store_box(y_map, parts[i], buffer, row, row_end, first + 64 * i, expert, WEIGHT, SLOTS)
            else:
                _store_lines(y, parts[i], buffer, target, inside, first + 64 * i, N, stride_y_m, lines)
        else:
            _store_box(y, parts"""),
 (W,"    if not INDEXED:\n        tma.store_wait(0)","    if GATHER or not INDEXED:\n        tma.store_wait(0)"),
 (W,"    if INDEXED:  # read now","    if GATHER:\n        plain = (moved[6] & (SCATTER_FLAG | WEIGHT_FLAG | BIAS_FLAG)) == 0\n    if INDEXED:  # read now"),
 (W,"    half, a, b, full, empty, buffers, y, moved, row, row_end, first, expert, steps, stage, phase, N, stride_y_m,\n    WIDTH","    half, a, b, full, empty, buffers, y, y_map, moved, row, row_end, first, expert, steps, stage, phase, N, stride_y_m,\n    WIDTH"),
 (W,"                    half, a, b, full, empty, buffers, y, moved,","                    half, a, b, full, empty, buffers, y, y_map, moved,",2),
 (W,"    half, a, b, full, empty, queue, filled, free, buffers, y, moved, N, stride_y_m,\n    BLOCK_N","    half, a, b, full, empty, queue, filled, free, buffers, y, y_map, moved, N, stride_y_m,\n    BLOCK_N"),
 (S,"buffers, result, moved,","buffers, result, y_map, moved,",2),
 (D,"buffers, dw, (),","buffers, dw, dw, (),",2),
]
make('g4',g3()+tm)
