"""Cells to look at twice: those in which what a bundle runs took more than the fastest, as a journal has them.

Times of a few rounds are some percent off in long launches, and the choices go by what other cells need, too. A second
look takes more rounds, of all that may be the fastest, so that what is left over is a loss, or is none.
"""

from __future__ import annotations

from ..artifacts.store import BundleFile
from .evidence import Cell, Evidence, counting
from .journal import Contents
from .records import Measured
from .select import MAX_LOSS

NEAR = 0.1  # over the fastest: may be the fastest


def doubts(bundle: BundleFile, contents: Contents) -> dict[Cell, tuple[bytes, ...]]:
    """By cell, the cubins to time again: the choice of ``bundle``, and what took at most NEAR more than the fastest.

    Of cells in which the choice took over MAX_LOSS more than the fastest that never failed, and which one record tells
    of.
    """
    records: dict[Cell, list[Measured]] = {}
    for one in contents.records:
        if isinstance(one, Measured):
            records.setdefault((one.problem, one.bucket), []).append(one)
    evidence = Evidence.of(contents)
    found = {}
    for problem in bundle.problems():
        for choice in bundle.find(problem):
            cell, ours = (problem, choice.bucket), bundle.variant(choice.variant).cubin_sha256
            if len(counting(records.get(cell, []))) != 1:
                continue
            times = {sha: ns for sha, ns in evidence.cells[cell].times_ns.items() if sha not in evidence.failed}
            if ours in times and times[ours] > min(times.values()) * (1 + MAX_LOSS):
                near = min(times.values()) * (1 + NEAR)
                found[cell] = tuple(sha for sha in times if sha == ours or times[sha] <= near)
    return found
