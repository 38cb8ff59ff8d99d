"""aot doctor."""

from __future__ import annotations

import importlib.metadata
import platform

import click

from ...artifacts.errors import HostError
from ...artifacts.limits import FORMAT
from ...kernels.entry import LAUNCH_ABI
from ..compile.toolchain import toolchain
from .exits import ENVIRONMENT, OK
from .options import as_json, print_json
from .table import echo


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


@click.command()
@as_json
def doctor(as_json: bool) -> int:
    """Show what this machine would use, and why it skips the rest: GPUs, driver, bundles, builder's tools.

    Exit code 0 if every GPU has a bundle or the machine has no GPU, else 1.

    \b
    Examples:
      aot doctor
      aot doctor --json
    """
    from ...runtime.inspect.doctor import examine  # imports torch, which takes seconds

    report = examine()
    if as_json:
        print_json({"builder": versions(), "runtime": report.to_dict()})
    else:
        echo(str(report))
        echo("\nbuilder")
        for name, value in versions().items():
            echo(f"  {name.replace('_', ' ')}: {value}")
    return OK if report.ok else ENVIRONMENT
