"""List the decisions of the shipped bundles for each problem: kernel, rows gathered first, fused silu, quantised x.

    python benchmarks/run.py decisions                            # a summary
    python benchmarks/run.py decisions --out decisions.json.xz    # every decision
    python benchmarks/run.py decisions --against decisions.json.xz    # fails if a decision differs from that file
    python benchmarks/run.py decisions --only decisions.json.xz    # of the problems in that file

benchmarks/results/decisions-sample.json.xz has some problems, for a test. Make it anew if their choices change:
give it as --only and as --out.

A cell is a problem and a bucket of rows on a GPU. It is decided for each top_k (the models' own, 0, 1, 2, 4 and 8; 0 is
for rows that no row kernel can gather) and for an index that is checked or not, some cells for unaligned tensors, too.
It needs no GPU: a decision depends on the GPU's name, SM count and memory alone.
"""

from __future__ import annotations

import argparse
import json
import lzma
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pretuned.artifacts.records import Fusion, Gpu, LocalGpu, Op, Problem, dtypes_of
from pretuned.kernels.chips import CHIPS
from pretuned.runtime.dispatch import decide, plans, rowops
from pretuned.runtime.dispatch.decide import Candidate, Decision
from pretuned.runtime.dispatch.places import Kind, Place
from pretuned.runtime.dispatch.snapshot import Snapshot

FOLDER = Path(__file__).resolve().parents[2] / "artifacts" / "bundles"
H100, H200 = Gpu("NVIDIA H100 80GB HBM3", 132, 81079, 13000), Gpu("NVIDIA H200", 132, 143155, 13000)
TOP_KS = (0, 1, 2, 4, 8)
UNALIGNED = 20  # every so many problems are also decided for unaligned tensors, because the cost model is slow
INDEXED = Fusion.GATHER | Fusion.SCATTER


def gpus(all_chips: bool) -> list[LocalGpu]:
    """Return the GPUs that the shipped times were measured on; with ``all_chips`` also the others of the chip table."""
    measured = [LocalGpu(90, H100), LocalGpu(90, H200)]
    if not all_chips:
        return measured
    others = [
        LocalGpu(gpu.sm, Gpu(f"NVIDIA {gpu.names[0]}", gpu.sm_count, gpu.memory_gib << 10, 13000)) for gpu in CHIPS
    ]
    return measured + [gpu for gpu in others if gpu.gpu.name not in (H100.name, H200.name)]


def shipped(snapshot: Snapshot, local: LocalGpu) -> dict[Problem, tuple[set[int], set[int]]]:
    """Return each problem of the bundles for a GPU with its buckets, and the top_k of its models."""
    shapes: dict[Problem, tuple[set[int], set[int]]] = {}
    for usable in snapshot.view(local, installed=True).usable:
        for problem in usable.bundle.problems():
            shapes.setdefault(problem, (set(), set()))[0].update(
                choice.bucket for choice in usable.bundle.find(problem)
            )
        for model in usable.bundle.models():
            for problem in model.problems:
                shapes[problem][1].add(model.top_k)
    return shapes


def name_of(candidate: Candidate | plans.Planned | None) -> str | None:
    """Return a variant's name: its bundle and its index there."""
    if candidate is None:
        return None
    index = candidate.variant if isinstance(candidate, plans.Planned) else candidate.index
    return f"{candidate.usable.path.stem}:{index}"


def kernel(snapshot: Snapshot, problem: Problem, bucket: int, local: LocalGpu, aligned: bool) -> str:
    """Return the kernel of a plain call, how it was found, and whether torch runs the call."""
    decision = decide.settle(snapshot, problem, bucket, local, aligned, False)
    if not isinstance(decision, Decision):
        return "none"
    best = decision.chosen
    torch = "" if best.torch_us is None else " torch"
    return f"{name_of(best)} {best.origin.name} {best.match.name} {best.source.value}{torch}"


def decided(
    snapshot: Snapshot, problem: Problem, bucket: int, local: LocalGpu, aligned: bool, top_ks: tuple[int, ...]
) -> Iterator[tuple[str, str | None]]:
    """Yield the decisions for one cell: (question, answer)."""
    yield "kernel", kernel(snapshot, problem, bucket, local, aligned)
    if Fusion.SILU in problem.fusion:
        for checks in (False, True):
            for top_k in top_ks if Fusion.GATHER in problem.fusion else (1,):
                fused = plans.fused_silu(snapshot, problem, bucket, local, aligned=aligned, top_k=top_k, checks=checks)
                yield f"silu k={top_k} checks={checks:d}", name_of(fused)
        return
    if Fusion.GATHER in problem.fusion and not problem.dtype.quantised:
        for fusion in (Fusion.GATHER, INDEXED):
            for checks in (False, True):
                for top_k in top_ks:
                    first = plans.rows_first(
                        snapshot, problem, bucket, local, top_k=top_k, fusion=fusion, aligned=aligned, checks=checks
                    )
                    yield f"first f={fusion.value} k={top_k} checks={checks:d}", name_of(first)
    if problem.dtype.quantises_x and problem.op is Op.FORWARD:
        other = dtypes_of(problem.dtype.value)[-1]
        for top_k in top_ks:
            coded = plans.quantised_x(snapshot, problem, other, bucket, local, top_k=top_k, aligned=aligned)
            yield f"codes k={top_k}", name_of(coded)


