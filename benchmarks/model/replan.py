"""Make new plans for the shipped bundles from their own times.

    python benchmarks/run.py replan            # print the changes
    python benchmarks/run.py replan --write    # write the files in artifacts and benchmarks/results
    python benchmarks/run.py replan fp16-sm90.msgpack.xz    # only these files
    python benchmarks/run.py replan --row-kernels --write   # row kernels that changed are compiled anew

Kernels, cubins and choices, with their times and order, stay as they are. With ``--row-kernels``, which needs Triton,
the cubins of products are checked to be the same bytes.
"""

from __future__ import annotations

import argparse
import lzma
import struct
from collections import Counter
from pathlib import Path

from pretuned.aot.bundle.assemble import Code
from pretuned.aot.compile.pool import CompileJob, compile_all
from pretuned.aot.compile.revisions import source_sha256
from pretuned.aot.compile.triton import kernels_of, producer_of
from pretuned.artifacts import codec, packed
from pretuned.artifacts.records import Bundle, Choice, DType, Op, RowOp, Variant
from pretuned.kernels.plans import with_plans
from pretuned.kernels.rowops import CODE_OPS, MAKES_CODES, RowOpSpec, specs

ARTIFACTS = Path(__file__).resolve().parents[2] / "artifacts"
RESULTS = Path(__file__).resolve().parents[1] / "results"
MAKES_FIRST = [ops.quantize for ops in CODE_OPS.values()]  # ``specs`` lists other ops after these
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


def with_row_kernels(bundle: Bundle, where: str) -> Bundle:
    """The bundle, with row kernels compiled anew if their source has changed or if they are missing.

    Raises
    ------
    RuntimeError
        if another Triton compiled the bundle, or a variant does not compile.
    """
    sm = bundle.target.sm
    digests = {kernel.name: kernel.source_sha256 for kernel in bundle.kernels}
    stale = {
        i: RowOpSpec(variant.op, variant.dtype, variant.alignment)
        for i, variant in enumerate(bundle.variants)
        if isinstance(variant.op, RowOp) and digests[variant.kernel] != bytes.fromhex(source_sha256(variant.kernel))
    }
    lacking = lacks(bundle)
    wanted = [*stale.values(), *lacking]
    if wanted and (producer := producer_of(sm))._replace(options=()) != bundle.producer._replace(options=()):
        raise RuntimeError(f"{where}: made by {bundle.producer}, this is {producer}")
    results = {result.job.spec: result for result in compile_all([CompileJob(spec, sm) for spec in wanted])}
    codes = [Code(*pair) for pair in zip(bundle.variants, bundle.cubins, strict=True)]
    kernels = {kernel.name: kernel for kernel in bundle.kernels}
    is_sorted = codes == sorted(codes, key=lambda code: code.sort_key)  # else they are in the order of ``aot compile``
    for spec in wanted:
        compiled = results[spec].compiled
        if compiled is None:
            raise RuntimeError(f"{where}: {results[spec].reason}")
        kernels |= {kernel.name: kernel for kernel in kernels_of([compiled])}
        code = Code(compiled.variant, compiled.cubin)
        for i in (i for i, choice in stale.items() if choice == spec):
            codes[i] = code
        if spec in lacking:
            behind = (RowOp.SORT_SLOTS,) if spec.op is RowOp.PLACE_ROWS else MAKES_FIRST
            place = max(i for i, code in enumerate(codes) if code.variant.op in behind)
            codes.insert(place if spec.op is RowOp.PLACE_ROWS else 1 + place, code)
    if is_sorted:
        codes.sort(key=lambda code: code.sort_key)
    variants = tuple(code.variant for code in codes)
    places = {variant: i for i, variant in enumerate(variants)}
    moved = {i: places[variant] for i, variant in enumerate(bundle.variants) if variant in places}
    return bundle._replace(
        variants=variants,
        cubins=tuple(code.cubin for code in codes),
        kernels=tuple(kernels[name] for name in sorted(kernels)),
        choices={
            problem: tuple(renumbered(choice, moved) for choice in row) for problem, row in bundle.choices.items()
        },
    )


def renumbered(choice: Choice, moved: dict[int, int]) -> Choice:
    """The choice with the new numbers of its variants."""
    plan = (
        plan_row._replace(variant=None if plan_row.variant is None else moved[plan_row.variant])
        for plan_row in choice.plan
    )
    runner_up = None if choice.runner_up is None else moved[choice.runner_up]
    return choice._replace(variant=moved[choice.variant], runner_up=runner_up, plan=tuple(plan))


def lacks(bundle: Bundle) -> list[RowOpSpec]:
    """Specs of missing row kernels: kernels that make codes if any quantises x; place_rows if there is sort_slots."""
    there = {(variant.op, variant.dtype, variant.alignment) for variant in bundle.variants}
    formats = [
        dtype for dtype, ops in CODE_OPS.items() if any(variant.op is ops.quantize for variant in bundle.variants)
    ]
    specs_of_codes = specs((), frozenset((Op.FORWARD,)), of_codes=formats) if formats else ()
    added = [spec for spec in specs_of_codes if spec.op in MAKES_CODES and tuple(spec) not in there]
    ops = {variant.op for variant in bundle.variants}
    lists = RowOp.SORT_SLOTS in ops and RowOp.PLACE_ROWS not in ops
    return [*added, *([RowOpSpec(RowOp.PLACE_ROWS, DType.FP32, 1)] if lists else [])]


def of_products(bundle: Bundle) -> list[tuple[object, bytes]]:
    """The bundle's GEMM variants and their cubins."""
    pairs = zip(bundle.variants, bundle.cubins, strict=True)
    return [(variant, cubin) for variant, cubin in pairs if not isinstance(variant.op, RowOp)]


def named(bundle: Bundle) -> list[list[Variant]]:
    """The variants that each choice names."""
    return [[bundle.variants[i] for i in choice.variants()] for row in bundle.choices.values() for choice in row]


def replanned(data: bytes, where: str, *, row_kernels: bool = False) -> tuple[bytes, Bundle]:
    """Return the bundle in ``data`` with new plans; with ``row_kernels`` its changed row kernels are compiled again."""
    before = codec.decode(data, where)
    compiled = with_row_kernels(before, where) if row_kernels else before
    after = with_plans(compiled)
    same = of_products(after) == of_products(before) and named(compiled) == named(before)
    if without_plans(after) != without_plans(compiled) or not same:
        raise AssertionError(f"{where}: more than plans and row kernels changed")
    return codec.encode(after, where), after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="files, by their names; all by default")
    parser.add_argument("--write", action="store_true", help="write the files")
    parser.add_argument("--row-kernels", action="store_true", help="compile changed row kernels anew; needs Triton")
    args = parser.parse_args()
    totals = Counter[str]()
    paths = sorted(
        [*(ARTIFACTS / "pressed").glob("*.xz"), *(ARTIFACTS / "bundles").glob("*.xz"), *RESULTS.glob("*.msgpack.xz")]
    )
    for path in (path for path in paths if not args.names or path.name in args.names):
        before = path.read_bytes()
        bundles = [
            replanned(piece, path.name, row_kernels=args.row_kernels) for piece in pieces(lzma.decompress(before))
        ]
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
