"""Run racecheck of compute-sanitizer over shipped cubins, and say which barrier orders each pair of accesses.

    compute-sanitizer --tool racecheck --racecheck-report analysis --print-limit 1000000 \\
        python tests/support/self_test_files.py --names artifacts/bundles/*sm90.msgpack* > race.txt
    python tests/gpu/races.py race.txt

The tool knows neither mbarriers nor that a named barrier orders warps that pass it at different places. So each pair is
looked for in the flow graph of its cubin (``tests/support/sass.py``). Exit code 1 for a pair without an order, one of a
kind that is not in ``expected_races.json``, a line whose offsets are no accesses of the cubin named before, or a line
of the tool that is no report. ``--keep`` puts the kinds that have an order into that file. ``--seen FILE`` adds the
cubins that the tool has seen to a list, if nothing is wrong; ``self_test_files.py --after FILE`` then leaves them out.
Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "support"))

from sass import Code, Order, disassembled  # noqa: E402 - tests/support is no package
from seen_cubins import CUBIN, add_to  # noqa: E402

from pretuned.artifacts.bundle_file import BundleFile, open_bundle  # noqa: E402

EXPECTED = Path(__file__).with_name("expected_races.json")
_FIRST = re.compile(r"========= (Error|Warning): Race reported between (Read|Write) access at (\w+)\+0x([0-9a-f]+)")
_OTHER = re.compile(r"=========     and (Read|Write) access at (\w+)\+0x([0-9a-f]+) \[(\d+) hazards\]")
# What the tool says beside reports. (Its own limit of hazards: what it saw until then is told; see `seen_cubins.py`.)
_BESIDE = re.compile(
    r"=========( *| COMPUTE-SANITIZER| RACECHECK SUMMARY: .*| Warning: Maximum number of hazards reached\..*"
    r"| Target application returned an error)$"
)


class Access(NamedTuple):
    what: str
    kernel: str
    offset: int


class Pair(NamedTuple):
    """Two accesses that the tool tells of; ``cubins`` are the last ones that were named before, the last one first."""

    first: Access
    second: Access
    one_warp: bool
    cubins: tuple[str, ...]
    line: str


class Kind(NamedTuple):
    """Pairs of one kernel, the writing one first."""

    kernel: str
    first: str
    second: str
    order: str


def pairs(lines: Iterable[str]) -> Iterator[Pair | str]:
    """Yield the pairs of accesses in an output; other lines of the tool are yielded as text.

    The tool calls a hazard within one warp a warning. Its lines of one cubin can come after the next one's name.
    """
    named: tuple[str, ...] = ()
    first, one_warp = None, False
    for line in (line.rstrip() for line in lines):
        if match := CUBIN.match(line):
            named = (match[1], *named[:1])
        elif match := _FIRST.match(line):
            first, one_warp = Access(match[2], match[3], int(match[4], 16)), match[1] == "Warning"
        elif (match := _OTHER.match(line)) and first:
            yield Pair(first, Access(match[1], match[2], int(match[3], 16)), one_warp, named, line)
        elif line.startswith("=========") and not _BESIDE.match(line):
            yield line


def fits(code: Code, pair: Pair) -> bool:
    """Return True if both are accesses of shared memory at these offsets, of the reported sort."""
    return all(
        access.offset in code.at and code.ops[code.at[access.offset]].is_access(access.what) for access in pair[:2]
    )


def kind_of(code: Code, pair: Pair, order: Order) -> Kind:
    write_first = sorted(pair[:2], key=lambda access: access.what == "Read")
    first, second = (code.ops[code.at[access.offset]].kind for access in write_first)
    return Kind(pair.first.kernel, first, second, order.kind)


class Judged(NamedTuple):
    """The pairs of each kind, their cubins, and what is wrong."""

    kinds: Counter[Kind]
    cubins: set[str]
    wrong: list[str]


def judge(lines: Iterable[str], code_of: Callable[[str], tuple[str, Code] | None], expected: set[Kind]) -> Judged:
    """``code_of``: a cubin's kernel and code, by its SHA-256."""
    judged = Judged(Counter(), set(), [])
    orders: dict[tuple[str, int, int, bool], Order | None] = {}
    for pair in pairs(lines):
        if isinstance(pair, str):
            judged.wrong.append(f"no report: {pair}")
            continue
        where = f"{pair.first.kernel}+{pair.first.offset:#x} and {pair.second.kernel}+{pair.second.offset:#x}"
        named = [(cubin, code_of(cubin)) for cubin in pair.cubins]
        there = [
            (cubin, code[1])
            for cubin, code in named
            if code and {code[0]} == {pair.first.kernel, pair.second.kernel} and fits(code[1], pair)
        ]
        if not there:
            judged.wrong.append(f"{where}: no such accesses of shared memory in {' or '.join(pair.cubins) or 'none'}")
            continue
        cubin, code = there[0]
        key = (cubin, pair.first.offset, pair.second.offset, pair.one_warp)
        if key not in orders:
            orders[key] = code.order(pair.first.offset, pair.second.offset, one_warp=pair.one_warp)
        order = orders[key]
        judged.cubins.add(cubin)
        if order is None:
            judged.wrong.append(f"{where} of {cubin}: no barrier orders them")
            continue
        kind = kind_of(code, pair, order)
        judged.kinds[kind] += 1
        if kind not in expected:
            judged.wrong.append(f"{where} of {cubin}: {' '.join(kind)}, is not in {EXPECTED.name}")
    return judged


