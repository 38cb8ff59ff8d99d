"""The GPUs of the process: what each is told to be, by the driver or by torch, and what torch has current."""

from __future__ import annotations

import contextlib
import ctypes
import logging
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from pretuned.artifacts.errors import CudaError, HostError
from pretuned.artifacts.records import Gpu, LocalGpu
from pretuned.runtime.driver import device
from pretuned.runtime.driver.device import Device


@pytest.fixture(autouse=True)
def no_device_is_known() -> Iterator[None]:
    device.devices.clear()
    yield
    device.devices.clear()


def test_a_gpu_is_asked_once(stub: ctypes.CDLL) -> None:
    gpu = device.local_gpu(0)
    assert gpu == LocalGpu(90, Gpu("Stub 0", 132, 141 << 10, 13010))
    assert device.device(0).gpu is gpu
    assert device.device(0) is device.device(0)
    with pytest.raises(CudaError, match=r"cuDeviceGet\(1\)"):
        device.local_gpu(1)


@pytest.mark.parametrize(("hip", "sm"), [(None, 87), ("6.2", 0)])
def test_where_bundles_can_not_be_launched_torch_is_asked(
    hip: str | None, sm: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = SimpleNamespace(
        name="Some GPU", major=8, minor=7, multi_processor_count=16, total_memory=(1 << 30) + 1
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr("sys.platform", "linux" if hip else "win32")
    assert Device(3).gpu == LocalGpu(sm, Gpu("Some GPU", 16, 1024, 0))
    assert device.platform_name().endswith(" with ROCm") is (hip is not None)


def test_that_bundles_can_not_be_launched_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sys.platform", "win32")
    monkeypatch.setattr("platform.machine", lambda: "ARM64")
    assert not device.platform_supported()
    device.tell_unsupported.cache_clear()
    with caplog.at_level(logging.WARNING):
        device.tell_unsupported()
        device.tell_unsupported()
    device.tell_unsupported.cache_clear()
    (record,) = caplog.records
    assert "this is win32 ARM64: grouped GEMM runs on torch" in record.getMessage()


@pytest.mark.parametrize(
    ("system", "machine", "hip", "runs"),
    [
        ("linux", "x86_64", None, True),
        ("linux", "aarch64", None, True),
        ("linux", "AMD64", None, True),
        ("linux", "x86_64", "6.2", False),
        ("linux", "ppc64le", None, False),
        ("darwin", "x86_64", None, False),
    ],
)
def test_where_bundles_run(
    system: str, machine: str, hip: str | None, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.platform", system)
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(torch.version, "hip", hip)
    assert device.platform_supported() is runs


def test_the_current_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(HostError, match=r"no CUDA GPU here .* python -m pretuned.runtime says more"):
        device.current_device()
    assert not device.capturing()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 5)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert device.current_device() == 5
    assert device.capturing()


@pytest.mark.parametrize(("count", "only"), [(0, True), (1, True), (2, False)])
def test_whether_there_is_a_second_gpu(count: int, only: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert device.only_device() is only


def test_what_is_current_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)
    assert [device.device_is_current(0), device.device_is_current(1)] == [False, True]
    assert isinstance(device.on(1), contextlib.nullcontext)
    assert isinstance(device.on(-1), contextlib.nullcontext)
    assert isinstance(device.on(0), torch.cuda.device)


def test_what_allocates() -> None:
    assert device.allocator(torch.device("cuda", 0)) is device.empty
    tensor = device.allocator(torch.device("cpu"))((2, 3), (4, 1), torch.bfloat16)
    assert (tensor.shape, tensor.stride(), tensor.dtype, tensor.device.type) == ((2, 3), (4, 1), torch.bfloat16, "cpu")


def test_what_autocast_would_change_is_left_as_it_is() -> None:
    x = torch.zeros(2, 2)
    assert isinstance(device.without_autocast("cpu"), contextlib.nullcontext)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (x @ x).dtype is torch.bfloat16
        with device.without_autocast("cpu"):
            assert (x @ x).dtype is torch.float32


def test_a_torch_that_lacks_the_short_ways_is_asked_by_its_public_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=70 + device))
    assert device._stream_of(1) == 71
    asked = []
    monkeypatch.setattr(torch, "empty_strided", lambda *args, **named: asked.append((args, named)))
    device._empty_on_current((2,), (1,), torch.float32)
    assert asked == [(((2,), (1,)), {"dtype": torch.float32, "device": "cuda"})]
