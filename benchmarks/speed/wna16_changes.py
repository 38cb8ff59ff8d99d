"""What the forms of benchmarks/speed/wna16_forms.py change in the kernel's sources: texts, and what is in their place.

A change is (file, text, other text); a text that is not there as often as it should be is an error. The ``.._text``
functions make the PTX that turns two words of 8 codes into bf16, times their scales: what it computes is carried out in
tests/benchmarks/test_wna16_forms.py.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

SCALED_DOWN = 16  # sums of ``fma`` are so many powers of two too small


class Change(NamedTuple):
    """``old`` is in ``file`` ``times`` times, and becomes ``new``."""

    file: str
    old: str
    new: str
    times: int = 1


def both(half: int) -> str:
    """A word with the same 16 bits twice."""
    return f"0x{half:04X}{half:04X}"


def power(exponent: int) -> int:
    """The bits of 2^exponent in bf16."""
    return (127 + exponent) << 7


def _doubled(to: str, source: str, half: int) -> str:
    """One half of a register twice: ptxas reads such halves in place."""
    one = "h1" if half else "h0"
    return f"mov.b32 {{h0, h1}}, {source}; mov.b32 {to}, {{{one}, {one}}};"


def mul_text(groups: int) -> str:
    """Today's arithmetic, (code - 8) x scale: $0 ... $7 of the words $8 and $9 of a row, whose scales $10 holds."""
    lines = [".reg .b16 h0, h1; .reg .b32 t, o, s;", f"mov.b32 o, {both(0x4308)};"]
    for word in range(2):
        w = f"${8 + word}"
        lines += [_doubled("s", "$10", word if groups == 2 else 0)]
        for i in range(4):
            source, shift = (w, "") if i == 0 else ("t", f"shr.u32 t, {w}, {4 * i}; ")
            lines += [
                f"{shift}lop3.b32 t, {source}, {both(0x000F)}, {both(0x4300)}, 0xEA;",
                f"sub.rn.bf16x2 t, t, o; mul.rn.bf16x2 ${4 * word + i}, t, s;",
            ]
    return "\n".join(("{", *lines, "}"))


def fma_text(groups: int) -> str:
    """code x 2^-133 x (scale x 2^117) - scale x 2^-13, rounded once: the same x 2^-16.

    Codes in bits 0 to 3 of a half are the number code x 2^-133, those in bits 4 to 7 code x 2^-129: no exponent is set,
    or the lowest one, whose numbers follow on.
    """
    lines = [".reg .b16 h0, h1; .reg .b32 t, u, k, low, high, lows, highs, less, eights;"]
    for to, exponent in (("lows", 133 - SCALED_DOWN), ("highs", 129 - SCALED_DOWN)):
        lines += [f"mov.b32 k, {both(power(exponent))}; mul.rn.bf16x2 {to}, $10, k;"]
    lines += [f"mov.b32 k, {both(0x8000 | power(3 - SCALED_DOWN))}; mul.rn.bf16x2 eights, $10, k;"]
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


def bare_text() -> str:
    """No arithmetic, and no right result: what is left is the time of all else."""
    return "\n".join(("{", *(f"mov.b32 ${i}, ${8 + i // 4};" for i in range(7)), "add.u32 $7, $9, $10;", "}"))


def e2m1_text(scales: str) -> str:
    """The same of e2m1 codes: today's bits, and scales of 8 bits made bf16 here. nvfp4's result is x 2^-10.

    A row of mxfp4 has two scales, of a word each: 2^(s - 127) x 2^126. One of nvfp4 has four, of half a word each:
    s x 2^-120, x 2^127 x 2^109, and codes x 2^-126.
    """
    lines = [".reg .b16 h0, h1; .reg .b32 t, u, s, k, first, second;"]
    if scales == "e8m0":
        lines += [f"prmt.b32 s, $10, 0, 0x4140; add.s32 s, s, {both(126)}; shl.b32 s, s, 7;"]
    for word in range(2):
        w, out = f"${8 + word}", [f"${4 * word + i}" for i in range(4)]
        if scales == "e8m0":
            lines += [_doubled("first", "s", word), "mov.b32 second, first;"]
        else:
            lines += [f"prmt.b32 s, $10, 0, 0x{0x4342 if word else 0x4140:04X}; shl.b32 s, s, 4;"]
            lines += [f"mov.b32 k, {both(power(127))}; mul.rn.bf16x2 s, s, k;"]
            lines += [f"mov.b32 k, {both(power(109))}; mul.rn.bf16x2 s, s, k;"]
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


