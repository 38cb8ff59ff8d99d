"""The search space: which configs are compiled for an op, a dtype and a capability, in one fixed order.

kernels/search/shortlists.py holds the tile sizes. What compiles badly or doesn't fit is found by compiling;
here only what can't fit is left out, by a lower bound of its shared memory.
"""

from __future__ import annotations

from dataclasses import replace

from ...artifacts.records.precision import DType
from ...artifacts.records.problem import Op
from ..contract.config import Config, invalid
from ..hardware.arch import Feature, Generation, arch_of
from . import shortlists as lists
from .shortlists import Row

LIMIT = 48
FP32_LIMIT = 8


def shared_bytes_at_least(op: Op, dtype: DType, config: Config, sm: int) -> int:
    """A lower bound of the shared memory: the operands' buffers.

    Triton keeps one buffer less than the stages, but for asynchronous tensor-core steps (wgmma),
    which still read the last one.
    """
    rows, columns, depth = config.block_m, config.block_n, config.block_k
    if op is Op.DW:
        rows, columns, depth = config.block_n, config.block_k, config.block_m
    wgmma = arch_of(sm).has(Feature.WGMMA) and config.tma and rows >= 64
    buffers = config.num_stages if wgmma else max(1, config.num_stages - 1)
    return buffers * (rows + columns) * depth * dtype.itemsize


def _halved(rows: tuple[Row, ...], op: Op) -> tuple[Row, ...]:
    """The same rows in elements of 4 bytes: the reduction step is half as long, so the bytes are the same."""
    if op is Op.DW:
        return tuple((max(16, m // 2), n, k, warps, stages) for m, n, k, warps, stages in rows)
    return tuple((m, n, max(16, k // 2), warps, stages) for m, n, k, warps, stages in rows)


def _configs(rows: tuple[Row, ...], *, tma: bool, persistent: bool, group_m: int = 8) -> list[Config]:
    return [Config(*row, group_m=group_m, tma=tma, persistent=persistent) for row in rows]


def candidates(op: Op, dtype: DType, sm: int) -> tuple[Config, ...]:
    """The configs to compile, best guesses first, at most ``LIMIT`` (8 for fp32), all valid and without repeats.

    Raises
    ------
    LookupError
        if capability ``sm`` is not supported.
    """
    arch = arch_of(sm)
    shared_limit = arch.limits.shared_per_block_bytes
    tma, hopper = arch.has(Feature.TMA), arch.generation is Generation.HOPPER
    if dtype is DType.FP32:
        rows = lists.FP32_DW if op is Op.DW else lists.FP32
        pool = _configs(rows, tma=False, persistent=True)
    else:
        double = _halved if dtype is DType.TF32 else (lambda rows, op: rows)
        if op is Op.DW and hopper:
            pool = _configs(double(lists.HOPPER_DW, op), tma=True, persistent=True)
            pool += _configs(double(lists.HOPPER_DW_UNGROUPED, op), tma=True, persistent=True, group_m=1)
            pool += _configs(double(lists.HOPPER_DW_POINTER, op), tma=False, persistent=True)
        elif op is Op.DW:
            rows = double(lists.DW_TMA if tma else lists.DW_POINTER, op)
            pool = _configs(rows, tma=tma, persistent=True)
            pool += _configs(rows[:4], tma=tma, persistent=True, group_m=1)
            pool += _configs(double(lists.DW_POINTER[6:7], op), tma=False, persistent=True)
        elif op is Op.DX and hopper:
            pool = _configs(double(lists.HOPPER_DX_PERSISTENT, op), tma=True, persistent=True)
            pool += _configs(double(lists.HOPPER_DX_TILE, op), tma=True, persistent=False)
            pool += _configs(double(lists.HOPPER_DX_POINTER, op), tma=False, persistent=False)
            for group_m in (16, 1):
                pool += _configs(double(lists.HOPPER_DX_PERSISTENT[:1], op), tma=True, persistent=True, group_m=group_m)
        elif hopper:
            pool = _configs(double(lists.HOPPER_PERSISTENT, op), tma=True, persistent=True)
            pool += _configs(double(lists.HOPPER_PERSISTENT[:1], op), tma=True, persistent=True, group_m=32)
            pool += _configs(double(lists.HOPPER_TILE, op), tma=True, persistent=False)
            pool += _configs(double(lists.HOPPER_POINTER, op), tma=False, persistent=False)
            streamed = _configs(double(lists.HOPPER_STREAMED, op), tma=True, persistent=False)
            pool += [replace(config, streamed=True) for config in streamed]
        elif tma:
            pool = _configs(double(lists.TMA_PERSISTENT[:15], op), tma=True, persistent=True)
            pool += _configs(double(lists.DECODE, op), tma=True, persistent=False)
            pool += _configs(double(lists.POINTER_DECODE[:5], op), tma=False, persistent=False)
            pool += _configs(double(lists.TMA_PERSISTENT[:1], op), tma=True, persistent=True, group_m=1)
            pool += _configs(double(lists.TMA_PERSISTENT[15:], op), tma=True, persistent=True)
            pool += _configs(double(lists.POINTER_DECODE[9:], op), tma=True, persistent=False)
        else:
            pool = _configs(double(lists.POINTER_PERSISTENT, op), tma=False, persistent=True)
            pool += _configs(double(lists.POINTER_DECODE, op), tma=False, persistent=False)
            pool += _configs(double(lists.POINTER_PERSISTENT[4:5], op), tma=False, persistent=True, group_m=1)
    if hopper and dtype is DType.TF32:
        rows = {Op.FORWARD: lists.HOPPER_TF32, Op.DX: lists.HOPPER_TF32_DX, Op.DW: lists.HOPPER_TF32_DW}[op]
        pool = _configs(rows, tma=True, persistent=True) + pool
        if op is Op.DW:
            first = _configs(lists.HOPPER_TF32_DW_SPECIALIZED, tma=True, persistent=True)
            pool = [replace(config, specialized=True) for config in first] + pool
    if hopper and dtype in (DType.BF16, DType.FP16):
        rows = lists.HOPPER_DW_SPECIALIZED if op is Op.DW else lists.HOPPER_SPECIALIZED
        first = _configs(rows, tma=True, persistent=True)
        first += _configs(rows[:1], tma=True, persistent=True, group_m=1 if op is Op.DW else 32)
        special = [replace(config, specialized=True) for config in first]
        if op is Op.DW:
            special += [replace(special[-1], streamed=True), replace(special[0], narrow=True)]
        turns = lists.HOPPER_DW_PINGPONG if op is Op.DW else lists.HOPPER_PINGPONG
        special += [Config(*row, tma=True, specialized=True, pingpong=True) for row in turns]
        if op is not Op.DW:
            special += [Config(*row, tma=True, specialized=True) for row in lists.HOPPER_FITTED]
            turns = lists.HOPPER_FITTED_PINGPONG
            special += [Config(*row, tma=True, specialized=True, pingpong=True) for row in turns]
        pool = special + pool
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
    arch_of(sm)
    rows: tuple[Row, ...]
    if dtype is DType.FP32:
        rows = ((32, 32, 32, 4, 2),) if op is Op.DW else ((16, 32, 32, 4, 2), (64, 64, 16, 8, 2))
    elif op is Op.DW:
        rows = ((32, 64, 64, 4, 2),)
    else:
        # 8 warps: each thread's share of the 4096 experts and of the loads one by one must stay in registers.
        rows = ((16, 64, 64, 8, 2), (64, 128, 32, 8, 2))
    return tuple(_configs(rows, tma=False, persistent=True))
