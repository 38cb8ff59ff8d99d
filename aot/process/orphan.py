"""A parent that was killed stops nobody and tidies nothing: the processes that it started do."""

from __future__ import annotations

import os
import signal
import threading
import time
from multiprocessing import connection
from pathlib import Path

from .scratch import remove_tree

_TIDYING_S = 3.0  # what a process without its parent takes at most to remove what was left


def end_with_parent(sentinel: int, scratch: Path) -> None:
    """End this process and its group when its parent has ended, and remove ``scratch``; for the main thread.

    ``sentinel`` is the reading end of a pipe whose other end the parent alone holds. In the main thread, which is
    thus no longer at work there: Triton makes the folder again where it is gone.
    """
    signal.signal(signal.SIGURG, lambda number, frame: _tidy(scratch))  # one that LLVM does not take for itself
    threading.Thread(target=_wait, args=(sentinel, scratch), daemon=True).start()


def _wait(sentinel: int, scratch: Path) -> None:
    connection.wait([sentinel])
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGURG)
    time.sleep(2 * _TIDYING_S)
    _tidy(scratch)  # the main thread is in foreign code that does not come back


def _tidy(scratch: Path) -> None:
    """Remove what was left, and end."""
    end = time.monotonic() + _TIDYING_S
    remove_tree(scratch)
    while scratch.exists() and time.monotonic() < end:  # another process was writing there
        time.sleep(0.02)
        remove_tree(scratch)
    os.killpg(0, signal.SIGKILL)
