"""aot doctor."""

from __future__ import annotations

import warnings

import click

from .echo import echo
from .exits import ENVIRONMENT, OK
from .options import as_json, print_json
from .versions import versions


@click.command()
@as_json
def doctor(as_json: bool) -> int:
    """Show what this machine would use, and why not: GPUs, drivers, bundles, and the builder's tools.

    Exit code 0 where a bundle would be used, or the machine has no GPU; 1 otherwise.

    \b
    Examples:
      aot doctor
      aot doctor --json
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch without it; nothing here needs it
        from ...runtime.inspect.doctor import examine  # imports torch, which takes seconds

        report = examine()
    if as_json:
        print_json({"builder": versions(), "runtime": report.to_dict()})
    else:
        echo(str(report))
        echo("\nbuilder")
        for name, value in versions().items():
            echo(f"  {name}: {value}")
    return OK if report.ok else ENVIRONMENT
