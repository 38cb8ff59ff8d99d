"""Which cubins a tool of compute-sanitizer has seen, by the lines that ``self_test_files.py --names`` prints."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

CUBIN = re.compile(r"cubin ([0-9a-f]{64}) (\w+)(?: [\d.]+)?$")
END = re.compile(r"\d+ cubins on .*, (\d+) wrong, ")
BEGUN = "========= COMPUTE-SANITIZER"
DIGITS = 16  # of a SHA-256, that a list has
LIMIT = "========= Warning: Maximum number of hazards reached."


def seen(lines: Iterable[str]) -> dict[str, str]:
    """The kernels of the cubins whose trials came to their end under the tool and went right, by SHA-256.

    None counts before the tool's own first line: without it the trials ran alone. After a cubin's name comes the next
    one's, or the count at the end; one that is wrong or was stopped has a line of its own there. racecheck tells
    nothing more of a process once it has as many hazards as it keeps: none counts from then on, nor do the last two
    before that, as its lines can be late.
    """
    names: dict[str, str] = {}
    begun, last = False, None
    for line in (line.rstrip() for line in lines):
        begun = begun or line == BEGUN
        if line.startswith(LIMIT):
            return dict([*names.items()][:-1])
        if not line or line.startswith("========="):
            continue
        name = CUBIN.match(line) if begun else None
        if last and (name or END.match(line)):
            names[last[1]] = last[2]
        last = name
    return names


def add_to(listed: Path, outputs: Iterable[Iterable[str]]) -> int:
    """Puts what the outputs' tools have seen into a list of SHA-256s cut short, by kernel; how many are new."""
    before = set(listed.read_text().splitlines()) if listed.exists() else set()
    new = {f"{sha256[:DIGITS]} {kernel}" for lines in outputs for sha256, kernel in seen(lines).items()}
    by_kernel = sorted(before | new, key=lambda line: line.split()[::-1])
    listed.write_text("".join(f"{line}\n" for line in by_kernel))
    return len(new - before)
