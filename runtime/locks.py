"""Locks that a child of ``fork`` finds free: whoever held one is a thread that the child does not have."""

from __future__ import annotations

import functools
import os
import threading
from contextlib import AbstractContextManager

_locks: dict[str, AbstractContextManager[object]] = {}


def lock(name: str) -> AbstractContextManager[object]:
    """The process's lock of this name, which its holder may take again; a child of ``fork`` has one of its own.

    Ask for it each time: a lock that is kept is the parent's. What it guards has to be whole after every single step.
    """
    _free_in_children()
    return _locks.get(name) or _locks.setdefault(name, threading.RLock())


@functools.cache
def _free_in_children() -> None:
    # (Forgotten, not released: where the child's own thread holds one, it releases the very lock that it took.)
    os.register_at_fork(after_in_child=_locks.clear)
