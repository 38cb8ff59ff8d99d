"""pretuned: MoE grouped GEMM with kernels that were tuned and compiled beforehand.

The names below are imported when they are first used, so ``import pretuned`` costs nothing. The whole runtime is
``pretuned.runtime``, the offline tool ``pretuned.aot``.
"""

from __future__ import annotations

TYPE_CHECKING = False  # type checkers take it for typing's, which takes longer to import than this module

if TYPE_CHECKING:
    from .runtime import Activation as Activation
    from .runtime import ExpertWeights as ExpertWeights
    from .runtime import Lora as Lora
    from .runtime import QuantizedRows as QuantizedRows
    from .runtime import batch_invariant as batch_invariant
    from .runtime import explain as explain
    from .runtime import grouped_gemm as grouped_gemm
    from .runtime import moe_mlp as moe_mlp
    from .runtime import preload as preload

    __version__: str

__all__ = [
    "Activation",
    "ExpertWeights",
    "Lora",
    "QuantizedRows",
    "__version__",
    "batch_invariant",
    "explain",
    "grouped_gemm",
    "moe_mlp",
    "preload",
]


def __getattr__(name: str) -> object:
    """Import an exported name on first use."""
    if name == "__version__":
        from importlib.metadata import version

        exported: object = version("pretuned")
    elif name in __all__:
        from . import runtime

        exported = getattr(runtime, name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = exported
    return exported


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
