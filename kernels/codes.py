"""The memory layout of prepared quantised weights: the agreement between a kernel and its launcher.

Prepared weights are blocks of 64 rows by 64 of K (prepared_layout.py). Kernel sources import this file, so it
imports nothing of the project, and its names are part of their digests.
"""

from __future__ import annotations

from typing import NamedTuple

BLOCK = 64  # rows of w, and elements of K, in a block
WORD_ROW = 256  # words of a block's codes in a row of their descriptor


class CodeLayout(NamedTuple):
    """The layout of a format's blocks."""

    codes: str  # e2m1, int4 or e4m3
    scales: str  # e8m0, e4m3 or bf16 of each row and group; "block": one bf16 for a whole block; "none"
    groups: int = 1  # groups of a block's row, each with a scale
    blocks_per_scale: int = 1  # blocks along K that share a scale
    outer: bool = False  # sums are multiplied by a scale of the expert, or of each of y's columns

    @property
    def words(self) -> int:
        """32-bit words of codes in a thread's part of a block's row: 8 codes of 4 bits, or 4 codes of 8 bits each."""
        return 4 if self.codes == "e4m3" else 2

    @property
    def scale_bytes(self) -> int:
        """Bytes of a block's scales, 0 if it has none. TMA moves at least 16 bytes."""
        if self.scales in ("none", "block"):
            return 16 if self.scales == "block" else 0
        return BLOCK * self.groups * (2 if self.scales == "bf16" else 1)

    def places(self, blocks: int) -> int:
        """Rows of shared memory for the scales of ``blocks`` blocks of K: TMA writes to multiples of 128 bytes."""
        return max(blocks // self.blocks_per_scale, 8 if self.scales == "block" else 1)


# By the precision's name (artifacts/records.py).
CODES: dict[str, CodeLayout] = {
    "mxfp4": CodeLayout("e2m1", "e8m0", 2),
    "nvfp4": CodeLayout("e2m1", "e4m3", 4, outer=True),
    "int4_g32": CodeLayout("int4", "bf16", 2),
    "int4_g64": CodeLayout("int4", "bf16"),
    "int4_g128": CodeLayout("int4", "bf16", blocks_per_scale=2),
    "fp8_block_a16": CodeLayout("e4m3", "block"),
    "fp8_channel_a16": CodeLayout("e4m3", "none", outer=True),
}
