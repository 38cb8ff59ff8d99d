"""Codes of int4 with zero points to bf16, as the left operand of wgmma, for the forward and for dX.

Codes and scales are laid out as for int4 without zero points, and FORMAT is the name of that format: int4_g32,
int4_g64 or int4_g128. Zero points are one byte for each scale, in the order of the scales, and are stored less 8: the
low four bits of a byte, with the highest of these inverted, are the code that stands for 0.

(code - zero) / 128 - 1 has eight bits and is exact in bf16. An fma makes this x scale + scale, rounded once: that is
(code - zero) x scale / 128, and ``grown`` multiplies the sums by 128.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..codes import CODES
from ..gluon.pipeline import view
from .blocks import BLOCK
from .dequantize import (
    _FLAT_1,
    _FLAT_2,
    _FLAT_3,
    _WORDS_4,
    _eight,
    _row_of_scales,
    blocks_per_scale,
    both,
    groups_of,
    places_of,
)
from .dequantize_transposed import _FLAT_4, _TURNED_4

DOWN = 7  # log2 of the factor by which values are too small
_TMA_BYTES = 128  # shared memory that TMA writes to begins at a multiple of this


@gluon.constexpr_function
def zero_bytes_of(FORMAT):  # type: ignore[no-untyped-def]
    """Bytes of a block's zero points: half of what its scales take."""
    return CODES[FORMAT].scale_bytes // 2


