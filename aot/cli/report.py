"""aot report."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path

import click

from ...artifacts.errors import InputError
from ..models.load import load_models
from ..plan.plan import plan
from ..process.output_file import check_page, is_bundle, write_page
from . import completion
from .echo import echo, tell
from .options import as_json, file_path, print_json, wanted_ops
from .table import size


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Without the cyclic garbage collector: of a million records that all stay it finds none, in 40 % of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@click.command()
@click.argument("source", metavar="BUNDLE-OR-JOURNAL")
@click.option("--out", "-o", default=Path("report.html"), show_default=True, metavar="FILE",
              type=file_path, help="Where the page goes.")  # fmt: skip
@click.option("--journal", "journals", multiple=True, metavar="FILE", type=file_path,
              help="What measuring found, beside a bundle's choices; again for more.")  # fmt: skip
@click.option("--candidates", metavar="BUNDLE", type=click.Path(),
              help="The bundle that was measured: names the variants of a journal.")  # fmt: skip
@click.option("--models", "-m", multiple=True, metavar="FILE|SPEC", shell_complete=completion.models,
              help="What should be there, as for aot build: the rest is shown as missing.")  # fmt: skip
@click.option("--ops", metavar="LIST", help="With --models: only some of forward, dX, dW.  [default: all]")
@as_json
def report(
    source: str, out: Path, journals: tuple[Path, ...], candidates: str | None, models: tuple[str, ...],
    ops: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Write one HTML page: how fast each problem is, against the GPU's limits, the model and torch.

    The page loads nothing from anywhere: it can be mailed, kept and printed. Its cells can be filtered and sorted.

    \b
    Examples:
      aot report bundles/pretuned-sm90.msgpack
      aot report h200.journal --candidates candidates.msgpack -o h200.html
      aot report tuned.msgpack --journal h200.journal --candidates candidates.msgpack
      aot report bundles/pretuned-sm90.msgpack --models models.txt      # what is missing of these
    """
    from ..report.page import headline, page
    from ..report.sources import read

    for path in (Path(source), *journals, *([Path(candidates)] if candidates else ())):
        if not path.exists():
            raise InputError(f"'{path}': no such file; wanted a bundle or a journal")
    check_page(out)
    if ops and not models:
        raise click.UsageError("--ops says which ops of --models are wanted; give --models too")
    wanted = plan(load_models(models, only=wanted_ops(ops)).shapes) if models else None
    with _uncollected():
        sheet = read(source, is_bundle(Path(source)), journals, candidates, wanted)
        written = write_page(out, page(sheet))
    cells = sheet.cells
    counts = {state: sum(cell.state.value == state for cell in cells) for state in ("measured", "modelled", "missing")}
    if as_json:
        print_json({
            "path": str(out), "headline": headline(sheet), "size_bytes": written, "gemms": len(sheet.gemms),
            "cells": len(cells), **counts, "notes": list(sheet.notes),
        })  # fmt: skip
        return
    tell(sheet.notes)
    echo(headline(sheet))
    told = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    echo(f"{out}: {len(sheet.gemms)} GEMMs, {len(cells)} cells ({told}), {size(written)}")
