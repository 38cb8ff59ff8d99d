"""Cells to look at once more, as a journal and a bundle have them, and what to time there.

``doubts``: those in which what the bundle runs took more than the fastest. Times of a few rounds are some percent off
in long launches, and the choices go by what other cells need, too. A second look takes more rounds, of all that may be
the fastest, so that what is left over is a loss, or is none.

``untried``: those in which the bundle has code that may be the fastest and was never timed there. A cell is measured
with a few of all candidates, and which of these ship is known afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ..artifacts.store import BundleFile
from ..artifacts.types import Problem
from .evidence import Cell, Evidence, counting
from .journal import Contents
from .records import Measured
from .select import MAX_LOSS

NEAR = 0.1  # over the fastest: may be the fastest
BESIDE = 0.03  # over the fastest: timed beside what was not
LIKELY = 1.06  # times the least estimate: 99 % of the winners in an H200's journal (benchmarks/shipped.py)


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


def untried(
    bundle: BundleFile, contents: Contents, estimates: Callable[[Problem, int], Mapping[bytes, float]]
) -> dict[Cell, tuple[bytes, ...]]:
    """By cell, the cubins to time: what ``bundle`` ships that may be the fastest and was not timed, and who is ahead.

    ``estimates`` says what the cost model makes of each cubin that serves a problem. Of cells that were measured.
    """
    ships = {variant.cubin_sha256 for variant in bundle.variants()}
    evidence = Evidence.of(contents)
    found = {}
    for problem, bucket in evidence.cells:
        times = evidence.cells[problem, bucket].times_ns
        able = {
            sha: us for sha, us in estimates(problem, bucket).items() if sha in ships and sha not in evidence.failed
        }
        most = LIKELY * min(able.values(), default=0.0)
        missing = tuple(sha for sha, us in able.items() if us <= most and sha not in times)
        if missing:
            ahead = min(times.values()) * (1 + BESIDE)
            found[problem, bucket] = (*(sha for sha in times if times[sha] <= ahead), *missing)
    return found
