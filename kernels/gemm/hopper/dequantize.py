"""Codes of a quantised w to bf16, in registers, as the left operand of wgmma wants them: w's rows, or (dX) its columns.

w is prepared (runtime/weights/order.py): a block of 64 rows and 64 of K lies together, as int32 [64, 4, W]: a row, the
thread c of the four that hold a row of the operand, and W words, 2 of codes of 4 bits and 4 of those of 8. With
K = 16 s + 8 h + 2 c + p, codes of p = 0 are in the low half of a word and those of p = 1 in the high one, in the order
of (s, h). So one instruction or two make two neighbours of bf16. Of codes of 8 bits the four words of a row change
places, c ^ row / 2 % 4, as in the swizzle of 64 bytes in which wgmma can read them (w8a8.py).

Turned round, for dX, an operand's row is a column of w. A thread then has of each of 16 rows of w the word that two of
its columns are in, 8 apart, and of two rows at a time the halves of their words make one, laid out as a word is.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...codes import CODES
from .pipeline import BIAS_FLAG, view


@gluon.constexpr_function
def _both(half):  # type: ignore[no-untyped-def]
    return f"0x{half:04X}{half:04X}"


def _e2m1_text() -> str:
    """PTX: $0 ... $7 of the words $8 and $9: sign at bit 15, the rest at bits 8 to 6, which is the value x 2^-126."""
    lines = [".reg .b32 t;"]
    for word in range(2):
        w, out = f"${8 + word}", [f"${4 * word + i}" for i in range(4)]
        lines += [
            f"and.b32 {out[0]}, {w}, {_both(0x81C0)};",
            f"shl.b32 t, {w}, 3; and.b32 {out[1]}, t, {_both(0x81C0)};",
            f"shl.b32 t, {w}, 6; and.b32 {out[2]}, t, {_both(0x81C0)};",
            f"shl.b32 t, {w}, 1; and.b32 {out[3]}, t, {_both(0x8000)};",
            f"shr.u32 t, {w}, 5; lop3.b32 {out[3]}, t, {_both(0x0100)}, {out[3]}, 0xEA;",
            f"shr.u32 t, {w}, 4; lop3.b32 {out[3]}, t, {_both(0x00C0)}, {out[3]}, 0xEA;",
        ]
    return "\n".join(("{", *lines, "}"))


def _int4_text() -> str:
    """PTX: the same of integers from 0 to 15, less 8: 128 + code is 0x4300 | code in bf16."""
    lines = [".reg .b32 t, o;", f"mov.b32 o, {_both(0x4308)};"]
    for word in range(2):
        w = f"${8 + word}"
        for i in range(4):
            source, shift = (w, "") if i == 0 else ("t", f"shr.u32 t, {w}, {4 * i}; ")
            lines += [
                f"{shift}lop3.b32 t, {source}, {_both(0x000F)}, {_both(0x4300)}, 0xEA;",
                f"sub.rn.bf16x2 ${4 * word + i}, t, o;",
            ]
    return "\n".join(("{", *lines, "}"))


def _e4m3_text() -> str:
    """PTX: $0 ... $7 of the words $8 ... $11: sign at bit 15, the rest at bits 10 to 4, which is the value x 2^-120.

    A half has its first code in the high byte. Each result has two registers, of the words' upper bit.
    """
    lines = [".reg .b32 t;"]
    for word in range(4):
        at = 4 * (word & 1) + (word >> 1)
        w, first, second = f"${8 + word}", f"${at}", f"${at + 2}"
        lines += [
            f"and.b32 {first}, {w}, {_both(0x8000)};",
            f"shr.u32 t, {w}, 4; lop3.b32 {first}, t, {_both(0x07F0)}, {first}, 0xEA;",
            f"shl.b32 t, {w}, 8; and.b32 {second}, t, {_both(0x8000)};",
            f"shl.b32 t, {w}, 4; lop3.b32 {second}, t, {_both(0x07F0)}, {second}, 0xEA;",
        ]
    return "\n".join(("{", *lines, "}"))


_E2M1: gl.constexpr = gl.constexpr(_e2m1_text())
_INT4: gl.constexpr = gl.constexpr(_int4_text())
_E4M3: gl.constexpr = gl.constexpr(_e4m3_text())


def _layout(words: int) -> gl.DistributedLinearLayout:
    inner = [[0, 0, 1 << bit] for bit in range(words.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[*inner, [8, 0, 0]], lane_bases=[[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[16, 0, 0], [32, 0, 0]], block_bases=[], shape=[64, 4, words],
    )  # fmt: skip


def _scale_layout(groups: int) -> gl.DistributedLinearLayout:
    inner = [[0, 1 << bit] for bit in range(groups.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[*inner, [8, 0]], lane_bases=[[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]], block_bases=[], shape=[64, groups],
    )  # fmt: skip


_WORDS_4: gl.constexpr = gl.constexpr(_layout(2))
_WORDS_8: gl.constexpr = gl.constexpr(_layout(4))
_GROUPS_1: gl.constexpr = gl.constexpr(_scale_layout(1))
_GROUPS_2: gl.constexpr = gl.constexpr(_scale_layout(2))
_GROUPS_4: gl.constexpr = gl.constexpr(_scale_layout(4))
_FLAT_2: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
_FLAT_3: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))


def _swizzled() -> gl.SharedLinearLayout:
    words = [[0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 2, 0]]
    return gl.SharedLinearLayout([*words, [1, 0, 0], [2, 1, 0], [4, 2, 0], *([1 << bit, 0, 0] for bit in range(3, 6))])


_SWIZZLED: gl.constexpr = gl.constexpr(_swizzled())


@gluon.constexpr_function
def words_of(FORMAT):  # type: ignore[no-untyped-def]
    """Of a row of a block, for each of four threads."""
    return CODES[FORMAT].words


@gluon.constexpr_function
def scale_bytes_of(FORMAT):  # type: ignore[no-untyped-def]
    return CODES[FORMAT].scale_bytes


@gluon.constexpr_function
def blocks_per_scale(FORMAT):  # type: ignore[no-untyped-def]
    return CODES[FORMAT].blocks_per_scale


@gluon.constexpr_function
def places_of(FORMAT, BLOCKS):  # type: ignore[no-untyped-def]
    """Of scales in shared memory, for so many blocks of K."""
    return CODES[FORMAT].places(BLOCKS)


@gluon.constexpr_function
def outer_of(FORMAT):  # type: ignore[no-untyped-def]
    """Whether sums are multiplied by a scale: "expert", "column" or "none"."""
    return "none" if not CODES[FORMAT].outer else "column" if CODES[FORMAT].scales == "none" else "expert"


@gluon.constexpr_function
def codes_of(FORMAT):  # type: ignore[no-untyped-def]
    return CODES[FORMAT].codes


@gluon.constexpr_function
def scales_of(FORMAT):  # type: ignore[no-untyped-def]
    return CODES[FORMAT].scales


@gluon.constexpr_function
def groups_of(FORMAT):  # type: ignore[no-untyped-def]
    return CODES[FORMAT].groups


@gluon.jit
def _unpack(codes, FORMAT: gl.constexpr):
    """A block in shared memory -> bf16 [64, 2, 2, 2, 4, 2]: row, s (two bits), h, c, p."""
    CODES: gl.constexpr = codes_of(FORMAT)
    if CODES == "e4m3":
        words = view(codes, gl.int32, [64, 4, 4], _SWIZZLED).load(_WORDS_8)
        o = gl.inline_asm_elementwise(
            _E4M3, "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r", [words],
            dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), is_pure=True, pack=4,
        )  # fmt: skip
        both = gl.join(gl.join(o[0], o[1]), gl.join(o[2], o[3])).reshape([64, 4, 2, 2, 2, 2])
        v = both.permute((0, 2, 5, 4, 1, 3))
    else:
        words = view(codes, gl.int32, [64, 4, 2], _FLAT_3).load(_WORDS_4)
        o = gl.inline_asm_elementwise(
            _E2M1 if CODES == "e2m1" else _INT4, "=r,=r,=r,=r,=r,=r,=r,=r,r,r", [words],
            dtype=(
                gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16,
            ), is_pure=True, pack=2,
        )  # fmt: skip
        low = gl.join(gl.join(o[0], o[1]), gl.join(o[2], o[3]))
        high = gl.join(gl.join(o[4], o[5]), gl.join(o[6], o[7]))
        v = gl.join(low, high).permute((0, 5, 4, 3, 1, 2))
    return v


@gluon.jit
def _power(EXPONENT: gl.constexpr):
    """2^EXPONENT, bf16."""
    return gl.to_tensor((127 + EXPONENT) << 7).to(gl.uint16).to(gl.bfloat16, bitcast=True)


@gluon.jit
def _scales(held, FORMAT: gl.constexpr):
    """The scales of a block's rows, bf16 [64, groups], times what the codes were made too small by."""
    GROUPS: gl.constexpr = groups_of(FORMAT)
    SCALES: gl.constexpr = scales_of(FORMAT)
    layout: gl.constexpr = _GROUPS_1 if GROUPS == 1 else _GROUPS_2 if GROUPS == 2 else _GROUPS_4
    if SCALES == "e8m0":  # 2^(s - 127) x 2^126, of e2m1: no s is above 128 (runtime/weights/order.py)
        s = view(held, gl.uint8, [64, GROUPS], _FLAT_2).load(layout)
        found = ((s.to(gl.uint16) + 126) << 7).to(gl.bfloat16, bitcast=True)
    elif SCALES == "e4m3":  # x 2^6, and the codes x 2^-6, for neither's factor fits: no scale is negative
        s = view(held, gl.uint8, [64, GROUPS], _FLAT_2).load(layout)
        found = (s.to(gl.uint16) << 4).to(gl.bfloat16, bitcast=True) * _power(126)
    else:
        found = view(held, gl.bfloat16, [64, GROUPS], _FLAT_2).load(layout)
    return found


