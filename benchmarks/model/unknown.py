"""How good is the choice for shapes that no list of ours has: every shipped variant timed, and what is chosen.

    python benchmarks/run.py unknown --time new.journal --seed 1 --products 30    # on a GPU: draw shapes, time them
    python benchmarks/run.py unknown new.journal                                  # anywhere: print the table

A seed draws layers: E 7 to 200, H 1,536 to 6,400, I 640 to 4,608, one of a layer's two products each, none that a
shipped bundle has. Of each product, forward, dX and dW are timed at 16, 128, 1,024 and 8,192 tokens as ``aot measure``
times them, in one record each shipped variant whose estimate is at most twice the least. ``--sizes E,N,K`` times a
product that you name.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from pretuned.aot.journal.file import Header, open_journal
from pretuned.aot.journal.records import Measured
from pretuned.aot.measure.inputs import top_k_of
from pretuned.aot.measure.job import MeasureJob, MeasureResult, Setup
from pretuned.aot.plan.families import serves
from pretuned.artifacts.files.bundle_file import BundleFile, open_bundle
from pretuned.artifacts.records.precision import DType
from pretuned.artifacts.records.problem import Op, Problem
from pretuned.kernels.cost.model import Ranker, Resources
from pretuned.kernels.hardware.chips import Chip, chip_of

BUNDLE = Path(__file__).parents[2] / "artifacts" / "bundles" / "catalogue-sm90.msgpack"
TOKENS = (16, 128, 1024, 8192)
MOST_BYTES = 16 << 30  # of one product's weights
# Variants that the model expects to take more than so many times the least are not timed. In the 100,000 cells of the
# catalogue's journals the fastest had at most 1.65 times the least estimate.
MOST_TIMES = 2.0

Sizes = tuple[int, int, int]  # E, N, K


class Measures(Protocol):
    """What times a job: ``aot.measure.bench.Bench``."""

    def run(self, job: MeasureJob) -> MeasureResult: ...


def drawn(seed: int, known: set[Sizes]) -> Iterator[Sizes]:
    """E, N and K of products that a seed draws, none of them ``known``, each once."""
    draw, seen = random.Random(seed), set(known)  # noqa: S311
    while True:
        E = round(math.exp(draw.uniform(math.log(7), math.log(200))))
        H, width = 64 * draw.randint(24, 100), 32 * draw.randint(20, 144)
        sizes = draw.choice([(E, 2 * width, H), (E, H, width)])
        if sizes not in seen and 2 * math.prod(sizes) <= MOST_BYTES:
            seen.add(sizes)
            yield sizes


def jobs(sizes: Sizes, bundle: BundleFile, chip: Chip, *, quick: bool) -> Iterator[MeasureJob]:
    """The shipped variants of forward, dX and dW at each number of tokens, the cost model's first."""
    E, N, K = sizes
    variants = bundle.variants()
    for op in Op:
        problem = Problem(op, DType.BF16, E, N, K)
        able = [i for i, one in enumerate(variants) if serves(one, problem)]
        ranker = Ranker([Resources.of(variants[i]) for i in able], op, problem.dtype, chip)
        for tokens in TOKENS:
            M = tokens * top_k_of(E, 8)
            estimates = ranker.rank(problem, M)
            ranked = [able[at] for us, at in estimates if us <= MOST_TIMES * estimates[0][0]]
            yield MeasureJob(problem, M, tuple(ranked), with_torch=True, quick=quick)


def time_all(
    every: Sequence[Sizes], bundle: BundleFile, bench: Measures, header: Header, path: Path, seconds: float,
    *, quick: bool,
) -> int:  # fmt: skip
    """Time the products into a journal until ``seconds`` have passed; how many cells it then has."""
    begun, cells = time.monotonic(), 0
    chip = chip_of(header.gpu, header.sm)
    with open_journal(path, header) as journal:
        there = {(one.problem, one.bucket) for one in journal.contents.records if isinstance(one, Measured)}
        for sizes in every:
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
            print(f"{time.monotonic() - begun:6.1f} s  E={sizes[0]} N={sizes[1]} K={sizes[2]}  {cells} cells", flush=True)
            if time.monotonic() - begun > seconds:
                break
    return cells


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
    parser.add_argument("--bundle", type=Path, default=BUNDLE, help="whose variants are timed [the shipped one]")
    args = parser.parse_args()
    if bool(args.journals) == bool(args.time):
        parser.error("name journals, or --time JOURNAL")
    if args.time:
        from pretuned.aot.measure.bench import Bench

        with open_bundle(args.bundle) as bundle:
            known = {(one.E, one.N, one.K) for one in bundle.problems()}
            draw = drawn(args.seed, known)
            every = args.sizes or [next(draw) for _ in range(args.products)]
            bench = Bench(Setup(str(args.bundle), bundle.digest, 0))
            header = Header(bench.local.sm, bench.local.gpu, bundle.kernels)
            cells = time_all(every, bundle, bench, header, args.time, args.seconds, quick=args.quick)
            print(f"{cells} cells of {len(every)} products in {args.time}")
        sys.exit()


if __name__ == "__main__":
    main()
