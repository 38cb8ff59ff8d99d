"""The configs of layers, kept under a key of everything that they hold for: in memory, and a small file each."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path

import msgpack

from ...artifacts.files.blob import read_checked, write_checked
from ...artifacts.files.lock import check_cache
from ...artifacts.files.publish import make_folder
from ...artifacts.format.schema import FUSIONS
from ...artifacts.records.precision import PLAIN_DTYPES, DType
from ...artifacts.records.problem import Op
from ...kernels.contract.config import Config
from ...runtime.dispatch.pin import KernelPair, Preference

MAX_FILES = 1024
_MAX_ITEMS = 64  # of an array in a file: far more than a config has fields
_SUFFIX = ".config"

_log = logging.getLogger(__name__)

Configs = tuple[KernelPair, KernelPair, KernelPair]  # forward, dX, dW


@dataclass(frozen=True, slots=True)
class CacheKey:
    """What the configs of a layer hold for: the GPU, the kernels and their revisions, the shape, the rows.

    ``bucket`` is that of seq_len * top_k rows, ``dtype`` that of x and w or the format of quantised weights.
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
        """The name of its file."""
        return hashlib.sha256(repr(self).encode()).hexdigest() + _SUFFIX


def load(directory: Path | None, key: CacheKey) -> Configs | None:
    """What the file says; None where it is missing, damaged, or of a version that knows other configs."""
    payload = None if directory is None else read_checked(directory / key.file_name)
    if payload is None:
        return None
    try:
        named, *pairs = msgpack.unpackb(payload, use_list=False, max_array_len=_MAX_ITEMS, max_map_len=0, max_ext_len=0)
        found = tuple(_pair(value) for value in pairs)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError, msgpack.UnpackException):
        return None
    if named != repr(key) or tuple(pair.op for pair in found) != tuple(Op):
        return None
    return found[0], found[1], found[2]


def save(directory: Path | None, key: CacheKey, configs: Configs) -> None:
    """Keep them. A directory that can't be written costs the entry: it is said once, at level INFO."""
    if directory is None:
        return
    payload = msgpack.packb((repr(key), *(_value(pair) for pair in configs)))
    try:
        check_cache(directory)
        make_folder(directory)
        write_checked(directory / key.file_name, payload)
        _bound(directory)
    except OSError as error:
        _log.info("pretuned: the configs are not kept: %s", error)


def clear(directory: Path | None) -> None:
    """Remove every file; what can't be removed stays."""
    for path in _files(directory):
        with contextlib.suppress(OSError):
            path.unlink()


def _bound(directory: Path) -> None:
    files = _files(directory)
    if len(files) > MAX_FILES:
        dated = []
        for path in files:
            with contextlib.suppress(OSError):  # another process removed it
                dated.append((path.stat().st_mtime_ns, path))
        for _, path in sorted(dated)[: len(files) - MAX_FILES]:
            path.unlink(missing_ok=True)


def _files(directory: Path | None) -> list[Path]:
    return [] if directory is None else sorted(directory.glob(f"*{_SUFFIX}"))


def _value(pair: KernelPair) -> object:
    gemms = [[(fusion.value, config.pairs()) for fusion, config in one.configs] for one in (pair.first, pair.second)]
    return (pair.op.value, *gemms)


def _pair(value: tuple[str, object, object]) -> KernelPair:
    op, first, second = value
    return KernelPair(Op(op), _preferred(first), _preferred(second))


# (Fusion(2**63) is an error in some versions of Python, and Fusion.NONE in others.)
_FUSIONS = {one.value: one for one in FUSIONS}


def _preferred(value: object) -> Preference:
    if not isinstance(value, tuple):
        raise TypeError(f"{value!r} is no list of configs")
    return Preference(tuple((_FUSIONS[fusion], Config.from_pairs(pairs)) for fusion, pairs in value))


def dtype_of(dtype: object) -> DType:
    """``torch.bfloat16``, ``bf16`` or ``DType.BF16``; ValueError for what is no element type of x that kernels have."""
    text = dtype.value if isinstance(dtype, DType) else str(dtype).removeprefix("torch.")
    known = {"bfloat16": DType.BF16, "float16": DType.FP16, "half": DType.FP16, "float32": DType.FP32,
             "float": DType.FP32}  # fmt: skip
    found = known[text] if text in known else DType(text)
    if found not in PLAIN_DTYPES:
        raise ValueError(f"{found.value} is a format of weights")
    return found
