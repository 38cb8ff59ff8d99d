"""pretuned: MoE grouped GEMM that starts instantly. What it has is in ``pretuned.runtime`` and ``pretuned.aot``."""

from __future__ import annotations


def __getattr__(name: str) -> object:
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import version

    return version("pretuned")
