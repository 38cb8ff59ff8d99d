"""aot bench."""

from __future__ import annotations

from pathlib import Path

import click

from ...artifacts.errors import HostError, InputError
from ...artifacts.publishing import publish
from ..compare.result import OURS, Comparison
from ..models.load import load_models
from ..process.output import check_image
from . import completion
from .exits import ENVIRONMENT, OK
from .options import as_json, count_list, file_path, print_json, quiet, wanted_ops
from .progress import Shown
from .table import duration, echo, table, tell

_TOKENS = "1,16,128,1024,8192"


@click.command()
@click.option(
    "--models",
    "-m",
    multiple=True,
    required=True,
    metavar="FILE|SPEC",
    shell_complete=completion.models,
    help="The models to time, as for aot build. Repeatable.",
)
@click.option("--tokens", default=_TOKENS, show_default=True, metavar="LIST", help="Tokens of one step.")
@click.option(
    "--ops", metavar="LIST", help="Only some of the ops forward, dX, dW.  [default: all; gradients from 1024 tokens]"
)
@click.option(
    "--plot", metavar="FILE", type=file_path, help="Draw the ratios into a .png or .svg file. Needs pretuned[plot]."
)
@click.option(
    "--budget-ms",
    type=click.FloatRange(1, 10_000),
    default=60.0,
    show_default=True,
    help="Milliseconds for each library in each cell.",
)
@click.option("--device", hidden=True, type=click.Choice(["cuda", "cpu"]), default="cuda")
@quiet
@as_json
def bench(
    models: tuple[str, ...],
    tokens: str,
    ops: str | None,
    plot: Path | None,
    budget_ms: float,
    device: str,
    quiet: bool,
    as_json: bool,
) -> int:
    """Time a model's GEMMs on this GPU, compared with torch and, if installed, vLLM, triton_kernels and DeepGEMM.

    All run in bf16, in one process, in turns. Each result is compared with fp32 before it is timed. A library that
    refuses a shape is left out there, with its reason.

    \b
    Examples:
      aot bench --models Qwen/Qwen3-30B-A3B
      aot bench --models "Qwen/Qwen3-30B-A3B tp=2" --tokens 1,64,4096 --ops forward --plot bench.png
      aot bench --models "shape:E=8,H=1000,I=333,k=2" --json
    """
    wanted, asked = count_list("--tokens", tokens), wanted_ops(ops)
    shards = load_models(models, only=asked).shapes
    from ..compare.result import check_available, kind_of

    kind = None if plot is None else kind_of(plot)
    if plot is not None:
        if kind is None:
            raise InputError(f"--plot '{plot}': wanted a file's name that ends in .png or .svg")
        check_available()
        check_image(plot, kind)
    try:
        import torch
    except ModuleNotFoundError:
        raise HostError("aot bench needs torch, which is not installed here") from None
    if device == "cuda" and not torch.cuda.is_available():
        raise HostError(
            "aot bench needs a GPU that torch can use, and there is none here. Run the same command on the machine "
            "that serves the model (in a container, with --gpus all). python -m pretuned.runtime shows what is wrong"
        )
    from ..compare.run import FIRST_OF_TRAINING, cells_of, compare

    if not cells_of(shards, asked, wanted):
        raise InputError(f"nothing to time: gradients are timed from {FIRST_OF_TRAINING} tokens on; see --tokens")
    with Shown("timing", as_json or quiet) as shown:

        def on_cell(done: int, total: int) -> None:
            if done == 1:
                shown.start(total)
            shown.show(done, "cells", f"{done} of {total} cells", last=done == total)

        comparison = compare(shards, asked, wanted, torch.device(device), budget_ms, on_cell)
    if plot is not None and kind is not None:
        from ..compare.result import plot as draw

        publish(plot, draw(comparison, kind))
    if as_json:
        print_json({**comparison.to_dict(), **({"plot": str(plot)} if plot else {})})
        return ENVIRONMENT if comparison.wrong else OK
    if not quiet:
        echo(_table(comparison))
        echo()
    for line in comparison.headlines():
        echo(line)
    if not quiet:
        _tell(comparison)
        if plot:
            echo(f"plot: {plot}")
    for cell in comparison.wrong:
        echo(f"error: ours is wrong, {cell.model} {cell.where}: {cell.left_out[OURS]}", err=True)
    return ENVIRONMENT if comparison.wrong else OK


def _table(comparison: Comparison) -> str:
    """A row for each cell: pretuned's time and rate, and each library's time over pretuned's."""
    names = comparison.libraries
    many = len({(cell.model, cell.tp, cell.ep) for cell in comparison.cells}) > 1
    rows = []
    for cell in comparison.cells:
        us, tflops = cell.us.get(OURS), cell.tflops
        rows.append(
            [
                *([f"{cell.model} tp={cell.tp} ep={cell.ep}"] if many else []),
                cell.gemm,
                cell.op,
                cell.tokens,
                "wrong" if us is None else f"{us:.1f}",
                "-" if tflops is None else f"{tflops:.1f}",
                *("-" if (ratio := cell.ratio(name)) is None else f"{ratio:.2f}" for name in names),
            ]
        )
    head = (*(("model",) if many else ()), "product", "op", "tokens", "us", "TFLOP/s", *(f"x {name}" for name in names))
    return table(head, rows, "<" * (2 + many) + ">" * (3 + len(names)))


def _tell(comparison: Comparison) -> None:
    """Print the GPU, versions, libraries left out, and cells without a bundle's kernel."""
    versions = ", ".join(f"{name} {said}" for name, said in comparison.versions.items())
    echo(f"{comparison.device}, bf16, in {duration(comparison.seconds)}; {versions}")
    tell(f"left out: {line}" for line in comparison.omissions())
    without = sum(cell.runs in ("torch", "jit") for cell in comparison.cells)
    if without:
        tell(
            [
                f"in {without} of {len(comparison.cells)} cells no bundle has a kernel for this GPU, and torch ran "
                "pretuned's side: python -m pretuned.runtime says what to build"
            ]
        )
