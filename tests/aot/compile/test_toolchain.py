"""Which Tritons compile, and what."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pretuned.aot.compile import toolchain
from pretuned.artifacts.errors import HostError
from pretuned.artifacts.records.precision import DType
from pretuned.artifacts.records.problem import Op, RowOp
from pretuned.kernels.contract.config import Config, Loads, Schedule
from pretuned.kernels.contract.rowops import RowOpSpec
from pretuned.kernels.contract.spec import Spec

PLAIN = Spec(Op.FORWARD, DType.BF16, Config(64, 128, 32, 4, 3))
PASS = RowOpSpec(RowOp.GATHER, DType.BF16)
SPECIALISED = Spec(Op.FORWARD, DType.BF16, Config(128, 256, 64, 8, 4, loads=Loads.TMA, schedule=Schedule.COOPERATIVE))


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Has a Triton of a version installed, with an assembler that says its own."""
    tool = tmp_path / "backends" / "nvidia" / "bin" / "ptxas"
    tool.parent.mkdir(parents=True)
    tool.write_text("#!/bin/sh\necho Cuda compilation tools, release 12.8, V12.8.93\n")
    tool.chmod(0o755)
    monkeypatch.setattr(toolchain, "triton_folder", lambda: tmp_path)
    for name in ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"):
        monkeypatch.delenv(name, raising=False)

    def install(version: str) -> None:
        (tmp_path / "__init__.py").write_text(f'"""Triton."""\n__version__ = "{version}"\n')
        toolchain.toolchain.cache_clear()

    yield install
    toolchain.toolchain.cache_clear()


@pytest.mark.parametrize("version", ["3.2.0", "3.3.1", "3.5.0", "3.5.1", "3.10.0", "4.0.0", "2.3.1"])
def test_a_triton_that_nobody_judged_compiles_nothing(installed: Callable[[str], None], version: str) -> None:
    installed(version)
    with pytest.raises(HostError, match=rf"Triton {version} is installed, and pretuned knows of 3\.6\.0 to 3\.9\.0"):
        toolchain.toolchain()
    for spec in (PLAIN, PASS, SPECIALISED):
        assert version in str(toolchain.unable(spec))


@pytest.mark.parametrize("version", ["3.6.0", "3.7.0", "3.8.0", "3.9.0", "3.9.1", "3.6.0+git1a2b3c4d"])
def test_plain_kernels_alone(installed: Callable[[str], None], version: str) -> None:
    installed(version)
    assert toolchain.toolchain().triton == version
    assert toolchain.unable(PLAIN) is None
    assert toolchain.unable(PASS) is None
    assert toolchain.unable(SPECIALISED) == (
        f"warp-specialised kernels are compiled with Triton 3.7.1 alone, this is {version}"
    )


@pytest.mark.parametrize("version", ["3.7.1", "3.7.2", "3.7.1+cu130"])
def test_all_kernels(installed: Callable[[str], None], version: str) -> None:
    installed(version)
    assert [toolchain.unable(spec) for spec in (PLAIN, PASS, SPECIALISED)] == [None, None, None]
