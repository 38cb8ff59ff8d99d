"""aot diff."""

from __future__ import annotations

from collections.abc import Sized
from pathlib import Path

import click

from ...artifacts.packed import split
from ...artifacts.records import Model, Problem, Variant
from ..bundle.assemble import config_text, label
from ..bundle.diff import Change, Changes, Side, time_ratio
from ..bundle.diff import diff as changes_between
from ..bundle.verify import sound
from .exits import ENVIRONMENT, OK
from .options import as_json, print_json
from .table import echo, size, table

_DIFFERENT = ENVIRONMENT  # 1, like git diff --exit-code


@click.command()
@click.argument("old", type=click.Path(), metavar="A")
@click.argument("new", type=click.Path(), metavar="B")
@click.option("--choices", "list_all", is_flag=True, help="List every changed choice, not only every changed problem.")
@click.option("--exit-code", is_flag=True, help="Exit with 1 if the bundles differ, else with 0, as git diff does.")
@as_json
def diff(old: str, new: str, list_all: bool, exit_code: bool, as_json: bool) -> int:
    """Compare bundle A with bundle B: models, problems, choices, variants, sizes.

    \b
    Examples:
      aot diff old.msgpack new.msgpack
      aot diff old.msgpack new.msgpack --choices
      aot diff --exit-code shipped.msgpack rebuilt.msgpack --json
    """
    before, after = sound(old), sound(new)
    changes = changes_between(before, after)
    sizes = Path(split(old)[0]).stat().st_size, Path(split(new)[0]).stat().st_size
    if as_json:
        print_json({"differ": changes.differ, "size_bytes": list(sizes), **_to_dict(changes)})
    elif not changes.differ:
        echo(f"no difference in content: {size(sizes[0])} and {size(sizes[1])}")
    else:
        _show(changes, sizes, list_all)
    return _DIFFERENT if exit_code and changes.differ else OK


def _show(changes: Changes, sizes: tuple[int, int], list_all: bool) -> None:
    echo(_summary(changes))
    echo()
    facts = [(name, old or "-", new or "-") for name, (old, new) in changes.facts.items()]
    facts.append(("size", size(sizes[0]), size(sizes[1])))
    echo(table(("", "A", "B"), facts))
    _section(
        "models",
        [
            *(("-", _model(model), "") for model in changes.models_removed),
            *(("+", _model(model), "") for model in changes.models_added),
            *(
                ("~", _model(new), f"{len(old.problems)} -> {len(new.problems)} problems, k {old.top_k} -> {new.top_k}")
                for old, new in changes.models_changed
            ),
        ],
    )
    _section(
        "problems",
        [
            *(("-", str(problem)) for problem in changes.problems_removed),
            *(("+", str(problem)) for problem in changes.problems_added),
        ],
    )
    if changes.choices_added or changes.choices_removed:
        echo(f"\nchoices of problems in both: {changes.choices_removed} only in A, {changes.choices_added} only in B")
    if changes.choices:
        echo(f"\nchoices that changed: {len(changes.choices)}")
        echo(_cells(changes) if list_all else _by_problem(changes))
        if not list_all:
            echo("--choices lists each of them")
    _section(
        "variants",
        [
            *(
                ("-", label(variant), variant.revision, variant.cubin_sha256.hex()[:12], size(variant.cubin_bytes))
                for variant in changes.variants_removed
            ),
            *(
                ("+", label(variant), variant.revision, variant.cubin_sha256.hex()[:12], size(variant.cubin_bytes))
                for variant in changes.variants_added
            ),
            *(
                (
                    "~",
                    label(new),
                    f"{old.revision} -> {new.revision}" if old.revision != new.revision else new.revision,
                    f"{old.cubin_sha256.hex()[:12]} -> {new.cubin_sha256.hex()[:12]}",
                    f"{size(old.cubin_bytes)} -> {size(new.cubin_bytes)}",
                )
                for old, new in changes.recompiled
            ),
        ],
        ("", "variant", "revision", "cubin", "size"),
    )
    (gone, gone_bytes), (come, come_bytes) = changes.cubins_removed, changes.cubins_added
    echo(f"\ncubins: {gone} only in A ({size(gone_bytes)}), {come} only in B ({size(come_bytes)})")


def _summary(changes: Changes) -> str:
    """The result in a line, before the lists."""
    parts = [
        _counts("model", changes.models_removed, changes.models_added, changes.models_changed),
        _counts("problem", changes.problems_removed, changes.problems_added),
        _counts("variant", changes.variants_removed, changes.variants_added, changes.recompiled),
    ]
    if changes.choices:
        took = f", taking {time_ratio(changes.choices):.2f}x the time"
        parts.append(f"{_number(len(changes.choices), 'choice')} changed{took}")
    return "from A to B: " + ("; ".join(filter(None, parts)) or "another version, or other notes, alone")


