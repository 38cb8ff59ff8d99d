"""Find the tile of a program that has only one: each warp counts the experts' rows by itself, in PTX.

Triton spreads a vector over all warps, so each sum or search over a vector takes a dozen shuffles and a barrier or two:
1 us of a launch of 15 us. Here a lane of each warp has one expert of 32, sums of 32 are one
instruction (``redux.sync``, sm_80 and later), and no warp waits for another: 1.03 x as fast at one token on an H200
(docs/inside/trials.md, counting).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import place

_ALL = "0xffffffff"
_FEW = 4  # loads of 32 experts' rows
_MANY = 16


def text(chunks: int) -> str:
    """The PTX, for 32 experts times ``chunks``.

    Results: $0 the expert of tile row $8, or -1, $1 the number of tile rows before the expert, $2 its first row, $3 its
    end row. Inputs: $4 m_sizes, $5 m_sizes_step, $6 M, $7 E, $8 the tile row; tiles have $9 + 1 rows. A count below
    zero is zero, and no row passes M.
    """
    lines = [
        ".reg .pred in, wide, here, some; .reg .b64 at, stride;",
        f".reg .b32 count<{chunks}>, part<{chunks}>, high<{chunks}>;",
        ".reg .b32 lane, shift, e, rows, parts, row, before, after, first, mine, own, sum, up, votes, owner;",
        "mov.u32 lane, %laneid; popc.b32 shift, $9;",
        "setp.ne.s32 wide, $5, 1; mul.wide.s32 stride, $5, 128;",
        "mul.wide.s32 at, lane, $5; shl.b64 at, at, 2; add.s64 at, at, $4;",
    ]
    for i in range(chunks):
        lines += [
            f"add.s32 e, lane, {32 * i}; setp.lt.s32 in, e, $7; mov.b32 count{i}, 0;",
            f"@in ld.global.b32 count{i}, [at]; add.s64 at, at, stride;",
        ]
    lines += ["@wide bra WIDE;", "COUNTED:"]
    for i in range(chunks):
        lines += [
            f"max.s32 count{i}, count{i}, 0; min.s32 count{i}, count{i}, $6;",
            f"add.u32 part{i}, count{i}, $9; shr.u32 part{i}, part{i}, shift;",
        ]
    lines += ["mov.b32 first, -1; mov.b32 before, 0; mov.b32 row, 0; mov.b32 mine, 0; mov.b32 own, 0;"]
    for i in range(chunks):
        lines += [
            f"redux.sync.add.u32 parts, part{i}, {_ALL}; redux.sync.add.u32 rows, count{i}, {_ALL};",
            "add.u32 after, before, parts; setp.gt.u32 here, after, $8;",
            f"@here mov.b32 first, {32 * i}; @here mov.b32 mine, count{i}; @here mov.b32 own, part{i};",
            "@here bra FOUND;",
            "mov.b32 before, after; add.u32 row, row, rows; min.u32 row, row, $6;",
        ]
    lines += ["FOUND:", "mov.b32 sum, own;"]
    for distance in (1, 2, 4, 8, 16):
        lines += [f"shfl.sync.up.b32 up|in, sum, {distance}, 0, {_ALL}; @in add.u32 sum, sum, up;"]
    lines += [
        "sub.u32 after, $8, before; setp.gt.u32 here, sum, after;",
        f"vote.sync.ballot.b32 votes, here, {_ALL}; brev.b32 votes, votes; clz.b32 owner, votes;",
        f"sub.u32 sum, sum, own; shfl.sync.idx.b32 sum, sum, owner, 31, {_ALL};",
        f"shfl.sync.idx.b32 rows, mine, owner, 31, {_ALL};",
        f"setp.lt.u32 in, lane, owner; selp.b32 mine, mine, 0, in; redux.sync.add.u32 mine, mine, {_ALL};",
        "add.u32 row, row, mine; min.u32 row, row, $6; add.u32 rows, rows, row; min.u32 rows, rows, $6;",
        "setp.ge.s32 some, first, 0; add.s32 e, first, owner; selp.b32 $0, e, -1, some;",
        "add.u32 $1, before, sum; mov.b32 $2, row; mov.b32 $3, rows;",
        "bra DONE;",
        "WIDE:",
        "mul.wide.s32 at, lane, $5; shl.b64 at, at, 2; add.s64 at, at, $4;",
    ]
    for i in range(chunks):
        lines += [
            f"add.s32 e, lane, {32 * i}; setp.lt.s32 in, e, $7; mov.b32 high{i}, 0;",
            f"@in ld.global.b32 high{i}, [at+4]; add.s64 at, at, stride;",
        ]
    for i in range(chunks):
        lines += [
            f"min.u32 count{i}, count{i}, 0x7fffffff; setp.gt.s32 in, high{i}, 0; @in mov.b32 count{i}, 0x7fffffff;",
            f"setp.lt.s32 in, high{i}, 0; @in mov.b32 count{i}, 0;",
        ]
    lines += ["bra COUNTED;", "DONE:"]
    return "\n".join(("{", *lines, "}"))


_TEXT_FEW: tl.constexpr = tl.constexpr(text(_FEW))
_TEXT_MANY: tl.constexpr = tl.constexpr(text(_MANY))
_FEW_EXPERTS: tl.constexpr = tl.constexpr(32 * _FEW)


@triton.jit
def _ask(part, m_sizes, m_sizes_step, M, E, TEXT: tl.constexpr, BLOCK_M: tl.constexpr):
    return tl.inline_asm_elementwise(
        TEXT,
        "=r,=r,=r,=r,l,r,r,r,r,r",
        [m_sizes.to(tl.int64, bitcast=True), m_sizes_step, M, E, part, BLOCK_M - 1],
        dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
        is_pure=False,
        pack=1,
    )


@triton.jit
def find(tile, m_sizes, m_sizes_step, M, E, tiles_n, BLOCK_M: tl.constexpr, GROUP_M: tl.constexpr):
    """(whether the tile exists, its expert, row tile, column tile, the expert's first and end row), E up to 512.

    If m_sizes sum to more than M, and M is at least 2^26, an expert may get rows of others.
    """
    part = tile // tiles_n
    if E <= _FEW_EXPERTS:
        expert, before, row_start, row_end = _ask(part, m_sizes, m_sizes_step, M, E, _TEXT_FEW, BLOCK_M)
    else:
        expert, before, row_start, row_end = _ask(part, m_sizes, m_sizes_step, M, E, _TEXT_MANY, BLOCK_M)
    rows = row_end - row_start
    tile_m = 0
    tile_n = tile - before * tiles_n
    # If m_sizes sum to more than M, some tiles have no rows.
    there = (expert >= 0) & (expert < E) & (tile_n < tl.cdiv(rows, BLOCK_M) * tiles_n)
    if there & (rows > BLOCK_M):
        tile_m, tile_n = place(tile_n, rows, tiles_n, BLOCK_M, GROUP_M)
    return there, expert, tile_m, tile_n, row_start, row_end