def expected_kinds(path: Path = EXPECTED) -> set[Kind]:
    return {Kind(*entry) for entry in json.loads(path.read_text())}


class Shipped:
    """The code of cubins in bundles, by their SHA-256; each is disassembled once."""

    def __init__(self, paths: Iterable[str | Path]) -> None:
        self._where: dict[str, tuple[BundleFile, int]] = {}
        for bundle in map(open_bundle, paths):
            for i, variant in enumerate(bundle.variants()):
                self._where.setdefault(variant.cubin_sha256.hex(), (bundle, i))
        self._codes: dict[str, tuple[str, Code]] = {}

    def __call__(self, sha256: str) -> tuple[str, Code] | None:
        if sha256 not in self._codes and sha256 in self._where:
            bundle, i = self._where[sha256]
            self._codes[sha256] = bundle.variant(i).entry, disassembled(bytes(bundle.cubin(i)))
        return self._codes.get(sha256)


def main() -> int:
    """0 if every pair is ordered, and of a kind that is expected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("outputs", nargs="+", type=Path, metavar="FILE", help="what racecheck printed")
    shipped = sorted((ROOT / "artifacts" / "bundles").glob("*sm90.msgpack*"))
    parser.add_argument("--bundles", nargs="+", default=shipped, help="where the cubins are; what ships for 9.0")
    parser.add_argument("--keep", action="store_true", help=f"write the kinds that have an order into {EXPECTED.name}")
    parser.add_argument("--seen", type=Path, metavar="FILE", help="adds the cubins that were seen to this list")
    options = parser.parse_args()
    code_of = Shipped(options.bundles)
    expected = expected_kinds()
    logs = [path.read_text(encoding="utf-8", errors="replace").splitlines() for path in options.outputs]
    results = [judge(lines, code_of, expected) for lines in logs]
    kinds = sum((result.kinds for result in results), Counter[Kind]())
    wrong = Counter(line for result in results for line in result.wrong)
    if options.keep:
        wrong = Counter({line: n for line, n in wrong.items() if not line.endswith(EXPECTED.name)})
        rows = ",\n".join(json.dumps(kind) for kind in sorted(expected | set(kinds)))
        EXPECTED.write_text(f"[\n{rows}\n]\n")
    for kind, count in sorted(kinds.items()):
        print(f"{count:6} {kind.kernel}: {kind.first} and {kind.second}: {kind.order}")
    print(
        f"{kinds.total()} pairs of {len(kinds)} kinds in "
        f"{len(set().union(*(result.cubins for result in results)))} cubins"
    )
    for line, count in wrong.items():
        print(f"wrong: {line} ({count} times)")
    if options.seen and not wrong:
        print(f"{add_to(options.seen, logs)} cubins are new in {options.seen}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
