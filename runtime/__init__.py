"""Find the right kernel in a bundle and launch it: no tuning, no JIT, no compiler, nothing at import.

    from pretuned.runtime import grouped_gemm
    y = grouped_gemm(x, w, m_sizes)     # x [M, K], w [E, N, K], m_sizes [E] -> y [M, N]

Everything is imported when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .activation import activate
    from .explanation import Explanation, explain, fingerprint
    from .gemms import grouped_gemm_dW, grouped_gemm_dX
    from .jit import allow_jit, register_compiler
    from .moe import moe_mlp, sort_routing
    from .ops import grouped_gemm, reload
    from .tuner import register_tuner
    from .warmup import Preloaded, preload

# name -> module; no name is a module's own, or importing that module would hide it.
_PUBLIC = {
    "Explanation": "explanation",
    "Preloaded": "warmup",
    "activate": "activation",
    "allow_jit": "jit",
    "explain": "explanation",
    "fingerprint": "explanation",
    "grouped_gemm": "ops",
    "grouped_gemm_dW": "gemms",
    "grouped_gemm_dX": "gemms",
    "moe_mlp": "moe",
    "preload": "warmup",
    "register_compiler": "jit",
    "register_tuner": "tuner",
    "reload": "ops",
    "sort_routing": "moe",
}

__all__ = [
    "Explanation",
    "Preloaded",
    "activate",
    "allow_jit",
    "explain",
    "fingerprint",
    "grouped_gemm",
    "grouped_gemm_dW",
    "grouped_gemm_dX",
    "moe_mlp",
    "preload",
    "register_compiler",
    "register_tuner",
    "reload",
    "sort_routing",
]


def __getattr__(name: str) -> object:
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f".{module}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
