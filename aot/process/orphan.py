"""End processes whose parent was killed, and remove their files."""

from __future__ import annotations

import os
import signal
import threading
import time
from multiprocessing import connection
from pathlib import Path

from .scratch import remove_tree

_TIDYING_S = 3.0  # at most, to remove the files


def end_with_parent(sentinel: int, scratch: Path) -> None:
    """End this process and its group when its parent has ended, and remove ``scratch``; call it in the main thread.

    ``sentinel`` is the reading end of a pipe whose other end only the parent holds. The main thread itself removes the
    folder, so that it no longer works there: Triton would make the folder again.
    """
    signal.signal(signal.SIGURG, lambda number, frame: _tidy(scratch))  # a signal that LLVM does not use
    threading.Thread(target=_wait, args=(sentinel, scratch), daemon=True).start()


def _wait(sentinel: int, scratch: Path) -> None:
    connection.wait([sentinel])
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGURG)
    time.sleep(2 * _TIDYING_S)
    _tidy(scratch)  # the main thread is in foreign code that does not come back


def _tidy(scratch: Path) -> None:
    """Remove the scratch folder, and end."""
    end = time.monotonic() + _TIDYING_S
    remove_tree(scratch)
    while scratch.exists() and time.monotonic() < end:  # another process was writing there
        time.sleep(0.02)
        remove_tree(scratch)
    os.killpg(0, signal.SIGKILL)
