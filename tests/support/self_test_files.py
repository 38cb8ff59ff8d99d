"""Proves every variant of some files of bundles or candidates on this GPU, also under a tool that watches its memory.

    python tests/support/self_test_files.py artifacts/bundles/*sm90.msgpack*
    compute-sanitizer --error-exitcode 9 python tests/support/self_test_files.py artifacts/bundles/*sm90.msgpack*

Each kernel runs the problems of ``runtime/launch/self_test_problems.py`` once. Faults are printed, with exit code 1.
``--part 2/8`` takes every eighth, from the second on: the first of each kernel come first, so that a part that is
stopped has seen most of them. ``--names`` prints a line before each, by which ``tests/gpu/races.py`` knows whose code
the tool tells of, with the seconds since the first. ``--after FILE`` leaves out the cubins whose SHA-256's
first 16 digits begin a line of the file: earlier runs saw them (``tests/gpu/races.py --seen`` writes it for racecheck,
and for memcheck another by ``tests/gpu/checked.py --seen``). Parts are parts of the others.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections import Counter
from collections.abc import Container, Iterator
from pathlib import Path

import torch

from pretuned.artifacts.bundle_file import BundleFile, open_bundle
from pretuned.artifacts.errors import PretunedError
from pretuned.kernels.arch import arch_of
from pretuned.runtime.driver.device import local_gpu
from pretuned.runtime.launch import self_test
from pretuned.runtime.launch.loader import loaded


def each_cubin(paths: list[str], after: Container[str] = ()) -> Iterator[tuple[BundleFile, int]]:
    """Each cubin once, by the first variant that has it: the first of every kernel, then the second of each.

    ``after``: the first 16 digits of the SHA-256 of those that are left out.
    """
    seen: set[bytes] = set()
    turns: Counter[str] = Counter()
    results = []
    for bundle in map(open_bundle, paths):
        for i, variant in enumerate(bundle.variants()):
            if variant.cubin_sha256 not in seen and variant.cubin_sha256.hex()[:16] not in after:
                seen.add(variant.cubin_sha256)
                results.append((turns[variant.entry], len(results), bundle, i))
                turns[variant.entry] += 1
    for _, _, bundle, i in sorted(results, key=lambda entry: entry[:2]):
        yield bundle, i


def main() -> int:
    """0 if all are right."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", metavar="FILE")
    parser.add_argument("--part", default="1/1", help="I/N: every N-th cubin, from the I-th on")
    parser.add_argument("--names", action="store_true", help="a line before each")
    parser.add_argument("--after", type=Path, metavar="FILE", help="leaves out the cubins that it names")
    options = parser.parse_args()
    after = {line.split()[0] for line in options.after.read_text().splitlines()} if options.after else set()
    first, step = map(int, options.part.split("/"))
    torch.zeros(1, device="cuda")
    local, seen, wrong, too_large = local_gpu(0), 0, 0, 0
    began = time.monotonic()
    for bundle, i in itertools.islice(each_cubin(options.paths, after), first - 1, None, step):
        variant = bundle.variant(i)
        if variant.shared_bytes > arch_of(local.sm).limits.shared_per_block_bytes:
            too_large += 1
            continue
        seen += 1
        if options.names:
            torch.cuda.synchronize()
            time.sleep(0.02)  # what the tool has to say of the one before is out
            print(f"cubin {variant.cubin_sha256.hex()} {variant.entry} {time.monotonic() - began:.1f}", flush=True)
        try:
            outcome = self_test.tried(loaded(bundle, i, 0, local.gpu.sm_count))
        except PretunedError as error:
            outcome = str(error)
        if outcome:
            wrong += 1
            what = f"{variant.entry} {variant.op.value} {variant.dtype.value}"
            print(f"{bundle.path}: variant {i}, {what}: {outcome}", flush=True)
    print(f"{seen} cubins on {local}, {wrong} wrong, {too_large} that no block has the memory for", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