@gluon.jit
def operand(codes, scales, FORMAT: gl.constexpr, OPERAND: gl.constexpr):
    """A block of w, bf16 [64, 64], of its codes and scales in shared memory."""
    GROUPS: gl.constexpr = groups_of(FORMAT)
    SCALES: gl.constexpr = scales_of(FORMAT)
    v = _unpack(codes, FORMAT)
    if SCALES == "none":
        v = v * _power(120)
    elif SCALES == "block":
        one = view(scales, gl.bfloat16, [1, 8], _FLAT_2)
        first = one.slice(0, 1, dim=1).load(gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0]))
        v = v * gl.convert_layout(first.reshape([1, 1, 1, 1, 1, 1]), v.type.layout)
    else:
        if SCALES == "e4m3":
            v = v * _power(120)
        by = _scales(scales, FORMAT).reshape([64, 2 if GROUPS > 1 else 1, 2 if GROUPS > 2 else 1, 1, 1, 1])
        v = v * gl.convert_layout(by, v.type.layout)
    return gl.convert_layout(v.reshape([64, 64]), OPERAND, assert_trivial=True)


# Turned round. A block is seen as [pairs of rows, row of a pair, c, word, p, s mod 2], of 8 bits without the last.
# What a thread has is its rows of w; p and c are in its lane, word and s in its warp.
def _turned(four: bool) -> gl.DistributedLinearLayout:
    end = [0] * (2 if four else 1)

    def at(*place: int) -> list[int]:
        return [*place, *end]

    lanes_p = [0, 0, 0, 0, 1, 0] if four else [0, 0, 0, 0, 1]
    warps = [[0, 0, 0, 0, 0, 1], [0, 0, 0, 1, 0, 0]] if four else [[0, 0, 0, 1, 0], [0, 0, 0, 2, 0]]
    return gl.DistributedLinearLayout(
        reg_bases=[at(0, 1, 0, 0), at(4, 0, 0, 0), at(8, 0, 0, 0), at(16, 0, 0, 0)],
        lane_bases=[at(1, 0, 0, 0), at(2, 0, 0, 0), lanes_p, at(0, 0, 1, 0), at(0, 0, 2, 0)],
        warp_bases=warps, block_bases=[], shape=[32, 2, 4, 2, 2, 2] if four else [32, 2, 4, 4, 2],
    )  # fmt: skip


