"""A libcuda.so.1 that is no driver: what is said of it, in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = """
int cuInit(unsigned flags) { return 34; }
%s
"""


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that finds a stub as the CUDA toolkit has it: every call returns 34."""
    from pretuned.runtime.driver.cuda import _PROTOTYPES

    folder = tmp_path_factory.mktemp("stubs")
    calls = "\n".join(f"int {name}() {{ return 34; }}" for name in _PROTOTYPES if name != "cuInit")
    (folder / "stub.c").write_text(SOURCE % calls)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "libcuda.so.1", folder / "stub.c"], check=True)
    return {**os.environ, "LD_LIBRARY_PATH": str(folder)}


def test_the_doctor_names_a_stub(stub: dict[str, str]) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "pretuned.runtime"], env=stub, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "libcuda.so.1 that was found is a stub" in ended.stdout
    assert "LD_LIBRARY_PATH" in ended.stdout


def test_a_build_for_this_machine_names_a_stub(stub: dict[str, str], tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "pretuned.aot", "plan", "--models", "shape:E=8,H=256,I=128,k=2"],
        env=stub, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 1
    assert "libcuda.so.1 that was found is a stub" in ended.stderr
