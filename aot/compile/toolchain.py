"""The Triton and ptxas that are installed, found without importing Triton (which takes a second)."""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from ...artifacts.errors import HostError
from ...kernels.hardware.arch import Assembler, arch_of

_TOOL_TIMEOUT_S = 60


@dataclass(frozen=True, slots=True)
class Toolchain:
    """The versions that decide a cubin's bytes."""

    triton: str
    ptxas: str
    ptxas_blackwell: str  # of the second assembler that Triton ships

    def ptxas_for(self, sm: int) -> str:
        """The assembler's toolkit version for a capability, such as 12.8."""
        second = arch_of(sm).assembler is Assembler.PTXAS_BLACKWELL
        return self.ptxas_blackwell if second else self.ptxas


@functools.cache
def toolchain() -> Toolchain:
    """The Triton and ptxas that a compile would use; TRITON_PTXAS_PATH and the like are followed.

    Raises
    ------
    HostError
        if Triton is not installed, or has no assembler that runs.
    """
    folder = triton_folder()
    if folder is None:
        raise HostError('Triton is not installed, and compiling needs it: pip install "pretuned[aot]"')
    found = re.search(r"^__version__ = ['\"]([^'\"]+)", (folder / "__init__.py").read_text(), re.MULTILINE)
    if not found:
        raise HostError(f"{folder / '__init__.py'} names no __version__: is this Triton?")
    ptxas = _release(folder, "ptxas")
    if ptxas is None:
        tool, machine = folder / "backends/nvidia/bin/ptxas", platform.machine()
        raise HostError(f"{tool} does not run: reinstall Triton for this machine, {machine}")
    return Toolchain(found[1], ptxas, _release(folder, "ptxas-blackwell") or ptxas)


def triton_folder() -> Path | None:
    """The folder of the installed Triton, or None."""
    spec = importlib.util.find_spec("triton")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _release(triton: Path, tool: str) -> str | None:
    """The toolkit release that an assembler names, in Triton's order: the environment's, then its own."""
    named = os.environ.get(f"TRITON_{tool.upper().replace('-', '_')}_PATH")
    for path in filter(None, (named, str(triton / "backends" / "nvidia" / "bin" / tool))):
        try:
            told = subprocess.run(
                [path, "--version"], capture_output=True, text=True, timeout=_TOOL_TIMEOUT_S, check=True
            )
        except (OSError, subprocess.SubprocessError):
            continue
        found = re.search(r"release (\d+\.\d+)", told.stdout)
        if found:
            return found[1]
    return None
