"""Locks that are free in a child of ``fork``: the thread that held one does not exist there.

Python's own locks of modules that are being imported are no such locks: a process that forks while another of its
threads is in its first call may leave a child that waits for good (docs/runtime/runtime.md says what to do).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

_locks: dict[str, AbstractContextManager[object]] = {}


def lock(name: str) -> AbstractContextManager[object]:
    """The process's lock of this name, which its holder may take again; a child of ``fork`` has one of its own.

    Ask for it each time: a lock that is kept is the parent's. What it guards has to be whole after every single step.
    """
    return _locks.get(name) or _locks.setdefault(name, threading.RLock())


def at_fork(in_child: Callable[[], object]) -> None:
    """Have a child of ``fork`` call this first, where there is such a thing: Windows forks nothing."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=in_child)


# (Locks are forgotten, not released: where the child's own thread holds one, it releases the very lock that it took.)
at_fork(_locks.clear)
