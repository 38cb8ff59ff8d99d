"""dW in tf32 by mma.sync from registers, because wgmma can't read its operands.

wgmma takes tf32 from shared memory only if the reduction is contiguous. In dW the reduction is over rows, in both
operands. mma.sync is slower, but takes both from registers. No instruction transposes 32-bit numbers, so every lane
loads its own elements: a warp loads four rows of eight columns at a time. With TMA's swizzle, loads of rows 0 to 3
would have bank conflicts. Both operands can have their rows in another order: of each eight rows the kernel loads 0,
2, 4 and 6, then 1, 3, 5 and 7, without conflicts.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

STEP = gl.constexpr(16)  # rows that are multiplied at a time
# 64 x 256 of a warpgroup: each warp has all rows of the result, and eight columns of 32.
MMA = gl.constexpr(gl.NVMMADistributedLayout(version=[2, 0], warps_per_cta=[1, 4], instr_shape=[16, 8]))
_LANES = [[2, 0], [4, 0], [0, 1], [0, 2], [0, 4]]  # (row, column) that each bit of a lane's number adds
# The fragments of mma.m16n8k8 (PTX ISA), with rows in the order of ``_mixed``.
LEFT = gl.constexpr(
    gl.DistributedLinearLayout([[0, 8], [1, 0], [8, 0], [0, 16], [0, 32]], _LANES, [[0, 0], [0, 0]], [], [16, 64])
)
RIGHT = gl.constexpr(
    gl.DistributedLinearLayout([[1, 0], [8, 0], [0, 32], [0, 64], [0, 128]], _LANES, [[0, 8], [0, 16]], [], [16, 256])
)


@gluon.jit
def _mixed(rows):
    """Reorder each eight rows to 0, 2, 4, 6, 1, 3, 5, 7; in registers nothing moves."""
    COLUMNS: gl.constexpr = rows.shape[1]
    return rows.reshape([2, 4, 2, COLUMNS]).permute((0, 2, 1, 3)).reshape([16, COLUMNS])


@gluon.jit
def multiply_rows(a, b, acc):
    """acc + a.T @ b, of float32 in shared memory: a [rows, 64], b [rows, 256], acc [64, 256] as ``MMA`` spreads it."""
    ROWS: gl.constexpr = a.shape[0]
    for i in gl.static_range(ROWS // STEP):
        left = _mixed(a.slice(STEP * i, STEP).load(LEFT)).permute((1, 0))
        right = _mixed(b.slice(STEP * i, STEP).load(RIGHT))
        left = gl.convert_layout(left, gl.DotOperandLayout(0, MMA, 1), assert_trivial=True)
        right = gl.convert_layout(right, gl.DotOperandLayout(1, MMA, 1), assert_trivial=True)
        acc = mma_v2(left, right, acc, input_precision="tf32")
    return acc
