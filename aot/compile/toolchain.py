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
from ...kernels.hopper_w4a16 import ZERO_DTYPES
from ...kernels.rowops import ALONG_M, RowOpSpec
from ...kernels.spec import PINGPONG_COLUMNS, Spec

_TOOL_TIMEOUT_S = 60

# First and last release of Triton that compile correctly: the plain kernels, and those in Gluon, which are the
# warp-specialised ones and the row kernels of ``ALONG_M`` (3.6 has no gl.barrier). 3.8 can't compile warp-specialised
# tiles of 192 rows or columns: its views of shared memory are as large as the allocation (kernels/gluon/pipeline.py).
# Nor do 3.8 and 3.9 allow the views of kernels/hopper_w4a16/rows_zero.py.
KNOWN = ((3, 6, 0), (3, 9, 0))
KNOWN_GLUON = ((3, 7, 0), (3, 9, 0))
WITHOUT_192 = ((3, 8, 0), (3, 8, 0))
WITHOUT_ZERO_POINTS = ((3, 8, 0), (3, 9, 0))
BUILDER = "3.7.1"  # compiles every kernel
# Capabilities that the first of Triton's two assemblers compiles for: before Triton 3.9, and since.
_FIRST, _FIRST_SINCE_39 = frozenset((80, 86, 87, 89, 90)), frozenset((80, 86, 87, 89))


@dataclass(frozen=True, slots=True)
class Toolchain:
    """The versions that decide a cubin's bytes."""

    triton: str
    ptxas: str
    ptxas_blackwell: str  # of the second assembler that Triton ships

    @property
    def first(self) -> frozenset[int]:
        """The capabilities that the first assembler compiles for; the second compiles for all others."""
        return _FIRST_SINCE_39 if _release(self.triton) >= (3, 9) else _FIRST

    def ptxas_for(self, sm: int) -> str:
        """The assembler's toolkit version for a capability, such as 12.8."""
        return self.ptxas if sm in self.first else self.ptxas_blackwell


@functools.cache
def toolchain() -> Toolchain:
    """The Triton and ptxas that a compile would use; TRITON_PTXAS_PATH and the like are followed.

    Raises
    ------
    HostError
        if Triton is not installed, is a release that is not known to compile correctly, or has no assembler that runs.
    """
    folder = triton_folder()
    if folder is None:
        raise HostError("Triton is not installed, and compiling needs it: pip install 'pretuned[compile]'")
    match = re.search(r"^__version__ = ['\"]([^'\"]+)", (folder / "__init__.py").read_text(), re.MULTILINE)
    if not match:
        raise HostError(f"{folder / '__init__.py'} names no __version__: is this Triton?")
    if not _within(match[1], KNOWN):
        raise HostError(
            f"Triton {match[1]} is installed, and pretuned knows of {_named(KNOWN)} alone that their code is right: "
            f"nothing is compiled with it. Where torch wants it, compile in an environment of its own that has "
            f"triton=={BUILDER}"
        )
    ptxas = _toolkit(folder, "ptxas")
    if ptxas is None:
        tool, machine = folder / "backends/nvidia/bin/ptxas", platform.machine()
        raise HostError(f"{tool} does not run: reinstall Triton for this machine, {machine}")
    return Toolchain(match[1], ptxas, _toolkit(folder, "ptxas-blackwell") or ptxas)


def unable(spec: Spec | RowOpSpec) -> str | None:
    """The reason why ``spec`` can't be compiled on this machine, for any capability; None if it can."""
    try:
        triton = toolchain().triton
    except HostError as error:
        return str(error)
    if not (spec.config.schedule.warp_specialized if isinstance(spec, Spec) else spec.op in ALONG_M):
        return None
    if not _within(triton, KNOWN_GLUON):
        what = "warp-specialised kernels" if isinstance(spec, Spec) else f"{spec.op.value}'s kernels"
        return f"{what} are compiled with Triton {_named(KNOWN_GLUON)} alone, this is {triton}"
    if not isinstance(spec, Spec):
        return None
    c = spec.config
    if PINGPONG_COLUMNS in (c.block_m, c.block_n, c.block_k) and _within(triton, WITHOUT_192):
        what, without = f"in tiles of {PINGPONG_COLUMNS}", WITHOUT_192
    elif spec.dtype in ZERO_DTYPES and _within(triton, WITHOUT_ZERO_POINTS):
        what, without = "of weights with zero points", WITHOUT_ZERO_POINTS
    else:
        return None
    return (
        f"warp-specialised kernels {what} are compiled with Triton {_named(KNOWN_GLUON)} but {_named(without)}, "
        f"this is {triton}"
    )


def _within(version: str, releases: tuple[tuple[int, ...], tuple[int, ...]]) -> bool:
    """True if a version, such as 3.7.1+cu130, is of these releases, or a patch of the last one."""
    release = _release(version)
    first, last = releases
    return first <= release and release[:2] <= last[:2]


def _release(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version.partition("+")[0])[:3]))


def _named(releases: tuple[tuple[int, ...], tuple[int, ...]]) -> str:
    first, last = (".".join(map(str, release)) for release in releases)
    return first if first == last else f"{first} to {last}"


def triton_folder() -> Path | None:
    """The folder of the installed Triton, or None."""
    spec = importlib.util.find_spec("triton")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _toolkit(triton: Path, tool: str) -> str | None:
    """The toolkit release of an assembler: the environment's if set, else the one that Triton ships."""
    named = os.environ.get(f"TRITON_{tool.upper().replace('-', '_')}_PATH")
    for path in filter(None, (named, str(triton / "backends" / "nvidia" / "bin" / tool))):
        try:
            result = subprocess.run(
                [path, "--version"], capture_output=True, text=True, timeout=_TOOL_TIMEOUT_S, check=True
            )
        except (OSError, subprocess.SubprocessError):
            continue
        match = re.search(r"release (\d+\.\d+)", result.stdout)
        if match:
            return match[1]
    return None