def texts_of(arithmetic: str) -> dict[str, str]:
    """The PTX of each format: "mul", "fma", or "bare"."""
    if arithmetic == "bare":
        return {"int4_g32": bare_text(), "int4_g128": bare_text()}
    int4 = fma_text if arithmetic == "fma" else mul_text
    return {
        "int4_g32": int4(2), "int4_g64": int4(1), "int4_g128": int4(1), "mxfp4": e2m1_text("e8m0"),
        "nvfp4": e2m1_text("e4m3"),
    }  # fmt: skip


def sums_of(arithmetic: str) -> dict[str, float]:
    """What sums are multiplied by."""
    less = 2.0**SCALED_DOWN if arithmetic == "fma" else 1.0
    return {"int4_g32": less, "int4_g64": less, "int4_g128": less, "nvfp4": 2.0**10}


DEQUANTIZE, WNA16 = "kernels/gemm/hopper/dequantize.py", "kernels/gemm/hopper/wna16.py"
ENTRY, COMPILE = "kernels/contract/mixed_input.py", "aot/compile/triton.py"

_INSIDE = '''
_TEXTS = {texts}
_SUMS = {sums}


@gluon.constexpr_function
def _text_of(FORMAT):
    return _TEXTS[FORMAT]


@gluon.constexpr_function
def _sums_by(FORMAT):
    return _SUMS[FORMAT] if FORMAT in _SUMS else 1.0


@gluon.constexpr_function
def _one_by_one(FORMAT):
    return FORMAT not in _TEXTS


@gluon.constexpr_function
def _row_of_scales(FORMAT):
    return {{64: gl.int8, 128: gl.int16, 256: gl.int32}}[CODES[FORMAT].scale_bytes]


@gluon.jit
def fetched(codes, scales, FORMAT: gl.constexpr):
    """What a thread has of a block: its words, and of each row the scales in one."""
    ROWS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, _WORDS_4))
    words = view(codes, gl.int32, [64, 4, 2], _FLAT_3).load(_WORDS_4)
    by = view(scales, _row_of_scales(FORMAT), [64], _FLAT_1).load(ROWS).to(gl.int32)
    return words, gl.expand_dims(gl.expand_dims(by, 1), 2)


@gluon.jit
def made(words, by, FORMAT: gl.constexpr, OPERAND: gl.constexpr):
    """A block of w, bf16 [64, 64]: each code times its scale, in one block of instructions."""
    o = gl.inline_asm_elementwise(
        _text_of(FORMAT), "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r", [words, by],
        dtype=(
            gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16,
        ), is_pure=True, pack=2,
    )
    low = gl.join(gl.join(o[0], o[1]), gl.join(o[2], o[3]))
    high = gl.join(gl.join(o[4], o[5]), gl.join(o[6], o[7]))
    v = gl.join(low, high).permute((0, 5, 4, 3, 1, 2))
    return gl.convert_layout(v.reshape([64, 64]), OPERAND, assert_trivial=True)


@gluon.jit
def operand(codes, scales, FORMAT: gl.constexpr, OPERAND: gl.constexpr):
    """A block of w, bf16 [64, 64], of its codes and scales in shared memory."""
    if _one_by_one(FORMAT):
        block = _apart(codes, scales, FORMAT, OPERAND)
    else:
        words, by = fetched(codes, scales, FORMAT)
        block = made(words, by, FORMAT, OPERAND)
    return block


@gluon.jit
def scaled('''


def inside(arithmetic: str) -> tuple[Change, ...]:
    """Scales go into the same block of instructions as the codes, so that LLVM can't take pairs of bf16 apart."""
    return (
        Change(DEQUANTIZE, "def operand(codes", "def _apart(codes"),
        Change(DEQUANTIZE, "\n@gluon.jit\ndef scaled(", _INSIDE.format(texts=repr(texts_of(arithmetic)),
                                                                       sums=repr(sums_of(arithmetic)))),
        Change(DEQUANTIZE, "    OUTER: gl.constexpr = outer_of(FORMAT)\n",
               "    OUTER: gl.constexpr = outer_of(FORMAT)\n    if _sums_by(FORMAT) != 1.0:\n"
               "        part = part * _sums_by(FORMAT)\n"),
    )  # fmt: skip


