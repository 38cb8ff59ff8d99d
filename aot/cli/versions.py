"""The versions that ``aot --version`` prints: all that decide what is built, and the compile cache's directory."""

from __future__ import annotations

import importlib.metadata
import platform

from ...artifacts.errors import HostError
from ...artifacts.limits import FORMAT
from ...kernels.contract.launch_abi import LAUNCH_ABI
from ..compile.toolchain import toolchain


def versions() -> dict[str, str]:
    """Name -> version, in the order to show. Imports neither Triton nor torch."""
    try:
        tools = toolchain()
        triton, ptxas = tools.triton, tools.ptxas
        if tools.ptxas_blackwell != ptxas:
            ptxas += f", beyond sm_{max(tools.first)} {tools.ptxas_blackwell}"
    except HostError as error:
        triton = ptxas = str(error)
    try:
        from ..compile.cache import default_dir

        cache = str(default_dir() or "none (no home directory)")
    except ModuleNotFoundError as error:
        cache = f'{error.name} is not installed: pip install "pretuned[aot]"'
    return {
        "pretuned": importlib.metadata.version("pretuned"),
        "python": platform.python_version(),
        "triton": triton,
        "ptxas": ptxas,
        "bundle_format": str(FORMAT),
        "launch_abi": str(LAUNCH_ABI),
        "compile_cache": cache,
    }
