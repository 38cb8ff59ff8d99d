"""aot prune."""

from __future__ import annotations

from pathlib import Path

import click

from ...artifacts.names import printable
from ...artifacts.records.bundle import Bundle
from ..bundle.prune import Pruned
from ..bundle.prune import prune as prune_bundle
from ..bundle.verify import sound
from ..models.load import load_models
from ..plan.plan import plan
from ..process.output_dir import replacing
from ..process.output_file import Written, check_out, write_bundle
from . import completion
from .echo import echo, tell, tell_one
from .options import as_json, file_path, print_json, wanted_ops
from .table import size, table


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
