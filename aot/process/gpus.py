"""This machine's GPUs, asked of the CUDA driver without torch or a CUDA context, and whether somebody else uses one."""

from __future__ import annotations

import ctypes
import shutil
import subprocess

# CUdevice_attribute, cuda.h
_MAJOR = 75
_MINOR = 76

_STUB_LIBRARY = 34  # CUDA_ERROR_STUB_LIBRARY, cuda.h


def gpu_count() -> int:
    """How many GPUs this process may see; 0 without a driver."""
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
    """Whether what stands for the driver is a stub to link with, as the CUDA toolkit and conda have one."""
    try:
        return bool(ctypes.CDLL("libcuda.so.1").cuInit(0) == _STUB_LIBRARY)
    except (OSError, AttributeError):
        return False


def driver_version() -> int:
    """The newest CUDA that the driver knows, as cuDriverGetVersion counts (12080 is 12.8); 0 without a driver."""
    cuda, version = _driver(), ctypes.c_int()
    return version.value if cuda is not None and cuda.cuDriverGetVersion(ctypes.byref(version)) == 0 else 0


def gpu_uuid(device: int) -> str:
    """What names a GPU (or its MIG slice) everywhere, as 32 hex digits; empty where the driver tells nothing."""
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
    """The PCI address of the ordinal that this process sees, as nvidia-smi takes it; empty without a driver."""
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
    """Why times on ``cuda:device`` may scatter; nothing where it is idle, or nobody can tell.

    To be asked before this process does anything there.
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
    return told(done.stdout) if done.returncode == 0 else []


def told(line: str) -> list[str]:
    """The notes that ``utilization, MiB used`` of nvidia-smi is worth."""
    parts = [part.strip() for part in line.split(",")]
    if len(parts) != 2 or not all(part.isdigit() for part in parts):
        return []
    percent, mib = map(int, parts)
    if percent < _BUSY_PERCENT and mib < _BUSY_MIB:
        return []
    return [f"it is in use ({percent} % busy, {mib} MiB taken by others): times will scatter, choices may be wrong"]
