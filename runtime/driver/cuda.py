"""The only code that calls CUDA: ctypes on libcuda.so.1, nothing compiled.

Every call is in the CUDA driver API reference manual. PyTorch owns the context: code is loaded
into the device's primary context, and launches go to the stream that the caller names.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import POINTER, addressof, byref, c_char, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_void_p
from functools import cache
from typing import Any

from ...artifacts.errors import CudaError
from ...artifacts.tuples import NamedTuple

INVALID_CONTEXT = 201
NO_DEVICE = 100
# CUDA_ERROR_INVALID_IMAGE, NO_BINARY_FOR_GPU, UNSUPPORTED_PTX_VERSION: the driver can't read the code.
_UNREAD = (200, 209, 222)
STUB_LIBRARY = 34
STUB = (
    "the libcuda.so.1 that was found is a stub to link with (CUDA error 34), as the CUDA toolkit and conda have it, "
    "not the driver. Take its directory (stubs) out of LD_LIBRARY_PATH"
)
_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CUfunction_attribute
_MULTIPROCESSOR_COUNT = 16  # CUdevice_attribute
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76
_NAME_BYTES = 256
_OUT_OF_MEMORY = 2
# CUDA's texts of the errors that a kernel causes (codes 700, 702, 710, 714 to 719 and 721). Errors of the machine, such
# as an uncorrectable ECC error or a GPU that is gone, are not in the list.
_FAULTS = (
    "an illegal memory access was encountered",
    "the launch timed out",
    "device-side assert triggered",
    "hardware stack error",
    "an illegal instruction was encountered",
    "misaligned address",
    "operation not supported on global/shared address space",
    "invalid program counter",
    "unspecified launch failure",
    "tensor memory not completely freed",
)
_STREAM_CAPTURE_MODE_RELAXED = 2
_STREAM_NON_BLOCKING = 1
_SHARED_WITHOUT_ASKING_BYTES = 48 * 1024


class DriverLacks(CudaError):
    """The driver is older than CUDA 12 and lacks functions."""


class Unfinished(CudaError):
    """A self-test hung, or ended in a fault of the GPU: this process can't use the GPU any more."""


class Unusable(CudaError):
    """This process can't use the GPU: after a fault, or because other processes have it."""


class OutOfMemory(CudaError):
    """The GPU's memory is full."""


class CodeUnread(CudaError):
    """The driver can't read a cubin: it is older than the compiler that built the cubin."""


class Function(NamedTuple):
    """A loaded kernel. ``per_sm`` is how many of its blocks one SM holds at once."""

    handle: int
    module: int
    device: int
    threads: int
    shared_bytes: int
    per_sm: int


