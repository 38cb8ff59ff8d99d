"""Compare a bundle's choices with all candidates that were timed in a journal.

    python benchmarks/run.py shipped artifacts/bundles/catalogue-sm90.msgpack \\
        benchmarks/results/catalogue-h200.journal.xz

It prints how much longer the choices take than:

- the fastest candidate by the times, and the fastest that beats the choice by more than noise (duel or times);
- the fastest candidate of each record that has the choice.

It also prints how often the fastest shipped variant is near the least estimate, and the choices against torch's
grouped_mm. --kinds compares the best config of a kind with the best of all others. If a bundle has choices for several
GPUs, those of the journal's GPU count, or of --gpu. --models FILE limits it to choices of these models.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from pretuned.aot.bundle.assemble import Provenance, VariantTable, assemble
from pretuned.aot.journal.file import Contents, read_journal
from pretuned.aot.journal.records import LONG_NS, Measured
from pretuned.aot.journal.timings import CellTimes, Timings, cell_of
from pretuned.aot.models.load import load_models
from pretuned.aot.plan.families import ships_unchosen
from pretuned.aot.plan.plan import plan, planned_on
from pretuned.aot.tune.scheduler import LIKELY
from pretuned.aot.tune.shortlist import SHARE
from pretuned.aot.tune.space import TuningSpace
from pretuned.artifacts import codec
from pretuned.artifacts.bundle_file import BundleFile, open_bundle, open_bytes
from pretuned.artifacts.errors import PretunedError
from pretuned.artifacts.limits import MAX_DIM
from pretuned.artifacts.records import Layout, Op, Problem, Variant
from pretuned.kernels.spec import Cache, Config, Schedule, TileRows

OVER = 1.02
ROWS = (8, 128, 4096)  # upper ends of the ranges of rows of all experts
KINDS: dict[str, Callable[[Config], bool]] = {
    "fitted": lambda config: config.rows is TileRows.FITTED,
    "pingpong": lambda config: config.schedule is Schedule.PINGPONG and config.rows is TileRows.FIXED,
    "streamed": lambda config: config.cache is Cache.EVICT_FIRST,
}


def of_gpu(opened: BundleFile, name: str, models: Sequence[str] = ()) -> BundleFile:
    """Return the bundle with the choices of one GPU and the variants that they use.

    ``models`` names lists of models: only their choices stay.

    Raises
    ------
    ValueError
        if the bundle has several GPUs' choices, but none of this GPU.
    """
    if len(opened.gpus) < 2 and not models:
        return opened
    bundle = opened.load()
    if len(bundle.gpus) > 1 and name not in {gpu.name for gpu in bundle.gpus}:
        raise ValueError(f"no choice is of {name}, but of {', '.join(gpu.name for gpu in bundle.gpus)}: see --gpu")
    codes = VariantTable([bundle])
    sm = bundle.target.sm
    wanted = planned_on(plan(load_models(models).shapes), (sm,)).buckets if models else None
    claims = {
        problem: [
            codes.claim(bundle, choice)
            for choice in row
            if (choice.gpu is None or len(bundle.gpus) < 2 or bundle.gpus[choice.gpu].name == name)
            and (wanted is None or choice.bucket in wanted.get(problem, ()))
        ]
        for problem, row in bundle.choices.items()
    }
    making = Provenance(bundle.target, bundle.min_driver, bundle.producer, bundle.kernels, ())
    unchosen = [place for place in codes.places(bundle) if ships_unchosen(codes[place])]
    reduced = assemble(making, codes, {problem: row for problem, row in claims.items() if row}, unchosen)
    return open_bytes(codec.encode(reduced), opened.path)


def losses(bundle: BundleFile, contents: Contents, *, raw: bool) -> list[tuple[float, float, str]]:
    """Return (time over the fastest candidate's, us, cell) of each measured choice, the worst first.

    With ``raw`` all candidates count, else those that are faster by more than noise.
    """
    rows = (
        (loss_of(cell, chosen, raw=raw), cell.times_ns[chosen] / 1000, f"{problem} M={bucket}")
        for problem, bucket, cell, chosen in timed(bundle, contents)
    )
    return sorted(rows, reverse=True)


def timed(bundle: BundleFile, contents: Contents) -> Iterator[tuple[Problem, int, CellTimes, bytes]]:
    """Yield (problem, bucket, the cell's times, the choice's cubin) of each choice that has a time."""
    cubins = [variant.cubin_sha256 for variant in bundle.variants()]
    cells = Timings.of(contents).cells
    for problem in bundle.problems():
        for choice in bundle.find(problem):
            cell, chosen = cells.get(cell_of(problem, choice.bucket)), cubins[choice.variant]
            if cell is not None and chosen in cell.times_ns:
                yield problem, choice.bucket, cell, chosen


def losses_by_rows(bundle: BundleFile, contents: Contents) -> list[dict[str, Any]]:
    """Return the mean and largest loss of each op, for ranges of total rows; all fusions together."""
    by_rows: dict[tuple[str, int], list[float]] = {}
    for problem, bucket, cell, chosen in timed(bundle, contents):
        most = next((rows for rows in ROWS if bucket <= rows), MAX_DIM)
        by_rows.setdefault((problem.op.value, most), []).append(loss_of(cell, chosen, raw=True))
    return [
        {"op": op, "rows_to": most, "choices": len(some), "mean_loss": _mean(some), "most": max(some)}
        for (op, most), some in sorted(by_rows.items())
    ]


def loss_of(cell: CellTimes, chosen: bytes, *, raw: bool) -> float:
    """Return the time of ``chosen`` over the fastest candidate's, or without ``raw`` the fastest that beats it."""
    times = cell.times_ns
    return times[chosen] / min(times[cubin] for cubin in times if cubin == chosen or raw or cell.beats(cubin, chosen))


def losses_in_records(bundle: BundleFile, contents: Contents) -> list[float]:
    """Return each choice's time over the fastest in its record, the worst first.

    If several records have the choice, it is their geometric mean, weighted by rounds.
    """
    cubins = [variant.cubin_sha256 for variant in bundle.variants()]
    records_of: dict[tuple[Problem, int], list[tuple[dict[bytes, int], int]]] = {}
    for record in contents.records:
        if isinstance(record, Measured):
            times = {timing.variant: timing.time_ns for timing in record.timings}
            rounds = max(timing.rounds for timing in record.timings)
            records_of.setdefault(cell_of(record.problem, record.bucket), []).append((times, rounds))
    lost = []
    for problem in bundle.problems():
        for choice in bundle.find(problem):
            chosen, records = cubins[choice.variant], records_of.get(cell_of(problem, choice.bucket), [])
            logs = [
                (rounds * math.log(times[chosen] / min(times.values())), rounds)
                for times, rounds in records
                if chosen in times
            ]
            if logs:
                lost.append(math.exp(sum(log for log, _ in logs) / sum(rounds for _, rounds in logs)))
    return sorted(lost, reverse=True)


def beside_torch(bundle: BundleFile, contents: Contents) -> list[tuple[float, str]]:
    """Return (grouped_mm's time over the choice's, cell) of each choice that has both times, the slowest first."""
    return sorted(
        (cell.torch_ns / cell.times_ns[chosen], f"{problem} M={bucket}")
        for problem, bucket, cell, chosen in timed(bundle, contents)
        if cell.torch_ns
    )


def winners_likely(bundle: BundleFile, contents: Contents) -> float:
    """Return the share of cells in which the second measurement pass would have timed the fastest shipped variant."""
    cells = Timings.of(contents).cells
    problems = {problem: [choice.bucket for choice in bundle.find(problem)] for problem in bundle.problems()}
    ground = TuningSpace.of(problems, bundle, contents.header.gpu, contents.header.sm, SHARE)
    likely = []
    for problem, bucket in cells:
        able = ground.estimates(problem, bucket)
        timed = [(ns, sha) for sha, ns in cells[problem, bucket].times_ns.items() if sha in able]
        if timed:
            likely.append(able[min(timed)[1]] <= LIKELY * min(able.values()))
    return sum(likely) / len(likely)


def report(bundle: BundleFile, contents: Contents) -> dict[str, Any]:
    """Return all figures for JSON.

    Raises
    ------
    ValueError
        if the journal has none of the bundle's cells.
    """
    configs = {
        (variant.op.value, variant.dtype.value, variant.config)
        for variant in bundle.variants()
        if isinstance(variant.op, Op)
    }
    raw, lost = (losses(bundle, contents, raw=raw) for raw in (True, False))
    if not lost:
        raise ValueError("the journal has no cell of this bundle's choices")
    own = losses_in_records(bundle, contents)
    torch = beside_torch(bundle, contents)
    return {
        "configs": dict(sorted(Counter(f"{op} {dtype}" for op, dtype, _ in configs).items())),
        "choices": len(lost),
        "as_timed": _summary(raw),
        "beyond_noise": _summary(lost),
        "by_rows": losses_by_rows(bundle, contents),
        "in_records": {"over_2_percent": sum(loss > OVER for loss in own), "most": own[0], "mean_loss": _mean(own)},
        "winners_likely": winners_likely(bundle, contents),
        "beside_torch": len(torch),
        "behind_torch_by_over_3_percent": [cell for cell in torch if cell[0] < 0.97],
    }


def kinds(bundle: BundleFile, contents: Contents) -> list[dict[str, Any]]:
    """Return a row for each kind of config, op, and range of rows an expert (a power of two), without fusions.

    ``gain`` is the geometric mean of the best other config's time over the best time of the kind. ``kept`` counts 1 for
    cells in which the other is faster: the gain of a bundle from having the kind. Only shipped variants count.
    """
    variants = bundle.variants()
    cells = Timings.of(contents).cells
    rows = []
    for kind, belongs in KINDS.items():
        of_kind = {
            variant.cubin_sha256 for variant in variants if isinstance(variant.op, Op) and belongs(_config(variant))
        }
        gains: dict[tuple[str, int], list[float]] = {}
        chosen: Counter[tuple[str, int]] = Counter()
        for problem in bundle.problems():
            for choice in bundle.find(problem):
                place = problem.op.value, math.floor(math.log2(choice.bucket / problem.E))
                if problem.fusion or problem.layout is Layout.KN or (problem, choice.bucket) not in cells:
                    continue
                chosen[place] += variants[choice.variant].cubin_sha256 in of_kind
                times = cells[problem, choice.bucket].times_ns
                own, others = (
                    [ns for cubin, ns in times.items() if (cubin in of_kind) is is_own] for is_own in (True, False)
                )
                if own and others:
                    gains.setdefault(place, []).append(min(others) / min(own))
        for (op, power), ratios in sorted(gains.items()):
            rows.append(
                {
                    "kind": kind,
                    "op": op,
                    "rows_from": 2.0**power,
                    "cells": len(ratios),
                    "chosen": chosen[op, power],
                    "gain": geometric_mean(ratios),
                    "least": min(ratios),
                    "most": max(ratios),
                    "kept": geometric_mean(max(1.0, ratio) for ratio in ratios),
                }
            )
    return rows


def _config(variant: Variant) -> Config:
    return Config.from_pairs(variant.config)


def _summary(lost: list[tuple[float, float, str]]) -> dict[str, Any]:
    over = [us for loss, us, _ in lost if loss > OVER]
    return {
        "over_2_percent": len(over),
        "of_which_over_10_ms": sum(1000 * us > LONG_NS for us in over),
        "mean_loss": _mean([loss for loss, _, _ in lost]),
        "worst": lost[:10],
    }


def _mean(lost: list[float]) -> float:
    return math.expm1(sum(map(math.log, lost)) / len(lost))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("journal", type=Path)
    parser.add_argument(
        "--gpu", metavar="NAME", help="whose choices, where the bundle has several GPUs'; [the journal's]"
    )
    parser.add_argument("--models", action="append", default=[], metavar="FILE", help="only these models' choices")
    parser.add_argument("--kinds", action="store_true", help="what each kind of config gains, by rows an expert")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    try:
        contents = read_journal(args.journal)
        with open_bundle(args.bundle) as opened:
            bundle = of_gpu(opened, args.gpu or contents.header.gpu.name, args.models)
            figures = report(bundle, contents)
            by_kind = kinds(bundle, contents) if args.kinds else []
    except (PretunedError, ValueError) as error:
        parser.error(f"{args.bundle}, {args.journal}: {error}")
    if args.json:
        print(json.dumps(figures | ({"kinds": by_kind} if args.kinds else {}), indent=1))
        return
    for row in by_kind:
        print(
            "{kind:9} {op:8} from {rows_from:9g} rows: {cells:3} cells, chosen {chosen:3}, gain {gain:.3f} "
            "({least:.3f} to {most:.3f}), with it {kept:.3f}".format_map(row)
        )
    print(", ".join(f"{count} configs of {name}" for name, count in figures["configs"].items()))
    for name, losses in (("as timed", figures["as_timed"]), ("by more than noise", figures["beyond_noise"])):
        print(
            f"{figures['choices']} choices, {name}: {losses['over_2_percent']} take over 2 % more than the fastest, "
            f"{losses['of_which_over_10_ms']} of them over 10 ms, the mean loss is {losses['mean_loss']:.2%}"
        )
        for loss, us, cell in losses["worst"]:
            print(f"  {loss:.3f} {us:8.0f} us {cell}")
    for row in figures["by_rows"]:
        rows = f"up to {row['rows_to']}" if row["rows_to"] in ROWS else f"over {ROWS[-1]}"
        print(
            f"{row['op']:8} {rows:>10} rows: {row['choices']:4} choices, as timed the mean loss is "
            f"{row['mean_loss']:.1%}, {row['most'] - 1:.0%} at most"
        )
    own = figures["in_records"]
    print(
        f"in each record that has it: {own['over_2_percent']} take over 2 % more than the fastest there, "
        f"{own['most'] - 1:.1%} at most, the mean loss is {own['mean_loss']:.2%}"
    )
    near = figures["winners_likely"]
    print(f"the fastest that ships is within {LIKELY - 1:.0%} of the least estimate in {near:.1%} of all cells")
    print(f"{figures['beside_torch']} cells beside grouped_mm, behind it by over 3 %:")
    for gain, cell in figures["behind_torch_by_over_3_percent"]:
        print(f"  {gain:.3f} {cell}")
