"""Ctrl-C, a plain kill and a closed terminal end a command once, and let it tidy up."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_came = False


def interrupted() -> bool:
    """Whether ``tidy_interrupts`` has raised: native code that imports makes another error of a KeyboardInterrupt, and
    out of an object's ``__del__`` there comes none.
    """
    return _came


@contextlib.contextmanager
def tidy_interrupts() -> Iterator[None]:
    """The first of these signals raises KeyboardInterrupt; a second one would only stop the tidying, and is ignored.

    A signal that the caller ignores (nohup, a background job) stays ignored. For the main thread.
    """
    before = {number: handler for number in _SIGNALS if (handler := signal.getsignal(number)) != signal.SIG_IGN}

    def interrupt(number: int, frame: FrameType | None) -> None:
        global _came
        _came = True
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        before.clear()  # they stay ignored until the process has ended
        raise KeyboardInterrupt

    for number in before:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
