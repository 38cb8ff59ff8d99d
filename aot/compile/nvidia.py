"""NVIDIA's part of a compilation: the least driver version, and a cubin's resources as cuobjdump prints them."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from ...artifacts.errors import CompileError
from ...kernels.hardware.arch import arch_of

OUTPUT_LIMIT_CHARS = 2000


def min_driver(sm: int, ptxas: str) -> int:
    """The least CUDA driver version that loads a cubin, in the form of cuDriverGetVersion.

    Within a major version any driver loads the code (CUDA compatibility guide, minor version compatibility), except for
    capabilities that the driver must know by name.
    """
    major, minor = (int(part) for part in ptxas.split(".")[:2])
    return major * 1000 + (minor * 10 if arch_of(sm).named_to_driver and major == 12 else 0)


def resources(scratch: Path, cubin: bytes, entry: str) -> tuple[int, int, int]:
    """Read registers a thread, stack bytes and local bytes of a cubin with cuobjdump."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    path = scratch / "variant.cubin"
    path.write_bytes(cubin)
    dump = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=False)
    usage = re.search(rf"Function {re.escape(entry)}:\s*REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", dump.stdout)
    if not usage:
        raise CompileError(f"cuobjdump says nothing of {entry}: {dump.stdout}{dump.stderr}"[:OUTPUT_LIMIT_CHARS])
    return int(usage[1]), int(usage[2]), int(usage[3])
