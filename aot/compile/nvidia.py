"""What is NVIDIA's of a compilation: the least driver, and what cuobjdump reads from a cubin."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from ...artifacts.errors import CompileError
from ...kernels.hardware.arch import arch_of

OUTPUT_LIMIT_CHARS = 2000


def min_driver(sm: int, ptxas: str) -> int:
    """The least CUDA driver version that loads a cubin, as cuDriverGetVersion counts.

    Within a major version any driver loads the code (CUDA compatibility guide, minor version
    compatibility), but for a capability that the driver must know by name.
    """
    major, minor = (int(part) for part in ptxas.split(".")[:2])
    return major * 1000 + (minor * 10 if arch_of(sm).named_to_driver and major == 12 else 0)


def resources(scratch: Path, cubin: bytes, entry: str) -> tuple[int, int, int]:
    """Registers a thread, stack bytes and local bytes, as cuobjdump reads them from the cubin."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    path = scratch / "variant.cubin"
    path.write_bytes(cubin)
    dump = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=False)
    found = re.search(rf"Function {re.escape(entry)}:\s*REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", dump.stdout)
    if not found:
        raise CompileError(f"cuobjdump says nothing of {entry}: {dump.stdout}{dump.stderr}"[:OUTPUT_LIMIT_CHARS])
    return int(found[1]), int(found[2]), int(found[3])
