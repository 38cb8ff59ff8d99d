"""The process's bundle sets, the compiler and tuner that are registered, and the functions that ``reload`` calls."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

from ..artifacts.errors import InputError
from ..artifacts.records import Problem
from . import settings

# (problems, M, device): makes sure that a choice measured on this GPU exists for the problems at M rows. If there is
# none, it tunes now, publishes the result, and calls ``reload`` so that the runtime reads it.
Tuner: TypeAlias = "Callable[[tuple[Problem, ...], int, int], None]"
# (problem, sm): compiles variants that run any N, K and M of a kind of problem. Returns an encoded bundle; CompileError
# or HostError if compiling fails.
Compiler: TypeAlias = "Callable[[Problem, int], bytes]"

snapshot: Any = None  # a ``dispatch.snapshot.Snapshot``; None before its first use and after a reload
blocks = False  # True once a ``within`` block was entered; until then ``current()`` is ``snapshot``
in_blocks: dict[Any, Any] = {}  # batch-invariant mode -> snapshot, for modes that only a ``within`` block uses
UNSAID = object()  # no ``within`` block sets a mode: the process's mode counts
_mode: contextvars.ContextVar[Any] = contextvars.ContextVar("pretuned.batch_invariant", default=UNSAID)
_tuner: Tuner | None = None
_compiler: Compiler | None = None
_allowed = False
_forget: list[Callable[[], None]] = []


def register_tuner(tuner: Tuner | None) -> None:
    """Make ``autotune=True`` call a tuner. ``pretuned.aot`` registers its own when it is imported.

    Parameters
    ----------
    tuner
        A function (problems, M, device) that tunes the problems for M rows on ``cuda:device``; None removes it.
    """
    global _tuner
    _tuner = tuner


def demand_tuner() -> Tuner | None:
    """The tuner that ``autotune=True`` asks for; None with PRETUNED_DISABLE_AUTOTUNE=1 or PRETUNED_TRUSTED_KEYS.

    Raises
    ------
    InputError
        if none is registered.
    """
    if not settings.settings().on_demand:
        return None
    if _tuner is None:
        raise InputError(
            "grouped_gemm: autotune=True and no tuner is registered. The runtime never tunes; import pretuned.aot "
            "(pip install 'pretuned[aot]') registers one, or leave autotune out"
        )
    return _tuner


def register_compiler(compiler: Compiler | None) -> None:
    """Make ``allow_jit`` use a compiler. ``pretuned.aot`` registers its own when it is imported.

    Parameters
    ----------
    compiler
        A function (problem, sm) that returns an encoded bundle; None removes the registered compiler.
    """
    global _compiler
    _compiler = compiler


def allow_jit(allowed: bool = True) -> None:
    """Let Triton compile kernels that no bundle has when a call needs them; without this, torch runs such calls.

    Compiling takes some seconds, once for each op, dtype, layout and fusion. The code is launched like a bundle's, and
    the next process finds it in the compile cache. Nothing is compiled in a graph capture: torch runs such calls.

    Parameters
    ----------
    allowed
        False forbids compiling again.

    Raises
    ------
    InputError
        if no compiler is registered.
    """
    global _allowed
    if allowed and _compiler is None:
        raise InputError(
            "allow_jit: no compiler is registered. The runtime never compiles; import pretuned.aot "
            "(pip install 'pretuned[aot]') registers one"
        )
    _allowed = allowed
    reload()  # calls that torch ran are decided again


def jit_allowed() -> bool:
    """True if ``allow_jit`` was called, and unsigned code is allowed."""
    return _allowed and settings.settings().trusted_keys is None


def compiler() -> Compiler | None:
    """Return the registered compiler."""
    return _compiler


@contextlib.contextmanager
def batch_invariant(enabled: bool = True, *, quantize_x: bool = False) -> Iterator[None]:
    """Run the calls of a ``with`` block so that a row's bits do not depend on the other rows of its batch.

    The block is this thread's, or this asyncio task's: a new thread has what PRETUNED_BATCH_INVARIANT says. A gradient
    is computed as its forward was, wherever ``backward`` is called.

    Parameters
    ----------
    enabled
        False chooses kernels freely in the block.
    quantize_x
        For fp8 weights whose checkpoint asks for quantised x: True quantises x in every product, False in none.

    Returns
    -------
    contextlib.AbstractContextManager
        The block's context, for ``with``.

    Raises
    ------
    InputError
        if ``enabled`` or ``quantize_x`` is not a bool.
    """
    for name, value in (("enabled", enabled), ("quantize_x", quantize_x)):
        if not isinstance(value, bool):
            raise InputError(f"batch_invariant: {name} is {value!r}, wanted True or False")
    with within(settings.Invariance(quantize_x) if enabled else None):
        yield


@contextlib.contextmanager
def within(invariance: Any) -> Iterator[None]:
    """Set this context's batch-invariant mode: a ``settings.Invariance``, None for off, UNSAID for the process's."""
    global blocks
    blocks = True
    before = _mode.set(invariance)
    try:
        yield
    finally:
        _mode.reset(before)


def said() -> Any:
    """The batch-invariant mode of the enclosing ``within`` block; ``UNSAID`` if ``settings.invariance`` counts."""
    return _mode.get()


def current() -> Any:
    """The snapshot for this context's calls: ``snapshot``, or a block's own for another mode. None before first use."""
    mode = said()
    if mode is UNSAID or (snapshot is not None and snapshot.invariance == mode):
        return snapshot
    return in_blocks.get(mode)


def on_reload(forget: Callable[[], None]) -> None:
    """Have ``reload`` call ``forget``, a function that must clear all that its module caches about bundles."""
    _forget.append(forget)


def reload() -> None:
    """Read the environment and the bundle search path again, to find bundles that were added since.

    Running calls finish with the bundles that they began with; loaded kernels stay loaded.
    """
    settings.forget()
    for forget in _forget:
        forget()
