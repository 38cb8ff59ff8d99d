"""Codes of a quantised w to bf16, in registers, as wgmma's left operand needs them: w's rows, or for dX its columns.

w is prepared (prepared_layout.py): a block of 64 rows and 64 of K is contiguous, as int32 [64, 4, W]: the row, c
(which of the four threads of an operand's row), and W words: 2 for codes of 4 bits, 4 for codes of 8 bits. With K =
16 s + 8 h + 2 c + p, codes with p = 0 are in a word's low half and codes with p = 1 in its high half, in the order of
(s, h). So one or two instructions make two neighbouring bf16. For codes of 8 bits a row's four words are permuted, c
^ row / 2 % 4, like in the 64-byte swizzle in which wgmma can read them (kernels/hopper_w8a8_channel/rows.py).

Scales are multiplied when a block is dequantised, in the instructions of its codes if that is faster (int4 and
nvfp4). Such values are too small by a power of two, which ``scaled`` multiplies into the sums.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..codes import CODES
from ..gluon.pipeline import BIAS_FLAG, view

INT4_DOWN = 16  # log2 of the factor by which int4 values are too small
NVFP4_DOWN = 10


@gluon.constexpr_function
def both(half):  # type: ignore[no-untyped-def]
    """A word with the same 16 bits twice."""
    return f"0x{half:04X}{half:04X}"


def _e2m1_text() -> str:
    """PTX: $0 ... $7 of the words $8 and $9: sign at bit 15, the rest at bits 8 to 6, which is the value x 2^-126."""
    lines = [".reg .b32 t;"]
    for word in range(2):
        w, out = f"${8 + word}", [f"${4 * word + i}" for i in range(4)]
        lines += [
            f"and.b32 {out[0]}, {w}, {both(0x81C0)};",
            f"shl.b32 t, {w}, 3; and.b32 {out[1]}, t, {both(0x81C0)};",
            f"shl.b32 t, {w}, 6; and.b32 {out[2]}, t, {both(0x81C0)};",
            f"shl.b32 t, {w}, 1; and.b32 {out[3]}, t, {both(0x8000)};",
            f"shr.u32 t, {w}, 5; lop3.b32 {out[3]}, t, {both(0x0100)}, {out[3]}, 0xEA;",
            f"shr.u32 t, {w}, 4; lop3.b32 {out[3]}, t, {both(0x00C0)}, {out[3]}, 0xEA;",
        ]
    return "\n".join(("{", *lines, "}"))


def _doubled(to: str, source: str, half: int) -> str:
    """One half of a register twice: ptxas reads such halves in place."""
    return f"mov.b32 {{h0, h1}}, {source}; mov.b32 {to}, {{{'h1' if half else 'h0'}, {'h1' if half else 'h0'}}};"


def _power_text(exponent: int) -> str:
    return both((127 + exponent) << 7)


def int4_text(groups: int) -> str:
    """PTX: $0 ... $7 of the words $8 and $9 of a row and its scales $10: (code - 8) x scale x 2^-16.

    Four bits of a half-word, without the others, are the bf16 code x 2^-133 (bits 0 to 3) or code x 2^-129 (bits 4 to
    7). So one fma computes a result: code x 2^-133 x (scale x 2^117) - scale x 2^-13, rounded once.
    runtime/weights/prepared_layout.py has the largest scale.
    """
    lines = [".reg .b16 h0, h1; .reg .b32 t, u, k, low, high, lows, highs, less, eights;"]
    for to, exponent in (("lows", 133 - INT4_DOWN), ("highs", 129 - INT4_DOWN)):
        lines += [f"mov.b32 k, {_power_text(exponent)}; mul.rn.bf16x2 {to}, $10, k;"]
    lines += [f"mov.b32 k, {both(0x8000 | (127 + 3 - INT4_DOWN) << 7)}; mul.rn.bf16x2 eights, $10, k;"]
    for word in range(2):
        w, half = f"${8 + word}", word if groups == 2 else 0
        if groups == 2 or word == 0:
            lines += [_doubled("low", "lows", half), _doubled("high", "highs", half), _doubled("less", "eights", half)]
        lines += [f"shr.u32 u, {w}, 8;"]
        for i, (source, mask, by) in enumerate(
            ((w, 0x000F, "low"), (w, 0x00F0, "high"), ("u", 0x000F, "low"), ("u", 0x00F0, "high"))
        ):
            lines += [f"and.b32 t, {source}, {both(mask)}; fma.rn.bf16x2 ${4 * word + i}, t, {by}, less;"]
    return "\n".join(("{", *lines, "}"))


def nvfp4_text() -> str:
    """PTX like ``int4_text``, for e2m1 codes and four e4m3 scales: value x scale x 2^-10.

    Codes are the value x 2^-126 as in ``_e2m1_text``, a scale's bits are scale x 2^-120, and are made x 2^116.
    """
    lines = [".reg .b16 h0, h1; .reg .b32 t, u, s, k, first, second;"]
    for word in range(2):
        w, out = f"${8 + word}", [f"${4 * word + i}" for i in range(4)]
        lines += [f"prmt.b32 s, $10, 0, 0x{0x4342 if word else 0x4140:04X}; shl.b32 s, s, 4;"]
        lines += [f"mov.b32 k, {_power_text(127)}; mul.rn.bf16x2 s, s, k;"]
        lines += [f"mov.b32 k, {_power_text(109)}; mul.rn.bf16x2 s, s, k;"]
        lines += [_doubled("first", "s", 0), _doubled("second", "s", 1)]
        lines += [
            f"and.b32 t, {w}, {both(0x81C0)}; mul.rn.bf16x2 {out[0]}, t, first;",
            f"shl.b32 t, {w}, 3; and.b32 t, t, {both(0x81C0)}; mul.rn.bf16x2 {out[1]}, t, first;",
            f"shl.b32 t, {w}, 6; and.b32 t, t, {both(0x81C0)}; mul.rn.bf16x2 {out[2]}, t, second;",
            f"shl.b32 t, {w}, 1; and.b32 u, t, {both(0x8000)};",
            f"shr.u32 t, {w}, 5; lop3.b32 u, t, {both(0x0100)}, u, 0xEA;",
            f"shr.u32 t, {w}, 4; lop3.b32 u, t, {both(0x00C0)}, u, 0xEA; mul.rn.bf16x2 {out[3]}, u, second;",
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
            f"and.b32 {first}, {w}, {both(0x8000)};",
            f"shr.u32 t, {w}, 4; lop3.b32 {first}, t, {both(0x07F0)}, {first}, 0xEA;",
            f"shl.b32 t, {w}, 8; and.b32 {second}, t, {both(0x8000)};",
            f"shl.b32 t, {w}, 4; lop3.b32 {second}, t, {both(0x07F0)}, {second}, 0xEA;",
        ]
    return "\n".join(("{", *lines, "}"))


_E2M1: gl.constexpr = gl.constexpr(_e2m1_text())
_E4M3: gl.constexpr = gl.constexpr(_e4m3_text())
_INT4_1: gl.constexpr = gl.constexpr(int4_text(1))
_INT4_2: gl.constexpr = gl.constexpr(int4_text(2))
_NVFP4: gl.constexpr = gl.constexpr(nvfp4_text())


def _layout(words: int) -> gl.DistributedLinearLayout:
    inner = [[0, 0, 1 << bit] for bit in range(words.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        reg_bases=[*inner, [8, 0, 0]],
        lane_bases=[[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        warp_bases=[[16, 0, 0], [32, 0, 0]],
        block_bases=[],
        shape=[64, 4, words],
    )


_WORDS_4: gl.constexpr = gl.constexpr(_layout(2))
_WORDS_8: gl.constexpr = gl.constexpr(_layout(4))
_GROUPS_2: gl.constexpr = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [8, 0]],
        lane_bases=[[0, 0], [0, 0], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 2],
    )
)
_FLAT_1: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_FLAT_2: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
_FLAT_3: gl.constexpr = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))


def _swizzled() -> gl.SharedLinearLayout:
    words = [[0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 2, 0]]
    return gl.SharedLinearLayout([*words, [1, 0, 0], [2, 1, 0], [4, 2, 0], *([1 << bit, 0, 0] for bit in range(3, 6))])


_SWIZZLED: gl.constexpr = gl.constexpr(_swizzled())


@gluon.constexpr_function
def words_of(FORMAT):  # type: ignore[no-untyped-def]
    """int32 words of a row of a block, for each of four threads."""
    return CODES[FORMAT].words


@gluon.constexpr_function
def scale_bytes_of(FORMAT):  # type: ignore[no-untyped-def]
    return CODES[FORMAT].scale_bytes


@gluon.constexpr_function
def blocks_per_scale(FORMAT):  # type: ignore[no-untyped-def]
    return CODES[FORMAT].blocks_per_scale


@gluon.constexpr_function
def places_of(FORMAT, BLOCKS):  # type: ignore[no-untyped-def]
    """Rows of shared memory for scales, for BLOCKS blocks of K."""
    return CODES[FORMAT].places(BLOCKS)


@gluon.constexpr_function
def outer_of(FORMAT):  # type: ignore[no-untyped-def]
    """The scale that sums are multiplied by: "expert", "column" or "none"."""
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


@gluon.constexpr_function
def _together_text(FORMAT):  # type: ignore[no-untyped-def]
    return _NVFP4 if CODES[FORMAT].codes == "e2m1" else _INT4_2 if CODES[FORMAT].groups == 2 else _INT4_1


@gluon.constexpr_function
def _row_of_scales(FORMAT):  # type: ignore[no-untyped-def]
    """All scales of a row of a block as one integer."""
    return {64: gl.int8, 128: gl.int16, 256: gl.int32}[CODES[FORMAT].scale_bytes]


@gluon.constexpr_function
def smaller_by(FORMAT, DX):  # type: ignore[no-untyped-def]
    """The factor by which ``operand``'s values are too small, if codes are scaled as they become bf16."""
    one = CODES[FORMAT]
    down = INT4_DOWN if one.codes == "int4" else NVFP4_DOWN if one.scales == "e4m3" else 0
    return 1.0 if DX else 2.0**down


