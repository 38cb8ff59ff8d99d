"""aot compile."""

from __future__ import annotations

from pathlib import Path

import click

from ...artifacts.limits import printable
from ..build.build import compile_candidates
from ..build.options import BuildOptions
from .options import as_json, cache_of, file_path, load, print_json, quiet, what_to_build, workers
from .progress import Progress
from .table import duration, echo, next_steps, quoted, size, tell


@click.command()
@what_to_build
@click.option(
    "--out",
    "-o",
    default=Path("candidates.msgpack"),
    show_default=True,
    metavar="FILE",
    type=file_path,
    help="File of the candidates.",
)
@workers
@click.option(
    "--keep-pruned",
    is_flag=True,
    help="Also keep variants that need too many resources, so that no build compiles them.",
)
@click.option("--low-rank", is_flag=True, help="Add bf16 kernels with a LoRA adapter inside. They are never measured.")
@click.option("--verbose", "-v", is_flag=True, help="List every variant that is left out, with the reason.")
@quiet
@as_json
def compile(
    models: tuple[str, ...],
    sm: str,
    ops: str | None,
    cache_dir: Path | None,
    no_cache: bool,
    out: Path,
    workers: int | None,
    keep_pruned: bool,
    low_rank: bool,
    verbose: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Compile all candidate kernels of models, for aot measure on a machine with the GPU.

    No GPU is needed. The file is a bundle with more variants. A file named *.msgpack.xz is compressed and can hold
    bundles for several capabilities: FILE.msgpack.xz#sm80 names the one for sm_80.

    \b
    Examples:
      aot compile --models models.txt --sm 90 -o candidates.msgpack        # any machine with Triton
      aot compile --models models.txt --sm 80,86,89 -o candidates-sm80-sm86-sm89.msgpack.xz
      aot measure candidates.msgpack --models models.txt --journal h200.journal   # with the GPU, without Triton
      aot build --models models.txt --sm 90 --candidates candidates.msgpack --journal h200.journal
    """
    plan, sms, notes = load(models, sm, ops)
    if not (as_json or quiet):
        tell(notes)
    options = BuildOptions(out.parent, workers=workers, cache=cache_of(cache_dir, no_cache))
    with Progress(as_json or quiet, verbose, notes=not quiet) as progress:
        report = compile_candidates(
            plan, sms, out, options, progress.observers(), keep_pruned=keep_pruned, low_rank=low_rank
        )
    if as_json:
        print_json({**report.to_dict(), "notes": [*notes, *report.notes]})
        return
    if quiet:
        echo(str(out))
        return
    tell(report.notes)
    for bundle in report.bundles:
        for dropped in bundle.dropped if verbose else ():
            echo(f"{dropped.kind}: {dropped.spec}: {dropped.reason}")
        cubins = bundle.compiled + bundle.cached - (0 if keep_pruned else bundle.pruned)
        echo(
            f"{printable(str(bundle.path))}: {bundle.variants} candidates for {bundle.target}, "
            f"{size(bundle.size_bytes)}, of {cubins} cubins ({bundle.compiled} compiled now and {bundle.cached} "
            f"cached, {bundle.pruned} of these pruned; {bundle.failed} failed) in {duration(bundle.seconds)}"
        )
    named = quoted(out) if len(sms) == 1 else f"{quoted(out)}#smNN"
    echo(next_steps(("on the GPU's machine", f"aot measure {named} --models ... --journal FILE")))
