"""A launch, and a call that comes again, down to the driver: where blocks are taken, and where it refuses."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from pretuned.artifacts.errors import CudaError
from pretuned.runtime.driver import cuda
from pretuned.runtime.driver.block import BlockLayout
from pretuned.runtime.driver.launcher import Blocks, Start, starter

LIBC = ctypes.CDLL(None)
WORDS = (("x", "ptr"), ("y", "ptr"), ("m_sizes", "ptr"), ("counter", "ptr"), ("M", "i32"))
SIZES = (8, 8, 8, 8, 4, 8, 8)  # bytes of each, and of the two that every kernel takes
STREAM = 77

Told = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def told(stub: ctypes.CDLL, capfd: pytest.CaptureFixture[str]) -> Told:
    """The launches that the driver was given since."""
    stub.stub_parameters(len(SIZES), (ctypes.c_int * len(SIZES))(*SIZES))

    def launches() -> list[dict[str, Any]]:
        LIBC.fflush(None)
        lines = map(json.loads, capfd.readouterr().out.splitlines())
        return [one for one in lines if one["call"] == "launch"]

    return launches


@pytest.fixture
def function(stub: ctypes.CDLL) -> cuda.Function:
    return cuda.load(b"\x7fELF", "k", threads=64, shared_bytes=0, device=0)


def layout() -> BlockLayout:
    return BlockLayout(
        WORDS,
        given=(("x", "ptr"), ("M", "i32")),
        late=(("y", "ptr"), ("m_sizes", "ptr"), ("counter", "ptr")),
        threads=64,
        shared_bytes=0,
    )


def values(launch: dict[str, Any]) -> list[int]:
    return [int.from_bytes(bytes.fromhex(one), "little") for one in launch["parameters"]]


def test_a_launch_has_what_the_call_and_the_launch_give(told: Told, function: cuda.Function) -> None:
    kind = layout()
    start, _ = starter(Blocks(function, "k", kind), lambda stream: 1000 + stream)
    start(kind.pack(5, 9, 3, kind.tail), 6, 7, STREAM)
    (launch,) = told()
    assert (launch["grid"], launch["block"], launch["stream"]) == ([3, 1, 1], [64, 1, 1], STREAM)
    assert values(launch) == [5, 6, 7, 1000 + STREAM, 9, 0, 0]


def test_a_launch_inside_a_launch_has_a_block_of_its_own(told: Told, function: cuda.Function) -> None:
    """As a signal handler's would: what the outer one packed is not overwritten."""
    kind = layout()
    once: Iterator[None] = iter([None])

    def counter_of(stream: int) -> int:
        for _ in once:
            start(kind.pack(50, 90, 1, kind.tail), 60, 70, STREAM)
        return 1

    start, _ = starter(Blocks(function, "k", kind), counter_of)
    start(kind.pack(5, 9, 1, kind.tail), 6, 7, STREAM)
    assert [values(one)[:3] for one in told()] == [[50, 60, 70], [5, 6, 7]]
    whole = Blocks(function, "k", kind).whole()
    whole((5, 9, 2, kind.tail, STREAM, 6, 7, 1))
    assert [values(one)[:3] for one in told()] == [[5, 6, 7]]


@pytest.mark.parametrize("way", ["start", "whole", "again", "counted", "into"])
def test_a_thread_without_a_context_gets_one_and_what_the_driver_refuses_is_told(
    way: str, told: Told, function: cuda.Function, stub: ctypes.CDLL
) -> None:
    call = calls(function)[way]
    stub.stub_without_context()
    assert call() is not None
    assert len(told()) == 1
    stub.stub_fail(b"cuLaunchKernelEx", 719)
    with pytest.raises(CudaError, match=r"^cuLaunchKernelEx\(k\): CUDA error 719"):
        call()
    assert call() is not None  # the block that the failed launch had is not missed
    assert len(told()) == 1


def calls(function: cuda.Function, same: bool = True, still: Callable[[], bool] | None = None) -> dict[str, Any]:
    """Each way to launch, as a function without arguments."""
    kind = layout()
    packed = kind.pack(5, 9, 1, kind.tail)
    start, plain = starter(Blocks(function, "k", kind))
    _, counting = starter(Blocks(function, "k", kind), lambda stream: 1000)
    whole = Blocks(function, "k", kind).whole()
    x = w = torch.zeros(2)
    m_sizes, out = torch.zeros(3, dtype=torch.int32), torch.zeros(4)

    def made(repeater: Any, shape: Any) -> Any:
        return repeater(packed, lambda *_: same, still, empty, shape, lambda device: STREAM + device)

    shape = (4,), (1,), torch.float32
    again, counted, into = made(plain, shape), made(counting, shape), made(plain, None)
    return {
        "start": lambda: [start(packed, 6, 7, STREAM)],
        "whole": lambda: [whole((5, 9, 1, kind.tail, STREAM, 6, 7, 0))],
        "again": lambda: again(x, w, m_sizes),
        "counted": lambda: counted(x, w, m_sizes),
        "into": lambda: into(x, w, m_sizes, out),
    }


def empty(size: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, strides, dtype=dtype)


@pytest.mark.parametrize(("way", "counter"), [("again", 0), ("counted", 1000), ("into", 0)])
def test_a_call_that_comes_again(way: str, counter: int, told: Told, function: cuda.Function) -> None:
    result = calls(function)[way]()
    (launch,) = told()
    assert launch["stream"] == STREAM
    got = values(launch)
    assert (got[0], got[1], got[3], got[4]) == (5, result.data_ptr(), counter, 9)
    assert calls(function, still=lambda: True)[way]() is not None
    assert len(told()) == 1


@pytest.mark.parametrize("way", ["again", "counted", "into"])
def test_a_call_that_is_another_launches_nothing(way: str, told: Told, function: cuda.Function) -> None:
    assert calls(function, same=False)[way]() is None
    assert calls(function, still=lambda: False)[way]() is None
    assert told() == []


def test_a_repeated_call_inside_another_has_a_block_of_its_own(told: Told, function: cuda.Function) -> None:
    kind = layout()
    start: Start
    start, repeater = starter(Blocks(function, "k", kind))
    once: Iterator[None] = iter([None])

    def stream_of(device: int) -> int:
        for _ in once:
            start(kind.pack(50, 90, 1, kind.tail), 60, 70, STREAM)
        return STREAM

    shape = (4,), (1,), torch.float32
    again = repeater(kind.pack(5, 9, 1, kind.tail), lambda *_: True, None, empty, shape, stream_of)
    y = again(torch.zeros(1), torch.zeros(1), torch.zeros(1))
    assert [values(one)[:2] for one in told()] == [[50, 60], [5, y.data_ptr()]]
