"""Everything slow or offline: build, compile, measure, tune.

    from pretuned.aot import get_or_autotune_moe_kernels

Importing this package gives the runtime a compiler and a tuner (runtime/hooks.py). Its modules are imported when they
are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..artifacts.records import Problem
    from .demand.api import cache_key, clear_cache, get_or_autotune_moe_kernels, load_cached_config, save_cached_config

__all__ = ["cache_key", "clear_cache", "get_or_autotune_moe_kernels", "load_cached_config", "save_cached_config"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(".demand.api", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _compile(problem: Problem, sm: int) -> bytes:
    from .demand.worker import compile_in_child

    return compile_in_child(problem, sm)


def _tune(problems: tuple[Problem, ...], M: int, device: int) -> None:
    from .demand.api import tune_call

    tune_call(problems, M, device)


def _register() -> None:
    from ..runtime.hooks import register_compiler, register_tuner

    register_compiler(_compile)
    register_tuner(_tune)


if __name__.startswith("pretuned."):  # else it runs from a checkout, uninstalled: see __main__
    _register()
