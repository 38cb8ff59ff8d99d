"""The cache of a layer's configs: its key, and the bytes of its files."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import msgpack

from ...artifacts.format import MAX_FUSION
from ...artifacts.records import PLAIN_DTYPES, DType, Fusion, Op
from ...kernels.spec import Config
from ...runtime.dispatch.pin import KernelPair, Preference

_MAX_ITEMS = 64  # in an array of a file: far more than the fields of a config

Configs = tuple[KernelPair, KernelPair, KernelPair]  # forward, dX, dW


@dataclass(frozen=True, slots=True)
class CacheKey:
    """Everything that the configs of a layer depend on: GPU, kernels and their revisions, shape, rows.

    ``bucket`` is the bucket of seq_len * top_k rows; ``dtype`` is x and w's dtype, or the format of quantised weights.
    """

    gpu: str
    sm: int
    sm_count: int
    memory_gib: int
    kernels: tuple[tuple[str, int], ...]
    ops: tuple[str, ...]
    E: int
    H: int
    I: int  # noqa: E741, the field's letter
    top_k: int
    dtype: str
    bucket: int

    @property
    def file_name(self) -> str:
        """The name of the key's file."""
        return hashlib.sha256(repr(self).encode()).hexdigest() + ".config"


def encode(key: CacheKey, configs: Configs) -> bytes:
    """The content of a key's file."""
    data: bytes = msgpack.packb((repr(key), *(_value(pair) for pair in configs)))
    return data


def decode(key: CacheKey, payload: bytes) -> Configs | None:
    """The configs in a file; None if its key differs, or a version with other configs wrote it."""
    try:
        named, *pairs = msgpack.unpackb(payload, use_list=False, max_array_len=_MAX_ITEMS, max_map_len=0, max_ext_len=0)
        configs = tuple(_pair(value) for value in pairs)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError, msgpack.UnpackException):
        return None
    if named != repr(key) or tuple(pair.op for pair in configs) != tuple(Op):
        return None
    return configs[0], configs[1], configs[2]


def _value(pair: KernelPair) -> object:
    gemms = [[(fusion.value, config.pairs()) for fusion, config in gemm.configs] for gemm in (pair.first, pair.second)]
    return (pair.op.value, *gemms)


def _pair(value: tuple[str, object, object]) -> KernelPair:
    op, first, second = value
    return KernelPair(Op(op), _preferred(first), _preferred(second))


# Fusion(2**63) is an error in some versions of Python, and Fusion.NONE in others.
_FUSIONS = {bits: Fusion(bits) for bits in range(MAX_FUSION + 1)}


def _preferred(value: object) -> Preference:
    if not isinstance(value, tuple):
        raise TypeError(f"{value!r} is no list of configs")
    return Preference(tuple((_FUSIONS[fusion], Config.from_pairs(pairs)) for fusion, pairs in value))


def dtype_of(dtype: object) -> DType:
    """Parse ``torch.bfloat16``, ``bf16`` or ``DType.BF16``; ValueError if kernels have no x of that type."""
    text = dtype.value if isinstance(dtype, DType) else str(dtype).removeprefix("torch.")
    by_name = {
        "bfloat16": DType.BF16,
        "float16": DType.FP16,
        "half": DType.FP16,
        "float32": DType.FP32,
        "float": DType.FP32,
    }
    result = by_name[text] if text in by_name else DType(text)
    if result not in PLAIN_DTYPES:
        raise ValueError(f"{result.value} is a format of weights")
    return result
