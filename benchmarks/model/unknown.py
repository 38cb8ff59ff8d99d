"""Compare the choices for shapes in no list of models with the fastest of all shipped variants.

    python benchmarks/run.py unknown --time new.journal --seed 1 --products 30    # on a GPU: draw shapes, time them
    python benchmarks/run.py unknown new.journal                                  # anywhere: print the tables
    python benchmarks/run.py unknown benchmarks/results/catalogue-h100.journal.xz
    python benchmarks/run.py unknown --shortlist new.journal                      # anywhere: what tuners would find
    python benchmarks/run.py unknown --cost --out unknown-cost.json               # anywhere: what a decision costs

A seed draws layers: E 7 to 200, H 1,536 to 6,400, I 640 to 4,608, one of a layer's two products each, none that a
shipped bundle has. Of each product, forward, dX and dW are timed at 16, 128, 1,024 and 8,192 tokens as ``aot measure``
times them, in one record each shipped variant whose estimate is at most twice the least. ``--sizes E,N,K`` times a
product that you name.

The table shows a choice's loss to the fastest variant timed in its cell: by the cost model alone, and as the
runtime and ``aot build`` choose, by measured neighbours and the cost model. A problem's own shape and its layer's other
product count as not measured, so a journal of shipped shapes shows the loss for shapes that don't ship.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from benchmarks import provenance
from pretuned.aot.demand.worker import SHARE as ON_DEMAND
from pretuned.aot.journal.file import Contents, Header, open_journal, read_journal
from pretuned.aot.journal.records import Measured
from pretuned.aot.journal.timings import CellTimes, Timings
from pretuned.aot.measure.inputs import top_k_of
from pretuned.aot.measure.job import MeasureJob, MeasureResult, Setup
from pretuned.aot.plan.families import Family, Pool, serves
from pretuned.aot.tune.shortlist import SHARE, Winners, contenders
from pretuned.artifacts.bundle_file import BundleFile, open_bundle
from pretuned.artifacts.errors import PretunedError
from pretuned.artifacts.records import DType, Fusion, Gpu, Layout, LocalGpu, Op, Problem
from pretuned.kernels.chips import Chip, chip_of
from pretuned.kernels.cost import Resources
from pretuned.kernels.cost_model import Ranker
from pretuned.runtime.dispatch.decide import Decision, decide
from pretuned.runtime.dispatch.neighbours import Neighbourhood, blended
from pretuned.runtime.dispatch.places import Kind, Place
from pretuned.runtime.dispatch.snapshot import Snapshot

BUNDLE = Path(__file__).parents[2] / "artifacts" / "bundles" / "catalogue-sm90.msgpack"
TOKENS = (16, 128, 1024, 8192)
MOST_BYTES = 16 << 30  # of one product's weights
# Variants whose estimate is more than so many times the least are not timed. In the 100,000 cells of the
# catalogue's journals the fastest had at most 1.65 times the least estimate.
MOST_TIMES = 2.0

UP_TO = (64, 512, 4096)  # tokens: the table's columns

Sizes = tuple[int, int, int]  # E, N, K


class Measures(Protocol):
    """The interface of ``aot.measure.bench.Bench``, which times a job."""

    def run(self, job: MeasureJob) -> MeasureResult: ...


def drawn(seed: int, excluded: set[Sizes]) -> Iterator[Sizes]:
    """Yield random products' E, N and K, each once, without the ``excluded``."""
    draw, seen = random.Random(seed), set(excluded)
    while True:
        E = round(math.exp(draw.uniform(math.log(7), math.log(200))))
        H, width = 64 * draw.randint(24, 100), 32 * draw.randint(20, 144)
        sizes = draw.choice([(E, 2 * width, H), (E, H, width)])
        if sizes not in seen and 2 * math.prod(sizes) <= MOST_BYTES:
            seen.add(sizes)
            yield sizes


def jobs(sizes: Sizes, bundle: BundleFile, chip: Chip, *, quick: bool) -> Iterator[MeasureJob]:
    """Yield a job for forward, dX and dW at each number of tokens, with shipped variants in the cost model's order."""
    E, N, K = sizes
    variants = bundle.variants()
    for op in Op:
        problem = Problem(op, DType.BF16, E, N, K)
        able = [i for i, variant in enumerate(variants) if serves(variant, problem)]
        ranker = Ranker([Resources.of(variants[i]) for i in able], op, problem.dtype, chip)
        for tokens in TOKENS:
            M = tokens * top_k_of(E, 8)
            estimates = ranker.rank(problem, M)
            ranked = [able[at] for us, at in estimates if us <= MOST_TIMES * estimates[0][0]]
            yield MeasureJob(problem, M, tuple(ranked), with_torch=True, quick=quick)