@gluon.jit
def _eight(o):
    """The pairs of bf16 that a thread makes of its two words of a row -> [64, 2, 2, 2, 4, 2]: row, s (two), h, c, p."""
    low = gl.join(gl.join(o[0], o[1]), gl.join(o[2], o[3]))
    high = gl.join(gl.join(o[4], o[5]), gl.join(o[6], o[7]))
    return gl.join(low, high).permute((0, 5, 4, 3, 1, 2))


@gluon.jit
def _together(codes, scales, FORMAT: gl.constexpr):
    """A block in shared memory, codes and scales, -> bf16 [64, 2, 2, 2, 4, 2], too small by ``smaller_by``.

    It is one PTX text, so that LLVM can't split pairs of bf16.
    """
    words = view(codes, gl.int32, [64, 4, 2], _FLAT_3).load(_WORDS_4)
    ROWS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, _WORDS_4))
    by = view(scales, _row_of_scales(FORMAT), [64], _FLAT_1).load(ROWS).to(gl.int32)
    by = gl.expand_dims(gl.expand_dims(by, 1), 2)
    o = gl.inline_asm_elementwise(
        _together_text(FORMAT),
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r",
        [words, by],
        dtype=(
            gl.bfloat16,
            gl.bfloat16,
            gl.bfloat16,
            gl.bfloat16,
            gl.bfloat16,
            gl.bfloat16,
            gl.bfloat16,
            gl.bfloat16,
        ),
        is_pure=True,
        pack=2,
    )
    return _eight(o)


