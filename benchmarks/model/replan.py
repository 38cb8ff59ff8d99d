"""Make new plans for the shipped bundles from their own times.

    python benchmarks/run.py replan            # print the changes
    python benchmarks/run.py replan --write    # write the files in artifacts and benchmarks/results
    python benchmarks/run.py replan fp16-sm90.msgpack.xz    # only these files

Kernels, cubins and choices, with their times and order, stay as they are.
"""

from __future__ import annotations

import argparse
import lzma
import struct
from collections import Counter
from pathlib import Path

from pretuned.artifacts.files import packed
from pretuned.artifacts.format import codec
from pretuned.artifacts.records.bundle import Bundle
from pretuned.kernels.plans import with_plans

ARTIFACTS = Path(__file__).resolve().parents[2] / "artifacts"
RESULTS = Path(__file__).resolve().parents[1] / "results"
SIZE_AT = 16  # in the preamble (artifacts/FORMAT.md, section 1)


def pieces(data: bytes) -> list[bytes]:
    """Return the bundles of a file, which are stored one after the other."""
    bundles = []
    while data:
        (size,) = struct.unpack_from(">Q", data, SIZE_AT)
        bundles.append(data[:size])
        data = data[size:]
    return bundles


def without_plans(bundle: Bundle) -> Bundle:
    """Return the bundle with empty plans."""
    choices = {problem: tuple(choice._replace(plan=()) for choice in row) for problem, row in bundle.choices.items()}
    return bundle._replace(choices=choices)


def replanned(data: bytes, where: str) -> tuple[bytes, Bundle]:
    """Return the bundle in ``data`` with new plans, as bytes and decoded."""
    before = codec.decode(data, where)
    after = with_plans(before)
    if without_plans(after) != without_plans(before):
        raise AssertionError(f"{where}: more than plans changed")
    return codec.encode(after, where), after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="files, by their names; all by default")
    parser.add_argument("--write", action="store_true", help="write the files")
    args = parser.parse_args()
    totals = Counter[str]()
    paths = sorted(
        [*(ARTIFACTS / "pressed").glob("*.xz"), *(ARTIFACTS / "bundles").glob("*.xz"), *RESULTS.glob("*.msgpack.xz")]
    )
    for path in (path for path in paths if not args.names or path.name in args.names):
        before = path.read_bytes()
        bundles = [replanned(piece, path.name) for piece in pieces(lzma.decompress(before))]
        plans = Counter(
            row.way.name.lower()
            for _, bundle in bundles
            for choices in bundle.choices.values()
            for choice in choices
            for row in choice.plan
        )
        after = packed.pack(*(data for data, _ in bundles))
        sizes = len(lzma.decompress(before)), sum(len(data) for data, _ in bundles)
        totals.update(xz_before=len(before), xz_after=len(after), before=sizes[0], after=sizes[1], **plans)
        print(
            f"{path.name}: {sizes[0]:,} -> {sizes[1]:,} bytes, xz {len(before):,} -> {len(after):,}; {dict(plans)}",
            flush=True,
        )
        if args.write:
            path.write_bytes(after)
            unpacked = ARTIFACTS / "bundles" / path.stem
            if unpacked.exists():
                unpacked.write_bytes(bundles[0][0])
    print(f"all: {dict(totals)}")


if __name__ == "__main__":
    main()