@gluon.constexpr_function
def zero_places_of(FORMAT, BLOCKS):  # type: ignore[no-untyped-def]
    """Rows of shared memory for the zero points of so many blocks of K."""
    one = CODES[FORMAT]
    return max(BLOCKS // one.blocks_per_scale, 2 * _TMA_BYTES // one.scale_bytes)


def _bf16(exponent: int) -> str:
    return both((127 + exponent) << 7)


# A zero point's byte n, of which the low four bits count, to -(128 + zero) / 128: xor after and.
_ZERO_BITS = f"{both(0x000F)}, {both(0xBF88)}, 0x6A"


def zeroed_text(groups: int) -> str:
    """PTX: $0 ... $7 of the words $8 and $9 of a row, its scales $10 and zero points $12.

    Each result is (code - zero) x scale x 2^-7.
    Four bits of a half-word are a bf16, as in ``dequantize.int4_text``: code x 2^-133 or code x 2^-129. An fma turns it
    into v = (code - zero) / 128 - 1, exactly. A second fma computes v x scale + scale, rounded once.
    """
    lines = [".reg .b16 h0, h1; .reg .b32 t, u, l, h, scale, less;"]
    lines += [f"mov.b32 l, {_bf16(133 - DOWN)}; mov.b32 h, {_bf16(129 - DOWN)};"]
    for word in range(2):
        w, group = f"${8 + word}", word if groups == 2 else 0
        if groups == 2 or word == 0:
            half = f"h{group}"
            lines += [f"prmt.b32 less, $12, 0, {'0x4141' if group else '0x4040'}; lop3.b32 less, less, {_ZERO_BITS};"]
            lines += [f"mov.b32 {{h0, h1}}, $10; mov.b32 scale, {{{half}, {half}}};"]
        lines += [f"shr.u32 u, {w}, 8;"]
        for i, (source, mask, by) in enumerate(
            ((w, 0x000F, "l"), (w, 0x00F0, "h"), ("u", 0x000F, "l"), ("u", 0x00F0, "h"))
        ):
            lines += [f"and.b32 t, {source}, {both(mask)}; fma.rn.bf16x2 t, t, {by}, less;"]
            lines += [f"fma.rn.bf16x2 ${4 * word + i}, t, scale, scale;"]
    return "\n".join(("{", *lines, "}"))


def zeroed_turned_text(groups: int) -> str:
    """PTX: $0 and $1, two rows of w in the columns of h = 0 and 1, of the words $2 and $3.

    $4 is p, $6 the warp's half of a word's codes. $8 and $9 hold the scales, and $10 is 0 or 1, the group of a row.
    $12 has the zero points of both rows, one for each group. Codes become values as in ``zeroed_text``.
    """
    lines = [".reg .b32 t, u, v, s, l, h;"]
    lines += [f"mov.b32 l, {_bf16(133 - DOWN)}; mov.b32 h, {_bf16(129 - DOWN)};"]
    lines += ["mad.lo.s32 u, $4, 2, $6; mad.lo.s32 u, u, 0x1111, 0x4400; prmt.b32 t, $2, $3, u;"]  # a byte of each word
    if groups == 2:  # one word has two groups of two rows
        lines += ["mad.lo.s32 u, $10, 0x0101, 0x4240; prmt.b32 v, $12, 0, u;"]
    else:
        lines += ["prmt.b32 v, $12, 0, 0x4140;"]
    lines += [f"lop3.b32 v, v, {_ZERO_BITS};"]
    if groups == 2:
        lines += ["mad.lo.s32 u, $10, 0x2222, 0x5410; prmt.b32 s, $8, $9, u;"]
    else:  # one word has both rows' scales
        lines += ["mov.b32 s, $8;"]
    lines += [
        f"and.b32 $0, t, {both(0x000F)}; fma.rn.bf16x2 $0, $0, l, v; fma.rn.bf16x2 $0, $0, s, s;",
        f"and.b32 $1, t, {both(0x00F0)}; fma.rn.bf16x2 $1, $1, h, v; fma.rn.bf16x2 $1, $1, s, s;",
    ]
    return "\n".join(("{", *lines, "}"))


_ZEROED_1: gl.constexpr = gl.constexpr(zeroed_text(1))
_ZEROED_2: gl.constexpr = gl.constexpr(zeroed_text(2))
_TURNED_1: gl.constexpr = gl.constexpr(zeroed_turned_text(1))
_TURNED_2: gl.constexpr = gl.constexpr(zeroed_turned_text(2))


@gluon.constexpr_function
def _text(FORMAT, DX):  # type: ignore[no-untyped-def]
    two = CODES[FORMAT].groups == 2
    return (_TURNED_2 if two else _TURNED_1) if DX else (_ZEROED_2 if two else _ZEROED_1)


@gluon.constexpr_function
def _row_of_zeros(FORMAT):  # type: ignore[no-untyped-def]
    """All zero points of a row of a block as one integer."""
    return gl.int16 if CODES[FORMAT].groups == 2 else gl.int8


@gluon.constexpr_function
def _pair_of_zeros(FORMAT):  # type: ignore[no-untyped-def]
    """All zero points of two rows of a block as one integer."""
    return gl.int32 if CODES[FORMAT].groups == 2 else gl.int16


@gluon.jit
def _zeroed(codes, scales, zeros, FORMAT: gl.constexpr, OPERAND: gl.constexpr):
    """A block of w, bf16 [64, 64] times 2^-7, of its codes, scales and zero points in shared memory."""
    words = view(codes, gl.int32, [64, 4, 2], _FLAT_3).load(_WORDS_4)
    ROWS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, _WORDS_4))
    by = view(scales, _row_of_scales(FORMAT), [64], _FLAT_1).load(ROWS).to(gl.int32)
    less = view(zeros, _row_of_zeros(FORMAT), [64], _FLAT_1).load(ROWS).to(gl.int32)
    by = gl.expand_dims(gl.expand_dims(by, 1), 2)
    less = gl.expand_dims(gl.expand_dims(less, 1), 2)
    o = gl.inline_asm_elementwise(
        _text(FORMAT, False),
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r",
        [words, by, less],
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
    return gl.convert_layout(_eight(o).reshape([64, 64]), OPERAND, assert_trivial=True)


@gluon.jit
def _zeroed_turned(codes, scales, zeros, FORMAT: gl.constexpr, OPERAND: gl.constexpr):
    """Return a block of w transposed, bf16 [64, 64], like ``_zeroed``: its rows are columns of w."""
    GROUPS: gl.constexpr = groups_of(FORMAT)
    NO_S: gl.constexpr = gl.SliceLayout(5, _TURNED_4)
    WORDS: gl.constexpr = gl.SliceLayout(4, NO_S)  # rows, row, c, word
    ROWS: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, WORDS))  # rows, row
    PAIRS: gl.constexpr = gl.SliceLayout(1, ROWS)
    PAIR_P: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, NO_S)))  # rows, p
    PAIR_WORD: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, WORDS))  # rows, word
    IN_S: gl.constexpr = gl.SliceLayout(
        0, gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, gl.SliceLayout(4, _TURNED_4))))
    )
    p = gl.arange(0, 2, layout=gl.SliceLayout(0, PAIR_P))
    p = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.expand_dims(p, 0), 1), 2), 3), 5)
    word = gl.arange(0, 2, layout=gl.SliceLayout(0, PAIR_WORD))
    word = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.expand_dims(word, 0), 1), 2), 4), 5)
    s = gl.arange(0, 2, layout=IN_S)
    s = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.expand_dims(s, 0), 1), 2), 3), 4)
    held = view(codes, gl.int32, [32, 2, 4, 2], _FLAT_4).load(WORDS)
    held = gl.expand_dims(gl.expand_dims(held, 4), 5)
    if GROUPS == 2:
        by = view(scales, gl.int32, [32, 2], _FLAT_2).load(ROWS)
        by = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.expand_dims(by, 2), 3), 4), 5)
    else:
        by = view(scales, gl.int32, [32], _FLAT_1).load(PAIRS)
        by = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.expand_dims(by, 1), 2), 3), 4), 5)
    less = view(zeros, _pair_of_zeros(FORMAT), [32], _FLAT_1).load(PAIRS).to(gl.int32)
    less = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.expand_dims(less, 1), 2), 3), 4), 5)
    low, high = gl.inline_asm_elementwise(
        _text(FORMAT, True),
        "=&r,=&r,r,r,r,r,r,r,r,r,r,r,r,r",
        [held, p, s, by, word, less],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=2,
    )
    v = gl.join(low, high).permute((3, 5, 6, 2, 4, 0, 1))
    return gl.convert_layout(v.reshape([64, 64]), OPERAND, assert_trivial=True)


