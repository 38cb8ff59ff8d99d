"""Ask the CUDA driver for this machine's GPUs, without torch or a CUDA context, and whether others use them."""

from __future__ import annotations

import ctypes
import shutil
import subprocess

# CUdevice_attribute, cuda.h
_MAJOR = 75
_MINOR = 76

_STUB_LIBRARY = 34  # CUDA_ERROR_STUB_LIBRARY, cuda.h


def gpu_count() -> int:
    """The number of GPUs that this process may see; 0 without a driver."""
    cuda = _driver()
    count = ctypes.c_int()
    if cuda is None or cuda.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value


def native_sm() -> int | None:
    """The capability (10 * major + minor) of the first visible GPU, or None without one or without a driver."""
    cuda = _driver()
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    if cuda is None or cuda.cuDeviceGet(ctypes.byref(device), 0) != 0:
        return None
    for value, attribute in ((major, _MAJOR), (minor, _MINOR)):
        if cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, device) != 0:
            return None
    return 10 * major.value + minor.value


def is_stub() -> bool:
    """True if the driver library is a stub for linking, as the CUDA toolkit and conda have it."""
    try:
        return bool(ctypes.CDLL("libcuda.so.1").cuInit(0) == _STUB_LIBRARY)
    except (OSError, AttributeError):
        return False


def driver_version() -> int:
    """The driver's newest CUDA version, as cuDriverGetVersion returns it (12080 is 12.8); 0 without a driver."""
    cuda, version = _driver(), ctypes.c_int()
    return version.value if cuda is not None and cuda.cuDriverGetVersion(ctypes.byref(version)) == 0 else 0


def gpu_uuid(device: int) -> str:
    """The UUID of a GPU or its MIG slice, as 32 hex digits; empty if the driver has none."""
    cuda = _driver()
    handle, uuid = ctypes.c_int(), (ctypes.c_ubyte * 16)()
    if cuda is None or cuda.cuDeviceGet(ctypes.byref(handle), device) != 0:
        return ""
    try:
        failed = cuda.cuDeviceGetUuid_v2(uuid, handle)
    except AttributeError:  # a driver before CUDA 11.4
        return ""
    return "" if failed else bytes(uuid).hex()


def bus_id(device: int) -> str:
    """The PCI address of an ordinal of this process, for nvidia-smi; empty without a driver."""
    cuda = _driver()
    handle, text = ctypes.c_int(), ctypes.create_string_buffer(32)
    if cuda is None or cuda.cuDeviceGet(ctypes.byref(handle), device) != 0:
        return ""
    return "" if cuda.cuDeviceGetPCIBusId(text, len(text), handle) else text.value.decode()


def _driver() -> ctypes.CDLL | None:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return cuda if cuda.cuInit(0) == 0 else None


_BUSY_PERCENT = 30
_BUSY_MIB = 4096
_TIMEOUT_S = 10.0


def busy(device: int) -> list[str]:
    """Why times on ``cuda:device`` may scatter; empty if it is idle, or nvidia-smi is missing.

    Call it before this process uses the GPU.
    """
    tool, bus = shutil.which("nvidia-smi"), bus_id(device)
    if tool is None or not bus:
        return []
    query = "--query-gpu=utilization.gpu,memory.used"
    try:
        done = subprocess.run(
            [tool, f"--id={bus}", query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    return busy_notes(done.stdout) if done.returncode == 0 else []


def busy_notes(line: str) -> list[str]:
    """Notes on nvidia-smi's ``utilization, MiB used``; empty if the GPU is idle."""
    parts = [part.strip() for part in line.split(",")]
    if len(parts) != 2 or not all(part.isdigit() for part in parts):
        return []
    percent, mib = map(int, parts)
    if percent < _BUSY_PERCENT and mib < _BUSY_MIB:
        return []
    return [f"it is in use ({percent} % busy, {mib} MiB taken by others): times will scatter, choices may be wrong"]
