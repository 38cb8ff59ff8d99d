"""Locks that a child of ``fork`` finds free: whoever held one is a thread that the child does not have."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

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
    at_fork(before=_end_imports, after_in_child=_locks.clear)


def at_fork(**what: Callable[[], object]) -> None:
    """``os.register_at_fork``, where there is one: Windows forks nothing."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(**what)


def _end_imports() -> None:
    """Wait for what other threads import of ours: a child would wait for good for an import that nobody goes on with.

    (Python has a lock for each module that is being imported, in a table of its own.)
    """
    python: Any = getattr(importlib, "_bootstrap", None)
    locks: dict[str, Callable[[], Any]] = getattr(python, "_module_locks", {})
    here = threading.get_ident()

    def by_others() -> list[str]:
        ours = {name: find() for name, find in list(locks.items()) if name.startswith("pretuned.")}
        return [name for name, one in ours.items() if getattr(one, "owner", None) not in (None, here)]

    with contextlib.suppress(RuntimeError):  # one of them waits for an import of this thread, in which it forks
        while names := by_others():
            for name in names:
                with python._ModuleLockManager(name):
                    pass