_TURNED_4: gl.constexpr = gl.constexpr(_turned(True))
_TURNED_8: gl.constexpr = gl.constexpr(_turned(False))


def _turned_swizzled() -> gl.SharedLinearLayout:
    """As ``_swizzled``, of [pairs of rows, row of a pair, c, word]."""
    words = [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 1, 0], [0, 0, 2, 0]]
    rows = [[0, 1, 0, 0], [1, 0, 1, 0], [2, 0, 2, 0]]
    return gl.SharedLinearLayout([*words, *rows, *([1 << bit, 0, 0, 0] for bit in range(2, 5))])


_TURNED_SWIZZLED: gl.constexpr = gl.constexpr(_turned_swizzled())
_FLAT_1: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_FLAT_4: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [3, 2, 1, 0]))


@gluon.constexpr_function
def _turned_text(codes, scales):  # type: ignore[no-untyped-def]
    """PTX: $0 and $1, two rows of w in the columns of h = 0 and 1, of the words $2 and $3.

    $4 is p, $6 the warp's half of a word's codes, $8 and $9 what holds the scales, $10 which of them they are, or of a
    scale of a block what bf16 leaves of it.
    """
    lines = [".reg .b32 t, u, v, s; .reg .pred q;"]
    lines += ["mad.lo.s32 u, $4, 0x2222, 0x5410; prmt.b32 t, $2, $3, u;"]  # the lower or the upper halves
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
            f"shl.b32 u, $6, 3; shr.u32 t, t, u; mov.b32 v, {_both(0x4308)};",
            f"lop3.b32 $0, t, {_both(0x000F)}, {_both(0x4300)}, 0xEA; sub.rn.bf16x2 $0, $0, v;",
            f"shr.u32 t, t, 4; lop3.b32 $1, t, {_both(0x000F)}, {_both(0x4300)}, 0xEA; sub.rn.bf16x2 $1, $1, v;",
        ]
    else:
        lines += [
            f"and.b32 $0, t, {_both(0x8000)}; shr.u32 v, t, 4; lop3.b32 $0, v, {_both(0x07F0)}, $0, 0xEA;",
            f"shl.b32 v, t, 8; and.b32 $1, v, {_both(0x8000)};",
            f"shl.b32 v, t, 4; lop3.b32 $1, v, {_both(0x07F0)}, $1, 0xEA;",
        ]
    if scales == "e8m0":  # one word has two groups of two rows
        lines += ["mad.lo.s32 u, $10, 0x0101, 0x4240; prmt.b32 s, $8, 0, u;"]
        lines += [f"add.s32 s, s, {_both(126)}; shl.b32 s, s, 7;"]
    elif scales == "e4m3":  # one word has four groups of a row
        lines += ["mad.lo.s32 u, $10, 0x1111, 0x4440; prmt.b32 s, $8, $9, u; and.b32 s, s, 0x00FF00FF;"]
        lines += [f"shl.b32 s, s, 4; mov.b32 u, {_both((127 + 126) << 7)}; mul.rn.bf16x2 s, s, u;"]
        lines += [f"mov.b32 u, {_both((127 + 120) << 7)}; mul.rn.bf16x2 $0, $0, u; mul.rn.bf16x2 $1, $1, u;"]
    elif scales == "bf16 of two groups":  # one word has two groups of a row
        lines += ["mad.lo.s32 u, $10, 0x2222, 0x5410; prmt.b32 s, $8, $9, u;"]
    else:  # one word has both rows' scales
        lines += ["mov.b32 s, $8;"]
    if scales == "block":  # and another what they lack: the sum is rounded once
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
        both = view(scales, gl.int32, [1, 4], _FLAT_2)
        by = gl.convert_layout(both.slice(0, 1, dim=1).load(ONE).reshape([1, 1, 1, 1, 1]), ALL)
        which = gl.convert_layout(both.slice(1, 1, dim=1).load(ONE).reshape([1, 1, 1, 1, 1]), ALL)
    elif (SCALES == "bf16" and GROUPS == 2) or SCALES == "e4m3":
        by = view(scales, gl.int32, [32, 2], _FLAT_2).load(ROWS)
        by = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.expand_dims(by, 2), 3), 4), 5)
    else:
        by = view(scales, gl.int32, [32], _FLAT_1).load(PAIRS)
        by = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.expand_dims(by, 1), 2), 3), 4), 5)
    low, high = gl.inline_asm_elementwise(
        _turned_asm(FORMAT), "=&r,=&r,r,r,r,r,r,r,r,r,r,r", [held, p, s, by, which],
        dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
    )  # fmt: skip
    v = gl.join(low, high)
    v = v.permute((3, 5, 6, 2, 4, 0, 1)) if FOUR else v.permute((3, 5, 2, 4, 0, 1))
    return gl.convert_layout(v.reshape([64, 64]), OPERAND, assert_trivial=True)


@gluon.jit
def scaled(part, outer, expert, col, N, FORMAT: gl.constexpr):
    """The part by its expert's scale, or by those of its rows, which are y's columns from ``col`` on."""
    OUTER: gl.constexpr = outer_of(FORMAT)
    if OUTER == "expert":
        part = part * gl.load(outer[0] + expert)
    elif OUTER == "column":
        n = col + gl.arange(0, part.shape[0], layout=gl.SliceLayout(1, part.type.layout))
        part = part * gl.load(outer[0] + expert * outer[1] + n, mask=n < N, other=0.0)[:, None]
    return part


@gluon.jit
def biased_across(part, moved, expert, col, N):
    """The part, whose rows are y's columns from ``col`` on, and their bias."""
    if (moved[6] & BIAS_FLAG) != 0:
        n = col + gl.arange(0, part.shape[0], layout=gl.SliceLayout(1, part.type.layout))
        added = gl.load(moved[2] + expert.to(gl.int64) * N + n, mask=n < N, other=0.0)
        part += added.to(gl.float32)[:, None]
    return part
