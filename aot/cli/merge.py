"""aot merge."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import click

from ...artifacts.limits import printable
from ...artifacts.records import Bundle, Source
from ..bundle.assemble import BundleChoice, VariantTable, label
from ..bundle.merge import Conflict, Merged
from ..bundle.merge import merge as merge_bundles
from ..bundle.verify import sound
from ..process.output import Written, check_out, replacing, write_bundle
from .options import as_json, file_path, print_json
from .table import echo, size, table, tell, tell_one


@click.command()
@click.argument("bundles", nargs=-1, required=True, type=click.Path(), metavar="A B [C ...]")
@click.option(
    "--out",
    "-o",
    required=True,
    metavar="FILE",
    type=file_path,
    help="File of the merged bundle. It can be one of the inputs.",
)
@click.option("--conflicts", "list_all", is_flag=True, help="List every cell in which the bundles differ.")
@as_json
def merge(bundles: tuple[str, ...], out: Path, list_all: bool, as_json: bool) -> None:
    """Merge bundles of one GPU capability: the best choice for each problem, bucket and GPU.

    A measured choice wins over a modelled one, then the later kernel revision, then the lower time. Choices measured on
    different GPUs are all kept: each GPU runs its own. The order does not matter. Unused variants are dropped.

    \b
    Examples:
      aot merge monday.msgpack tuesday.msgpack -o both.msgpack
      aot merge bundles/pretuned-sm90.msgpack tuned.msgpack -o bundles/pretuned-sm90.msgpack
      aot merge h200.msgpack h100.msgpack -o pretuned-sm90.msgpack --json
    """
    check_out(out)
    paths = tuple(dict.fromkeys(bundles))
    with replacing(out, paths, tell_one):
        loaded = {path: sound(path) for path in paths}
        merged = merge_bundles(loaded)
        written = write_bundle(out, merged.bundle)
    if as_json:
        print_json(_to_dict(merged, paths, written))
        return
    tell(merged.notes)
    _show(merged, paths, [len(bundle.choices) for bundle in loaded.values()], written, list_all)


def _show(merged: Merged, paths: Sequence[str], problems: Sequence[int], written: Written, list_all: bool) -> None:
    bundle = merged.bundle
    rows = [(path, count, cells) for path, count, cells in zip(paths, problems, merged.taken, strict=True)]
    echo(table(("from", "problems", "choices taken"), rows, "<>>"))
    if merged.conflicts:
        echo("\nwhere they differ")
        counts = Counter(conflict.reason for conflict in merged.conflicts)
        changed = (conflict for conflict in merged.conflicts if conflict.winner.variant != conflict.loser.variant)
        other = Counter(conflict.reason for conflict in changed)
        rows = [(reason.value, counts[reason], other[reason]) for reason in counts]
        echo(table(("decided by", "choices", "another variant"), sorted(rows), "<>>"))
        if list_all:
            echo()
            echo(_listed(merged, paths))
        else:
            echo("--conflicts lists each of them")
    measured = sum(choice.source is Source.MEASURED for row in bundle.choices.values() for choice in row)
    choices = sum(map(len, bundle.choices.values()))
    same = " (unchanged)" if written.unchanged else ""
    echo(
        f"\n{printable(str(written.path))}{same}: {bundle.target}, {len(bundle.models)} models, "
        f"{len(bundle.choices)} problems, {choices} choices ({measured} measured{_on(bundle)}), "
        f"{len(bundle.variants)} variants, "
        f"{size(written.size_bytes)}; {merged.unused} variants dropped as unused"
    )


def _on(bundle: Bundle) -> str:
    names = dict.fromkeys(gpu.name for gpu in bundle.gpus)
    return f" on {', '.join(names)}" if names else ""


def _listed(merged: Merged, paths: Sequence[str]) -> str:
    head = ("problem", "M near", "decided by", "kept", "dropped", "from", "not from")
    rows = [
        (
            conflict.problem,
            conflict.bucket,
            conflict.reason.value,
            _said(conflict.winner, merged.codes),
            _said(conflict.loser, merged.codes),
            paths[conflict.kept],
            paths[conflict.dropped],
        )
        for conflict in merged.conflicts
    ]
    return table(head, rows, "<>")


def _said(claim: BundleChoice, codes: VariantTable) -> str:
    gpu = f" on {claim.gpu.name}" if claim.gpu else ""
    torch = f", torch {claim.torch_ns / 1000:.2f} us" if claim.torch_ns else ""
    return f"{label(codes[claim.variant])}: {claim.source.value} {claim.time_ns / 1000:.2f} us{torch}{gpu}"


def _to_dict(merged: Merged, paths: Sequence[str], written: Written) -> dict[str, object]:
    bundle = merged.bundle
    measured = sum(choice.source is Source.MEASURED for row in bundle.choices.values() for choice in row)
    return {
        "path": str(written.path),
        "size_bytes": written.size_bytes,
        "unchanged": written.unchanged,
        "target": str(bundle.target),
        "models": len(bundle.models),
        "problems": len(bundle.choices),
        "choices": sum(map(len, bundle.choices.values())),
        "measured": measured,
        "gpus": [gpu.name for gpu in bundle.gpus],
        "variants": len(bundle.variants),
        "unused_variants": merged.unused,
        "inputs": [{"path": path, "choices_taken": taken} for path, taken in zip(paths, merged.taken, strict=True)],
        "agreed": merged.agreed,
        "conflicts": [_conflict(conflict, merged.codes, paths) for conflict in merged.conflicts],
        "over_the_limit": [
            {"op": group.op.value, "dtype": group.dtype.value, "configs": group.configs} for group in merged.too_many
        ],
        "notes": list(merged.notes),
    }


def _conflict(conflict: Conflict, codes: VariantTable, paths: Sequence[str]) -> dict[str, object]:
    return {
        "problem": str(conflict.problem),
        "M_near": conflict.bucket,
        "decided_by": conflict.reason.name.lower(),
        "kept": {"path": paths[conflict.kept], **_claim(conflict.winner, codes)},
        "dropped": {"path": paths[conflict.dropped], **_claim(conflict.loser, codes)},
    }


def _claim(claim: BundleChoice, codes: VariantTable) -> dict[str, object]:
    variant = codes[claim.variant]
    return {
        "variant": label(variant),
        "revision": variant.revision,
        "cubin_sha256": variant.cubin_sha256.hex(),
        "source": claim.source.value,
        "time_us": round(claim.time_ns / 1000, 3),
        "torch_us": None if claim.torch_ns is None else round(claim.torch_ns / 1000, 3),
        "gpu": claim.gpu.name if claim.gpu else None,
    }
