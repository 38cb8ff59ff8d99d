"""The compiler behind ``pretuned.runtime.allow_jit``: Triton in a child process, with the compile cache."""

from __future__ import annotations

from ...artifacts.errors import HostError
from ...artifacts.records.problem import Problem
from ..process import child

_TIMEOUT_S = 300.0


def compile_kind(problem: Problem, sm: int) -> bytes:
    """Compile a bundle whose variants run every problem of this kind; see ``pretuned.runtime.dispatch.compiled``.

    With PRETUNED_DISABLE_AUTOTUNE=1 nothing is written to the user's cache.

    Raises
    ------
    CompileError
        if nothing compiles.
    HostError
        if Triton is missing, or the machine can't run it.
    """
    from ...runtime.settings import settings
    from ..compile.cache import default_dir
    from ..plan.targets import SUPPORTED
    from . import worker

    if sm not in SUPPORTED:
        raise HostError(f"Triton compiles for sm_{', sm_'.join(map(str, SUPPORTED))}, not for sm_{sm}")
    cache = None if settings().disable_autotune else default_dir()
    arguments = {"problem": worker.plain(problem), "sm": sm, "cache": None if cache is None else str(cache)}
    return child.call(worker.compile_kind, arguments, timeout_s=_TIMEOUT_S, who="the compiler")