@gluon.jit
def _unpack(codes, FORMAT: gl.constexpr):
    """A block of codes alone in shared memory -> bf16 [64, 2, 2, 2, 4, 2]."""
    CODES: gl.constexpr = codes_of(FORMAT)
    if CODES == "e4m3":
        words = view(codes, gl.int32, [64, 4, 4], _SWIZZLED).load(_WORDS_8)
        o = gl.inline_asm_elementwise(
            _E4M3,
            "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r",
            [words],
            dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
            is_pure=True,
            pack=4,
        )
        pairs = gl.join(gl.join(o[0], o[1]), gl.join(o[2], o[3])).reshape([64, 4, 2, 2, 2, 2])
        v = pairs.permute((0, 2, 5, 4, 1, 3))
    else:
        words = view(codes, gl.int32, [64, 4, 2], _FLAT_3).load(_WORDS_4)
        o = gl.inline_asm_elementwise(
            _E2M1,
            "=r,=r,=r,=r,=r,=r,=r,=r,r,r",
            [words],
            dtype=(
                gl.bfloat16,
                gl.bfloat16,
                gl.bfloat16,
                gl.bfloat16,
                gl.bfloat16,
                gl.bfloat16,
                gl.bfloat16,
                gl.bfloat16,
            ),
            is_pure=True,
            pack=2,
        )
        v = _eight(o)
    return v


