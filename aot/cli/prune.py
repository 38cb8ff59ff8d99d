"""aot prune."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import click

from ...artifacts.errors import InputError
from ...artifacts.limits import printable
from ...artifacts.records import Bundle, Choice, Op, Problem
from ..bundle.assemble import BundleChoice, Provenance, VariantTable, assemble, united
from ..bundle.verify import sound
from ..models.load import load_models
from ..plan.families import Family, Pool, row_kernel_specs, ships_unchosen
from ..plan.plan import BuildPlan, plan, planned_on
from ..process.output import Written, check_out, replacing, write_bundle
from . import completion
from .options import as_json, file_path, print_json, wanted_ops
from .table import echo, size, table, tell, tell_one


@click.command()
@click.argument("bundle", type=click.Path())
@click.option(
    "--models",
    "-m",
    multiple=True,
    required=True,
    metavar="FILE|SPEC",
    shell_complete=completion.models,
    help="The models to keep, as for aot build. Repeatable.",
)
@click.option("--ops", metavar="LIST", help="Keep only some of the ops forward, dX, dW.  [default: all]")
@click.option(
    "--out",
    "-o",
    required=True,
    metavar="FILE",
    type=file_path,
    help="File of the smaller bundle. It can be the bundle itself.",
)
@as_json
def prune(bundle: str, models: tuple[str, ...], ops: str | None, out: Path, as_json: bool) -> None:
    """Reduce a bundle to some models: their problems and buckets, and the fallbacks for any other shape.

    Choices and times stay as they are. Variants that nothing uses any more are dropped.

    \b
    Examples:
      aot prune all-sm90.msgpack --models "Qwen/Qwen3-30B-A3B tp=1,2" -o qwen-sm90.msgpack
      aot prune all-sm90.msgpack --models models.txt --ops forward -o serving-sm90.msgpack
    """
    check_out(out)
    loaded = load_models(models, only=wanted_ops(ops))
    with replacing(out, [bundle], tell_one):
        before = sound(bundle)
        before_bytes = Path(bundle).stat().st_size
        pruned = prune_bundle(before, plan(loaded.shapes), bundle)
        written = write_bundle(out, pruned.bundle)
    notes = [*loaded.notes, *_notes(pruned)]
    if as_json:
        print_json(_to_dict(before, before_bytes, pruned, written, notes))
        return
    tell(notes)
    counts = _counts(before, pruned.bundle)
    rows = [*((name, *pair) for name, pair in counts.items()), ("size", size(before_bytes), size(written.size_bytes))]
    echo(table(("", "before", "after"), rows, "<>>"))
    same = " (unchanged)" if written.unchanged else ""
    saved = 1 - written.size_bytes / before_bytes
    echo(f"\n{printable(str(written.path))}{same}: {saved:.0%} smaller than {printable(bundle)}")


def _counts(before: Bundle, after: Bundle) -> dict[str, tuple[int, int]]:
    return {
        "models": (len(before.models), len(after.models)),
        "problems": (len(before.choices), len(after.choices)),
        "choices": (sum(map(len, before.choices.values())), sum(map(len, after.choices.values()))),
        "variants": (len(before.variants), len(after.variants)),
    }


def _notes(pruned: Pruned) -> list[str]:
    if not pruned.missing:
        return []
    cells = sum(map(len, pruned.missing.values()))
    first = next(iter(pruned.missing))
    return [
        f"the bundle lacks {cells} choices of these models, in {len(pruned.missing)} problems, such as {first}: "
        "they run by the cost model; aot build or aot merge adds them"
    ]


def _to_dict(
    before: Bundle, before_bytes: int, pruned: Pruned, written: Written, notes: list[str]
) -> dict[str, object]:
    return {
        "path": str(written.path),
        "unchanged": written.unchanged,
        "size_bytes": {"before": before_bytes, "after": written.size_bytes},
        **{name: {"before": was, "after": now} for name, (was, now) in _counts(before, pruned.bundle).items()},
        "missing": [{"problem": str(problem), "buckets": list(buckets)} for problem, buckets in pruned.missing.items()],
        "notes": notes,
    }


@dataclass(frozen=True, slots=True)
class Pruned:
    """The smaller bundle. ``missing`` are the cells of the plan that the bundle does not have."""

    bundle: Bundle
    missing: Mapping[Problem, tuple[int, ...]]


def prune_bundle(bundle: Bundle, plan: BuildPlan, where: str) -> Pruned:
    """Keep the problems and buckets of ``plan``, the variants chosen for them, and fallbacks and row kernels.

    The result is what a build for the plan alone would hold, with this bundle's choices. Its models are the plan's.

    Raises
    ------
    InputError
        if the bundle has none of the plan's problems.
    """
    wanted = planned_on(plan, (bundle.target.sm,)).buckets
    codes = VariantTable([bundle])
    claims: dict[Problem, list[BundleChoice]] = {}
    missing: dict[Problem, tuple[int, ...]] = {}
    for problem, buckets in plan.buckets.items():
        claimed = [codes.claim(bundle, choice) for choice in _choices(bundle, problem) if choice.bucket in buckets]
        if claimed:
            claims[problem] = claimed
        lacking = tuple(bucket for bucket in buckets if bucket not in {choice.bucket for choice in claimed})
        if problem in wanted and lacking:
            missing[problem] = lacking
    if not claims:
        raise InputError(
            f"bundle {where!r} has a choice for none of the {len(wanted)} problems of these models; it was "
            f"built for {_built_for(bundle, plan)}. aot build makes what is missing"
        )
    passes = row_kernel_specs(claims, bundle.target.sm, Pool(new_weights=True))
    families = {Family.of(problem) for problem in claims} | {Family.of(spec) for spec in passes}
    models = [
        model._replace(problems=tuple(problem for problem in model.problems if problem in claims))
        for model in plan.models
    ]
    making = Provenance(
        bundle.target,
        bundle.min_driver,
        bundle.producer,
        bundle.kernels,
        united(model for model in models if model.problems),
    )
    fallbacks = [
        place
        for place, code in enumerate(codes.codes)
        if ships_unchosen(code.variant) and Family.of(code.variant) in families
    ]
    return Pruned(assemble(making, codes, claims, fallbacks), missing)


def _choices(bundle: Bundle, problem: Problem) -> tuple[Choice, ...]:
    """The bundle's choices for a product, under either of its names."""
    names = (name for name in (problem, problem.transposed) if name is not None)
    return next((bundle.choices[name] for name in names if name in bundle.choices), ())


def _built_for(bundle: Bundle, plan: BuildPlan) -> str:
    """The bundle's models by name; those that the plan names too have their sharding, ops and rows."""
    names = {model.name for model in plan.models}
    same = [model for model in bundle.models if model.name in names]
    if not same:
        return ", ".join(sorted({model.name for model in bundle.models})) or "no model"
    lines = []
    for model in same:
        ops = ", ".join(op.value for op in Op if any(problem.op is op for problem in model.problems))
        buckets = [choice.bucket for problem in model.problems for choice in bundle.choices.get(problem, ())]
        rows = f", M near {min(buckets)}..{max(buckets)}" if buckets else ""
        lines.append(f"{model.name} tp={model.tp} ep={model.ep} {model.dtype.value} ({ops}{rows})")
    return "; ".join(lines)
