"""aot report."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path

import click

from ...artifacts.bundle_file import open_bundle
from ...artifacts.errors import InputError
from ...runtime.dispatch.places import SUFFIX
from ..models.load import load_models
from ..plan.plan import plan
from ..process.output import check_page, is_bundle, write_page
from . import completion
from .options import as_json, bundle_files, file_path, print_json, wanted_ops
from .table import echo, size, tell


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Pause the cyclic garbage collector: it finds nothing among a million live records, in 40 % of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@click.command()
@click.argument("source", metavar="BUNDLE-OR-JOURNAL")
@click.option(
    "--out",
    "-o",
    default=Path("report.html"),
    show_default=True,
    metavar="FILE",
    type=file_path,
    help="File of the page.",
)
@click.option(
    "--journal",
    "journals",
    multiple=True,
    metavar="FILE",
    type=file_path,
    help="Show the times of this journal, too. Repeatable.",
)
@click.option(
    "--candidates",
    metavar="BUNDLE",
    type=click.Path(),
    help="The bundle that was measured, which names the variants of a journal.",
)
@click.option(
    "--models",
    "-m",
    multiple=True,
    metavar="FILE|SPEC",
    shell_complete=completion.models,
    help="The models to cover, as for aot build. What they lack is shown as missing.",
)
@click.option("--ops", metavar="LIST", help="With --models: only some of the ops forward, dX, dW.  [default: all]")
@as_json
def report(
    source: str,
    out: Path,
    journals: tuple[Path, ...],
    candidates: str | None,
    models: tuple[str, ...],
    ops: str | None,
    as_json: bool,
) -> None:
    """Write an HTML page: how fast each problem is, compared with the GPU's limits, the cost model and torch.

    The page is one file that loads nothing else. Its table can be filtered, sorted and printed.

    \b
    Examples:
      aot report bundles/pretuned-sm90.msgpack
      aot report h200.journal --candidates candidates.msgpack -o h200.html
      aot report tuned.msgpack --journal h200.journal --candidates candidates.msgpack
      aot report bundles/pretuned-sm90.msgpack --models models.txt      # what is missing of these
    """
    from ..report.page import headline, page
    from ..report.sheets import read

    (source, *more) = bundle_files([source])
    if more:
        folder = Path(source).parent
        raise InputError(f"'{folder}' holds {1 + len(more)} bundles and a report is of one: name it, e.g. {source}")
    for path in (Path(source), *journals, *([Path(candidates)] if candidates else ())):
        if not path.exists():
            raise InputError(f"'{path}': no such file; wanted a bundle or a journal")
    if source.endswith(SUFFIX) and not is_bundle(Path(source)):
        open_bundle(source)  # raises an error about a damaged bundle, which is no journal either
    check_page(out)
    if ops and not models:
        raise click.UsageError("--ops needs --models: it selects ops of these models")
    wanted = plan(load_models(models, only=wanted_ops(ops)).shapes) if models else None
    with _uncollected():
        sheet = read(source, is_bundle(Path(source)), journals, candidates, wanted)
        written = write_page(out, page(sheet))
    cells = sheet.cells
    counts = {state: sum(cell.state.value == state for cell in cells) for state in ("measured", "modelled", "missing")}
    if as_json:
        print_json(
            {
                "path": str(out),
                "headline": headline(sheet),
                "size_bytes": written,
                "gemms": len(sheet.gemms),
                "cells": len(cells),
                **counts,
                "notes": list(sheet.notes),
            }
        )
        return
    tell(sheet.notes)
    echo(headline(sheet))
    listed = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    echo(f"{out}: {len(sheet.gemms)} GEMMs, {len(cells)} cells ({listed}), {size(written)}")
