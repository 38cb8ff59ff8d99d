"""The GPUs of this process, the kernels that are loaded on each, and torch's current device, stream and context."""

from __future__ import annotations

import contextlib
import functools
import logging
import platform
import sys
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from ...artifacts.errors import HostError

if TYPE_CHECKING:
    from ...artifacts.records import LocalGpu
    from .counters import Counters

# (size, strides, dtype) -> a new tensor
Allocator: TypeAlias = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]

_C: Any = torch._C
_log = logging.getLogger(__name__)


class Device:
    """A GPU of this process, torch's ``cuda:index``, and all that is loaded on it. It lasts as long as the process.

    ``kernels`` has the loaded kernels by the variant's record. ``places`` has the same kernels by bundle digest and the
    variant's number in the bundle (``launch/loader.py``). Such a key is in ``trusted`` if its code was tested on this
    capability, beforehand or here (``launch/self_test.py``). Modules that need the driver are imported at their first
    use: a process without a GPU has no driver.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.kernels: dict[Hashable, Any] = {}
        self.places: dict[tuple[bytes, int], Any] = {}
        self.trusted: set[tuple[bytes, int]] = set()
        self._counters: Counters | None = None
        self._gpu: LocalGpu | None = None

    # Not functools.cached_property: up to Python 3.11 it has a lock, which may be locked in a child of ``fork``.
    @property
    def counters(self) -> Counters:
        """The device's tile counters, made at first use."""
        if self._counters is None:
            from .counters import Counters

            self._counters = Counters(self.index)
        return self._counters

    @property
    def gpu(self) -> LocalGpu:
        """The GPU's model and capability: from the driver, or from torch if bundles can't be launched; asked once.

        Without a driver for bundles, the GPU may be AMD's, which has no capability.
        """
        if self._gpu is None:
            self._gpu = self._asked()
        return self._gpu

    def _asked(self) -> LocalGpu:
        from ...artifacts.records import Gpu, LocalGpu

        if not platform_supported():
            torch_properties = torch.cuda.get_device_properties(self.index)
            sm = 0 if torch.version.hip else 10 * torch_properties.major + torch_properties.minor
            return LocalGpu(
                sm,
                Gpu(
                    torch_properties.name,
                    torch_properties.multi_processor_count,
                    torch_properties.total_memory >> 20,
                    0,
                ),
            )
        from . import cuda

        properties = cuda.properties(self.index)
        return LocalGpu(
            properties.sm,
            Gpu(properties.name, properties.sm_count, properties.memory_bytes >> 20, cuda.driver_version()),
        )


devices: dict[int, Device] = {}  # the devices in use, by number; ``device`` adds them


def device(index: int) -> Device:
    """The Device for torch's ``cuda:index``. Does not query the GPU."""
    return devices.get(index) or devices.setdefault(index, Device(index))


def local_gpu(index: int) -> LocalGpu:
    """Return the model and capability of ``cuda:index``. Initialises CUDA in this process.

    Raises
    ------
    CudaError
        if there is no CUDA driver, or no such GPU.
    """
    return device(index).gpu


def current_device() -> int:
    """torch's current CUDA device.

    Raises
    ------
    HostError
        if there is no GPU.
    """
    if not torch.cuda.is_available():
        raise HostError("no CUDA GPU here (torch.cuda.is_available() is False); python -m pretuned.runtime says more")
    return torch.cuda.current_device()


def _empty_on_current(size: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, strides, dtype=dtype, device="cuda")


# Allocates on the current device. torch's compiled code uses this function: half the host time of torch.empty_strided.
empty: Allocator = getattr(
    getattr(getattr(_C, "_dynamo", None), "guards", None), "_empty_strided_cuda", _empty_on_current
)


def allocator(device: torch.device) -> Allocator:
    """``empty`` for a CUDA device, which must be the current one; else a function that allocates on ``device``."""
    if device.type == "cuda":
        return empty
    return lambda size, strides, dtype: torch.empty_strided(size, strides, dtype=dtype, device=device)


def _stream_of(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


# torch's current stream on a device, as a handle of the driver.
current_stream: Callable[[int], int] = getattr(_C, "_cuda_getCurrentRawStream", _stream_of)


def only_device() -> bool:
    """True if this process has one GPU only, so it is torch's current one."""
    return torch.cuda.device_count() <= 1


def device_is_current(device: int) -> bool:
    """True if torch's current device is this one."""
    return bool(_C._cuda_getDevice() == device)


_HERE = contextlib.nullcontext()


def on(device: int) -> contextlib.AbstractContextManager[object]:
    """A context in which ``device`` is torch's current GPU. -1, the host, changes nothing."""
    return _HERE if device < 0 or device_is_current(device) else torch.cuda.device(device)


def without_autocast(kind: str) -> contextlib.AbstractContextManager[object]:
    """A context in which autocast leaves dtypes as they are."""
    if not torch.is_autocast_enabled(kind):
        return contextlib.nullcontext()
    return torch.autocast(kind, enabled=False)


def platform_supported() -> bool:
    """True if the launcher works here: Linux on x86-64 or aarch64, and a torch for CUDA (not ROCm)."""
    here = sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64", "aarch64")
    return here and not torch.version.hip


def platform_name() -> str:
    """The platform's name for messages, e.g. ``linux x86_64``."""
    return f"{sys.platform} {platform.machine()}{' with ROCm' if torch.version.hip else ''}"


@functools.cache
def tell_unsupported() -> None:
    """Log, once, that the launcher does not work here."""
    what = "pretuned: bundles run on linux x86_64 and aarch64, this is %s: grouped GEMM runs on torch"
    _log.warning(what, platform_name())


def tf32_allowed(dtype: torch.dtype) -> bool:
    """True if the user lets torch multiply float32 matrices in tf32 on CUDA."""
    if dtype is not torch.float32:
        return False
    matmul = torch.backends.cuda.matmul
    precision = getattr(matmul, "fp32_precision", None)  # the newer setting reflects the older ones
    return bool(matmul.allow_tf32) if precision is None else precision == "tf32"


def capturing() -> bool:
    """True if torch's current stream is being captured: nothing is compiled or tuned then."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