def _counts(what: str, gone: Sized, come: Sized, changed: Sized = ()) -> str:
    counts = [(len(gone), "gone"), (len(come), "new"), (len(changed), "changed")]
    named = [(count, word) for count, word in counts if count]
    return ", ".join(
        f"{_number(count, what) if i == 0 else f'{count:,}'} {word}" for i, (count, word) in enumerate(named)
    )


def _number(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def _section(title: str, rows: list[tuple[object, ...]], head: tuple[str, ...] = ()) -> None:
    if not rows:
        return
    echo(f"\n{title}: - only in A, + only in B, ~ changed")
    if head:
        echo(table(head, rows))
    else:
        echo("\n".join("  ".join(map(str, row)).rstrip() for row in rows))


def _model(model: Model) -> str:
    return f"{model.name} tp={model.tp} ep={model.ep} {model.dtype.value}"


def _by_problem(changes: Changes) -> str:
    groups: dict[Problem, list[Change]] = {}
    for change in changes.choices:
        groups.setdefault(change.problem, []).append(change)
    parts = "variant", "code", "source", "gpu", "torch", "runner-up", "plan"
    rows = []
    for problem, cells in groups.items():
        counts = {part: sum(part in change.what for change in cells) for part in parts}
        buckets = f"{cells[0].bucket}..{cells[-1].bucket}" if len(cells) > 1 else cells[0].bucket
        rows.append(
            (
                problem,
                len(cells),
                buckets,
                *(count or "-" for count in counts.values()),
                f"{100 * (time_ratio(cells) - 1):+.1f} %",
            )
        )
    head = ("problem", "changed", "M near", *parts, "time")
    return table(head, rows, "<>>>>>>>>>>")


def _cells(changes: Changes) -> str:
    rows = []
    for change in changes.choices:
        old, new = change.old, change.new
        rows.append(
            (
                change.problem,
                change.bucket,
                _was({"variant", "torch"} & {*change.what}, _config(old), _config(new)),
                _was(old.source is not new.source or old.gpu != new.gpu, _source(old), _source(new)),
                f"{old.time_ns / 1e3:.2f}",
                f"{new.time_ns / 1e3:.2f}",
                f"{100 * (new.time_ns / old.time_ns - 1):+.1f} %",
                ", ".join(change.what),
            )
        )
    return table(("problem", "M near", "config", "source", "A us", "B us", "time", "changed"), rows, "<><<>>>")


def _config(side: Side) -> str:
    return ("torch, else " if side.torch else "") + config_text(side.variant)


def _was(changed: object, old: str, new: str) -> str:
    return f"{old} -> {new}" if changed else new


def _source(side: Side) -> str:
    return side.source.value + (f" {side.gpu.name}" if side.gpu else "")


def _to_dict(changes: Changes) -> dict[str, object]:
    return {
        "facts": {name: {"old": old, "new": new} for name, (old, new) in changes.facts.items()},
        "models": {
            "added": list(map(_model, changes.models_added)),
            "removed": list(map(_model, changes.models_removed)),
            "changed": [
                {
                    "model": _model(new),
                    "problems": [len(old.problems), len(new.problems)],
                    "top_k": [old.top_k, new.top_k],
                }
                for old, new in changes.models_changed
            ],
        },
        "problems": {
            "added": list(map(str, changes.problems_added)),
            "removed": list(map(str, changes.problems_removed)),
        },
        "choices_unmatched": {"added": changes.choices_added, "removed": changes.choices_removed},
        "choices": [
            {
                "problem": str(change.problem),
                "M_near": change.bucket,
                "changed": list(change.what),
                "old": _side(change.old),
                "new": _side(change.new),
            }
            for change in changes.choices
        ],
        "variants": {
            "added": list(map(_variant, changes.variants_added)),
            "removed": list(map(_variant, changes.variants_removed)),
            "recompiled": [{"old": _variant(old), "new": _variant(new)} for old, new in changes.recompiled],
        },
        "cubins": {
            "added": {"count": changes.cubins_added[0], "bytes": changes.cubins_added[1]},
            "removed": {"count": changes.cubins_removed[0], "bytes": changes.cubins_removed[1]},
        },
    }


def _side(side: Side) -> dict[str, object]:
    return {
        **_variant(side.variant),
        "source": side.source.value,
        "time_us": round(side.time_ns / 1000, 3),
        "torch": side.torch,
        "gpu": side.gpu.name if side.gpu else None,
    }


def _variant(variant: Variant) -> dict[str, object]:
    return {
        "variant": label(variant),
        "revision": variant.revision,
        "cubin_sha256": variant.cubin_sha256.hex(),
        "cubin_bytes": variant.cubin_bytes,
    }
