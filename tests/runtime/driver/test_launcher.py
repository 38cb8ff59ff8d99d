"""A launch down to the driver: where blocks are taken, and where it refuses."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from typing import Any

import pytest

from pretuned.artifacts.errors import CudaError
from pretuned.runtime.driver import cuda
from pretuned.runtime.driver.launcher import BlockLayout, Blocks

LIBC = ctypes.CDLL(None)
WORDS = (("x", "ptr"), ("y", "ptr"), ("m_sizes", "ptr"), ("counter", "ptr"), ("M", "i32"))
SIZES = (8, 8, 8, 8, 4, 8, 8)  # bytes of each, and of the two that every kernel takes
STREAM = 77

Told = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def driver_log(stub: ctypes.CDLL, capfd: pytest.CaptureFixture[str]) -> Told:
    """The launches that the driver was given since."""
    stub.stub_parameters(len(SIZES), (ctypes.c_int * len(SIZES))(*SIZES))

    def launches() -> list[dict[str, Any]]:
        LIBC.fflush(None)
        lines = map(json.loads, capfd.readouterr().out.splitlines())
        return [line for line in lines if line["call"] == "launch"]

    return launches


@pytest.fixture
def function(stub: ctypes.CDLL) -> cuda.Function:
    return cuda.load(b"\x7fELF", "k", threads=64, shared_bytes=0, device=0)


def layout() -> BlockLayout:
    return BlockLayout(
        WORDS,
        early=(("x", "ptr"), ("M", "i32")),
        late=(("y", "ptr"), ("m_sizes", "ptr"), ("counter", "ptr")),
        threads=64,
        shared_bytes=0,
    )


def values(launch: dict[str, Any]) -> list[int]:
    return [int.from_bytes(bytes.fromhex(parameter), "little") for parameter in launch["parameters"]]


def test_a_launch_has_what_the_call_gives(driver_log: Told, function: cuda.Function) -> None:
    kind = layout()
    Blocks(function, "k", kind).whole()((5, 9, 3, kind.tail, STREAM, 6, 7, 1))
    (launch,) = driver_log()
    assert (launch["grid"], launch["block"], launch["stream"]) == ([3, 1, 1], [64, 1, 1], STREAM)
    assert values(launch) == [5, 6, 7, 1, 9, 0, 0]


def test_a_thread_without_a_context_gets_one_and_what_the_driver_refuses_is_reported(
    driver_log: Told, function: cuda.Function, stub: ctypes.CDLL
) -> None:
    kind = layout()
    launch, values = Blocks(function, "k", kind).whole(), (5, 9, 1, kind.tail, STREAM, 6, 7, 0)
    stub.stub_without_context()
    launch(values)
    assert len(driver_log()) == 1
    stub.stub_fail(b"cuLaunchKernelEx", 719)
    with pytest.raises(CudaError, match=r"^cuLaunchKernelEx\(k\): CUDA error 719"):
        launch(values)
    launch(values)  # the block that the failed launch had is not missed
    assert len(driver_log()) == 1
