"""Codes of mxfp8 to bf16, as the left operand of wgmma: ``dequantize.py`` and ``dequantize_transposed.py`` for these.

Codes are laid out as all of 8 bits. Scales are two bytes a row of a block, one for each 32 of K: a code is made
value x 2^-120, and a scale s the power of two 2^(s - 7), so that their product is the value times 2^(s - 127), rounded
once. No s is above 134 (runtime/weights/prepared_layout.py).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..gluon.pipeline import view
from .blocks import BLOCK
from .dequantize import _FLAT_1, _SWIZZLED, _WORDS_8, _doubled, both
from .dequantize_transposed import _TURNED_8, _TURNED_SWIZZLED

WORDS: gl.constexpr = gl.constexpr(4)  # int32 words of a row of a block, for each of four threads
SCALE_BYTES: gl.constexpr = gl.constexpr(128)  # of a block

_HALVES: gl.constexpr = gl.constexpr(0x5410)  # prmt's selector of the lower halves of two words
_HALF: gl.constexpr = gl.constexpr(0x2222)  # added to a selector, it selects the upper halves
_SCALES: gl.constexpr = gl.constexpr(0x4240)  # prmt's selector of the first scales of two rows, widened to 16 bits
_SCALE: gl.constexpr = gl.constexpr(0x0101)  # added to a selector, it selects the second scales
_POWER = f"add.s32 s, s, {both(120)}; shl.b32 s, s, 7;"  # two e8m0 scales s to bf16: 2^(s - 7)


def _pairs(word: str, first: str, second: str) -> list[str]:
    """PTX: the codes in the high bytes of a word's halves, and those in the low ones: as ``dequantize._e4m3_text``."""
    return [
        f"and.b32 {first}, {word}, {both(0x8000)};",
        f"shr.u32 t, {word}, 4; lop3.b32 {first}, t, {both(0x07F0)}, {first}, 0xEA;",
        f"shl.b32 t, {word}, 8; and.b32 {second}, t, {both(0x8000)};",
        f"shl.b32 t, {word}, 4; lop3.b32 {second}, t, {both(0x07F0)}, {second}, 0xEA;",
    ]


def mx8_text() -> str:
    """PTX: $0 ... $7 of the words $8 ... $11 of a row, and its two scales in the low bytes of $12.

    Two words have a scale. Results are in the order of ``dequantize._e4m3_text``.
    """
    lines = [".reg .b16 h0, h1; .reg .b32 t, s, by;", f"prmt.b32 s, $12, 0, 0x4140; {_POWER}"]
    for word in range(4):
        first, second = (f"${4 * (word & 1) + (word >> 1) + more}" for more in (0, 2))
        lines += [_doubled("by", "s", word // 2), *_pairs(f"${8 + word}", first, second)]
        lines += [f"mul.rn.bf16x2 {first}, {first}, by; mul.rn.bf16x2 {second}, {second}, by;"]
    return "\n".join(("{", *lines, "}"))


def mx8_turned_text() -> str:
    """PTX: $0 and $1, two rows of w in the columns of h = 0 and 1, of the words $2 and $3.

    $6 has both scales of both rows; $4 says which halves of the words are taken, $8 which scales: ``_HALVES`` + p times
    ``_HALF``, and ``_SCALES`` + ``_SCALE`` in a row's later words.
    """
    lines = [".reg .b32 t, s, q;", f"prmt.b32 q, $2, $3, $4; prmt.b32 s, $6, 0, $8; {_POWER}"]
    lines += [*_pairs("q", "$0", "$1"), "mul.rn.bf16x2 $0, $0, s; mul.rn.bf16x2 $1, $1, s;"]
    return "\n".join(("{", *lines, "}"))


_STRAIGHT: gl.constexpr = gl.constexpr(mx8_text())
_TURNED: gl.constexpr = gl.constexpr(mx8_turned_text())


@gluon.jit
def _straight(codes, scales, OPERAND: gl.constexpr):
    """A block of w, bf16 [64, 64], of its codes and scales in shared memory."""
    words = view(codes, gl.int32, [64, 4, 4], _SWIZZLED).load(_WORDS_8)
    ROWS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, _WORDS_8))
    by = view(scales, gl.int16, [64], _FLAT_1).load(ROWS).to(gl.int32)
    by = gl.expand_dims(gl.expand_dims(by, 1), 2)
    o = gl.inline_asm_elementwise(
        _STRAIGHT,
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r,r,r",
        [words, by],
        dtype=(gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=4,
    )
    pairs = gl.join(gl.join(o[0], o[1]), gl.join(o[2], o[3])).reshape([64, 4, 2, 2, 2, 2])
    v = pairs.permute((0, 2, 5, 4, 1, 3))
    return gl.convert_layout(v.reshape([64, 64]), OPERAND, assert_trivial=True)


@gluon.jit
def _across(codes, scales, OPERAND: gl.constexpr):
    """A block of w, bf16 [64, 64], transposed: its rows are columns of w."""
    WORD: gl.constexpr = gl.SliceLayout(4, _TURNED_8)  # pairs of rows, row, c, word
    PAIRS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, WORD)))
    PAIR_P: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, _TURNED_8)))
    PAIR_WORD: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, WORD))
    p = gl.arange(0, 2, layout=gl.SliceLayout(0, PAIR_P))
    p = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.expand_dims(p, 0), 1), 2), 3)
    word = gl.arange(0, 4, layout=gl.SliceLayout(0, PAIR_WORD))
    word = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.expand_dims(word, 0), 1), 2), 4)
    held = view(codes, gl.int32, [32, 2, 4, 4], _TURNED_SWIZZLED).load(WORD)
    by = view(scales, gl.int32, [32], _FLAT_1).load(PAIRS)
    by = gl.expand_dims(gl.expand_dims(gl.expand_dims(gl.expand_dims(by, 1), 2), 3), 4)
    low, high = gl.inline_asm_elementwise(
        _TURNED,
        "=&r,=&r,r,r,r,r,r,r,r,r",
        [gl.expand_dims(held, 4), _HALVES + p * _HALF, by, _SCALES + word // 2 * _SCALE],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=2,
    )
    v = gl.join(low, high).permute((3, 5, 2, 4, 0, 1))
    return gl.convert_layout(v.reshape([64, 64]), OPERAND, assert_trivial=True)


@gluon.jit
def mx8_block_of(
    a,
    s,
    stage,
    half,
    UNIT: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    DX: gl.constexpr,
    OPERAND: gl.constexpr,
):
    """A warpgroup's UNIT-th operand of a stage, as ``blocks.block_of``."""
    DEEP: gl.constexpr = BLOCK_K // BLOCK
    WIDE: gl.constexpr = BLOCK_N // BLOCK
    MINE: gl.constexpr = max(1, BLOCK_N // (2 * BLOCK))
    if BLOCK_N == BLOCK:
        n, k = 0, 2 * UNIT + half
    else:
        n, k = half * MINE + UNIT % MINE, UNIT // MINE
    if DX:
        at = (stage * DEEP + k) * WIDE + n
        block = _across(a.index(at), s.index(at), OPERAND)
    else:
        at = (stage * WIDE + n) * DEEP + k
        block = _straight(a.index(at), s.index(at), OPERAND)
    return block
