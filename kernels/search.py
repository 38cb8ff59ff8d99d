"""The search space: which configs are compiled for an op, a dtype and a capability, in one fixed order.

Each kernel's entry lists its configs. What compiles badly or doesn't fit is found by compiling. Left out is what no
kernel has code for, and what can't fit by a lower bound of its shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..artifacts.records.precision import DType
from ..artifacts.records.problem import Layout, Op
from .contract.config import Config, Loads
from .contract.entry import KernelEntry, Pool
from .contract.spec import Spec
from .hardware.arch import Feature, arch_of
from .registry import KERNELS, refusal

LIMIT = 48
FP32_LIMIT = 8


def shared_bytes_at_least(op: Op, dtype: DType, config: Config, sm: int) -> int:
    """A lower bound of the shared memory: the operands' buffers.

    Triton keeps one buffer less than the stages, but for asynchronous tensor-core steps (wgmma),
    which still read the last one.
    """
    rows, columns, depth = config.block_m, config.block_n, config.block_k
    if dtype.quantised:  # every stage is being read or loaded
        x, w = dtype.precision.x.bits, dtype.precision.w.bits
        return config.num_stages * depth * (rows * x + columns * w) // 8
    if op is Op.DW:
        rows, columns, depth = config.block_n, config.block_k, config.block_m
    wgmma = arch_of(sm).has(Feature.WGMMA) and config.loads is Loads.TMA and rows >= 64
    buffers = config.num_stages if wgmma else max(1, config.num_stages - 1)
    return buffers * (rows + columns) * depth * dtype.itemsize


def candidates(op: Op, dtype: DType, sm: int) -> tuple[Config, ...]:
    """The configs to compile, best guesses first, at most ``LIMIT`` (8 for fp32), all valid and without repeats.

    Raises
    ------
    LookupError
        if capability ``sm`` is not supported.
    """
    shared_limit = arch_of(sm).limits.shared_per_block_bytes
    valid = [
        one
        for one in dict.fromkeys(_pool(op, dtype, sm, lambda entry: entry.candidates))
        if _compiles(op, dtype, one, sm)
    ]
    fitting = [config for config in valid if shared_bytes_at_least(op, dtype, config, sm) <= shared_limit]
    return tuple(fitting[: FP32_LIMIT if dtype is DType.FP32 else LIMIT])


def _compiles(op: Op, dtype: DType, config: Config, sm: int) -> bool:
    """Whether there is code of some layout of w."""
    return any(refusal(Spec(op, dtype, config, layout), sm) is None for layout in (Layout.NK, Layout.STORED))


def fallbacks(op: Op, dtype: DType, sm: int) -> tuple[Config, ...]:
    """The pointer configs that are also compiled for alignment 1, so that any N and K run: small M, large M.

    They fit every capability.

    Raises
    ------
    LookupError
        if capability ``sm`` is not supported.
    """
    return tuple(_pool(op, dtype, sm, lambda entry: entry.fallbacks))


def _pool(op: Op, dtype: DType, sm: int, which: Callable[[KernelEntry], Pool]) -> Iterator[Config]:
    """The configs that the kernels of an op and dtype list for a capability."""
    arch = arch_of(sm)
    for entry in KERNELS:
        if op in entry.ops and dtype in entry.dtypes and entry.needs <= arch.features:
            yield from which(entry)(op, dtype, arch)
