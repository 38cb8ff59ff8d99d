"""What Triton compiles for a variant: the text of each stage."""

from __future__ import annotations

from typing import Any

import pytest
import triton


def keep_compiled(patch: pytest.MonkeyPatch) -> list[Any]:
    """What Triton compiles from now on, in order: ``asm`` has each stage's text, after pretuned's rewrites."""
    kept: list[Any] = []
    compile_ = triton.compile

    def compiles(*given: Any, **how: Any) -> Any:
        kept.append(compile_(*given, **how))
        return kept[-1]

    patch.setattr(triton, "compile", compiles)
    return kept
