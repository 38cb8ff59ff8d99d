"""aot doctor."""

from __future__ import annotations

import click

from .echo import echo
from .exits import ENVIRONMENT, OK
from .options import as_json, print_json
from .versions import versions


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
