from __future__ import annotations

from typing import Any

import pytest

from pretuned.aot.compile import job_key
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
