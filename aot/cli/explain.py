"""aot explain."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import click

from ...artifacts.errors import HostError
from ...artifacts.records import DType, Fusion, Layout, LocalGpu, Op, Problem
from ...kernels.registry import has_code
from ...runtime.inspect.explanation import Explanation
from ...runtime.inspect.query import suits
from ..models.layer import LayerGemm, LayerShard
from ..models.load import load_models
from ..plan.plan import problems_of, shapes_on
from ..plan.targets import parse_gpu
from ..process.gpus import native_sm
from . import completion
from .options import as_json, count_list, print_json, wanted_ops
from .table import echo, next_steps, table, tell


@dataclass(frozen=True, slots=True)
class ExplainedGemm:
    """One GEMM of one shard for a number of tokens, and the explanation of what would run it."""

    shard: LayerShard
    gemm: LayerGemm
    tokens: int
    explanation: Explanation

    def to_dict(self) -> dict[str, Any]:
        """The explanation as plain values, with the shard and GEMM that it is of."""
        shard = self.shard
        return {
            "model": shard.name,
            "tp": shard.tp,
            "ep": shard.ep,
            "gemm": self.gemm.role,
            "tokens": self.tokens,
            **self.explanation.to_dict(),
        }


def explained(shards: Iterable[LayerShard], tokens: Sequence[int], local: LocalGpu) -> Iterator[ExplainedGemm]:
    """Explain each GEMM of each shard, in every op and dtype that the shard is built in, for each number of tokens.

    GEMM 1 of a forward gathers its rows, and has silu in its epilogue if there is code for that, as in ``moe_mlp``.
    """
    from ...runtime.inspect.explain import explain_on  # imports torch, which takes seconds: aot --help needs none

    for shard in shapes_on(shards, (local.sm,)):
        for dtype in shard.dtypes:
            planned = set(problems_of(shard, dtype))
            is_prepared = dtype.quantised and has_code(Op.FORWARD, dtype, local.sm, Layout.NK)
            for op in shard.ops if not dtype.quantised else [op for op in shard.ops if op is not Op.DW]:
                for place, gemm in enumerate(shard.gemms(dtype if is_prepared else None)):
                    problem = _problem(op, dtype, gemm, shard, planned, first=not place)
                    for count in tokens:
                        rows = replace(shard, tokens=(count, count)).rows[1]
                        top_k = shard.experts_per_token
                        explanation = explain_on(problem, rows, local, aligned=suits(problem), top_k=top_k)
                        yield ExplainedGemm(shard, gemm, count, explanation)


def _problem(
    op: Op, dtype: DType, gemm: LayerGemm, shard: LayerShard, planned: set[Problem], *, first: bool
) -> Problem:
    plain = Problem(op, dtype, gemm.E, gemm.N, gemm.K, shard.layouts[0])
    if op is not Op.FORWARD or not first:
        return plain
    gated = plain._replace(fusion=Fusion.GATHER | Fusion.SILU)
    return gated if gated in planned else plain._replace(fusion=Fusion.GATHER)


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
