"""The tile sizes worth compiling, by generation and kind of kernel: what won on GPUs, and its neighbours.

kernels/search/space.py makes configs of them. Best guesses first.
"""

from __future__ import annotations

Row = tuple[int, int, int, int, int]  # block_m, block_n, block_k, warps, stages

# sm_90, forward: what was within 2 % of the fastest somewhere on an H200 (bf16, docs/inside/cost-model.md).
HOPPER_PERSISTENT: tuple[Row, ...] = (
    (128, 256, 64, 8, 3),
    (128, 256, 64, 8, 4),
    (64, 128, 128, 4, 4),
    (64, 256, 64, 4, 4),
    (128, 128, 64, 4, 3),
    (32, 128, 128, 4, 3),
    (16, 256, 128, 4, 3),
    (16, 128, 256, 8, 3),
    (64, 128, 64, 4, 4),
    (64, 128, 64, 4, 6),
    (64, 128, 128, 8, 3),
    (64, 256, 64, 8, 3),
    (64, 256, 64, 4, 3),
    (32, 64, 256, 4, 3),
)
HOPPER_TILE: tuple[Row, ...] = (
    (16, 64, 128, 4, 4),
    (16, 64, 256, 4, 3),
    (16, 128, 128, 4, 3),
    (16, 64, 128, 4, 3),
    (16, 256, 128, 4, 3),
    (32, 128, 128, 4, 3),
    (64, 256, 64, 4, 4),
    (64, 128, 64, 4, 6),
    (64, 128, 128, 4, 3),
    (32, 64, 128, 4, 4),
    (16, 32, 256, 4, 4),
)
HOPPER_POINTER: tuple[Row, ...] = (
    (16, 64, 128, 4, 4),
    (16, 64, 128, 4, 3),
    (16, 128, 128, 4, 3),
    (16, 64, 256, 4, 3),
)
# The same, streamed: at one token, w's lines leave L2 first.
HOPPER_STREAMED: tuple[Row, ...] = (
    (16, 64, 128, 4, 4),
    (16, 128, 128, 4, 3),
    (16, 64, 256, 4, 3),
)
# sm_90, forward and dX, specialised: what won at large M.
HOPPER_SPECIALIZED: tuple[Row, ...] = (
    (128, 256, 64, 8, 4),
    (128, 128, 64, 8, 6),
    (128, 128, 64, 8, 5),
    (128, 256, 64, 8, 3),
)
# The same of dW: a tile is 128 x block_k.
HOPPER_DW_SPECIALIZED: tuple[Row, ...] = ((32, 128, 256, 8, 8),)
# sm_90, specialised, the warpgroups in turns: forward and dX, and dW.
HOPPER_PINGPONG: tuple[Row, ...] = (
    (128, 192, 64, 8, 5),
    (128, 128, 64, 8, 6),
)
# The same, the tiles fitted to the rows: by both warpgroups, and in turns.
HOPPER_FITTED: tuple[Row, ...] = ((256, 128, 64, 8, 4),)
HOPPER_FITTED_PINGPONG: tuple[Row, ...] = ((192, 128, 64, 8, 5),)
HOPPER_DW_PINGPONG: tuple[Row, ...] = (
    (32, 128, 192, 8, 10),
    (32, 192, 128, 8, 10),
)
# sm_90, dX: the same of dX.
HOPPER_DX_PERSISTENT: tuple[Row, ...] = (
    (128, 256, 64, 8, 3),
    (64, 256, 64, 4, 4),
    (64, 256, 64, 4, 3),
    (128, 256, 64, 8, 4),
    (64, 256, 64, 8, 4),
    (64, 128, 64, 4, 4),
    (64, 128, 128, 8, 3),
    (128, 128, 64, 4, 3),
    (64, 128, 128, 4, 4),
    (16, 128, 256, 8, 3),
    (32, 128, 128, 4, 3),
    (64, 128, 64, 4, 6),
    (16, 256, 128, 4, 3),
    (64, 256, 64, 8, 3),
)
HOPPER_DX_TILE: tuple[Row, ...] = (
    (16, 128, 128, 4, 3),
    (32, 128, 128, 4, 3),
    (16, 64, 256, 4, 3),
    (16, 64, 128, 4, 3),
    (16, 64, 128, 4, 4),
    (64, 128, 128, 4, 3),
    (32, 64, 128, 4, 4),
    (16, 256, 128, 4, 3),
    (64, 256, 64, 4, 4),
)
HOPPER_DX_POINTER: tuple[Row, ...] = (
    (16, 128, 128, 4, 3),
    (16, 64, 256, 4, 3),
    (16, 64, 128, 4, 4),
)
# sm_90, dW (a tile is block_n x block_k of one expert, block_m rows a step): the same of dW,
# specialised kernels aside.
HOPPER_DW: tuple[Row, ...] = (
    (32, 64, 256, 4, 4),
    (32, 128, 128, 4, 4),
    (32, 128, 256, 8, 4),
    (32, 128, 128, 4, 6),
    (64, 128, 256, 8, 3),
    (16, 64, 128, 4, 6),
    (64, 128, 128, 4, 3),
    (32, 128, 256, 8, 6),
    (64, 128, 256, 8, 4),
    (32, 256, 128, 8, 6),
    (32, 64, 256, 4, 3),
    (32, 128, 128, 4, 3),
    (16, 64, 256, 4, 6),
)
HOPPER_DW_UNGROUPED: tuple[Row, ...] = (  # group_m 1
    (32, 128, 256, 8, 4),
    (64, 128, 256, 8, 3),
    (64, 128, 256, 8, 4),
    (32, 128, 256, 8, 6),
)
HOPPER_DW_POINTER: tuple[Row, ...] = (
    (32, 128, 128, 4, 3),
    (16, 64, 128, 4, 4),
)
# sm_90, tf32, as they are: with fewer than 64 rows or 4 warps a tile runs on mma.sync. wgmma wants the reduction
# contiguous in both operands of this type in shared memory: dX's w goes through registers, where the fastest tiles are
# two to an SM. Of dW neither is: specialised kernels run it on mma.sync (kernels/gemm/hopper/tf32.py).
HOPPER_TF32: tuple[Row, ...] = ((128, 128, 32, 8, 4),)
HOPPER_TF32_DX: tuple[Row, ...] = (
    (128, 128, 32, 4, 3),
    (64, 128, 32, 4, 4),
    (32, 256, 32, 4, 3),
    (32, 128, 64, 4, 3),
    (64, 64, 32, 2, 4),
)
HOPPER_TF32_DW_SPECIALIZED: tuple[Row, ...] = (
    (32, 128, 256, 8, 3),
    (64, 128, 256, 8, 2),
)
HOPPER_TF32_DW: tuple[Row, ...] = (
    (32, 64, 128, 2, 3),
    (16, 32, 256, 4, 4),
    (32, 64, 64, 2, 4),
)
# Blackwell, TMA, nothing measured: 128 rows for large M, 64-row tiles where experts have few rows.
TMA_PERSISTENT: tuple[Row, ...] = (
    (128, 256, 64, 8, 3),
    (128, 256, 64, 8, 4),
    (128, 128, 64, 8, 4),
    (128, 128, 64, 4, 4),
    (128, 128, 64, 8, 3),
    (128, 128, 128, 8, 3),
    (256, 128, 64, 8, 3),
    (64, 256, 64, 8, 4),
    (64, 256, 64, 4, 3),
    (64, 128, 128, 4, 4),
    (64, 128, 64, 4, 4),
    (64, 64, 128, 4, 4),
    (128, 64, 64, 4, 4),
    (32, 128, 128, 4, 3),
    (16, 128, 256, 8, 3),
    # what fits 99 KiB
    (128, 256, 32, 8, 4),
    (128, 128, 32, 8, 4),
    (64, 256, 32, 4, 4),
    (64, 128, 64, 4, 3),
)
# Small M, TMA or pointers: one tile a program, long reduction steps.
DECODE: tuple[Row, ...] = (
    (16, 64, 256, 4, 3),
    (16, 64, 128, 4, 4),
    (16, 64, 128, 4, 3),
    (16, 128, 128, 4, 3),
    (16, 32, 256, 4, 4),
    (32, 64, 128, 4, 4),
    (32, 128, 128, 4, 3),
    (64, 64, 128, 4, 3),
    (64, 128, 128, 4, 3),
)
# Large M, pointers (cp.async). 128x128x64 with 4 warps spills 120 bytes a thread on sm_80.
POINTER_PERSISTENT: tuple[Row, ...] = (
    (128, 256, 64, 8, 3),
    (128, 256, 32, 8, 4),
    (128, 256, 32, 8, 3),
    (256, 128, 32, 8, 3),
    (128, 128, 64, 8, 3),
    (128, 128, 32, 4, 4),
    (128, 128, 32, 8, 4),
    (64, 256, 32, 4, 4),
    (64, 128, 64, 4, 4),
    (64, 128, 32, 4, 4),
    (128, 64, 64, 4, 3),
    (64, 64, 64, 4, 4),
    (32, 128, 64, 4, 4),
)
POINTER_DECODE: tuple[Row, ...] = (
    *DECODE,
    (16, 64, 64, 4, 4),
    (16, 128, 64, 4, 4),
    (32, 64, 64, 4, 4),
    (32, 128, 64, 4, 3),
    (64, 64, 64, 4, 4),
    (64, 128, 64, 4, 3),
)
# dW elsewhere, nothing measured: short steps waste less on ragged ends.
DW_TMA: tuple[Row, ...] = (
    (64, 128, 256, 8, 3),
    (64, 128, 256, 8, 4),
    (32, 128, 256, 8, 4),
    (32, 128, 256, 8, 6),
    (64, 256, 128, 8, 3),
    (32, 256, 128, 8, 4),
    (64, 128, 128, 8, 4),
    (64, 128, 128, 4, 4),
    (32, 128, 128, 4, 6),
    (32, 128, 128, 8, 6),
    (32, 128, 128, 4, 4),
    (16, 128, 128, 4, 6),
    (16, 128, 256, 8, 6),
    (64, 64, 128, 4, 4),
    (32, 64, 256, 4, 4),
    (32, 64, 128, 4, 6),
    (16, 64, 128, 4, 6),
    (32, 64, 64, 4, 6),
)
DW_POINTER: tuple[Row, ...] = (
    (64, 128, 256, 8, 3),
    (32, 128, 256, 8, 3),
    (32, 128, 256, 8, 4),
    (32, 256, 128, 8, 3),
    (64, 128, 128, 8, 3),
    (64, 128, 128, 4, 3),
    (32, 128, 128, 4, 3),
    (32, 128, 128, 4, 4),
    (32, 128, 128, 8, 4),
    (16, 128, 128, 4, 4),
    (16, 128, 256, 8, 4),
    (64, 64, 128, 4, 3),
    (32, 64, 256, 4, 4),
    (32, 64, 128, 4, 4),
    (16, 64, 128, 4, 4),
    (32, 64, 64, 4, 4),
    (64, 64, 64, 4, 4),
)
# IEEE fp32 has no tensor cores: small tiles, bound by the FMA pipes.
FP32: tuple[Row, ...] = (
    (64, 64, 16, 4, 3),
    (64, 64, 32, 4, 2),
    (64, 32, 32, 4, 3),
    (32, 64, 32, 4, 3),
    (32, 32, 32, 4, 3),
    (16, 64, 32, 4, 3),
    (16, 32, 64, 2, 3),
)
FP32_DW: tuple[Row, ...] = (
    (16, 64, 64, 4, 3),
    (32, 64, 64, 4, 2),
    (32, 64, 32, 4, 3),
    (32, 32, 64, 4, 3),
    (32, 32, 32, 4, 3),
    (16, 32, 32, 2, 3),
)
