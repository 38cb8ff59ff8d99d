"""aot plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from ...artifacts.errors import HostError
from ...artifacts.records import Problem
from ...kernels.arch import Feature, arch_of
from ...kernels.entry import slow_rows
from ...kernels.rowops import RowOpSpec
from ...kernels.spec import Spec
from ..compile.cache import CompileCache
from ..compile.pool import default_workers
from ..compile.shipped import Shipped
from ..models.layer import LayerShard
from ..models.load import load_models
from ..plan.families import Pool, families, fused, to_compile
from ..plan.plan import BuildPlan, planned_on, shapes_on
from .options import as_json, cache_of, load, print_json, quiet, wanted_ops, what_to_build
from .table import duration, echo, paragraph, size, table, tell

# CPU seconds of a variant with its assembler, measured with Triton 3.7 on two busy server cores.
_VARIANT_S = 0.7
_SPECIALIZED_S = 2.1
_PASS_S = 0.4
_START_S = 1.5  # the workers import Triton
_TAKE_S = 1.5  # start, and read the shipped candidates of a capability
_PROBLEM_S = 0.01  # ranking and selecting, for a problem and capability
_CUBIN_BYTES = 37_000
_TMA_CUBIN_BYTES = 50_000  # sm_90 and later
_PASS_BYTES = 17_000
_CHOICE_BYTES = 24
_SHIPPED = 7  # typical number of variants that ship for an op, dtype, layout and fusion; fewer if there are few shapes


@dataclass(frozen=True, slots=True)
class Estimate:
    """The estimate for one capability: ``shipped`` variants come compiled, ``variants`` are to be compiled.

    ``cached`` of them are in the compile cache; None if no Triton is installed to tell.
    """

    sm: int
    problems: int
    choices: int
    shipped: int
    variants: int
    cached: int | None
    seconds: float
    size_bytes: int

    def to_dict(self) -> dict[str, object]:
        """The estimate as plain values for JSON."""
        return {
            "sm": self.sm,
            "problems": self.problems,
            "choices": self.choices,
            "shipped": self.shipped,
            "variants": self.variants,
            "cached": self.cached,
            "expected_seconds": round(self.seconds, 1),
            "expected_size_bytes": self.size_bytes,
        }


def estimate(
    plan: BuildPlan,
    sms: Sequence[int],
    cache: CompileCache | None,
    workers: int | None = None,
    shipped: Callable[[int], Shipped] = Shipped.in_packages,
) -> list[Estimate]:
    """Estimate each capability; the times add up, as the capabilities share the workers."""
    estimates = []
    for sm in sms:
        here = planned_on(plan, (sm,))
        wanted = to_compile(here.problems, sm, Pool())
        passes = sum(isinstance(spec, RowOpSpec) for spec in wanted)
        count = len(families(here.problems))
        there = shipped(sm)
        needed = [spec for spec in wanted if not there.has(spec, sm)]
        fresh = _fresh(needed, sm, cache)
        cached = None if fresh is None else len(needed) - len(fresh)
        fresh = needed if fresh is None else fresh
        seconds = sum(map(_cpu_s, fresh)) / (workers or default_workers()) + _PROBLEM_S * len(here.problems)
        seconds += _TAKE_S + (_START_S if fresh and sm == sms[0] else 0.0)
        size = count * _SHIPPED * (_TMA_CUBIN_BYTES if arch_of(sm).has(Feature.TMA) else _CUBIN_BYTES)
        size += passes * _PASS_BYTES + here.choices * _CHOICE_BYTES
        estimates.append(
            Estimate(
                sm, len(here.problems), here.choices, len(wanted) - len(needed), len(needed), cached, seconds, size
            )
        )
    return estimates


def _fresh(
    wanted: Sequence[Spec | RowOpSpec], sm: int, cache: CompileCache | None
) -> Sequence[Spec | RowOpSpec] | None:
    """The variants that are not cached; None without Triton, as cache keys need its version."""
    if cache is None:
        return wanted
    try:
        return [spec for spec in wanted if not cache.has(spec, sm)]
    except HostError:
        return None


def _cpu_s(spec: Spec | RowOpSpec) -> float:
    """CPU seconds to compile a variant."""
    if isinstance(spec, RowOpSpec):
        return _PASS_S
    return _SPECIALIZED_S if spec.config.schedule.warp_specialized else _VARIANT_S


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
