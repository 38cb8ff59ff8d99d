"""Zeros for the rows of a scattered y that no index names: one warp finds and clears them while others multiply.

Each program has a share of y's rows. Its warp looks for up to 1,024 of them at a time in the whole index and sets a bit
for each that it finds. The warp costs no registers, as they are allotted to groups of four warps, and the product hides
its time: launches that clear the rows (kernels/rowops/zero_rows.py) take 8 to 12 us. In a single warp each instruction
waits for the last: written in Gluon, the search took longer than the product from some 64 thousand rows on (up to
1.07 x, with 123 thousand 1.13 x: docs/inside/trials.md, scatter-beside). So it is PTX, with loads without masks, 16 of
them under way, and no work for rows of other programs.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .pipeline import SCATTER_FLAG, ZERO_TAIL_FLAG, counts

LANES: gl.constexpr = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
ROWS: gl.constexpr = gl.constexpr(1024)  # rows of y that are searched at a time: 32 for each lane
_ALL = "0xffffffff"
_LOADS = 16  # loads under way at a time, each of 32 entries of the index


def _mark(entries: range, votes: str) -> list[str]:
    """PTX: sets the bits of the rows that the lanes' entries name, each in the word of the lane that has it."""
    lines = []
    for j in entries:
        lines += [
            f"sub.u32 there{j}, there{j}, $3; setp.lt.u32 here, there{j}, $4;",
            f"vote.sync.ballot.b32 {votes}{j}, here, {_ALL};",
        ]
    for j in entries:
        more, done = f"MORE_{votes}{j}", f"DONE_{votes}{j}"
        lines += [
            f"{more}: setp.eq.u32 none, {votes}{j}, 0; @none bra {done};",
            f"bfind.u32 owner, {votes}{j}; shfl.sync.idx.b32 row, there{j}, owner, 31, {_ALL};",
            f"shl.b32 bit, one, owner; xor.b32 {votes}{j}, {votes}{j}, bit;",
            "and.b32 word, row, 31; shl.b32 bit, one, word; shr.u32 word, row, 5;",
            f"setp.eq.u32 here, word, $5; @here or.b32 named, named, bit; bra {more};",
            f"{done}:",
        ]
    return lines


def text() -> str:
    """The PTX: $0 a lane's 32 bits of the rows from $3 on, $4 of them, that the first $2 entries of an index name.

    The index's words begin at $1, each $6 words after the one before. $5 is the lane.
    """
    entries = 32 * _LOADS
    lines = [
        ".reg .pred in, here, none; .reg .b64 at, stride;",
        f".reg .b32 there<{_LOADS}>, votes<{_LOADS}>, last<1>, past, named, one, owner, row, word, bit;",
        "mov.b32 named, 0; mov.b32 one, 1; mul.wide.s32 stride, $6, 128;",
        f"mul.wide.s32 at, $5, $6; shl.b64 at, at, 2; add.s64 at, at, $1; mov.b32 past, {entries};",
        "NEXT: setp.gt.s32 none, past, $2; @none bra LAST;",
    ]
    lines += [f"ld.global.b32 there{j}, [at]; add.s64 at, at, stride;" for j in range(_LOADS)]
    lines += [f"add.u32 past, past, {entries};"]
    for half in (range(_LOADS // 2), range(_LOADS // 2, _LOADS)):
        lines += _mark(half, "votes")
    lines += [
        "bra NEXT;",
        f"LAST: sub.u32 past, past, {entries};",  # fewer than ``entries`` are left: 32 at a time
        "SOME: setp.ge.s32 none, past, $2; @none bra DONE;",
        "add.u32 word, past, $5; setp.lt.s32 in, word, $2; mov.b32 there0, -1; @in ld.global.b32 there0, [at];",
        "add.s64 at, at, stride; add.u32 past, past, 32;",
        *_mark(range(1), "last"),
        "bra SOME;",
        "DONE: mov.b32 $0, named;",
    ]
    return "\n".join(("{", *lines, "}"))


_TEXT: gl.constexpr = gl.constexpr(text())


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

    Of an int64 index only the low word is read, as in ``consumer.flat_index``: no row is both cleared and stored to.
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
            named = gl.inline_asm_elementwise(
                _TEXT,
                "=r,l,r,r,r,r,r",
                [index.to(gl.int64, bitcast=True), used, start, rows, lane, index_step],
                dtype=gl.int32,
                is_pure=False,
                pack=1,
            )
            for word in range(gl.cdiv(rows, 32)):
                bits = gl.sum(gl.where(lane == word, named, 0), 0)
                for bit in range(gl.minimum(rows - 32 * word, 32)):
                    if ((bits >> bit) & 1) == 0:
                        _clear_row(y, start + 32 * word + bit, N, stride_y_m)
