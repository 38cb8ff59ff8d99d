"""The search space: the configs to compile for an op, a dtype and a capability, best guesses first.

``candidates(Op.FORWARD, DType.BF16, 90)`` collects the configs that the kernels' entries list for sm_90. It leaves out
those that no kernel supports, and those whose operands can't fit into shared memory. The builder compiles the others
and drops those that spill registers or don't fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..artifacts.records import DType, Layout, Op
from .arch import Feature, arch_of
from .entry import KernelEntry, Pool
from .hopper_w8a8_block import WEIGHT_CONFIGS
from .registry import KERNELS, refusal
from .rowops import RowOpSpec, training_specs
from .spec import Config, Loads, Spec

LIMIT = 48
FP32_LIMIT = 8


def shared_bytes_at_least(op: Op, dtype: DType, config: Config, sm: int) -> int:
    """Return a lower bound of a program's shared memory in bytes: the operands' buffers.

    Triton allocates a buffer for each stage but one. With asynchronous tensor-core steps (wgmma), which still read the
    last stage, it is a buffer for each stage.
    """
    rows, columns, depth = config.block_m, config.block_n, config.block_k
    if dtype.quantised:  # each stage is being read or loaded
        x, w = dtype.precision.x.bits, dtype.precision.w.bits
        return config.num_stages * depth * (rows * x + columns * w) // 8
    if op is Op.DW:
        rows, columns, depth = config.block_n, config.block_k, config.block_m
    wgmma = arch_of(sm).has(Feature.WGMMA) and config.loads is Loads.TMA and rows >= 64
    buffers = config.num_stages if wgmma else max(1, config.num_stages - 1)
    return buffers * (rows + columns) * depth * dtype.itemsize


def candidates(op: Op, dtype: DType, sm: int) -> tuple[Config, ...]:
    """Return the configs to compile, best guesses first: valid, distinct, at most ``LIMIT`` (8 for fp32).

    Raises
    ------
    LookupError
        if capability ``sm`` is not supported.
    """
    shared_limit = arch_of(sm).limits.shared_per_block_bytes
    pool = dict.fromkeys(_pool(op, dtype, sm, lambda entry: entry.candidates))
    valid = [config for config in pool if _compiles(op, dtype, config, sm)]
    fitting = [config for config in valid if shared_bytes_at_least(op, dtype, config, sm) <= shared_limit]
    return tuple(fitting[: FP32_LIMIT if dtype is DType.FP32 else LIMIT])


def _compiles(op: Op, dtype: DType, config: Config, sm: int) -> bool:
    """Return whether a kernel supports the config with some layout of w."""
    return any(refusal(Spec(op, dtype, config, layout), sm) is None for layout in (Layout.NK, Layout.STORED))


def fallbacks(op: Op, dtype: DType, sm: int) -> tuple[Config, ...]:
    """Return the configs that are also compiled for alignment 1, so that any N and K run: for small M, for large M.

    They load through pointers and fit all capabilities.

    Raises
    ------
    LookupError
        if capability ``sm`` is not supported.
    """
    return tuple(_pool(op, dtype, sm, lambda entry: entry.fallbacks))


def of_training(sm: int) -> tuple[tuple[Spec, ...], tuple[RowOpSpec, ...]]:
    """Return the GEMMs and the row kernels of fp8 training for a capability: none if it has no code for dW of codes.

    Raises
    ------
    LookupError
        if capability ``sm`` is not supported.
    """
    forms = [Spec(Op.DW, DType.FP8_BLOCK, config) for config in WEIGHT_CONFIGS]
    able = tuple(spec for spec in forms if refusal(spec, arch_of(sm).sm) is None)
    return able, training_specs() if able else ()


def _pool(op: Op, dtype: DType, sm: int, which: Callable[[KernelEntry], Pool]) -> Iterator[Config]:
    """Yield the configs that the kernels of an op and dtype list for a capability."""
    arch = arch_of(sm)
    for entry in KERNELS:
        if op in entry.ops and dtype in entry.dtypes and entry.needs <= arch.features:
            yield from which(entry)(op, dtype, arch)
