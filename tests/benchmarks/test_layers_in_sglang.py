"""SGLang's own layers beside the same with the plug-in: what is asked for, and what stands in for its extension."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    from benchmarks.peers import layers_in_sglang

    return layers_in_sglang


def test_what_is_asked_for(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    given = tool.arguments(["--json", "o.json", "--tokens", "1,16"])
    assert (given.kinds, given.tokens) == (list(tool.KINDS), [1, 16])
    for wrong, told in ((["--kinds", "fp3"], "'fp3' is none of bf16, fp8"), (["--sglang", "."], "no folder sglang")):
        with pytest.raises(SystemExit):
            tool.arguments(["--json", "o.json", *wrong])
        assert told in capsys.readouterr().err


def test_an_extension_for_another_torch_is_replaced(
    tool: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "sgl_kernel").mkdir()
    (tmp_path / "sgl_kernel" / "__init__.py").write_text("raise ImportError('undefined symbol')")
    (tmp_path / "sgl_kernel" / "scalar_type.py").write_text("import sys\nscalar_types = sys.modules[__name__].__name__")
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    assert tool.stand_in_for_sgl_kernel() is False
    found = importlib.import_module("sgl_kernel")
    assert callable(found.moe_sum_reduce)
    assert importlib.import_module("sgl_kernel.scalar_type").scalar_types == "sgl_kernel.scalar_type"
    with pytest.raises(NotImplementedError, match=f"sgl_kernel.silu_and_mul: .* torch {torch.__version__[:4]}"):
        found.silu_and_mul(torch.zeros(1))


@pytest.mark.slow
def test_a_process_that_fails_is_told(tool: ModuleType, tmp_path: Path) -> None:
    """(There is no SGLang in the folder.)"""
    (tmp_path / "sglang" / "srt").mkdir(parents=True)
    out = tmp_path / "cells.json"
    assert tool.main(["--sglang", str(tmp_path), "--json", str(out), "--kinds", "bf16,int4", "--tokens", "1"]) == 1
    cells = json.loads(out.read_text())["cells"]
    assert [one["kind"] for one in cells] == ["bf16", "int4"]
    assert all("sglang" in one["failed"]["all"] for one in cells)