@gluon.jit
def operand(codes, scales, FORMAT: gl.constexpr, OPERAND: gl.constexpr):
    """A block of w, bf16 [64, 64], of its codes and scales in shared memory."""
    SCALES: gl.constexpr = scales_of(FORMAT)
    if smaller_by(FORMAT, False) != 1.0:
        v = _together(codes, scales, FORMAT)
    else:
        v = _unpack(codes, FORMAT)
        if SCALES == "none":
            v = v * gl.to_tensor((127 + 120) << 7).to(gl.uint16).to(gl.bfloat16, bitcast=True)
        elif SCALES == "block":
            one = view(scales, gl.bfloat16, [1, 8], _FLAT_2)
            first = one.slice(0, 1, dim=1).load(gl.BlockedLayout([1, 1], [1, 32], [1, 4], [1, 0]))
            v = v * gl.convert_layout(first.reshape([1, 1, 1, 1, 1, 1]), v.type.layout)
        else:  # 2^(s - 127) x 2^126, of e2m1: no s is above 128 (runtime/weights/prepared_layout.py)
            s = view(scales, gl.uint8, [64, 2], _FLAT_2).load(_GROUPS_2)
            by = ((s.to(gl.uint16) + 126) << 7).to(gl.bfloat16, bitcast=True).reshape([64, 2, 1, 1, 1, 1])
            v = v * gl.convert_layout(by, v.type.layout)
    return gl.convert_layout(v.reshape([64, 64]), OPERAND, assert_trivial=True)


@gluon.jit
def scaled(part, outer, expert, col, N, FORMAT: gl.constexpr, DX: gl.constexpr):
    """The part times its expert's scale or its rows' scales (of y's columns from ``col`` on), corrected by SMALLER."""
    OUTER: gl.constexpr = outer_of(FORMAT)
    SMALLER: gl.constexpr = smaller_by(FORMAT, DX)
    if OUTER == "expert":
        part = part * (gl.load(outer[0] + expert) * SMALLER)
    elif OUTER == "column":
        n = col + gl.arange(0, part.shape[0], layout=gl.SliceLayout(1, part.type.layout))
        part = part * gl.load(outer[0] + expert * outer[1] + n, mask=n < N, other=0.0)[:, None]
    elif SMALLER != 1.0:
        part = part * SMALLER
    return part


@gluon.jit
def biased_across(part, moved, expert, col, N):
    """part + bias. The rows of ``part`` are y's columns from ``col`` on."""
    if (moved[6] & BIAS_FLAG) != 0:
        n = col + gl.arange(0, part.shape[0], layout=gl.SliceLayout(1, part.type.layout))
        added = gl.load(moved[2] + expert.to(gl.int64) * N + n, mask=n < N, other=0.0)
        part += added.to(gl.float32)[:, None]
    return part
