"""The rows of a scattered y that no row goes to: a warp beside the product finds them and sets them to zero.

Each program has a share of y's rows, looks for up to 1,024 of them at a time in the whole index, and marks what it
finds, a bit for each. The warp is one of the four that the loading warp's group has registers for anyway, and the
product hides it: launches that find and clear the same rows (clear.py) take 8 to 12 us.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .pipeline import SCATTER_FLAG, ZERO_TAIL_FLAG, counts

LANES: gl.constexpr = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
ROWS: gl.constexpr = gl.constexpr(1024)  # of y, at a time: each lane has 32 of them
ENTRIES: gl.constexpr = gl.constexpr(512)  # of the index, at a time


@gluon.jit
def _clear_row(y, row, N, stride_y_m):
    lines: gl.constexpr = gl.BlockedLayout([8], [32], [1], [0])
    at = y + row.to(gl.int64) * stride_y_m
    for col in range(0, N, 256):
        n = col + gl.arange(0, 256, layout=lines)
        gl.store(at + n, gl.zeros([256], y.dtype.element_ty, lines), mask=n < N)


@gluon.jit
def clear_unnamed(y, m_sizes, moved, M, E, N, stride_y_m, m_sizes_step):
    """y[r] = 0 for each r in [0, index_end) that is no index[i], i < sum(m_sizes): for one warp of each program.

    An index is its low word, as ``warpgroups.flat_index`` has it: what is cleared here is nowhere stored to.
    """
    index, _row_weights, _bias, index_step, index_end, _x_divisor, flags = moved
    if ((flags & SCATTER_FLAG) != 0) & ((flags & ZERO_TAIL_FLAG) != 0):
        used = gl.to_tensor(0).to(gl.int64)
        for first in range(0, E, 32):
            more = counts(m_sizes + first * m_sizes_step, m_sizes_step, M, E - first, 32, LANES)
            used += gl.sum(more.to(gl.int64), 0)
        used = gl.minimum(used, M.to(gl.int64)).to(gl.int32)
        share = gl.cdiv(index_end, gl.num_programs(0))
        begin = gl.program_id(0) * share
        end = gl.minimum(begin + share, index_end)
        lane = gl.arange(0, 32, layout=LANES)
        for start in range(begin, end, ROWS):
            rows = gl.minimum(end - start, ROWS)
            named = gl.zeros([32], gl.int32, LANES)
            for first in range(0, used, ENTRIES):
                i = first + gl.arange(0, ENTRIES, layout=LANES)
                there = gl.load(index + i.to(gl.int64) * index_step, mask=i < used, other=-1)
                row = there - start
                row = gl.where((there >= start) & (row < rows), row, ROWS)
                least = gl.min(row, 0)
                while least < ROWS:  # each row that is named, one after the other
                    named |= gl.where(lane == least // 32, 1 << (least % 32), 0)
                    row = gl.where(row == least, ROWS, row)
                    least = gl.min(row, 0)
            for word in range(gl.cdiv(rows, 32)):
                bits = gl.sum(gl.where(lane == word, named, 0), 0)
                for bit in range(gl.minimum(rows - 32 * word, 32)):
                    if ((bits >> bit) & 1) == 0:
                        _clear_row(y, start + 32 * word + bit, N, stride_y_m)
