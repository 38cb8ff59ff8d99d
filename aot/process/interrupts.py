"""Let Ctrl-C, a plain kill and a closed terminal end a command once, with time to tidy up."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_came = False


def interrupted() -> bool:
    """True if ``tidy_interrupts`` has raised: importing native code or a ``__del__`` may lose the KeyboardInterrupt."""
    return _came


@contextlib.contextmanager
def tidy_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt at the first of these signals, and ignore later ones, which would stop the tidying.

    A signal that the caller ignores (nohup, a background job) stays ignored. For the main thread.
    """
    before = {number: handler for number in _SIGNALS if (handler := signal.getsignal(number)) != signal.SIG_IGN}

    def interrupt(number: int, frame: FrameType | None) -> None:
        global _came
        _came = True
        for other in before:
            signal.signal(other, signal.SIG_IGN)
        before.clear()  # the signals stay ignored until the process ends
        raise KeyboardInterrupt

    for number in before:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
