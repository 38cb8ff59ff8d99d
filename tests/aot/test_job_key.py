from __future__ import annotations

import os
import subprocess
import sys
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


DIGEST = """
import hashlib
from pretuned.aot.compile import compile_variant
from pretuned.artifacts.types import DType, Op
from pretuned.kernels.abi import Spec
from pretuned.kernels.config import Config
config = Config(64, 64, 64, 4, 2, tma=True)  # on wgmma
print(hashlib.sha256(compile_variant(Spec(Op.FORWARD, DType.BF16, config), 90).cubin).hexdigest())
"""


def compiled_with(**environment: str) -> str:
    """In a process of its own: some variables are read once, when Triton is imported."""
    done = subprocess.run(
        [sys.executable, "-c", DIGEST], env=os.environ | environment, capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.fixture(scope="module")
def clean() -> str:
    return compiled_with()


@pytest.mark.parametrize(
    ("name", "value"),
    [("DISABLE_LLVM_OPT", "1"), ("DISABLE_PTXAS_OPT", "1"), ("DISABLE_MMA_V3", "1"), ("PTXAS_OPTIONS", "-O0")],
)
def test_what_a_debugger_sets_for_triton_changes_no_code(name: str, value: str, clean: str) -> None:
    """It is in no job's name: what it made would be every later build's."""
    assert compiled_with(**{name: value}) == clean
