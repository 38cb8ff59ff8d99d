"""Codes of a quantised w to bf16, in registers, as the left operand of wgmma wants them.

w is prepared (runtime/weights/order.py): a block of 64 rows and 64 of K lies together, as int32 [64, 4, W]: a row, the
thread c of the four that hold a row of the operand, and W words, 2 of codes of 4 bits and 4 of those of 8. With
K = 16 s + 8 h + 2 c + p, codes of p = 0 are in the low half of a word and those of p = 1 in the high one, in the order
of (s, h). So one instruction or two make two neighbours of bf16. Of codes of 8 bits the four words of a row change
places, c ^ row / 2 % 4, as in the swizzle of 64 bytes in which wgmma can read them (w8a8.py).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...codes import CODES
from .pipeline import view


def _both(half: int) -> str:
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
