"""aot build."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from ..build import Options
from ..build import build as build_bundles
from ..outdir import DEFAULT_NAME
from ..summary import Report
from .options import as_json, cache_of, load, print_json, what_to_build
from .progress import Progress
from .table import duration, size, table


@click.command()
@what_to_build
@click.option("--out", default=Path("bundles"), show_default=True, metavar="DIR",
              type=click.Path(path_type=Path), help="Where the bundles go.")  # fmt: skip
@click.option("--name", default=DEFAULT_NAME, show_default=True, help="The files are <name>-sm<NN>.msgpack.")
@click.option(
    "--workers", "-j", type=click.IntRange(1, 1024), help="Compile this many at a time.  [default: the cores]"
)
@click.option("--verbose", "-v", is_flag=True, help="Tell every variant that does not ship, and why.")
@as_json
def build(
    models: tuple[str, ...], sm: str, ops: str | None, cache_dir: Path | None, no_cache: bool,
    out: Path, name: str, workers: int | None, verbose: bool, as_json: bool,
) -> None:  # fmt: skip
    """Compile the kernels that models need, one bundle per GPU capability. Needs no GPU.

    What is compiled is kept: an interrupted build goes on where it was, and a second one compiles nothing.

    \b
    Examples:
      aot build --models models.txt --sm 80,90
      aot build --models models.txt                      # for this machine's GPU
      aot build --models "mistralai/Mixtral-8x7B-v0.1 tp=1,2,4" --sm 9.0 --out /srv/bundles
      aot build --models "shape:E=64,H=2048,I=1024,k=8" --sm 120 --name mine
      aot build --models /models/my-checkpoint --sm 90   # a folder with a config.json
    """
    plan, sms, notes = load(models, sm, ops)
    cache = cache_of(cache_dir, no_cache)
    if cache is None and not no_cache and not as_json:
        click.echo(
            "note: no home directory, so nothing that is compiled is kept; name a place with --cache-dir", err=True
        )
    if not as_json:
        for note in notes:
            click.echo(f"note: {note}", err=True)
    with Progress(quiet=as_json, verbose=verbose) as progress:
        report = build_bundles(plan, sms, Options(out, name, workers, cache), progress.observers())
    if as_json:
        print_json({**report.to_dict(), "notes": [*notes, *report.notes]})
        return
    for note in report.notes:
        click.echo(f"note: {note}", err=True)
    _show(report, out, verbose)


def _show(report: Report, out: Path, verbose: bool) -> None:
    head = ("bundle", "for", "models", "problems", "choices", "variants", "compiled", "cached", "pruned", "failed",
            "size", "time")  # fmt: skip
    rows = [
        (str(one.path) + (" (unchanged)" if one.unchanged else ""), one.target, one.models, one.problems, one.choices,
         one.variants, one.compiled, one.cached, one.pruned, one.failed, size(one.size_bytes), duration(one.seconds))
        for one in report.bundles
    ]  # fmt: skip
    click.echo(table(head, rows, "<<" + ">" * 10))
    for one in report.bundles:
        if verbose:
            for dropped in one.dropped:
                click.echo(f"{one.target}: {dropped.kind}: {dropped.spec}: {dropped.reason}")
        elif one.failed:
            click.echo(f"{one.target}: {one.failed} variants failed to compile; -v tells why")
    first, folder = shlex.quote(str(report.bundles[0].path)), shlex.quote(str(out.resolve()))
    click.echo(
        f"\nThe choices are modelled: a cost model ranked the variants, nothing was measured.\n"
        f"Next:\n"
        f"  look inside     aot inspect {first}\n"
        f"  in a Dockerfile COPY {out} /opt/pretuned/bundles\n"
        f"  or right here   export PRETUNED_BUNDLES={folder}\n"
        f"  then            pretuned.runtime.grouped_gemm(x, w, m_sizes)"
    )
