"""Codes of a quantised w to bf16, in registers, as the left operand of wgmma wants them.

w is prepared (``kernels/contract/codes.py``): a block of 64 rows and 64 of K lies together, as int32 [64, 4, 2] for codes
of 4 bits: a row, the thread c of the four that hold a row of the operand, and a word. A word has eight codes, four in
each half: those of K = 16 s + 8 h + 2 c in the low half and of the next K in the high half, (s, h) = 2 words x 4 codes.
So one instruction or two make two neighbours of bf16 of a word.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# What an e2m1 code becomes has its sign at bit 15 and the rest at bits 8 to 6, which is its value x 2^-126.
_E2M1 = "0x81C081C0"


def _e2m1_text() -> str:
    """PTX: $0 ... $7 of the words $8 and $9."""
    lines = [".reg .b32 t;"]
    for word in range(2):
        w, out = f"${8 + word}", [f"${4 * word + i}" for i in range(4)]
        lines += [
            f"and.b32 {out[0]}, {w}, {_E2M1};",
            f"shl.b32 t, {w}, 3; and.b32 {out[1]}, t, {_E2M1};",
            f"shl.b32 t, {w}, 6; and.b32 {out[2]}, t, {_E2M1};",
            f"shl.b32 t, {w}, 1; and.b32 {out[3]}, t, 0x80008000;",
            f"shr.u32 t, {w}, 5; lop3.b32 {out[3]}, t, 0x01000100, {out[3]}, 0xEA;",
            f"shr.u32 t, {w}, 4; lop3.b32 {out[3]}, t, 0x00C000C0, {out[3]}, 0xEA;",
        ]
    return "\n".join(("{", *lines, "}"))


def _int4_text() -> str:
    """PTX: the same of integers from 0 to 15, less 8: 128 + code is 0x4300 | code in bf16."""
    lines = [".reg .b32 t, o;", "mov.b32 o, 0x43084308;"]
    for word in range(2):
        w = f"${8 + word}"
        for i in range(4):
            source, shift = (w, "") if i == 0 else ("t", f"shr.u32 t, {w}, {4 * i}; ")
            out = f"${4 * word + i}"
            lines += [f"{shift}lop3.b32 t, {source}, 0x000F000F, 0x43004300, 0xEA; sub.rn.bf16x2 {out}, t, o;"]
    return "\n".join(("{", *lines, "}"))


_E2M1_TEXT: gl.constexpr = gl.constexpr(_e2m1_text())
_INT4_TEXT: gl.constexpr = gl.constexpr(_int4_text())
WORDS: gl.constexpr = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 0, 1], [8, 0, 0]], lane_bases=[[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[16, 0, 0], [32, 0, 0]], block_bases=[], shape=[64, 4, 2],
    )
)  # fmt: skip


@gluon.jit
def _unpack(words, FORMAT: gl.constexpr):
    """int32 [64, 4, 2] -> bf16 [64, 2, 2, 2, 4, 2]: row, s (two bits), h, c, and which of two neighbours."""
    TEXT: gl.constexpr = _E2M1_TEXT if FORMAT == "mxfp4" else _INT4_TEXT
    o = gl.inline_asm_elementwise(
        TEXT, "=r,=r,=r,=r,=r,=r,=r,=r,r,r", [words],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True, pack=2,
    )  # fmt: skip
    low = gl.join(gl.join(o[0], o[1]), gl.join(o[2], o[3]))
    high = gl.join(gl.join(o[4], o[5]), gl.join(o[6], o[7]))
    return gl.join(low, high).permute((0, 5, 4, 3, 1, 2))


@gluon.jit
def _scales(held, GROUPS: gl.constexpr, FORMAT: gl.constexpr):
    """The scales of a block, bf16 [64, GROUPS]."""
    bits: gl.constexpr = [[0, 1], [8, 0]] if GROUPS == 2 else [[8, 0]]
    layout: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=bits, lane_bases=[[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]], warp_bases=[[16, 0], [32, 0]],
        block_bases=[], shape=[64, GROUPS],
    )  # fmt: skip
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    if FORMAT == "mxfp4":
        # 2^(s - 127) x 2^126, see _E2M1: no s is above 128 (kernels/contract/codes.py)
        s = held._reinterpret(gl.uint8, [64, GROUPS], flat).load(layout)
        return ((s.to(gl.uint16) + 126) << 7).to(gl.bfloat16, bitcast=True)
    else:
        return held._reinterpret(gl.bfloat16, [64, GROUPS], flat).load(layout)


@gluon.jit
def operand(codes, scales, GROUPS: gl.constexpr, FORMAT: gl.constexpr, OPERAND: gl.constexpr):
    """A block of w, bf16 [64, 64], of its codes and scales in shared memory."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    v = _unpack(codes._reinterpret(gl.int32, [64, 4, 2], flat).load(WORDS), FORMAT)
    s = _scales(scales, GROUPS, FORMAT)
    by = gl.convert_layout(s.reshape([64, GROUPS, 1, 1, 1, 1]), v.type.layout)
    return gl.convert_layout((v * by).reshape([64, 64]), OPERAND, assert_trivial=True)
