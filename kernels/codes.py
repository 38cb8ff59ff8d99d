"""How the codes and scales of quantised weights lie when they are prepared: what a kernel and its launcher agree on.

Prepared weights are in blocks of 64 rows and 64 of K (runtime/weights/order.py). This file is read by kernels, so it
imports nothing of the project.
"""

from __future__ import annotations

from typing import NamedTuple

BLOCK = 64  # rows of w, and of K, that lie together
WORD_ROW = 256  # words of a block's codes in a row of their descriptor


class CodeLayout(NamedTuple):
    """How a format's blocks lie."""

    codes: str  # e2m1, int4 or e4m3
    scales: str  # e8m0, e4m3 or bf16 of each row and group; "block": one bf16 for all of a block; "none"
    groups: int = 1  # of a row of a block, that have a scale each
    blocks_per_scale: int = 1  # of K
    outer: bool = False  # sums are multiplied by a scale of the expert, or of each of y's columns

    @property
    def words(self) -> int:
        """Of 8 codes of 4 bits, or 4 of 8, that a thread has of a row of a block."""
        return 4 if self.codes == "e4m3" else 2

    @property
    def scale_bytes(self) -> int:
        """Of a block, 0 where it has none; TMA moves 16 at least."""
        if self.scales in ("none", "block"):
            return 16 if self.scales == "block" else 0
        return BLOCK * self.groups * (2 if self.scales == "bf16" else 1)

    def places(self, blocks: int) -> int:
        """Rows of shared memory for the scales of so many blocks of K: TMA writes to multiples of 128 bytes."""
        return max(blocks // self.blocks_per_scale, 8 if self.scales == "block" else 1)


# By the name of the precision: artifacts/records/precision.py.
CODES: dict[str, CodeLayout] = {
    "mxfp4": CodeLayout("e2m1", "e8m0", 2),
    "nvfp4": CodeLayout("e2m1", "e4m3", 4, outer=True),
    "int4_g32": CodeLayout("int4", "bf16", 2),
    "int4_g64": CodeLayout("int4", "bf16"),
    "int4_g128": CodeLayout("int4", "bf16", blocks_per_scale=2),
    "fp8_block_a16": CodeLayout("e4m3", "block"),
    "fp8_channel_a16": CodeLayout("e4m3", "none", outer=True),
}