def time_all(
    all_sizes: Sequence[Sizes],
    bundle: BundleFile,
    bench: Measures,
    header: Header,
    path: Path,
    seconds: float,
    *,
    quick: bool,
) -> int:
    """Time the products into a journal until ``seconds`` have passed; return its number of cells."""
    begun, cells = time.monotonic(), 0
    chip = chip_of(header.gpu, header.sm)
    with open_journal(path, header) as journal:
        there = {(record.problem, record.bucket) for record in journal.contents.records if isinstance(record, Measured)}
        for sizes in all_sizes:
            records = []
            for job in jobs(sizes, bundle, chip, quick=quick):
                if (job.problem, job.bucket) in there:
                    cells += 1
                    continue
                result = bench.run(job)
                records += [*result.failures, *([result.measured] if result.measured else [])]
                cells += result.measured is not None
                for note in result.notes:
                    print(note, flush=True)
                if result.broken:
                    journal.append(records)
                    raise SystemExit(f"{job.problem}, {job.bucket} rows: a CUDA error, start again to go on")
            journal.append(records)
            passed = time.monotonic() - begun
            print(f"{passed:6.1f} s  E={sizes[0]} N={sizes[1]} K={sizes[2]}  {cells} cells", flush=True)
            if passed > seconds:
                break
    return cells


class Judged(NamedTuple):
    """A cell's losses: each choice's time over the fastest time, minus 1; torch's time over the runtime's, if timed."""

    problem: Problem
    tokens: int
    modelled: float
    chosen: float
    torch: float | None


