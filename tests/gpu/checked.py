"""Run memcheck or synccheck of compute-sanitizer over shipped cubins, and list the cubins that it has seen.

    compute-sanitizer --tool memcheck python tests/support/self_test_files.py --names \\
        artifacts/bundles/*sm90.msgpack* > memory.txt 2>&1
    python tests/gpu/checked.py memory.txt

Exit code 1 for a fault that the tool tells of, a trial that went wrong, or any other line that says neither a cubin's
name nor that the run went right, came to its end or was stopped. ``--seen FILE`` adds the cubins whose trials came to
their end to a list, if nothing is wrong; ``self_test_files.py --after FILE`` then leaves them out. ``races.py`` reads
racecheck's outputs. Needs no GPU.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "support"))

from seen_cubins import CUBIN, END, add_to, seen

# The last three are how a process ends that `timeout -s INT` stops.
_RIGHT = re.compile(
    r"(=========( COMPUTE-SANITIZER| ERROR SUMMARY: 0 errors)?|"
    r"Traceback \(most recent call last\):|KeyboardInterrupt|terminate called without an active exception)? *$"
)
_STOPPED = "KeyboardInterrupt"


def wrong_lines(lines: Iterable[str]) -> Iterator[str]:
    """The lines that say that something is wrong, or what nobody expects."""
    trace: list[str] = []
    for line in (line.rstrip() for line in lines):
        if line.startswith("Traceback ") or (trace and line.startswith(" ")):
            trace.append(line)
            continue
        if trace and line != _STOPPED:
            yield trace[0]
        trace = []
        end = END.match(line)
        if not (CUBIN.match(line) or _RIGHT.match(line) or (end and end[1] == "0")):
            yield line
    if trace:
        yield trace[0]


def main() -> int:
    """0 if nothing is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("outputs", nargs="+", type=Path, metavar="FILE", help="what the tool and the trials printed")
    parser.add_argument("--seen", type=Path, metavar="FILE", help="adds the cubins that were seen to this list")
    options = parser.parse_args()
    logs = [path.read_text(encoding="utf-8", errors="replace").splitlines() for path in options.outputs]
    both = zip(options.outputs, logs, strict=True)
    wrong = [f"{path}: {line}" for path, lines in both for line in wrong_lines(lines)]
    print(f"{len(set().union(*map(seen, logs)))} cubins came to the end of their trials")
    for line in wrong:
        print(f"wrong: {line}")
    if options.seen and not wrong:
        print(f"{add_to(options.seen, logs)} cubins are new in {options.seen}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
