"""The last resort where no bundle can run a call: code compiled now, if the user allows it.

The runtime holds no compiler: ``pretuned.aot`` registers one when it is imported, as it does its tuner.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Protocol

from ..artifacts.errors import BundleError, CompileError, HostError, InputError
from ..artifacts.files.bundle_file import BundleFile, open_bytes
from ..artifacts.records.precision import DType
from ..artifacts.records.problem import Fusion, Layout, Op, Problem
from ..kernels.contract.spec import MAX_EXPERTS
from .locks import lock

if TYPE_CHECKING:  # pretuned.aot imports this, and must not wait for torch
    from .device import LocalGpu

_log = logging.getLogger(__name__)
_compiler: Compiler | None = None
_allowed = False
# By what one compilation serves; a failure is kept as its reason, so that it is not tried again.
_made: dict[_Kind, BundleFile | str] = {}

_Kind = tuple[Op, DType, Layout, Fusion, bool, int]


class Compiler(Protocol):
    """Compiles, for one kind of problem and one capability, variants that run any N, K and M."""

    def __call__(self, problem: Problem, sm: int) -> bytes:
        """An encoded bundle. CompileError or HostError where it can't be made."""


def register_compiler(compiler: Compiler | None) -> None:
    """Make ``allow_jit`` use ``compiler``; None takes it out. ``pretuned.aot`` registers its own when imported."""
    global _compiler
    _compiler = compiler


def allow_jit(allowed: bool = True) -> None:
    """Let Triton compile, when it is needed, what no bundle has; without this, torch runs such calls.

    Some seconds, once for each op, dtype, layout and form; the code is launched as a bundle's is, and the next
    process finds it in the compile cache. Never in a graph capture: there torch runs, as it does without this.

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
    from . import ops

    ops.reload()  # what fell to torch is decided anew


def jit_allowed() -> bool:
    """Whether ``allow_jit`` was called."""
    return _allowed


def would_compile(problem: Problem, local: LocalGpu) -> bool:
    """Whether a call that no bundle can run would be compiled, rather than run by torch."""
    return _allowed and not isinstance(_made.get(_kind(problem, local)), str)


def compiled(problem: Problem, local: LocalGpu) -> BundleFile | str:
    """What the compiler makes for problems of this kind, made now if it was not yet; or why there is nothing."""
    kind = _kind(problem, local)
    with lock("compiling"):
        found = _made.get(kind)
        if found is None:
            found = _made[kind] = _compile(problem, local)
    return found


def forget() -> None:
    """Forget what was compiled; what is in use stays open."""
    with lock("compiling"):
        _made.clear()


def _kind(problem: Problem, local: LocalGpu) -> _Kind:
    return (problem.op, problem.dtype, problem.layout, problem.fusion, problem.E > MAX_EXPERTS, local.sm)


def _compile(problem: Problem, local: LocalGpu) -> BundleFile | str:
    compiler = _compiler
    if compiler is None:
        return "no compiler is registered"
    _log.warning("pretuned: no bundle can run %s on %s; compiling it now with Triton", problem, local.gpu.name)
    begun = time.perf_counter()
    try:
        bundle = open_bytes(compiler(problem, local.sm), "compiled now")
    except (CompileError, HostError, BundleError) as error:
        _log.warning("pretuned: it could not be compiled: %s", error)
        return f"it could not be compiled: {error}"
    _log.info("pretuned: %d variants compiled in %.1f s", bundle.variant_count, time.perf_counter() - begun)
    return bundle
