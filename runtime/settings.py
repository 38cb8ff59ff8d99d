"""The environment variables, read once, at first use; and the process's locks.

No variable switches off the checks of signatures and of who owns a file.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from ..artifacts.tuples import NamedTuple

BATCH_INVARIANT = "PRETUNED_BATCH_INVARIANT"
BUNDLES = "PRETUNED_BUNDLES"
DISABLE_AUTOTUNE = "PRETUNED_DISABLE_AUTOTUNE"
DISABLE_SELF_TEST = "PRETUNED_DISABLE_SELF_TEST"
UNSLOTH_DISABLE_AUTOTUNE = "UNSLOTH_MOE_DISABLE_AUTOTUNE"  # read, too: code for Unsloth's kernels sets it
STRICT = "PRETUNED_STRICT"
TRUSTED_KEYS = "PRETUNED_TRUSTED_KEYS"

_QUANTIZE_X = "quantize_x"  # a value of PRETUNED_BATCH_INVARIANT; the other is 1

_log = logging.getLogger(__name__)
_settings: Settings | None = None
_locks: dict[str, AbstractContextManager[object]] = {}


def lock(name: str) -> AbstractContextManager[object]:
    """The process's reentrant lock of this name; a child of ``fork`` gets a new lock.

    Call this for each use: after a fork, a stored lock is still the parent's. The guarded state must be consistent
    after every single step, as a fork may come between two. Python's import locks are not renewed: a process that
    forks while another of its threads is in its first call may leave a child that waits forever
    (docs/runtime/runtime.md says what to do).
    """
    return _locks.get(name) or _locks.setdefault(name, threading.RLock())


def at_fork(in_child: Callable[[], object]) -> None:
    """Have a child of ``fork`` call ``in_child`` first. On Windows, which has no ``fork``, do nothing."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=in_child)


# Locks are forgotten, not released: if the forking thread holds a lock, the child's thread releases that lock itself.
at_fork(_locks.clear)


class Invariance(NamedTuple):
    """The batch-invariant mode: all calls of a problem run variants that sum in one order, whatever their rows.

    For fp8 weights whose checkpoint asks for quantised x, ``quantize_x`` says whether all products or none quantise x.
    """

    quantize_x: bool = False

    def __str__(self) -> str:
        return f"batch-invariant, fp8's x is {'always' if self.quantize_x else 'never'} quantised"


class Settings(NamedTuple):
    """The settings that the environment variables give.

    ``bundles`` are the entries of PRETUNED_BUNDLES in order; ``overlay`` is the user's own directory of
    bundles, or None if there is no HOME to put it in. ``trusted_keys`` is a directory of public keys: a
    bundle that is not pretuned's own must then be signed by one.
    """

    bundles: tuple[Path, ...] = ()
    disable_autotune: bool = False
    disable_self_test: bool = False
    strict: bool = False
    overlay: Path | None = None
    trusted_keys: Path | None = None
    invariance: Invariance | None = None

    @property
    def on_demand(self) -> bool:
        """True if this process may tune and compile; False if all code must be signed."""
        return not self.disable_autotune and self.trusted_keys is None

    @property
    def records(self) -> Path | None:
        """The overlay, as the directory of unsigned test results and configs; None if all files must be signed."""
        return self.overlay if self.trusted_keys is None else None


def settings() -> Settings:
    """The process's settings: the environment as it was at first use, or at the last ``reload()``."""
    global _settings
    current = _settings
    if current is None:
        with lock("settings"):
            current = _settings = _settings or read(os.environ)
    return current


def forget() -> None:
    """Have the next ``settings()`` read the environment again."""
    global _settings
    with lock("settings"):
        _settings = None


def read(environ: Mapping[str, str]) -> Settings:
    """Return the settings that the variables of ``environ`` give."""
    entries = environ.get(BUNDLES, "").split(":")
    keys = environ.get(TRUSTED_KEYS, "")
    return Settings(
        bundles=tuple(_path(entry) for entry in entries if entry),
        disable_autotune=_switch(environ, DISABLE_AUTOTUNE) or _switch(environ, UNSLOTH_DISABLE_AUTOTUNE),
        disable_self_test=_switch(environ, DISABLE_SELF_TEST),
        strict=_switch(environ, STRICT),
        overlay=_overlay(environ),
        trusted_keys=_path(keys) if keys else None,
        invariance=_invariance(environ),
    )


def _path(entry: str) -> Path:
    """Expand ``~`` and ``~user``: a shell expands only the first entry of a list, and nothing in quotes."""
    try:
        return Path(entry).expanduser()
    except RuntimeError:  # no such user, or no home: opening the path reports it
        return Path(entry)


def _invariance(environ: Mapping[str, str]) -> Invariance | None:
    if environ.get(BATCH_INVARIANT, "").strip().lower() == _QUANTIZE_X:
        return Invariance(quantize_x=True)
    return Invariance() if _switch(environ, BATCH_INVARIANT) else None


def _switch(environ: Mapping[str, str], name: str) -> bool:
    """True if a switch is on. Unknown values count as on, because all switches make pretuned do less."""
    value = environ.get(name, "")
    if value.strip().lower() in ("", "0", "false"):
        return False
    if value.strip().lower() not in ("1", "true"):
        _log.warning("%s=%r is neither 1, true, 0, false nor empty: taken as 1. Set it to 1 or 0.", name, value[:60])
    return True


def _overlay(environ: Mapping[str, str]) -> Path | None:
    cache, home = environ.get("XDG_CACHE_HOME", ""), environ.get("HOME", "")
    if cache.startswith("/"):  # the XDG specification: a relative path is to be ignored
        return Path(cache) / "pretuned"
    return Path(home) / ".cache" / "pretuned" if home.startswith("/") else None
