"""How much Python a call runs, where a clock would measure what else the machine does."""

from __future__ import annotations

import cProfile
import sys
from collections.abc import Callable


def steps(call: Callable[[], object], of: Callable[..., object] | None = None) -> int:
    """How many functions ``call`` calls, those it calls in turn included, Python's and C's; or how often ``of``."""
    before = sys.getprofile()
    counter = cProfile.Profile()  # in C: a function of ours at each call would take ten times as long as what it counts
    counter.enable()
    try:
        call()
    finally:
        counter.disable()
        sys.setprofile(before)
    code = None if of is None else of.__code__  # type: ignore[attr-defined]
    return sum(entry.callcount for entry in counter.getstats() if code in (None, entry.code))
