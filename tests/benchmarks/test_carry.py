"""Packing an engine for a machine that fetches nothing, and laying it out there."""

from __future__ import annotations

import re
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from fatbins import CUBIN, element, module


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    from benchmarks.peers import carry

    return carry


@pytest.fixture
def extension() -> bytes:
    from benchmarks.peers import fatbin

    return module(
        [element(fatbin, CUBIN, sm, b"kernel %d" % sm * 400) for sm in (80, 90, 100)],
        [element(fatbin, CUBIN, 90, b"_Z19paged_attention_v1E" * 40)],
    )


def test_it_comes_back_without_what_stays_behind(tool: ModuleType, tmp_path: Path, extension: bytes) -> None:
    from benchmarks.peers import fatbin

    wheel, packages = tmp_path / "vllm-0.20.2-cp38-abi3-any.whl", tmp_path / "site"
    with zipfile.ZipFile(wheel, "w") as archive_file:
        archive_file.writestr("vllm/__init__.py", "import one")
        archive_file.writestr("vllm/_C.abi3.so", extension)
        archive_file.writestr("vllm/cumem_allocator.abi3.so", b"\x7fELF\x02\x01".ljust(64, b"\0") + b"no code of a GPU")
        archive_file.writestr("vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so", extension)
    (packages / "one" / "__pycache__").mkdir(parents=True)
    (packages / "one" / "__init__.py").write_text("1")
    (packages / "one" / "__pycache__" / "x.pyc").write_text("")
    out, there = tmp_path / "vllm.tar.xz", tmp_path / "there"
    assert tool.main(["pack", "--wheels", str(wheel), "--packages", str(packages), "--out", str(out)]) == 0
    with tarfile.open(out) as archive:
        assert not [name for name in archive.getnames() if "flash" in name or "pyc" in name]
    assert tool.main(["unpack", str(out), "--to", str(there)]) == 0
    assert sorted(str(path.relative_to(there)) for path in there.rglob("*") if path.is_file()) == [
        "libzstd.so.1",
        "packages/one/__init__.py",
        "vllm/_C.abi3.so",
        "vllm/__init__.py",
        "vllm/cumem_allocator.abi3.so",
    ]
    back = (there / "vllm/_C.abi3.so").read_bytes()
    zstd = fatbin.Zstd()
    payloads = [
        [element.unpressed(zstd).payload for element in fatbin.elements(back, at)] for at in fatbin.containers(back)
    ]
    assert payloads == [[b"kernel 90" * 400], []]
    assert len(back) == len(extension)


def test_rules_are_of_names_that_can_be(tool: ModuleType) -> None:
    for rule in (*tool.RULES.values(), tool.OTHERS):
        assert not re.compile(rule.kernels).search(b"")  # nothing stays behind unasked
    marlin = b"_INTERNAL_cb4f5890_37_sm80_kernel_bfloat16_u4b8_bfloat16_cu_f128ea80"
    kernels = re.compile(tool.RULES["vllm"].kernels)
    assert not kernels.search(marlin)
    assert not kernels.search(marlin.replace(b"u4b8", b"u4"))  # with zero points
    assert kernels.search(marlin.replace(b"bfloat16", b"float16"))


def test_what_is_not_there_is_reported(tool: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        tool.main(["unpack", str(tmp_path / "none.tar.xz"), "--to", str(tmp_path)])
    assert ended.value.code == 2
    assert "none.tar.xz is not there" in capsys.readouterr().err