@gluon.jit
def zeroed_block_of(
    a,
    s,
    z,
    stage,
    half,
    UNIT: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    FORMAT: gl.constexpr,
    DX: gl.constexpr,
    OPERAND: gl.constexpr,
):
    """A warpgroup's UNIT-th operand of a stage, as ``blocks.block_of``, from codes with zero points."""
    DEEP: gl.constexpr = BLOCK_K // BLOCK
    WIDE: gl.constexpr = BLOCK_N // BLOCK
    MINE: gl.constexpr = max(1, BLOCK_N // (2 * BLOCK))
    if BLOCK_N == BLOCK:
        n, k = 0, 2 * UNIT + half
    else:
        n, k = half * MINE + UNIT % MINE, UNIT // MINE
    if DX:
        line = stage * DEEP + k
        scales = s.index(line * places_of(FORMAT, WIDE) + n // blocks_per_scale(FORMAT))
        zeros = z.index(line * zero_places_of(FORMAT, WIDE) + n // blocks_per_scale(FORMAT))
        block = _zeroed_turned(a.index(line * WIDE + n), scales, zeros, FORMAT, OPERAND)
    else:
        line = stage * WIDE + n
        scales = s.index(line * places_of(FORMAT, DEEP) + k // blocks_per_scale(FORMAT))
        zeros = z.index(line * zero_places_of(FORMAT, DEEP) + k // blocks_per_scale(FORMAT))
        block = _zeroed(a.index(line * DEEP + k), scales, zeros, FORMAT, OPERAND)
    return block


@gluon.jit
def grown(part):
    """Sums with w, from sums of products with ``zeroed_block_of``."""
    return part * 128.0