# The words of the block after next are fetched while the next one's become bf16.
EARLY = (
    Change(WNA16, "    blocks_per_scale,\n", "    blocks_per_scale,\n    fetched,\n    made,\n"),
    Change(WNA16, "@gluon.jit\ndef _x_tile(", '''@gluon.jit
def _fetch(a, s, stage, half, UNIT: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, FORMAT: gl.constexpr):
    """The words and scales of ``_block``."""
    DEEP: gl.constexpr = BLOCK_K // BLOCK
    WIDE: gl.constexpr = BLOCK_N // BLOCK
    MINE: gl.constexpr = max(1, BLOCK_N // (2 * BLOCK))
    if BLOCK_N == BLOCK:
        n, k = 0, 2 * UNIT + half
    else:
        n, k = half * MINE + UNIT % MINE, UNIT // MINE
    line = stage * WIDE + n
    at = line * places_of(FORMAT, DEEP) + k // blocks_per_scale(FORMAT)
    return fetched(a.index(line * DEEP + k), s.index(at), FORMAT)


@gluon.jit
def _x_tile('''),
    Change(WNA16, """                now = _block(a, s, stage, half, 0, BLOCK_N, BLOCK_K, FORMAT, DX, OPERAND)
            last = stage
""", """                first_words, first_by = _fetch(a, s, stage, half, 0, BLOCK_N, BLOCK_K, FORMAT)
                words, by = _fetch(a, s, stage, half, 1, BLOCK_N, BLOCK_K, FORMAT)
                now = made(first_words, first_by, FORMAT, OPERAND)
            last = stage
"""),
    Change(WNA16, """following = _block(a, s, last, half, unit + 1, BLOCK_N, BLOCK_K, FORMAT, DX, OPERAND)
""", """next_words, next_by = words, by
                    if unit + 2 < UNITS:
                        next_words, next_by = _fetch(a, s, last, half, unit + 2, BLOCK_N, BLOCK_K, FORMAT)
                    following = made(words, by, FORMAT, OPERAND)
                    words, by = next_words, next_by
"""),
)  # fmt: skip

# Within a stage a product may be under way until the next but one begins. What it reads is kept until it is over.
LONGER = (
    Change(WNA16, """                if unit % MINE == 0:
                    acc, now = warpgroup_mma_wait(num_outstanding=0, deps=(acc, now))
                else:
                    more, now = warpgroup_mma_wait(num_outstanding=0, deps=(more, now))
""", """                if unit + 1 < UNITS:
                    if unit > 0:
                        if (unit - 1) % MINE == 0:
                            acc, before = warpgroup_mma_wait(num_outstanding=1, deps=(acc, before))
                        else:
                            more, before = warpgroup_mma_wait(num_outstanding=1, deps=(more, before))
                    before = now
                elif MINE == 2:
                    acc, more, now, before = warpgroup_mma_wait(num_outstanding=0, deps=(acc, more, now, before))
                else:
                    acc, now, before = warpgroup_mma_wait(num_outstanding=0, deps=(acc, now, before))
"""),
)  # fmt: skip

# The first block of a stage becomes bf16 while the last product of the stage before is under way.
AHEAD = (Change(WNA16, "gl.constexpr = FITTED and BLOCK_K == BLOCK", "gl.constexpr = True"),)

# Tiles of at most 8 rows, where the config says 16: half of x's bytes.
ROWS_8 = (
    Change(ENTRY, '"BLOCK_M": c.block_m,', '"BLOCK_M": 8,'),
    Change(ENTRY, "(min(c.block_m, BLOCK), BLOCK)", "(8, BLOCK)", 2),
    Change(WNA16, "gl.cdiv(gl.cdiv(rows, tiles_m), GRAIN) * GRAIN", "gl.cdiv(gl.cdiv(rows, tiles_m), 8) * 8"),
)


def registers(each: int, multiplying: int) -> tuple[Change, ...]:
    """``each`` of a thread at first, ``multiplying`` of one that multiplies; those that load have the rest."""
    return (
        Change(COMPILE, '"enable_fp_fusion": True}', f'"enable_fp_fusion": True, "maxnreg": {each}}}'),
        Change(ENTRY, '"REGISTERS": 216', f'"REGISTERS": {multiplying}'),
        Change(WNA16, "504 - 2 * REGISTERS", f"{3 * each} - 2 * REGISTERS", 3),
    )


TWO_BLOCKS = registers(80, 88)  # two blocks of 384 threads an SM

FOLDERS = {"package": ".", "artifacts": "artifacts", "kernels": "kernels", "aot": "aot", "runtime": "runtime",
           "runtime/integrations": "integrations"}  # fmt: skip


def changed_copy(root: Path, folder: Path, changes: Sequence[Change]) -> None:
    """``pretuned`` of the repository at ``root`` as a package in ``folder``, with ``changes``.

    Raises
    ------
    ValueError
        where a text is not in its file as often as it should be.
    """
    for source, place in FOLDERS.items():
        to = folder / "pretuned" / place
        if source in ("kernels", "aot", "package"):
            shutil.copytree(root / source, to, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            to.symlink_to(root / source)
    for one in changes:
        path = folder / "pretuned" / one.file
        text = path.read_text()
        if text.count(one.old) != one.times:
            raise ValueError(f"{one.file} has {one.old!r} {text.count(one.old)} times, not {one.times}")
        path.write_text(text.replace(one.old, one.new))
