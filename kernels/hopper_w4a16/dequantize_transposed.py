"""Codes of a quantised w to bf16, transposed for dX: a row of wgmma's left operand is a column of w.

From each of 16 rows of w a thread has the word with two of its columns, which are 8 apart. Half-words of two rows are
joined into a word with the layout of a block's words (dequantize.py describes blocks).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..codes import CODES
from ..gluon.pipeline import view
from .dequantize import both, codes_of, groups_of, scales_of


# A block's view is [pairs of rows, row of a pair, c, word, p, s mod 2]; codes of 8 bits lack the last dimension.
# Rows of w are in a thread's registers, p and c are bits of its lane, word and s bits of its warp.
def _turned(four: bool) -> gl.DistributedLinearLayout:
    end = [0] * (2 if four else 1)

    def at(*place: int) -> list[int]:
        return [*place, *end]

    lanes_p = [0, 0, 0, 0, 1, 0] if four else [0, 0, 0, 0, 1]
    warps = [[0, 0, 0, 0, 0, 1], [0, 0, 0, 1, 0, 0]] if four else [[0, 0, 0, 1, 0], [0, 0, 0, 2, 0]]
    return gl.DistributedLinearLayout(
        reg_bases=[at(0, 1, 0, 0), at(4, 0, 0, 0), at(8, 0, 0, 0), at(16, 0, 0, 0)],
        lane_bases=[at(1, 0, 0, 0), at(2, 0, 0, 0), lanes_p, at(0, 0, 1, 0), at(0, 0, 2, 0)],
        warp_bases=warps,
        block_bases=[],
        shape=[32, 2, 4, 2, 2, 2] if four else [32, 2, 4, 4, 2],
    )


_TURNED_4: gl.constexpr = gl.constexpr(_turned(True))
_TURNED_8: gl.constexpr = gl.constexpr(_turned(False))


def _turned_swizzled() -> gl.SharedLinearLayout:
    """The layout of ``_swizzled`` for [pairs of rows, row of a pair, c, word]."""
    words = [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 1, 0], [0, 0, 2, 0]]
    rows = [[0, 1, 0, 0], [1, 0, 1, 0], [2, 0, 2, 0]]
    return gl.SharedLinearLayout([*words, *rows, *([1 << bit, 0, 0, 0] for bit in range(2, 5))])


_TURNED_SWIZZLED: gl.constexpr = gl.constexpr(_turned_swizzled())
_FLAT_1: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_FLAT_2: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
_FLAT_4: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0]))


@gluon.constexpr_function
def _turned_text(codes, scales):  # type: ignore[no-untyped-def]
    """PTX: $0 and $1, two rows of w in the columns of h = 0 and 1, of the words $2 and $3.

    $4 is p, $6 the warp's half of a word's codes. $8 and $9 hold scales; $10 selects among them, or is the part of
    a 128x128 block's scale that bf16 has no bits for.
    """
    lines = [".reg .b32 t, u, v, s; .reg .pred q;"]
    lines += ["mad.lo.s32 u, $4, 0x2222, 0x5410; prmt.b32 t, $2, $3, u;"]  # both words' lower (p = 0) or upper halves
    if codes == "e2m1":
        lines += [
            "mul.lo.s32 u, $6, 6; shl.b32 v, t, u; and.b32 $0, v, 0x81C081C0;",
            "shl.b32 v, t, 3; and.b32 $1, v, 0x81C081C0;",
            "shl.b32 v, t, 1; and.b32 u, v, 0x80008000;",
            "shr.u32 v, t, 5; lop3.b32 u, v, 0x01000100, u, 0xEA;",
            "shr.u32 v, t, 4; lop3.b32 u, v, 0x00C000C0, u, 0xEA;",
            "setp.ne.s32 q, $6, 0; selp.b32 $1, u, $1, q;",
        ]
    elif codes == "int4":
        lines += [
            f"shl.b32 u, $6, 3; shr.u32 t, t, u; mov.b32 v, {both(0x4308)};",
            f"lop3.b32 $0, t, {both(0x000F)}, {both(0x4300)}, 0xEA; sub.rn.bf16x2 $0, $0, v;",
            f"shr.u32 t, t, 4; lop3.b32 $1, t, {both(0x000F)}, {both(0x4300)}, 0xEA; sub.rn.bf16x2 $1, $1, v;",
        ]
    else:
        lines += [
            f"and.b32 $0, t, {both(0x8000)}; shr.u32 v, t, 4; lop3.b32 $0, v, {both(0x07F0)}, $0, 0xEA;",
            f"shl.b32 v, t, 8; and.b32 $1, v, {both(0x8000)};",
            f"shl.b32 v, t, 4; lop3.b32 $1, v, {both(0x07F0)}, $1, 0xEA;",
        ]
    if scales == "e8m0":  # one word has two groups of two rows
        lines += ["mad.lo.s32 u, $10, 0x0101, 0x4240; prmt.b32 s, $8, 0, u;"]
        lines += [f"add.s32 s, s, {both(126)}; shl.b32 s, s, 7;"]
    elif scales == "e4m3":  # one word has four groups of a row
        lines += ["mad.lo.s32 u, $10, 0x1111, 0x4440; prmt.b32 s, $8, $9, u; and.b32 s, s, 0x00FF00FF;"]
        lines += [f"shl.b32 s, s, 4; mov.b32 u, {both((127 + 126) << 7)}; mul.rn.bf16x2 s, s, u;"]
        lines += [f"mov.b32 u, {both((127 + 120) << 7)}; mul.rn.bf16x2 $0, $0, u; mul.rn.bf16x2 $1, $1, u;"]
    elif scales == "bf16 of two groups":  # one word has two groups of a row
        lines += ["mad.lo.s32 u, $10, 0x2222, 0x5410; prmt.b32 s, $8, $9, u;"]
    else:  # one word has both rows' scales
        lines += ["mov.b32 s, $8;"]
    if scales == "block":  # $10 is the rest of s: code x s + code x $10, the sum rounded once
        lines += ["mul.rn.bf16x2 u, $0, $10; fma.rn.bf16x2 $0, $0, s, u;"]
        lines += ["mul.rn.bf16x2 u, $1, $10; fma.rn.bf16x2 $1, $1, s, u;"]
    else:
        lines += ["mul.rn.bf16x2 $0, $0, s; mul.rn.bf16x2 $1, $1, s;"]
    return "\n".join(("{", *lines, "}"))


@gluon.constexpr_function
def _turned_asm(FORMAT):  # type: ignore[no-untyped-def]
    one = CODES[FORMAT]
    return _turned_text(one.codes, "bf16 of two groups" if one.scales == "bf16" and one.groups == 2 else one.scales)


@gluon.jit
def turned(codes, scales, FORMAT: gl.constexpr, OPERAND: gl.constexpr):
    """A block of w, bf16 [64, 64], of its codes and scales in shared memory: a row of it is a column of w."""
    CODES: gl.constexpr = codes_of(FORMAT)
    SCALES: gl.constexpr = scales_of(FORMAT)
    GROUPS: gl.constexpr = groups_of(FORMAT)
    FOUR: gl.constexpr = CODES != "e4m3"
    ALL: gl.constexpr = _TURNED_4 if FOUR else _TURNED_8
    NO_S: gl.constexpr = gl.SliceLayout(5, ALL) if FOUR else ALL
    WORDS: gl.constexpr = gl.SliceLayout(4, NO_S)  # rows, row, c, word
    IN_C: gl.constexpr = gl.SliceLayout(3, WORDS)
    ROWS: gl.constexpr = gl.SliceLayout(2, IN_C)  # rows, row
    PAIRS: gl.constexpr = gl.SliceLayout(1, ROWS)
    PAIR_P: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, NO_S)))  # rows, p
    PAIR_WORD: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, WORDS))  # rows, word
    p = gl.arange(0, 2, layout=gl.SliceLayout(0, PAIR_P))
    p = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.expand_dims(p, 0), 1), 2), 3)
    word = gl.arange(0, 2 if FOUR else 4, layout=gl.SliceLayout(0, PAIR_WORD))
    word = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.expand_dims(word, 0), 1), 2), 4)
    if FOUR:
        held = view(codes, gl.int32, [32, 2, 4, 2], _FLAT_4).load(WORDS)
        IN_S: gl.constexpr = gl.SliceLayout(
            0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, ALL))))
        )
        s = gl.arange(0, 2, layout=IN_S)
        s = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.expand_dims(s, 0), 1), 2), 3), 4)
        p, word = gl.expand_dims(p, 5), gl.expand_dims(word, 5)
        held = gl.expand_dims(gl.expand_dims(held, 4), 5)
    else:
        held = view(codes, gl.int32, [32, 2, 4, 4], _TURNED_SWIZZLED).load(WORDS)
        held = gl.expand_dims(held, 4)
        s = p
    which = 2 * word + s if GROUPS == 4 else word
    if SCALES == "block":
        ONE: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0])
        two = view(scales, gl.int32, [1, 4], _FLAT_2)
        by = gl.convert_layout(two.slice(0, 1, dim=1).load(ONE).reshape([1, 1, 1, 1, 1]), ALL)
        which = gl.convert_layout(two.slice(1, 1, dim=1).load(ONE).reshape([1, 1, 1, 1, 1]), ALL)
    elif (SCALES == "bf16" and GROUPS == 2) or SCALES == "e4m3":
        by = view(scales, gl.int32, [32, 2], _FLAT_2).load(ROWS)
        by = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.expand_dims(by, 2), 3), 4), 5)
    else:
        by = view(scales, gl.int32, [32], _FLAT_1).load(PAIRS)
        by = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.expand_dims(by, 1), 2), 3), 4), 5)
    low, high = gl.inline_asm_elementwise(
        _turned_asm(FORMAT),
        "=&r,=&r,r,r,r,r,r,r,r,r,r,r",
        [held, p, s, by, which],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=2,
    )
    v = gl.join(low, high)
    v = v.permute((3, 5, 6, 2, 4, 0, 1)) if FOUR else v.permute((3, 5, 2, 4, 0, 1))
    return gl.convert_layout(v.reshape([64, 64]), OPERAND, assert_trivial=True)
