"""aot explain."""

from __future__ import annotations

import itertools

import click

from ...artifacts.errors import HostError
from ...artifacts.records import LocalGpu
from ..models.load import load_models
from ..plan.targets import parse_gpu
from ..process.gpus import native_sm
from . import completion
from .echo import echo, tell
from .options import as_json, count_list, print_json, wanted_ops
from .table import next_steps, table

_TOKENS = "1,16,128,1024,8192"


@click.command()
@click.argument("model", metavar="MODEL", shell_complete=completion.models)
@click.option(
    "--gpu",
    default="native",
    metavar="NAME",
    shell_complete=completion.gpus,
    help="The GPU: h100, h200, a100, rtx4090 ..., or a capability such as 90.  [default: this machine's GPU]",
)
@click.option("--tokens", default=_TOKENS, show_default=True, metavar="LIST", help="Tokens of one step.")
@click.option("--ops", default="forward", show_default=True, metavar="LIST", help="Some of forward, dX, dW.")
@click.option("--why", is_flag=True, help="Explain each row: the reason, the next best kernels, skipped bundles.")
@as_json
def explain(model: str, gpu: str, tokens: str, ops: str, why: bool, as_json: bool) -> None:
    """Show which kernels would run a model on a GPU, from which bundle, and why.

    The GPU need not be here. MODEL is a model's name, a spec or a file of specs, as for aot build.

    \b
    Examples:
      aot explain Qwen/Qwen3-30B-A3B --gpu h100
      aot explain "Qwen/Qwen3-30B-A3B tp=2" --gpu h100 --tokens 1,256 --why
      aot explain models.txt --gpu a100 --ops forward,dX,dW
      PRETUNED_BUNDLES=$PWD/bundles aot explain Qwen/Qwen3-30B-A3B --gpu h200 --json
    """
    counts = count_list("--tokens", tokens)
    loaded = load_models([model], only=wanted_ops(ops))
    local = parse_gpu(gpu, _gpu_here)
    from ..plan.explained import explained  # imports torch, which takes seconds

    gemms = [*explained(loaded.shapes, counts, local)]
    if as_json:
        print_json({"notes": list(loaded.notes), "gemms": [gemm.to_dict() for gemm in gemms]})
        return
    tell(loaded.notes)
    groups = itertools.groupby(gemms, key=lambda gemm: (gemm.shard, gemm.explanation.problem.dtype.value))
    echo(f"on {local}")
    for (shard, dtype), rows in groups:
        shown = []
        for gemm in rows:
            explanation = gemm.explanation
            best = explanation.chosen
            based = f"{best.source.value}{f' on {best.gpu.name}' if best.gpu else ''}" if best else "no kernel here"
            based = based if explanation.raises is None else f"the call raises: {explanation.raises}"
            shown.append(
                (
                    gemm.gemm.role,
                    explanation.problem.op.value,
                    gemm.tokens,
                    explanation.M,
                    "torch, measured faster"
                    if explanation.torch_us
                    else str(best.config)
                    if best
                    else explanation.runs,
                    f"{explanation.torch_us or best.time_us:.1f}" if best else "-",
                    based,
                    best.usable.path.name if best else "-",
                )
            )
        echo(f"\n{shard.name} tp={shard.tp} ep={shard.ep}, {dtype}")
        echo(table(("GEMM", "op", "tokens", "rows", "kernel", "us", "basis", "bundle"), shown, "<<>><><"))
    if why:
        for gemm in gemms:
            echo(f"\n{gemm.gemm.role}, {gemm.tokens} tokens: {gemm.explanation}")
    else:
        echo("\n--why explains each row")
    builds = dict.fromkeys(gemm.explanation.build for gemm in gemms if gemm.explanation.build)
    if builds:
        echo("\n" + next_steps(*(("for rows that torch runs", line) for line in builds)))


def _gpu_here() -> LocalGpu:
    if native_sm() is None:
        raise HostError("no NVIDIA GPU found here; name one, e.g. --gpu h100")
    from ...runtime.inspect.explain import gpu_here

    return gpu_here()
