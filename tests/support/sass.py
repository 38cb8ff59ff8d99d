"""The machine code of a cubin as a flow graph: its accesses of shared memory, and the barriers between two of them.

``nvdisasm`` of the triton package reads the code. Two kinds of barrier order accesses of threads of one block:

* a named one, ``BAR.SYNC``, of all threads: who passes it has passed it as often as the others. Two accesses are
  apart where no path to the one passes it as often, modulo some number, as a path to the other.
* an mbarrier, ``SYNCS``: who arrives lets go of what it did before, who waits gets it. It is known by the offset that
  is added to a register, so that a ring is one. Its phases are numbers in registers, and not looked at.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import triton

_LINE = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\d+)\s+)?(\S+)\s*(.*?)\s*;?\s*(?:\(\*(.*)\*\);?)?\s*$")
_READS = ("LDS", "HGMMA", "UTMASTG", "UTMAREDG", "UBLKCP", "SYNCS.ARRIVE", "SYNCS.PHASECHK", "ATOMS")
_WRITES = ("STS", "LDGSTS", "UTMALDG", "UBLKCP", "SYNCS.EXCH", "SYNCS.ARRIVE", "SYNCS.CCTL", "ATOMS")
_LONGEST_CYCLE = 8  # passes of a named barrier


class Op(NamedTuple):
    """One instruction; ``next`` are the numbers of those that may follow."""

    offset: int
    predicate: str
    name: str
    operands: str
    next: tuple[int, ...]

    @property
    def kind(self) -> str:
        """Without what varies: LDS.128, SYNCS.ARRIVE."""
        return ".".join(self.name.split(".")[:2])

    def is_access(self, what: str) -> bool:
        """Return True if it can be a ``Read`` or a ``Write`` of shared memory."""
        return self.name.startswith(_READS if what == "Read" else _WRITES)

    @property
    def named(self) -> str:
        """The number of the named barrier that it passes, and of how many threads that is; or nothing."""
        return self.operands if self.name.startswith("BAR.SYNC") else ""

    @property
    def mbarrier(self) -> str:
        """The offset of the mbarrier that it arrives at or waits for, or nothing."""
        if not self.name.startswith(("SYNCS.ARRIVE", "SYNCS.PHASECHK", "ARRIVES")):
            return ""
        match = re.search(r"\[[^\]]*?(?:\+(0x[0-9a-f]+))?\]", self.operands)
        return (match[1] or "0x0") if match else ""

    @property
    def waits(self) -> bool:
        return self.name.startswith("SYNCS.PHASECHK")


class Order(NamedTuple):
    """The barriers between two accesses: from the first to the second, and back."""

    there: str
    back: str
    kind: str


class Code:
    """The code of one kernel."""

    def __init__(self, text: str) -> None:
        rows, labels = [], {}
        for line in text.splitlines():
            if match := re.match(r"(\.L_x_\d+):", line):
                labels[match[1]] = len(rows)
            elif match := _LINE.match(line):
                rows.append(match)
        self.ops = [
            Op(int(row[1], 16), row[2] or "", row[3], row[4], self._next(i, row, labels, len(rows)))
            for i, row in enumerate(rows)
        ]
        self.at = {op.offset: i for i, op in enumerate(self.ops)}
        self.before: list[list[int]] = [[] for _ in self.ops]
        self.after = [self._elected(i) for i in range(len(self.ops))]
        for i, following in enumerate(self.after):
            for index in following:
                self.before[index].append(i)
        self._counted: dict[tuple[str, int], list[set[int]]] = {}

    @staticmethod
    def _next(i: int, row: re.Match[str], labels: dict[str, int], count: int) -> tuple[int, ...]:
        targets = [labels[label] for label in re.findall(r"\.L_x_\d+", f"{row[4]} {row[5] or ''}") if label in labels]
        name, always = row[3].split(".")[0], not row[2]
        if name == "EXIT" or name in ("BRA", "BRX", "BRXU"):
            if always and name == "BRA" and "UP" not in row[4] and " P" not in f" {row[4]}":
                return tuple(targets)
            if always and name != "BRA":
                return tuple(targets)
            return (*targets, *(index for index in (i + 1,) if index < count))
        if name in ("BSSY", "BSYNC", "WARPSYNC"):  # where threads meet again: no way on by itself
            targets = []
        return (*targets, *(index for index in (i + 1,) if index < count))

    def _elected(self, i: int) -> tuple[int, ...]:
        """The ways on; that of all threads but one, round an arrival, is not one of its own."""
        op = self.ops[i]
        if op.name.startswith("BRA") and len(op.next) == 2:
            over = self.ops[i + 1 : max(op.next)] if max(op.next) > i + 1 else []
            if (
                len(over) <= 12
                and any(op.name.startswith("SYNCS.ARRIVE") for op in over)
                and not any(op.name.startswith(("BRA", "BRX", "EXIT")) for op in over)
            ):
                return (i + 1,)
        return op.next

    def counts(self, barrier: str, cycle: int) -> list[set[int]]:
        """How often each instruction has passed a named barrier before, modulo ``cycle``.

        Of what hangs on a predicate each of its values is followed until it is set anew.
        """
        if (barrier, cycle) in self._counted:
            return self._counted[barrier, cycle]
        reached: list[set[int]] = [set() for _ in self.ops]
        seen, todo = set(), [(0, 0, "", False)]
        while todo:
            state = todo.pop()
            if state in seen:
                continue
            seen.add(state)
            i, count, names, value = state
            reached[i].add(count)
            op = self.ops[i]
            name = op.predicate.removeprefix("!")
            if names and name != names and re.search(rf"\b{names}\b", op.operands.split("[")[0]):
                names, value = "", False  # it may be set here
            passes, branches = op.named == barrier, op.name.startswith(("BRA", "EXIT"))
            if not name or not (passes or branches):
                todo += [(following, (count + passes) % cycle, names, value) for following in self.after[i]]
                continue
            for holds in (True, False):
                if names == name and value != holds:
                    continue
                does = holds != op.predicate.startswith("!")
                if passes:
                    todo.append((i + 1, (count + does) % cycle, name, holds))
                else:
                    ways = self.after[i]
                    way = [way for way in ways if (way != i + 1) == does] if len(ways) > 1 else ways
                    todo += [(index, count, name, holds) for index in way]
        self._counted[barrier, cycle] = reached
        return reached

    def _must(self, start: int, forward: bool) -> frozenset[str]:
        """The mbarriers that each way on from an access arrives at, or that each way to it has waited for.

        A way ends at the access itself, where the code ends, and where it begins.
        """
        ways = self.after if forward else self.before
        inside, todo = {start}, [start]
        while todo:
            for index in ways[todo.pop()]:
                if index not in inside:
                    inside.add(index)
                    todo.append(index)
        barriers = frozenset(op.mbarrier for op in self.ops if op.mbarrier)
        held = dict.fromkeys(inside, barriers)
        back: dict[int, list[int]] = {index: [] for index in inside}
        for index in inside:
            for other in ways[index]:
                back[other].append(index)

        def of(i: int) -> frozenset[str]:
            if not ways[i]:
                return frozenset()
            parts = []
            for index in ways[i]:
                if index == start:
                    parts.append(frozenset())
                    continue
                op = self.ops[index]
                own = {op.mbarrier} if op.mbarrier and op.waits != forward else set()
                parts.append(held[index] | own)
            return frozenset.intersection(*parts)

        todo = list(inside)
        while todo:
            i = todo.pop()
            new = of(i)
            if new != held[i]:
                held[i] = new
                todo += back[i]
        return held[start]

    def _handed(self, first: int, second: int) -> str:
        """The mbarrier, or the ring of two, by which the second access gets what the first did."""
        arrived, had = self._must(first, True), self._must(second, False)
        rings = {_ring(barrier) for barrier in arrived} & {_ring(barrier) for barrier in had}
        return ", ".join(sorted(arrived & had) or sorted(f"{ring} or its second" for ring in rings))

    def _always_before(self, first: int, second: int) -> bool:
        """Return True if every path from the code's beginning to the second instruction passes the first."""
        seen, todo = {first}, [0]
        while todo:
            index = todo.pop()
            if index not in seen:
                seen.add(index)
                todo += self.ops[index].next
        return second not in seen

    def order(self, first: int, second: int, *, one_warp: bool = False) -> Order | None:
        """Return the barriers that order accesses at two offsets, or None; the tool may say that one warp does both."""
        a, b = self.at[first], self.at[second]
        if one_warp:
            place = [re.search(r"\[.*?\]", self.ops[index].operands) for index in (a, b)]
            if place[0] and place[1] and place[0][0] == place[1][0] and self._always_before(a, b):
                return Order("program", "program", "the order of one warp's program")
        for barrier in sorted({op.named for op in self.ops if op.named and "," not in op.named}):
            for cycle in range(2, _LONGEST_CYCLE + 1):
                counts = self.counts(barrier, cycle)
                if counts[a] and counts[b] and not counts[a] & counts[b]:
                    name = f"named barrier {int(barrier, 16)}"
                    return Order(name, name, name)
        there, back = self._handed(a, b), self._handed(b, a)
        if there and back and there != back:
            return Order(f"mbarrier {there}", f"mbarrier {back}", "two mbarriers")
        return None


def _ring(mbarrier: str) -> str:
    """The first of a ring of two, whose second is sometimes known by its own offset."""
    return hex(int(mbarrier, 16) & ~15)


def disassembled(cubin: bytes) -> Code:
    """Its code; CalledProcessError if it is none."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = triton.knobs.nvidia.nvdisasm.path
        return Code(subprocess.run([tool, "-c", Path(file.name)], capture_output=True, text=True, check=True).stdout)
