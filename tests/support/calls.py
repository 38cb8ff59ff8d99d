"""Which Python functions a piece of code calls: seen by the interpreter's profiler, nothing is replaced."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NamedTuple


class Call(NamedTuple):
    """A call of a function, with its arguments by name."""

    name: str
    arguments: dict[str, Any]


@contextlib.contextmanager
def calls_of(*functions: Callable[..., Any]) -> Iterator[list[Call]]:
    """The calls of these functions that this thread makes meanwhile, in order."""
    codes = {function.__code__: function.__name__ for function in functions}  # type: ignore[attr-defined]
    calls: list[Call] = []

    def look(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code in codes:
            calls.append(Call(codes[frame.f_code], dict(frame.f_locals)))
        if before is not None:
            before(frame, event, argument)

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        yield calls
    finally:
        sys.setprofile(before)