def key_of(problem: Problem, bucket: int, local: LocalGpu, aligned: bool) -> str:
    return f"{problem} | {bucket} | {local.gpu.name} | {'aligned' if aligned else 'unaligned'}"


def remembering() -> None:
    """Cache dispatch's decisions, because several questions need the same cell's. Nothing changes while this runs."""
    answers: dict[Any, Any] = {}

    def kept(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(snapshot: Snapshot, *args: Any, **options: Any) -> Any:
            key = (function, id(snapshot), args, tuple(sorted(options.items())))
            if key not in answers:
                answers[key] = function(snapshot, *args, **options)
            return answers[key]

        return call

    settle_once, ranked_once = kept(decide.settle), kept(rowops.ranked)
    for name, module in list(sys.modules.items()):
        if name.startswith("pretuned.runtime.dispatch.") and hasattr(module, "settle"):
            module.settle = settle_once  # type: ignore[attr-defined]
    rowops.ranked = ranked_once


def read(path: Path) -> dict[str, dict[str, str | None]]:
    """The decisions that ``--out`` wrote."""
    decisions: dict[str, dict[str, str | None]] = json.loads(lzma.decompress(path.read_bytes()))
    return decisions


def dump(
    locals_: list[LocalGpu], *, step: int = 1, only: set[str] | None = None, log: bool = False
) -> dict[str, dict[str, str | None]]:
    """The decisions of each cell; ``step`` takes every n-th problem, ``only`` those of these names."""
    answers: dict[str, dict[str, str | None]] = {}
    for local in locals_:
        begun = time.monotonic()
        snapshot = Snapshot([Place(Kind.INSTALLED, FOLDER)])
        cells = sorted(shipped(snapshot, local).items(), key=lambda item: item[0].sort_key)
        for at, (problem, (buckets, own)) in enumerate(cells[::step]):
            top_ks = tuple(sorted({*TOP_KS, *own}))
            twin = problem.transposed if Fusion.GATHER in problem.fusion else None
            for name in (problem, twin) if twin is not None else (problem,):
                if only is not None and str(name) not in only:
                    continue
                for bucket in sorted(buckets):
                    for aligned in (True, False) if at % UNALIGNED == 0 else (True,):
                        decisions_of = dict(
                            decided(snapshot, name, bucket, local, aligned, top_ks if aligned else (1,))
                        )
                        answers[key_of(name, bucket, local, aligned)] = decisions_of
        if log:
            print(f"{local.gpu.name}: {time.monotonic() - begun:.0f} s", file=sys.stderr)
    return answers


def summary(answers: dict[str, dict[str, str | None]]) -> dict[str, dict[str, int]]:
    """Count for each kind of question the decisions, and the answers that differ from a plain call."""
    table: dict[str, Counter[str]] = {}
    for key, decisions_of in answers.items():
        gpu, aligned = key.split(" | ")[2:]
        by_kind: dict[str, list[str | None]] = {}
        for asked, answer in decisions_of.items():
            by_kind.setdefault(asked.partition(" k=")[0], []).append(answer)
        for kind, values in by_kind.items():
            row = table.setdefault(f"{gpu}, {aligned}, {kind}", Counter())
            row["cells"] += 1
            row["decisions"] += len(values)
            if kind != "kernel":
                row["taken"] += sum(value is not None for value in values)
                row["cells that differ by top_k or checks"] += len(set(values)) > 1
    return {name: dict(row) for name, row in table.items()}


def differences(answers: dict[str, Any], reference: dict[str, Any]) -> list[str]:
    """Return a line for each decision that differs from the reference."""
    lines = []
    for key in sorted(answers.keys() | reference.keys()):
        now, before = answers.get(key, {}), reference.get(key, {})
        lines += [
            f"{key}: {asked}: {before.get(asked, 'not asked')} before, {now.get(asked, 'not asked')} now"
            for asked in sorted(now.keys() | before.keys())
            if now.get(asked, "not asked") != before.get(asked, "not asked")
        ]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="write every decision to this .json.xz")
    parser.add_argument("--against", type=Path, help="a .json.xz of --out to compare with")
    parser.add_argument(
        "--every-gpu", action="store_true", help="every GPU of the table of chips, not H100 and H200 alone"
    )
    parser.add_argument("--every", type=int, default=1, help="one problem of so many")
    parser.add_argument("--only", type=Path, help="the problems of this .json.xz of --out alone")
    args = parser.parse_args()
    remembering()
    only = None if args.only is None else {key.partition(" | ")[0] for key in read(args.only)}
    answers = dump(gpus(args.every_gpu), step=args.every, only=only, log=True)
    if args.out is not None:
        args.out.write_bytes(lzma.compress(json.dumps(answers, separators=(",", ":")).encode()))
    for name, row in summary(answers).items():
        print(f"{name}: {', '.join(f'{count:,} {what}' for what, count in row.items())}")
    text = json.dumps(answers, separators=(",", ":")).encode()
    print(f"{len(answers):,} cells, {sum(map(len, answers.values())):,} decisions, {len(text):,} bytes of JSON")
    if args.against is not None:
        reference = read(args.against)
        if args.every > 1 or only is not None:
            reference = {key: reference[key] for key in answers if key in reference}
        lines = differences(answers, reference)
        print("\n".join(lines[:50]))
        print(f"{len(lines):,} decisions differ from {args.against}")
        sys.exit(bool(lines))


if __name__ == "__main__":
    main()
