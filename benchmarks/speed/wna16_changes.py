"""What the forms of benchmarks/speed/wna16_forms.py change in the kernel's sources: texts, and what is in their place.

A change is (file, text, other text); a text that is not there as often as it should be is an error.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Change(NamedTuple):
    """``old`` is in ``file`` ``times`` times, and becomes ``new``."""

    file: str
    old: str
    new: str
    times: int = 1


# No arithmetic, and no right result: what is left is the time of all else.
_BARE = "\n".join(("{", *(f"mov.b32 ${i}, ${8 + i // 4};" for i in range(7)), "add.u32 $7, $9, $10;", "}"))

DEQUANTIZE, WNA16 = "kernels/gemm/hopper/operand/dequantize.py", "kernels/gemm/hopper/wna16.py"
ENTRY, COMPILE = "kernels/contract/mixed_input.py", "aot/compile/triton.py"

BARE = (
    *(
        Change(DEQUANTIZE, f"gl.constexpr({name})", f"gl.constexpr({_BARE!r})")
        for name in ("int4_text(1)", "int4_text(2)")
    ),
)
# A product is over before the next begins.
EARLIER = (Change(WNA16, 'codes_of(FORMAT) != "e4m3"', "False"),)

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
