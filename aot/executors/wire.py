"""Encode the answers of another machine's worker as msgpack; decoding checks them, and runs no code."""

from __future__ import annotations

from typing import Any

import msgpack

from ...artifacts.records.target import Gpu
from ..journal.records import MAX_REASON_CHARS, Failure, from_value, to_value
from ..measure.job import MeasureResult, WorkerInfo

_LIMITS = {
    "max_str_len": 4 * MAX_REASON_CHARS,
    "max_array_len": 1 << 16,
    "max_map_len": 64,
    "max_bin_len": 0,
    "max_ext_len": 0,
}


def info_bytes(info: WorkerInfo) -> bytes:
    """Encode a worker's description of its GPU."""
    gpu = info.gpu
    return _packed(["info", info.sm, [gpu.name, gpu.sm_count, gpu.memory_mib, gpu.driver], list(info.notes), info.uuid])


def info_of(data: object) -> WorkerInfo:
    """Decode ``info_bytes``.

    Raises
    ------
    ValueError
        if the bytes are something else.
    """
    sm, gpu, notes, uuid = _fields(data, "info")
    name, *numbers = _list(gpu) or [None]
    if len(numbers) != 3 or not all(type(number) is int and number >= 0 for number in (sm, *numbers)):
        raise ValueError(f"a GPU of {numbers!r}")
    return WorkerInfo(sm, Gpu(_text(name), *numbers), tuple(map(_text, _list(notes))), _text(uuid))


def result_bytes(result: MeasureResult) -> bytes:
    """Encode the result of a job."""
    measured = None if result.measured is None else to_value(result.measured)
    return _packed(["result", measured, [*map(to_value, result.failures)], result.broken, list(result.notes)])


def result_of(data: object) -> MeasureResult:
    """Decode ``result_bytes``.

    Raises
    ------
    ValueError
        if the bytes are something else.
    """
    value, failures, broken, notes = _fields(data, "result")
    try:
        measured = None if value is None else from_value(value)
        failed = tuple(map(from_value, _list(failures)))
    except (KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"a record that is none: {error!r}") from None
    records = tuple(record for record in failed if isinstance(record, Failure))
    if isinstance(measured, Failure) or len(records) != len(failed) or type(broken) is not bool:
        raise ValueError("records that are in each other's place")
    return MeasureResult(measured, records, broken, tuple(map(_text, _list(notes))))


def _packed(value: list[object]) -> bytes:
    data: bytes = msgpack.packb(value)
    return data


def _fields(data: object, kind: str) -> list[Any]:
    if type(data) is not bytes:
        raise ValueError(f"a {type(data).__name__}, wanted bytes")
    try:
        value = msgpack.unpackb(data, **_LIMITS)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise ValueError(f"no msgpack: {error}") from None
    if type(value) is not list or len(value) != 5 or value[0] != kind:
        raise ValueError(f"no {kind}")
    return value[1:]


def _list(value: object) -> list[Any]:
    if type(value) is not list:
        raise ValueError(f"a {type(value).__name__}, wanted an array")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > MAX_REASON_CHARS:
        raise ValueError("a text that is none, or a very long one")
    return value
