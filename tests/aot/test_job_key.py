from __future__ import annotations

from typing import Any

import pytest

from pretuned.aot.compile import compile_variant, job_key
from pretuned.artifacts.types import DType, Op
from pretuned.kernels import abi
from pretuned.kernels.abi import Spec
from pretuned.kernels.config import Config

SPEC = Spec(Op.FORWARD, DType.BF16, Config(128, 128, 64, 8, 6, tma=True, specialized=True))


@pytest.mark.parametrize("name", ["constants", "boxes", "divisibility"])
def test_what_the_compiler_is_told_is_in_the_name_of_a_cached_cubin(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No kernel's source changes with it, so a cubin of before would be taken for one of now."""
    before, told = job_key(SPEC, 90), getattr(abi, name)

    def other(*given: Any) -> dict[str, Any]:
        return {**told(*given), "SLOTS": 7}

    assert job_key(SPEC, 90) == before
    monkeypatch.setattr(abi, name, other)
    assert job_key(SPEC, 90) != before


@pytest.mark.parametrize("name", ["DISABLE_LLVM_OPT", "DISABLE_PTXAS_OPT", "PTXAS_OPTIONS", "DISABLE_MMA_V3"])
def test_what_a_debugger_sets_for_triton_changes_no_code(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in no job's name: what it made would be every later build's."""
    small = Spec(Op.FORWARD, DType.BF16, Config(64, 64, 64, 4, 2, tma=True))  # on wgmma
    before = compile_variant(small, 90).cubin
    monkeypatch.setenv(name, "-O1" if name == "PTXAS_OPTIONS" else "1")
    assert compile_variant(small, 90).cubin == before
