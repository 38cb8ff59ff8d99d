"""Which Tritons compile, and what."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pretuned.aot.compile import toolchain
from pretuned.artifacts.errors import HostError
from pretuned.artifacts.records import DType, Op, RowOp
from pretuned.kernels import rowops
from pretuned.kernels.arch import supported
from pretuned.kernels.rowops import RowOpSpec
from pretuned.kernels.spec import Config, Loads, Schedule, Spec, TileRows

PLAIN = Spec(Op.FORWARD, DType.BF16, Config(64, 128, 32, 4, 3))
PASS = RowOpSpec(RowOp.GATHER, DType.BF16)
IN_TURNS = Config(128, 192, 64, 8, 5, loads=Loads.TMA, schedule=Schedule.PINGPONG)
OF_ZERO_POINTS = Spec(
    Op.FORWARD,
    DType.INT4_G128_ZP,
    Config(64, 128, 128, 8, 2, loads=Loads.TMA, schedule=Schedule.W4A16, rows=TileRows.FITTED),
)
OF_192 = (
    Spec(Op.DX, DType.BF16, IN_TURNS),
    Spec(Op.FORWARD, DType.FP16, IN_TURNS._replace(block_m=192, block_n=128, rows=TileRows.FITTED)),
    Spec(Op.DW, DType.BF16, IN_TURNS._replace(block_m=32, block_n=128, block_k=192, num_stages=10)),
)
SPECIALISED = Spec(Op.FORWARD, DType.BF16, Config(128, 256, 64, 8, 4, loads=Loads.TMA, schedule=Schedule.COOPERATIVE))


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Has a Triton of a version installed, with assemblers that say their own."""
    tools = tmp_path / "backends" / "nvidia" / "bin"
    tools.mkdir(parents=True)
    for name, release in (("ptxas", "12.9"), ("ptxas-blackwell", "13.4")):
        (tools / name).write_text(f"#!/bin/sh\necho Cuda compilation tools, release {release}, V{release}.1\n")
        (tools / name).chmod(0o755)
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, real=importlib.util.find_spec: (
            importlib.util.spec_from_file_location(name, tmp_path / "__init__.py") if name == "triton" else real(name)
        ),
    )
    for name in ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"):
        monkeypatch.delenv(name, raising=False)

    def install(version: str) -> None:
        (tmp_path / "__init__.py").write_text(f'"""Triton."""\n__version__ = "{version}"\n')
        toolchain.toolchain.cache_clear()

    yield install
    toolchain.toolchain.cache_clear()


@pytest.mark.parametrize("version", ["3.2.0", "3.3.1", "3.5.0", "3.5.1", "3.10.0", "4.0.0", "2.3.1"])
def test_a_triton_that_nobody_tested_compiles_nothing(installed: Callable[[str], None], version: str) -> None:
    installed(version)
    with pytest.raises(HostError, match=rf"Triton {version} is installed, and pretuned knows of 3\.6\.0 to 3\.9\.0"):
        toolchain.toolchain()
    for spec in (PLAIN, PASS, SPECIALISED):
        assert version in str(toolchain.unable(spec))


@pytest.mark.parametrize("version", ["3.6.0", "3.6.1", "3.6.0+git1a2b3c4d"])
def test_plain_kernels_alone(installed: Callable[[str], None], version: str) -> None:
    installed(version)
    assert toolchain.toolchain().triton == version
    assert toolchain.unable(PLAIN) is None
    assert toolchain.unable(PASS) is None
    assert toolchain.unable(SPECIALISED) == (
        f"warp-specialised kernels are compiled with Triton 3.7.0 to 3.9.0 alone, this is {version}"
    )
    for op in rowops.ALONG_M:  # in Gluon, too
        assert toolchain.unable(RowOpSpec(op, DType.BF16)) == (
            f"{op.value}'s kernels are compiled with Triton 3.7.0 to 3.9.0 alone, this is {version}"
        )


@pytest.mark.parametrize("version", ["3.8.0", "3.8.1"])
def test_all_but_tiles_of_192(installed: Callable[[str], None], version: str) -> None:
    installed(version)
    assert [toolchain.unable(spec) for spec in (PLAIN, PASS, SPECIALISED)] == [None, None, None]
    for spec in OF_192:
        assert toolchain.unable(spec) == (
            "warp-specialised kernels in tiles of 192 are compiled with Triton 3.7.0 to 3.9.0 but 3.8.0, "
            f"this is {version}"
        )


@pytest.mark.parametrize("version", ["3.8.0", "3.9.0"])
def test_all_but_zero_points(installed: Callable[[str], None], version: str) -> None:
    installed(version)
    assert toolchain.unable(OF_ZERO_POINTS._replace(dtype=DType.INT4_G128)) is None
    assert toolchain.unable(OF_ZERO_POINTS._replace(config=PLAIN.config)) is None
    assert toolchain.unable(OF_ZERO_POINTS) == (
        "warp-specialised kernels of weights with zero points are compiled with Triton 3.7.0 to 3.9.0 but 3.8.0 to "
        f"3.9.0, this is {version}"
    )


@pytest.mark.parametrize("version", ["3.9.0", "3.9.1"])
def test_all_tiles(installed: Callable[[str], None], version: str) -> None:
    installed(version)
    assert [toolchain.unable(spec) for spec in (PLAIN, PASS, SPECIALISED, *OF_192)] == [None] * 6


@pytest.mark.parametrize("version", ["3.7.0", "3.7.1", "3.7.2", "3.7.1+cu130"])
def test_all_kernels(installed: Callable[[str], None], version: str) -> None:
    installed(version)
    assert [toolchain.unable(spec) for spec in (PLAIN, PASS, SPECIALISED, *OF_192, OF_ZERO_POINTS)] == [None] * 7


@pytest.mark.parametrize(("version", "last"), [("3.6.0", 90), ("3.7.1", 90), ("3.8.0", 90), ("3.9.0", 89)])
def test_which_assembler_makes_a_capabilitys_code(installed: Callable[[str], None], version: str, last: int) -> None:
    """The driver version that a cubin needs depends on its assembler."""
    installed(version)
    tools = toolchain.toolchain()
    assert max(tools.first) == last
    assert {sm: tools.ptxas_for(sm) for sm in supported()} == {
        sm: "12.9" if sm <= last else "13.4" for sm in supported()
    }


def test_it_is_the_assembler_that_this_triton_takes() -> None:
    from triton.backends.nvidia.compiler import get_ptxas

    tools = toolchain.toolchain()
    for sm in supported():
        assert tools.ptxas_for(sm) in get_ptxas(sm).version
