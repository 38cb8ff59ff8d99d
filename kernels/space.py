"""The search space: which configs are compiled for an op, a dtype and a capability, in one fixed order.

The lists hold what won on GPUs, and its neighbours. What compiles badly or doesn't fit is found by
compiling; here only what can't fit is left out, by a lower bound of its shared memory.
"""

from __future__ import annotations

from ..artifacts.types import DType, Op
from .chips import limits
from .config import Config, invalid

LIMIT = 32
FP32_LIMIT = 8

_Row = tuple[int, int, int, int, int]  # block_m, block_n, block_k, warps, stages

# sm_90, forward and dX: what was within 2 % of the fastest somewhere on an H200 (bf16 forward, docs/cost-model.md).
_HOPPER_PERSISTENT: tuple[_Row, ...] = (
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
    (64, 256, 64, 8, 4),
    (64, 256, 64, 8, 3),
    (64, 256, 64, 4, 3),
    (32, 64, 256, 4, 3),
    (128, 128, 64, 4, 4),
)
_HOPPER_TILE: tuple[_Row, ...] = (
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
_HOPPER_POINTER: tuple[_Row, ...] = (
    (16, 64, 128, 4, 4),
    (16, 64, 128, 4, 3),
    (16, 128, 128, 4, 3),
    (16, 64, 256, 4, 3),
)
# Blackwell, TMA, nothing measured: 128 rows for large M, 64-row tiles where experts have few rows.
_TMA_PERSISTENT: tuple[_Row, ...] = (
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
_DECODE: tuple[_Row, ...] = (
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
_POINTER_PERSISTENT: tuple[_Row, ...] = (
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
_POINTER_DECODE: tuple[_Row, ...] = (
    *_DECODE,
    (16, 64, 64, 4, 4),
    (16, 128, 64, 4, 4),
    (32, 64, 64, 4, 4),
    (32, 128, 64, 4, 3),
    (64, 64, 64, 4, 4),
    (64, 128, 64, 4, 3),
)
# dW: a tile is block_n x block_k of one expert, block_m rows a step; short steps waste less on ragged ends.
_DW_TMA: tuple[_Row, ...] = (
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
_DW_POINTER: tuple[_Row, ...] = (
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
_FP32: tuple[_Row, ...] = (
    (64, 64, 16, 4, 3),
    (64, 64, 32, 4, 2),
    (64, 32, 32, 4, 3),
    (32, 64, 32, 4, 3),
    (32, 32, 32, 4, 3),
    (16, 64, 32, 4, 3),
    (16, 32, 64, 2, 3),
)
_FP32_DW: tuple[_Row, ...] = (
    (16, 64, 64, 4, 3),
    (32, 64, 64, 4, 2),
    (32, 64, 32, 4, 3),
    (32, 32, 64, 4, 3),
    (32, 32, 32, 4, 3),
    (16, 32, 32, 2, 3),
)


def shared_bytes_at_least(op: Op, dtype: DType, config: Config, sm: int) -> int:
    """A lower bound of the shared memory: the operands' buffers.

    Triton keeps one buffer less than the stages, but for asynchronous tensor-core steps (wgmma),
    which still read the last one.
    """
    rows, columns, depth = config.block_m, config.block_n, config.block_k
    if op is Op.DW:
        rows, columns, depth = config.block_n, config.block_k, config.block_m
    wgmma = sm == 90 and config.tma and rows >= 64
    buffers = config.num_stages if wgmma else max(1, config.num_stages - 1)
    return buffers * (rows + columns) * depth * dtype.itemsize


def _halved(rows: tuple[_Row, ...], op: Op) -> tuple[_Row, ...]:
    """The same rows in elements of 4 bytes: the reduction step is half as long, so the bytes are the same."""
    if op is Op.DW:
        return tuple((max(16, m // 2), n, k, warps, stages) for m, n, k, warps, stages in rows)
    return tuple((m, n, max(16, k // 2), warps, stages) for m, n, k, warps, stages in rows)


def _configs(rows: tuple[_Row, ...], *, tma: bool, persistent: bool, group_m: int = 8) -> list[Config]:
    return [Config(*row, group_m=group_m, tma=tma, persistent=persistent) for row in rows]


def candidates(op: Op, dtype: DType, sm: int) -> tuple[Config, ...]:
    """The configs to compile, best guesses first, at most 32 (8 for fp32), all valid and without repeats.

    Raises
    ------
    LookupError
        if capability ``sm`` is not supported.
    """
    shared_limit = limits(sm).shared_per_block_bytes
    tma = sm >= 90
    if dtype is DType.FP32:
        rows = _FP32_DW if op is Op.DW else _FP32
        pool = _configs(rows, tma=False, persistent=True)
    else:
        double = _halved if dtype is DType.TF32 else (lambda rows, op: rows)
        if op is Op.DW:
            rows = double(_DW_TMA if tma else _DW_POINTER, op)
            pool = _configs(rows, tma=tma, persistent=True)
            pool += _configs(rows[:4], tma=tma, persistent=True, group_m=1)
            pool += _configs(double(_DW_POINTER[6:7], op), tma=False, persistent=True)
        elif sm == 90:
            pool = _configs(double(_HOPPER_PERSISTENT, op), tma=True, persistent=True)
            pool += _configs(double(_HOPPER_PERSISTENT[:1], op), tma=True, persistent=True, group_m=32)
            pool += _configs(double(_HOPPER_TILE, op), tma=True, persistent=False)
            pool += _configs(double(_HOPPER_POINTER, op), tma=False, persistent=False)
        elif tma:
            pool = _configs(double(_TMA_PERSISTENT[:15], op), tma=True, persistent=True)
            pool += _configs(double(_DECODE, op), tma=True, persistent=False)
            pool += _configs(double(_POINTER_DECODE[:5], op), tma=False, persistent=False)
            pool += _configs(double(_TMA_PERSISTENT[:1], op), tma=True, persistent=True, group_m=1)
            pool += _configs(double(_TMA_PERSISTENT[15:], op), tma=True, persistent=True)
            pool += _configs(double(_POINTER_DECODE[9:], op), tma=True, persistent=False)
        else:
            pool = _configs(double(_POINTER_PERSISTENT, op), tma=False, persistent=True)
            pool += _configs(double(_POINTER_DECODE, op), tma=False, persistent=False)
            pool += _configs(double(_POINTER_PERSISTENT[4:5], op), tma=False, persistent=True, group_m=1)
    valid = [config for config in dict.fromkeys(pool) if not invalid(config)]
    fitting = [config for config in valid if shared_bytes_at_least(op, dtype, config, sm) <= shared_limit]
    return tuple(fitting[: FP32_LIMIT if dtype is DType.FP32 else LIMIT])


def fallbacks(op: Op, dtype: DType, sm: int) -> tuple[Config, ...]:
    """The pointer configs that are also compiled for alignment 1, so that any N and K run: small M, large M.

    They fit every capability.

    Raises
    ------
    LookupError
        if capability ``sm`` is not supported.
    """
    limits(sm)
    rows: tuple[_Row, ...]
    if dtype is DType.FP32:
        rows = ((32, 32, 32, 4, 2),) if op is Op.DW else ((16, 32, 32, 4, 2), (64, 64, 16, 8, 2))
    elif op is Op.DW:
        rows = ((32, 64, 64, 4, 2),)
    else:
        # 8 warps: each thread's share of the 4096 experts and of the loads one by one must stay in registers.
        rows = ((16, 64, 64, 8, 2), (64, 128, 32, 8, 2))
    return tuple(_configs(rows, tma=False, persistent=True))
