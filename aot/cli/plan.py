"""aot plan."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from ...artifacts.records import Problem
from ...kernels.entry import slow_rows
from ..build.estimate import estimate
from ..models.layer import LayerShard
from ..models.load import load_models
from ..plan.families import fused
from ..plan.plan import BuildPlan, shapes_on
from .echo import echo, tell
from .options import as_json, cache_of, load, print_json, quiet, wanted_ops, what_to_build
from .table import duration, paragraph, size, table

_SHOWN = 8  # names of models in the summary


@click.command()
@what_to_build
@click.option("--problems", is_flag=True, help="List every problem, and the models that need it.")
@quiet
@as_json
def plan(
    models: tuple[str, ...],
    sm: str,
    ops: str | None,
    cache_dir: Path | None,
    no_cache: bool,
    problems: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Show what aot build would do: problems, variants, expected time and size. Nothing is built.

    \b
    Examples:
      aot plan --models models.txt --sm 80,90
      aot plan --models models.txt --sm 90 --problems
      aot plan --models "Qwen/Qwen3-30B-A3B tp=1,2,4 ep=1,8" --sm 90 --json
    """
    planned, sms, notes = load(models, sm, ops)
    notes = (*notes, *dict.fromkeys(slow for problem in planned.problems if (slow := slow_rows(problem))))
    shards = shapes_on(load_models(models, only=wanted_ops(ops)).shapes, sms)
    estimates = estimate(planned, sms, cache_of(cache_dir, no_cache))
    if as_json:
        print_json(
            {
                "problems": _problems(planned),
                "weights": [_formats(shard) for shard in shards],
                "capabilities": [row.to_dict() for row in estimates],
                "notes": list(notes),
            }
        )
        return
    if not quiet:
        tell(notes)
    capabilities = [
        (
            f"sm_{row.sm}",
            row.problems,
            row.choices,
            row.shipped,
            row.variants,
            "?" if row.cached is None else row.cached,
            duration(row.seconds),
            size(row.size_bytes),
        )
        for row in estimates
    ]
    head = ("for", "problems", "choices", "shipped variants", "to compile", "cached", "expected time", "expected size")
    echo(table(head, capabilities, "<" + ">" * 7))
    if not quiet:
        _tell_of(shards)
    if problems:
        _show_problems(planned, shards)


def _tell_of(shards: Sequence[LayerShard]) -> None:
    formats: dict[str, dict[str, None]] = {}
    for shard in shards:
        formats.setdefault(shard.name, {}).update(dict.fromkeys(shard.built_in))
    names = [f"{name} ({', '.join(row)})" for name, row in formats.items()]
    some = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
    advice = "Time and size are estimates. Nothing was built: aot build with the same options builds it."
    echo(f"\n{paragraph(f'For {some}; --problems lists all. {advice}')}")


def _show_problems(planned: BuildPlan, shards: Sequence[LayerShard]) -> None:
    formats = dict.fromkeys((shard.name, ",".join(shard.weights), ",".join(shard.built_in)) for shard in shards)
    echo()
    echo(table(("model", "weights", "built in"), list(formats)))
    users = _users(planned)
    rows = [
        (
            problem.op.value,
            problem.dtype.value,
            problem.layout.value,
            fused(problem.fusion) or "-",
            problem.E,
            problem.N,
            problem.K,
            f"{buckets[0]}..{buckets[-1]}",
            ", ".join(users[problem]),
        )
        for problem, buckets in planned.buckets.items()
    ]
    echo()
    echo(table(("op", "dtype", "w", "fused", "E", "N", "K", "buckets of M", "for"), rows, "<<<<>>>>"))


def _users(planned: BuildPlan) -> dict[Problem, list[str]]:
    users: dict[Problem, list[str]] = {problem: [] for problem in planned.problems}
    for model in planned.models:
        for problem in model.problems:
            users[problem].append(f"{model.name} tp={model.tp} ep={model.ep}")
    return users


def _formats(shard: LayerShard) -> dict[str, object]:
    return {
        "model": shard.name,
        "tp": shard.tp,
        "ep": shard.ep,
        "weights": list(shard.weights),
        "built_in": list(shard.built_in),
    }


def _problems(planned: BuildPlan) -> list[dict[str, object]]:
    users = _users(planned)
    return [
        {
            "op": problem.op.value,
            "dtype": problem.dtype.value,
            "layout": problem.layout.value,
            "fused": fused(problem.fusion),
            "E": problem.E,
            "N": problem.N,
            "K": problem.K,
            "buckets": list(buckets),
            "models": users[problem],
        }
        for problem, buckets in planned.buckets.items()
    ]
