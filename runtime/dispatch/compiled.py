"""The last resort if no bundle can run a call: code compiled now, if the user allows it (``hooks.allow_jit``).

The runtime has no compiler: ``pretuned.aot`` registers one when it is imported, as it registers its tuner.
"""

from __future__ import annotations

import logging
import time

from ...artifacts.bundle_file import BundleFile, open_bytes
from ...artifacts.errors import BundleError, CompileError, HostError
from ...artifacts.records import DType, Fusion, Layout, LocalGpu, Op, Problem
from ...kernels.spec import MAX_EXPERTS
from .. import hooks
from ..settings import lock

_log = logging.getLogger(__name__)
# By the kind of problem: the compiled bundle, or why compiling failed, so that it is not tried again.
_made: dict[_Kind, BundleFile | str] = {}

_Kind = tuple[Op, DType, Layout, Fusion, bool, int]


def would_compile(problem: Problem, local: LocalGpu) -> bool:
    """True if a call that no bundle can run is compiled, rather than run by torch."""
    return hooks.jit_allowed() and not isinstance(_made.get(_kind(problem, local)), str)


def compiled(problem: Problem, local: LocalGpu) -> BundleFile | str:
    """The compiled bundle for problems of this kind, compiled now if necessary; or why there is none."""
    kind = _kind(problem, local)
    with lock("compiling"):
        result = _made.get(kind)
        if result is None:
            result = _made[kind] = _compile(problem, local)
    return result


def forget() -> None:
    """Forget all compiled bundles; bundles in use stay open."""
    with lock("compiling"):
        _made.clear()


def _kind(problem: Problem, local: LocalGpu) -> _Kind:
    return (problem.op, problem.dtype, problem.layout, problem.fusion, problem.E > MAX_EXPERTS, local.sm)


def _compile(problem: Problem, local: LocalGpu) -> BundleFile | str:
    compiler = hooks.compiler()
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