def left_out(problem: Problem) -> set[Sizes]:
    """The problem's sizes, and the possible sizes of its layer's other GEMM, with a gate and without."""
    E, N, K = problem.E, problem.N, problem.K
    return {(E, N, K), (E, K, N), (E, 2 * K, N), (E, K, N // 2)}


class Order(NamedTuple):
    """A cell treated as not measured: the variants' times, and the variants in two orders, best first."""

    problem: Problem
    bucket: int
    cell: CellTimes
    times: dict[int, int]  # in ns, by variant
    modelled: list[int]  # all variants that support the problem, by the cost model
    blended: list[int]  # ranked by measured neighbours, too; empty without any


def orders(bundle: BundleFile, contents: Contents) -> Iterator[Order]:
    """Yield the order of the bundle's variants in each cell of a journal in which at least two have times."""
    header, evidence = contents.header, Timings.of(contents)
    local, chip = LocalGpu(header.sm, header.gpu), chip_of(header.gpu, header.sm)
    snapshot = Snapshot([Place(Kind.INSTALLED, Path(bundle.path).parent)])
    neighbours = Neighbourhood(snapshot, local, snapshot.view(local, installed=False))
    variants = bundle.variants()
    gemms = ((i, variant) for i, variant in enumerate(variants) if isinstance(variant.op, Op))
    numbers = {i: neighbours.numbered(variant) for i, variant in gemms}
    by_problem: dict[Problem, list[int]] = {}
    for problem, bucket in evidence.cells:
        by_problem.setdefault(problem, []).append(bucket)
    for problem, buckets in by_problem.items():
        able = [i for i, variant in enumerate(variants) if serves(variant, problem)]
        ranker = Ranker([Resources.of(variants[i]) for i in able], problem.op, problem.dtype, chip)
        rest = neighbours.without(left_out(problem))
        for bucket in buckets:
            cell = evidence.cells[problem, bucket]
            times = {i: cell.times_ns[sha] for i in able if (sha := variants[i].cubin_sha256) in cell.times_ns}
            if len(times) < 2:
                continue
            ranked = [(us, able[at]) for us, at in ranker.rank(problem, bucket)]
            near = rest.near(problem, bucket)
            ordered = [i for _, i in blended(near, problem, bucket, chip, ranked, numbers)] if near else []
            yield Order(problem, bucket, cell, times, [i for _, i in ranked], ordered)


def judged(bundle: BundleFile, contents: Contents) -> Iterator[Judged]:
    """Yield each journal cell's choice among the bundle's variants with times; cells need at least two of them."""
    for problem, bucket, cell, times, ranked, ordered in orders(bundle, contents):
        modelled = next(i for i in ranked if i in times)
        chosen = next((i for i in ordered if i in times), modelled)
        least, torch_ns = min(times.values()), cell.torch_ns
        yield Judged(
            problem,
            bucket // top_k_of(problem.E, bucket),
            times[modelled] / least - 1,
            times[chosen] / least - 1,
            None if torch_ns is None else torch_ns / times[chosen],
        )


class Shortlist(NamedTuple):
    """The losses of the shortlists' fastest variants in all cells, sorted, and the mean length of a shortlist."""

    losses: list[float]
    size: float


def shortlists(bundle: BundleFile, contents: Contents, share: float) -> dict[str, Shortlist]:
    """Return the losses of a tuner with shortlists by the cost model alone, and by neighbours, in a journal's cells.

    Both shortlists contain the runtime's choice, which the neighbours rank first. The length of a shortlist is a share
    of all candidates. A journal has times of few: candidates without a time come last.
    """
    variants, by = bundle.variants(), ("cost model", "neighbours too")
    winners, losses = {name: Winners() for name in by}, {name: list[tuple[float, int]]() for name in by}
    cells = sorted(orders(bundle, contents), key=lambda cell: (cell.problem.sort_key, cell.bucket))
    for problem, bucket, _, times_ns, modelled, ordered in cells:
        times = {variants[i].config: times_ns[i] for i in times_ns}
        runs = next(variants[i].config for i in ordered or modelled if i in times_ns)
        count = len(Pool().candidates(Family.of(problem), contents.header.sm, (problem.op,)))
        others = [(("untimed", i),) for i in range(len(times), count if share <= SHARE else 0)]
        for name, order in zip(by, (modelled, ordered or modelled), strict=True):
            ranked = [*dict.fromkeys(variants[i].config for i in order if i in times_ns), *others]
            near, twin = winners[name].near(problem, bucket), winners[name].other_fusion(problem, bucket)
            tried = dict.fromkeys((*contenders(ranked, near, twin, share, (), [runs]), runs))
            fastest = min((config for config in tried if config in times), key=lambda config: times[config])
            winners[name].add(problem, bucket, fastest)
            losses[name].append((times[fastest] / min(times.values()) - 1, len(tried)))
    return {
        name: Shortlist(sorted(loss for loss, _ in some), statistics.fmean(size for _, size in some))
        for name, some in losses.items()
    }


def rows(cells: Iterable[Judged]) -> Iterator[tuple[str, list[float], list[float | None]]]:
    """Yield the losses of choices, of all cells and of each op: (name, [mean, 95th percentile, worst], by tokens)."""
    all_cells = list(cells)
    for op in (None, *Op):
        some = [cell for cell in all_cells if op in (None, cell.problem.op)]
        for how in ("modelled", "chosen") if some else ():
            losses = sorted((getattr(cell, how), cell.tokens) for cell in some)
            by_tokens = [
                [loss for loss, tokens in losses if low < tokens <= high]
                for low, high in zip((0, *UP_TO), (*UP_TO, math.inf), strict=True)
            ]
            yield (
                f"{'all' if op is None else op.value}, {'cost model' if how == 'modelled' else 'neighbours too'}",
                [statistics.fmean(loss for loss, _ in losses), losses[int(0.95 * len(losses))][0], losses[-1][0]],
                [statistics.fmean(bucket_losses) if bucket_losses else None for bucket_losses in by_tokens],
            )


def show(judged: Iterable[Judged]) -> None:
    """Print the rows, and how the choices compare with torch."""
    cells = list(judged)
    head = "".join(f"{f'T<={most}':>8}" for most in UP_TO)
    print(f"{len(cells)} cells\n{'':28} {'mean':>8}{'p95':>8}{'worst':>7}{head}{f'T>{UP_TO[-1]}':>8}")
    for name, (mean, high, worst), by_tokens in rows(cells):
        shown = "".join(f"{'':8}" if loss is None else f"{loss:8.2%}" for loss in by_tokens)
        print(f"{name:28} {mean:8.2%}{high:8.1%}{worst:7.0%}{shown}")
    beside = [cell.torch for cell in cells if cell.torch is not None]
    if beside:
        behind, speed = sum(gain < 0.97 for gain in beside), statistics.geometric_mean(beside)
        print(
            f"{len(beside)} cells compared with torch's grouped_mm: {speed:.2f}x its speed, slower by over 3 % in "
            f"{behind}, at worst {min(beside):.2f}x"
        )


def cost(path: Path, shapes: int = 400, again: int = 200_000) -> dict[str, dict[str, float]]:
    """The host time of ``decide`` in us, for shapes that no bundle was built for, by op and fusion.

    ``once`` is the first decision for a shape, ``another`` a decision for the same shape at other rows.
    """
    local = LocalGpu(90, Gpu("NVIDIA H200", 132, 143771, 13000))
    costs = {}
    kinds = [(Op.FORWARD, form) for form in (Fusion.NONE, Fusion.GATHER, Fusion.SCATTER)]
    for op, form in [*kinds, (Op.DX, Fusion.NONE), (Op.DW, Fusion.NONE)]:
        snapshot, draw = Snapshot([Place(Kind.INSTALLED, path.parent)]), random.Random(7)
        times: dict[str, list[float]] = {"once": [], "another": []}
        for i in range(shapes):
            sizes = draw.randint(7, 200), 64 * draw.randint(10, 144), 64 * draw.randint(10, 100)
            problem = Problem(op, DType.BF16, *sizes, Layout.NK, form)
            for what, M in (("once", 1 << 3 + i % 14), ("another", 1 << 3 + (i + 5) % 14)):
                begun = time.perf_counter()
                decided = decide(snapshot, problem, M, local)
                times[what].append(1e6 * (time.perf_counter() - begun))
                if not isinstance(decided, Decision):
                    sys.exit(f"{path}: nothing there can run {problem}")
        begun = time.perf_counter()
        for _ in range(again):
            decide(snapshot, problem, M, local)
        table_us = 1e6 * (time.perf_counter() - begun) / again
        usable = next(candidate for candidate in snapshot.view(local, installed=True).usable if candidate.path == path)
        once, another = (sorted(row[1:]) for row in times.values())
        name = f"{op.value} {'+'.join(str(flag.name).lower() for flag in form) or 'plain'}"
        costs[name] = {
            "variants": sum(variant.alignment == 16 for _, variant in snapshot.variants(usable.bundle, problem)),
            "first_of_all_us": round(times["once"][0], 1),
            "once_median_us": round(statistics.median(once), 1),
            "once_p99_us": round(once[len(once) * 99 // 100], 1),
            "another_median_us": round(statistics.median(another), 1),
            "table_us": round(table_us, 3),
        }
        print(f"{name:18}" + "".join(f"  {key} {value}" for key, value in costs[name].items()), flush=True)
    return costs


def show_shortlists(bundle: BundleFile, contents: Contents) -> None:
    """Print the losses of the shortlists that ``aot build`` and tuning on demand use."""
    for what, share in (("aot build", SHARE), ("on demand", ON_DEMAND)):
        for name, (losses, size) in shortlists(bundle, contents, share).items():
            mean, high = statistics.fmean(losses), losses[int(0.95 * len(losses))]
            print(
                f"{what}, {name:14}  {len(losses)} cells, {size:.2f} variants each: mean {mean:.2%}, p95 {high:.2%}, "
                f"worst {losses[-1]:.1%}"
            )


def _sizes(text: str) -> Sizes:
    E, N, K = map(int, text.split(","))
    return E, N, K


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("journals", nargs="*", type=Path, help="what was timed before")
    parser.add_argument("--time", type=Path, metavar="JOURNAL", help="time on this GPU; a journal goes on where it was")
    parser.add_argument("--seed", type=int, default=1, help="of the products that are drawn [1]")
    parser.add_argument("--products", type=int, default=30, help="how many are drawn [30]")
    parser.add_argument("--sizes", type=_sizes, action="append", default=[], metavar="E,N,K", help="time this product")
    parser.add_argument("--quick", action="store_true", help="two fifths of the rounds")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no product after so long")
    parser.add_argument("--shortlist", action="store_true", help="of journals: what a tuner's shortlists would lose")
    parser.add_argument("--cost", action="store_true", help="time decisions on this machine's CPU")
    parser.add_argument("--out", type=Path, help="where --cost writes its result, as JSON")
    parser.add_argument("--bundle", type=Path, default=BUNDLE, help="whose variants are timed [the shipped one]")
    args = parser.parse_args()
    if [bool(args.journals), bool(args.time), args.cost].count(True) != 1:
        parser.error("name journals, or --time JOURNAL, or --cost")
    if args.cost:
        report = {**provenance.about(), "cost": cost(args.bundle)}
        if args.out:
            args.out.write_text(json.dumps(report, indent=1) + "\n")
        return
    if args.time:
        from pretuned.aot.measure.bench import Bench

        with open_bundle(args.bundle) as bundle:
            present = {(problem.E, problem.N, problem.K) for problem in bundle.problems()}
            draw = drawn(args.seed, present)
            sizes = args.sizes or [next(draw) for _ in range(args.products)]
            bench = Bench(Setup(str(args.bundle), bundle.digest, 0))
            header = Header(bench.local.sm, bench.local.gpu, bundle.kernels)
            cells = time_all(sizes, bundle, bench, header, args.time, args.seconds, quick=args.quick)
            print(f"{cells} cells of {len(sizes)} products in {args.time}")
        return
    try:
        with open_bundle(args.bundle) as bundle:
            for path in args.journals:
                print(path)
                contents = read_journal(path)
                if args.shortlist:
                    show_shortlists(bundle, contents)
                else:
                    show(judged(bundle, contents))
    except PretunedError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
