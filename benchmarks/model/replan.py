"""Makes the plans of the shipped bundles anew, by their own times, and writes them in the current format.

    python benchmarks/run.py replan            # says what would change
    python benchmarks/run.py replan --write    # writes the files of artifacts and benchmarks/results
    python benchmarks/run.py replan fp16-sm90.msgpack.xz    # of these files alone

Nothing else changes: kernels, cubins, choices, their times and their order are the same. Bundles of format 1, which has
no plans and is otherwise equal, are read as well. (The runtime refuses them.)
"""

from __future__ import annotations

import argparse
import lzma
import struct
from collections import Counter
from pathlib import Path

from pretuned.artifacts.files import packed
from pretuned.artifacts.format import codec, wire
from pretuned.artifacts.limits import FORMAT
from pretuned.artifacts.records.bundle import Bundle
from pretuned.kernels.plans import with_plans

ARTIFACTS = Path(__file__).resolve().parents[2] / "artifacts"
RESULTS = Path(__file__).resolve().parents[1] / "results"
FORMAT_AT, SIZE_AT, INDEX_SIZE_AT = 11, 16, 25  # of the preamble (artifacts/FORMAT.md, section 1)


def pieces(data: bytes) -> list[bytes]:
    """The bundles of a file, which are one behind the other."""
    bundles = []
    while data:
        (size,) = struct.unpack_from(">Q", data, SIZE_AT)
        bundles.append(data[:size])
        data = data[size:]
    return bundles


def in_this_format(data: bytes) -> bytes:
    """A bundle of an older format as one of this, without plans."""
    (version,) = struct.unpack_from(">I", data, FORMAT_AT)
    if version == FORMAT:
        return data
    (index_bytes,) = struct.unpack_from(">I", data, INDEX_SIZE_AT)
    index = data[wire.PREAMBLE_BYTES : wire.PREAMBLE_BYTES + index_bytes]
    return wire.pack_preamble(len(data), index) + data[wire.PREAMBLE_BYTES :]


def without_plans(bundle: Bundle) -> Bundle:
    """The bundle with choices alone."""
    choices = {problem: tuple(choice._replace(plan=()) for choice in row) for problem, row in bundle.choices.items()}
    return bundle._replace(choices=choices)


def replanned(data: bytes, where: str) -> tuple[bytes, Bundle]:
    """The bundle in ``data`` with its plans made anew."""
    before = codec.decode(in_this_format(data), where)
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