_PROTOTYPES: dict[str, tuple[object, ...]] = {
    "cuInit": (c_uint,),
    "cuDriverGetVersion": (POINTER(c_int),),
    "cuGetErrorString": (c_int, POINTER(c_char_p)),
    "cuDeviceGetCount": (POINTER(c_int),),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDeviceGetName": (c_void_p, c_int, c_int),
    "cuDeviceGetAttribute": (POINTER(c_int), c_int, c_int),
    "cuDeviceTotalMem_v2": (POINTER(c_size_t), c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuCtxSetCurrent": (c_void_p,),
    "cuCtxPushCurrent_v2": (c_void_p,),
    "cuCtxPopCurrent_v2": (POINTER(c_void_p),),
    "cuThreadExchangeStreamCaptureMode": (POINTER(c_int),),
    "cuModuleLoadData": (POINTER(c_void_p), c_char_p),
    "cuModuleGetFunction": (POINTER(c_void_p), c_void_p, c_char_p),
    "cuFuncSetAttribute": (c_void_p, c_int, c_int),
    "cuOccupancyMaxActiveBlocksPerMultiprocessor": (POINTER(c_int), c_void_p, c_int, c_size_t),
    "cuTensorMapEncodeTiled": (
        c_void_p,
        c_int,
        c_uint,
        c_void_p,
        c_char_p,
        c_char_p,  # an array of uint64
        c_char_p,
        c_char_p,
        c_int,
        c_int,
        c_int,
        c_int,
    ),  # arrays of uint32
    "cuLaunchKernelEx": (c_void_p, c_void_p, c_void_p, c_void_p),
    "cuMemAlloc_v2": (POINTER(c_void_p), c_size_t),
    "cuMemsetD8Async": (c_void_p, c_ubyte, c_size_t, c_void_p),
    "cuStreamCreate": (POINTER(c_void_p), c_uint),
    "cuStreamDestroy_v2": (c_void_p,),
    "cuStreamSynchronize": (c_void_p,),
}


@cache
def library() -> ctypes.CDLL:
    """libcuda, with the types of every function that is used.

    Raises
    ------
    CudaError
        if there is no driver; DriverLacks if the driver is older than CUDA 12.
    """
    try:
        lib = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaError(f"no CUDA driver: {error}. In a container, start it with the GPU passed through") from None
    for name, types in _PROTOTYPES.items():
        function = getattr(lib, name, None)
        if function is None:
            raise DriverLacks(
                f"the CUDA driver has no {name}: pretuned needs a driver for CUDA 12 or later. Update the driver"
            )
        function.argtypes = types  # restype is int by default
    if hasattr(lib, "cuFuncLoad"):
        lib.cuFuncLoad.argtypes = (c_void_p,)
    return lib


@cache
def launch_kernel() -> Callable[[object, object, object, None], int]:
    """cuLaunchKernelEx, for arguments that ``argument`` has converted: converting takes a tenth of a launch's time."""
    function: Any = library()["cuLaunchKernelEx"]  # a new function object, without the argtypes that library() set
    return function  # type: ignore[no-any-return]


def argument(address: int) -> object:
    """Convert an address to an argument of ``launch_kernel``, which can be used any number of times."""
    converted: object = c_void_p.from_param(address)
    return converted


def check(code: int, call: str) -> None:
    """Raise CudaError, with the driver's own words, unless ``code`` is success."""
    if code == STUB_LIBRARY:
        raise CudaError(f"{call}: {STUB}")
    if code:
        text = c_char_p()
        library().cuGetErrorString(code, byref(text))
        kind = OutOfMemory if code == _OUT_OF_MEMORY else CudaError
        raise kind(f"{call}: CUDA error {code}, {(text.value or b'unknown').decode()}")


def is_fault(error: Exception) -> bool:
    """True if an error of torch or the driver is a kernel's fault, such as an illegal memory access."""
    return any(words in str(error) for words in _FAULTS)


def recover(code: int, what: str, device: int, call: Callable[..., int], *arguments: object) -> None:
    """Handle a driver call that returned ``code``: repeat ``call(*arguments)`` in the device's context, or raise.

    A thread that has not used CUDA yet, such as autograd's, has no context: it gets the device's, and the call is
    repeated once. Any other code raises CudaError, whose text begins with ``what``.
    """
    if code == INVALID_CONTEXT:
        make_current(device)
        code = call(*arguments)
    check(code, what)


@cache
def driver_version() -> int:
    """The CUDA version that the driver supports, such as 12080 for 12.8. Needs no GPU and no context."""
    version = c_int()
    check(library().cuDriverGetVersion(byref(version)), "cuDriverGetVersion")
    return version.value


def device_count() -> int:
    """The number of GPUs that the driver shows to this process; torch may count others."""
    lib, count = library(), c_int()
    code = lib.cuInit(0)
    if code != NO_DEVICE:
        check(code, "cuInit")
        check(lib.cuDeviceGetCount(byref(count)), "cuDeviceGetCount")
    return count.value


class Properties(NamedTuple):
    """A GPU's properties as the driver reports them; ``sm`` is 10 * major + minor."""

    name: str
    sm: int
    sm_count: int
    memory_bytes: int


def properties(index: int) -> Properties:
    """The properties of torch's GPU ``index``, by the driver alone: torch also asks NVML, which takes 0.3 ms."""
    lib, handle, name, memory = library(), _device(index), bytearray(_NAME_BYTES), c_size_t()
    check(lib.cuDeviceGetName(addressof(c_char.from_buffer(name)), _NAME_BYTES, handle), "cuDeviceGetName")
    check(lib.cuDeviceTotalMem_v2(byref(memory), handle), "cuDeviceTotalMem")
    numbers = []
    for attribute in (_CAPABILITY_MAJOR, _CAPABILITY_MINOR, _MULTIPROCESSOR_COUNT):
        value = c_int()
        check(lib.cuDeviceGetAttribute(byref(value), attribute, handle), f"cuDeviceGetAttribute({attribute})")
        numbers.append(value.value)
    major, minor, sm_count = numbers
    return Properties(name.split(b"\0")[0].decode(), 10 * major + minor, sm_count, memory.value)


@cache
def primary_context(device: int) -> int:
    """The context that PyTorch uses on this device, kept for the life of the process."""
    lib, handle, context = library(), _device(device), c_void_p()
    check(lib.cuDevicePrimaryCtxRetain(byref(context), handle), "cuDevicePrimaryCtxRetain")
    return context.value or 0


def _device(index: int) -> c_int:
    lib, handle = library(), c_int()
    check(lib.cuInit(0), "cuInit")
    check(lib.cuDeviceGet(byref(handle), index), f"cuDeviceGet({index})")
    return handle


def make_current(device: int) -> None:
    """Bind the device's primary context to this thread, if the thread has no context yet."""
    check(library().cuCtxSetCurrent(primary_context(device)), "cuCtxSetCurrent")


@contextmanager
def relaxed(device: int) -> Iterator[None]:
    """Enter the device's context and relaxed capture mode, in which code may be loaded while a graph is captured."""
    lib, mode, context = library(), c_int(_STREAM_CAPTURE_MODE_RELAXED), c_void_p()
    check(lib.cuCtxPushCurrent_v2(primary_context(device)), "cuCtxPushCurrent")
    try:
        check(lib.cuThreadExchangeStreamCaptureMode(byref(mode)), "cuThreadExchangeStreamCaptureMode")
        try:
            yield
        finally:
            lib.cuThreadExchangeStreamCaptureMode(byref(mode))
    finally:
        lib.cuCtxPopCurrent_v2(byref(context))


def load(cubin: bytes, entry: str, *, threads: int, shared_bytes: int, device: int) -> Function:
    """Load a cubin and make its kernel ready to launch: about 0.1 ms.

    Raises
    ------
    CudaError
        if the driver refuses the code; CodeUnread if the driver is too old to read it.
    """
    lib, module, handle, per_sm = library(), c_void_p(), c_void_p(), c_int()
    with relaxed(device):
        _check_code(lib.cuModuleLoadData(byref(module), cubin), f"cuModuleLoadData({entry}, {len(cubin)} bytes)")
        _check_code(lib.cuModuleGetFunction(byref(handle), module, entry.encode()), f"cuModuleGetFunction({entry})")
        if shared_bytes > _SHARED_WITHOUT_ASKING_BYTES:
            code = lib.cuFuncSetAttribute(handle, _MAX_DYNAMIC_SHARED_SIZE_BYTES, shared_bytes)
            check(code, f"cuFuncSetAttribute({entry}, {shared_bytes} bytes of shared memory)")
        if hasattr(lib, "cuFuncLoad"):  # from CUDA 12.4 on; with lazy loading, the first launch would load the kernel
            _check_code(lib.cuFuncLoad(handle), f"cuFuncLoad({entry})")
        code = lib.cuOccupancyMaxActiveBlocksPerMultiprocessor(byref(per_sm), handle, threads, shared_bytes)
        check(code, f"cuOccupancyMaxActiveBlocksPerMultiprocessor({entry})")
    if not per_sm.value:
        raise CudaError(f"{entry}: no SM of this GPU holds a block of {threads} threads and {shared_bytes} bytes")
    return Function(handle.value or 0, module.value or 0, device, threads, shared_bytes, per_sm.value)


def _check_code(code: int, call: str) -> None:
    """Run ``check`` for a call that may read code; with lazy loading, a later call than the first reads it."""
    try:
        check(code, call)
    except CudaError as error:
        raise (CodeUnread(str(error)) if code in _UNREAD else error) from None


def zeroed(size_bytes: int, device: int) -> int:
    """Return new zeroed device memory, kept for the life of the process. A stream of its own sets it to zero.

    The function waits for that stream, so during a graph capture the zeroing is not part of the graph.

    Raises
    ------
    CudaError
        where the driver refuses.
    """
    lib, memory, stream = library(), c_void_p(), c_void_p()
    with relaxed(device):
        check(lib.cuMemAlloc_v2(byref(memory), size_bytes), f"cuMemAlloc({size_bytes} bytes)")
        check(lib.cuStreamCreate(byref(stream), _STREAM_NON_BLOCKING), "cuStreamCreate")
        check(lib.cuMemsetD8Async(memory, 0, size_bytes, stream), "cuMemsetD8Async")
        check(lib.cuStreamSynchronize(stream), "cuStreamSynchronize")
        check(lib.cuStreamDestroy_v2(stream), "cuStreamDestroy")
    return memory.value or 0
