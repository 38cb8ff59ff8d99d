"""Descriptors: encoded by the driver, kept, and no more of them than are of use."""

from __future__ import annotations

import ctypes

import pytest
from emulated_driver import EmulatedGpu, emulated

from pretuned.artifacts.errors import CudaError
from pretuned.artifacts.records import TensorMap
from pretuned.runtime.driver.launcher import MAP_BYTES, TensorMaps, repeats_rows

PLAN = TensorMap("x", 9, (16, 64), 3)


def test_a_thread_without_a_context_gets_one(stub: ctypes.CDLL) -> None:
    maps = TensorMaps(PLAN, 0)
    stub.stub_fail(b"cuTensorMapEncodeTiled", 201)
    words = maps.encode((4096, 8, 64), (8, 64), (64,))
    assert len(words) == MAP_BYTES
    assert words == TensorMaps(PLAN, 0).encode((4096, 8, 64), (8, 64), (64,))
    assert maps.cached == {(4096, 8, 64): words}


def test_what_the_driver_refuses_is_reported(stub: ctypes.CDLL) -> None:
    stub.stub_fail(b"cuTensorMapEncodeTiled", 1)
    maps = TensorMaps(PLAN, 0)
    with pytest.raises(CudaError, match=r"cuTensorMapEncodeTiled\(x, sizes \(8, 64\), strides \(64,\)\): CUDA error 1"):
        maps.encode((4096, 8, 64), (8, 64), (64,))
    assert maps.cached == {}


def test_of_very_many_tensors_the_last_are_kept(stub: ctypes.CDLL) -> None:
    maps = TensorMaps(PLAN, 0)
    for at in range(257):
        maps.encode((16 * at, 8, 64), (8, 64), (64,))
        assert len(maps.cached) <= 256
    assert list(maps.cached) == [(16 * 256, 8, 64)]


class Elsewhere(TensorMaps):
    """The descriptors of a driver that puts the address into the second word, too."""

    def _encoded(self, address: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
        encoded = super()._encoded(address, sizes, strides)
        return (
            encoded[:8]
            + bytes(byte ^ other for byte, other in zip(encoded[8:16], encoded[:8], strict=True))
            + encoded[16:]
        )


def test_only_the_address_differs_where_the_driver_says_so(stub: ctypes.CDLL) -> None:
    key, sizes, strides = (4096, 8, 64), (8, 64), (64,)
    for kind, same in ((TensorMaps, True), (Elsewhere, False)):
        maps = kind(PLAN, 0)
        first, rest, any_address = maps.split(key, sizes, strides)
        assert (first.to_bytes(8, "little") + rest, any_address) == (maps.cached[key], same)
        assert list(maps.cached) == [key]


@pytest.mark.parametrize("refused", [False, True])
def test_whether_rows_may_repeat_is_asked_once(stub: ctypes.CDLL, refused: bool) -> None:
    repeats_rows.cache_clear()
    if refused:
        stub.stub_fail(b"cuTensorMapEncodeTiled", 1)
    assert [repeats_rows(0) for _ in range(2)] == [not refused] * 2
    repeats_rows.cache_clear()


class FarProbes(EmulatedGpu):
    """A driver that sets every bit of a descriptor's second word."""

    def cuTensorMapEncodeTiled(self, map: int, *rest: int) -> int:
        code = super().cuTensorMapEncodeTiled(map, *rest)
        ctypes.memset(map + 8, 255, 8)
        return code


@pytest.mark.parametrize(
    ("sm", "rows", "stride", "cleared"),
    [
        (100, 8, 64, True),
        (120, 1023, 64, True),  # 128 bytes less than 128 KiB
        (100, 1024, 64, False),
        (100, 8, 1 << 14, False),  # strided rows: they reach over more than 128 KiB
        (90, 8, 64, False),
    ],
)
def test_descriptors_of_little_memory_on_blackwell(sm: int, rows: int, stride: int, cleared: bool) -> None:
    with emulated(FarProbes(sm=sm)):
        encoded = TensorMaps(PLAN, 0).encode((4096, rows, stride), (rows, 64), (stride,))
    word = int.from_bytes(encoded[8:16], "little")
    assert word == (1 << 64) - 1 - (cleared << 21)
