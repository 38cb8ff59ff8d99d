"""Locks that a child of ``fork`` finds free: whoever held one is a thread that the child does not have."""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

_IMPORTED = ("pretuned", "msgpack", "filelock")  # what is imported late here, by a first call or look
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


def _forget_imports() -> None:
    """Have the child import anew what another thread was importing for us: it would wait for good for the end of that.

    (Python has a lock for each module that is being imported, in a table of its own. A module that stands half in
    ``sys.modules`` is whole for nobody yet.)
    """
    locks: dict[str, Callable[[], Any]] = getattr(getattr(importlib, "_bootstrap", None), "_module_locks", {})
    for name, find in list(locks.items()):
        owner = getattr(find(), "owner", None)
        if name.partition(".")[0] in _IMPORTED and owner not in (None, threading.get_ident()):
            del locks[name]
            sys.modules.pop(name, None)


# (Locks are forgotten, not released: where the child's own thread holds one, it releases the very lock that it took.)
at_fork(_locks.clear)
at_fork(_forget_imports)
