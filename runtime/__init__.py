"""Find the right kernel in a bundle and launch it: no tuning, no JIT, no compiler, nothing at import.

    from pretuned.runtime import grouped_gemm
    y = grouped_gemm(x, w, m_sizes)     # x [M, K], w [E, N, K], m_sizes [E] -> y [M, N]

Everything is imported when it is first used.
"""

from __future__ import annotations

import importlib

TYPE_CHECKING = False  # type checkers read it as typing.TYPE_CHECKING; importing typing takes too long

if TYPE_CHECKING:
    from ..kernels.activations import Activation
    from .api.expert_weights import ExpertWeights
    from .api.experts import experts_mlp
    from .api.gradients import grouped_gemm_dW, grouped_gemm_dX
    from .api.grouped_gemm import grouped_gemm
    from .api.moe import moe_mlp
    from .api.routing import sort_routing
    from .hooks import allow_jit, batch_invariant, register_compiler, register_tuner, reload
    from .inspect.explain import explain, fingerprint
    from .inspect.explanation import Explanation
    from .inspect.preload import Preloaded, preload
    from .ops.activation import activate
    from .ops.fp8_weights import reuse_fp8_weights
    from .ops.low_rank import Lora
    from .weights.quantized_rows import QuantizedRows

# Public name -> module. No public name may be a submodule's name: importing the submodule would replace it.
_PUBLIC = {
    "Activation": ".kernels.activations",
    "ExpertWeights": "api.expert_weights",
    "Explanation": "inspect.explanation",
    "Lora": "ops.low_rank",
    "Preloaded": "inspect.preload",
    "QuantizedRows": "weights.quantized_rows",
    "activate": "ops.activation",
    "allow_jit": "hooks",
    "batch_invariant": "hooks",
    "experts_mlp": "api.experts",
    "explain": "inspect.explain",
    "fingerprint": "inspect.explain",
    "grouped_gemm": "api.grouped_gemm",
    "grouped_gemm_dW": "api.gradients",
    "grouped_gemm_dX": "api.gradients",
    "moe_mlp": "api.moe",
    "preload": "inspect.preload",
    "register_compiler": "hooks",
    "register_tuner": "hooks",
    "reload": "hooks",
    "reuse_fp8_weights": "ops.fp8_weights",
    "sort_routing": "api.routing",
}

__all__ = [
    "Activation",
    "ExpertWeights",
    "Explanation",
    "Lora",
    "Preloaded",
    "QuantizedRows",
    "activate",
    "allow_jit",
    "batch_invariant",
    "experts_mlp",
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
    "reuse_fp8_weights",
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
